"""Tests of the way from log-moments to (ε, δ)."""

import math

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import stats

from tests.accounting import oracles
from tf_bdp.accounting import conversion

_ORDERS = tuple(range(1, 65))
_COSTS = oracles.gaussian_costs([0.7], _ORDERS)[0]


@pytest.mark.parametrize('name', conversion.CONVERSIONS)
@pytest.mark.parametrize('delta', [0.3, 1e-2, 1e-5, 1e-12])
def test_epsilon_is_that_of_section_4(name, delta):
  epsilon, order = conversion.epsilon_from_costs(_ORDERS, _COSTS, delta, name)
  assert epsilon == pytest.approx(
    oracles.epsilon(_ORDERS, _COSTS, delta, name), rel=1e-12
  )
  at_order = oracles.epsilon([order], [_COSTS[order - 1]], delta, name)
  assert epsilon == pytest.approx(at_order, rel=1e-12)


@pytest.mark.parametrize('delta', [0.9, 0.3, 1e-5])
@pytest.mark.parametrize('scale', [1e-14, 1e-6, 1.0, 1e3])
def test_tight_is_what_dp_accounting_computes(delta, scale):
  actual, _ = conversion.epsilon_from_costs(_ORDERS, scale * _COSTS, delta)
  expected, _ = rdp_privacy_accountant.compute_epsilon(
    np.array(_ORDERS) + 1, scale * _COSTS / _ORDERS, delta
  )
  assert actual == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize('delta', [1e-2, 1e-5])
def test_chernoff_bounds_the_tail_of_the_gaussian_privacy_loss(delta):
  # L ~ N(r²/2, r²) where everybody takes part.
  epsilon, _ = conversion.epsilon_from_costs(_ORDERS, _COSTS, delta, 'chernoff')
  exact = stats.norm.isf(delta, 0.35, math.sqrt(0.7))
  assert epsilon >= exact
  assert epsilon == pytest.approx(exact, rel=0.35)


@pytest.mark.parametrize('delta', [1e-2, 1e-5])
def test_tight_bounds_the_set_form_of_the_gaussian_mechanism(delta):
  # Balle and Wang (2018), Theorem 8, with sensitivity over noise r.
  epsilon, _ = conversion.epsilon_from_costs(_ORDERS, _COSTS, delta, 'tight')
  r = math.sqrt(0.7)
  exact_delta = stats.norm.cdf(r / 2 - epsilon / r) - math.exp(
    epsilon
  ) * stats.norm.cdf(-r / 2 - epsilon / r)
  assert exact_delta <= delta


@pytest.mark.parametrize('name', conversion.CONVERSIONS)
@pytest.mark.parametrize('epsilon', [0.5, 2.0, 7.0])
def test_delta_inverts_epsilon(name, epsilon):
  delta = conversion.delta_from_costs(_ORDERS, _COSTS, epsilon, name)
  if delta < 1:
    actual, _ = conversion.epsilon_from_costs(_ORDERS, _COSTS, delta, name)
    assert actual == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize('name', conversion.CONVERSIONS)
def test_no_cost_is_no_epsilon_and_no_delta(name):
  costs = np.zeros(len(_ORDERS))
  assert conversion.epsilon_from_costs(_ORDERS, costs, 1e-9, name)[0] == 0
  for epsilon in (0.0, 1.0, math.inf):
    assert conversion.delta_from_costs(_ORDERS, costs, epsilon, name) == 0


@pytest.mark.parametrize('name', conversion.CONVERSIONS)
def test_infinite_costs_are_infinite_epsilon_and_delta_one(name):
  costs = np.full(len(_ORDERS), math.inf)
  assert conversion.epsilon_from_costs(_ORDERS, costs, 0.9, name)[0] == math.inf
  for epsilon in (0.0, 1.0, math.inf):
    assert conversion.delta_from_costs(_ORDERS, costs, epsilon, name) == 1


@pytest.mark.parametrize('name', conversion.CONVERSIONS)
def test_a_cost_that_is_not_a_number_never_becomes_a_small_epsilon(name):
  costs = np.full(len(_ORDERS), math.nan)
  try:
    epsilon, _ = conversion.epsilon_from_costs(_ORDERS, costs, 1e-5, name)
  except ValueError:
    return
  assert epsilon == math.inf or math.isnan(epsilon)


@pytest.mark.parametrize('name', conversion.CONVERSIONS)
def test_delta_is_never_above_one(name):
  costs = 1e6 * _COSTS
  assert conversion.delta_from_costs(_ORDERS, costs, 0.0, name) == 1


def test_the_attacker_succeeds_at_most_as_equation_1_says():
  assert conversion.attack_success_bound(0.0) == 0.5
  # 1 / (1 + 1/3) at ε = log 3.
  assert conversion.attack_success_bound(math.log(3)) == pytest.approx(0.75)
  assert conversion.attack_success_bound(math.inf) == 1.0
  assert conversion.attack_success_bound(1e4) == 1.0


def test_delta_adds_to_the_attackers_success():
  # An attacker that sees the one bit of randomised response, or with
  # probability δ the truth: ((1 - δ) p + δ) with p = exp ε / (1 + exp ε).
  p = math.exp(0.7) / (1 + math.exp(0.7))
  found = conversion.attack_success_bound(0.7, 0.02)
  assert found == pytest.approx((1 - 0.02) * p + 0.02)
  assert conversion.attack_success_bound(0.0, 1.0) == 1.0
  with pytest.raises(ValueError, match='delta must be between 0 and 1'):
    conversion.attack_success_bound(1.0, 1.5)


@pytest.mark.parametrize('epsilon', [-0.1, math.nan])
def test_a_negative_epsilon_is_refused(epsilon):
  with pytest.raises(ValueError, match='epsilon must be non-negative'):
    conversion.attack_success_bound(epsilon)
