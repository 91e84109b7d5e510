"""Elementary functions of numbers that are known by their logarithm."""

import numpy as np


def log_expm1(x: np.ndarray) -> np.ndarray:
  """Returns log(exp(x) - 1) for x >= 0, to full relative accuracy."""
  with np.errstate(divide='ignore'):  # log(0) = -inf is the right answer.
    return x + np.log(-np.expm1(-x))


def log1p_exp(x: np.ndarray) -> np.ndarray:
  """Returns log(1 + exp(x)), the inverse of `log_expm1`."""
  return np.logaddexp(0.0, x)


def log_sum_exp(x: np.ndarray) -> np.ndarray:
  """Returns log(sum(exp(x))) over the last axis of finite or -inf values."""
  largest = np.max(x, axis=-1, keepdims=True)
  largest = np.where(np.isneginf(largest), 0.0, largest)
  with np.errstate(divide='ignore'):
    total = np.log(np.sum(np.exp(x - largest), axis=-1))
  return total + largest[..., 0]
