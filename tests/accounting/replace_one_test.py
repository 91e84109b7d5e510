"""Tests of the accountant of a fixed number of units."""

import json
import math

import dp_accounting
import numpy as np
import pytest
from scipy import special

from tf_bdp.accounting import replace_one


def _event(population=100, sample=10, noise=1.0):
  return dp_accounting.SampledWithoutReplacementDpEvent(
    population, sample, dp_accounting.GaussianDpEvent(noise)
  )


def _accountant(*arguments, count=1, **options):
  event = _event(*arguments, **options)
  return replace_one.ReplaceOneAccountant().compose(event, count)


def _gaussian_delta(epsilon, mu):
  """Balle and Wang (2018), Theorem 8."""
  return special.ndtr(mu / 2 - epsilon / mu) - np.exp(
    epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
  )


@pytest.mark.parametrize('epsilon', [0.0, 0.01, 0.5, 1.0, 2.0])
@pytest.mark.parametrize('share', [0.01, 0.3, 1.0])
def test_one_round_is_theorem_nine_of_balle_barthe_and_gaboardi(share, epsilon):
  inner = math.log1p(math.expm1(epsilon) / share)
  wanted = share * _gaussian_delta(inner, 1.5)
  found = replace_one.round_deltas(np.array([epsilon]), 1.5, share)[0]
  assert found == pytest.approx(wanted, rel=1e-9)
  accountant = _accountant(100, round(100 * share), 1 / 1.5)
  assert wanted <= accountant.get_delta(epsilon) <= 1.01 * wanted + 1e-9


@pytest.mark.parametrize('share', [0.01, 0.3])
def test_one_round_bounds_the_divergence_of_two_mixtures_either_way(share):
  # One unit sends 1, another in its place -1, all others 0; noise of 1.
  x = np.linspace(-15, 15, 300_001)

  def density(sent):
    normal = [
      np.exp(-((x - m) ** 2) / 2) / (2 * np.pi) ** 0.5 for m in (0, sent)
    ]
    return (1 - share) * normal[0] + share * normal[1]

  one, other = density(1.0), density(-1.0)
  for epsilon in (-1.0, -0.1, 0.0, 0.1, 1.0, 3.0):
    true = np.sum(np.maximum(one - np.exp(epsilon) * other, 0)) * 1e-4
    bound = replace_one.round_deltas(np.array([epsilon]), 2.0, share)[0]
    assert true <= bound + 1e-9


def test_if_all_take_part_it_is_the_gaussian_mechanism():
  accountant = _accountant(50, 50, 2.0, count=16)
  for delta in (1e-3, 1e-6):
    epsilon = accountant.get_epsilon(delta)
    true = _gaussian_delta(epsilon, 2.0)
    assert 0.98 * delta < true <= delta
    assert accountant.get_delta(epsilon) == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize(
  'population, sample, noise, rounds',
  [(100, 10, 1.0, 100), (1000, 10, 0.5, 1000), (1000, 100, 20.0, 10_000)],
)
def test_it_is_below_renyi_accounting_and_hardly_changes_on_a_finer_grid(
  population, sample, noise, rounds, monkeypatch
):
  accountant = _accountant(population, sample, noise, count=rounds)
  epsilon = accountant.get_epsilon(1e-5)
  # Wang, Balle and Kasiviswanathan (2019), as dp_accounting has it.
  renyi = dp_accounting.rdp.RdpAccountant(
    neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
  ).compose(_event(population, sample, noise), rounds)
  assert epsilon < renyi.get_epsilon(1e-5)
  # And above that of adding or removing at the same distance.
  poisson = dp_accounting.pld.PLDAccountant(
    value_discretization_interval=1e-3
  ).compose(
    dp_accounting.PoissonSampledDpEvent(
      sample / population, dp_accounting.GaussianDpEvent(noise)
    ),
    rounds,
  )
  assert epsilon > poisson.get_epsilon(1e-5)
  monkeypatch.setattr(replace_one, '_POINTS', 80)
  replace_one._losses.cache_clear()
  fine = accountant.get_epsilon(1e-5)
  replace_one._losses.cache_clear()
  assert fine <= epsilon <= 1.001 * fine


def test_rounds_of_several_kinds_are_composed():
  both = _accountant(count=3).compose(_event(noise=2.0), 5)
  less = _accountant(noise=2.0, count=8).get_epsilon(1e-4)
  more = _accountant(count=8).get_epsilon(1e-4)
  assert less < both.get_epsilon(1e-4) < more
  together = dp_accounting.ComposedDpEvent(
    [_event()] * 3 + [_event(noise=2.0)] * 5
  )
  same = replace_one.ReplaceOneAccountant().compose(together)
  assert same.get_epsilon(1e-4) == both.get_epsilon(1e-4)


def test_nothing_costs_nothing_and_no_noise_costs_everything():
  accountant = replace_one.ReplaceOneAccountant()
  accountant.compose(dp_accounting.NoOpDpEvent())
  accountant.compose(_event(sample=0))
  assert (accountant.get_epsilon(1e-5), accountant.get_delta(0.0)) == (0.0, 0.0)
  accountant.compose(dp_accounting.NonPrivateDpEvent())
  assert accountant.get_epsilon(1e-5) == math.inf
  assert accountant.get_delta(3.0) == 1.0
  hardly = _accountant(noise=0.01)
  assert (hardly.get_epsilon(1e-5), hardly.get_delta(1.0)) == (math.inf, 1.0)


def test_the_only_claim_is_differential_privacy():
  accountant = _accountant(count=20)
  (row,) = accountant.report(1e-5)
  assert row.claim.name == 'dp'
  assert row.recommended
  epsilon = accountant.get_epsilon(1e-5)
  assert row.epsilon == epsilon == accountant.get_dp_epsilon(1e-5)


@pytest.mark.parametrize(
  'event',
  [
    dp_accounting.GaussianDpEvent(1.0),
    dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1)),
    dp_accounting.SampledWithoutReplacementDpEvent(
      9, 3, dp_accounting.LaplaceDpEvent(1.0)
    ),
  ],
)
def test_other_events_are_not_supported(event):
  accountant = replace_one.ReplaceOneAccountant()
  assert not accountant.supports(event)
  with pytest.raises(dp_accounting.UnsupportedEventError):
    accountant.compose(event)


def test_a_copy_goes_its_own_way():
  accountant = _accountant(count=2)
  other = accountant.copy().compose(_event(), 5)
  assert accountant.get_epsilon(1e-5) == _accountant(count=2).get_epsilon(1e-5)
  assert other.get_epsilon(1e-5) == _accountant(count=7).get_epsilon(1e-5)
  assert accountant.ledger != other.ledger


def test_the_state_comes_back_from_json():
  accountant = _accountant(count=3).compose(_event(noise=3.0), 2)
  state = json.loads(json.dumps(accountant.state_dict()))
  other = replace_one.ReplaceOneAccountant()
  other.load_state_dict(state)
  assert other.get_epsilon(1e-5) == accountant.get_epsilon(1e-5)
  for broken in (
    *({}, None, {**state, 'format': 'x'}, {**state, 'version': 9}),
    *({**state, 'rounds': [[1.0, 2.0, 3]]}, {**state, 'rounds': [[1.0]]}),
    *({**state, 'rounds': [[-1.0, 0.1, 3]]}, {**state, 'non_private': 1}),
  ):
    with pytest.raises(ValueError, match='The state is'):
      other.load_state_dict(broken)
  assert other.state_dict() == accountant.state_dict()
