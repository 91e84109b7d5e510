"""Tests of `BayesianAccountant`: costs that were bounded where the data is."""

import functools
import math

import dp_accounting
import numpy as np
import pytest

from tests.accounting import builders, oracles
from tf_bdp.accounting import mean_bounds, sampled_gaussian

_DELTA = builders.DELTA
_ORDERS = builders.FEW_ORDERS
_T = 6
_event = builders.make_event
_reported = builders.reported
pytestmark = builders.ignore_best_order
moments_alone = builders.moments_alone
_estimated = pytest.mark.parametrize(
  'estimator', ['student_t', 'bernstein', 'betting']
)


def _accountant(composition='holder', total_rounds=_T, **settings):
  return builders.make_accountant(
    composition, total_rounds, **{'orders': _ORDERS, **settings}
  )


@functools.cache
def _rounds():
  return tuple(
    builders.random_event(seed, units=500, spread=9.0) for seed in range(4)
  )


@functools.cache
def _reports(estimator, **settings):
  """What clients would report of the rounds' distances, kept to themselves."""
  failure = _accountant(**settings).reporting(_DELTA).failure_probability
  bound = getattr(mean_bounds, estimator)
  result = []
  for event in _rounds():
    q, worst = event.participation_probability, 0.25
    *costs, worst = _T * sampled_gaussian.log_moments(
      [*event.squared_distances, worst], q, _ORDERS
    )
    result.append(
      _reported(bound(np.array(costs), failure, worst) / _T, failure)
    )
  return tuple(result)


def _fed(events, estimator, **settings):
  accountant = _accountant(estimator=estimator, **settings)
  for event in events:
    accountant.compose(event)
  return accountant


@functools.cache
def _measured_epsilon(estimator):
  return _fed(_rounds(), estimator).get_epsilon(_DELTA)


@_estimated
@pytest.mark.parametrize(
  'settings',
  [{}, {'estimator_delta': 1e-7}, {'count_orders': False}],
  ids=['default', 'estimator_delta', 'count_orders'],
)
def test_the_accountants_own_bounds_reported_give_its_own_epsilon(
  estimator, settings
):
  found = _fed(_reports(estimator, **settings), estimator, **settings)
  wanted = _fed(_rounds(), estimator, **settings)
  assert found.ledger == wanted.ledger
  found, wanted = (a.explain(_DELTA) for a in (found, wanted))
  assert found.pop('epsilon') == pytest.approx(wanted.pop('epsilon'), rel=1e-9)
  assert found.pop('fewest_units') is None
  assert wanted.pop('fewest_units') == 500
  assert found == wanted


@pytest.mark.parametrize('estimator', ['student_t', 'betting'])
def test_a_sum_of_costs_reported_as_equal_parts_gives_the_same_epsilon(
  estimator,
):
  # A client's steps, or all clients in a row, of which the sum is known.
  reports = _reports(estimator)
  total = np.sum([event.costs for event in reports], axis=0)
  mean = _reported(total / 4, reports[0].failure_probability)
  thrice = dp_accounting.SelfComposedDpEvent(mean, 3)
  for event in (
    dp_accounting.SelfComposedDpEvent(mean, 4),
    dp_accounting.ComposedDpEvent([mean, thrice]),
  ):
    accountant = _fed([event], estimator)
    assert accountant.get_epsilon(_DELTA) == pytest.approx(
      _measured_epsilon(estimator), rel=1e-9
    )
    assert accountant.explain(_DELTA)['rounds'] == 4


def test_rounds_may_be_measured_or_reported_in_any_order():
  reports, rounds = _reports('betting'), _rounds()
  mixed = _fed([reports[0], rounds[1], rounds[2], reports[3]], 'betting')
  assert mixed.get_epsilon(_DELTA) == pytest.approx(
    _measured_epsilon('betting'), rel=1e-9
  )
  known = dp_accounting.GaussianDpEvent(5.0)
  both = _fed([*rounds, known], 'betting')
  assert mixed.compose(known).get_epsilon(_DELTA) == pytest.approx(
    both.get_epsilon(_DELTA), rel=1e-9
  )


def test_reported_costs_are_added_up_as_they_are_by_product_as_well():
  costs = np.array([[0.01, 0.03, 0.1, 0.3, 0.7], [0.02, 0.02, 0.2, 0.2, 0.9]])
  failure = _DELTA / 10 / (3 * len(_ORDERS))
  accountant = _accountant('product')
  accountant.compose(_reported(costs[0], failure, worst=9.0), 2)
  accountant.compose(_reported(costs[1], failure, worst=9.0))
  expected = oracles.epsilon(
    _ORDERS, 2 * costs[0] + costs[1], 0.9 * _DELTA, 'tight'
  )
  assert accountant.get_epsilon(_DELTA) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize('inclusion', [1.0, 0.2])
def test_reported_costs_are_taken_as_they_are_but_for_the_worst_case(inclusion):
  worst = oracles.included(
    oracles.log_moments([9.0], 0.3, _ORDERS)[0], inclusion
  )
  costs = np.array([0.01, 0.03, 0.1, 0.3, 0.7])
  for reported, expected in ((costs, costs), (np.full(5, 1e3), worst)):
    event = _reported(reported, 1e-9, worst=9.0)
    event = builders.with_inclusion(event, inclusion)
    accountant = _accountant('product').compose(event, 2)
    assert accountant.get_epsilon(_DELTA) == pytest.approx(
      oracles.epsilon(_ORDERS, 2 * expected, 0.9 * _DELTA, 'tight'), rel=1e-9
    )


# --- How much of δ they need.


@pytest.mark.parametrize(
  'settings, bounds',
  [
    ({}, _T * 5),
    ({'count_orders': False}, _T),
    ({'estimator_delta': 1e-7}, _T * 5),
  ],
)
def test_the_failures_of_all_reported_bounds_add_up_to_the_part_kept(
  settings, bounds
):
  accountant = _accountant(**settings)
  kept = settings.get('estimator_delta', 1e-4)
  reporting = accountant.reporting(1e-3)
  assert reporting.failure_probability == pytest.approx(kept / bounds)
  # With all else that clients have to know.
  assert reporting.orders == _ORDERS
  assert reporting.estimator == accountant.settings['estimator']
  assert reporting.power == _T


@pytest.mark.parametrize('composition', ['panel', 'product'])
def test_only_holder_knows_the_number_of_bounds_in_advance(composition):
  with pytest.raises(ValueError, match="Only with composition='holder'"):
    _accountant(composition).reporting(_DELTA)


@pytest.mark.parametrize('delta', [0.0, 1.0, math.nan])
def test_at_a_delta_that_is_none_nothing_is_reported(delta):
  with pytest.raises(ValueError, match='target_delta must be above 0'):
    _accountant().reporting(delta)


@_estimated
def test_epsilon_is_refused_at_a_delta_smaller_than_costs_were_bounded_for(
  estimator,
):
  reports = _reports(estimator)
  accountant = _fed(reports, estimator)
  at_delta = accountant.get_epsilon(_DELTA)
  for delta in (0.99 * _DELTA, 1e-7, 1e-12):
    with pytest.raises(ValueError, match='bounded for a larger delta'):
      accountant.get_epsilon(delta)
    with pytest.raises(ValueError, match='bounded for a larger delta'):
      accountant.would_exceed(reports[0], 100.0, delta)
  # A larger one is more than enough, and the costs stay as they are.
  costs = np.sum([event.costs for event in reports], axis=0)
  assert accountant.get_epsilon(2 * _DELTA) == pytest.approx(
    oracles.epsilon(_ORDERS, costs, 1.8 * _DELTA, 'tight'), rel=1e-9
  )
  assert accountant.get_epsilon(2 * _DELTA) < at_delta


def test_an_estimator_delta_below_that_of_the_costs_is_refused():
  accountant = _fed(_reports('betting')[:1], 'betting', estimator_delta=1e-8)
  with pytest.raises(ValueError, match='they need 1e-06 of delta'):
    accountant.get_epsilon(0.5)


def test_product_refuses_more_rounds_than_costs_were_bounded_for():
  event = _reported([0.1] * 5, _DELTA / 10 / (2 * len(_ORDERS)))
  accountant = _accountant('product').compose(event, 2)
  assert accountant.get_epsilon(_DELTA) > 0
  accountant.compose(event)
  with pytest.raises(ValueError, match='or fewer rounds'):
    accountant.get_epsilon(_DELTA)


def test_one_report_bounded_too_loosely_is_enough_to_refuse():
  reports = _reports('student_t')
  loose = _reported([0.1] * 5, 1.01 * reports[0].failure_probability)
  accountant = _fed([*reports, loose], 'student_t')
  with pytest.raises(ValueError, match='bounded for a larger delta'):
    accountant.get_epsilon(_DELTA)


@_estimated
@pytest.mark.parametrize('settings', [{}, {'estimator_delta': 1e-6}])
def test_delta_inverts_epsilon_of_reported_costs(estimator, settings):
  accountant = _fed(_reports(estimator, **settings), estimator, **settings)
  # A worst case that is no better than the costs at any δ.
  worst = accountant.get_worst_case_epsilon(_DELTA)
  assert worst > accountant.get_epsilon(_DELTA)
  for delta in (_DELTA, 1e-4, 1e-2):
    epsilon = accountant.get_epsilon(delta)
    assert accountant.get_delta(epsilon) == pytest.approx(delta, rel=1e-6)


@_estimated
def test_no_delta_below_that_of_the_costs_is_told_for_them(estimator):
  accountant = _fed(_reports(estimator), estimator)
  # Above what costs give at their δ, where less would do for the tail.
  for epsilon in (
    accountant.get_epsilon(_DELTA) * 1.01,
    accountant.get_worst_case_epsilon(1e-9),
  ):
    assert accountant.get_delta(epsilon) == pytest.approx(_DELTA, rel=1e-6)


def test_would_exceed_tells_of_reports_and_changes_nothing():
  reports = _reports('bernstein')
  accountant = _fed(reports, 'bernstein')
  event = reports[1]
  after = _fed([*reports, event], 'bernstein').get_epsilon(_DELTA)
  with builders.unchanged(accountant):
    assert not accountant.would_exceed(event, after * 1.001, _DELTA)
    assert accountant.would_exceed(event, after * 0.999, _DELTA)


# --- Reports that do not fit.


@pytest.mark.parametrize(
  'composition, estimator, count, sentence',
  [
    *(
      (
        composition,
        'betting',
        count,
        rf'costs must be of the 5 orders .* Found {count}\.',
      )
      for composition in ('holder', 'product')
      for count in (0, 4, 6)
    ),
    ('panel', 'betting', 5, "use composition='holder'"),
    # It keeps nothing of δ for bounds that fail.
    ('holder', 'population', 5, 'keeps nothing of delta for that'),
    ('product', 'population', 5, 'keeps nothing of delta for that'),
  ],
)
def test_reports_that_do_not_fit_are_refused(
  composition, estimator, count, sentence
):
  accountant = _accountant(composition, estimator=estimator)
  accountant.compose(_event())
  report = _reported([0.1] * count)
  for event in (report, dp_accounting.ComposedDpEvent([_event(), report])):
    builders.assert_refused(accountant, event, sentence)


def test_reported_rounds_beyond_total_rounds_are_refused():
  report = _reported([0.1] * 5)
  accountant = _accountant(total_rounds=2).compose(_event()).compose(report)
  builders.assert_refused(accountant, report, 'this event would be round 3')
