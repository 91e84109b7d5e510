"""Tests of `sampled_gaussian` against mpmath sums and quadrature."""

import warnings

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.accounting import oracles
from tf_bdp.accounting import sampled_gaussian

_ORDERS = (1, 2, 3, 7, 32, 128, 512)
_PROBABILITIES = (0, 1e-6, 1e-4, 0.00427, 0.1, 0.5, 0.9, 0.999999, 1)
_SQUARED_DISTANCES = (0, 1e-12, 1e-6, 1e-3, 0.04, 1, 7.3, 150, 1e4)


def _strict_log_moments(*args):
  with warnings.catch_warnings(), np.errstate(all='raise', under='ignore'):
    warnings.simplefilter('error')
    return sampled_gaussian.log_moments(*args)


def _assert_equal_to_the_sum(distances, q, orders, direction):
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    actual = sampled_gaussian.log_moments(distances, q, orders, direction)
  expected = oracles.log_moments(distances, q, orders, direction)
  np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize('direction', sampled_gaussian.DIRECTIONS)
@pytest.mark.parametrize('q', _PROBABILITIES)
def test_log_moments_equal_the_sum_in_sixty_digits(q, direction):
  _assert_equal_to_the_sum(_SQUARED_DISTANCES, q, _ORDERS, direction)


@hypothesis.given(
  log_distances=st.lists(st.floats(-12, 4), min_size=1, max_size=4),
  log_q=st.floats(-8, 0),
  orders=st.lists(st.integers(1, 512), min_size=1, max_size=3, unique=True),
  direction=st.sampled_from(sampled_gaussian.DIRECTIONS),
)
def test_log_moments_equal_the_sum_at_random_places(
  log_distances, log_q, orders, direction
):
  distances = (10 ** np.array(log_distances)).tolist()
  _assert_equal_to_the_sum(distances, 10**log_q, sorted(orders), direction)


@hypothesis.given(
  seed=st.integers(0, 2**32 - 1),
  units=st.integers(1, 300),
  log_q=st.floats(-9, 0),
  direction=st.sampled_from(sampled_gaussian.DIRECTIONS),
)
def test_a_unit_costs_the_same_alone_and_among_others(
  seed, units, log_q, direction
):
  generator = np.random.default_rng(seed)
  distances = 10 ** generator.uniform(-14, 5, units)
  distances[generator.random(units) < 0.05] = 0.0
  q, orders = 10**log_q, (1, 4, 33, 200, 512)
  together = sampled_gaussian.log_moments(distances, q, orders, direction)
  some = generator.choice(units, min(units, 12), replace=False)
  alone = np.concatenate(
    [
      sampled_gaussian.log_moments(distances[i : i + 1], q, orders, direction)
      for i in some
    ]
  )
  np.testing.assert_allclose(together[some], alone, rtol=1e-11, atol=0)


@pytest.mark.parametrize('direction', sampled_gaussian.DIRECTIONS)
def test_the_cost_is_exactly_zero_without_participation(direction):
  actual = _strict_log_moments(_SQUARED_DISTANCES, 0.0, _ORDERS, direction)
  assert np.all(actual == 0)


@pytest.mark.parametrize('direction', sampled_gaussian.DIRECTIONS)
def test_the_cost_is_exactly_zero_at_distance_zero(direction):
  for q in _PROBABILITIES:
    actual = _strict_log_moments([0.0, 0.0, 1.0], q, _ORDERS, direction)
    assert np.all(actual[:2] == 0)


def test_full_participation_costs_that_of_the_gaussian_mechanism():
  actual = sampled_gaussian.log_moments(_SQUARED_DISTANCES, 1.0, _ORDERS)
  expected = oracles.gaussian_costs(_SQUARED_DISTANCES, _ORDERS)
  np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=0)


def test_extreme_arguments_give_finite_costs_without_a_warning():
  distances = [0, 5e-324, 1e-300, 1e-30, 1, 1e30, 1e199]
  for q in (0, 1e-300, 1e-16, 0.3, 1 - 1e-16, 1):
    for direction in sampled_gaussian.DIRECTIONS:
      with warnings.catch_warnings():
        warnings.simplefilter('error')
        costs = sampled_gaussian.log_moments(
          distances, q, (1, 2, 512, 2048), direction
        )
      assert np.all(np.isfinite(costs))
      assert np.all(costs >= 0)
      assert np.all(np.diff(costs, axis=0) >= 0)


@hypothesis.example(log_r2=-4.0, q=1e-3, order=1)
@hypothesis.example(log_r2=-4.0, q=0.95, order=6)
@hypothesis.example(log_r2=0.8, q=1e-3, order=6)
@hypothesis.example(log_r2=0.8, q=0.95, order=1)
@hypothesis.given(
  log_r2=st.floats(-4, 0.8),
  q=st.floats(1e-3, 0.999),
  order=st.integers(1, 8),
)
def test_the_cost_is_the_forward_divergence_and_bounds_the_reverse_one(
  log_r2, q, order
):
  r2 = 10**log_r2
  cost = sampled_gaussian.log_moments([r2], q, [order])[0, 0]
  forward = oracles.forward_log_moment(r2, q, order)
  reverse = oracles.reverse_log_moment(r2, q, order)
  assert cost == pytest.approx(forward, rel=1e-10)
  assert reverse <= cost * (1 + 1e-10)
  # And what Theorem 3 prints for the reverse one is a bound of it, too.
  assert oracles.printed_right(r2, q, order) >= reverse * (1 - 1e-10)


def test_the_printed_right_sum_is_always_the_larger_one():
  # Section 1: "always the larger of the two". Equal at q = 1.
  for q in _PROBABILITIES:
    tight = sampled_gaussian.log_moments(_SQUARED_DISTANCES, q, _ORDERS)
    for i, r2 in enumerate(_SQUARED_DISTANCES):
      for j, order in enumerate(_ORDERS):
        right = oracles.printed_right(r2, q, order)
        assert right >= tight[i, j] * (1 - 1e-10)


def test_the_cost_is_of_second_order_in_q_and_the_printed_one_of_first():
  # Leading terms for q → 0 at λ = 1: q² (e^{r²} - 1) and q (e^{r²} - 1).
  q, gain = 1e-6, np.expm1(1.0)
  tight = sampled_gaussian.log_moments([1.0], q, [1])[0, 0]
  printed = sampled_gaussian.log_moments([1.0], q, [1], 'printed')[0, 0]
  assert tight == pytest.approx(q**2 * gain, rel=1e-5)
  assert printed == pytest.approx(q * gain, rel=1e-5)


def test_the_result_has_a_row_for_each_unit_in_the_order_given():
  distances = np.array([3.0, 0.0, 1e-5, 3.0, 40.0])
  costs = sampled_gaussian.log_moments(distances, 0.2, [1, 2])
  assert costs.shape == (5, 2)
  np.testing.assert_array_equal(
    np.argsort(costs[:, 0], kind='stable'),
    np.argsort(distances, kind='stable'),
  )


@pytest.mark.parametrize('orders', [[2, 1], [1, 1, 2]])
def test_a_column_belongs_to_the_order_given_or_the_orders_are_refused(orders):
  try:
    costs = sampled_gaussian.log_moments([1.0], 1.0, orders)
  except ValueError:
    return
  np.testing.assert_allclose(costs, oracles.gaussian_costs([1.0], orders))


def test_no_units_give_no_rows():
  assert sampled_gaussian.log_moments([], 0.2, [1, 2]).shape == (0, 2)


@pytest.mark.parametrize(
  'distances, q, orders, direction, sentence',
  [
    ([1, np.nan], 0.5, [1], 'tight', '1 NaN of 2, the first at index 1'),
    ([np.inf, 1], 0.5, [1], 'tight', '1 infinite of 2, the first at index 0'),
    ([1, -1e-9], 0.5, [1], 'tight', '1 negative of 2, the first at index 1'),
    ([[1.0]], 0.5, [1], 'tight', r'must be a list. Found shape \(1, 1\)'),
    (
      [1],
      -0.1,
      [1],
      'tight',
      'probability must be between 0 and 1. Found -0.1',
    ),
    ([1], 1.1, [1], 'tight', 'probability must be between 0 and 1. Found 1.1'),
    ([1], np.nan, [1], 'tight', 'must be between 0 and 1. Found nan'),
    ([1], 0.5, [0], 'tight', 'orders must be positive integers'),
    ([1], 0.5, [1.5], 'tight', 'orders must be positive integers'),
    ([1], 0.5, [-3], 'tight', 'orders must be positive integers'),
    ([1], 0.5, [np.inf], 'tight', 'orders must be positive integers'),
    ([1], 0.5, [], 'tight', 'orders must be a non-empty list'),
    ([1], 0.5, [1], 'left', "direction must be one of .* Found 'left'"),
  ],
)
def test_bad_arguments_are_named(distances, q, orders, direction, sentence):
  with pytest.raises(ValueError, match=sentence):
    sampled_gaussian.log_moments(distances, q, orders, direction)
