"""A small folder in the layout of APTOS 2019, and where the real one may be."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

DATA = pathlib.Path(__file__).parents[3] / 'shared/data'
REAL = DATA / 'aptos2019'
REAL_WEIGHTS = (
  DATA / 'resnet50/resnet50_weights_tf_dim_ordering_tf_kernels_notop.h5'
)
needs_real = pytest.mark.skipif(
  not REAL.exists(), reason='needs APTOS 2019 in ../shared/data'
)


def pixels(number, height=40, width=40):
  shape = height, width, 3
  return np.random.default_rng(number).integers(256, size=shape, dtype=np.uint8)


def png(number, **size):
  return tf.io.encode_png(pixels(number, **size)).numpy()


def jpg(number, **size):
  return tf.io.encode_jpeg(pixels(number, **size)).numpy()


def write(folder, images, header='id_code,diagnosis'):
  """Writes a data set of (name of the file, label, contents)."""
  (folder / 'train_images').mkdir(parents=True)
  lines = [header]
  for name, label, contents in images:
    lines.append(f'{name.partition(".")[0]},{label}')
    (folder / 'train_images' / name).write_bytes(contents)
  (folder / 'train.csv').write_text('\n'.join(lines) + '\n')
  return str(folder)
