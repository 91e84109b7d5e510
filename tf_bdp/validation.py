"""Checks of arguments, each with one sentence for what was wrong."""

import math
import numbers
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Above this the exponents of the log-moments would leave float64.
LARGEST_SQUARED_DISTANCE = 1e200


def check_positive(name: str, value: float) -> float:
  """Returns `value` if it is positive and finite, else raises ValueError."""
  if not (value > 0 and math.isfinite(value)):
    raise ValueError(f'{name} must be positive and finite. Found {value}.')
  return float(value)


def check_not_negative(name: str, value: float) -> float:
  """Returns `value` if it is 0 or more and finite, else raises ValueError."""
  if not 0 <= value < math.inf:
    raise ValueError(f'{name} must be non-negative and finite. Found {value}.')
  return float(value)


def check_positive_integer(name: str, value: int) -> int:
  """Returns `value` if it is an integer above zero, else raises ValueError."""
  number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not (number and math.isfinite(value) and value >= 1 and value % 1 == 0):
    raise ValueError(f'{name} must be a positive integer. Found {value}.')
  return int(value)


def check_probability(name: str, value: float) -> float:
  """Returns `value` if it lies in [0, 1], else raises ValueError."""
  if not 0 <= value <= 1:
    raise ValueError(f'{name} must be between 0 and 1. Found {value}.')
  return float(value)


def check_delta(name: str, value: float) -> float:
  """Returns `value` if 0 < value < 1, else raises ValueError."""
  if not 0 < value < 1:
    raise ValueError(
      f'{name} must be above 0 and below 1. Found {value}. A usual choice is '
      'below one over the number of protected units.'
    )
  return float(value)


def check_choice(name: str, value: str, choices: Sequence[str]) -> str:
  """Returns `value` if it is one of `choices`, else raises ValueError."""
  if value not in choices:
    raise ValueError(
      f'{name} must be one of {tuple(choices)}. Found {value!r}.'
    )
  return value


def check_orders(orders: npt.ArrayLike) -> tuple[int, ...]:
  """Returns the orders λ as a tuple of increasing positive integers."""
  values = np.asarray(orders)
  if values.ndim != 1 or values.size == 0:
    raise ValueError(f'orders must be a non-empty list. Found {orders!r}.')
  if not np.issubdtype(values.dtype, np.number) or np.any(
    (values < 1) | (values != np.floor(values)) | ~np.isfinite(values)
  ):
    raise ValueError(
      'orders must be positive integers: the log-moment is a finite sum for '
      f'integer orders only. Found {orders!r}.'
    )
  if np.any(np.diff(values) <= 0):
    raise ValueError(
      f'orders must be in increasing order, none twice. Found {orders!r}.'
    )
  return tuple(int(order) for order in values)


def check_squared_distances(name: str, values: npt.ArrayLike) -> np.ndarray:
  """Returns `values` as a float64 array, finite and non-negative everywhere."""
  array = np.asarray(values, dtype=np.float64)
  for problem, where in (
    ('NaN', np.isnan(array)),
    ('infinite', np.isinf(array)),
    ('negative', array < 0),
    ('too large', array > LARGEST_SQUARED_DISTANCE),
  ):
    if np.any(where):
      raise ValueError(
        f'{name} must be finite, non-negative and at most '
        f'{LARGEST_SQUARED_DISTANCE:g}. Found {np.count_nonzero(where)} '
        f'{problem} of {array.size}, the first at index {np.argmax(where)}. '
        'Leave such units out of the round before it is released.'
      )
  return array
