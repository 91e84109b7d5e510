"""Slow, independent definitions against which the fast code is tested."""

import functools
import math

import mpmath
import numpy as np
from scipy import stats

from tf_bdp.accounting import mean_bounds

_DIGITS = 60


@functools.cache
def log_moment(squared_distance, q, order, direction='tight'):
  """Theorem 3, term by term, with 60 digits."""
  if direction == 'tight':
    return _log_binomial_sum(squared_distance, q, order + 1, -1)
  left = log_moment(squared_distance, q, order)
  return max(left, printed_right(squared_distance, q, order))


def log_moments(squared_distances, q, orders, direction='tight'):
  """Of every unit and order, [units, orders]."""
  return np.array(
    [
      [log_moment(r2, q, order, direction) for order in orders]
      for r2 in squared_distances
    ]
  )


def included(log_costs, probability):
  """log(1 - a + a exp ℓ), in 60 digits and more where a is tiny."""

  log_costs = np.asarray(log_costs, dtype=np.float64)
  different, places = np.unique(log_costs, return_inverse=True)
  with mpmath.workdps(_DIGITS):
    chance = mpmath.mpf(probability)
    result = [
      float(mpmath.log1p(chance * mpmath.expm1(mpmath.mpf(cost))))
      for cost in different
    ]
  return np.array(result)[places].reshape(log_costs.shape)


@functools.cache
def printed_right(squared_distance, q, order):
  """The second sum of Theorem 3, k ~ B(λ, q) and exponents k(k+1) r²/2."""
  return _log_binomial_sum(squared_distance, q, order, 1)


def _log_binomial_sum(squared_distance, q, trials, shift):
  with mpmath.workdps(_DIGITS):
    q = mpmath.mpf(q)
    half = mpmath.mpf(squared_distance) / 2
    total = mpmath.fsum(
      math.comb(trials, k)
      * q**k
      * (1 - q) ** (trials - k)
      * mpmath.exp(k * (k + shift) * half)
      for k in range(trials + 1)
    )
    return max(0.0, float(mpmath.log(total)))


def forward_log_moment(squared_distance, q, order):
  """λ D_{λ+1}(P‖Q) by quadrature, P = (1-q) N(0,1) + q N(r,1), Q = N(0,1)."""
  return _quadrature(squared_distance, q, order + 1)


def reverse_log_moment(squared_distance, q, order):
  """λ D_{λ+1}(Q‖P) by quadrature."""
  return _quadrature(squared_distance, q, -order)


def _quadrature(squared_distance, q, power):
  """log E_{x~Q}[(P/Q)(x)^power], by the trapezoidal rule.

  The integrand has no singularity nearer to the real line than π/r, so that
  steps of π/8r at most err by exp(-2π 8) = 1e-22 of it.
  """
  with mpmath.workdps(40):
    r = mpmath.sqrt(squared_distance)
    q = mpmath.mpf(q)
    step = min(mpmath.mpf(1) / 2, mpmath.pi / (8 * r))
    # The mass lies between the means of the mixture's components.
    low, high = min(0, power) * r - 14, max(0, power) * r + 14

    def integrand(x):
      ratio = 1 - q + q * mpmath.exp(r * x - r * r / 2)
      return mpmath.npdf(x) * ratio**power

    total = mpmath.fsum(
      integrand(low + i * step) for i in range(int((high - low) / step) + 1)
    )
    return float(mpmath.log(total * step))


def epsilon(orders, costs, delta, conversion):
  """The conversions to ε of docs/accounting.md, as written."""
  candidates = []
  for order, cost in zip(orders, costs):
    if not np.any(costs):
      candidates.append(0.0)
    elif conversion == 'chernoff':
      candidates.append((cost - math.log(delta)) / order)
    elif 1 - math.exp(-cost / order) < delta**2:
      # Bretagnolle and Huber (1978): no set gains more than √(1 - exp(-KL)).
      candidates.append(0.0)
    else:
      alpha = order + 1
      candidates.append(
        cost / order + math.log1p(-1 / alpha) - math.log(delta * alpha) / order
      )
  return max(0.0, min(candidates))


def accounted_epsilon(rounds, settings, delta, known_costs=0.0):
  """All of the accounting by moments, put together slowly.

  The bounds of means are the library's, which have tests of their own.

  Args:
    rounds: Pairs of an event with groups and how often it took place.
    settings: Of a `BayesianAccountant`.
    delta: δ.
    known_costs: Of rounds that are not estimated, for every order.
  """
  orders, composition = settings['orders'], settings['composition']
  count = sum(repeats for _, repeats in rounds)
  total = settings['total_rounds'] or count
  power = total if composition == 'holder' else 1
  bounds = {'panel': 1, 'holder': total, 'product': count}[composition]
  bounds *= len(orders) if settings['count_orders'] else 1
  kept = settings['estimator_delta'] or delta / 10
  if settings['estimator'] == 'population':
    kept = 0.0

  def bound(costs, worst):
    if settings['estimator'] == 'population':
      return log_mean_exp(costs)
    function = getattr(mean_bounds, settings['estimator'])
    return function(costs, kept / bounds, worst)

  def costs_at(squared_distances, q, chance):
    costs = log_moments(squared_distances, q, orders, settings['direction'])
    return included(costs, chance)

  def unit_costs(group):
    return costs_at(
      group.squared_distances.tolist(),
      group.participation_probability,
      group.inclusion_probability,
    )

  def worst_costs(groups):
    """Of the farthest and likeliest unit that the groups allow."""
    return costs_at(
      [max(group.worst_case_squared_distance for group in groups)],
      max(group.participation_probability for group in groups),
      max(group.inclusion_probability for group in groups),
    )[0]

  worst = sum(repeats * worst_costs(event.groups) for event, repeats in rounds)
  if composition == 'panel':  # Of the sums of all groups the largest bound.
    groups = zip(*(event.groups for event, _ in rounds))
    repeated = [repeats for _, repeats in rounds]
    costs = np.max(
      [
        bound(sum(r * unit_costs(g) for r, g in zip(repeated, group)), worst)
        for group in groups
      ],
      axis=0,
    )
  else:  # Of all rounds the sum of the largest bounds.
    costs = sum(
      repeats
      / power
      * np.max(
        [
          bound(power * unit_costs(group), power * worst_costs([group]))
          for group in event.groups
        ],
        axis=0,
      )
      for event, repeats in rounds
    )
  costs = known_costs + np.minimum(costs, worst)
  return epsilon(orders, costs, delta - kept, settings['conversion'])


def log_mean_exp(log_values, probabilities=None):
  """log E[exp ℓ] over the first axis."""
  log_values = np.asarray(log_values, dtype=np.float64)
  if probabilities is None:
    probabilities = np.full(len(log_values), 1 / len(log_values))
  largest = np.max(log_values, axis=0)
  return largest + np.log(probabilities @ np.exp(log_values - largest))


def gaussian_costs(squared_distances, orders):
  """λ(λ+1) r²/2, the log-moments where everybody takes part."""
  orders = np.asarray(orders)
  return np.outer(squared_distances, orders * (orders + 1) / 2)


def betting_bound(shares, failure_probability):
  """The largest mean of values in [0, 1] that the bets do not rule out.

  The bets and their prior are those `mean_bounds` states: fractions 2^-j of the
  largest admissible bet, j = 0 to 11, weighed as 1/((j+1)(j+2)).
  """
  with mpmath.workdps(30):
    shares = [mpmath.mpf(float(share)) for share in shares]
    prior = [mpmath.mpf(1) / ((j + 1) * (j + 2)) for j in range(12)]

    def capital(mean):
      total = mpmath.mpf(0)
      for j, weight in enumerate(prior):
        bet = mpmath.mpf(2) ** -j / (1 - mean)
        total += weight * mpmath.fprod(1 + bet * (mean - x) for x in shares)
      return total / mpmath.fsum(prior)

    low, high = mpmath.mpf(0), 1 - mpmath.mpf(10) ** -13
    if capital(high) < 1 / failure_probability:
      return 1.0
    for _ in range(60):
      middle = (low + high) / 2
      if capital(middle) < 1 / failure_probability:
        low = middle
      else:
        high = middle
    return float(high)


def most_misses(trials, probability):
  """Misses that a bound failing as often as allowed exceeds once in 1e6."""
  return int(stats.binom.ppf(1 - 1e-6, trials, probability))
