"""Tests of the accountant's exact estimators: sample, census and each."""

import copy
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
from tf_bdp.accounting import claims, events

BayesianAccountant = accountant_lib.BayesianAccountant

_DELTA = 1e-5
_EXACT = accountant_lib.EXACT_ESTIMATORS
_exactly = pytest.mark.parametrize('estimator', _EXACT)
_properties = hypothesis.settings(
  derandomize=True, max_examples=8, deadline=None
)
pytestmark = pytest.mark.filterwarnings('ignore:The best order')


def _event(distances, q=0.3, worst=0.25, a=1.0):
  return events.BayesianGaussianEvent(distances, q, worst, True, a)


def _random_event(units=20, q=0.3, worst=0.25, seed=0):
  generator = np.random.default_rng(seed)
  return _event(worst * generator.beta(0.5, 4, units), q, worst)


def _sampled(q, noise_multiplier):
  return dp_accounting.PoissonSampledDpEvent(
    q, dp_accounting.GaussianDpEvent(noise_multiplier)
  )


def _dp_epsilons(event, delta=_DELTA, rdp=True):
  pld = dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(delta)
  if not rdp:
    return pld
  return min(
    pld, dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(delta)
  )


class ContractTest(privacy_accountant_test.PrivacyAccountantTest):
  """dp_accounting's contract, whole."""

  def _make_test_accountants(self):
    return [
      *(BayesianAccountant(estimator=estimator) for estimator in _EXACT),
      BayesianAccountant(estimator='betting'),
      BayesianAccountant('holder', total_rounds=10),
      BayesianAccountant.paper(),
    ]


# --- Figures of known truth.


def _gaussian_delta(mu, epsilon):
  return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(
    epsilon
  ) * stats.norm.cdf(-mu / 2 - epsilon / mu)


def test_a_person_who_stays_has_the_exact_figure_of_the_example():
  # The example of docs/accounting.md: T = 300, q = 1, s = 20; 1 % of people at
  # ‖Δ‖ = 1 and 99 % at 0.1. By moments 2.99, and 4.01 for the worst case.
  far, near = math.sqrt(300 / 400), math.sqrt(3 / 400)

  def delta(epsilon):
    mean = 0.01 * _gaussian_delta(far, epsilon)
    return mean + 0.99 * _gaussian_delta(near, epsilon)

  expected = optimize.brentq(lambda e: delta(e) - _DELTA, 0.1, 10)
  worst = optimize.brentq(lambda e: _gaussian_delta(far, e) - _DELTA, 0.1, 10)
  event = _event([1 / 400] + [0.01 / 400] * 99, 1.0, 1 / 400)
  accountant = BayesianAccountant(estimator='census').compose(event, 300)
  assert accountant.get_epsilon(_DELTA) == pytest.approx(expected, rel=1e-6)
  assert accountant.get_delta(expected) == pytest.approx(_DELTA, rel=1e-6)
  assert expected < 2.99
  each = BayesianAccountant(estimator='each').compose(event, 300)
  assert each.get_epsilon(_DELTA) == pytest.approx(worst, rel=1e-6)
  assert worst < 4.01
  epsilons = accountant.individual_epsilons(_DELTA)
  assert epsilons[0] == pytest.approx(worst, rel=1e-6)
  single = optimize.brentq(lambda e: _gaussian_delta(near, e) - _DELTA, 0, 10)
  np.testing.assert_allclose(epsilons[1:], single, rtol=1e-6)


@pytest.mark.parametrize('estimator', ['census', 'each'])
@pytest.mark.parametrize('worst', [0.09, 0.16, None])
def test_equal_units_have_the_figure_of_the_pld_accountant(estimator, worst):
  accountant = BayesianAccountant(estimator=estimator)
  accountant.compose(_event([0.09] * 5, 0.1, worst), 100)
  pld = dp_accounting.pld.PLDAccountant().compose(_sampled(0.1, 1 / 0.3), 100)
  for delta in (1e-2, 1e-5, 1e-8):
    expected = pld.get_epsilon(delta)
    found = accountant.get_epsilon(delta)
    assert expected * (1 - 1e-4) <= found <= expected * (1 + 1e-3)


@_exactly
@pytest.mark.parametrize(
  'q, worst, count', [(0.1, 0.09, 200), (1.0, 0.04, 20), (0.02, 0.5, 50)]
)
def test_no_figure_is_above_that_of_differential_privacy(
  estimator, q, worst, count
):
  accountant = BayesianAccountant(estimator=estimator)
  accountant.compose(_event([worst] * 4, q, worst), count)
  whole = _dp_epsilons(accountant.ledger)
  rest = whole
  if estimator == 'sample':
    rest = _dp_epsilons(accountant.ledger, 0.9 * _DELTA)
  # PLD's grid is not ours; both err upwards.
  assert whole * (1 - 1e-3) <= accountant.get_epsilon(_DELTA) <= rest * 1.0001


@pytest.mark.parametrize('estimator', ['betting', 'bernstein', 'student_t'])
@pytest.mark.parametrize(
  'settings', [{}, {'composition': 'holder', 'total_rounds': 100}]
)
def test_no_figure_by_moments_is_above_that_of_differential_privacy(
  estimator, settings
):
  accountant = BayesianAccountant(estimator=estimator, **settings)
  accountant.compose(_random_event(units=4, q=0.1), 100)
  limit = _dp_epsilons(accountant.ledger, 0.9 * _DELTA)
  assert accountant.get_epsilon(_DELTA) <= limit * 1.0001
  epsilon, _ = accountant.get_epsilon_and_optimal_order(_DELTA)
  if estimator != 'student_t':
    assert accountant.get_epsilon(_DELTA) < epsilon
  delta = accountant.get_delta(accountant.get_epsilon(_DELTA))
  assert delta == pytest.approx(_DELTA, rel=1e-3)


def _run(estimator, rounds, q, worst, units=100, seed=0, **settings):
  """A run of lognormal distances, below and above each other in turn."""
  generator = np.random.default_rng(seed)
  accountant = BayesianAccountant(estimator=estimator, **settings)
  usual = worst * generator.lognormal(-1.5, 0.6, units)
  for _ in range(rounds):
    now = np.minimum(usual * generator.lognormal(0.0, 0.3, units), worst)
    accountant.compose(_event(now**2, q, worst**2))
  return accountant


@pytest.mark.parametrize(
  'rounds, q, worst', [(20, 0.1, 1.0), (20, 1.0, 0.3), (5, 0.5, 0.8)]
)
def test_exact_figures_are_below_those_by_moments_on_the_same_data(
  rounds, q, worst
):
  # Section 9: by Theorem 2 most, by moments and the tight conversion less.
  census = _run('census', rounds, q, worst, units=40)
  tight, chernoff = (
    _run('population', rounds, q, worst, units=40, conversion=conversion)
    for conversion in ('tight', 'chernoff')
  )
  betting = _run('betting', rounds, q, worst, units=40)
  for delta in (1e-2, 1e-3, 1e-6):
    exact = {r.claim.name: r.epsilon for r in census.report(delta)}
    moments, _ = tight.get_epsilon_and_optimal_order(delta)
    assert exact['census'] < 0.97 * moments
    assert moments < chernoff.get_epsilon(delta)
    bound, _ = betting.get_epsilon_and_optimal_order(delta)
    assert exact['census'] < exact['sample'] < bound


def test_claims_are_ordered():
  accountant = _run('census', 10, 0.1, 1.0)
  epsilons = {r.claim.name: r.epsilon for r in accountant.report(1e-3)}
  assert list(epsilons) == ['dp', 'each', 'census', 'sample', 'paper']
  assert epsilons['census'] < epsilons['each'] < epsilons['dp']
  assert epsilons['census'] < epsilons['sample'] <= 1.05 * epsilons['dp']
  (recommended,) = [r for r in accountant.report(1e-3) if r.recommended]
  assert recommended.claim == claims.CLAIMS['census']
  individual = accountant.individual_epsilons(1e-3)
  assert np.max(individual) == pytest.approx(epsilons['each'], rel=1e-6)
  paper = _run(
    'student_t',
    10,
    0.1,
    1.0,
    composition='product',
    direction='printed',
    conversion='chernoff',
    count_orders=False,
  )
  # Moments of many units are looked up in a table, 1e-6 above or less.
  assert epsilons['paper'] == pytest.approx(paper.get_epsilon(1e-3), rel=2e-6)
  assert paper.report(1e-3)[1].claim == claims.CLAIMS['paper']


def test_the_paper_also_takes_rounds_that_are_known():
  event = dp_accounting.ComposedDpEvent([_random_event(), _sampled(0.5, 2.0)])
  accountant = BayesianAccountant().compose(event)
  paper = BayesianAccountant.paper().compose(event)
  row = accountant.report(_DELTA)[-1]
  assert row.epsilon == pytest.approx(paper.get_epsilon(_DELTA), rel=1e-9)


def test_a_mixed_ledger_composes_what_is_known_with_what_is_measured():
  # Four units that differ only in rounds that cost nothing.
  accountant = BayesianAccountant(estimator='census')
  accountant.compose(_event([0.09] * 4, 0.1), 30)
  accountant.compose(_event([0.01] * 4, 1.0), 4)
  accountant.compose(_event([0.04] * 4, 0.5), 10)
  accountant.compose(_sampled(0.2, 4.0), 5)
  accountant.compose(dp_accounting.GaussianDpEvent(8.0))
  accountant.compose(_event([0.0, 0.1, 0.2, 0.25], 0.0), 100)
  expected = dp_accounting.pld.PLDAccountant()
  for q, r, count in (
    (0.1, 0.3, 30),
    (1, 0.1, 4),
    (0.5, 0.2, 10),
    (0.2, 0.25, 5),
  ):
    expected.compose(_sampled(q, 1 / r), count)
  expected.compose(dp_accounting.GaussianDpEvent(8.0))
  wanted = expected.get_epsilon(_DELTA)
  found = accountant.get_epsilon(_DELTA)
  assert wanted * (1 - 1e-3) <= found <= wanted * (1 + 1e-3)


def test_a_client_that_may_not_come_at_all_loses_less():
  # Seen to be there with a: one round is 1 - a of nothing and a of the round.
  accountant = BayesianAccountant(estimator='census')
  accountant.compose(_event([0.25] * 4, 1.0, 0.25, a=0.1))
  expected = optimize.brentq(
    lambda e: 0.1 * _gaussian_delta(0.5, e) - _DELTA, 0.01, 10
  )
  assert accountant.get_epsilon(_DELTA) == pytest.approx(expected, rel=2e-4)
  assert accountant.get_epsilon(_DELTA) >= expected * (1 - 1e-9)


@_exactly
def test_of_groups_the_one_with_the_largest_figure_counts(estimator):
  groups = [
    _random_event(0 + 9 * i, q=q, seed=i) for i, q in ((1, 0.1), (2, 0.4))
  ]
  alone = [
    BayesianAccountant(estimator=estimator).compose(group, 20)
    for group in groups
  ]
  together = BayesianAccountant(estimator=estimator)
  together.compose(events.ParallelEvent(groups), 20)
  found = together.get_epsilon(0.1)
  assert found >= max(a.get_epsilon(0.1) for a in alone) * (1 - 1e-3)
  if estimator != 'sample':  # Its worst case is that of all groups.
    assert found == pytest.approx(
      max(a.get_epsilon(0.1) for a in alone), rel=2e-3
    )
  assert together.individual_epsilons(0.1).size == 27


# --- Samples.

_WORLDS = {
  'outliers of 2 %': ([0.98, 0.02], [1e-4, 0.02]),
  'outliers of 10 %': ([0.9, 0.1], [1e-4, 0.02]),
  'three kinds': ([0.5, 0.45, 0.05], [1e-4, 5e-3, 0.02]),
}


@pytest.mark.parametrize('world', list(_WORLDS))
@pytest.mark.parametrize('q, units, draws', [(1.0, 300, 80), (0.4, 100, 10)])
def test_a_sample_misses_the_truth_no_more_often_than_it_may(
  world, q, units, draws
):
  probabilities, squared = map(np.array, _WORLDS[world])
  everybody = np.repeat(squared, (1000 * probabilities).round().astype(int))
  truth = BayesianAccountant(estimator='census')
  truth = truth.compose(_event(everybody, q, 0.02), 40).get_epsilon(1e-3)
  generator = np.random.default_rng(11)
  misses = 0
  for _ in range(draws):
    accountant = BayesianAccountant(estimator_delta=0.1)
    panel = generator.choice(squared, units, p=probabilities)
    accountant.compose(_event(panel, q, 0.02), 40)
    misses += accountant.get_epsilon(0.1 + 1e-3) < truth * (1 - 1e-3)
  assert misses <= oracles.most_misses(draws, 0.1)


def test_a_sample_keeps_a_tenth_of_delta_once():
  accountant = BayesianAccountant().compose(_random_event(units=50), 10)
  explained = accountant.explain(1e-3)
  assert explained['delta_for_failures'] == pytest.approx(1e-4)
  assert explained['failure_probability'] == pytest.approx(1e-4)
  assert explained['order'] is None
  json.dumps(explained, allow_nan=False)


def test_a_sample_of_many_units_comes_close_to_the_census():
  generator = np.random.default_rng(0)
  squared = 0.2 * generator.beta(0.5, 4, 20_000)
  sample, census = (
    BayesianAccountant(estimator=estimator)
    .compose(_event(squared, 1.0, 0.2), 20)
    .get_epsilon(1e-2)
    for estimator in ('sample', 'census')
  )
  assert census < sample < 1.1 * census


@pytest.mark.parametrize('q', [0.3, 1.0])
def test_a_sample_needs_no_clipping(q):
  # δ_worst = 1: the bound of 500 units at δ′ = 5e-3 is ln(200)/500 or so.
  event = _event(np.full(500, 0.01), q, None)
  accountant = BayesianAccountant().compose(event, 5)
  assert accountant.get_epsilon(1e-5) == math.inf
  census = BayesianAccountant(estimator='census').compose(event, 5)
  assert census.get_epsilon(5e-2) <= accountant.get_epsilon(5e-2) < 1
  assert accountant.report(5e-2)[0].epsilon == math.inf


def test_a_sample_may_cost_nothing_where_the_worst_case_would():
  # Units are Gaussian mechanisms, the worst case is not.
  accountant = BayesianAccountant()
  accountant.compose(_event([0.0] * 500, 0.3), 20)
  accountant.compose(_event([0.01] * 500, 1.0), 3)
  epsilons = {r.claim.name: r.epsilon for r in accountant.report(1e-2)}
  assert epsilons['census'] < epsilons['sample'] < epsilons['dp']
  exact = optimize.brentq(
    lambda e: _gaussian_delta(math.sqrt(0.03), e) - 1e-2, 1e-3, 5
  )
  assert epsilons['census'] == pytest.approx(exact, rel=1e-6)


# --- δ of zero and one, and back.


@_exactly
@pytest.mark.parametrize('q', [0.3, 1.0])
def test_delta_zero_is_infinite_and_delta_one_is_free(estimator, q):
  accountant = BayesianAccountant(estimator=estimator)
  accountant.compose(_random_event(q=q))
  assert accountant.get_epsilon(0) == math.inf
  assert accountant.get_epsilon(1) == 0


@_exactly
@pytest.mark.parametrize('q', [0.3, 1.0])
def test_delta_inverts_epsilon(estimator, q):
  accountant = BayesianAccountant(estimator=estimator)
  accountant.compose(_random_event(q=q, units=200), 20)
  for delta in (1e-6, 1e-3):
    epsilon = accountant.get_epsilon(delta)
    # A sample's ε is one of those tabulated, where δ may be less.
    found = accountant.get_delta(epsilon)
    assert found <= delta * (1 + 1e-6)
    assert accountant.get_epsilon(found * (1 + 1e-6)) <= epsilon * (1 + 1e-6)


def test_a_tiny_delta_still_has_a_figure():
  accountant = BayesianAccountant(estimator='census')
  accountant.compose(_random_event(), 20)
  last = 0.0
  for delta in (1e-9, 1e-14, 1e-20, 1e-40, 1e-100):
    epsilon = accountant.get_epsilon(delta)
    assert last < epsilon < math.inf
    last = epsilon


# --- State, copies, bad input.


def _used(estimator, **settings):
  accountant = BayesianAccountant(estimator=estimator, **settings)
  accountant.compose(dp_accounting.GaussianDpEvent(3.0))
  accountant.compose(_random_event(), 2)
  return accountant.compose(_random_event(seed=1, q=1.0))


@_exactly
def test_a_state_that_went_through_json_is_the_same_state(estimator):
  original = _used(estimator)
  text = json.dumps(original.state_dict(), allow_nan=False)
  restored = BayesianAccountant(estimator=estimator)
  restored.load_state_dict(json.loads(text))
  assert json.dumps(restored.state_dict()) == text
  for accountant in (original, restored):
    accountant.compose(_random_event(seed=2))
  assert restored.get_epsilon(_DELTA) == original.get_epsilon(_DELTA)
  assert restored.report(_DELTA) == original.report(_DELTA)


@pytest.mark.parametrize(
  'key, value',
  [
    ('units', None),
    ('units', {}),
    ('units', 7),
    ('group_sizes', []),
    ('group_sizes', [19]),
    ('group_sizes', [0, 20]),
    ('group_sizes', None),
    ('paper', None),
    ('paper', {}),
    ('panels', [[[0.1] * 27] * 3]),
    ('ledger', []),
  ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(key, value):
  state = {**_used('sample').state_dict(), key: value}
  accountant = BayesianAccountant().compose(dp_accounting.GaussianDpEvent(7.0))
  before = copy.deepcopy(accountant.state_dict())
  with pytest.raises(ValueError, match='The state is damaged'):
    accountant.load_state_dict(state)
  assert accountant.state_dict() == before


@pytest.mark.parametrize('version', [1, 2, 3])
def test_states_of_former_versions_are_refused_by_name(version):
  state = {**_used('sample').state_dict(), 'version': version}
  with pytest.raises(
    ValueError, match=f'version {version}; this release reads'
  ):
    BayesianAccountant().load_state_dict(state)


@_exactly
def test_would_exceed_tells_and_changes_nothing(estimator):
  accountant = _used(estimator)
  event = _random_event(seed=2)
  before = copy.deepcopy(accountant.state_dict())
  after = _used(estimator).compose(event).get_epsilon(_DELTA)
  assert not accountant.would_exceed(event, after * 1.001, _DELTA)
  assert accountant.would_exceed(event, after * 0.999, _DELTA)
  assert accountant.state_dict() == before


@pytest.mark.parametrize(
  'settings, sentence',
  [
    ({'composition': 'holder', 'total_rounds': 3}, "takes composition='panel'"),
    ({'composition': 'product'}, "takes composition='panel'"),
    ({'direction': 'printed'}, 'direction and conversion are for moments'),
    ({'conversion': 'chernoff'}, 'direction and conversion are for moments'),
  ],
)
@_exactly
def test_settings_that_an_exact_estimator_has_no_use_for_are_refused(
  estimator, settings, sentence
):
  with pytest.raises(ValueError, match=sentence):
    BayesianAccountant(estimator=estimator, **settings)


def test_orders_and_single_units_are_asked_of_those_who_have_them():
  with pytest.raises(ValueError, match='is exact and has no orders'):
    _used('census').get_epsilon_and_optimal_order(_DELTA)
  for accountant in (
    BayesianAccountant(estimator='betting').compose(_random_event()),
    BayesianAccountant(estimator='census'),
  ):
    with pytest.raises(ValueError, match='exact accountants of panels only'):
      accountant.individual_epsilons(_DELTA)


def test_a_delta_not_above_estimator_delta_is_refused():
  accountant = _used('sample', estimator_delta=1e-6)
  with pytest.raises(ValueError, match='must be above estimator_delta = 1e-06'):
    accountant.get_epsilon(1e-6)


def test_events_that_are_no_panel_or_another_one_are_refused():
  accountant = _used('sample')
  with pytest.raises(ValueError, match='panel has 20 units; the event has 4'):
    accountant.compose(_event([0.1] * 4))
  with pytest.raises(ValueError, match='needs events with panel=True'):
    accountant.compose(events.BayesianGaussianEvent([0.1] * 20, 0.3, 0.25))


@_properties
@hypothesis.given(
  rounds=st.lists(
    st.tuples(
      st.lists(st.floats(0, 1e6), min_size=3, max_size=3),
      st.floats(0, 1),
      st.floats(0, 1),
      st.integers(1, 10**6),
    ),
    min_size=1,
    max_size=3,
  ),
  estimator=st.sampled_from(_EXACT),
  delta=st.floats(0, 1),
)
def test_whatever_is_composed_has_a_figure_between_zero_and_dp(
  rounds, estimator, delta
):
  accountant = BayesianAccountant(estimator=estimator)
  for distances, q, a, count in rounds:
    accountant.compose(_event(distances, q, 1e6, a), count)
  with warnings.catch_warnings():
    warnings.simplefilter('error', RuntimeWarning)
    epsilon = accountant.get_epsilon(delta)
    assert 0 <= epsilon <= math.inf
    assert 0 <= accountant.get_delta(epsilon) <= 1
  if 0 < delta < 1:
    kept = accountant.explain(delta)['delta_for_failures']
    limit = accountant.get_worst_case_epsilon(delta - kept)
    assert epsilon <= limit * (1 + 1e-9)


@_properties
@hypothesis.given(
  rounds=st.lists(
    st.tuples(
      st.lists(st.floats(0, 1), min_size=4, max_size=4), st.floats(0, 1)
    ),
    min_size=2,
    max_size=4,
  ),
  random=st.randoms(use_true_random=False),
  estimator=st.sampled_from(_EXACT),
)
def test_the_order_of_rounds_does_not_matter(rounds, random, estimator):
  ledger = [_event(distances, q, 1.0) for distances, q in rounds]
  ledger.append(dp_accounting.GaussianDpEvent(4.0))
  shuffled = list(ledger)
  random.shuffle(shuffled)
  first, second = (BayesianAccountant(estimator=estimator) for _ in range(2))
  for event, other in zip(ledger, shuffled):
    first.compose(event)
    second.compose(other)
  assert first.get_epsilon(1e-3) == pytest.approx(
    second.get_epsilon(1e-3), rel=1e-6
  )


def test_what_is_not_private_is_so_by_every_claim():
  accountant = _used('census').compose(dp_accounting.NonPrivateDpEvent())
  for row in accountant.report(_DELTA):
    assert row.epsilon == math.inf
  assert np.all(np.isinf(accountant.individual_epsilons(_DELTA)))


@_exactly
def test_a_budget_is_exceeded_as_epsilon_says(estimator, monkeypatch):
  accountant = BayesianAccountant(estimator=estimator)
  accountant.compose(_random_event(), 20)
  epsilon = accountant.get_epsilon(_DELTA)
  assert accountant.exceeds(0.999 * epsilon, _DELTA)
  assert not accountant.exceeds(epsilon, _DELTA)
  # By moments the worst case is never below: there nothing else is asked.
  quick = accountant.get_worst_case_epsilon(0.9 * _DELTA)
  assert quick > epsilon
  monkeypatch.setattr(BayesianAccountant, 'get_epsilon', None)
  assert not accountant.exceeds(quick, _DELTA)
  with pytest.raises(TypeError):
    accountant.exceeds(epsilon, _DELTA)


@pytest.mark.parametrize(
  ('settings', 'claim', 'names'),
  [
    *(
      ({'estimator': name}, name, ('dp', 'each', 'census', 'sample', 'paper'))
      for name in _EXACT
    ),
    ({'estimator': 'betting'}, 'sample', ('dp', 'sample')),
    ({'estimator': 'population'}, 'census', ('dp', 'census')),
    ({'estimator': 'student_t'}, 'paper', ('dp', 'paper')),
  ],
)
def test_an_accountant_knows_its_claims_before_any_round(
  settings, claim, names
):
  accountant = BayesianAccountant(**settings)
  assert (accountant.claim, accountant.claim_names) == (claim, names)
  rows = accountant.compose(_random_event(), 3).report(_DELTA)
  assert tuple(row.claim.name for row in rows) == names
  epsilons = {row.claim.name: row.epsilon for row in rows}
  assert epsilons[claim] == accountant.get_epsilon(_DELTA)
