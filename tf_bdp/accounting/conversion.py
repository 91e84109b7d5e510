"""From log-moments to (ε, δ), and what ε means for an attacker."""

import math

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant

from tf_bdp import validation

CONVERSIONS = ('tight', 'chernoff')


def epsilon_from_costs(
  orders: tuple[int, ...],
  costs: np.ndarray,
  delta: float,
  conversion: str = 'tight',
) -> tuple[float, int]:
  """Returns the smallest ε that the costs allow at δ, and its order λ.

  `chernoff` is Theorem 2 of the paper, ε = min_λ (c(λ) - log δ) / λ, which
  bounds Pr[L >= ε]. `tight` is Proposition 12 of Canonne, Kamath and Steinke
  (arXiv:2004.00010) as dp_accounting computes it; it bounds the set form of
  Definition 5. It is linear in the moment exp c(λ), so it holds for a moment
  that is an expectation over units. (So does dp_accounting's bound through the
  KL divergence for tiny costs, which is concave in the divergence.)

  Args:
    orders: The orders λ.
    costs: The log-moments c(λ).
    delta: δ, the part left for the tail of the privacy loss.
    conversion: 'tight' or 'chernoff'.

  Returns:
    The pair of ε and the order λ at which it was found.
  """
  _check(costs)
  lambdas = np.array(orders)
  if conversion == 'chernoff':
    epsilons = (costs - math.log(delta)) / lambdas
    best = int(np.argmin(epsilons))
    epsilon, order = max(0.0, float(epsilons[best])), orders[best]
    if not np.any(costs):
      epsilon = 0.0
  else:
    epsilon, alpha = rdp_privacy_accountant.compute_epsilon(
      lambdas + 1, costs / lambdas, delta
    )
    order = int(alpha) - 1
  return float(epsilon), order


def delta_from_costs(
  orders: tuple[int, ...],
  costs: np.ndarray,
  epsilon: float,
  conversion: str = 'tight',
) -> float:
  """Returns the smallest δ that the costs allow at ε.

  The inverse of `epsilon_from_costs`, with the same arguments.
  """
  _check(costs)
  if math.isinf(epsilon):
    return 1.0 if np.any(np.isinf(costs)) else 0.0
  lambdas = np.array(orders)
  if not np.any(costs):
    return 0.0
  if conversion == 'chernoff':
    return float(np.exp(min(0.0, np.min(costs - lambdas * epsilon))))
  delta, _ = rdp_privacy_accountant.compute_delta(
    lambdas + 1, costs / lambdas, epsilon
  )
  return float(delta)


def _check(costs: np.ndarray) -> None:
  """Raises ValueError for costs that are none; a NaN would pass for zero."""
  if not np.all(costs >= 0):
    raise ValueError('costs must be non-negative. Found NaN or negative ones.')


def attack_success_bound(epsilon: float, delta: float = 0.0) -> float:
  """Returns (exp ε + δ) / (1 + exp ε), how often an attacker is right at most.

  It is the probability of guessing a unit's presence from a prior of one half
  (Kairouz, Oh and Viswanath 2015, Theorem 2.1). The paper's Eq. 1 is that of
  δ = 0.

  >>> attack_success_bound(0.0)
  0.5
  """
  if not epsilon >= 0:
    raise ValueError(f'epsilon must be non-negative. Found {epsilon}.')
  validation.check_probability('delta', delta)
  return (1.0 + delta * math.exp(-epsilon)) / (1.0 + math.exp(-epsilon))
