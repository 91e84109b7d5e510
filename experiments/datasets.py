"""Training and test data of the experiments, and their split over clients."""

import socket
import urllib.parse
import urllib.request
from typing import NamedTuple, Optional

import numpy as np

from tf_bdp.learning import federated_data

NAMES = ('digits', 'mnist')
_DIGITS_TEST_SIZE = 297


class Dataset(NamedTuple):
  """Images in [0, 1] of shape [28, 28, 1], and their classes."""

  train_features: np.ndarray
  train_labels: np.ndarray
  test_features: np.ndarray
  test_labels: np.ndarray


def load(name: str, data_dir: Optional[str] = None) -> Dataset:
  """Loads a data set.

  Args:
    name: 'digits': scikit-learn's 1,797 handwritten digits, which come with it.
      'mnist': MNIST from TensorFlow Datasets.
    data_dir: Where TensorFlow Datasets has its data, or puts them.

  Raises:
    ValueError: The data are not there and cannot be had.
  """
  if name == 'digits':
    return _load_digits()
  if name == 'mnist':
    return _load_mnist(data_dir)
  raise ValueError(f'dataset must be one of {NAMES}. Found {name!r}.')


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
      _check_reachable(builder.URL)
      builder.download_and_prepare()
    except OSError as error:
      raise ValueError(
        f'MNIST is not in {builder.data_path} and could not be downloaded '
        f'({error}). Prepare it on a machine with internet access by '
        '`python -c "import tensorflow_datasets as tfds; '
        "tfds.load('mnist', data_dir='DIR')\"` and pass --data_dir=DIR."
      ) from error
  arrays = []
  for split in ('train', 'test'):
    data = builder.as_dataset(split=split, batch_size=-1)
    arrays.append(np.asarray(data['image'], np.float32) / 255.0)
    arrays.append(np.asarray(data['label'], np.int64))
  return Dataset(*arrays)


def _check_reachable(url: str) -> None:
  """Raises OSError at once where a download would retry for minutes."""
  if not urllib.request.getproxies():
    host = urllib.parse.urlsplit(url).hostname
    with socket.create_connection((host, 443), timeout=10):
      pass


def split_iid(
  dataset: Dataset, clients: int, examples_per_client: int, seed: int
) -> federated_data.FederatedData:
  """Gives every client the same number of random examples.

  Where there are not enough, the data are used again, each pass over them in
  another order, as in the paper.

  Args:
    dataset: The data.
    clients: The number of clients.
    examples_per_client: How many each gets; 0 for an equal share of all.
    seed: Of the split.
  """
  size = len(dataset.train_labels)
  if examples_per_client == 0:
    examples_per_client = size // clients
  if examples_per_client < 1:
    raise ValueError(
      f'There are {size} examples for {clients} clients. Give '
      'examples_per_client, to use them several times.'
    )
  generator = np.random.default_rng([seed, 0])
  passes = -(-clients * examples_per_client // size)
  order = np.concatenate([generator.permutation(size) for _ in range(passes)])
  order = order[: clients * examples_per_client].astype(np.int32)
  return federated_data.FederatedData(
    dataset.train_features,
    dataset.train_labels,
    list(order.reshape(clients, examples_per_client)),
  )
