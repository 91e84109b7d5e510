"""Log-moments of the sampled Gaussian mechanism (Theorem 3 of the paper).

For one protected unit at the squared distance r² (its influence on the round's
result over the noise) that takes part with probability q, the log-moment of
order λ is λ times the Rényi divergence of order λ + 1:

  ℓ(λ; r², q) = log Σ_k C(λ+1, k) q^k (1-q)^(λ+1-k) exp(k(k-1) r²/2)

This is one direction of the divergence. Mironov, Talwar and Zhang
(arXiv:1908.10530, Theorem 5) show that the other direction never exceeds it, so
`tight` uses ℓ alone. `printed` takes the maximum with the bound of the other
direction as the paper prints it, which is sound and much larger for small q.
"""

import functools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from scipy import special

from tf_bdp import validation
from tf_bdp.accounting import log_space

DIRECTIONS = ('tight', 'printed')

# Terms that are, at every distance of a block, below this share of the largest
# term are left out; even all of them together do not reach the last bit.
_LOG_NEGLIGIBLE = np.log(1e-20)
# Products within these limits neither overflow nor lose bits in float64.
_LARGEST_LINEAR_EXPONENT = 600.0
_SMALLEST_LINEAR_LOG_WEIGHT = -680.0
# A block holds distances of similar size, so that few terms matter in it.
_LARGEST_RATIO_IN_BLOCK = 16.0
_LARGEST_BLOCK = 8192


def log_moments(
  squared_distances: npt.ArrayLike,
  participation_probability: float,
  orders: npt.ArrayLike,
  direction: str = 'tight',
) -> np.ndarray:
  """Returns the log-moments ℓ(λ; r², q) of every unit at every order.

  Exact up to rounding (about 1e-12 relative) from zero distance to values of
  exp(1e9), in time and memory that do not grow with units x orders x terms.

  >>> log_moments([0.0, 1.0], 1.0, [1, 2]).tolist()
  [[0.0, 0.0], [1.0, 3.0]]

  Args:
    squared_distances: r² of every unit, in units of the noise's variance.
    participation_probability: The probability q that a unit is in the round.
    orders: The orders λ, positive integers in increasing order.
    direction: 'tight' or 'printed'; see the module's docstring.

  Returns:
    An array of shape [units, orders].
  """
  distances = validation.check_squared_distances(
    'squared_distances', squared_distances
  )
  if distances.ndim != 1:
    raise ValueError(
      f'squared_distances must be a list. Found shape {distances.shape}.'
    )
  q = validation.check_probability(
    'participation_probability', participation_probability
  )
  checked_orders = validation.check_orders(orders)
  validation.check_choice('direction', direction, DIRECTIONS)
  log_weights, exponents = _left_sum(q, checked_orders)
  result = _log_expectations(distances, log_weights, exponents)
  if direction == 'printed':
    log_weights, exponents = _right_sum(q, checked_orders)
    right = _log_expectations(distances, log_weights, exponents)
    np.maximum(result, right, out=result)
  return result


@functools.lru_cache(maxsize=16)
def _left_sum(
  q: float, orders: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
  """Weights and exponents of c^L in Theorem 3: k ~ B(λ+1, q), k(k-1)/2."""
  k = np.arange(2, orders[-1] + 2)
  return _log_binomial(k, np.array(orders) + 1, q), k * (k - 1) / 2.0


@functools.lru_cache(maxsize=16)
def _right_sum(
  q: float, orders: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
  """Weights and exponents of c^R in Theorem 3: k ~ B(λ, q), k(k+1)/2."""
  k = np.arange(1, orders[-1] + 1)
  return _log_binomial(k, np.array(orders), q), k * (k + 1) / 2.0


def _log_binomial(k: np.ndarray, trials: np.ndarray, q: float) -> np.ndarray:
  """Returns log Pr[B(n, q) = k] as an array [trials, k]; -inf where k > n."""
  n = trials[:, np.newaxis]
  rest = np.maximum(n - k, 0)
  log_choices = special.gammaln(n + 1) - special.gammaln(k + 1)
  log_choices = log_choices - special.gammaln(rest + 1)
  log_weights = log_choices + special.xlogy(k, q) + special.xlog1py(rest, -q)
  return np.where(k <= n, log_weights, -np.inf)


def _log_expectations(
  distances: np.ndarray, log_weights: np.ndarray, exponents: np.ndarray
) -> np.ndarray:
  """Returns log E_k[exp(c_k r²)] as an array [units, orders].

  Weights sum to one together with those of the k left out, whose c_k is zero.
  So the expectation is 1 + Σ_k w_k (exp(c_k r²) - 1), a sum of non-negative
  terms that keeps its relative accuracy however close to one it is.
  """
  result = np.zeros((distances.size, log_weights.shape[0]))
  if np.all(np.isneginf(log_weights)):  # q = 0: nobody takes part.
    return result
  ascending = np.argsort(distances, kind='stable')
  for block in _blocks(distances[ascending]):
    units = ascending[block]
    result[units] = _block_log_expectations(
      distances[units], log_weights, exponents
    )
  return result


def _blocks(ascending: np.ndarray) -> Iterator[slice]:
  """Cuts positive sorted distances into blocks of similar size."""
  start = int(np.searchsorted(ascending, 0.0, side='right'))
  while start < ascending.size:
    limit = ascending[start] * _LARGEST_RATIO_IN_BLOCK
    end = int(np.searchsorted(ascending, limit, side='right'))
    end = min(end, start + _LARGEST_BLOCK)
    yield slice(start, end)
    start = end


def _block_log_expectations(
  distances: np.ndarray, log_weights: np.ndarray, exponents: np.ndarray
) -> np.ndarray:
  """Evaluates one block of ascending, positive distances.

  Terms that fit float64 are summed by one matrix product over all units and
  orders; the rest, an order at a time, in log space.
  """
  keep = _matters(log_weights, exponents, distances[0], distances[-1])
  fits = exponents * distances[-1] <= _LARGEST_LINEAR_EXPONENT
  linear = keep & fits & (log_weights >= _SMALLEST_LINEAR_LOG_WEIGHT)
  columns = np.flatnonzero(linear.any(axis=0))
  powers = np.expm1(np.outer(distances, exponents[columns]))
  weights = np.where(linear, np.exp(np.minimum(log_weights, 0.0)), 0.0)
  moments = powers @ weights[:, columns].T

  logarithmic = keep & ~linear
  result = np.log1p(moments)
  for order in np.flatnonzero(logarithmic.any(axis=1)):
    columns = np.flatnonzero(logarithmic[order])
    terms = log_space.log_expm1(np.outer(distances, exponents[columns]))
    total = log_space.log_sum_exp(terms + log_weights[order, columns])
    with np.errstate(divide='ignore'):
      total = np.logaddexp(total, np.log(moments[:, order]))
    result[:, order] = log_space.log1p_exp(total)
  return result


def _matters(
  log_weights: np.ndarray,
  exponents: np.ndarray,
  smallest: float,
  largest: float,
) -> np.ndarray:
  """Tells which terms can matter for a distance between the two given.

  Let T_k(t) be the terms and i < j. Since the exponents grow with k,
  T_j(t) / T_i(t) grows with t. With `low` the largest term at the smallest
  distance and `high` the largest at the largest one, a term is therefore never
  a greater share of the sum than
    T_k / T_low at the smallest distance, for k < low,
    T_k / T_high at the largest distance, for k > high,
    max(T_k / T_low, T_k / T_high) at any one distance between, for the others
      (below that distance the first ratio bounds it, above it the second),
  and that distance is best chosen where T_low = T_high.
  """
  at_smallest = log_weights + log_space.log_expm1(exponents * smallest)
  at_largest = log_weights + log_space.log_expm1(exponents * largest)
  rows = np.arange(log_weights.shape[0])
  low = np.argmax(at_smallest, axis=1)
  high = np.argmax(at_largest, axis=1)

  rise = np.maximum(exponents[high] - exponents[low], 1e-300)
  drop = log_weights[rows, low] - log_weights[rows, high]
  between = np.clip(drop / rise, smallest, largest)[:, np.newaxis]
  at_between = log_weights + log_space.log_expm1(exponents * between)
  floor = np.minimum(at_between[rows, low], at_between[rows, high])

  k = np.arange(exponents.size)
  share = at_between - floor[:, np.newaxis]
  below = k < low[:, np.newaxis]
  above = k > high[:, np.newaxis]
  from_low = at_smallest - at_smallest[rows, low][:, np.newaxis]
  from_high = at_largest - at_largest[rows, high][:, np.newaxis]
  share = np.where(below, from_low, np.where(above, from_high, share))
  return share > _LOG_NEGLIGIBLE
