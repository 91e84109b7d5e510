"""Tests of groups that come and go: each loses in its own rounds alone."""

import math
import time

import attr
import dp_accounting
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.accounting import builders, oracles
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import events, mean_bounds, worst_case

BayesianAccountant = accountant_lib.BayesianAccountant
_DELTA = builders.DELTA
_ORDERS = builders.FEW_ORDERS
pytestmark = builders.ignore_best_order

_by_rounds = pytest.mark.parametrize('composition', ['holder', 'product'])


def _group(seed=0, q=0.3, worst=0.25, panel=False):
  return attr.evolve(
    builders.random_event(seed, units=5, q=q, worst=worst), panel=panel
  )


def _round(*labels, **more):
  """A round of these labels, each with distances and a q of its own."""
  groups = [_group(label, q=0.1 + 0.05 * label, **more) for label in labels]
  return events.ParallelEvent(groups, labels)


def _accountant(composition, **settings):
  return builders.make_accountant(composition, 12, orders=_ORDERS, **settings)


# --- An independent account, label by label.


def _costs(group):
  return oracles.log_moments(
    group.squared_distances.tolist(), group.participation_probability, _ORDERS
  )


def _worst(group):
  (cost,) = oracles.log_moments(
    [group.worst_case_squared_distance],
    group.participation_probability,
    _ORDERS,
  )
  return cost


def _naive_costs(rounds, composition, estimator, kept):
  """Of every order, for whom loses most; written without the library's parts.

  Bounds of means are the library's, which have tests of their own.
  """
  count = sum(repeats for _, repeats in rounds)
  power = 12 if composition == 'holder' else 1
  bounds = (12 if composition == 'holder' else count) * len(_ORDERS)

  def bound(group):
    costs = power * _costs(group)
    if estimator == 'population':
      return oracles.log_mean_exp(costs)
    function = getattr(mean_bounds, estimator)
    return function(costs, kept / bounds, power * _worst(group))

  everybody = {
    label for event, _ in rounds for label in getattr(event, 'labels', ()) or ()
  }
  found = []
  for somebody in sorted(everybody) or [None]:
    estimate, worst = np.zeros(len(_ORDERS)), np.zeros(len(_ORDERS))
    for event, repeats in rounds:
      labels = getattr(event, 'labels', None) or [somebody] * len(event.groups)
      own = [g for g, label in zip(event.groups, labels) if label == somebody]
      if own:
        estimate += repeats / power * np.max([bound(g) for g in own], axis=0)
        worst += repeats * np.max([_worst(g) for g in own], axis=0)
    found.append(np.minimum(estimate, worst))
  return np.max(found, axis=0)


@_by_rounds
@pytest.mark.parametrize('estimator', builders.ESTIMATORS)
@hypothesis.settings(max_examples=6, deadline=None)
@hypothesis.given(
  labels=st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
    min_size=1,
    max_size=4,
  ),
  repeats=st.lists(st.integers(1, 2), min_size=4, max_size=4),
  unlabelled=st.booleans(),
)
def test_costs_are_those_of_the_label_that_loses_most(
  composition, estimator, labels, repeats, unlabelled
):
  rounds = [(_round(*some), n) for some, n in zip(labels, repeats)]
  if unlabelled:
    rounds.append((_group(7), 1))
    rounds.append((attr.evolve(_round(0, 2), labels=None), 2))
  accountant = _accountant(composition, estimator=estimator)
  for event, count in rounds:
    accountant.compose(event, count)
  kept = 0.0 if estimator == 'population' else 0.1 * _DELTA
  found = accountant._costs(kept)
  wanted = _naive_costs(rounds, composition, estimator, kept)
  # Rounds without labels have the largest q and r² of any group.
  if unlabelled:
    assert np.all(found >= wanted * (1 - 1e-9))
    wanted = wanted * 1.5
    assert np.all(found <= wanted)
  else:
    assert found == pytest.approx(wanted, rel=1e-9)


@_by_rounds
def test_who_is_there_every_third_time_pays_for_a_third_of_the_rounds(
  composition,
):
  labelled, third, all_rounds = (
    _accountant(composition, estimator='population') for _ in range(3)
  )
  for number in range(12):
    group = _group(0)
    labelled.compose(events.ParallelEvent([group], [number % 3]))
    all_rounds.compose(events.ParallelEvent([group]))
    if number % 3 == 0:
      third.compose(group)
  for name in ('get_epsilon', 'get_dp_epsilon', 'get_worst_case_epsilon'):
    found, wanted, before = (
      getattr(a, name)(_DELTA) for a in (labelled, third, all_rounds)
    )
    assert found == pytest.approx(wanted, rel=1e-9)
    assert found < 0.8 * before  # What was told without labels.
  assert labelled.explain(_DELTA)['rounds'] == 12


def _own_rounds(rounds, label):
  """Worst cases of a label's rounds, as events of dp_accounting."""
  return [
    dp_accounting.PoissonSampledDpEvent(
      group.participation_probability,
      dp_accounting.GaussianDpEvent(
        1 / math.sqrt(group.worst_case_squared_distance)
      ),
    )
    for event in rounds
    for group, other in zip(event.groups, event.labels)
    if other == label
  ]


@pytest.mark.parametrize('seed', range(3))
def test_dp_is_that_of_the_label_that_loses_most(seed):
  generator = np.random.default_rng(seed)
  worst = {0: 0.25, 1: 0.5, 2: 0.1, 3: 0.25, 4: 0.3}
  rounds = []
  for _ in range(20):
    labels = np.flatnonzero(generator.random(5) < 0.4)
    groups = [_group(i, 0.1 + 0.05 * i, worst[i]) for i in labels.tolist()]
    if groups:
      rounds.append(events.ParallelEvent(groups, labels))
  accountant = BayesianAccountant('product', orders=builders.ORDERS)
  for event in rounds:
    accountant.compose(event)
  alone, by_moments = [], []
  for label in range(5):
    own = dp_accounting.ComposedDpEvent(_own_rounds(rounds, label))
    alone.append(BayesianAccountant().compose(own).get_dp_epsilon(_DELTA))
    by_moments.append(builders.rdp_epsilon(own))
  assert accountant.get_dp_epsilon(_DELTA) == pytest.approx(
    max(alone), rel=1e-3
  )
  # For each order the largest, so not below the largest of all labels.
  found = accountant.get_worst_case_epsilon(_DELTA)
  assert max(by_moments) * (1 - 1e-9) <= found < max(by_moments) * 1.05
  # As one event it is at least that of every label.
  for reference in (
    dp_accounting.rdp.RdpAccountant(),
    dp_accounting.pld.PLDAccountant(),
  ):
    as_event = reference.compose(accountant.ledger).get_epsilon(_DELTA)
    assert as_event >= max(alone)
    assert accountant.get_epsilon(_DELTA) <= as_event


def test_the_one_event_has_as_many_rounds_as_who_came_most_often():
  accountant = _accountant('product')
  for labels in ((0, 1), (1, 2), (1,), (0, 2)):
    accountant.compose(_round(*labels))
  accountant.compose(dp_accounting.GaussianDpEvent(3.0))
  wanted = dp_accounting.ComposedDpEvent(
    [
      dp_accounting.GaussianDpEvent(3.0),
      dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
          0.1 + 0.05 * 2, dp_accounting.GaussianDpEvent(2.0)
        ),
        3,
      ),
    ]
  )
  assert accountant.ledger == wanted


def test_known_rounds_count_for_everybody():
  gaussian = dp_accounting.GaussianDpEvent(4.0)
  accountant = _accountant('product', estimator='population')
  accountant.compose(_round(0)).compose(_round(3)).compose(gaussian, 2)
  costs = [
    oracles.log_mean_exp(_costs(_round(label).groups[0])) for label in (0, 3)
  ]
  known = 2 * oracles.gaussian_costs([1 / 16], _ORDERS)[0]
  assert accountant._costs(0.0) == pytest.approx(
    np.max(costs, axis=0) + known, rel=1e-9
  )


def test_a_label_without_a_worst_case_has_no_dp():
  free = attr.evolve(_group(), worst_case_squared_distance=None)
  accountant = _accountant('product', estimator='student_t')
  accountant.compose(events.ParallelEvent([_group(), free], (0, 1)))
  assert accountant.get_dp_epsilon(_DELTA) == math.inf
  assert accountant.get_worst_case_epsilon(_DELTA) == math.inf
  assert accountant.get_epsilon(_DELTA) < math.inf
  with pytest.raises(ValueError, match='worst_case_squared_distance'):
    _accountant('product').compose(events.ParallelEvent([free], (0,)))


def test_a_non_private_round_is_one_for_every_label():
  accountant = _accountant('product').compose(_round(0, 1))
  accountant.compose(dp_accounting.NonPrivateDpEvent())
  assert accountant.get_epsilon(_DELTA) == math.inf
  assert accountant.get_dp_epsilon(_DELTA) == math.inf


def test_labels_have_mixtures_of_their_own():
  mixture = ((0.9, 0.04), (0.1, 1.0))
  group = attr.evolve(_group(), worst_case_mixture=mixture)
  other = _group(1, worst=0.01)
  accountant = _accountant('product', estimator='population')
  accountant.compose(events.ParallelEvent([group, other], (0, 1)), 3)
  drawn = events.MixedGaussianEvent(mixture, 0.3)
  alone = BayesianAccountant().compose(drawn, 3)
  assert accountant.get_dp_epsilon(_DELTA) == pytest.approx(
    alone.get_dp_epsilon(_DELTA), rel=1e-6
  )


# --- Panels.


@pytest.mark.parametrize('estimator', ['sample', 'each', 'census', 'betting'])
def test_in_a_panel_absent_groups_cost_nothing(estimator):
  def half(first):
    present = _group(1, panel=True)
    absent = events.BayesianGaussianEvent([0.0] * 5, 0.3, 0.0, True)
    groups = [present, absent] if first else [absent, present]
    return events.ParallelEvent(groups, (4, 9))

  accountant, alone = (BayesianAccountant(estimator=estimator) for _ in 'ab')
  for number in range(6):
    accountant.compose(half(number % 2 == 0))
  alone.compose(_group(1, panel=True), 3)
  for name in ('get_epsilon', 'get_dp_epsilon'):
    assert getattr(accountant, name)(_DELTA) == pytest.approx(
      getattr(alone, name)(_DELTA), rel=2e-3
    )


# --- State.


@_by_rounds
def test_the_state_round_trips(composition):
  accountant = _accountant(composition)
  for labels in ((0, 1), (1, 2), (5,)):
    accountant.compose(_round(*labels), 2)
  accountant.compose(_group(3))
  restored = builders.restored(accountant)
  assert restored.state_dict() == accountant.state_dict()
  for part in (restored, accountant):
    part.compose(_round(5, 0))
  for name in ('get_epsilon', 'get_dp_epsilon', 'get_worst_case_epsilon'):
    assert getattr(restored, name)(_DELTA) == getattr(accountant, name)(_DELTA)


def _state():
  accountant = _accountant('product').compose(_round(0, 1), 2)
  return accountant, builders.json_copy(accountant.state_dict())


@pytest.mark.parametrize(
  'damage',
  [
    lambda s: s['rounds'][0].pop(),
    lambda s: s['rounds'][0][2].pop(),
    lambda s: s['rounds'][0].__setitem__(2, [0, 7]),
    lambda s: s['ledger'][0][6].pop(),
    lambda s: s['ledger'][0][6][0].__setitem__(0, 1),
    lambda s: s['ledger'][0][6][0].__setitem__(0, 'a'),
    lambda s: s['ledger'][0][6][0][1].__setitem__(3, 2),
    lambda s: s['ledger'][0][6][0][1].__setitem__(2, False),
    lambda s: s['ledger'][0].__setitem__(2, False),
    lambda s: s['ledger'][0].pop(),
  ],
)
def test_damaged_labels_are_refused(damage):
  accountant, state = _state()
  damage(state)
  with builders.unchanged(accountant), pytest.raises(ValueError, match='damag'):
    accountant.load_state_dict(state)


def test_states_of_the_release_before_are_read():
  accountant = _accountant('product').compose(_group(), 3)
  state = builders.json_copy(accountant.state_dict())
  assert state['version'] == 5
  # What version 4 wrote: rounds and entries without labels and mixtures.
  assert state['ledger'] == [[0.25, 0.3, True, 3, 1.0]]
  assert len(state['rounds'][0]) == 2
  state['version'] = 4
  other = _accountant('product')
  other.load_state_dict(state)
  assert other.state_dict() == accountant.state_dict()


@pytest.mark.parametrize('labels', [(1, 1), (1,), (1, 2, 3), (0.5, 1), 'ab'])
def test_labels_are_one_for_each_group_and_all_different(labels):
  with pytest.raises(ValueError, match='labels must be'):
    events.ParallelEvent([_group(), _group()], labels)


def test_labels_leave_nobody_out():
  event = events.ParallelEvent([_group()], other_participation_probability=0.7)
  assert event.participation_probability == 0.7
  with pytest.raises(ValueError, match='Labels tell who alone lost anything'):
    attr.evolve(event, labels=(3,))
  with pytest.raises(ValueError, match='between 0 and 1'):
    attr.evolve(event, other_participation_probability=1.5)


# --- Many labels.


def test_labels_that_lose_no_more_than_another_are_left_out():
  kinds = [
    worst_case.Kind(((1.0, r2),), q, 1.0)
    for r2, q in ((0.25, 0.1), (0.25, 0.2), (0.04, 0.3))
  ]
  groups = [
    ((kinds[0], 5),),  # Fewer rounds at a smaller q than the next.
    ((kinds[1], 6),),
    ((kinds[0], 4), (kinds[1], 2)),  # As many, some at a smaller q.
    ((kinds[2], 6),),  # A larger q, at a smaller distance.
    ((kinds[0], 7),),  # More rounds.
    (),
  ]
  assert set(worst_case._undominated(groups)) == {
    groups[1],
    groups[3],
    groups[4],
  }


def test_a_thousand_clients_of_different_sizes_are_fast():
  generator = np.random.default_rng(0)
  q = generator.uniform(0.01, 0.1, 1000)
  accountant = BayesianAccountant('product', estimator='population')
  for _ in range(50):
    labels = np.flatnonzero(generator.random(1000) < 0.02)
    accountant.compose(
      events.ParallelEvent([_group(0, q[i]) for i in labels], labels)
    )
  start = time.perf_counter()
  dp = accountant.get_dp_epsilon(_DELTA)
  assert accountant.get_epsilon(_DELTA) <= dp
  assert time.perf_counter() - start < 5
