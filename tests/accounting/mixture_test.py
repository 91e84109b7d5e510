"""Tests of worst cases that are drawn: what DP is charged, and what is not."""

import math
import time

import dp_accounting
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import special, stats

from tests.accounting import builders, oracles
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import (
  comparison,
  events,
  ledger,
  mean_bounds,
  mixtures,
  sampled_gaussian,
)

BayesianAccountant = accountant_lib.BayesianAccountant
_DELTA = 1e-5
pytestmark = builders.ignore_best_order


def _mean_with_floor(clients, q, noise, floor):
  """The worst cases of a mean over at least `floor` clients, by definition.

  r(n) = n̄/(z n_min) for n < n_min, else 2 n̄/(z (n + 1)), n others taking part.
  """
  others = np.arange(clients)
  expected = q * clients
  distances = np.where(
    others < floor,
    expected / (noise * floor),
    2 * expected / (noise * (others + 1)),
  )
  chances = stats.binom.pmf(others, clients - 1, q)
  return tuple(zip(chances.tolist(), (distances**2).tolist()))


_FLOORS = {1: 25.8, 5: 9.3, 10: 4.0}
_SMALL = ((0.9, 0.04), (0.09, 0.25), (0.01, 1.0))


def _dp_epsilon(event, count, delta=_DELTA):
  return BayesianAccountant().compose(event, count).get_dp_epsilon(delta)


# --- An independent account: losses on a grid, drawn n by n, by brute force.


def _rounded_down(r, q, remove):
  """Losses of one round, each the smallest of a small cell, with their chances.

  As precise as float64: a loss under P if the unit is to be removed, else
  under Q = N(0, 1).
  """
  x = np.linspace(-13, 13 + r, 60_001)
  near = np.diff(special.ndtr(x))
  far = np.diff(special.ndtr(x - r))
  ratio = np.logaddexp(
    np.log1p(-q) if q < 1 else -np.inf, np.log(q) + r * x - r * r / 2
  )
  if remove:
    return ratio[:-1], (1 - q) * near + q * far
  return -ratio[1:], near


def _brute_force_epsilon(mixture, q, rounds, delta, step, size):
  """ε of losses that are all rounded down: never above the truth."""
  found = []
  for remove in (True, False):
    places, chances = [], []
    for chance, squared in mixture:
      if chance < 1e-14:
        continue  # Left out, which is below the truth, too.
      losses, of_losses = _rounded_down(math.sqrt(squared), q, remove)
      places.append(np.floor(losses / step).astype(int) % size)
      chances.append(chance * of_losses)
    masses = np.bincount(np.concatenate(places), np.concatenate(chances), size)
    composed = np.fft.irfft(np.fft.rfft(masses) ** rounds, size)
    # Positive losses come first. From the largest down, Pr[S >= s] and the sum
    # of p(s) exp -s give δ at the loss just below.
    losses = step * np.arange(1, size // 2)[::-1]
    chances = np.maximum(composed[1 : size // 2][::-1], 0)
    deltas = np.cumsum(chances) - np.exp(losses) * np.cumsum(
      chances * np.exp(-losses)
    )
    found.append(np.min(losses[deltas <= delta], initial=math.inf))
  return max(found) - step


@pytest.mark.parametrize('floor, told', _FLOORS.items())
def test_a_mean_with_a_floor_costs_what_brute_force_says(floor, told):
  mixture = _mean_with_floor(100, 0.1, 2.0, floor)
  found = _dp_epsilon(events.MixedGaussianEvent(mixture, 0.1), 100)
  # Rounded down 100 times by up to 2e-5, half of that on average.
  wanted = _brute_force_epsilon(mixture, 0.1, 100, _DELTA, 2e-5, 2**22)
  assert wanted < found < wanted * 1.001 + 100 * 2e-5
  # As in the specification, which is rounded up.
  assert found == pytest.approx(told, rel=0.02)


def test_moments_of_a_mean_without_a_floor_are_of_no_use():
  event = events.MixedGaussianEvent(_mean_with_floor(100, 0.1, 2.0, 1), 0.1)
  accountant = BayesianAccountant().compose(event, 100)
  assert accountant.get_worst_case_epsilon(_DELTA) == pytest.approx(1255, 1e-3)


@pytest.mark.parametrize('q', [0.05, 0.5, 1.0])
def test_few_worst_cases_cost_what_brute_force_says(q):
  found = _dp_epsilon(events.MixedGaussianEvent(_SMALL, q), 20, 1e-4)
  wanted = _brute_force_epsilon(_SMALL, q, 20, 1e-4, 2e-5, 2**21)
  assert wanted < found < wanted * 1.001 + 20 * 2e-5


@pytest.mark.parametrize('q', [0.2, 1.0])
@pytest.mark.parametrize('remove', [True, False])
def test_delta_is_what_sampling_losses_gives(q, remove):
  rounds, trials = 10, 400_000
  accountant = BayesianAccountant()
  accountant.compose(events.MixedGaussianEvent(_SMALL, q), rounds)
  generator = np.random.default_rng(7)
  chances, squared = np.transpose(_SMALL)
  r = np.sqrt(generator.choice(squared, (trials, rounds), p=chances))
  x = generator.normal(size=(trials, rounds))
  if remove:  # From P: the unit is in the round with probability q.
    x += r * (generator.random((trials, rounds)) < q)
  ratio = np.log1p(q * np.expm1(r * x - r * r / 2))
  losses = np.sum(ratio if remove else -ratio, axis=1)
  for epsilon in (0.2, 0.6):
    lost = np.maximum(-np.expm1(epsilon - losses), 0)
    error = np.std(lost) / math.sqrt(trials)
    delta = accountant.get_delta(epsilon)
    assert delta > np.mean(lost) - 4 * error
    # The worse direction counts, which is removing where q < 1.
    if remove or q == 1:
      assert delta < np.mean(lost) + 4 * error + 1e-6


@pytest.mark.parametrize('q', [0.3, 1.0])
@pytest.mark.parametrize('epsilon', [0.0, 0.3, 1.0])
def test_who_does_not_learn_the_draw_learns_no_more(q, epsilon):
  # What is released: Σ_n p_n P_n against N(0, 1), by quadrature.
  mixture = ((0.7, 0.09), (0.3, 2.25))
  x = np.linspace(-12, 14, 200_001)
  without = stats.norm.pdf(x)
  with_unit = sum(
    p * ((1 - q) * without + q * stats.norm.pdf(x - math.sqrt(r2)))
    for p, r2 in mixture
  )
  accountant = BayesianAccountant()
  accountant.compose(events.MixedGaussianEvent(mixture, q))
  for one, other in ((with_unit, without), (without, with_unit)):
    lost = np.maximum(one - math.exp(epsilon) * other, 0).sum() * (x[1] - x[0])
    assert lost <= accountant.get_delta(epsilon) + 1e-9


# --- Moments.


@pytest.mark.parametrize('direction', ['tight', 'printed'])
@pytest.mark.parametrize('q', [0.01, 0.3, 1.0])
@pytest.mark.parametrize('scale', [1e-12, 1.0, 100.0])
def test_the_moment_is_the_mean_over_the_draw(direction, q, scale):
  mixture = tuple((p, scale * r2) for p, r2 in _SMALL)
  accountant = builders.make_accountant(direction=direction)
  accountant.compose(events.MixedGaussianEvent(mixture, q), 7)
  costs = oracles.log_moments(
    [r2 for _, r2 in mixture], q, builders.ORDERS, direction
  )
  if scale < 1:  # log Σ p exp ℓ is Σ p ℓ; its logarithm has too few digits.
    wanted = np.array([p for p, _ in mixture]) @ costs
  else:
    wanted = oracles.log_mean_exp(costs, np.array([p for p, _ in mixture]))
  assert accountant._worst_case_costs() == pytest.approx(7 * wanted, rel=1e-9)


def test_what_is_seen_to_be_included_costs_less():
  event = builders.with_inclusion(
    events.BayesianGaussianEvent(
      [0.01] * 5, 0.3, 1.0, worst_case_mixture=_SMALL
    ),
    0.2,
  )
  accountant = builders.make_accountant('product').compose(event)
  costs = oracles.log_moments([r2 for _, r2 in _SMALL], 0.3, builders.ORDERS)
  drawn = oracles.log_mean_exp(costs, np.array([p for p, _ in _SMALL]))
  assert accountant._worst_case_costs() == pytest.approx(
    oracles.included(drawn, 0.2), rel=1e-9
  )
  # Exact: a part of it is like a worst case of nothing.
  diluted = ((0.8, 0.0), *((0.2 * p, r2) for p, r2 in _SMALL))
  assert accountant.get_dp_epsilon(_DELTA) == pytest.approx(
    _dp_epsilon(events.MixedGaussianEvent(diluted, 0.3), 1), rel=1e-3
  )


# --- Which figures go by the mixture, and which by the round as it was.


def _event(mixture=_SMALL, worst=1.0, panel=True, units=1000, q=0.1):
  distances = 0.01 * np.random.default_rng(0).beta(1, 3, units)
  return events.BayesianGaussianEvent(
    distances, q, worst, panel, worst_case_mixture=mixture
  )


@pytest.mark.parametrize('worst', [0.02, 0.3, 1.0, None])
@pytest.mark.parametrize('estimator', ['sample', 'census', 'each', 'student_t'])
def test_dp_does_not_depend_on_the_draw_that_was_realised(estimator, worst):
  accountant = BayesianAccountant(estimator=estimator)
  accountant.compose(_event(worst=worst, units=50), 50)
  drawn = events.MixedGaussianEvent(_SMALL, 0.1)
  assert accountant.get_dp_epsilon(_DELTA) == _dp_epsilon(drawn, 50)
  known = BayesianAccountant(estimator=estimator).compose(drawn, 50)
  assert accountant.get_worst_case_epsilon(_DELTA) == pytest.approx(
    known.get_worst_case_epsilon(_DELTA), rel=1e-12
  )
  dp = next(row for row in accountant.report(_DELTA) if row.claim.name == 'dp')
  assert dp.epsilon == accountant.get_dp_epsilon(_DELTA)


@pytest.mark.parametrize('composition', builders.COMPOSITIONS)
@pytest.mark.parametrize('estimator', ['betting', 'bernstein'])
def test_a_bound_rests_on_the_limit_of_the_round_and_not_on_the_mixture(
  composition, estimator
):
  rounds = 10
  accountant = builders.make_accountant(
    composition, rounds, estimator=estimator, orders=builders.FEW_ORDERS
  )
  mixture = ((0.5, 0.05), (0.5, 0.1))
  event = _event(mixture, 0.5)
  accountant.compose(event, rounds)
  kept = 0.1 * _DELTA
  orders = np.array(builders.FEW_ORDERS)
  # By the library, whose moments have tests of their own.
  costs = sampled_gaussian.log_moments(
    event.squared_distances, 0.1, builders.FEW_ORDERS
  )
  (limit,) = oracles.log_moments([0.5], 0.1, builders.FEW_ORDERS)
  power = {'panel': rounds, 'holder': rounds, 'product': 1}[composition]
  bounds = orders.size * (1 if composition == 'panel' else rounds)
  bound = getattr(mean_bounds, estimator)(
    power * costs, kept / bounds, power * limit
  )
  wanted = bound * (rounds / power)
  drawn = rounds * oracles.log_mean_exp(
    oracles.log_moments([r2 for _, r2 in mixture], 0.1, builders.FEW_ORDERS),
    np.array([p for p, _ in mixture]),
  )
  found = accountant._costs(kept)
  assert found == pytest.approx(np.minimum(wanted, drawn), rel=1e-6)
  # Neither of the two is the smaller one at all orders.
  assert np.any(wanted > drawn) and np.any(wanted < drawn)
  # By the limit of the mixture, the bound would be lower.
  too_low = getattr(mean_bounds, estimator)(
    power * costs,
    kept / bounds,
    np.minimum(power * limit, power / rounds * drawn),
  )
  assert np.any(too_low * (rounds / power) < 0.9 * found)


def test_a_sample_is_compared_with_the_limit_of_the_round():
  # What is estimated is the same with a mixture and without one.
  plain = BayesianAccountant().compose(_event(None, units=500), 100)
  drawn = BayesianAccountant().compose(_event(units=500), 100)
  dp = drawn.get_dp_epsilon(0.9 * _DELTA)
  assert plain.get_dp_epsilon(_DELTA) > 2 * dp
  wanted = min(plain.get_epsilon(_DELTA), dp)
  assert drawn.get_epsilon(_DELTA) == pytest.approx(wanted, rel=1e-3)
  # By δ_worst of the mixture it would be less than this.
  smaller = BayesianAccountant().compose(_event(None, 0.05, units=500), 100)
  assert smaller.get_epsilon(_DELTA) < 0.8 * wanted


@pytest.mark.parametrize('estimator', accountant_lib.EXACT_ESTIMATORS)
def test_no_exact_figure_is_above_dp(estimator):
  accountant = BayesianAccountant(estimator=estimator)
  accountant.compose(_event(worst=1.0, units=5), 30)
  rest = 0.9 * _DELTA if estimator == 'sample' else _DELTA
  dp = accountant.get_dp_epsilon(rest)
  assert accountant.get_epsilon(_DELTA) <= dp * (1 + 1e-9)
  assert np.all(accountant.individual_epsilons(_DELTA) <= dp)


def test_units_that_all_were_unlucky_lose_no_more_than_dp_says():
  # All units at 1.0, which is drawn once in a hundred rounds.
  event = events.BayesianGaussianEvent(
    [1.0] * 20, 0.1, 1.0, True, worst_case_mixture=_SMALL
  )
  accountant = BayesianAccountant(estimator='each').compose(event, 50)
  assert accountant.get_epsilon(_DELTA) == pytest.approx(
    _dp_epsilon(events.MixedGaussianEvent(_SMALL, 0.1), 50), rel=1e-3
  )


def test_reported_costs_are_capped_by_the_mixture():
  reported = events.ReportedCostEvent(
    [1e5] * len(builders.ORDERS), 1e-9, 0.1, 1.0, worst_case_mixture=_SMALL
  )
  accountant = builders.make_accountant('holder').compose(reported, 10)
  assert accountant.get_epsilon(_DELTA) == pytest.approx(
    _dp_epsilon(events.MixedGaussianEvent(_SMALL, 0.1), 10, 0.9 * _DELTA)
  )


@pytest.mark.parametrize('estimator', ['sample', 'census', 'each', 'betting'])
def test_known_rounds_that_are_drawn_count_for_every_unit(estimator):
  accountant = BayesianAccountant(estimator=estimator)
  accountant.compose(_event(None, 0.01, units=50), 10)
  before = accountant.get_epsilon(_DELTA)
  accountant.compose(events.MixedGaussianEvent(_SMALL, 0.1), 10)
  alone = _dp_epsilon(events.MixedGaussianEvent(_SMALL, 0.1), 10)
  assert max(before, alone) < accountant.get_epsilon(_DELTA)
  if estimator in accountant_lib.EXACT_ESTIMATORS:
    nothing = BayesianAccountant(estimator=estimator)
    nothing.compose(
      events.BayesianGaussianEvent([0.0] * 5, 0.1, 0.0, True), 10
    ).compose(events.MixedGaussianEvent(_SMALL, 0.1), 10)
    assert nothing.individual_epsilons(_DELTA) == pytest.approx(
      np.full(5, alone), rel=2e-3
    )


# --- As an event like any other.


def test_a_point_is_a_round_of_that_worst_case():
  for q in (0.1, 1.0):
    noise = dp_accounting.GaussianDpEvent(2.0)
    known = dp_accounting.PoissonSampledDpEvent(q, noise)
    point = events.MixedGaussianEvent(((0.5, 0.25), (0.5, 0.25)), q)
    first, second = (BayesianAccountant().compose(e, 9) for e in (known, point))
    assert first.state_dict() == second.state_dict()


def test_it_composes_repeats_and_is_supported():
  event = events.MixedGaussianEvent(_SMALL, 0.1)
  nested = dp_accounting.SelfComposedDpEvent(
    dp_accounting.ComposedDpEvent(
      [event, dp_accounting.SelfComposedDpEvent(event, 4)]
    ),
    2,
  )
  accountant = BayesianAccountant()
  assert accountant.supports(nested)
  assert accountant.compose(nested).explain(_DELTA)['rounds'] == 10
  assert accountant.get_dp_epsilon(_DELTA) == _dp_epsilon(event, 10)


@pytest.mark.parametrize(
  'event', [_event(units=50), _event(worst=0.1, units=50)]
)
def test_as_an_event_of_dp_accounting_the_largest_worst_case_counts(event):
  accountant = BayesianAccountant(estimator='each').compose(event, 5)
  accountant.compose(events.MixedGaussianEvent(_SMALL, 0.1), 2)
  largest = builders.sampled_gaussian(0.1, 1.0)
  epsilon = dp_accounting.rdp.RdpAccountant().compose(accountant.ledger)
  wanted = dp_accounting.rdp.RdpAccountant().compose(largest, 7)
  assert epsilon.get_epsilon(_DELTA) == pytest.approx(
    wanted.get_epsilon(_DELTA)
  )
  pld = dp_accounting.pld.PLDAccountant().compose(accountant.ledger)
  assert accountant.get_epsilon(_DELTA) <= pld.get_epsilon(_DELTA)
  assert accountant.get_dp_epsilon(_DELTA) < 0.9 * pld.get_epsilon(_DELTA)


@pytest.mark.parametrize(
  'accountant',
  [
    BayesianAccountant(),
    BayesianAccountant(estimator='betting'),
    BayesianAccountant('holder', total_rounds=20),
  ],
)
def test_the_state_round_trips(accountant):
  accountant.compose(_event(units=50), 3)
  accountant.compose(events.MixedGaussianEvent(_SMALL, 1 / 3), 2)
  restored = builders.restored(accountant)
  assert restored.state_dict() == accountant.state_dict()
  for name in ('get_epsilon', 'get_dp_epsilon', 'get_worst_case_epsilon'):
    assert getattr(restored, name)(_DELTA) == getattr(accountant, name)(_DELTA)


@pytest.mark.parametrize(
  'mixture', [[[0.5, 1.0]], [[1.0]], [[1.0, -1.0]], 7, [[0.5, 1.0], [0.5, 0.1]]]
)
def test_a_damaged_mixture_is_refused(mixture):
  accountant = BayesianAccountant().compose(
    events.MixedGaussianEvent(_SMALL, 0.1)
  )
  state = builders.json_copy(accountant.state_dict())
  state['ledger'][0][5] = mixture
  with builders.unchanged(accountant), pytest.raises(ValueError, match='damag'):
    accountant.load_state_dict(state)


@pytest.mark.parametrize(
  'mixture, sentence',
  [
    ([(0.5, 1.0)], 'must add up to one'),
    ([], 'pairs of a probability'),
    ([(1.0,)], 'pairs of a probability'),
    ([(1.5, 1.0), (-0.5, 1.0)], 'from 0 to 1'),
    ([(1.0, -1.0)], '1 negative of 1'),
    ([(1.0, math.inf)], '1 infinite of 1'),
  ],
)
def test_what_is_no_mixture_is_refused_before_anything_is_composed(
  mixture, sentence
):
  with pytest.raises(ValueError, match=sentence):
    events.MixedGaussianEvent(mixture, 0.1)
  with pytest.raises(ValueError, match=sentence):
    _event(mixture)


def test_groups_of_different_mixtures_cost_the_largest_of_all():
  other = ((0.5, 0.01), (0.5, 2.0))
  same = events.ParallelEvent([_event(), _event()])
  assert same.worst_case_mixture == _SMALL
  mixed = events.ParallelEvent([_event(), _event(other)])
  assert mixed.worst_case_mixture == ((1.0, 2.0),)
  assert events.ParallelEvent(
    [_event(), _event(None, 3.0)]
  ).worst_case_mixture == ((1.0, 3.0),)
  unknown = events.ParallelEvent([_event(), _event(None, None)])
  assert unknown.worst_case_mixture is None
  accountant = builders.make_accountant('product', estimator='student_t')
  assert accountant.compose(unknown).get_dp_epsilon(_DELTA) == math.inf


# --- Many parts become few.

_pairs = st.lists(
  st.tuples(st.floats(1e-30, 1.0), st.floats(0.0, 1e4)),
  min_size=1,
  max_size=400,
)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(pairs=_pairs)
def test_merging_moves_probability_upwards_and_loses_none(pairs):
  total = math.fsum(p for p, _ in pairs)
  pairs = [(p / total, r2) for p, r2 in pairs]
  found = mixtures.merged(events.check_mixture(pairs))
  assert len(found) <= mixtures.MOST_PARTS
  assert math.fsum(p for p, _ in found) == pytest.approx(1, abs=1e-12)
  squared = [r2 for _, r2 in found]
  assert squared == sorted(set(squared))
  assert squared[-1] == max(r2 for _, r2 in pairs)
  for limit in squared:
    above = math.fsum(p for p, r2 in pairs if r2 >= limit)
    kept = math.fsum(p for p, r2 in found if r2 >= limit)
    assert kept >= above * (1 - 1e-12)


@pytest.mark.parametrize('q', [0.01, 0.1])
@pytest.mark.parametrize('floored', [True, False])
def test_ten_thousand_clients_are_fast_and_merging_costs_next_to_nothing(
  q, floored
):
  expected = 10_000 * q
  floor = int(expected - 4 * math.sqrt(expected * (1 - q))) if floored else 1
  mixture = _mean_with_floor(10_000, q, 2.0, floor)
  mixtures.merged.cache_clear()
  start = time.perf_counter()
  epsilon = _dp_epsilon(events.MixedGaussianEvent(mixture, q), 1000)
  assert time.perf_counter() - start < 2
  # Each round of a mean is at least one of a sum at the likeliest distance,
  # and hardly more with so many clients.
  merged = mixtures.merged(mixture)
  assert len(merged) <= mixtures.MOST_PARTS
  mean = math.fsum(p * r2 for p, r2 in mixture if r2 < 100)
  assert math.fsum(p * r2 for p, r2 in merged if r2 < 100) < 1.003 * mean
  near = _dp_epsilon(builders.sampled_gaussian(q, 1 / math.sqrt(mean)), 1000)
  assert near < epsilon < 1.1 * near


def test_what_is_next_to_impossible_is_a_sure_loss_and_not_left_out():
  rare = ((1 - 1e-21, 0.01), (1e-21, 1e4))
  accountant = BayesianAccountant()
  accountant.compose(events.MixedGaussianEvent(rare, 0.1), 1000)
  # A thousand times 1e-21, whatever ε.
  assert 0.99e-18 < accountant.get_delta(400.0) < 1e-15
  assert accountant.get_dp_epsilon(_DELTA) == pytest.approx(
    _dp_epsilon(builders.sampled_gaussian(0.1, 10.0), 1000), rel=1e-3
  )


def test_a_round_that_costs_nothing_costs_nothing():
  for mixture, q in ((((0.5, 0.0), (0.5, 0.0)), 0.1), (_SMALL, 0.0)):
    accountant = BayesianAccountant()
    accountant.compose(events.MixedGaussianEvent(mixture, q), 10)
    assert accountant.get_dp_epsilon(_DELTA) == 0
    assert accountant.get_epsilon(0) == 0


def test_the_ledger_has_few_parts_and_the_limit_of_the_round():
  mixture = _mean_with_floor(1000, 0.1, 2.0, 62)
  ((_, entry),) = ledger.rounds_of(_event(mixture, 0.7))
  assert entry.squared_distance == 0.7
  assert entry.mixture == mixtures.merged(mixture)
  assert entry.realised == entry._replace(mixture=())
  ((_, known),) = ledger.rounds_of(events.MixedGaussianEvent(mixture, 0.1))
  assert known.realised == known
  assert known.squared_distance == max(r2 for _, r2 in mixture)


def test_rows_of_dp_are_never_below_what_dp_is_charged():
  event = _event(worst=0.02, units=5)  # A lucky draw.
  compared = comparison.compare([event] * 5, _DELTA)
  rows = {row.method: row for row in compared.rows}
  charged = BayesianAccountant().compose(event, 5).get_dp_epsilon(_DELTA)
  assert charged <= rows['DP, PLD'].epsilon <= rows['DP, RDP'].epsilon
  (dp,) = (row for row in compared.claims if row.claim.name == 'dp')
  assert dp.epsilon == charged
