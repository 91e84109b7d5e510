"""Rows, distances and pictures for the tests of the report."""

import csv
import io
import math

import matplotlib.image
import numpy as np

ROUNDS = 12
HEADER = [
  *('round', 'participants', 'failed_clients', 'clip_norm', 'accuracy'),
  *('loss', 'dp_epsilon', 'census_epsilon', 'seconds'),
]


def distances():
  rng = np.random.default_rng(0)
  return np.minimum(0.3 * rng.lognormal(0.0, 0.4, (ROUNDS, 40)), 1.0)


def fields(rounds=ROUNDS):
  """Rows as a run writes them, evaluated in every third round."""
  return [
    [
      *(index, 20, 0, 0.5),
      *(
        (
          *(0.5 + 0.01 * index, 1 / index),
          *(0.7 * math.sqrt(index), 0.2 * math.sqrt(index)),
        )
        if index % 3 == 0
        else [''] * 4
      ),
      1.5,
    ]
    for index in range(1, rounds + 1)
  ]


def write(directory, rows):
  path = directory / 'metrics.csv'
  with open(path, 'w', newline='') as file:
    csv.writer(file).writerows([HEADER, *rows])
  return path


def assert_is_a_picture(content):
  assert content.startswith(b'\x89PNG\r\n\x1a\n')
  pixels = matplotlib.image.imread(io.BytesIO(content), format='png')
  assert pixels.shape[1] >= 800
  assert np.ptp(pixels[..., :3]) > 0.5
