"""Tests of `BayesianAccountant`: rounds of several groups, seen or included.

What such rounds cost at all is in accountant_test.py, where rounds of groups
are compared with the formulas.
"""

import math

import dp_accounting
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.accounting import builders, oracles
from tf_bdp.accounting import events, sampled_gaussian

_DELTA = builders.DELTA
_ORDERS = builders.ORDERS
_accountant = builders.make_accountant
_event = builders.make_event
_groups = builders.make_groups
_every_kind = builders.every_kind
_with_inclusion = builders.with_inclusion
pytestmark = builders.ignore_best_order
moments_alone = builders.moments_alone


# --- What a round of groups costs.


@_every_kind
def test_identical_groups_cost_what_one_of_them_does(composition, estimator):
  plain, single, triple = (
    _accountant(composition, estimator=estimator) for _ in range(3)
  )
  for seed, count in ((0, 1), (1, 3)):
    event = builders.random_event(seed)
    plain.compose(event, count)
    single.compose(events.ParallelEvent([event]), count)
    triple.compose(events.ParallelEvent([event] * 3), count)
  assert single.state_dict() == plain.state_dict()
  assert single.explain(_DELTA) == plain.explain(_DELTA)
  # In δ, too: a person is in one group, and only its bound must hold.
  found, wanted = (a.explain(_DELTA) for a in (triple, plain))
  assert found.pop('epsilon') == pytest.approx(wanted.pop('epsilon'), rel=1e-12)
  assert found == wanted
  assert found['fewest_units'] == 20
  assert triple.ledger == plain.ledger


def test_the_costliest_group_is_not_the_same_at_every_order():
  # A few far units count at high orders, many near ones at low orders.
  few_far = _event([0.2] + [0.0] * 99, 1.0, 0.25)
  many_near = _event([0.004] * 100, 1.0, 0.25)
  costs = [
    oracles.log_mean_exp(oracles.gaussian_costs(g.squared_distances, _ORDERS))
    for g in (few_far, many_near)
  ]
  assert costs[0][0] < costs[1][0] and costs[0][-1] > costs[1][-1]
  largest = np.maximum(*costs)
  for composition in ('panel', 'product'):
    accountant = _accountant(composition, estimator='population')
    accountant.compose(events.ParallelEvent([few_far, many_near]))
    for delta in (0.9, 0.1, 1e-5):
      assert accountant.get_epsilon(delta) == pytest.approx(
        oracles.epsilon(_ORDERS, largest, delta, 'tight'), rel=1e-9
      )


def test_a_panel_gains_where_not_the_same_group_is_far_in_every_round():
  near, far = np.linspace(0.0, 0.002, 8), np.linspace(0.01, 0.05, 8)
  epsilons = {}
  for composition in ('panel', 'holder'):
    accountant = _accountant(composition, 2, estimator='population')
    for pair in ((near, far), (far, near)):
      groups = [_event(distances, 1.0) for distances in pair]
      accountant.compose(events.ParallelEvent(groups))
    epsilons[composition] = accountant.get_epsilon(_DELTA)
  # Near to a root of two: half of the distances squared.
  assert epsilons['panel'] < 0.8 * epsilons['holder']


def test_thousands_of_units_in_groups_cost_what_they_do_group_by_group():
  # Many units of one q are looked up in a table, all groups at once.
  generator = np.random.default_rng(3)
  groups = [
    _event(generator.uniform(0, 0.1, units), q, 0.25)
    for units, q in ((300, 0.1), (400, 0.1), (5, 0.2), (700, 0.1))
  ]
  parallel = events.ParallelEvent(groups)
  accountant = _accountant('product', estimator='population', orders=(4,))
  accountant.compose(parallel)
  expected = oracles.accounted_epsilon(
    [(parallel, 1)], accountant.settings, _DELTA
  )
  assert accountant.get_epsilon(_DELTA) == pytest.approx(expected, rel=1e-6)


@_every_kind
@pytest.mark.parametrize('direction', sampled_gaussian.DIRECTIONS)
def test_no_figure_is_above_the_worst_case_of_the_ledger(
  composition, estimator, direction
):
  accountant = _accountant(
    composition, estimator=estimator, direction=direction
  )
  accountant.compose(events.ParallelEvent(_groups()), 5)
  delta = builders.tail_delta(estimator)
  worst = accountant.get_worst_case_epsilon(delta)
  assert accountant.get_epsilon(_DELTA) <= worst
  if direction == 'tight':
    expected = builders.rdp_epsilon(accountant.ledger, delta=delta)
    assert worst == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize('composition', builders.COMPOSITIONS)
def test_groups_at_the_worst_case_of_all_cost_what_the_rdp_accountant_says(
  composition,
):
  near = _event([0.0] * 4, 0.1, 0.25)
  far = _event([0.25] * 4, 0.3, 0.25)
  accountant = _accountant(composition)
  accountant.compose(events.ParallelEvent([near, far]), 5)
  expected = builders.rdp_epsilon(
    builders.sampled_gaussian(0.3, 2.0), 5, delta=0.9 * _DELTA
  )
  assert accountant.get_epsilon(_DELTA) == pytest.approx(expected, rel=1e-9)


def test_a_group_without_a_worst_case_leaves_the_event_without_one():
  parallel = events.ParallelEvent([_event(), _event(worst=None)])
  assert parallel.worst_case_squared_distance is None
  accountant = _accountant('product', estimator='student_t').compose(parallel)
  assert isinstance(accountant.ledger, dp_accounting.NonPrivateDpEvent)
  assert accountant.get_worst_case_epsilon(_DELTA) == math.inf
  assert accountant.get_epsilon(_DELTA) < math.inf
  for estimator in ('betting', 'bernstein'):
    with pytest.raises(ValueError, match='worst_case_squared_distance'):
      _accountant('product', estimator=estimator).compose(parallel)


@pytest.mark.parametrize('composition', ['holder', 'product'])
def test_without_a_panel_rounds_have_any_groups(composition):
  accountant = _accountant(composition)
  last = 0.0
  for groups in (_groups(), _groups()[:1], [*_groups(), _event(panel=True)]):
    accountant.compose(events.ParallelEvent(groups))
    assert accountant.get_epsilon(_DELTA) > last
    last = accountant.get_epsilon(_DELTA)
  assert accountant.explain(_DELTA)['rounds'] == 3
  assert accountant.explain(_DELTA)['fewest_units'] == 4


def test_a_round_of_many_groups_is_one_round_for_holder():
  event = events.ParallelEvent(_groups())
  accountant = _accountant('holder', total_rounds=2).compose(event, 2)
  builders.assert_refused(accountant, event, 'this event would be round 3')


# --- Panels that change.

_FIRST = events.ParallelEvent([_event(), _event([0.01] * 5)])


@pytest.mark.parametrize(
  'second, sentence',
  [
    pytest.param(
      events.ParallelEvent([_event([0.01] * 5), _event()]),
      r'The panels have \[4, 5\] units; those of the event \[5, 4\]',
      id='other sizes',
    ),
    pytest.param(
      events.ParallelEvent([_event()]),
      r'The panels have \[4, 5\] units; those of the event \[4\]',
      id='fewer groups',
    ),
    pytest.param(
      events.ParallelEvent([*_FIRST.groups, _event()]),
      r'The panels have \[4, 5\] units; those of the event \[4, 5, 4\]',
      id='more groups',
    ),
    pytest.param(_event(), r'those of the event \[4\]', id='no groups'),
    pytest.param(
      events.ParallelEvent([_event(panel=False), _event(panel=False)]),
      "composition='panel' needs events with panel=True",
      id='not a panel',
    ),
  ],
)
def test_panels_that_change_are_refused_and_nothing_is_changed(
  second, sentence
):
  both = dp_accounting.ComposedDpEvent([_FIRST, second])
  thrice = dp_accounting.SelfComposedDpEvent(second, 3)
  accountant = _accountant('panel').compose(_FIRST)
  for refused in (second, both, thrice):
    builders.assert_refused(accountant, refused, sentence)
  accountant.compose(_FIRST)
  assert accountant.state_dict()['ledger'] == [[0.25, 0.3, True, 2, 1.0]]
  # Nor may they within the first event.
  builders.assert_refused(_accountant('panel'), both, sentence)


# --- Groups that take part with a chance, for all to see.
#
# The cost is log(1 - a + a exp ℓ); see docs/accounting.md. That it is an upper
# bound of the true one is shown in tests/mechanisms.


@hypothesis.given(
  composition=builders.compositions,
  estimator=builders.estimators,
  direction=st.sampled_from(sampled_gaussian.DIRECTIONS),
  chances=st.lists(st.floats(0.01, 0.99), min_size=2, max_size=2, unique=True),
)
def test_epsilon_grows_with_the_chance_of_inclusion(
  composition, estimator, direction, chances
):
  found = []
  for chance in (0.0, *sorted(chances), 1.0):
    groups = [_with_inclusion(group, chance) for group in _groups()]
    accountant = _accountant(
      composition, estimator=estimator, direction=direction
    )
    accountant.compose(events.ParallelEvent(groups), 2)
    worst = accountant.get_worst_case_epsilon(_DELTA)
    found.append((accountant.get_epsilon(_DELTA), worst))
  assert found[0] == (0.0, 0.0)
  assert np.all(np.diff(found, axis=0) > 0)


@pytest.mark.parametrize('composition', builders.COMPOSITIONS)
def test_rounds_of_different_inclusion_are_kept_apart_in_the_ledger(
  composition,
):
  accountant = _accountant(composition)
  for probability, count in ((0.2, 1), (0.2, 2), (0.3, 1), (1.0, 1), (0.2, 1)):
    accountant.compose(_with_inclusion(_event(), probability), count)
  assert accountant.state_dict()['ledger'] == [
    [0.25, 0.3, True, count, probability]
    for count, probability in ((3, 0.2), (1, 0.3), (1, 1.0), (1, 0.2))
  ]
  (worst,) = oracles.log_moments([0.25], 0.3, _ORDERS)
  expected = sum(
    count * oracles.included(worst, a)
    for count, a in ((4, 0.2), (1, 0.3), (1, 1.0))
  )
  assert accountant.get_worst_case_epsilon(_DELTA) == pytest.approx(
    oracles.epsilon(_ORDERS, expected, _DELTA, 'tight'), rel=1e-9
  )


@pytest.mark.parametrize('composition', builders.COMPOSITIONS)
@pytest.mark.parametrize('probability', [0.0, 0.1, 1.0])
def test_as_an_event_the_ledger_leaves_the_gain_of_inclusion_out(
  composition, probability
):
  plain, other = (_accountant(composition) for _ in range(2))
  plain.compose(_event(), 4)
  other.compose(_with_inclusion(_event(), probability), 4)
  assert other.ledger == plain.ledger
  epsilon = builders.rdp_epsilon(other.ledger)
  worst = other.get_worst_case_epsilon(_DELTA)
  assert worst <= epsilon * (1 + 1e-12)
  assert (worst < 0.9 * epsilon) == (probability < 1)
