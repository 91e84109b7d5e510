"""Tests of the clipping of updates."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tf_bdp.ops import clipping


def _random_update(seed, scale=1.0):
  generator = np.random.default_rng(seed)
  return [
    tf.constant(generator.normal(0, scale, shape), tf.float32)
    for shape in ((3, 4), (5,), (), (2, 2, 2))
  ]


def _flat(parts):
  return np.concatenate([np.ravel(part) for part in parts]).astype(np.float64)


@hypothesis.given(
  clip_norm=st.floats(1e-3, 2.9), log_scale=st.floats(0.0, 15.0)
)
def test_a_large_update_is_cut_to_the_clip_norm(clip_norm, log_scale):
  update = _random_update(1, 10**log_scale)
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


@hypothesis.settings(max_examples=100)
@hypothesis.given(clip_norm=st.floats(0.5, 50, width=32))
def test_a_small_update_is_untouched_bit_for_bit(clip_norm):
  update = _random_update(3, 1e-2)
  clipped, usable, _ = clipping.clip(update, tf.constant(clip_norm))
  assert usable
  np.testing.assert_array_equal(_flat(clipped), _flat(update))


def test_a_huge_finite_update_is_clipped_or_left_out_but_never_nan():
  # Its squares overflow float32 although none of its entries does.
  for scale in (1e19, 1e25, 3e38):
    update = [tf.constant([scale, -scale, scale / 2], tf.float32)]
    clipped, usable, _ = clipping.clip(update, tf.constant(1.0))
    flat = _flat(clipped)
    assert np.all(np.isfinite(flat)), scale
    assert np.linalg.norm(flat) == pytest.approx(float(usable), rel=1e-6)


def _assert_left_out(update):
  clipped, usable, norm = clipping.clip(update, tf.constant(1.0))
  assert not usable
  assert float(norm) == 0.0
  np.testing.assert_array_equal(_flat(clipped), 0.0)


def test_an_update_of_zeros_or_whose_squares_vanish_is_left_out():
  _assert_left_out([tf.zeros([3]), tf.zeros([2, 2])])
  _assert_left_out([tf.constant([1e-30, -2e-30])])


@pytest.mark.parametrize('part', range(4))
def test_one_entry_that_is_not_finite_makes_an_update_unusable(part):
  for bad in (np.nan, np.inf, -np.inf):
    update = _random_update(4)
    values = np.array(update[part])
    values[(0,) * values.ndim] = bad
    update[part] = tf.constant(values)
    _assert_left_out(update)


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
