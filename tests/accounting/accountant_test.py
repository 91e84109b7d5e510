"""Tests of `BayesianAccountant`: oracles, worlds of known truth, bad input."""

import copy
import functools
import json
import math
import warnings

import dp_accounting
import hypothesis
import numpy as np
import pytest
from dp_accounting import privacy_accountant_test
from hypothesis import strategies as st
from scipy import optimize, stats

from tests.accounting import builders, oracles
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import sampled_gaussian

BayesianAccountant = accountant_lib.BayesianAccountant

_DELTA = builders.DELTA
_ORDERS = builders.ORDERS
_COMPOSITIONS = builders.COMPOSITIONS
_ESTIMATORS = builders.ESTIMATORS
_CONVERSIONS = builders.CONVERSIONS
_accountant = builders.make_accountant
_event = builders.make_event
_random_event = builders.random_event
_every_kind = builders.every_kind
_GAUSSIAN = dp_accounting.GaussianDpEvent(3.0)
pytestmark = builders.ignore_best_order
moments_alone = builders.moments_alone


class ContractTest(privacy_accountant_test.PrivacyAccountantTest):
  """dp_accounting's contract."""

  def _make_test_accountants(self):
    return [
      _accountant(composition, estimator=estimator, conversion=conversion)
      for composition in _COMPOSITIONS
      for estimator in _ESTIMATORS
      for conversion in _CONVERSIONS
    ] + [BayesianAccountant.paper()]


# --- Equality with RdpAccountant at the worst case.


@hypothesis.given(
  composition=builders.compositions,
  estimator=builders.estimators,
  z_and_q=st.sampled_from([(0.7, 1.0), (1.1, 0.01), (4.0, 0.3)]),
)
def test_units_at_the_worst_case_reproduce_the_rdp_accountant(
  composition, estimator, z_and_q
):
  z, q = z_and_q
  accountant = _accountant(composition, estimator=estimator)
  accountant.compose(_event([z**-2] * 5, q, z**-2), 7)
  expected = builders.rdp_epsilon(
    builders.sampled_gaussian(q, z), 7, delta=builders.tail_delta(estimator)
  )
  assert accountant.get_epsilon(_DELTA) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize('composition', _COMPOSITIONS)
@pytest.mark.parametrize('estimator', ['student_t', 'population'])
def test_equal_units_without_a_worst_case_reproduce_the_rdp_accountant(
  composition, estimator
):
  event = _event([0.04] * 5, 0.2, None)
  accountant = _accountant(composition, estimator=estimator).compose(event, 7)
  expected = builders.rdp_epsilon(
    builders.sampled_gaussian(0.2, 5.0),
    7,
    delta=builders.tail_delta(estimator),
  )
  assert accountant.get_epsilon(_DELTA) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize('composition', _COMPOSITIONS)
@pytest.mark.parametrize('delta', [1e-8, 1e-5, 1e-2])
def test_events_of_dp_accounting_cost_what_the_rdp_accountant_says(
  composition, delta
):
  ledger = dp_accounting.ComposedDpEvent(
    [
      dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.05, _GAUSSIAN), 100
      ),
      _GAUSSIAN,
      dp_accounting.NoOpDpEvent(),
      dp_accounting.SelfComposedDpEvent(
        dp_accounting.ComposedDpEvent(
          [_GAUSSIAN, dp_accounting.GaussianDpEvent(8.0)]
        ),
        2,
      ),
    ]
  )
  accountant = _accountant(composition).compose(ledger)
  expected = builders.make_rdp_accountant().compose(ledger)
  assert accountant.get_epsilon(delta) == pytest.approx(
    expected.get_epsilon(delta), rel=1e-9
  )
  assert accountant.get_delta(1.5) == pytest.approx(
    expected.get_delta(1.5), rel=1e-9
  )


@_every_kind
def test_the_ledger_of_a_run_has_the_cost_of_its_worst_case(
  composition, estimator
):
  accountant = _accountant(composition, estimator=estimator)
  accountant.compose(_random_event(units=3), 3).compose(_GAUSSIAN)
  sampled = dp_accounting.SelfComposedDpEvent(
    builders.sampled_gaussian(0.3, 2.0), 3
  )
  delta = builders.tail_delta(estimator)
  expected = builders.rdp_epsilon(
    dp_accounting.ComposedDpEvent([sampled, _GAUSSIAN]), delta=delta
  )
  actual = builders.rdp_epsilon(accountant.ledger, delta=delta)
  assert actual == pytest.approx(expected, rel=1e-9)
  assert accountant.get_epsilon(_DELTA) <= expected * (1 + 1e-9)


# --- The numbers of docs/accounting.md.

# Section 3: T = 300, q = 1, s = 20; 1 % of people at ‖Δ‖ = 1 and 99 % at 0.1.
_ROUNDS, _FAR, _NEAR = 300, 1 / 400, 0.01 / 400


def _staying_person(composition, conversion):
  accountant = _accountant(
    composition,
    total_rounds=_ROUNDS,
    estimator='population',
    conversion=conversion,
    orders=range(1, 65),
  )
  return accountant.compose(_event([_FAR] + [_NEAR] * 99, 1.0, _FAR), _ROUNDS)


@pytest.mark.parametrize(
  'composition, conversion, expected',
  [
    ('product', 'chernoff', 0.70),
    ('holder', 'chernoff', 3.62),
    ('panel', 'chernoff', 3.62),
    ('product', 'tight', 0.54),
    ('holder', 'tight', 2.99),
    ('panel', 'tight', 2.99),
  ],
)
def test_the_example_of_a_person_who_stays(composition, conversion, expected):
  epsilon = _staying_person(composition, conversion).get_epsilon(_DELTA)
  assert epsilon == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(
  'conversion, expected', [('chernoff', 4.54), ('tight', 4.01)]
)
def test_the_worst_case_of_the_example(conversion, expected):
  accountant = _accountant(conversion=conversion, orders=range(1, 65))
  accountant.compose(dp_accounting.GaussianDpEvent(20.0), _ROUNDS)
  assert accountant.get_epsilon(_DELTA) == pytest.approx(expected, abs=0.005)


def _exact_tail(epsilon):
  # Over T rounds the loss of a person at r is N(T r²/2, T r²).
  return sum(
    share * stats.norm.sf(epsilon, _ROUNDS * r2 / 2, math.sqrt(_ROUNDS * r2))
    for share, r2 in ((0.01, _FAR), (0.99, _NEAR))
  )


def test_the_exact_tail_of_the_example_shows_product_to_be_wrong():
  exact = optimize.brentq(lambda e: _exact_tail(e) - _DELTA, 0, 10)
  assert exact == pytest.approx(3.05, abs=0.005)
  assert _exact_tail(0.70) / _DELTA == pytest.approx(354, abs=0.5)
  for composition, sound in (
    ('product', False),
    ('holder', True),
    ('panel', True),
  ):
    accountant = _staying_person(composition, 'chernoff')
    tail = _exact_tail(accountant.get_epsilon(_DELTA))
    assert (tail <= _DELTA) == sound


def test_the_printed_direction_turns_2_9_into_78():
  # Section 1, by Theorem 2.
  sampled = builders.sampled_gaussian(0.00427, 1.12)
  for direction, expected, tolerance in (
    ('tight', 2.9, 0.05),
    ('printed', 78, 0.5),
  ):
    accountant = _accountant(direction=direction, conversion='chernoff')
    accountant.compose(sampled, 14_063)
    assert accountant.get_epsilon(_DELTA) == pytest.approx(
      expected, abs=tolerance
    )


# --- The formulas of sections 1 to 5, put together slowly.


@_every_kind
@hypothesis.settings(max_examples=10)
@hypothesis.given(
  settings=st.fixed_dictionaries(
    {
      'conversion': builders.conversions,
      'direction': st.sampled_from(sampled_gaussian.DIRECTIONS),
      'estimator_delta': st.sampled_from([None, 1e-7]),
      'count_orders': st.booleans(),
    }
  ),
  rounds=builders.rounds(units=(3, 40, 150), chances=(1.0, 0.3, 0.0)),
  noises=st.lists(st.floats(1, 20), max_size=2),
)
def test_epsilon_is_what_the_formulas_say(
  composition, estimator, settings, rounds, noises
):
  accountant = _accountant(
    composition,
    total_rounds=11,
    estimator=estimator,
    orders=builders.FEW_ORDERS,
    **settings,
  )
  for event, repeats in rounds:
    accountant.compose(event, repeats)
  known = np.zeros(len(builders.FEW_ORDERS))
  for noise in noises:
    accountant.compose(dp_accounting.GaussianDpEvent(noise))
    known += oracles.gaussian_costs([noise**-2], builders.FEW_ORDERS)[0]
  for delta in (_DELTA, 0.3):
    expected = oracles.accounted_epsilon(
      rounds, accountant.settings, delta, known
    )
    assert accountant.get_epsilon(delta) == pytest.approx(
      expected, rel=1e-8, abs=1e-12
    )


@pytest.mark.parametrize('direction', sampled_gaussian.DIRECTIONS)
def test_the_preset_is_the_paper(direction):
  accountant = BayesianAccountant.paper(direction, orders=(1, 2, 4, 8, 16))
  event = _random_event(units=100)
  accountant.compose(event, 50)
  assert accountant.settings['composition'] == 'product'
  assert accountant.settings['estimator'] == 'student_t'
  assert accountant.settings['conversion'] == 'chernoff'
  assert accountant.settings['direction'] == direction
  assert accountant.settings['count_orders'] is False
  expected = oracles.accounted_epsilon(
    [(event, 50)], accountant.settings, _DELTA
  )
  assert accountant.get_epsilon(_DELTA) == pytest.approx(expected, rel=1e-9)


def test_the_paper_prints_the_maximum_of_both_directions():
  assert BayesianAccountant.paper().settings['direction'] == 'printed'


def test_the_default_is_the_sound_one():
  assert BayesianAccountant().settings == {
    'composition': 'panel',
    'estimator': 'sample',
    'direction': 'tight',
    'conversion': 'tight',
    'orders': list(accountant_lib.DEFAULT_ORDERS),
    'estimator_delta': None,
    'total_rounds': None,
    'count_orders': True,
  }


def test_rounds_that_differ_add_up_per_member_of_the_panel():
  # Whoever is far in one round is near in the next: the sum is the same for
  # all, and so is the cost of the panel.
  one = _event([0.1, 0.02, 0.1, 0.02], 1.0)
  other = _event([0.02, 0.1, 0.02, 0.1], 1.0)
  accountant = _accountant(estimator='population').compose(one).compose(other)
  costs = oracles.gaussian_costs([0.12], _ORDERS)[0]
  expected = oracles.epsilon(_ORDERS, costs, _DELTA, 'tight')
  assert accountant.get_epsilon(_DELTA) == pytest.approx(expected, rel=1e-12)


@hypothesis.settings(max_examples=24)
@hypothesis.given(
  composition=builders.compositions,
  estimator=builders.estimators,
  conversion=builders.conversions,
  estimator_delta=st.sampled_from([None, 1e-9]),
  delta=st.sampled_from([1e-7, 1e-4]),
)
def test_delta_inverts_epsilon(
  composition, estimator, conversion, estimator_delta, delta
):
  accountant = _accountant(
    composition,
    estimator=estimator,
    conversion=conversion,
    estimator_delta=estimator_delta,
    orders=builders.FEW_ORDERS,
  ).compose(_random_event(units=100), 10)
  epsilon = accountant.get_epsilon(delta)
  back = accountant.get_delta(epsilon)
  assert back == pytest.approx(delta, rel=1e-6)
  assert accountant.get_epsilon(back * (1 + 1e-6)) <= epsilon * (1 + 1e-9)


def test_estimator_delta_is_an_absolute_part_of_delta():
  event = _random_event(units=300)
  accountant = _accountant(estimator_delta=1e-6).compose(event, 10)
  assert accountant.explain(1e-5)['delta_for_failures'] == 1e-6
  assert accountant.explain(1e-3)['delta_for_failures'] == 1e-6
  assert accountant.explain(1e-3)['failure_probability'] == pytest.approx(
    1e-6 / len(_ORDERS)
  )


@pytest.mark.parametrize(
  'composition, bounds',
  [
    ('panel', len(_ORDERS)),
    ('holder', 10 * len(_ORDERS)),
    ('product', 6 * len(_ORDERS)),
  ],
)
def test_the_failures_of_all_bounds_add_up_to_the_part_kept(
  composition, bounds
):
  # Section 2; holder's T = 10 rounds are fixed in advance, 6 took place.
  accountant = _accountant(composition).compose(_random_event(), 6)
  explained = accountant.explain(1e-5)
  assert explained['delta_for_failures'] == pytest.approx(1e-6)
  assert explained['failure_probability'] == pytest.approx(1e-6 / bounds)


def test_explain_names_what_a_number_rests_on():
  accountant = _accountant('holder', estimator='student_t')
  accountant.compose(_random_event(units=20)).compose(_random_event(units=9))
  explained = accountant.explain(_DELTA)
  epsilon, order = accountant.get_epsilon_and_optimal_order(_DELTA)
  assert explained['epsilon'] == epsilon
  assert explained['order'] == order
  assert explained['rounds'] == 2
  assert explained['fewest_units'] == 9
  assert explained['estimator'] == 'student_t'
  assert explained['composition'] == 'holder'
  json.dumps(explained, allow_nan=False)


# --- Worlds of known truth.

# People are of a few types, each with one distance for even and one for odd
# rounds, kept for all rounds. q = 1, so that costs have a closed form.
_WORLD_ORDERS = (1, 2, 4, 8, 16, 32)
_WORLD_ROUNDS = 40
_WORST = 0.02
_WORLDS = {
  'outliers of 2 %': ([0.98, 0.02], [[1e-4, 1e-4], [0.02, 0.02]]),
  'outliers of 10 %': ([0.9, 0.1], [[1e-4, 1e-4], [0.02, 0.02]]),
  'outliers take turns': (
    [0.9, 0.05, 0.05],
    [[1e-4, 1e-4], [0.02, 1e-4], [1e-4, 0.02]],
  ),
}
_WORLD_FAILURES = 0.1


def _world_truth(probabilities, types):
  moments = (
    _WORLD_ROUNDS
    / 2
    * oracles.gaussian_costs(np.sum(types, axis=1), _WORLD_ORDERS)
  )
  costs = oracles.log_mean_exp(moments, np.array(probabilities))
  return oracles.epsilon(_WORLD_ORDERS, costs, _DELTA, 'tight')


def _share_of_misses(world, composition, estimator, units, draws):
  probabilities, types = _WORLDS[world]
  types = np.array(types)
  truth = _world_truth(probabilities, types)
  # Who is of which type is all that matters, so alike draws are alike.
  drawn = np.random.default_rng(11).multinomial(units, probabilities, draws)
  counts, times = np.unique(drawn, axis=0, return_counts=True)
  misses = 0
  for count, repeats in zip(counts, times):
    accountant = _accountant(
      composition,
      total_rounds=_WORLD_ROUNDS,
      estimator=estimator,
      orders=_WORLD_ORDERS,
      estimator_delta=_WORLD_FAILURES,
    )
    panel = np.repeat(types, count, axis=0)
    for parity in (0, 1):
      # Holder and product do not care that the units are the same ones.
      event = _event(panel[:, parity], 1.0, _WORST)
      accountant.compose(event, _WORLD_ROUNDS // 2)
    epsilon = accountant.get_epsilon(_WORLD_FAILURES + _DELTA)
    # The truth has the same δ left for the tail.
    misses += repeats * (epsilon < truth * (1 - 1e-9))
  return misses / draws


# At δ = 0.1 + 1e-5 the worst case, taken at the whole δ, is a small ε of its
# own; the worlds are about the bounds, so they do without it.
@pytest.fixture
def without_worst_case(monkeypatch):
  monkeypatch.setattr(
    BayesianAccountant,
    '_worst_case_costs',
    lambda self: np.full(len(self._orders), math.inf),
  )


@pytest.mark.parametrize('world', list(_WORLDS))
@pytest.mark.parametrize('composition', ['panel', 'holder'])
@pytest.mark.parametrize('estimator', ['betting', 'bernstein'])
@pytest.mark.parametrize('units', [30, 300])
def test_sound_figures_are_not_below_the_truth_of_a_person_who_stays(
  world, composition, estimator, units, without_worst_case
):
  draws = 150
  misses = _share_of_misses(world, composition, estimator, units, draws)
  assert misses <= oracles.most_misses(draws, _WORLD_FAILURES) / draws


@pytest.mark.parametrize('estimator', ['betting', 'student_t'])
def test_product_is_below_the_truth_of_a_person_who_stays(
  estimator, without_worst_case
):
  # However many units are seen, it converges to the wrong figure.
  misses = _share_of_misses('outliers of 2 %', 'product', estimator, 3000, 20)
  assert misses == 1


def test_panel_with_student_t_misses_outliers_that_it_has_not_seen(
  without_worst_case,
):
  # 30 units hold none of the 2 % with probability 0.98^30 = 0.545.
  draws = 200
  misses = _share_of_misses('outliers of 2 %', 'panel', 'student_t', 30, draws)
  assert misses > oracles.most_misses(draws, _WORLD_FAILURES) / draws
  assert misses >= 0.4


# --- Properties.

_distances = st.lists(st.floats(0, 1), min_size=3, max_size=8)
_SLACK = 1e-9


@st.composite
def _runs(draw, estimators=_ESTIMATORS):
  """ε of some accountant, as a function of all that matters to it."""
  settings = {
    'composition': draw(builders.compositions),
    'estimator': draw(st.sampled_from(estimators)),
    'conversion': draw(builders.conversions),
  }

  def run(distances, q=0.2, noise=1.0, rounds=3, delta=_DELTA, worst=1.0):
    squared = (np.array(distances) / noise) ** 2
    event = _event(squared, q, (worst / noise) ** 2)
    return _accountant(**settings).compose(event, rounds).get_epsilon(delta)

  return run


_monotonic = ('population', 'betting', 'student_t')


@hypothesis.given(_runs(), _distances, st.floats(0.3, 20), st.floats(1, 3))
def test_epsilon_falls_with_noise(run, distances, noise, factor):
  more = run(distances, noise=noise * factor)
  assert more <= run(distances, noise=noise) * (1 + _SLACK)


@hypothesis.given(_runs(), _distances, st.floats(-12, -1), st.floats(0, 0.9))
def test_epsilon_falls_with_delta(run, distances, log_delta, rise):
  more = run(distances, delta=10 ** (log_delta + rise))
  assert more <= run(distances, delta=10**log_delta) * (1 + _SLACK)


@hypothesis.given(
  _runs(_monotonic), _distances, st.integers(1, 5), st.integers(1, 5)
)
def test_epsilon_grows_with_rounds(run, distances, rounds, further):
  fewer = run(distances, rounds=rounds)
  assert run(distances, rounds=rounds + further) >= fewer * (1 - _SLACK)


@hypothesis.given(
  _runs(_monotonic), _distances, st.tuples(st.floats(0, 1), st.floats(0, 1))
)
def test_epsilon_grows_with_participation(run, distances, probabilities):
  fewer, more = sorted(probabilities)
  assert run(distances, q=more) >= run(distances, q=fewer) * (1 - _SLACK)


@hypothesis.given(
  # A deviation falls where a near unit moves to the others, and so may the
  # bounds that are made of deviations.
  _runs(('population', 'betting')),
  _distances,
  st.integers(0, 7),
  st.floats(0, 1),
)
def test_epsilon_grows_with_distances(run, distances, unit, farther):
  moved = list(distances)
  moved[unit % len(moved)] += farther
  before = run(distances, worst=2.0)
  assert run(moved, worst=2.0) >= before * (1 - _SLACK)


@hypothesis.given(
  rounds=st.lists(
    st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=4
  ),
  q=st.floats(0, 1),
  conversion=builders.conversions,
  direction=st.sampled_from(sampled_gaussian.DIRECTIONS),
)
def test_with_true_expectations_panel_is_below_holder_below_the_worst_case(
  rounds, q, conversion, direction
):
  make = functools.partial(
    _accountant,
    total_rounds=len(rounds),
    estimator='population',
    conversion=conversion,
    direction=direction,
  )
  epsilons = {}
  for composition in _COMPOSITIONS:
    accountant = make(composition)
    for distances in rounds:
      accountant.compose(_event(distances, q, 1.0))
    epsilons[composition] = accountant.get_epsilon(_DELTA)
  worst = make().compose(builders.sampled_gaussian(q, 1.0), len(rounds))
  limit = epsilons['holder'] * (1 + _SLACK)
  assert epsilons['panel'] <= limit
  assert epsilons['product'] <= limit  # Jensen's inequality.
  assert epsilons['holder'] <= worst.get_epsilon(_DELTA) * (1 + _SLACK)


@hypothesis.given(
  rounds=builders.rounds(most=5),
  random=st.randoms(use_true_random=False),
  composition=builders.compositions,
  estimator=builders.estimators,
)
def test_the_order_of_rounds_does_not_matter(
  rounds, random, composition, estimator
):
  shuffled = [*rounds, (_GAUSSIAN, 1)]
  random.shuffle(shuffled)
  found = []
  for ledger in ([*rounds, (_GAUSSIAN, 1)], shuffled):
    accountant = _accountant(composition, 15, estimator=estimator)
    for event, count in ledger:
      accountant.compose(event, count)
    found.append(accountant.get_epsilon(_DELTA))
  assert found[0] == pytest.approx(found[1], rel=1e-8)


@_every_kind
def test_counting_is_composing_again_and_again(composition, estimator):
  event = _random_event()
  twice = dp_accounting.SelfComposedDpEvent(event, 2)
  nested = dp_accounting.SelfComposedDpEvent(
    dp_accounting.ComposedDpEvent([event, twice]), 2
  )
  found = []
  for parts in ([(event, 6)], [(event, 1)] * 6, [(nested, 1)]):
    accountant = _accountant(composition, estimator=estimator)
    for part, count in parts:
      accountant.compose(part, count)
    found.append(accountant.get_epsilon(_DELTA))
  assert found == pytest.approx([found[0]] * 3, rel=1e-9)


# --- What leaves the accountant as it was.


@pytest.mark.parametrize(
  'refused, error, compositions',
  [
    *(
      (event, dp_accounting.UnsupportedEventError, ('panel', 'holder'))
      for event in (
        dp_accounting.UnsupportedDpEvent(),
        dp_accounting.LaplaceDpEvent(1.0),
      )
    ),
    (dp_accounting.GaussianDpEvent(-1.0), ValueError, ('panel', 'holder')),
    (_event(worst=None), ValueError, ('panel', 'holder')),
    # Holder takes any number of units, and a panel any number of rounds.
    (_event([0.1] * 5), ValueError, ('panel',)),
    (dp_accounting.SelfComposedDpEvent(_event(), 11), ValueError, ('holder',)),
  ],
)
def test_an_event_is_added_as_a_whole_or_not_at_all(
  refused, error, compositions
):
  both = dp_accounting.ComposedDpEvent([_event(), refused])
  for composition in ('panel', 'holder'):
    accountant = _accountant(composition).compose(_event())
    if composition in compositions:
      builders.assert_refused(accountant, both, error=error)
    else:
      accountant.compose(both)


@pytest.mark.parametrize('composition', _COMPOSITIONS)
@pytest.mark.parametrize('noise_multiplier', [1e-110, 1e-160, 1e-200])
def test_what_compose_takes_does_not_break_get_epsilon(
  composition, noise_multiplier
):
  # Either it is refused, and nothing is added, or it is accounted for.
  accountant = _accountant(composition).compose(_event())
  before = copy.deepcopy(accountant.state_dict())
  event = dp_accounting.ComposedDpEvent(
    [_event(), dp_accounting.GaussianDpEvent(noise_multiplier)]
  )
  try:
    accountant.compose(event)
  except ValueError:
    assert accountant.state_dict() == before
  assert accountant.get_epsilon(_DELTA) > 0


@hypothesis.given(
  composition=builders.compositions,
  estimator=builders.estimators,
  rounds=builders.rounds(),
)
def test_would_exceed_tells_and_changes_nothing(composition, estimator, rounds):
  make = functools.partial(_accountant, composition, 11, estimator=estimator)
  accountant, other = make(), make()
  for event, count in rounds:
    accountant.compose(event, count)
    other.compose(event, count)
  event = rounds[-1][0]
  after = other.compose(event).get_epsilon(_DELTA)
  ledger = accountant.ledger
  with builders.unchanged(accountant):
    assert not accountant.would_exceed(event, after * 1.001, _DELTA)
    assert accountant.would_exceed(event, after * 0.999, _DELTA) == (after > 0)
  assert accountant.ledger == ledger


def test_copies_do_not_share_what_is_added_later():
  original = _accountant().compose(_event(), 2)
  twin = copy.copy(original)
  before = original.get_epsilon(_DELTA)
  twin.compose(_random_event(units=4))
  assert original.get_epsilon(_DELTA) == before


def test_compose_returns_the_accountant():
  accountant = _accountant()
  assert accountant.compose(_event()) is accountant


# --- The list of orders.


@pytest.mark.parametrize(
  'orders, noise_multiplier, warned',
  [
    (range(1, 4), 20.0, True),  # A larger order would be better.
    (range(40, 60), 0.5, True),  # A smaller one would.
    (range(1, 200), 2.0, False),
    (range(1, 200), 0.1, False),  # There is none below 1.
  ],
)
@pytest.mark.parametrize('conversion', _CONVERSIONS)
def test_an_optimum_at_the_end_of_the_orders_is_warned_of(
  orders, noise_multiplier, warned, conversion
):
  accountant = _accountant(orders=orders, conversion=conversion)
  accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier))
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    _, order = accountant.get_epsilon_and_optimal_order(_DELTA)
  assert [str(w.message).split(',')[0] for w in caught] == (
    [f'The best order is {order}'] if warned else []
  )


def test_the_optimal_order_is_that_of_the_rdp_accountant():
  event = dp_accounting.GaussianDpEvent(2.0)
  _, order = _accountant().compose(event).get_epsilon_and_optimal_order(_DELTA)
  rdp = builders.make_rdp_accountant().compose(event)
  assert order + 1 == rdp.get_epsilon_and_optimal_order(_DELTA)[1]


# --- Bad input, each with its sentence.


@pytest.mark.parametrize(
  'settings, sentence',
  [
    ({'composition': 'sum'}, "composition must be one of .* Found 'sum'"),
    ({'estimator': 'mean'}, "estimator must be one of .* Found 'mean'"),
    ({'direction': 'left'}, "direction must be one of .* Found 'left'"),
    ({'conversion': 'rdp'}, "conversion must be one of .* Found 'rdp'"),
    ({'orders': []}, 'orders must be a non-empty list'),
    ({'orders': [0, 1]}, 'orders must be positive integers'),
    ({'orders': [1.5]}, 'orders must be positive integers'),
    ({'orders': [-1]}, 'orders must be positive integers'),
    ({'orders': ['2']}, 'orders must be positive integers'),
    ({'estimator_delta': 0.0}, 'estimator_delta must be above 0'),
    ({'estimator_delta': 1.0}, 'estimator_delta must be above 0'),
    ({'estimator_delta': -1e-9}, 'estimator_delta must be above 0'),
    ({'composition': 'holder'}, 'needs total_rounds, fixed before training'),
    ({'total_rounds': 5}, "for composition='holder' only. Found 'panel'"),
    (
      {'composition': 'holder', 'total_rounds': 0},
      'total_rounds must be a positive integer. Found 0',
    ),
    (
      {'composition': 'holder', 'total_rounds': 2.5},
      'total_rounds must be a positive integer. Found 2.5',
    ),
  ],
)
def test_bad_settings_are_named(settings, sentence):
  with pytest.raises(ValueError, match=sentence):
    BayesianAccountant(**settings)


@pytest.mark.parametrize('delta', [-1e-5, 1.5, math.nan])
def test_delta_lies_between_zero_and_one(delta):
  sentence = 'target_delta must be between 0 and 1. Found'
  for accountant in (_accountant(), _accountant().compose(_event())):
    with pytest.raises(ValueError, match=sentence):
      accountant.get_epsilon(delta)
    with pytest.raises(ValueError, match=sentence):
      accountant.would_exceed(_event(), 1.0, delta)


@pytest.mark.parametrize('delta', [1e-6, 1e-7])
def test_a_delta_not_above_estimator_delta_is_refused(delta):
  accountant = _accountant(estimator_delta=1e-6).compose(_event())
  with pytest.raises(
    ValueError, match='target_delta must be above estimator_delta = 1e-06'
  ):
    accountant.get_epsilon(delta)


@pytest.mark.parametrize('epsilon', [-1.0, math.nan])
def test_a_negative_epsilon_is_refused(epsilon):
  with pytest.raises(ValueError, match='target_epsilon must be non-negative'):
    _accountant().get_delta(epsilon)


@pytest.mark.parametrize('count', [0, -1, 1.5, True])
def test_a_count_that_is_none_is_refused(count):
  with pytest.raises(ValueError, match='count must be a positive integer'):
    _accountant().compose(_event(), count)


def test_what_is_no_event_is_refused():
  with pytest.raises(TypeError, match='event must be a DpEvent'):
    _accountant().compose([0.1, 0.2, 0.3])


def test_a_panel_that_changes_its_size_is_refused():
  accountant = _accountant().compose(_event())
  with pytest.raises(ValueError, match='panel has 4 units; the event has 5'):
    accountant.compose(_event([0.1] * 5))
  both = dp_accounting.ComposedDpEvent([_event(), _event([0.1] * 5)])
  with pytest.raises(ValueError, match='panel has 4 units; the event has 5'):
    _accountant().compose(both)


def test_units_that_are_no_panel_are_refused_by_panel():
  with pytest.raises(ValueError, match='needs events with panel=True'):
    _accountant().compose(_event(panel=False))


def test_more_than_total_rounds_are_refused():
  accountant = _accountant('holder', total_rounds=3).compose(_event(), 2)
  with pytest.raises(
    ValueError, match=r'total_rounds = 3 was fixed .* would be round 4'
  ):
    accountant.compose(_event(), 2)
  accountant.compose(_event())
  with pytest.raises(ValueError, match='would be round 4'):
    accountant.compose(_event())


@pytest.mark.parametrize('estimator', ['betting', 'bernstein'])
@pytest.mark.parametrize('composition', _COMPOSITIONS)
def test_distribution_free_estimators_ask_for_the_worst_case(
  composition, estimator
):
  accountant = _accountant(composition, estimator=estimator)
  with pytest.raises(ValueError, match='needs the event to have a worst_case'):
    accountant.compose(_event(worst=None))


@pytest.mark.parametrize('conversion', _CONVERSIONS)
@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_a_large_part_of_delta_for_failures_never_makes_epsilon_zero(
  estimator, conversion
):
  # At δ′ above 1/2 a quantile of Student's t is negative.
  accountant = _accountant(
    estimator=estimator,
    conversion=conversion,
    orders=[1],
    estimator_delta=0.9,
  )
  try:
    accountant.compose(_event([1.0, 1.1, 9.0], 1.0, 9.0))
    epsilon = accountant.get_epsilon(0.9 + 1e-5)
  except ValueError:
    return
  assert epsilon > 0


def test_a_part_for_failures_below_the_smallest_float_fails_closed():
  # δ′ = estimator_delta / orders underflows to zero.
  accountant = _accountant(estimator_delta=5e-324)
  accountant.compose(_random_event(units=500), 5)
  usual = _accountant(estimator_delta=1e-300)
  usual.compose(_random_event(units=500), 5)
  try:
    epsilon = accountant.get_epsilon(_DELTA)
  except ValueError:
    return
  assert epsilon >= usual.get_epsilon(_DELTA)
