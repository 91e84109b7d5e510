"""Tests of functions in log space, for numpy and for TensorFlow alike."""

import math

import hypothesis
import mpmath
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tests.accounting import oracles
from tf_bdp.accounting import log_space

_COSTS = np.array(
  [0.0, 1e-300, 1e-100, 1e-17, 1e-9, 1e-3, 0.5, 3.0, 36.0, 800.0, 1e5, 1e12]
)
_both = pytest.mark.parametrize(
  'array',
  [np.asarray, tf.constant],
  ids=['numpy', 'tensorflow'],
)
_costs = st.one_of(
  st.sampled_from([0.0, math.inf]),
  st.floats(-300, 12).map(lambda exponent: 10**exponent),
)
_chances = st.one_of(
  st.sampled_from([0.0, 1.0]),
  st.floats(-300, 0).map(lambda exponent: 10**exponent),
)


def _in_digits(function, values):
  """Of every value with 60 digits."""
  with mpmath.workdps(60):
    return np.array([float(function(mpmath.mpf(value))) for value in values])


@_both
@pytest.mark.parametrize(
  'probability', [1e-300, 1e-17, 1e-6, 0.1, 0.5, 0.999, 1 - 2**-53, 1.0]
)
def test_the_cost_of_inclusion_is_the_formula_for_tiny_and_huge_costs(
  array, probability
):
  found = np.asarray(log_space.included(array(_COSTS), probability))
  exact = oracles.included(_COSTS, probability)
  # TensorFlow takes numbers below the smallest normal one for zero.
  least = 0.0 if array is np.asarray else np.finfo(np.float64).tiny
  np.testing.assert_allclose(found, exact, rtol=1e-12, atol=least)
  infinite = log_space.included(array(np.array([math.inf])), probability)
  assert float(infinite[0]) == math.inf


@_both
def test_always_included_changes_no_bit_and_never_included_costs_nothing(array):
  assert np.array_equal(log_space.included(array(_COSTS), 1.0), _COSTS)
  for costs in (_COSTS, np.array([math.inf])):
    assert not np.any(log_space.included(array(costs), 0.0))
  # The probability may be the tensor, as well.
  chances = array(np.array([0.0, 1.0, 0.5]))
  found = np.asarray(log_space.included(2.0, chances))
  exact = [0.0, 2.0, math.log1p(0.5 * math.expm1(2.0))]
  np.testing.assert_allclose(found, exact, rtol=1e-14)


@hypothesis.given(st.lists(_costs, min_size=1, max_size=4), _chances)
def test_the_cost_of_inclusion_is_at_most_the_cost_in_both(costs, chance):
  costs = np.array(costs)
  found = log_space.included(costs, chance)
  tensor = log_space.included(
    tf.constant(costs), tf.constant(chance, tf.float64)
  )
  assert found.dtype == tensor.dtype.as_numpy_dtype == np.float64
  np.testing.assert_allclose(found, tensor, rtol=1e-12, atol=1e-300)
  for values in (found, tensor.numpy()):
    assert np.all((values >= 0) & (values <= costs))


@_both
def test_the_excess_over_one_keeps_its_accuracy(array):
  found = np.asarray(log_space.log_expm1(array(_COSTS[1:])))
  exact = _in_digits(lambda x: mpmath.log(mpmath.expm1(x)), _COSTS[1:])
  np.testing.assert_allclose(found, exact, rtol=1e-13, atol=1e-13)
  assert float(log_space.log_expm1(array(np.array([0.0])))[0]) == -math.inf


@_both
def test_one_more_than_the_excess_is_its_inverse(array):
  excesses = np.array([-700.0, -40.0, -1.0, 0.0, 1e-9, 30.0, 800.0, 1e12])
  found = np.asarray(log_space.log1p_exp(array(excesses)))
  exact = _in_digits(lambda x: mpmath.log1p(mpmath.exp(x)), excesses)
  np.testing.assert_allclose(found, exact, rtol=1e-13, atol=0)
  again = log_space.log_expm1(array(found))
  np.testing.assert_allclose(again, excesses, rtol=1e-9, atol=1e-9)
  assert float(log_space.log1p_exp(array(np.array([-math.inf])))[0]) == 0.0


@_both
def test_exponentials_are_scaled_only_where_they_leave_float64(array):
  values = np.array([0.0, 1e-17, 2.0, 299.0, 300.0, 301.0, 1e5])
  scale = np.asarray(log_space.log_scale(array(values)))
  np.testing.assert_array_equal(scale, [0, 0, 0, 0, 0, 301.0, 1e5])
  found = np.asarray(log_space.scaled_excess(array(values), array(scale)))
  exact = _in_digits(mpmath.expm1, values[:5])
  np.testing.assert_allclose(found, [*exact, 1.0, 1.0], rtol=1e-12)
  # Even squared.
  assert np.all(np.isfinite(found**2))


@hypothesis.given(
  st.lists(
    st.one_of(st.just(-math.inf), st.floats(-1e4, 1e4)), min_size=1, max_size=9
  )
)
def test_a_sum_of_exponentials_is_that_of_60_digits(values):
  found = log_space.log_sum_exp(np.array([values, values]))
  with mpmath.workdps(60):
    total = mpmath.fsum(mpmath.exp(mpmath.mpf(value)) for value in values)
    exact = float(mpmath.log(total)) if total else -math.inf
  assert found.tolist() == [pytest.approx(exact, rel=1e-13, abs=1e-13)] * 2
