"""Tests of the noise of the Gaussian mechanisms."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from scipy import stats

from tf_bdp.mechanisms import base
from tf_bdp.ops import noise as noise_lib

# How unlikely a true hypothesis must be before a test of it fails.
_LEVEL = 1e-6


def _noise(size, deviation=1.0, seed=None, round_number=0, **more):
  (noised,) = noise_lib.add_noise(
    [tf.zeros(size)], tf.constant(deviation), seed, round_number, **more
  )
  return noised.numpy()


@hypothesis.given(size=st.integers(1, 1001))
def test_secure_normals_are_as_many_as_asked_for(size):
  normals = noise_lib.secure_normal(size)
  assert normals.shape == (size,)
  assert normals.dtype == np.float32
  assert np.all(np.isfinite(normals))


def _check_standard_normal(sample):
  size = sample.size
  assert stats.kstest(sample, 'norm').pvalue > _LEVEL
  # Moments against their own deviations: 5 of them are a chance of 6e-7.
  assert abs(np.mean(sample)) < 5 * size**-0.5
  assert abs(np.var(sample) - 1) < 5 * (2 / size) ** 0.5
  assert abs(np.mean(sample**3)) < 5 * (15 / size) ** 0.5
  assert abs(np.mean(sample**4) - 3) < 5 * (96 / size) ** 0.5


def _check_independent(one, other):
  correlation = np.corrcoef(one, other)[0, 1]
  assert abs(correlation) < 5 * one.size**-0.5


def test_secure_normals_are_standard_normal():
  sample = noise_lib.secure_normal(400_001).astype(np.float64)
  _check_standard_normal(sample)
  # Box and Muller's two halves share their radius and must not correlate,
  # nor neighbours.
  _check_independent(sample[:200_000], sample[200_001:])
  _check_independent(sample[:-1], sample[1:])
  # Of 4e5 normals the largest lies between 3.5 and 7 but for 1e-6.
  assert 3.5 < np.max(np.abs(sample)) < 7


def test_secure_normals_of_one_size_differ_and_take_no_seed():
  np.random.seed(0)  # noqa: NPY002
  tf.random.set_seed(0)
  one = noise_lib.secure_normal(1000)
  np.random.seed(0)  # noqa: NPY002
  tf.random.set_seed(0)
  other = noise_lib.secure_normal(1000)
  assert not np.any(one == other)


def test_pooled_single_secure_normals_are_standard_normal():
  # The count of adaptive clipping takes one normal at a time.
  sample = np.concatenate([noise_lib.secure_normal(1) for _ in range(20_000)])
  _check_standard_normal(sample.astype(np.float64))


def test_seeded_noise_is_reproducible():
  np.testing.assert_array_equal(_noise(1000, seed=7), _noise(1000, seed=7))


@pytest.mark.parametrize(
  'other',
  [
    {'seed': 8},
    {'round_number': 1},
    {'purpose': base.COUNT_NOISE},
    {'round_number': 1, 'purpose': base.COUNT_NOISE},
  ],
)
def test_seeded_noise_differs_by_seed_round_and_purpose(other):
  one = _noise(50_000, seed=7)
  another = _noise(50_000, **{'seed': 7, **other})
  _check_independent(one, another)


def test_no_two_rounds_and_purposes_of_a_seed_share_their_noise():
  firsts = {
    _noise(1, seed=3, round_number=number, purpose=purpose).item()
    for number in range(50)
    for purpose in (base.UPDATE_NOISE, base.COUNT_NOISE)
  }
  assert len(firsts) == 100


def test_seeded_noise_does_not_depend_on_how_the_vector_is_cut():
  whole = _noise(24, 2.0, seed=5, round_number=3)
  parts = noise_lib.add_noise(
    [tf.zeros([2, 3]), tf.zeros([]), tf.zeros([17])],
    tf.constant(2.0),
    5,
    3,
  )
  assert [p.shape.as_list() for p in parts] == [[2, 3], [], [17]]
  np.testing.assert_array_equal(
    np.concatenate([np.ravel(p) for p in parts]), whole
  )


@pytest.mark.parametrize('seed', [None, 11])
def test_noise_has_the_asked_deviation_around_the_values(seed):
  values = tf.linspace(-5.0, 5.0, 200_000)
  (noised,) = noise_lib.add_noise([values], tf.constant(0.3), seed, 4)
  noise = (noised - values).numpy().astype(np.float64)
  # 5 float32 digits are lost in the subtraction; 400 times less than 5 sigmas.
  _check_standard_normal(noise / 0.3)


@pytest.mark.parametrize('seed', [None, 11])
def test_no_deviation_adds_no_noise(seed):
  values = tf.constant([1.0, 2.0])
  (noised,) = noise_lib.add_noise([values], tf.constant(0.0), seed, 0)
  np.testing.assert_array_equal(noised, values)


def test_unseeded_noise_differs_between_calls_and_parts():
  parts = [
    *noise_lib.add_noise([tf.zeros(50_000)] * 2, tf.constant(1.0), None, 0),
    *noise_lib.add_noise([tf.zeros(50_000)] * 2, tf.constant(1.0), None, 0),
  ]
  for i in range(4):
    for j in range(i):
      _check_independent(parts[i].numpy(), parts[j].numpy())


def test_seeded_noise_is_the_same_inside_a_graph():
  graph = tf.function(
    lambda number: noise_lib.add_noise(
      [tf.zeros(100)], tf.constant(1.0), 9, number
    )
  )
  np.testing.assert_array_equal(
    graph(tf.constant(6))[0], _noise(100, seed=9, round_number=6)
  )
