"""Tests of the noise of the Gaussian mechanisms."""

import math

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
  assert normals.dtype == np.float64
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
  sample = noise_lib.secure_normal(400_001)
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
  _check_standard_normal(sample)


def test_fresh_normals_are_standard_normal_in_float64():
  sample = noise_lib.fresh_normal(tf.constant(400_000)).numpy()
  assert sample.dtype == np.float64
  _check_standard_normal(sample)
  # Of float32 many would be alike.
  assert np.unique(sample).size == sample.size


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


# --- The grid; tests/soundness/floats_test.py says what it is for.


def _step(deviation, size):
  """The grid: the largest power of two up to 2^-20 s / √d."""
  return 2.0 ** math.floor(math.log2(2.0**-20 * deviation / math.sqrt(size)))


@pytest.mark.parametrize('seed', [None, 3])
@pytest.mark.parametrize('deviation', [1.0, 0.37, 1e-5, 300.0])
@pytest.mark.parametrize('sizes', [(1,), (5, 1), (1000, 7), (300_000,)])
def test_noised_values_are_on_a_grid_of_deviation_and_size(
  seed, deviation, sizes
):
  step = _step(deviation, sum(sizes))
  values = [tf.fill([size], np.float32(deviation / 3)) for size in sizes]
  for tensors in (values, [tf.zeros_like(value) for value in values]):
    for deviation_ in (deviation, tf.constant(deviation, tf.float64)):
      noised = noise_lib.add_noise(tensors, deviation_, seed, 1)
      for part in noised:
        steps = part.numpy().astype(np.float64) / step
        np.testing.assert_array_equal(steps, np.round(steps))
        # It is not coarser than it has to be.
        if part.shape[0] >= 1000:
          assert np.any(steps % 2 == 1)


@hypothesis.given(
  size=st.integers(1, 5000),
  deviation=st.floats(1e-12, 1e6),
  seed=st.integers(0, 99),
)
def test_rounding_moves_vectors_by_what_is_accounted_for(size, deviation, seed):
  generator = np.random.default_rng(seed)
  one, other = deviation * generator.normal(size=(2, size))
  rounded = [
    noise_lib.add_normals(
      [tf.constant(part, tf.float64)], deviation, tf.zeros(size, tf.float64)
    )[0].numpy()
    for part in (one, other)
  ]
  moved = np.linalg.norm(rounded[0] - rounded[1]) / deviation
  distance = np.linalg.norm(one - other) / deviation
  assert abs(moved - distance) <= base.GRID_DISTANCE
  for part, exact in zip(rounded, (one, other)):
    assert np.max(np.abs(part - exact)) <= _step(deviation, size) / 2


def test_of_float64_values_noise_keeps_the_type():
  (noised,) = noise_lib.add_noise([tf.constant([1.0], tf.float64)], 0.5, 1, 0)
  assert noised.dtype == tf.float64
