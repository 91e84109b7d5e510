"""Features of APTOS 2019 by a frozen ResNet-50, computed once and cached.

The cache has a folder for each set of images, weights and augmentation; if any
of them changes it is another folder. In it are parts, each written in one step,
so that a computation that was interrupted goes on where it stopped.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
from collections.abc import Collection, Iterator, Sequence
from concurrent import futures
from typing import Callable, Optional

import numpy as np
import tensorflow as tf
import tqdm

from experiments import aptos, datasets, models
from tf_bdp import validation
from tf_bdp.training import checkpoint

DEFAULT_CACHE_DIR = '~/.cache/tf_bdp/features'
# Another number makes all that was cached unknown.
_FORMAT = 1
# An interruption loses one part: some ten seconds on two cores.
_IMAGES_PER_PART = 64
# One batch for each core at a time: that keeps all of them busy even where
# TensorFlow gives an operation a single thread, as training on CPUs has it.
_BATCH_SIZE = 16


@dataclasses.dataclass(frozen=True)
class Augmentation:
  """How images are varied.

  Attributes:
    versions: How many there are of each image. The first is the plain image,
      others are cropped and flipped at random.
    seed: Of the variations. That of an image depends on nothing else but its
      contents.
    smallest_crop: The least share of an image's area that a crop has.
  """

  versions: int = 1
  seed: int = 0
  smallest_crop: float = 0.8

  def __post_init__(self) -> None:
    validation.check_positive_integer('versions', self.versions)
    if self.seed < 0:
      raise ValueError(f'seed must be 0 or more. Found {self.seed}.')
    if not 0 < self.smallest_crop <= 1:
      raise ValueError(
        'smallest_crop must be above 0 and at most 1. Found '
        f'{self.smallest_crop}.'
      )


_PLAIN = Augmentation()


def aptos_features(
  data_dir: Optional[str],
  weights: str,
  versions: int = 4,
  seed: int = 0,
  cache_dir: str = DEFAULT_CACHE_DIR,
  test_size: int = aptos.TEST_SIZE,
) -> datasets.Dataset:
  """Returns the features of APTOS 2019, [examples, 2048] in float32.

  Args:
    data_dir: The folder with Kaggle's train.csv and train_images.
    weights: A file with the weights of ResNet-50 without its top, or
      'imagenet' to download them.
    versions: How many versions of each training image there are; the images of
      the test are plain.
    seed: Of the augmentation.
    cache_dir: Where computed features are kept.
    test_size: How many images are for the test.
  """
  augmentation = Augmentation(versions, seed)
  train, test = aptos.list_images(data_dir, test_size)
  cache = pathlib.Path(cache_dir).expanduser()
  return datasets.Dataset(
    compute(train, weights, augmentation, cache),
    np.tile(train.labels, versions),
    compute(test, weights, _PLAIN, cache),
    test.labels,
    versions,
  )


def compute(
  images: aptos.Images,
  weights: str,
  augmentation: Augmentation,
  cache_dir: pathlib.Path,
) -> np.ndarray:
  """Returns the features of images, from the cache as far as they are there.

  Args:
    images: The images.
    weights: A file with the weights of ResNet-50 without its top, or
      'imagenet'.
    augmentation: Which versions of the images to make.
    cache_dir: Where computed features are kept.

  Returns:
    [versions * images, 2048] in float32: all plain images, then all in their
    second version, and so on.
  """
  file = models.resnet50_weights_file(weights)
  folder = cache_dir / _key(images, file, augmentation)
  pieces = [
    images.part(start, start + _IMAGES_PER_PART)
    for start in range(0, len(images.paths), _IMAGES_PER_PART)
  ]
  parts = _read_parts(folder, pieces, augmentation)
  if len(parts) < len(pieces):
    with _alone_in(folder):
      # Another process may have gone on meanwhile.
      parts = _read_parts(folder, pieces, augmentation)
      parts |= _compute_missing(parts, folder, pieces, augmentation, file)
  together = np.concatenate([parts[n] for n in range(len(pieces))], axis=1)
  return together.reshape(-1, models.RESNET50_FEATURES)


def _key(images: aptos.Images, file: str, augmentation: Augmentation) -> str:
  """Returns a name for all that the features depend on."""
  facts = {
    'format': _FORMAT,
    'images': images.hashes,
    'image_size': aptos.IMAGE_SIZE,
    'weights': aptos.hash_file(pathlib.Path(file)),
    **dataclasses.asdict(augmentation),
  }
  return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _read_parts(
  folder: pathlib.Path,
  pieces: Sequence[aptos.Images],
  augmentation: Augmentation,
) -> dict[int, np.ndarray]:
  """Returns by number the parts that are there and whole."""
  parts = {}
  for number, piece in enumerate(pieces):
    shape = augmentation.versions, len(piece.paths), models.RESNET50_FEATURES
    # A damaged archive can pass for one of an unknown or encrypted kind.
    with contextlib.suppress(OSError, ValueError, KeyError, RuntimeError):
      part = checkpoint.load(_part_file(folder, number)).arrays['features']
      if part.shape == shape:
        parts[number] = part
  return parts


def _part_file(folder: pathlib.Path, number: int) -> pathlib.Path:
  return folder / f'part-{number:05}.npz'


@contextlib.contextmanager
def _alone_in(folder: pathlib.Path) -> Iterator[None]:
  """Waits until no other process computes the same features."""
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / 'lock', 'w') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      print(f'Another process computes the features in {folder}; waiting.')
      fcntl.flock(lock, fcntl.LOCK_EX)
    yield


def _compute_missing(
  present: Collection[int],
  folder: pathlib.Path,
  pieces: Sequence[aptos.Images],
  augmentation: Augmentation,
  file: str,
) -> dict[int, np.ndarray]:
  """Computes the other parts, and writes each as soon as it is done."""
  sizes = [augmentation.versions * len(piece.paths) for piece in pieces]
  missing = [number for number in range(len(pieces)) if number not in present]
  bar = tqdm.tqdm(
    desc='ResNet-50 features',
    total=sum(sizes),
    initial=sum(sizes[number] for number in present),
    unit='image',
  )
  parts = {}
  with bar, futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    network = _network(file)
    for number in missing:
      part = _compute_part(pieces[number], augmentation, network, pool)
      checkpoint.save(_part_file(folder, number), {'features': part}, {})
      parts[number] = part
      bar.update(sizes[number])
  return parts


def _network(file: str) -> Callable[[np.ndarray], tf.Tensor]:
  backbone = models.resnet50_backbone(file)
  size = aptos.IMAGE_SIZE
  return tf.function(
    lambda images: backbone(images, training=False),
    input_signature=[tf.TensorSpec([None, size, size, 3], tf.uint8)],
  )


def _compute_part(
  images: aptos.Images,
  augmentation: Augmentation,
  network: Callable[[np.ndarray], tf.Tensor],
  pool: futures.Executor,
) -> np.ndarray:
  """Returns the features of a few images, [versions, images, 2048]."""

  def batch_features(batch: aptos.Images) -> np.ndarray:
    versions = [
      make_versions(aptos.read_square(path), content, augmentation)
      for path, content in zip(batch.paths, batch.hashes)
    ]
    features = network(np.concatenate(versions)).numpy()
    shape = len(versions), augmentation.versions, models.RESNET50_FEATURES
    return features.reshape(shape).swapaxes(0, 1)

  step = max(1, _BATCH_SIZE // augmentation.versions)
  batches = [
    images.part(start, start + step)
    for start in range(0, len(images.paths), step)
  ]
  return np.concatenate(list(pool.map(batch_features, batches)), axis=1)


def make_versions(
  image: np.ndarray, content: str, augmentation: Augmentation
) -> np.ndarray:
  """Returns the versions of an image, [versions, size, size, 3] of bytes.

  Args:
    image: The square image.
    content: The hash of its file, which the variations are drawn by.
    augmentation: Which versions to make.
  """
  versions = [aptos.resize(image)]
  for version in range(1, augmentation.versions):
    generator = np.random.default_rng(
      [augmentation.seed, version, int(content, 16)]
    )
    area = generator.uniform(augmentation.smallest_crop, 1.0)
    side = max(1, round(np.sqrt(area) * len(image)))
    top, left = generator.integers(len(image) - side + 1, size=2)
    # Either way, or in both directions.
    down, right = generator.choice([-1, 1], size=2)
    crop = image[top : top + side, left : left + side][::down, ::right]
    versions.append(aptos.resize(crop))
  return np.stack(versions)
