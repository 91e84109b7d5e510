"""The retina images of APTOS 2019, from a folder with Kaggle's layout.

The same photograph is in the data several times, at times with another
diagnosis. An image is counted once: it must not be in the training and in the
test data, nor be protected as one example where it is several. Images are the
same if their files are, byte by byte.
"""

import csv
import hashlib
import os
import pathlib
from collections import defaultdict
from collections.abc import Sequence
from concurrent import futures
from typing import NamedTuple, Optional

import numpy as np
import tensorflow as tf
import tqdm

CLASSES = 5
IMAGE_SIZE = 224
# "Testing is performed [...] on the first 500 samples in case of APTOS."
TEST_SIZE = 500
_COLUMNS = ('id_code', 'diagnosis')
_LAYOUT = (
  'a folder with train.csv and train_images, as on '
  'https://www.kaggle.com/c/aptos2019-blindness-detection/data'
)


class Images(NamedTuple):
  """Files of images, and what is known of them.

  Attributes:
    paths: The files.
    labels: The severity of the disease, 0 to 4, int64.
    hashes: SHA-256 of the files' contents, in hexadecimal.
  """

  paths: tuple[pathlib.Path, ...]
  labels: np.ndarray
  hashes: tuple[str, ...]

  def part(self, start: int, stop: int) -> 'Images':
    """Returns a range of the images."""
    rows = slice(start, stop)
    return Images(self.paths[rows], self.labels[rows], self.hashes[rows])


def list_images(
  data_dir: Optional[str], test_size: int = TEST_SIZE
) -> tuple[Images, Images]:
  """Lists the distinct images for training, and those for the test.

  Of images that are the same, the first is kept. If their labels differ none
  is, because the true label is unknown. What remains is in the order of
  train.csv, and the first are for the test.

  Args:
    data_dir: The folder with train.csv and train_images.
    test_size: How many images are for the test.

  Raises:
    ValueError: Something is missing in the folder, or is not as it should be.
  """
  if data_dir is None:
    raise ValueError(f'APTOS 2019 needs --data_dir=DIR, {_LAYOUT}.')
  folder = pathlib.Path(data_dir).expanduser()
  identifiers, labels = _read_table(folder / 'train.csv')
  paths = _find_files(folder / 'train_images', identifiers)
  with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    hashes = tuple(pool.map(hash_file, paths))

  members = defaultdict(list)
  for row, content in enumerate(hashes):
    members[content].append(row)
  kept = [
    rows[0]
    for rows in members.values()
    if len({labels[row] for row in rows}) == 1
  ]
  if len(kept) <= test_size:
    raise ValueError(
      f'{folder} has {len(kept)} distinct images with one label each, and '
      f'{test_size} are for the test: none is left to train with. Give the '
      'whole data set.'
    )
  images = Images(
    tuple(paths[row] for row in kept),
    np.array([labels[row] for row in kept], np.int64),
    tuple(hashes[row] for row in kept),
  )
  return images.part(test_size, len(kept)), images.part(0, test_size)


def _read_table(path: pathlib.Path) -> tuple[list[str], list[int]]:
  """Returns the columns of train.csv."""
  if not path.is_file():
    raise ValueError(f'There is no {path}. Give --data_dir=DIR, {_LAYOUT}.')
  try:
    # Spreadsheets put a byte order mark in front.
    with open(path, newline='', encoding='utf-8-sig') as file:
      reader = csv.DictReader(file)
      columns = reader.fieldnames or []
      rows = list(reader)
  except (UnicodeDecodeError, csv.Error) as error:
    raise ValueError(f'{path} must be a CSV file. Found: {error}.') from error
  if not set(_COLUMNS) <= set(columns):
    raise ValueError(
      f'{path} must have the columns {", ".join(_COLUMNS)}. Found '
      f'{", ".join(columns) or "none"}. Give the train.csv of APTOS 2019.'
    )
  identifiers, labels = [], []
  for number, row in enumerate(rows, start=2):
    diagnosis = row['diagnosis']
    if diagnosis not in [str(label) for label in range(CLASSES)]:
      raise ValueError(
        f'Line {number} of {path} must have a diagnosis from 0 to '
        f'{CLASSES - 1}. Found {diagnosis!r}. Correct it or remove the line.'
      )
    identifiers.append(row['id_code'])
    labels.append(int(diagnosis))
  return identifiers, labels


def _find_files(
  folder: pathlib.Path, identifiers: Sequence[str]
) -> list[pathlib.Path]:
  """Returns the file of each image; Kaggle's are .png, smaller copies .jpg."""
  if not folder.is_dir():
    raise ValueError(
      f'There is no folder {folder}. Give --data_dir=DIR, {_LAYOUT}.'
    )
  names = {entry.name for entry in os.scandir(folder)}
  paths, missing = [], []
  for identifier in identifiers:
    for name in (f'{identifier}.png', f'{identifier}.jpg'):
      if name in names:
        paths.append(folder / name)
        break
    else:
      missing.append(identifier)
  if missing:
    raise ValueError(
      f'{folder} must have a .png or .jpg file for each of the '
      f'{len(identifiers)} images in train.csv. Found none for {len(missing)}, '
      f'the first {missing[0]!r}. Unpack the whole archive, or remove their '
      'lines.'
    )
  return paths


def hash_file(path: pathlib.Path) -> str:
  """Returns the SHA-256 of a file's contents, in hexadecimal."""
  return hashlib.sha256(path.read_bytes()).hexdigest()


def read_images(images: Images) -> np.ndarray:
  """Returns the images as bytes, [images, size, size, 3], red first."""
  pixels = np.empty((len(images.paths), IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
  with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    read = pool.map(lambda path: resize(read_square(path)), images.paths)
    for row, image in enumerate(
      tqdm.tqdm(read, 'Reading images', len(images.paths), unit='image')
    ):
      pixels[row] = image
  return pixels


def read_square(path: pathlib.Path) -> np.ndarray:
  """Returns the square in the middle of an image, as bytes.

  Kaggle's photographs have a black margin left and right of the retina.
  """
  try:
    image = tf.io.decode_image(
      path.read_bytes(), channels=3, expand_animations=False
    ).numpy()
  except tf.errors.InvalidArgumentError as error:
    raise ValueError(
      f'{path} must be a PNG or JPEG image, and cannot be read as one. Get it '
      'again, or remove its line from train.csv.'
    ) from error
  height, width, _ = image.shape
  side = min(height, width)
  top, left = (height - side) // 2, (width - side) // 2
  return image[top : top + side, left : left + side]


def resize(image: np.ndarray) -> np.ndarray:
  """Returns a square image at the size the network takes, as bytes."""
  if len(image) == IMAGE_SIZE:
    return image
  resized = tf.image.resize(image, (IMAGE_SIZE, IMAGE_SIZE), antialias=True)
  return np.clip(np.rint(resized), 0, 255).astype(np.uint8)
