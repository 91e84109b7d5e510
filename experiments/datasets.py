"""Training and test data of the experiments."""

from typing import NamedTuple, Optional

import numpy as np

from experiments import downloads
from tf_bdp import validation

NAMES = ('digits', 'mnist', 'aptos')
_DIGITS_TEST_SIZE = 297
# Tells this use of the seed from others.
_VALIDATION = 20


class Dataset(NamedTuple):
  """Examples and their classes.

  Attributes:
    train_features: [examples, ...]: images, or features of images.
    train_labels: [examples], int64.
    test_features: As those for training, but never augmented.
    test_labels: As those for training.
    train_versions: How many times each training image is there. The first
      examples / train_versions are the plain images; others follow in the same
      order, each time augmented in another way.
  """

  train_features: np.ndarray
  train_labels: np.ndarray
  test_features: np.ndarray
  test_labels: np.ndarray
  train_versions: int = 1


def load(name: str, data_dir: Optional[str] = None) -> Dataset:
  """Loads a data set.

  Args:
    name: 'digits': scikit-learn's 1,797 handwritten digits, which come with it.
      'mnist': MNIST from TensorFlow Datasets. Both are float32 in [0, 1], of
      shape [28, 28, 1]. 'aptos': the retina images of APTOS 2019, as bytes of
      shape [224, 224, 3]; see `features` for what a frozen network makes of
      them.
    data_dir: Where TensorFlow Datasets has its data, or puts them. For 'aptos',
      the folder with Kaggle's train.csv and train_images.

  Raises:
    ValueError: The data are not there and cannot be had.
  """
  validation.check_choice('dataset', name, NAMES)
  if name == 'digits':
    return _load_digits()
  if name == 'mnist':
    return _load_mnist(data_dir)
  return _load_aptos(data_dir)


def hold_out_validation(
  dataset: Dataset, validation_share: float, seed: int
) -> Dataset:
  """Sets training images aside, to choose hyper-parameters with.

  Each class gives the same share of its images. All versions of an image fall
  on the same side; of those set aside, the plain ones are kept.

  Args:
    dataset: The data.
    validation_share: How much to set aside, above 0 and below 1.
    seed: Of the choice.

  Returns:
    The rest for training, and what was set aside in the place of the test data,
    which are not in it.
  """
  if not 0 < validation_share < 1:
    raise ValueError(
      f'validation_share must be above 0 and below 1. Found {validation_share}.'
    )
  images = len(dataset.train_labels) // dataset.train_versions
  labels = dataset.train_labels[:images]
  generator = np.random.default_rng([seed, _VALIDATION])
  aside = np.zeros(images, bool)
  for label in np.unique(labels):
    members = generator.permutation(np.flatnonzero(labels == label))
    aside[members[: round(validation_share * len(members))]] = True
  if aside.all() or not aside.any():
    raise ValueError(
      f'validation_share={validation_share} of {images} images leaves '
      f'{np.count_nonzero(aside)} for validation and '
      f'{np.count_nonzero(~aside)} for training. Both must have some.'
    )
  stay = np.tile(~aside, dataset.train_versions)
  return Dataset(
    dataset.train_features[stay],
    dataset.train_labels[stay],
    dataset.train_features[:images][aside],
    labels[aside],
    dataset.train_versions,
  )


def _load_digits() -> Dataset:
  import tensorflow as tf
  from sklearn import datasets

  images, labels = datasets.load_digits(return_X_y=True)
  images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16.0
  images = tf.image.resize(images, (28, 28)).numpy()
  # Neighbours in the file were written by the same hand: mix them.
  order = np.random.default_rng(0).permutation(len(images))
  test, train = order[:_DIGITS_TEST_SIZE], order[_DIGITS_TEST_SIZE:]
  labels = labels.astype(np.int64)
  return Dataset(images[train], labels[train], images[test], labels[test])


def _load_mnist(data_dir: Optional[str]) -> Dataset:
  import tensorflow_datasets as tfds

  builder = tfds.builder('mnist', data_dir=data_dir)
  if not builder.data_path.exists():
    try:
      downloads.check_reachable(builder.URL)
      builder.download_and_prepare()
    except OSError as error:
      raise ValueError(
        f'MNIST is not in {builder.data_path} and could not be downloaded '
        f'({error}). Prepare it on a machine with internet access by '
        '`python -c "import tensorflow_datasets as tfds; '
        "tfds.load('mnist', data_dir='DIR')\"` and pass --data_dir=DIR."
      ) from error
  arrays = {}
  for split in ('train', 'test'):
    data = builder.as_dataset(split=split, batch_size=-1)
    images = np.asarray(data['image'], np.float32) / 255.0
    arrays[split] = images, np.asarray(data['label'], np.int64)
  return Dataset(*arrays['train'], *arrays['test'])


def _load_aptos(data_dir: Optional[str]) -> Dataset:
  from experiments import aptos

  train, test = aptos.list_images(data_dir)
  return Dataset(
    aptos.read_images(train), train.labels, aptos.read_images(test), test.labels
  )
