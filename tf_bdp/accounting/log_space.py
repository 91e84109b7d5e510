"""Elementary functions of numbers that are known by their logarithm."""

from typing import Any

import numpy as np

from tf_bdp import array_namespace

# exp of more than this is computed relative to the largest; its square is still
# a float64.
_LARGEST_EXPONENT = 300.0


def log_expm1(x: Any) -> Any:
  """Returns log(exp(x) - 1) for x >= 0, to full relative accuracy."""
  xp = array_namespace.of(x)
  with np.errstate(divide='ignore'):  # log(0) = -inf is the right answer.
    return x + xp.log(-xp.expm1(-x))


def log1p_exp(x: Any) -> Any:
  """Returns log(1 + exp(x)), the inverse of `log_expm1`."""
  return array_namespace.of(x).log1p_exp(x)


def included(costs: Any, probability: Any) -> Any:
  """Returns log(1 - a + a exp ℓ), at most ℓ; see `BayesianGaussianEvent`.

  Args:
    costs: ℓ >= 0, of any shape.
    probability: The inclusion probability a.
  """
  xp = array_namespace.of(costs, probability)
  costs = xp.float64(costs)
  if isinstance(probability, float) and probability == 1:
    return costs  # The common case, for which long ledgers do not pay.
  with np.errstate(divide='ignore', invalid='ignore'):
    log_excess = xp.log(xp.float64(probability)) + log_expm1(costs)
    # Rounding is upwards. Nothing is gained where the inclusion is certain.
    result = xp.minimum(log1p_exp(log_excess) * (1.0 + 1e-15), costs)
  result = xp.where(probability < 1, result, costs)
  return xp.where(probability > 0, result, xp.float64(0.0))


def log_scale(largest: Any) -> Any:
  """Returns what exponentials are to be divided by, as a logarithm.

  Zero where they are float64 themselves, even squared; else the largest.
  """
  where = array_namespace.of(largest).where
  return where(largest > _LARGEST_EXPONENT, largest, 0.0 * largest)


def scaled_excess(log_values: Any, scale: Any) -> Any:
  """Returns (exp ℓ - 1) / exp(scale) for scales from `log_scale`."""
  xp = array_namespace.of(log_values)
  # Where there is a scale, exp ℓ is so large that the 1 does not count.
  return xp.where(
    scale > 0,
    xp.exp(log_values - scale),
    xp.expm1(xp.minimum(log_values, 2 * _LARGEST_EXPONENT)),
  )


def log_sum_exp(x: np.ndarray) -> np.ndarray:
  """Returns log(sum(exp(x))) over the last axis of finite or -inf values."""
  largest = np.max(x, axis=-1, keepdims=True)
  largest = np.where(np.isneginf(largest), 0.0, largest)
  with np.errstate(divide='ignore'):
    total = np.log(np.sum(np.exp(x - largest), axis=-1))
  return total + largest[..., 0]
