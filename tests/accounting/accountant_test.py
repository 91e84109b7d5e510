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

from tests.accounting import oracles
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import (
  events,
  mean_bounds,
  privacy_profiles,
  sampled_gaussian,
)

BayesianAccountant = accountant_lib.BayesianAccountant

_DELTA = 1e-5
_ORDERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
_COMPOSITIONS = accountant_lib.COMPOSITIONS
_ESTIMATORS = tuple(mean_bounds.ESTIMATORS)
_CONVERSIONS = ('tight', 'chernoff')
_every_kind = pytest.mark.parametrize(
  'composition, estimator',
  [(c, e) for c in _COMPOSITIONS for e in _ESTIMATORS],
)


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
  return BayesianAccountant(composition, **settings)


def _event(distances=(0.01, 0.02, 0.05, 0.04), q=0.3, worst=0.25, panel=True):
  return events.BayesianGaussianEvent(distances, q, worst, panel)


def _random_event(units=20, q=0.3, worst=0.25, seed=0):
  generator = np.random.default_rng(seed)
  return _event(worst * generator.beta(0.5, 4, units), q, worst)


def _epsilon(accountant, delta=_DELTA):
  """ε without the warning that the list of orders is short."""
  with warnings.catch_warnings():
    warnings.filterwarnings('ignore', 'The best order')
    return accountant.get_epsilon(delta)


def _rdp_accountant(orders=_ORDERS):
  return dp_accounting.rdp.RdpAccountant([order + 1 for order in orders])


class ContractTest(privacy_accountant_test.PrivacyAccountantTest):
  """dp_accounting's contract, but that δ lies strictly between 0 and 1."""

  def _make_test_accountants(self):
    return [
      _accountant(composition, estimator=estimator, conversion=conversion)
      for composition in _COMPOSITIONS
      for estimator in _ESTIMATORS
      for conversion in _CONVERSIONS
    ] + [BayesianAccountant.paper()]

  def _check_free(self, accountant):
    self.assertEqual(accountant.get_epsilon(1e-12), 0)
    self.assertEqual(accountant.get_epsilon(0.999), 0)
    self.assertEqual(accountant.get_delta(1e-12), 0)
    self.assertEqual(accountant.get_delta(0), 0)
    self.assertEqual(accountant.get_delta(float('inf')), 0)

  def test_no_events(self):
    for accountant in self._make_test_accountants():
      self._check_free(accountant)

  def test_no_op(self):
    for accountant in self._make_test_accountants():
      event = dp_accounting.NoOpDpEvent()
      self.assertTrue(accountant.supports(event))
      accountant.compose(event)
      self._check_free(accountant)

  def test_non_private(self):
    for accountant in self._make_test_accountants():
      event = dp_accounting.NonPrivateDpEvent()
      self.assertTrue(accountant.supports(event))
      accountant.compose(event)
      self.assertEqual(accountant.get_epsilon(0.99), float('inf'))
      self.assertEqual(accountant.get_epsilon(1e-9), float('inf'))
      self.assertEqual(accountant.get_delta(100), 1)
      self.assertEqual(accountant.get_delta(0), 1)
      self.assertEqual(accountant.get_delta(float('inf')), 1)


# --- Equality with RdpAccountant at the worst case.


@_every_kind
@pytest.mark.parametrize('z, q', [(0.7, 1.0), (1.1, 0.01), (4.0, 0.3)])
def test_units_at_the_worst_case_reproduce_the_rdp_accountant(
  composition, estimator, z, q
):
  event = _event([z**-2] * 5, q, z**-2)
  gaussian = dp_accounting.GaussianDpEvent(z)
  sampled = dp_accounting.PoissonSampledDpEvent(q, gaussian)
  actual = _epsilon(
    _accountant(composition, estimator=estimator).compose(event, 7)
  )
  expected = _rdp_accountant().compose(sampled, 7).get_epsilon(_DELTA)
  assert actual == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize('composition', _COMPOSITIONS)
@pytest.mark.parametrize(
  'estimator, share', [('student_t', 0.9), ('population', 1)]
)
def test_equal_units_without_a_worst_case_reproduce_the_rdp_accountant(
  composition, estimator, share
):
  # Student's t keeps a tenth of δ for a bound that fails.
  event = _event([0.04] * 5, 0.2, None)
  accountant = _accountant(composition, estimator=estimator).compose(event, 7)
  sampled = dp_accounting.PoissonSampledDpEvent(
    0.2, dp_accounting.GaussianDpEvent(5.0)
  )
  expected = _rdp_accountant().compose(sampled, 7).get_epsilon(share * _DELTA)
  assert _epsilon(accountant) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize('composition', _COMPOSITIONS)
@pytest.mark.parametrize('delta', [1e-8, 1e-5, 1e-2])
def test_events_of_dp_accounting_cost_what_the_rdp_accountant_says(
  composition, delta
):
  gaussian = dp_accounting.GaussianDpEvent(3.0)
  ledger = dp_accounting.ComposedDpEvent(
    [
      dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.05, gaussian), 100
      ),
      gaussian,
      dp_accounting.NoOpDpEvent(),
      dp_accounting.SelfComposedDpEvent(
        dp_accounting.ComposedDpEvent(
          [gaussian, dp_accounting.GaussianDpEvent(8.0)]
        ),
        2,
      ),
    ]
  )
  accountant = _accountant(composition).compose(ledger)
  expected = _rdp_accountant().compose(ledger)
  assert _epsilon(accountant, delta) == pytest.approx(
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
  accountant.compose(_random_event(), 3)
  accountant.compose(dp_accounting.GaussianDpEvent(5.0))
  sampled = dp_accounting.PoissonSampledDpEvent(
    0.3, dp_accounting.GaussianDpEvent(2.0)
  )
  expected = (
    _rdp_accountant()
    .compose(sampled, 3)
    .compose(dp_accounting.GaussianDpEvent(5.0))
    .get_epsilon(_DELTA)
  )
  actual = _rdp_accountant().compose(accountant.ledger).get_epsilon(_DELTA)
  assert actual == pytest.approx(expected, rel=1e-9)
  assert _epsilon(accountant) <= expected * (1 + 1e-9)


# --- The numbers of ACCOUNTING.md.

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
  epsilon = _epsilon(_staying_person(composition, conversion))
  assert epsilon == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(
  'conversion, expected', [('chernoff', 4.54), ('tight', 4.01)]
)
def test_the_worst_case_of_the_example(conversion, expected):
  accountant = _accountant(conversion=conversion, orders=range(1, 65))
  accountant.compose(dp_accounting.GaussianDpEvent(20.0), _ROUNDS)
  assert _epsilon(accountant) == pytest.approx(expected, abs=0.005)


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
    epsilon = _epsilon(_staying_person(composition, 'chernoff'))
    assert (_exact_tail(epsilon) <= _DELTA) == sound


def test_the_printed_direction_turns_2_9_into_78():
  # Section 1, by Theorem 2.
  sampled = dp_accounting.PoissonSampledDpEvent(
    0.00427, dp_accounting.GaussianDpEvent(1.12)
  )
  for direction, expected, tolerance in (
    ('tight', 2.9, 0.05),
    ('printed', 78, 0.5),
  ):
    accountant = _accountant(direction=direction, conversion='chernoff')
    accountant.compose(sampled, 14_063)
    assert _epsilon(accountant) == pytest.approx(expected, abs=tolerance)


# --- The formulas of sections 2 to 4, put together slowly.


def _slow_epsilon(distances, q, worst, count, accountant, delta):
  """Sections 1 to 4 for one event that took place `count` times."""
  settings = accountant.settings
  orders, rounds = settings['orders'], settings['total_rounds'] or count
  moments = functools.partial(
    oracles.log_moment, q=q, direction=settings['direction']
  )
  costs = np.array([[moments(r2, order=o) for o in orders] for r2 in distances])
  worst_costs = np.array([moments(worst, order=o) for o in orders])
  power = {'panel': count, 'holder': rounds, 'product': 1}
  power = power[settings['composition']]
  bounds = 1 if settings['composition'] == 'panel' else rounds
  bounds *= len(orders) if settings['count_orders'] else 1
  kept = settings['estimator_delta'] or delta / 10
  if settings['estimator'] == 'population':
    kept, mean = 0.0, oracles.log_mean_exp(power * costs)
  else:
    bound = getattr(mean_bounds, settings['estimator'])
    mean = bound(power * costs, kept / bounds, power * worst_costs)
  cost = mean * count / power
  return min(
    oracles.epsilon(orders, cost, delta - kept, settings['conversion']),
    oracles.epsilon(orders, count * worst_costs, delta, settings['conversion']),
  )


@_every_kind
@pytest.mark.parametrize('conversion', _CONVERSIONS)
@pytest.mark.parametrize('estimator_delta', [None, 1e-7])
def test_epsilon_is_what_the_formulas_say(
  composition, estimator, conversion, estimator_delta
):
  accountant = _accountant(
    composition,
    total_rounds=60,
    estimator=estimator,
    conversion=conversion,
    orders=(1, 2, 4, 8, 16),
    estimator_delta=estimator_delta,
  )
  event = _random_event(units=200)
  accountant.compose(event, 50)
  expected = _slow_epsilon(
    event.squared_distances, 0.3, 0.25, 50, accountant, _DELTA
  )
  assert _epsilon(accountant) == pytest.approx(expected, rel=1e-9)


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
  expected = _slow_epsilon(
    event.squared_distances, 0.3, 0.25, 50, accountant, _DELTA
  )
  assert _epsilon(accountant) == pytest.approx(expected, rel=1e-9)


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


def test_a_mixed_ledger_adds_the_known_costs_to_the_estimated_ones():
  event = _random_event()
  costs = oracles.log_mean_exp(
    5 * sampled_gaussian.log_moments(event.squared_distances, 0.3, _ORDERS)
  )
  costs = costs + 2 * oracles.gaussian_costs([1 / 9], _ORDERS)[0]
  accountant = _accountant(estimator='population')
  accountant.compose(
    dp_accounting.ComposedDpEvent(
      [
        dp_accounting.GaussianDpEvent(3.0),
        dp_accounting.SelfComposedDpEvent(event, 5),
        dp_accounting.GaussianDpEvent(3.0),
      ]
    )
  )
  expected = oracles.epsilon(_ORDERS, costs, _DELTA, 'tight')
  assert _epsilon(accountant) == pytest.approx(expected, rel=1e-12)


def test_rounds_that_differ_add_up_per_member_of_the_panel():
  # Whoever is far in one round is near in the next: the sum is the same for
  # all, and so is the cost of the panel.
  one = _event([0.1, 0.02, 0.1, 0.02], 1.0)
  other = _event([0.02, 0.1, 0.02, 0.1], 1.0)
  accountant = _accountant(estimator='population').compose(one).compose(other)
  costs = oracles.gaussian_costs([0.12], _ORDERS)[0]
  expected = oracles.epsilon(_ORDERS, costs, _DELTA, 'tight')
  assert _epsilon(accountant) == pytest.approx(expected, rel=1e-12)


def test_holder_is_reckoned_with_all_rounds_from_the_first_one_on():
  event = _random_event()
  costs = sampled_gaussian.log_moments(event.squared_distances, 0.3, _ORDERS)
  accountant = _accountant('holder', total_rounds=8, estimator='population')
  accountant.compose(event, 3)
  expected = oracles.epsilon(
    _ORDERS, 3 / 8 * oracles.log_mean_exp(8 * costs), _DELTA, 'tight'
  )
  assert _epsilon(accountant) == pytest.approx(expected, rel=1e-12)


@_every_kind
@pytest.mark.parametrize('conversion', _CONVERSIONS)
@pytest.mark.parametrize('estimator_delta', [None, 1e-9])
def test_delta_inverts_epsilon(
  composition, estimator, conversion, estimator_delta
):
  accountant = _accountant(
    composition,
    estimator=estimator,
    conversion=conversion,
    estimator_delta=estimator_delta,
  ).compose(_random_event(units=300), 10)
  for delta in (1e-7, 1e-4):
    epsilon = _epsilon(accountant, delta)
    back = accountant.get_delta(epsilon)
    assert back == pytest.approx(delta, rel=1e-6)
    assert _epsilon(accountant, back * (1 + 1e-6)) <= epsilon * (1 + 1e-9)


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
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    explained = accountant.explain(_DELTA)
    epsilon, order = accountant.get_epsilon_and_optimal_order(_DELTA)
  assert explained['epsilon'] == epsilon
  assert explained['order'] == order
  assert explained['rounds'] == 2
  assert explained['fewest_units'] == 9
  assert explained['estimator'] == 'student_t'
  assert explained['composition'] == 'holder'
  json.dumps(explained, allow_nan=False)


def test_every_estimated_figure_is_at_most_that_of_differential_privacy():
  for composition in _COMPOSITIONS:
    for estimator in _ESTIMATORS:
      accountant = _accountant(composition, estimator=estimator)
      accountant.compose(_random_event(units=3), 10)
      worst = _rdp_accountant().compose(accountant.ledger)
      assert _epsilon(accountant) <= worst.get_epsilon(_DELTA) * (1 + 1e-9)


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
  generator = np.random.default_rng(11)
  misses = 0
  for _ in range(draws):
    accountant = _accountant(
      composition,
      total_rounds=_WORLD_ROUNDS,
      estimator=estimator,
      orders=_WORLD_ORDERS,
      estimator_delta=_WORLD_FAILURES,
    )
    panel = types[generator.choice(len(types), units, p=probabilities)]
    for parity in (0, 1):
      # Holder and product do not care that the units are the same ones.
      event = _event(panel[:, parity], 1.0, _WORST)
      accountant.compose(event, _WORLD_ROUNDS // 2)
    epsilon = _epsilon(accountant, _WORLD_FAILURES + _DELTA)
    # The truth has the same δ left for the tail.
    misses += epsilon < truth * (1 - 1e-9)
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
@pytest.mark.parametrize(
  'composition, estimator',
  [
    ('panel', 'betting'),
    ('panel', 'bernstein'),
    ('holder', 'betting'),
    ('holder', 'bernstein'),
  ],
)
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

_properties = hypothesis.settings(
  derandomize=True, max_examples=25, deadline=None
)
_distances = st.lists(st.floats(0, 1), min_size=3, max_size=8)
_compositions = st.sampled_from(_COMPOSITIONS)
_any_estimator = st.sampled_from(_ESTIMATORS)
_conversions = st.sampled_from(_CONVERSIONS)
_SLACK = 1e-9


def _run(
  distances, q=0.2, noise=1.0, rounds=3, delta=_DELTA, worst=1.0, **settings
):
  """ε of rounds with these distances at a noise multiplier."""
  squared = (np.array(distances) / noise) ** 2
  event = _event(squared, q, (worst / noise) ** 2)
  return _epsilon(_accountant(**settings).compose(event, rounds), delta)


@_properties
@hypothesis.given(
  distances=_distances,
  noises=st.tuples(st.floats(0.3, 20), st.floats(1, 3)),
  composition=_compositions,
  estimator=_any_estimator,
  conversion=_conversions,
)
def test_epsilon_falls_with_noise(
  distances, noises, composition, estimator, conversion
):
  settings = {
    'composition': composition,
    'estimator': estimator,
    'conversion': conversion,
  }
  noise, factor = noises
  more = _run(distances, noise=noise * factor, **settings)
  assert more <= _run(distances, noise=noise, **settings) * (1 + _SLACK)


@_properties
@hypothesis.given(
  distances=_distances,
  log_deltas=st.tuples(st.floats(-12, -1), st.floats(0, 0.9)),
  composition=_compositions,
  estimator=_any_estimator,
  conversion=_conversions,
)
def test_epsilon_falls_with_delta(
  distances, log_deltas, composition, estimator, conversion
):
  run = functools.partial(
    _run,
    distances,
    composition=composition,
    estimator=estimator,
    conversion=conversion,
  )
  delta = 10 ** log_deltas[0]
  more = run(delta=delta * 10 ** log_deltas[1])
  assert more <= run(delta=delta) * (1 + _SLACK)


@_properties
@hypothesis.given(
  distances=_distances,
  rounds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
  composition=_compositions,
  estimator=st.sampled_from(['population', 'betting', 'student_t']),
  conversion=_conversions,
)
def test_epsilon_grows_with_rounds(
  distances, rounds, composition, estimator, conversion
):
  run = functools.partial(
    _run,
    distances,
    composition=composition,
    estimator=estimator,
    conversion=conversion,
  )
  fewer = run(rounds=rounds[0])
  assert run(rounds=sum(rounds)) >= fewer * (1 - _SLACK)


@_properties
@hypothesis.given(
  distances=_distances,
  probabilities=st.tuples(st.floats(0, 1), st.floats(0, 1)),
  composition=_compositions,
  estimator=st.sampled_from(['population', 'betting', 'student_t']),
  conversion=_conversions,
)
def test_epsilon_grows_with_participation(
  distances, probabilities, composition, estimator, conversion
):
  run = functools.partial(
    _run,
    distances,
    composition=composition,
    estimator=estimator,
    conversion=conversion,
  )
  fewer, more = sorted(probabilities)
  assert run(q=more) >= run(q=fewer) * (1 - _SLACK)


@_properties
@hypothesis.given(
  distances=_distances,
  unit=st.integers(0, 7),
  farther=st.floats(0, 1),
  composition=_compositions,
  # A deviation falls where a near unit moves to the others, and so may the
  # bounds that are made of deviations.
  estimator=st.sampled_from(['population', 'betting']),
  conversion=_conversions,
)
def test_epsilon_grows_with_distances(
  distances, unit, farther, composition, estimator, conversion
):
  run = functools.partial(
    _run,
    composition=composition,
    estimator=estimator,
    conversion=conversion,
    worst=2.0,
  )
  moved = list(distances)
  moved[unit % len(moved)] += farther
  assert run(moved) >= run(distances) * (1 - _SLACK)


@_properties
@hypothesis.given(
  rounds=st.lists(
    st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=4
  ),
  q=st.floats(0, 1),
  conversion=_conversions,
  direction=st.sampled_from(sampled_gaussian.DIRECTIONS),
)
def test_with_true_expectations_panel_is_below_holder_below_the_worst_case(
  rounds, q, conversion, direction
):
  def run(composition):
    accountant = _accountant(
      composition,
      total_rounds=len(rounds),
      estimator='population',
      conversion=conversion,
      direction=direction,
    )
    for distances in rounds:
      accountant.compose(_event(distances, q, 1.0))
    return _epsilon(accountant)

  worst = _accountant(conversion=conversion, direction=direction)
  worst.compose(
    dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(1.0)),
    len(rounds),
  )
  panel, holder = run('panel'), run('holder')
  assert panel <= holder * (1 + _SLACK)
  assert run('product') <= holder * (1 + _SLACK)  # Jensen's inequality.
  assert holder <= _epsilon(worst) * (1 + _SLACK)


@_properties
@hypothesis.given(
  rounds=st.lists(
    st.tuples(
      st.lists(st.floats(0, 1), min_size=4, max_size=4), st.floats(0, 1)
    ),
    min_size=2,
    max_size=5,
  ),
  random=st.randoms(use_true_random=False),
  composition=_compositions,
  estimator=_any_estimator,
)
def test_the_order_of_rounds_does_not_matter(
  rounds, random, composition, estimator
):
  ledger = [_event(distances, q, 1.0) for distances, q in rounds]
  ledger.append(dp_accounting.GaussianDpEvent(4.0))
  shuffled = list(ledger)
  random.shuffle(shuffled)
  first, second = (
    _accountant(composition, estimator=estimator) for _ in range(2)
  )
  for event in ledger:
    first.compose(event)
  for event in shuffled:
    second.compose(event)
  assert _epsilon(first) == pytest.approx(_epsilon(second), rel=1e-8)


@_properties
@hypothesis.given(
  distances=_distances,
  q=st.floats(0, 1),
  counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
  composition=_compositions,
  estimator=_any_estimator,
)
def test_a_state_that_went_through_json_is_the_same_state(
  distances, q, counts, composition, estimator
):
  original = _accountant(composition, estimator=estimator)
  for count in counts:
    original.compose(_event(distances, q, 1.0), count)
  restored = _accountant(composition, estimator=estimator)
  text = json.dumps(original.state_dict(), allow_nan=False)
  restored.load_state_dict(json.loads(text))
  assert _epsilon(restored) == _epsilon(original)
  assert json.dumps(restored.state_dict()) == text
  original.compose(_event(distances, q, 1.0))
  restored.compose(_event(distances, q, 1.0))
  assert _epsilon(restored) == _epsilon(original)


@_every_kind
def test_counting_is_composing_again_and_again(composition, estimator):
  counted = _accountant(composition, estimator=estimator)
  repeated = _accountant(composition, estimator=estimator)
  nested = _accountant(composition, estimator=estimator)
  event = _random_event()
  counted.compose(event, 6)
  for _ in range(6):
    repeated.compose(event)
  nested.compose(
    dp_accounting.SelfComposedDpEvent(
      dp_accounting.ComposedDpEvent(
        [event, dp_accounting.SelfComposedDpEvent(event, 2)]
      ),
      2,
    )
  )
  assert _epsilon(repeated) == pytest.approx(_epsilon(counted), rel=1e-9)
  assert _epsilon(nested) == pytest.approx(_epsilon(counted), rel=1e-9)


# --- State.


def _used(composition, estimator, units=4, worst=0.25):
  accountant = _accountant(composition, estimator=estimator)
  accountant.compose(dp_accounting.GaussianDpEvent(3.0))
  accountant.compose(_random_event(units=units, worst=worst), 2)
  accountant.compose(_random_event(units=units, worst=worst, seed=1, q=1 / 3))
  return accountant


@_every_kind
@pytest.mark.parametrize('units', [4, 5000])
def test_state_dict_round_trip_is_exact(composition, estimator, units):
  original = _used(composition, estimator, units)
  text = json.dumps(original.state_dict(), allow_nan=False)
  restored = _accountant(composition, estimator=estimator)
  restored.load_state_dict(json.loads(text))
  assert json.dumps(restored.state_dict(), allow_nan=False) == text
  assert _epsilon(restored) == _epsilon(original)
  assert restored.ledger == original.ledger


@pytest.mark.parametrize('composition', _COMPOSITIONS)
def test_a_state_without_a_worst_case_round_trips(composition):
  original = _accountant(composition, estimator='student_t')
  original.compose(_event(worst=None), 2)
  restored = _accountant(composition, estimator='student_t')
  text = json.dumps(original.state_dict(), allow_nan=False)
  restored.load_state_dict(json.loads(text))
  assert _epsilon(restored) == _epsilon(original)


@_every_kind
def test_the_state_of_rounds_that_cost_nothing_is_json(composition, estimator):
  original = _accountant(composition, estimator=estimator)
  original.compose(_event([0.0] * 4, 0.3, 0.0)).compose(_event([0.0] * 4, 0.0))
  text = json.dumps(original.state_dict(), allow_nan=False)
  restored = _accountant(composition, estimator=estimator)
  restored.load_state_dict(json.loads(text))
  assert _epsilon(restored) == _epsilon(original)


@pytest.mark.parametrize(
  'event, count, settings',
  [
    (_event(q=np.float32(0.3)), 1, {}),
    (_event(worst=np.float32(0.25)), 1, {}),
    (_event(), np.int64(2), {}),
    (dp_accounting.GaussianDpEvent(np.float32(2.0)), 1, {}),
    (
      dp_accounting.PoissonSampledDpEvent(
        np.float32(0.5), dp_accounting.GaussianDpEvent(2.0)
      ),
      1,
      {},
    ),
    (_event(), 1, {'total_rounds': np.int64(10)}),
    (_event(), 1, {'estimator_delta': np.float32(1e-6)}),
  ],
)
def test_numbers_of_numpy_do_not_spoil_the_state(event, count, settings):
  accountant = _accountant('holder', **settings).compose(event, count)
  text = json.dumps(accountant.state_dict(), allow_nan=False)
  restored = _accountant('holder', **settings)
  restored.load_state_dict(json.loads(text))
  assert _epsilon(restored) == _epsilon(accountant)


def _set(*path_and_value):
  *path, value = path_and_value

  def damage(state):
    for key in path[:-1]:
      state = state[key]
    state[path[-1]] = value

  damage.__name__ = f'{path} = {str(value)[:20]}'  # For the test's name.
  return damage


def _delete(key):
  def damage(state):
    del state[key]

  damage.__name__ = f'no {key}'
  return damage


def _assert_refused(composition, estimator, damage, sentence):
  state = json.loads(json.dumps(_used(composition, estimator).state_dict()))
  damage(state)
  accountant = _accountant(composition, estimator=estimator)
  accountant.compose(dp_accounting.GaussianDpEvent(7.0))
  before = copy.deepcopy(accountant.state_dict())
  with pytest.raises(ValueError, match=sentence):
    accountant.load_state_dict(state)
  assert accountant.state_dict() == before


@pytest.mark.parametrize(
  'damage, sentence',
  [
    (_delete('format'), 'not one of a BayesianAccountant'),
    (_set('format', 'opacus'), 'not one of a BayesianAccountant'),
    (_delete('version'), 'version None; this release reads version 4'),
    (_set('version', 1), 'version 1; this release reads version 4'),
    (_delete('settings'), 'other settings: composition = None'),
    (_set('settings', 7), 'other settings: composition = None'),
    (_delete('ledger'), 'damaged'),
    (_delete('panels'), 'damaged'),
    (_delete('rounds'), 'damaged'),
    (_set('ledger', []), 'damaged: its rounds are not those of its ledger'),
    (_set('ledger', None), 'damaged'),
    (_set('ledger', 0, 0, -1.0), 'damaged'),
    (_set('ledger', 0, 0, math.nan), 'damaged'),
    (_set('ledger', 0, 0, 'near'), 'damaged'),
    (_set('ledger', 0, 0, 1e250), 'damaged'),
    (_set('ledger', 0, 1, 1.5), 'damaged'),
    (_set('ledger', 0, 1, None), 'damaged'),
    (_set('ledger', 0, 2, None), 'damaged'),
    (_set('ledger', 0, 3, 0), 'damaged'),
    (_set('ledger', 0, 3, 1.5), 'damaged'),
    (_set('ledger', 0, 3, math.inf), 'damaged'),
    (_set('ledger', 0, 4, 1.5), 'damaged'),
    (_set('ledger', 0, 4, -0.1), 'damaged'),
    (_set('ledger', 0, 4, math.nan), 'damaged'),
    (_set('ledger', 0, 4, None), 'damaged'),
    (_set('ledger', 0, [1.0, 0.5]), 'damaged'),
    (_set('panels', []), 'damaged: its rounds are not those of its ledger'),
    (_set('panels', None), 'damaged'),
    (_set('panels', 0, [[0.1] * len(_ORDERS)] * 2), 'damaged'),
    (_set('panels', 0, [[0.1, 0.2]] * 4), 'damaged'),
    (_set('panels', 0, 0, [0.1]), 'damaged'),
    (_set('panels', 0, 0, 0, -0.1), 'damaged'),
    (_set('panels', 0, 0, 0, math.nan), 'damaged'),
    (_set('panels', 0, 0, 0, math.inf), 'damaged'),
    (_set('panels', 0, 0, 0, 'x'), 'damaged'),
    (_set('rounds', [[[{}], 1]]), 'damaged'),
    (_set('rounds', None), 'damaged'),
  ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage, sentence):
  _assert_refused('panel', 'betting', damage, sentence)


_FIELDS = {
  'betting': ('points', 'weights'),
  'bernstein': ('mean', 'variance'),
  'student_t': ('log_scale', 'mean', 'deviation'),
  'population': ('log_scale', 'mean'),
}
_SIZE = len(_ORDERS)


@pytest.mark.parametrize('composition', ['holder', 'product'])
@pytest.mark.parametrize(
  'estimator, field', [(e, f) for e, fields in _FIELDS.items() for f in fields]
)
@pytest.mark.parametrize(
  'value',
  [
    pytest.param(None, id='null'),
    pytest.param(0.1, id='a number'),
    pytest.param('x', id='a text'),
    pytest.param([], id='an empty list'),
    pytest.param([0.1], id='too few orders'),
    pytest.param([math.nan] * _SIZE, id='NaN'),
    pytest.param([[[0.1] * _SIZE]] * 2, id='too many dimensions'),
    pytest.param({'x': 1}, id='a dictionary'),
  ],
)
def test_a_damaged_sample_is_refused_and_changes_nothing(
  composition, estimator, field, value
):
  (sample, *_), _ = _used(composition, estimator).state_dict()['rounds'][0]
  assert field in sample  # It is the value that is refused.
  damage = _set('rounds', 0, 0, 0, field, value)
  _assert_refused(composition, estimator, damage, 'damaged')


@pytest.mark.parametrize(
  'estimator, field, value',
  [
    # None of these can come from a sample; some lower ε, or lead to NaN.
    ('betting', 'points', [[-1.0] * _SIZE] * 4),
    ('betting', 'points', [[2.0] * _SIZE] * 4),
    ('betting', 'points', [[0.1] * _SIZE] * 7),
    ('betting', 'points', [0.1] * _SIZE),
    ('betting', 'weights', [[-1.0] * _SIZE]),
    ('betting', 'weights', [[0.0] * _SIZE]),
    ('betting', 'weights', [1.0] * _SIZE),
    ('betting', 'log_worst_case', [-1.0] * _SIZE),
    ('betting', 'log_worst_case', [None] * _SIZE),
    ('betting', 'count', 10**6),
    ('betting', 'count', 2),
    ('bernstein', 'mean', [-1.0] * _SIZE),
    ('bernstein', 'mean', [2.0] * _SIZE),
    ('bernstein', 'variance', [-1.0] * _SIZE),
    ('bernstein', 'variance', [[0.1] * _SIZE] * 2),
    ('bernstein', 'log_worst_case', [-1.0] * _SIZE),
    ('bernstein', 'log_worst_case', [None] * _SIZE),
    ('bernstein', 'count', 1),
    ('student_t', 'mean', [-1.0] * _SIZE),
    ('student_t', 'mean', [math.inf] * _SIZE),
    ('student_t', 'deviation', [-1.0] * _SIZE),
    ('student_t', 'log_scale', [-1.0] * _SIZE),
    ('student_t', 'log_worst_case', [-1.0] * _SIZE),
    ('student_t', 'count', 1),
    ('population', 'log_scale', [-1.0] * _SIZE),
    ('population', 'log_scale', [math.inf] * _SIZE),
    ('population', 'mean', [-1.0] * _SIZE),
    ('population', 'mean', [math.inf] * _SIZE),
    ('population', 'log_worst_case', [-1.0] * _SIZE),
    ('population', 'count', 0),
  ],
  ids=lambda value: str(value)[:24],
)
def test_a_sample_that_cannot_be_one_is_refused(estimator, field, value):
  (sample, *_), _ = _used('product', estimator).state_dict()['rounds'][0]
  assert field in sample  # It is the value that is refused.
  damage = _set('rounds', 0, 0, 0, field, value)
  _assert_refused('product', estimator, damage, 'damaged')


@pytest.mark.parametrize('repeats', [0, -1, 1.5, None, math.inf, 5])
def test_repeats_other_than_those_of_the_ledger_are_refused(repeats):
  damage = _set('rounds', 0, 1, repeats)
  _assert_refused('product', 'betting', damage, 'damaged')


def test_more_rounds_than_total_rounds_in_a_state_are_refused():
  def damage(state):
    for entry in state['ledger']:
      entry[3] *= 100
    for sample_and_repeats in state['rounds']:
      sample_and_repeats[1] *= 100

  _assert_refused('holder', 'betting', damage, 'damaged')


@pytest.mark.parametrize('state', [None, 7, 'state', [], {}, {'a': 1}])
def test_a_foreign_state_is_refused(state):
  with pytest.raises(ValueError, match='not one of a BayesianAccountant'):
    _accountant().load_state_dict(state)


@pytest.mark.parametrize(
  'settings, sentence',
  [
    ({'composition': 'product'}, "composition = 'product' .here 'panel'."),
    ({'estimator': 'student_t'}, "estimator = 'student_t'"),
    ({'direction': 'printed'}, "direction = 'printed'"),
    ({'conversion': 'chernoff'}, "conversion = 'chernoff'"),
    ({'orders': (1, 2)}, r'orders = \[1, 2\]'),
    ({'estimator_delta': 1e-9}, 'estimator_delta = 1e-09'),
    ({'count_orders': False}, 'count_orders = False'),
  ],
)
def test_a_state_of_other_settings_is_refused(settings, sentence):
  foreign = _accountant(**settings).compose(_event())
  accountant = _accountant().compose(_event(), 2)
  before = copy.deepcopy(accountant.state_dict())
  with pytest.raises(ValueError, match=f'other settings: {sentence}'):
    accountant.load_state_dict(foreign.state_dict())
  assert accountant.state_dict() == before


def test_a_state_of_other_total_rounds_is_refused():
  foreign = _accountant('holder', total_rounds=9).compose(_event())
  with pytest.raises(ValueError, match=r'total_rounds = 9 \(here 10\)'):
    _accountant('holder').load_state_dict(foreign.state_dict())


# --- What leaves the accountant as it was.

_REFUSED = [
  (dp_accounting.UnsupportedDpEvent(), dp_accounting.UnsupportedEventError),
  (dp_accounting.LaplaceDpEvent(1.0), dp_accounting.UnsupportedEventError),
  (dp_accounting.GaussianDpEvent(-1.0), ValueError),
  (_event(worst=None), ValueError),
  (_event([0.1] * 5, panel=True), ValueError),
  (dp_accounting.SelfComposedDpEvent(_event(), 11), ValueError),
]


@pytest.mark.parametrize('composition', ['panel', 'holder'])
@pytest.mark.parametrize('refused, error', _REFUSED)
def test_an_event_is_added_as_a_whole_or_not_at_all(
  composition, refused, error
):
  accountant = _accountant(composition).compose(_event())
  both = dp_accounting.ComposedDpEvent([_event(), refused])
  before = copy.deepcopy(accountant.state_dict())
  if composition == 'holder' and refused == _event([0.1] * 5):
    accountant.compose(both)  # Holder takes any number of units.
    return
  if composition == 'panel' and refused == _REFUSED[-1][0]:
    accountant.compose(both)  # And a panel any number of rounds.
    return
  assert not accountant.supports(both)
  with pytest.raises(error):
    accountant.compose(both)
  with pytest.raises(error):
    accountant.would_exceed(both, 1.0, _DELTA)
  assert accountant.state_dict() == before


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
  assert _epsilon(accountant) > 0


@_every_kind
def test_would_exceed_tells_and_changes_nothing(composition, estimator):
  accountant = _used(composition, estimator)
  event = _random_event(units=4, seed=2)
  before = copy.deepcopy(accountant.state_dict())
  after = _epsilon(_used(composition, estimator).compose(event))
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    assert not accountant.would_exceed(event, after * 1.001, _DELTA)
    assert accountant.would_exceed(event, after * 0.999, _DELTA)
  assert accountant.state_dict() == before
  assert accountant.ledger == _used(composition, estimator).ledger


def test_copies_do_not_share_what_is_added_later():
  original = _used('panel', 'betting')
  twin = copy.copy(original)
  before = _epsilon(original)
  twin.compose(_random_event(units=4))
  assert _epsilon(original) == before


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
  rdp = _rdp_accountant().compose(event)
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
    epsilon = _epsilon(accountant, 0.9 + 1e-5)
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
    epsilon = _epsilon(accountant)
  except ValueError:
    return
  assert epsilon >= _epsilon(usual)
