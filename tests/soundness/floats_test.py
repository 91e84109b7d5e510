"""What floats could betray.

A sum of a float32 mean and float32 noise has gaps that depend on the mean: some
outputs are impossible under the neighbouring data, whatever the noise is.
"""

import numpy as np
import pytest
import tensorflow as tf

from tf_bdp.ops import noise as noise_lib


def _in_float32(values, deviation, normals):
  """The plain sum, as it was."""
  return values + np.float32(deviation) * normals.astype(np.float32)


def _on_grid(values, deviation, normals):
  (noised,) = noise_lib.add_normals(
    [tf.constant(values)], deviation, tf.constant(normals, tf.float64)
  )
  return noised.numpy()


def _possible(add, noised, values, deviation, kind):
  """Which of the noised values some noise makes of these values.

  All numbers of a kind are tried that are near enough: others are rounded to
  something else.
  """
  nearest = ((noised.astype(np.float64) - values) / deviation).astype(kind)
  found = np.zeros(noised.shape, bool)
  for steps in range(-6, 7):
    tried = (nearest + steps * np.spacing(nearest)).astype(kind)
    found |= add(values, deviation, tried) == noised
  return found


@pytest.mark.parametrize('deviation', [1.0, 0.3, 7e-3])
@pytest.mark.parametrize('move', [0.02, 1.0, 50.0])
def test_no_noised_value_is_impossible_with_other_data(deviation, move):
  generator = np.random.default_rng(1)
  size = 20_000
  one = generator.normal(size=size).astype(np.float32)
  other = one + (move * deviation * generator.random(size)).astype(np.float32)
  normals = generator.normal(size=size)
  for values, neighbours in ((one, other), (other, one)):
    noised = _on_grid(values, deviation, normals)
    assert noised.dtype == np.float32
    assert np.all(
      _possible(_on_grid, noised, neighbours, deviation, np.float64)
    )
    # And as it was? Of some it could be told whose they are.
    former = _in_float32(values, deviation, normals)
    possible = _possible(_in_float32, former, neighbours, deviation, np.float32)
    assert np.mean(possible) < 0.9995


def test_in_float32_many_values_were_impossible_for_a_mean_of_zero():
  # Of a coordinate that nobody else's update has.
  normals = np.random.default_rng(2).normal(size=50_000)
  zero, other = np.zeros(50_000, np.float32), np.full(50_000, 0.5, np.float32)
  shares = [
    np.mean(_possible(add, add(zero, 1.0, normals), other, 1.0, kind))
    for add, kind in ((_in_float32, np.float32), (_on_grid, np.float64))
  ]
  assert shares[0] < 0.9
  assert shares[1] == 1
