"""Tests that the chords err upwards, and by less than 1e-6."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.accounting import oracles
from tf_bdp.accounting import accountant, chord_table, sampled_gaussian

_LARGEST_RELATIVE_EXCESS = 1e-6  # Issue 2, "Speed".
# Each order has a table of its own: some of them, to the largest.
_ORDERS = (*accountant.DEFAULT_ORDERS[:-1:4], accountant.DEFAULT_ORDERS[-1])
# Rounding of the exact values that are compared with; see their own test.
_ROUNDING = 1e-12


def _assert_just_above(bounds, exact):
  assert np.all(bounds >= exact * (1 - _ROUNDING))
  assert np.all(bounds <= exact * (1 + _LARGEST_RELATIVE_EXCESS))


def _bounds(distances, q, orders, direction='tight'):
  table = chord_table.ChordTable(q, orders, direction)
  return table.evaluate(np.asarray(distances, dtype=np.float64))


@pytest.mark.parametrize(
  'q, direction',
  [
    *((q, 'tight') for q in (0, 1e-6, 1e-3, 0.02, 0.3, 0.9, 0.999, 1)),
    *((q, 'printed') for q in (1e-3, 0.9)),
  ],
)
def test_chords_are_above_the_exact_cost_by_at_most_1e_6(q, direction):
  distances = 10 ** np.random.default_rng(0).uniform(-12, 4, 2000)
  exact = sampled_gaussian.log_moments(distances, q, _ORDERS, direction)
  _assert_just_above(_bounds(distances, q, _ORDERS, direction), exact)


@hypothesis.given(
  log_q=st.floats(-9, 0),
  order=st.integers(1, 512),
  log_distance=st.floats(-12, 4),
  spread=st.sampled_from([0.0, 1e-9, 1e-3, 0.5]),
)
def test_chords_are_just_above_wherever_the_units_crowd(
  log_q, order, log_distance, spread
):
  offsets = np.random.default_rng(1).uniform(-spread, spread, 300)
  distances = 10 ** (log_distance + offsets)
  exact = sampled_gaussian.log_moments(distances, 10**log_q, [order])
  _assert_just_above(_bounds(distances, 10**log_q, (order,)), exact)


@pytest.mark.parametrize('q', [1e-4, 0.1, 0.95])
def test_chords_are_just_above_at_and_beside_the_borders_of_segments(q):
  orders = (1, 32, 512)
  steps = np.array([-(2.0**-20), -(2.0**-40), 2.0**-40, 2.0**-20])
  for border in 16.0 ** np.arange(-9, 4):
    neighbours = [np.nextafter(border, 0), np.nextafter(border, np.inf)]
    distances = np.array([*border * (1 + steps), border, *neighbours])
    exact = sampled_gaussian.log_moments(distances, q, orders)
    _assert_just_above(_bounds(distances, q, orders), exact)
    # Alone, a distance decides which segments are made.
    alone = [_bounds([distance], q, orders)[0] for distance in distances[-3:]]
    _assert_just_above(np.array(alone), exact[-3:])


def test_chords_are_above_the_sum_in_sixty_digits():
  distances = [3e-7, 0.0123, 0.77, 11.0, 3000.0]
  orders = (1, 16, 512)
  exact = oracles.log_moments(distances, 0.01, orders)
  bounds = _bounds(distances, 0.01, orders)
  assert np.all(bounds >= exact)
  _assert_just_above(bounds, exact)


def test_a_unit_at_distance_zero_costs_nothing():
  distances = np.array([0.0, 1e-3, 0.0])
  assert np.all(_bounds(distances, 0.3, (1, 5))[[0, 2]] == 0)
  assert np.all(_bounds(np.zeros(3), 0.3, (1, 5)) == 0)


def test_answers_do_not_depend_on_what_was_asked_before():
  generator = np.random.default_rng(2)
  batches = [
    10 ** generator.uniform(low, low + 2, 700) for low in (-3, 1, -10, -6, 0)
  ]
  orders = (1, 3, 20, 300)
  used = chord_table.ChordTable(0.07, orders, 'tight')
  for batch in batches:
    used.evaluate(batch)
  for batch in batches:
    np.testing.assert_array_equal(
      used.evaluate(batch), _bounds(batch, 0.07, orders)
    )


def test_answers_do_not_depend_on_the_other_units():
  distances = 10 ** np.random.default_rng(3).uniform(-8, 3, 1000)
  orders = (1, 10, 100)
  together = _bounds(distances, 0.2, orders)
  apart = _bounds(distances[::-97], 0.2, orders)
  np.testing.assert_array_equal(together[::-97], apart)


def test_few_units_are_evaluated_exactly():
  distances = np.linspace(0, 2, 100)
  actual = chord_table.log_moments_upper_bound(distances, 0.1, (1, 9), 'tight')
  np.testing.assert_array_equal(
    actual, sampled_gaussian.log_moments(distances, 0.1, (1, 9))
  )


@pytest.mark.parametrize('direction', sampled_gaussian.DIRECTIONS)
def test_many_units_are_bounded_from_above(direction):
  distances = np.random.default_rng(4).exponential(0.3, 5000)
  orders = (1, 9, 90)
  actual = chord_table.log_moments_upper_bound(
    distances, 0.1, orders, direction
  )
  exact = sampled_gaussian.log_moments(distances, 0.1, orders, direction)
  _assert_just_above(actual, exact)
