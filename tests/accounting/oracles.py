"""Slow, independent definitions against which the fast code is tested."""

import math

import mpmath
import numpy as np
from scipy import stats

_DIGITS = 60


def log_moment(squared_distance, q, order, direction='tight'):
  """Theorem 3, term by term, with 60 digits."""
  left = _log_binomial_sum(squared_distance, q, order + 1, -1)
  if direction == 'tight':
    return left
  return max(left, printed_right(squared_distance, q, order))


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
  """log E_{x~Q}[(P/Q)(x)^power]."""
  with mpmath.workdps(30):
    r = mpmath.sqrt(squared_distance)
    q = mpmath.mpf(q)

    def integrand(x):
      ratio = 1 - q + q * mpmath.exp(r * x - r * r / 2)
      return mpmath.npdf(x) * ratio**power

    # The mass lies between the means of the mixture's components.
    low, high = min(0, power) * r - 14, max(0, power) * r + 14
    pieces = int(high - low) // 2 + 2
    total = mpmath.quad(integrand, mpmath.linspace(low, high, pieces))
    return float(mpmath.log(total))


def epsilon(orders, costs, delta, conversion):
  """Section 4 of ACCOUNTING.md, as written."""
  candidates = []
  for order, cost in zip(orders, costs):
    if conversion == 'chernoff':
      candidates.append((cost - math.log(delta)) / order)
    else:
      alpha = order + 1
      candidates.append(
        cost / order + math.log1p(-1 / alpha) - math.log(delta * alpha) / order
      )
  return max(0.0, min(candidates))


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
