"""Tests of rounds of several groups, and of costs bounded elsewhere."""

import copy
import dataclasses
import functools
import json
import math

import attr
import dp_accounting
import mpmath
import numpy as np
import pytest

from tests.accounting import oracles
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import (
  comparison,
  events,
  ledger,
  mean_bounds,
  privacy_profiles,
  privacy_report,
  sampled_gaussian,
)

_DELTA = 1e-5
_ORDERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
_FEW_ORDERS = (1, 2, 4, 8, 16)
_ESTIMATORS = tuple(mean_bounds.ESTIMATORS)
_every_kind = pytest.mark.parametrize(
  'composition, estimator',
  [(c, e) for c in accountant_lib.COMPOSITIONS for e in _ESTIMATORS],
)
pytestmark = pytest.mark.filterwarnings('ignore:The best order')


@pytest.fixture(autouse=True, scope='module')
def _moments_alone():
  """These tests are about moments: no figure is replaced by exact DP."""
  with pytest.MonkeyPatch.context() as patch:
    unbounded = privacy_profiles.UnboundedProfiles()
    patch.setattr(accountant_lib, '_worst_case', lambda _: unbounded)
    yield


def _accountant(composition='panel', total_rounds=10, **settings):
  if composition == 'holder':
    settings['total_rounds'] = total_rounds
  settings.setdefault('orders', _ORDERS)
  settings.setdefault('estimator', 'betting')  # By moments.
  return accountant_lib.BayesianAccountant(composition, **settings)


def _event(distances=(0.01, 0.02, 0.05, 0.04), q=0.3, worst=0.25, panel=True):
  return events.BayesianGaussianEvent(distances, q, worst, panel)


def _random_event(seed=0, units=20, q=0.3, worst=0.25, spread=4.0):
  generator = np.random.default_rng(seed)
  return _event(worst * generator.beta(0.5, spread, units), q, worst)


def _groups():
  """Groups that differ in their distances, sizes, q and worst cases."""
  return [
    _random_event(0),
    _random_event(1, units=12, q=0.05, worst=0.4),
    _random_event(2, units=30, q=0.6, worst=0.1),
  ]


# --- Parallel events: what a round costs.


@_every_kind
def test_a_parallel_event_of_one_group_is_that_group(composition, estimator):
  plain, parallel = (
    _accountant(composition, estimator=estimator) for _ in range(2)
  )
  for seed, count in ((0, 1), (1, 3)):
    event = _random_event(seed)
    plain.compose(event, count)
    parallel.compose(events.ParallelEvent([event]), count)
  assert parallel.state_dict() == plain.state_dict()
  assert parallel.explain(_DELTA) == plain.explain(_DELTA)
  assert parallel.explain(_DELTA)['fewest_units'] == 20


@_every_kind
def test_identical_groups_cost_what_one_of_them_does(composition, estimator):
  plain, parallel = (
    _accountant(composition, estimator=estimator) for _ in range(2)
  )
  for seed, count in ((0, 1), (1, 3)):
    event = _random_event(seed)
    plain.compose(event, count)
    parallel.compose(events.ParallelEvent([event] * 3), count)
  # In δ, too: a person is in one group, and only its bound must hold.
  found, wanted = (a.explain(_DELTA) for a in (parallel, plain))
  assert found.pop('epsilon') == pytest.approx(wanted.pop('epsilon'), rel=1e-12)
  assert found == wanted
  assert parallel.ledger == plain.ledger


@_every_kind
@pytest.mark.parametrize('order', [1, 2, 4])
def test_at_each_order_a_round_costs_what_the_costliest_group_does(
  composition, estimator, order
):
  # With a single order, ε grows with its cost.
  make = functools.partial(
    _accountant,
    composition,
    total_rounds=2,
    orders=(order,),
    estimator=estimator,
    conversion='chernoff',
  )
  groups = [
    _event([0.9] * 5 + [0.05] * 145, 0.8, 1.0),  # The farthest unit,
    _event([0.4] * 150, 0.8, 1.0),  # and the largest mean.
    _event([0.05] * 200, 0.8, 1.0),
  ]
  alone = [make().compose(group).get_epsilon(0.5) for group in groups]
  together = make().compose(events.ParallelEvent(groups))
  assert together.get_epsilon(0.5) == pytest.approx(max(alone), rel=1e-12)
  assert min(alone) < 0.99 * max(alone)


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


def _costs(group, orders=_FEW_ORDERS):
  """ℓ of every unit, in 60 digits."""
  q = group.participation_probability
  return np.array(
    [
      [oracles.log_moment(r2, q, order) for order in orders]
      for r2 in group.squared_distances
    ]
  )


def _worst_costs(rounds, orders=_FEW_ORDERS):
  """Of the farthest unit that a round allows, at its largest q."""
  return sum(
    np.array(
      [
        oracles.log_moment(
          max(g.worst_case_squared_distance for g in groups),
          max(g.participation_probability for g in groups),
          order,
        )
        for order in orders
      ]
    )
    for groups in rounds
  )


def _group_worst_costs(group, orders=_FEW_ORDERS):
  return _worst_costs([[group]], orders)


def _slow_costs(composition, rounds, bound):
  """Sections 3 and 5: sums of maxima, or for a panel the maximum of sums."""
  if composition == 'panel':
    worst = _worst_costs(rounds)
    return np.max(
      [
        bound(sum(_costs(groups[i]) for groups in rounds), worst)
        for i in range(len(rounds[0]))
      ],
      axis=0,
    )
  power = len(rounds) if composition == 'holder' else 1
  return sum(
    np.max(
      [
        bound(power * _costs(group), power * _group_worst_costs(group)) / power
        for group in groups
      ],
      axis=0,
    )
    for groups in rounds
  )


def _alternating(q=(1.0, 1.0)):
  """Two rounds; who is far in one of them is near in the other."""
  near, far = np.linspace(0.0, 0.002, 8), np.linspace(0.01, 0.05, 8)
  return [
    [_event(near, q[0]), _event(far, q[1])],
    [_event(far, q[0]), _event(near, q[1])],
  ]


@_every_kind
@pytest.mark.parametrize('q', [(1.0, 1.0), (0.3, 0.3), (0.2, 0.7)])
def test_maxima_are_added_up_but_of_a_panel_sums_are_compared(
  composition, estimator, q
):
  rounds = _alternating(q)
  accountant = _accountant(
    composition, total_rounds=2, estimator=estimator, orders=_FEW_ORDERS
  )
  for groups in rounds:
    accountant.compose(events.ParallelEvent(groups))
  kept, bound = 0.0, lambda costs, worst: oracles.log_mean_exp(costs)
  if estimator != 'population':
    kept = _DELTA / 10
    failure = kept / len(_FEW_ORDERS) / (1 if composition == 'panel' else 2)
    function = getattr(mean_bounds, estimator)

    def bound(costs, worst):
      return function(costs, failure, worst)

  costs = _slow_costs(composition, rounds, bound)
  assert accountant.get_epsilon(_DELTA) == pytest.approx(
    min(
      oracles.epsilon(_FEW_ORDERS, costs, _DELTA - kept, 'tight'),
      oracles.epsilon(_FEW_ORDERS, _worst_costs(rounds), _DELTA, 'tight'),
    ),
    rel=1e-9,
  )


def test_a_panel_gains_where_not_the_same_group_is_far_in_every_round():
  epsilons = {}
  for composition in ('panel', 'holder'):
    accountant = _accountant(
      composition, total_rounds=2, estimator='population'
    )
    for groups in _alternating():
      accountant.compose(events.ParallelEvent(groups))
    epsilons[composition] = accountant.get_epsilon(_DELTA)
  # Near to a root of two: half of the distances squared.
  assert epsilons['panel'] < 0.8 * epsilons['holder']


@pytest.mark.parametrize('composition', accountant_lib.COMPOSITIONS)
def test_groups_may_take_part_with_different_probabilities(composition):
  groups = _groups()
  accountant = _accountant(
    composition, total_rounds=2, estimator='population', orders=_FEW_ORDERS
  )
  accountant.compose(events.ParallelEvent(groups), 2)
  costs = _slow_costs(
    composition, [groups] * 2, lambda costs, worst: oracles.log_mean_exp(costs)
  )
  assert accountant.get_epsilon(_DELTA) == pytest.approx(
    oracles.epsilon(_FEW_ORDERS, costs, _DELTA, 'tight'), rel=1e-9
  )


def test_thousands_of_units_in_groups_cost_what_they_do_group_by_group():
  # Many units of one q are looked up in a table, all groups at once.
  generator = np.random.default_rng(3)
  groups = [
    _event(generator.uniform(0, 0.1, units), q, 0.25)
    for units, q in ((300, 0.1), (400, 0.1), (5, 0.2), (700, 0.1))
  ]
  parallel = _accountant('product', estimator='population', orders=(4,))
  parallel.compose(events.ParallelEvent(groups))
  wanted = max(
    float(oracles.log_mean_exp(_costs(group, (4,)))[0]) for group in groups
  )
  expected = oracles.epsilon((4,), [wanted], _DELTA, 'tight')
  assert parallel.get_epsilon(_DELTA) == pytest.approx(expected, rel=1e-6)


@_every_kind
@pytest.mark.parametrize('direction', ['tight', 'printed'])
def test_no_figure_is_above_the_worst_case_of_the_ledger(
  composition, estimator, direction
):
  accountant = _accountant(
    composition, estimator=estimator, direction=direction
  )
  for count in (1, 4):
    accountant.compose(events.ParallelEvent(_groups()), count)
    worst = accountant.get_worst_case_epsilon(_DELTA)
    assert accountant.get_epsilon(_DELTA) <= worst
    if direction == 'tight':
      rdp = dp_accounting.rdp.RdpAccountant([order + 1 for order in _ORDERS])
      rdp.compose(accountant.ledger)
      assert worst == pytest.approx(rdp.get_epsilon(_DELTA), rel=1e-9)


def test_groups_at_the_worst_case_of_all_cost_what_the_rdp_accountant_says():
  near = _event([0.0] * 4, 0.1, 0.25)
  far = _event([0.25] * 4, 0.3, 0.25)
  sampled = dp_accounting.PoissonSampledDpEvent(
    0.3, dp_accounting.GaussianDpEvent(2.0)
  )
  rdp = dp_accounting.rdp.RdpAccountant([order + 1 for order in _ORDERS])
  wanted = rdp.compose(sampled, 5).get_epsilon(_DELTA)
  for composition in accountant_lib.COMPOSITIONS:
    accountant = _accountant(composition)
    accountant.compose(events.ParallelEvent([near, far]), 5)
    assert accountant.get_epsilon(_DELTA) == pytest.approx(wanted, rel=1e-9)


# --- Parallel events: the ledger.


def test_the_ledger_of_a_parallel_event_dominates_that_of_each_group():
  groups = _groups()
  parallel = events.ParallelEvent(groups)
  assert parallel.participation_probability == 0.6
  assert parallel.worst_case_squared_distance == 0.4
  ((event, entry),) = ledger.rounds_of(parallel, 3)
  assert event is parallel
  assert entry == ledger.Entry(0.4, 0.6, True, 3)
  compose = functools.partial(_dp_epsilon, count=3)
  alone = [compose(group) for group in groups]
  assert compose(parallel) >= max(alone) > min(alone)


def _dp_epsilon(event, count=1):
  entries = [entry for _, entry in ledger.rounds_of(event, count)]
  rdp = dp_accounting.rdp.RdpAccountant(list(range(2, 40)))
  return rdp.compose(ledger.to_dp_event(entries)).get_epsilon(_DELTA)


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


def test_an_event_is_the_only_group_of_itself():
  event = _event()
  assert event.groups == (event,)
  assert events.ParallelEvent([event]).groups == event.groups


def test_a_parallel_event_cannot_be_changed_and_compares_by_contents():
  event = events.ParallelEvent(iter(_groups()))
  assert event == events.ParallelEvent(_groups())
  assert event != events.ParallelEvent(_groups()[:2])
  with pytest.raises(attr.exceptions.FrozenInstanceError):
    event.groups = ()
  assert repr(event).count('units>') == 3


# --- Parallel events: bad input.


@pytest.mark.parametrize(
  'group',
  [
    events.ParallelEvent([_event()]),
    dp_accounting.GaussianDpEvent(1.0),
    dp_accounting.NoOpDpEvent(),
    events.ReportedCostEvent([0.1] * 5, 1e-9, 0.3, 0.25),
    None,
    0.25,
  ],
  ids=lambda group: type(group).__name__,
)
def test_groups_that_are_no_events_of_distances_are_refused(group):
  for groups in ([group], [_event(), group], [group, _event()]):
    with pytest.raises(TypeError, match='BayesianGaussianEvent'):
      events.ParallelEvent(groups)


def test_no_groups_are_refused():
  with pytest.raises(ValueError, match='groups must be at least one event'):
    events.ParallelEvent([])


@pytest.mark.parametrize('flags', [(True, False), (False, False, True)])
def test_groups_are_panels_all_or_none(flags):
  with pytest.raises(ValueError, match='All groups must be panels, or none'):
    events.ParallelEvent([_event(panel=flag) for flag in flags])


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
  accountant = _accountant('panel').compose(_FIRST)
  before = copy.deepcopy(accountant.state_dict())
  for refused in (
    second,
    dp_accounting.ComposedDpEvent([_FIRST, second]),
    dp_accounting.SelfComposedDpEvent(second, 3),
  ):
    assert not accountant.supports(refused)
    with pytest.raises(ValueError, match=sentence):
      accountant.compose(refused)
    with pytest.raises(ValueError, match=sentence):
      accountant.would_exceed(refused, 1.0, _DELTA)
    assert accountant.state_dict() == before
  accountant.compose(_FIRST)
  assert accountant.state_dict()['ledger'] == [[0.25, 0.3, True, 2, 1.0]]


def test_a_panel_that_changes_within_one_event_is_refused():
  accountant = _accountant('panel')
  event = dp_accounting.ComposedDpEvent([_FIRST, _event()])
  with pytest.raises(ValueError, match=r'The panels have \[4, 5\] units'):
    accountant.compose(event)
  assert accountant.state_dict() == _accountant('panel').state_dict()


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
  accountant = _accountant('holder', total_rounds=2)
  accountant.compose(events.ParallelEvent(_groups()), 2)
  before = copy.deepcopy(accountant.state_dict())
  with pytest.raises(ValueError, match='this event would be round 3'):
    accountant.compose(events.ParallelEvent(_groups()))
  assert accountant.state_dict() == before


# --- Reported costs.

_T = 6


def _reported(costs, failure_probability=1e-9, q=0.3, worst=0.25):
  return events.ReportedCostEvent(costs, failure_probability, q, worst)


def _own_bounds(event, accountant, estimator, power, delta=_DELTA):
  """What a client would report of distances that it keeps to itself."""
  failure = accountant.failure_probability(delta)
  orders = accountant.settings['orders']
  q = event.participation_probability
  costs = sampled_gaussian.log_moments(event.squared_distances, q, orders)
  worst = sampled_gaussian.log_moments(
    [event.worst_case_squared_distance], q, orders
  )
  bound = getattr(mean_bounds, estimator)
  return bound(power * costs, failure, power * worst[0]) / power, failure


@functools.lru_cache
def _rounds():
  return tuple(_random_event(seed, units=500, spread=9.0) for seed in range(4))


def _fed_with_distances(estimator, **settings):
  accountant = _accountant(
    'holder', _T, estimator=estimator, orders=_FEW_ORDERS, **settings
  )
  for event in _rounds():
    accountant.compose(event)
  return accountant


@functools.lru_cache
def _reports(estimator, **settings):
  """Of the rounds as reported costs."""
  accountant = _fed_with_distances(estimator, **dict(settings))
  result = []
  for event in _rounds():
    costs, failure = _own_bounds(event, accountant, estimator, _T)
    result.append(_reported(costs, failure))
  return tuple(result)


def _fed_with_reports(estimator, **settings):
  accountant = _accountant(
    'holder', _T, estimator=estimator, orders=_FEW_ORDERS, **settings
  )
  for event in _reports(estimator, **settings):
    accountant.compose(event)
  return accountant


_estimated = pytest.mark.parametrize(
  'estimator', ['student_t', 'bernstein', 'betting']
)


@_estimated
@pytest.mark.parametrize(
  'settings',
  [{}, {'estimator_delta': 1e-7}, {'count_orders': False}],
  ids=['default', 'estimator_delta', 'count_orders'],
)
def test_the_accountants_own_bounds_reported_give_its_own_epsilon(
  estimator, settings
):
  wanted = _fed_with_distances(estimator, **settings)
  found = _fed_with_reports(estimator, **settings)
  assert found.get_epsilon(_DELTA) == pytest.approx(
    wanted.get_epsilon(_DELTA), rel=1e-9
  )
  assert found.ledger == wanted.ledger
  known = {'epsilon', 'fewest_units'}
  details = [a.explain(_DELTA) for a in (found, wanted)]
  assert [d['fewest_units'] for d in details] == [None, 500]
  for name in details[1].keys() - known:
    assert details[0][name] == details[1][name], name


@pytest.mark.parametrize('estimator', ['student_t', 'betting'])
def test_a_sum_of_costs_reported_as_equal_parts_gives_the_same_epsilon(
  estimator,
):
  # A client's steps, or all clients in a row, of which the sum is known.
  events_ = _reports(estimator)
  total = np.sum([event.costs for event in events_], axis=0)
  mean = _reported(total / 4, events_[0].failure_probability)
  for event in (
    dp_accounting.SelfComposedDpEvent(mean, 4),
    dp_accounting.ComposedDpEvent(
      [mean, dp_accounting.SelfComposedDpEvent(mean, 3)]
    ),
  ):
    accountant = _accountant(
      'holder', _T, estimator=estimator, orders=_FEW_ORDERS
    )
    accountant.compose(event)
    assert accountant.get_epsilon(_DELTA) == pytest.approx(
      _fed_with_distances(estimator).get_epsilon(_DELTA), rel=1e-9
    )
    assert accountant.explain(_DELTA)['rounds'] == 4


def test_rounds_may_be_measured_or_reported_in_any_order():
  reports = _reports('betting')
  accountant = _accountant('holder', _T, orders=_FEW_ORDERS)
  for event in (reports[0], _rounds()[1], _rounds()[2], reports[3]):
    accountant.compose(event)
  assert accountant.get_epsilon(_DELTA) == pytest.approx(
    _fed_with_distances('betting').get_epsilon(_DELTA), rel=1e-9
  )
  accountant.compose(dp_accounting.GaussianDpEvent(5.0))
  both = _fed_with_distances('betting')
  both.compose(dp_accounting.GaussianDpEvent(5.0))
  assert accountant.get_epsilon(_DELTA) == pytest.approx(
    both.get_epsilon(_DELTA), rel=1e-9
  )


def test_reported_costs_are_added_up_as_they_are_by_product_as_well():
  costs = np.array([[0.01, 0.03, 0.1, 0.3, 0.7], [0.02, 0.02, 0.2, 0.2, 0.9]])
  failure = _DELTA / 10 / (3 * len(_FEW_ORDERS))
  accountant = _accountant('product', orders=_FEW_ORDERS)
  accountant.compose(_reported(costs[0], failure, worst=9.0), 2)
  accountant.compose(_reported(costs[1], failure, worst=9.0))
  assert accountant.get_epsilon(_DELTA) == pytest.approx(
    oracles.epsilon(
      _FEW_ORDERS, 2 * costs[0] + costs[1], 0.9 * _DELTA, 'tight'
    ),
    rel=1e-9,
  )


def test_reported_costs_beyond_the_worst_case_count_as_the_worst_case():
  accountant = _accountant('holder', orders=_FEW_ORDERS)
  accountant.compose(_reported([1e3] * 5))
  sampled = dp_accounting.PoissonSampledDpEvent(
    0.3, dp_accounting.GaussianDpEvent(2.0)
  )
  rdp = dp_accounting.rdp.RdpAccountant([order + 1 for order in _FEW_ORDERS])
  assert accountant.get_epsilon(_DELTA) == pytest.approx(
    rdp.compose(sampled).get_epsilon(_DELTA), rel=1e-9
  )


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
  accountant = _accountant('holder', _T, orders=_FEW_ORDERS, **settings)
  kept = settings.get('estimator_delta', 1e-4)
  assert accountant.failure_probability(1e-3) == pytest.approx(kept / bounds)


@pytest.mark.parametrize('composition', ['panel', 'product'])
def test_only_holder_knows_the_number_of_bounds_in_advance(composition):
  with pytest.raises(ValueError, match="Only with composition='holder'"):
    _accountant(composition).failure_probability(_DELTA)


@pytest.mark.parametrize('delta', [0.0, 1.0, math.nan])
def test_a_delta_that_is_none_has_no_failure_probability(delta):
  with pytest.raises(ValueError, match='target_delta must be above 0'):
    _accountant('holder').failure_probability(delta)


@_estimated
def test_epsilon_is_refused_at_a_delta_smaller_than_costs_were_bounded_for(
  estimator,
):
  accountant = _fed_with_reports(estimator)
  at_delta = accountant.get_epsilon(_DELTA)
  for delta in (0.99 * _DELTA, 1e-7, 1e-12):
    with pytest.raises(ValueError, match='bounded for a larger delta'):
      accountant.get_epsilon(delta)
    with pytest.raises(ValueError, match='bounded for a larger delta'):
      accountant.would_exceed(_reports(estimator)[0], 100.0, delta)
  # A larger one is more than enough, and the costs stay as they are.
  costs = np.sum([event.costs for event in _reports(estimator)], axis=0)
  assert accountant.get_epsilon(2 * _DELTA) == pytest.approx(
    oracles.epsilon(_FEW_ORDERS, costs, 1.8 * _DELTA, 'tight'), rel=1e-9
  )
  assert accountant.get_epsilon(2 * _DELTA) < at_delta


def test_an_estimator_delta_below_that_of_the_costs_is_refused():
  accountant = _accountant(
    'holder', _T, orders=_FEW_ORDERS, estimator_delta=1e-8
  )
  accountant.compose(_reports('betting')[0])
  with pytest.raises(ValueError, match='they need 1e-06 of delta'):
    accountant.get_epsilon(0.5)


def test_product_refuses_more_rounds_than_costs_were_bounded_for():
  failure = _DELTA / 10 / (2 * len(_FEW_ORDERS))
  accountant = _accountant('product', orders=_FEW_ORDERS)
  accountant.compose(_reported([0.1] * 5, failure), 2)
  assert accountant.get_epsilon(_DELTA) > 0
  accountant.compose(_reported([0.1] * 5, failure))
  with pytest.raises(ValueError, match='or fewer rounds'):
    accountant.get_epsilon(_DELTA)


def test_one_report_bounded_too_loosely_is_enough_to_refuse():
  accountant = _fed_with_reports('student_t')
  loose = _reports('student_t')[0].failure_probability * 1.01
  accountant.compose(_reported([0.1] * 5, loose))
  with pytest.raises(ValueError, match='bounded for a larger delta'):
    accountant.get_epsilon(_DELTA)


@_estimated
@pytest.mark.parametrize('settings', [{}, {'estimator_delta': 1e-6}])
def test_delta_inverts_epsilon_of_reported_costs(estimator, settings):
  accountant = _fed_with_reports(estimator, **settings)
  # A worst case that is no better than the costs at any δ.
  assert accountant.get_worst_case_epsilon(_DELTA) > accountant.get_epsilon(
    _DELTA
  )
  for delta in (_DELTA, 1e-4, 1e-2):
    epsilon = accountant.get_epsilon(delta)
    assert accountant.get_delta(epsilon) == pytest.approx(delta, rel=1e-6)


@_estimated
def test_no_delta_below_that_of_the_costs_is_told_for_them(estimator):
  accountant = _fed_with_reports(estimator)
  # Just above what costs give at their δ, where less would do for the tail.
  epsilon = accountant.get_epsilon(_DELTA) * 1.01
  assert epsilon < accountant.get_worst_case_epsilon(_DELTA)
  assert accountant.get_delta(epsilon) == pytest.approx(_DELTA, rel=1e-6)
  # The worst case needs no bounds: of it, any δ is told.
  large = accountant.get_worst_case_epsilon(1e-9)
  assert accountant.get_delta(large) == pytest.approx(1e-9, rel=1e-6)


@pytest.mark.parametrize('composition', ['holder', 'product'])
@pytest.mark.parametrize('count', [0, 1, 4, 6])
def test_costs_of_another_number_of_orders_are_refused(composition, count):
  accountant = _accountant(composition, orders=_FEW_ORDERS)
  accountant.compose(_event())
  before = copy.deepcopy(accountant.state_dict())
  both = dp_accounting.ComposedDpEvent([_event(), _reported([0.1] * count)])
  assert not accountant.supports(both)
  with pytest.raises(
    ValueError, match=rf'costs must be of the 5 orders .* Found {count}\.'
  ):
    accountant.compose(both)
  assert accountant.state_dict() == before


def test_a_panel_takes_no_reported_costs():
  accountant = _accountant('panel', orders=_FEW_ORDERS).compose(_event())
  before = copy.deepcopy(accountant.state_dict())
  event = dp_accounting.ComposedDpEvent([_event(), _reported([0.1] * 5)])
  with pytest.raises(ValueError, match="use composition='holder'"):
    accountant.compose(event)
  with pytest.raises(ValueError, match="use composition='holder'"):
    accountant.would_exceed(event, 1.0, _DELTA)
  assert accountant.state_dict() == before


@pytest.mark.parametrize('composition', ['holder', 'product'])
def test_a_population_takes_no_reported_costs(composition):
  # It keeps nothing of δ for bounds that fail.
  accountant = _accountant(
    composition, estimator='population', orders=_FEW_ORDERS
  )
  accountant.compose(_event())
  before = copy.deepcopy(accountant.state_dict())
  for event in (
    _reported([0.1] * 5),
    dp_accounting.ComposedDpEvent([_event(), _reported([0.1] * 5)]),
  ):
    assert not accountant.supports(event)
    for ask in (
      accountant.compose,
      lambda event: accountant.would_exceed(event, 1.0, _DELTA),
    ):
      with pytest.raises(ValueError, match='keeps nothing of delta for that'):
        ask(event)
    assert accountant.state_dict() == before


def test_reported_rounds_beyond_total_rounds_are_refused():
  accountant = _accountant('holder', 2, orders=_FEW_ORDERS)
  accountant.compose(_event()).compose(_reported([0.1] * 5))
  before = copy.deepcopy(accountant.state_dict())
  with pytest.raises(ValueError, match='this event would be round 3'):
    accountant.compose(_reported([0.1] * 5))
  assert accountant.state_dict() == before


@pytest.mark.parametrize('bad', [math.nan, math.inf, -1e-12])
@pytest.mark.parametrize('place', [0, 4])
def test_costs_that_are_none_are_refused(bad, place):
  costs = [0.1] * 5
  costs[place] = bad
  with pytest.raises(ValueError, match='costs must be finite and non-neg'):
    _reported(costs)


@pytest.mark.parametrize(
  'change, sentence',
  [
    ({'failure_probability': 0.0}, 'failure_probability must be above 0'),
    ({'failure_probability': 1.0}, 'failure_probability must be above 0'),
    ({'failure_probability': math.nan}, 'failure_probability must be above 0'),
    ({'q': 1.1}, 'participation_probability must be between 0 and 1'),
    ({'q': -0.1}, 'participation_probability must be between 0 and 1'),
    ({'worst': -1.0}, 'worst_case_squared_distance must be finite'),
    ({'worst': math.inf}, 'worst_case_squared_distance must be finite'),
    ({'worst': math.nan}, 'worst_case_squared_distance must be finite'),
  ],
)
def test_bad_numbers_beside_the_costs_are_refused(change, sentence):
  with pytest.raises(ValueError, match=sentence):
    _reported([0.1], **change)


def test_the_text_of_a_report_does_not_tell_its_costs():
  event = _reported([0.125, 0.375])
  assert '<2 orders>' in repr(event)
  assert '0.125' not in repr(event) and '0.375' not in repr(event)
  with pytest.raises(attr.exceptions.FrozenInstanceError):
    event.costs = (0.0, 0.0)


def test_reported_rounds_enter_the_ledger_with_their_worst_case():
  event = dp_accounting.SelfComposedDpEvent(_reported([0.1] * 5), 3)
  ((reported, entry),) = ledger.rounds_of(event)
  assert isinstance(reported, events.ReportedCostEvent)
  assert entry == ledger.Entry(0.25, 0.3, True, 3)


# --- Groups that take part with a chance, for all to see.
#
# The cost is log(1 - a + a exp ℓ); see docs/accounting.md. That it is an upper
# bound of the true one is shown in instance_mechanism_test.py.


def _with_inclusion(event, probability):
  return attr.evolve(event, inclusion_probability=probability)


def _exactly_included(log_costs, probability):
  """log(1 - a + a exp ℓ), in 60 digits and more where a is tiny."""

  def included(cost):
    with mpmath.workdps(60):
      excess = mpmath.mpf(probability) * mpmath.expm1(mpmath.mpf(cost))
      return float(mpmath.log1p(excess))

  return np.vectorize(included, otypes=[float])(log_costs)


_log_moment = functools.lru_cache(None)(oracles.log_moment)
_COSTS = np.array(
  [0.0, 1e-300, 1e-100, 1e-17, 1e-9, 1e-3, 0.5, 3.0, 36.0, 800.0, 1e5, 1e12]
)


@pytest.mark.parametrize(
  'probability', [1e-300, 1e-17, 1e-6, 0.1, 0.5, 0.999, 1 - 2**-53, 1.0]
)
def test_the_cost_of_inclusion_is_the_formula_for_tiny_and_huge_costs(
  probability,
):
  found = accountant_lib.included(_COSTS, probability)
  np.testing.assert_allclose(
    found, _exactly_included(_COSTS, probability), rtol=1e-12, atol=0
  )


@pytest.mark.parametrize('probability', [0.1, 1.0])
def test_an_infinite_cost_stays_infinite_with_any_inclusion(probability):
  found = accountant_lib.included(np.array([math.inf]), probability)
  assert found[0] == math.inf


def test_always_included_changes_no_bit_and_never_included_costs_nothing():
  assert np.array_equal(accountant_lib.included(_COSTS, 1.0), _COSTS)
  assert not np.any(accountant_lib.included(_COSTS, 0.0))


@_every_kind
def test_an_event_that_is_always_included_is_the_event_itself(
  composition, estimator
):
  event = _random_event()
  assert event.inclusion_probability == 1.0
  plain, other = (
    _accountant(composition, estimator=estimator) for _ in range(2)
  )
  plain.compose(event, 2)
  other.compose(_with_inclusion(event, 1), 2)
  assert other.state_dict() == plain.state_dict()
  assert other.explain(_DELTA) == plain.explain(_DELTA)


@_every_kind
def test_groups_that_are_never_included_cost_nothing(composition, estimator):
  accountant = _accountant(composition, estimator=estimator)
  accountant.compose(
    events.ParallelEvent(_with_inclusion(g, 0.0) for g in _groups()), 3
  )
  assert accountant.get_epsilon(_DELTA) == 0.0
  assert accountant.get_worst_case_epsilon(_DELTA) == 0.0


@_every_kind
@pytest.mark.parametrize('direction', ['tight', 'printed'])
def test_epsilon_grows_with_the_chance_of_inclusion(
  composition, estimator, direction
):
  found = []
  for probability in (0.01, 0.1, 0.3, 0.6, 0.9, 1.0):
    accountant = _accountant(
      composition, estimator=estimator, direction=direction
    )
    accountant.compose(
      events.ParallelEvent(_with_inclusion(g, probability) for g in _groups()),
      2,
    )
    found.append(
      (
        accountant.get_epsilon(_DELTA),
        accountant.get_worst_case_epsilon(_DELTA),
      )
    )
  assert np.all(np.diff(found, axis=0) > 0)


@_every_kind
@pytest.mark.parametrize('direction', ['tight', 'printed'])
def test_the_cost_of_every_unit_is_included_before_it_is_averaged(
  composition, estimator, direction
):
  rounds = [
    [_with_inclusion(g, a) for g, a in zip(_groups(), chances)]
    for chances in ((0.1, 0.9, 0.4), (0.5, 0.02, 1.0))
  ]
  accountant = _accountant(
    composition,
    total_rounds=2,
    estimator=estimator,
    orders=_FEW_ORDERS,
    direction=direction,
  )
  for groups in rounds:
    accountant.compose(events.ParallelEvent(groups))

  def costs(squared, q, a):
    rows = [
      [_log_moment(r2, q, order, direction) for order in _FEW_ORDERS]
      for r2 in squared
    ]
    return _exactly_included(rows, a)

  def unit_costs(group):
    return costs(
      group.squared_distances,
      group.participation_probability,
      group.inclusion_probability,
    )

  def worst_costs(groups):
    return costs(
      [max(g.worst_case_squared_distance for g in groups)],
      max(g.participation_probability for g in groups),
      max(g.inclusion_probability for g in groups),
    )[0]

  kept, bound = 0.0, lambda costs, worst: oracles.log_mean_exp(costs)
  if estimator != 'population':
    kept = _DELTA / 10
    failure = kept / len(_FEW_ORDERS) / (1 if composition == 'panel' else 2)
    function = getattr(mean_bounds, estimator)

    def bound(costs, worst):
      return function(costs, failure, worst)

  worst = sum(worst_costs(groups) for groups in rounds)
  power = 2 if composition == 'holder' else 1
  if composition == 'panel':
    total = np.max(
      [bound(sum(map(unit_costs, pair)), worst) for pair in zip(*rounds)],
      axis=0,
    )
  else:
    total = sum(
      np.max(
        [
          bound(power * unit_costs(g), power * worst_costs([g])) / power
          for g in groups
        ],
        axis=0,
      )
      for groups in rounds
    )
  assert accountant.get_worst_case_epsilon(_DELTA) == pytest.approx(
    oracles.epsilon(_FEW_ORDERS, worst, _DELTA, 'tight'), rel=1e-9
  )
  assert accountant.get_epsilon(_DELTA) == pytest.approx(
    min(
      oracles.epsilon(_FEW_ORDERS, total, _DELTA - kept, 'tight'),
      oracles.epsilon(_FEW_ORDERS, worst, _DELTA, 'tight'),
    ),
    rel=1e-9,
  )


def test_reported_costs_are_taken_as_they_are_but_the_worst_case_is_included():
  costs = np.array([0.01, 0.03, 0.1, 0.3, 0.7])
  for reported, expected in (
    (costs, costs),
    (
      np.full(5, 1e3),
      _exactly_included(
        [oracles.log_moment(9.0, 0.3, order) for order in _FEW_ORDERS], 0.2
      ),
    ),
  ):
    event = _with_inclusion(_reported(reported, 1e-9, worst=9.0), 0.2)
    accountant = _accountant('product', orders=_FEW_ORDERS).compose(event, 2)
    kept = _DELTA / 10 if reported is costs else 0.0
    assert accountant.get_epsilon(_DELTA) == pytest.approx(
      oracles.epsilon(_FEW_ORDERS, 2 * expected, _DELTA - kept, 'tight'),
      rel=1e-9,
    )


@pytest.mark.parametrize('bad', [-0.1, 1.1, math.nan, math.inf])
@pytest.mark.parametrize(
  'event', [_event(), _reported([0.1] * 5)], ids=['measured', 'reported']
)
def test_chances_of_inclusion_that_are_none_are_refused(event, bad):
  with pytest.raises(
    ValueError, match='inclusion_probability must be between 0 and 1'
  ):
    _with_inclusion(event, bad)


def test_the_inclusion_of_groups_is_the_largest_in_the_ledger():
  parallel = events.ParallelEvent(
    _with_inclusion(g, a) for g, a in zip(_groups(), (0.3, 0.1, 0.2))
  )
  assert parallel.inclusion_probability == 0.3
  ((_, entry),) = ledger.rounds_of(parallel, 3)
  assert entry == ledger.Entry(0.4, 0.6, True, 3, 0.3)
  event = _with_inclusion(_reported([0.1] * 5), 0.7)
  ((_, entry),) = ledger.rounds_of(event)
  assert entry == ledger.Entry(0.25, 0.3, True, 1, 0.7)


@pytest.mark.parametrize('composition', accountant_lib.COMPOSITIONS)
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
  expected = sum(
    count * _exactly_included(_group_worst_costs(_event(), _ORDERS), a)
    for count, a in ((4, 0.2), (1, 0.3), (1, 1.0))
  )
  assert accountant.get_worst_case_epsilon(_DELTA) == pytest.approx(
    oracles.epsilon(_ORDERS, expected, _DELTA, 'tight'), rel=1e-9
  )


@pytest.mark.parametrize('composition', accountant_lib.COMPOSITIONS)
@pytest.mark.parametrize('probability', [0.0, 0.1, 1.0])
def test_as_an_event_the_ledger_leaves_the_gain_of_inclusion_out(
  composition, probability
):
  plain, other = (_accountant(composition) for _ in range(2))
  plain.compose(_event(), 4)
  other.compose(_with_inclusion(_event(), probability), 4)
  assert other.ledger == plain.ledger
  rdp = dp_accounting.rdp.RdpAccountant([order + 1 for order in _ORDERS])
  epsilon = rdp.compose(other.ledger).get_epsilon(_DELTA)
  worst = other.get_worst_case_epsilon(_DELTA)
  assert worst <= epsilon * (1 + 1e-12)
  assert (worst < 0.9 * epsilon) == (probability < 1)


@_every_kind
def test_the_state_of_included_rounds_round_trips_exactly(
  composition, estimator
):
  def make():
    return _accountant(composition, estimator=estimator, orders=_FEW_ORDERS)

  original, restored = make(), make()
  parallel = events.ParallelEvent(
    _with_inclusion(g, a) for g, a in zip(_groups(), (0.3, 1 / 3, 0.0))
  )
  original.compose(parallel, 2)
  if composition != 'panel' and estimator != 'population':
    original.compose(_with_inclusion(_reported([0.1] * 5, 1e-9), 0.7))
  text = json.dumps(original.state_dict(), allow_nan=False)
  restored.load_state_dict(json.loads(text))
  for accountant in (original, restored):
    accountant.compose(parallel)
  assert restored.state_dict() == original.state_dict()
  assert restored.explain(_DELTA) == original.explain(_DELTA)
  delta = 1e-4
  assert restored.get_worst_case_epsilon(delta) == (
    original.get_worst_case_epsilon(delta)
  )


def test_a_ledger_without_inclusion_is_refused():
  # As states had it before: what was amplified then was so unduly.
  state = _used('product', 'betting').state_dict()
  state['ledger'] = [entry[:4] for entry in state['ledger']]
  with pytest.raises(ValueError, match='The state is damaged'):
    _accountant('product', orders=_FEW_ORDERS).load_state_dict(state)


def _included_rounds(chances=(0.1, 0.3)):
  """Measured rounds of two chances, and one of plain noise between them."""
  groups = [attr.evolve(group, panel=False) for group in _groups()]
  return [
    *[events.ParallelEvent(_with_inclusion(g, chances[0]) for g in groups)] * 2,
    dp_accounting.GaussianDpEvent(9.0),
    *[_with_inclusion(_event([0.01] * 20, 0.5, 0.25, False), chances[1])] * 3,
  ]


def _included_dp_epsilon():
  orders = accountant_lib.DEFAULT_ORDERS
  costs = oracles.gaussian_costs([1 / 81], orders)[0]
  for count, worst, q, a in ((2, 0.4, 0.6, 0.1), (3, 0.25, 0.5, 0.3)):
    row = [oracles.log_moment(worst, q, order) for order in orders]
    costs = costs + count * _exactly_included(row, a)
  return oracles.epsilon(orders, costs, _DELTA, 'tight')


def test_of_included_rounds_dp_is_at_the_accountants_orders_and_without_pld():
  rows = {
    row.method: row for row in comparison.compare(_included_rounds(), _DELTA)
  }
  rdp, pld = rows['DP, RDP'], rows['DP, PLD']
  assert rdp.epsilon == pytest.approx(_included_dp_epsilon(), rel=1e-9)
  assert 'integer orders' in rdp.assumption
  assert pld.epsilon is None
  assert pld.assumption == 'not computed: whether clients take part is visible'
  assert 'take part is visible' in comparison.format_table(list(rows.values()))
  for name in ('BDP, holder', 'BDP, distribution-free'):
    assert 0 < rows[name].epsilon <= rdp.epsilon
  # The gain is in all rows.
  for row in comparison.compare(_included_rounds((1.0, 1.0)), _DELTA):
    found = rows[row.method].epsilon
    assert found is None or found < row.epsilon


def test_of_reported_included_rounds_dp_is_at_the_accountants_orders():
  event = _with_inclusion(_reported([0.01] * 5, 1e-9), 0.2)
  accountant = _accountant('holder', 3, orders=_FEW_ORDERS).compose(event, 3)
  rdp, pld, reported = comparison.compare_reported(
    [event] * 3, _DELTA, accountant
  )
  orders = accountant_lib.DEFAULT_ORDERS
  row = [oracles.log_moment(0.25, 0.3, order) for order in orders]
  costs = 3 * _exactly_included(row, 0.2)
  assert rdp.epsilon == pytest.approx(
    oracles.epsilon(orders, costs, _DELTA, 'tight'), rel=1e-9
  )
  assert pld.epsilon is None
  assert reported.epsilon == min(rdp.epsilon, accountant.get_epsilon(_DELTA))


def test_included_rounds_that_move_nothing_can_be_compared():
  event = _with_inclusion(_event([0.0] * 5, 1.0, 0.0), 0.5)
  rdp, *_ = comparison.compare([event], _DELTA)
  assert rdp.epsilon == 0.0


# --- Asking without composing.


@_every_kind
def test_would_exceed_tells_of_groups_and_changes_nothing(
  composition, estimator
):
  event = events.ParallelEvent(_groups())
  accountant = _accountant(composition, estimator=estimator).compose(event)
  before = copy.deepcopy(accountant.state_dict())
  epsilon = accountant.get_epsilon(_DELTA)
  other = _accountant(composition, estimator=estimator).compose(event, 2)
  after = other.get_epsilon(_DELTA)
  assert epsilon < after
  assert not accountant.would_exceed(event, after * 1.001, _DELTA)
  assert accountant.would_exceed(event, after * 0.999, _DELTA)
  assert accountant.state_dict() == before
  assert accountant.get_epsilon(_DELTA) == epsilon


def test_would_exceed_tells_of_reports_and_changes_nothing():
  accountant = _fed_with_reports('bernstein')
  before = copy.deepcopy(accountant.state_dict())
  event = _reports('bernstein')[1]
  after = _fed_with_reports('bernstein').compose(event).get_epsilon(_DELTA)
  assert not accountant.would_exceed(event, after * 1.001, _DELTA)
  assert accountant.would_exceed(event, after * 0.999, _DELTA)
  assert accountant.state_dict() == before


# --- State.


def _used(composition, estimator):
  accountant = _accountant(composition, estimator=estimator, orders=_FEW_ORDERS)
  accountant.compose(dp_accounting.GaussianDpEvent(3.0))
  accountant.compose(events.ParallelEvent(_groups()), 2)
  accountant.compose(events.ParallelEvent(group for group in _groups()))
  if composition != 'panel' and estimator != 'population':
    accountant.compose(_reported([0.01, 0.02, 0.1, 0.3, 1.0], 1e-9), 2)
  return accountant


@_every_kind
def test_the_state_of_groups_and_reports_round_trips_exactly(
  composition, estimator
):
  original = _used(composition, estimator)
  text = json.dumps(original.state_dict(), allow_nan=False)
  restored = _accountant(composition, estimator=estimator, orders=_FEW_ORDERS)
  restored.load_state_dict(json.loads(text))
  assert json.dumps(restored.state_dict(), allow_nan=False) == text
  assert restored.explain(_DELTA) == original.explain(_DELTA)
  assert restored.get_delta(1.0) == original.get_delta(1.0)
  assert restored.ledger == original.ledger
  for accountant in (original, restored):
    accountant.compose(events.ParallelEvent(_groups()))
  assert restored.state_dict() == original.state_dict()


@pytest.mark.parametrize('composition', ['holder', 'product'])
def test_a_restored_report_still_asks_for_its_delta(composition):
  original = _used(composition, 'betting')
  state = json.loads(json.dumps(original.state_dict()))
  restored = _accountant(composition, orders=_FEW_ORDERS)
  restored.load_state_dict(state)
  for accountant in (original, restored):
    with pytest.raises(ValueError, match='bounded for a larger delta'):
      accountant.get_epsilon(1e-8)


def test_a_restored_panel_still_has_its_groups():
  state = json.loads(json.dumps(_used('panel', 'betting').state_dict()))
  restored = _accountant('panel', orders=_FEW_ORDERS)
  restored.load_state_dict(state)
  with pytest.raises(ValueError, match=r'The panels have \[20, 12, 30\] units'):
    restored.compose(_event())


def test_states_of_the_first_version_are_refused():
  state = json.loads(json.dumps(_used('panel', 'betting').state_dict()))
  assert state['version'] == 4
  state['version'] = 1
  with pytest.raises(ValueError, match='version 1; this release reads'):
    _accountant('panel', orders=_FEW_ORDERS).load_state_dict(state)


def _assert_refused(composition, damage):
  state = json.loads(json.dumps(_used(composition, 'betting').state_dict()))
  accountant = _accountant(composition, orders=_FEW_ORDERS)
  accountant.load_state_dict(state)  # It is the damage that is refused.
  state = copy.deepcopy(state)
  damage(state)
  before = copy.deepcopy(accountant.state_dict())
  with pytest.raises(ValueError, match='The state is damaged'):
    accountant.load_state_dict(state)
  assert accountant.state_dict() == before


@pytest.mark.parametrize(
  'place, value',
  [
    ((1,), [[0.1] * 5] * 2),
    ((1,), [[0.1] * 4] * 3),
    ((1,), []),
    ((1,), None),
    ((2, 0), [0.1]),
    ((2, 0, 0), math.nan),
    ((2, 0, 0), -0.1),
  ],
)
def test_damage_to_any_panel_is_refused(place, value):
  def damage(state):
    part = state['panels']
    for key in place[:-1]:
      part = part[key]
    part[place[-1]] = value

  _assert_refused('panel', damage)


@pytest.mark.parametrize('composition', ['holder', 'product'])
@pytest.mark.parametrize('field', ['points', 'weights', 'log_worst_case'])
@pytest.mark.parametrize('group', [0, 2])
def test_damage_to_any_group_of_a_round_is_refused(composition, group, field):
  def damage(state):
    state['rounds'][0][0][group][field] = [math.nan] * 5

  _assert_refused(composition, damage)


@pytest.mark.parametrize(
  'field, value',
  [
    ('log_bound', [0.1] * 4),
    ('log_bound', [[0.1] * 5]),
    ('log_bound', 0.1),
    ('log_bound', None),
    ('log_bound', 'costs'),
    ('log_bound', [-0.1] * 5),
    ('log_bound', [math.nan] * 5),
    ('failure_probability', 0.0),
    ('failure_probability', 1.0),
    ('failure_probability', -1e-9),
    ('failure_probability', math.nan),
    ('failure_probability', None),
    ('failure_probability', 'never'),
  ],
)
def test_damage_to_a_report_is_refused(field, value):
  def damage(state):
    state['rounds'][2][0][0][field] = value

  _assert_refused('holder', damage)


@pytest.mark.parametrize('sample', [{}, None, 7, 'failure_probability', []])
def test_what_is_neither_sample_nor_report_is_refused(sample):
  def damage(state):
    state['rounds'][2][0][0] = sample

  _assert_refused('product', damage)


@pytest.mark.parametrize('composition', ['holder', 'product'])
@pytest.mark.parametrize('estimator', _ESTIMATORS)
@pytest.mark.parametrize('place', [0, -1])
@pytest.mark.parametrize('empty', [[], None, {}])
def test_a_round_without_samples_is_refused(
  composition, estimator, place, empty
):
  # It would cost nothing, or break ε.
  state = _used(composition, estimator).state_dict()
  state = json.loads(json.dumps(state))
  accountant = _accountant(composition, estimator=estimator, orders=_FEW_ORDERS)
  accountant.load_state_dict(copy.deepcopy(state))
  before = copy.deepcopy(accountant.state_dict())
  state['rounds'][place][0] = empty
  with pytest.raises(ValueError, match='The state is damaged'):
    accountant.load_state_dict(state)
  assert accountant.state_dict() == before


@pytest.mark.parametrize('missing', ['log_bound', 'failure_probability'])
def test_a_report_without_one_of_its_parts_is_refused(missing):
  def damage(state):
    del state['rounds'][2][0][0][missing]

  _assert_refused('product', damage)


# --- All ways to account for such rounds, side by side.


def _parallel_rounds(panel=True):
  return [
    events.ParallelEvent(
      _event(
        0.04 * np.random.default_rng([t, g]).beta(1, 9, 40), q, 0.04, panel
      )
      for g, q in enumerate((0.1, 0.2))
    )
    for t in range(4)
  ]


def _dp_epsilons(q, z, count):
  event = dp_accounting.SelfComposedDpEvent(
    dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z)),
    count,
  )
  return [
    dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(_DELTA),
    dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(_DELTA),
  ]


@pytest.mark.parametrize('panel', [True, False])
def test_the_rows_of_parallel_rounds_are_what_the_accountants_compute(panel):
  rounds = _parallel_rounds(panel)
  rows = {row.method: row for row in comparison.compare(rounds, _DELTA)}
  rdp, pld = _dp_epsilons(0.2, 5.0, 4)
  assert rows['DP, RDP'].epsilon == pytest.approx(rdp, rel=1e-9)
  assert rows['DP, PLD'].epsilon == pytest.approx(pld, rel=1e-6)
  make = accountant_lib.BayesianAccountant
  accountants = {
    'BDP, paper': make.paper('printed'),
    'BDP, paper, L part': make.paper('tight'),
    'BDP, holder': make('holder', estimator='student_t', total_rounds=4),
    'BDP, distribution-free': make('holder', total_rounds=4),
  }
  if panel:
    accountants['BDP, panel'] = make(estimator='student_t')
    accountants['BDP, distribution-free'] = make(estimator='betting')
  else:
    assert rows['BDP, panel'].epsilon is None
  dp = min(rows['DP, RDP'].epsilon, rows['DP, PLD'].epsilon)
  for method, accountant in accountants.items():
    for event in rounds:
      accountant.compose(event)
    epsilon = accountant.get_epsilon(_DELTA)
    wanted = epsilon if 'paper' in method else min(epsilon, dp)
    assert rows[method].epsilon == wanted
    assert rows[method].details == accountant.explain(_DELTA)


def test_reported_rounds_are_not_composed_in_other_ways_than_bounded():
  with pytest.raises(ValueError, match='use compare_reported'):
    comparison.compare([*_rounds(), *_reports('student_t')], _DELTA)


def test_the_rows_of_reported_rounds_are_dp_and_what_was_reported():
  accountant = _fed_with_reports('student_t')
  rows = comparison.compare_reported(_reports('student_t'), _DELTA, accountant)
  assert [row.method for row in rows] == ['DP, RDP', 'DP, PLD', 'BDP, reported']
  rdp, pld = _dp_epsilons(0.3, 2.0, 4)
  assert rows[0].epsilon == pytest.approx(rdp, rel=1e-9)
  assert rows[1].epsilon == pytest.approx(pld, rel=1e-6)
  assert rows[2].epsilon == accountant.get_epsilon(_DELTA) < pld
  assert rows[2].details == accountant.explain(_DELTA)
  assert rows[2].order == rows[2].details['order']
  assert rows[2].assumption.endswith('holder, student_t')


def test_a_reported_figure_above_that_of_dp_gives_way_to_it():
  rounds = [_reported([50.0] * 5, worst=0.04)] * 3
  accountant = _accountant('holder', orders=_FEW_ORDERS)
  for event in rounds:
    accountant.compose(event)
  *dp_rows, row = comparison.compare_reported(rounds, _DELTA, accountant)
  smallest = min(dp.epsilon for dp in dp_rows)
  assert row.epsilon == smallest < accountant.get_epsilon(_DELTA)
  assert row.assumption.startswith('as DP')
  # How it came about is told as it was.
  assert row.details['epsilon'] == accountant.get_epsilon(_DELTA)


def _report_of(rounds, mechanism, **more):
  return privacy_report.report_of_rounds(
    rounds,
    noise_multiplier=2.0,
    participation_probability=0.3,
    delta=_DELTA,
    worst_case_distance=1.0,
    mechanism=mechanism,
    unit='client' if mechanism == 'joint' else 'example',
    sampling='poisson',
    **more,
  )


@functools.lru_cache
def _report():
  return _report_of(_parallel_rounds(), 'batch')


@pytest.mark.parametrize(
  'mechanism, adjacency, others',
  [
    ('joint', 'zero-out', 'add-or-remove-one'),
    ('batch', 'add-or-remove-one', 'zero-out'),
    ('example', 'add-or-remove-one', 'zero-out'),
  ],
)
def test_the_statement_names_the_adjacency_of_its_mechanism(
  mechanism, adjacency, others
):
  report = dataclasses.replace(_report(), mechanism=mechanism)
  text = ' '.join(report.statement().split())
  assert text.count(f'{adjacency} adjacency at delta = 1e-05') == 2
  assert others not in text
  assert report.to_dict()['adjacency'] == adjacency


def test_the_report_of_parallel_rounds_says_how_much_was_measured():
  report = _report()
  assert (report.rounds, report.units, report.panel) == (4, 40, True)
  assert [finding.check for finding in report.findings] == [
    *('tail', 'drift', 'exchangeability'),
  ]
  assert json.loads(json.dumps(report.to_dict()))['units'] == 40


def test_the_report_of_groups_of_any_size_names_the_smallest():
  (first, second), *_ = (e.groups for e in _parallel_rounds(panel=False))
  smaller = attr.evolve(second, squared_distances=[0.001] * 12)
  report = _report_of(
    [events.ParallelEvent([first, smaller]), second], 'example'
  )
  assert (report.rounds, report.units, report.panel) == (2, 12, False)
  assert [finding.check for finding in report.findings] == ['tail', 'drift']


def test_the_report_of_reported_rounds_has_the_figure_and_no_findings():
  accountant = _fed_with_reports('student_t')
  report = _report_of(_reports('student_t'), 'joint', reported_to=accountant)
  assert report.rounds == 4
  assert not report.findings
  text = report.statement()
  epsilon = accountant.get_epsilon(_DELTA)
  assert f'{epsilon:12.3f}' in text
  assert 'zero-out adjacency' in ' '.join(text.split())
  assert 'Epsilon, reported' in text
  rows = json.loads(json.dumps(report.to_dict()))['rows']
  assert rows[-1]['epsilon'] == epsilon
  assert rows[-1]['attack_success_bound'] == pytest.approx(
    1 / (1 + math.exp(-epsilon))
  )
