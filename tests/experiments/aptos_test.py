"""APTOS 2019 from a folder."""

import collections
import csv
import hashlib

import numpy as np
import pytest
import tensorflow as tf

from experiments import aptos, datasets
from tests.experiments import aptos_folder


def _names(images):
  return [path.name for path in images.paths]


def test_the_first_of_equal_images_is_kept_and_none_if_their_labels_differ(
  tmp_path,
):
  png, jpg = aptos_folder.png, aptos_folder.jpg
  folder = aptos_folder.write(
    tmp_path / 'data',
    [
      ('zebra.png', 0, png(0)),
      ('twice.png', 1, png(1)),
      ('argued.png', 2, png(2)),
      ('again.png', 1, png(1)),
      ('photo.jpg', 3, jpg(3)),
      ('denied.png', 4, png(2)),
      ('conceded.png', 2, png(2)),
      ('last.jpg', 4, jpg(4)),
    ],
  )
  train, test = aptos.list_images(folder, test_size=2)
  assert _names(test) == ['zebra.png', 'twice.png']
  assert test.labels.tolist() == [0, 1]
  assert _names(train) == ['photo.jpg', 'last.jpg']
  assert train.labels.tolist() == [3, 4]
  assert train.hashes[0] == hashlib.sha256(jpg(3)).hexdigest()


def test_pngs_are_read_exactly_and_large_images_are_cut_square_and_shrunk(
  tmp_path,
):
  size = aptos.IMAGE_SIZE
  wide = np.zeros((2 * size, 2 * size + 100, 3), np.uint8)
  wide[:, 50:-50, 1] = 200
  aptos_folder.write(
    tmp_path / 'data',
    [
      ('exact.png', 0, aptos_folder.png(0, height=size, width=size)),
      ('wide.png', 0, tf.io.encode_png(wide).numpy()),
      ('small.jpg', 0, aptos_folder.jpg(1)),
    ],
  )
  images, _ = aptos.list_images(str(tmp_path / 'data'), test_size=0)
  exact, shrunk, enlarged = aptos.read_images(images)
  np.testing.assert_array_equal(exact, aptos_folder.pixels(0, size, size))
  np.testing.assert_array_equal(
    shrunk, np.broadcast_to(np.uint8([0, 200, 0]), shrunk.shape)
  )
  assert enlarged.shape == (size, size, 3)


def _good(folder):
  images = [(f'{n}.png', n, aptos_folder.png(n)) for n in range(3)]
  aptos_folder.write(folder, images)
  return folder


def _without_table(folder):
  (_good(folder) / 'train.csv').unlink()


def _without_images(folder):
  (_good(folder) / 'train_images').rename(folder / 'elsewhere')


def _without_one_image(folder):
  (_good(folder) / 'train_images/1.png').unlink()


def _with_table(text):
  def make(folder):
    (_good(folder) / 'train.csv').write_bytes(text)

  return make


@pytest.mark.parametrize(
  'make, sentence',
  [
    (lambda folder: None, r'There is no .*train\.csv. Give --data_dir=DIR'),
    (_without_table, r'There is no .*train\.csv. Give --data_dir=DIR'),
    (_without_images, r'There is no folder .*train_images. Give --data_dir'),
    (_without_one_image, r"each of the 3 images .* none for 1, the first '1'"),
    (_with_table(b''), r'columns id_code, diagnosis. Found none'),
    (_with_table(b'id_code,level\n1,1\n'), r'Found id_code, level'),
    (_with_table(b'id_code,diagnosis\n1,1\n2,5\n'), r"Line 3 .* Found '5'"),
    (_with_table(b'id_code,diagnosis\n1,\n'), r"Line 2 .* Found ''"),
    (_with_table(b'id_code,diagnosis\n1\n'), r'Line 2 .* Found None'),
    (_with_table(b'id_code,diagnosis\n1,mild\n'), r"Found 'mild'"),
    (_with_table(b'\xff\xfe\x00'), r'must be a CSV file'),
    (_with_table(b'id_code,diagnosis\n'), r'has 0 distinct images'),
    (_good, r'has 3 distinct images .* 500 are for the test'),
  ],
)
def test_a_folder_that_is_not_as_it_should_be_gets_a_sentence(
  tmp_path, make, sentence
):
  make(tmp_path / 'data')
  with pytest.raises(ValueError, match=sentence):
    datasets.load('aptos', str(tmp_path / 'data'))


def test_no_folder_gets_a_sentence():
  with pytest.raises(ValueError, match='needs --data_dir=DIR'):
    datasets.load('aptos')


def test_a_table_with_a_byte_order_mark_is_read(tmp_path):
  _with_table(b'\xef\xbb\xbfid_code,diagnosis\r\n1,4\r\n')(tmp_path / 'data')
  train, _ = aptos.list_images(str(tmp_path / 'data'), test_size=0)
  assert _names(train) == ['1.png']
  assert train.labels.tolist() == [4]


@pytest.mark.parametrize('contents', [b'', b'no image', 'half'])
def test_a_damaged_image_is_named(tmp_path, contents):
  if contents == 'half':
    contents = aptos_folder.jpg(0)[:500]
  folder = aptos_folder.write(tmp_path / 'data', [('eye.jpg', 0, contents)])
  images, _ = aptos.list_images(folder, test_size=0)
  with pytest.raises(ValueError, match=r'eye\.jpg must be a PNG or JPEG image'):
    aptos.read_images(images)


@aptos_folder.needs_real
def test_the_real_data_have_no_image_twice_and_the_counts_of_an_oracle():
  train, test = aptos.list_images(str(aptos_folder.REAL))
  # The definition, by brute force: 123 groups are equal, 30 of them argued.
  with open(aptos_folder.REAL / 'train.csv', newline='') as file:
    rows = list(csv.reader(file))[1:]
  contents = [
    (aptos_folder.REAL / f'train_images/{name}.jpg').read_bytes()
    for name, _ in rows
  ]
  labels_of = collections.defaultdict(set)
  for content, (_, label) in zip(contents, rows):
    labels_of[content].add(label)
  names = [
    f'{name}.jpg'
    for row, (name, _) in enumerate(rows)
    if len(labels_of[contents[row]]) == 1
    and contents.index(contents[row]) == row
  ]
  assert len(rows) - len(labels_of) == 128
  assert sum(len(labels) > 1 for labels in labels_of.values()) == 30
  assert len(names) == 3662 - 128 - 30
  assert _names(test) == names[:500]
  assert _names(train) == names[500:]
