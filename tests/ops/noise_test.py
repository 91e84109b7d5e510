import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tf_bdp.ops import clipping
from tf_bdp.ops import noise as noise_lib

# How unlikely a true hypothesis must be before a test of it fails.
_LEVEL = 1e-6


def _random_update(seed, scale=1.0):
  generator = np.random.default_rng(seed)
  return [
    tf.constant(generator.normal(0, scale, shape), tf.float32)
    for shape in ((3, 4), (5,), (), (2, 2, 2))
  ]


def _flat(parts):
  return np.concatenate([np.ravel(part) for part in parts]).astype(np.float64)


def _noise(size, deviation=1.0, seed=None, round_number=0, **more):
  (noised,) = noise_lib.add_noise(
    [tf.zeros(size)], tf.constant(deviation), seed, round_number, **more
  )
  return noised.numpy()


@pytest.mark.parametrize('clip_norm', [1e-3, 0.37, 1.0, 2.9])
@pytest.mark.parametrize('scale', [1.0, 1e4, 1e15])
def test_a_large_update_is_cut_to_the_clip_norm(clip_norm, scale):
  update = _random_update(1, scale)
  clipped, usable, norm = clipping.clip(update, tf.constant(clip_norm))
  before, after = _flat(update), _flat(clipped)
  assert usable
  assert float(norm) == pytest.approx(np.linalg.norm(before), rel=1e-6)
  assert np.linalg.norm(after) == pytest.approx(clip_norm, rel=1e-6)
  assert np.linalg.norm(after) <= clip_norm * (1 + 1e-6)
  np.testing.assert_allclose(
    after, before * clip_norm / np.linalg.norm(before), rtol=1e-6
  )


def test_clipping_keeps_the_shapes():
  update = _random_update(2, 10.0)
  clipped, _, _ = clipping.clip(update, tf.constant(1.0))
  assert [c.shape for c in clipped] == [u.shape for u in update]
  assert all(c.dtype == tf.float32 for c in clipped)


def test_the_norm_is_that_of_all_parts_together():
  update = [tf.constant([3.0]), tf.constant([[4.0]])]
  clipped, _, norm = clipping.clip(update, tf.constant(1.0))
  assert float(norm) == pytest.approx(5.0)
  np.testing.assert_allclose(_flat(clipped), [0.6, 0.8], rtol=1e-6)


def test_a_small_update_is_untouched_bit_for_bit():
  update = _random_update(3, 1e-2)
  changed = []
  for clip_norm in np.random.default_rng(0).uniform(0.5, 50.0, 100):
    clipped, usable, _ = clipping.clip(
      update, tf.constant(clip_norm, tf.float32)
    )
    assert usable
    if not all(np.array_equal(c, u) for c, u in zip(clipped, update)):
      changed.append(round(float(clip_norm), 3))
  assert not changed


def test_a_huge_finite_update_is_clipped_or_left_out_but_never_nan():
  # Its squares overflow float32 although none of its entries does.
  for scale in (1e19, 1e25, 3e38):
    update = [tf.constant([scale, -scale, scale / 2], tf.float32)]
    clipped, usable, _ = clipping.clip(update, tf.constant(1.0))
    flat = _flat(clipped)
    assert np.all(np.isfinite(flat)), scale
    assert np.linalg.norm(flat) == pytest.approx(float(usable), rel=1e-6)


def test_an_update_whose_squares_vanish_is_left_out():
  clipped, usable, norm = clipping.clip(
    [tf.constant([1e-30, -2e-30])], tf.constant(1.0)
  )
  assert not usable
  assert float(norm) == 0.0
  np.testing.assert_array_equal(_flat(clipped), 0.0)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('part', range(4))
def test_one_entry_that_is_not_finite_makes_an_update_unusable(bad, part):
  update = _random_update(4)
  values = np.array(update[part])
  values[(0,) * values.ndim] = bad
  update[part] = tf.constant(values)
  clipped, usable, norm = clipping.clip(update, tf.constant(1.0))
  assert not usable
  np.testing.assert_array_equal(_flat(clipped), 0.0)
  assert np.isfinite(norm)


def test_an_update_of_zeros_is_unusable():
  update = [tf.zeros([3]), tf.zeros([2, 2])]
  clipped, usable, norm = clipping.clip(update, tf.constant(1.0))
  assert not usable
  np.testing.assert_array_equal(_flat(clipped), 0.0)
  assert float(norm) == 0.0


def test_one_entry_that_is_not_zero_makes_an_update_usable():
  update = [tf.zeros([3]), tf.constant([0.0, 1e-18])]
  clipped, usable, norm = clipping.clip(update, tf.constant(1.0))
  assert usable
  assert float(norm) == pytest.approx(1e-18)
  np.testing.assert_array_equal(_flat(clipped), _flat(update))


def test_squared_norm_is_the_sum_over_all_tensors():
  update = _random_update(5)
  wanted = np.sum(_flat(update) ** 2)
  assert float(clipping.squared_norm(update)) == pytest.approx(wanted)


@pytest.mark.parametrize('size', [1, 2, 3, 7, 1000, 1001])
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
    {'purpose': noise_lib.COUNT_NOISE},
    {'round_number': 1, 'purpose': noise_lib.COUNT_NOISE},
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
    for purpose in (noise_lib.UPDATE_NOISE, noise_lib.COUNT_NOISE)
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
