"""Upper confidence bounds of a mean, for samples known by their logarithm.

The accountant needs E_x[y] for y = exp ℓ(x) >= 1, where ℓ runs from 1e-20 to
1e9, and has m samples of it. Each class below is a sample reduced to what one
bound needs; `log_upper_bound(δ′)` exceeds log E[y] except with probability δ′.
All of them work on the excess y - 1, which keeps the accuracy of small ℓ, and
none returns more than the worst case where one is known.
"""

import abc
import dataclasses
from typing import Any, Optional

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from tf_bdp import validation
from tf_bdp.accounting import log_space

FEWEST_UNITS = 3


def student_t(
  log_values: np.ndarray,
  failure_probability: float,
  log_worst_case: Optional[np.ndarray] = None,
) -> np.ndarray:
  """Returns the paper's bound, log(M + F⁻¹(1-δ′; m-1) S / √(m-1)).

  Equation 5 of the paper. It rests on the maximum-entropy assumption behind
  that equation and can fail far more often than δ′ when a few units are far
  from the others.

  Args:
    log_values: ℓ of every sampled unit, an array [units, orders].
    failure_probability: δ′.
    log_worst_case: The largest possible ℓ of every order, if known.

  Returns:
    The bound of log E[exp ℓ] for every order.
  """
  sample = StudentT.from_sample(log_values, log_worst_case)
  return sample.log_upper_bound(failure_probability)


def bernstein(
  log_values: np.ndarray,
  failure_probability: float,
  log_worst_case: np.ndarray,
) -> np.ndarray:
  """Returns the empirical Bernstein bound, valid for every distribution.

  Maurer and Pontil (2009), Theorem 4, for values between 1 and the worst case.
  Arguments and result as in `student_t`.
  """
  sample = Bernstein.from_sample(log_values, log_worst_case)
  return sample.log_upper_bound(failure_probability)


def betting(
  log_values: np.ndarray,
  failure_probability: float,
  log_worst_case: np.ndarray,
) -> np.ndarray:
  """Returns the betting bound, valid for every distribution.

  Waudby-Smith and Ramdas (2023), "Estimating means of bounded random variables
  by betting", with a fixed mixture of constant bets ("grid Kelly"), which does
  not depend on the order of the sample. Arguments and result as in `student_t`.
  """
  sample = Betting.from_sample(log_values, log_worst_case)
  return sample.log_upper_bound(failure_probability)


@dataclasses.dataclass(frozen=True)
class MeanBound(abc.ABC):
  """A sample of y, reduced to what one kind of bound of E[y] needs.

  Attributes:
    count: The number m of sampled units.
    log_worst_case: The largest possible ℓ of each order; infinite if unknown.
  """

  count: int
  log_worst_case: np.ndarray

  def __post_init__(self) -> None:
    if self.count < FEWEST_UNITS:
      raise ValueError(
        f'A mean can be bounded from at least {FEWEST_UNITS} units. Found '
        f'{self.count}.'
      )
    orders = self.log_worst_case.size
    for name, value in vars(self).items():
      if name == 'count':
        continue
      wide = name in ('points', 'weights')
      if value.shape[-1:] != (orders,) or value.ndim != 1 + wide:
        raise ValueError(f'{name} does not have {orders} orders')
      finite = name == 'log_worst_case' or np.all(np.isfinite(value))
      if not (finite and np.all(value >= 0)):
        raise ValueError(f'{name} must be finite and non-negative')

  @classmethod
  @abc.abstractmethod
  def from_sample(
    cls, log_values: np.ndarray, log_worst_case: Optional[np.ndarray] = None
  ) -> 'MeanBound':
    """Reduces ℓ of every unit and order, an array [units, orders]."""

  @abc.abstractmethod
  def _log_excess_bound(self, failure_probability: float) -> np.ndarray:
    """Returns a bound of log(E[y] - 1)."""

  def log_upper_bound(self, failure_probability: float) -> np.ndarray:
    """Returns a bound of log E[y] for every order, at most the worst case."""
    validation.check_delta('failure_probability', failure_probability)
    bound = log_space.log1p_exp(self._log_excess_bound(failure_probability))
    return np.minimum(bound, self.log_worst_case)

  def to_state(self) -> dict[str, Any]:
    """Returns plain data from which `from_state` makes an equal object."""
    state = {
      key: value.tolist() if isinstance(value, np.ndarray) else value
      for key, value in vars(self).items()
    }
    worst = [None if np.isinf(v) else v for v in state['log_worst_case']]
    return {**state, 'log_worst_case': worst}

  @classmethod
  def from_state(cls, state: dict[str, Any], orders: int) -> 'MeanBound':
    """Restores what `to_state` returned; raises ValueError otherwise."""
    fields = {field.name for field in dataclasses.fields(cls)}
    if not isinstance(state, dict) or set(state) != fields:
      raise ValueError(f'expected the entries {sorted(fields)}')
    count = validation.check_positive_integer('count', state['count'])
    worst = [np.inf if v is None else v for v in state['log_worst_case']]
    arrays = {
      key: np.array(value, dtype=np.float64)
      for key, value in {**state, 'log_worst_case': worst}.items()
      if key != 'count'
    }
    if arrays['log_worst_case'].shape != (orders,):
      raise ValueError(f'log_worst_case does not have {orders} orders')
    return cls(count=count, **arrays)


@dataclasses.dataclass(frozen=True)
class Population(MeanBound):
  """The mean itself: right if the sampled units are the whole population."""

  log_scale: np.ndarray
  mean: np.ndarray

  @classmethod
  def from_sample(
    cls, log_values: np.ndarray, log_worst_case: Optional[np.ndarray] = None
  ) -> 'Population':
    """Reduces ℓ of every unit and order, an array [units, orders]."""
    log_values, worst = _check(log_values, log_worst_case)
    log_scale = log_space.log_scale(np.max(log_values, axis=0))
    mean = np.mean(log_space.scaled_excess(log_values, log_scale), axis=0)
    return cls(log_values.shape[0], worst, log_scale, mean)

  def _log_excess_bound(self, failure_probability: float) -> np.ndarray:
    with np.errstate(divide='ignore'):
      return self.log_scale + np.log(self.mean)


@dataclasses.dataclass(frozen=True)
class StudentT(MeanBound):
  """Mean and deviation; see `student_t`."""

  log_scale: np.ndarray
  mean: np.ndarray
  deviation: np.ndarray

  @classmethod
  def from_sample(
    cls, log_values: np.ndarray, log_worst_case: Optional[np.ndarray] = None
  ) -> 'StudentT':
    """Reduces ℓ of every unit and order, an array [units, orders]."""
    log_values, worst = _check(log_values, log_worst_case)
    largest = np.max(log_values, axis=0)
    log_scale = log_space.log_scale(largest)
    excess = log_space.scaled_excess(log_values, log_scale)
    mean = np.mean(excess, axis=0)
    excess -= mean
    deviation = np.sqrt(np.einsum('uo,uo->o', excess, excess) / len(excess))
    # Rounding must not pass for a deviation that t's quantile then magnifies.
    equal = largest == np.min(log_values, axis=0)
    mean = np.where(equal, log_space.scaled_excess(largest, log_scale), mean)
    deviation = np.where(equal, 0.0, deviation)
    return cls(log_values.shape[0], worst, log_scale, mean, deviation)

  def _log_excess_bound(self, failure_probability: float) -> np.ndarray:
    freedom = self.count - 1
    quantile = student_t_quantile(freedom, failure_probability)
    margin = quantile * self.deviation / np.sqrt(freedom)
    with np.errstate(divide='ignore'):
      return self.log_scale + np.log(self.mean + margin)


@dataclasses.dataclass(frozen=True)
class Bernstein(MeanBound):
  """Mean and variance as shares of the worst case; see `bernstein`."""

  mean: np.ndarray
  variance: np.ndarray

  def __post_init__(self) -> None:
    super().__post_init__()
    _check_worst_case(self.log_worst_case)
    if np.any(self.mean > 1):
      raise ValueError('mean must be a share of the worst case, up to 1')

  @classmethod
  def from_sample(
    cls, log_values: np.ndarray, log_worst_case: Optional[np.ndarray] = None
  ) -> 'Bernstein':
    """Reduces ℓ of every unit and order, an array [units, orders]."""
    log_values, worst = _check(log_values, log_worst_case)
    shares = _shares_of_worst_case(log_values, worst)
    variance = np.var(shares, axis=0, ddof=1)
    return cls(shares.shape[0], worst, np.mean(shares, axis=0), variance)

  def _log_excess_bound(self, failure_probability: float) -> np.ndarray:
    log_term = np.log(2.0 / failure_probability)
    bound = self.mean + np.sqrt(2.0 * self.variance * log_term / self.count)
    bound = bound + 7.0 * log_term / (3.0 * (self.count - 1))
    return log_space.log_expm1(self.log_worst_case) + np.log(
      np.minimum(bound, 1.0)
    )


# Fractions of the largest admissible bet, and their prior weights: Σ 1/(i(i+1))
# prefers bold bets, which are the best ones where no unit stands out.
_BETS = 0.5 ** np.arange(12)
_BET_WEIGHTS = 1.0 / (np.arange(1, 13) * np.arange(2, 14))
_LOG_BET_WEIGHTS = np.log(_BET_WEIGHTS / np.sum(_BET_WEIGHTS))
# Larger samples are moved to fixed points, denser towards zero.
_MOST_POINTS = 4096
_POINTS = np.linspace(0.0, 1.0, _MOST_POINTS) ** 4


@dataclasses.dataclass(frozen=True)
class Betting(MeanBound):
  """Points and their weights as shares of the worst case; see `betting`.

  The capital of a gambler who bets the fraction c against the mean being as
  high as μ, Π_i (1 + c (μ - X_i) / (1 - μ)), has expectation at most one if the
  mean is at least μ; so has a mixture over c. By Markov's inequality it reaches
  1/δ′ with probability at most δ′. It grows with μ, so the bound is the one μ
  at which it does.
  """

  points: np.ndarray
  weights: np.ndarray

  def __post_init__(self) -> None:
    super().__post_init__()
    _check_worst_case(self.log_worst_case)
    if np.any(self.points > 1):
      raise ValueError('points must be shares of the worst case, up to 1')
    weights = np.broadcast_to(self.weights, self.points.shape)
    if not np.allclose(np.sum(weights, axis=0), self.count):
      raise ValueError('weights must add up to the number of units')

  @classmethod
  def from_sample(
    cls, log_values: np.ndarray, log_worst_case: Optional[np.ndarray] = None
  ) -> 'Betting':
    """Reduces ℓ of every unit and order, an array [units, orders]."""
    log_values, worst = _check(log_values, log_worst_case)
    shares = _shares_of_worst_case(log_values, worst)
    count, orders = shares.shape
    if count <= _MOST_POINTS:
      return cls(count, worst, shares, np.ones((1, orders)))
    points = np.tile(_POINTS[:, np.newaxis], orders)
    weights = np.stack([_spread(column) for column in shares.T], axis=1)
    return cls(count, worst, points, weights)

  def _log_excess_bound(self, failure_probability: float) -> np.ndarray:
    weights = np.broadcast_to(self.weights, self.points.shape)
    shares = [
      # Points that nobody is at do not count.
      largest_plausible_mean(points[some], column[some], failure_probability)
      for points, column in zip(self.points.T, weights.T)
      for some in [column > 0]
    ]
    with np.errstate(divide='ignore'):
      return log_space.log_expm1(self.log_worst_case) + np.log(shares)


def largest_plausible_mean(
  shares: np.ndarray, weights: np.ndarray, failure_probability: float
) -> float:
  """Returns the betting bound of the mean of values between 0 and 1.

  Args:
    shares: The values that were sampled.
    weights: How often each of them was.
    failure_probability: δ′.
  """
  log_target = -np.log(failure_probability)
  count = np.sum(weights)

  def gap(mean: float) -> float:
    base = 1.0 - mean + _BETS * mean
    with np.errstate(divide='ignore'):  # A bold bet can lose everything.
      losses = np.log1p(np.multiply.outer(_BETS / base, -shares)) @ weights
    growth = count * (np.log(base) - np.log1p(-mean))
    capital = np.logaddexp.reduce(_LOG_BET_WEIGHTS + losses + growth)
    return float(capital) - log_target

  largest = 1.0 - 1e-12
  if gap(largest) <= 0:
    return 1.0
  # At the sample's own mean nothing is gained, whatever the bet (Jensen).
  own = float(shares @ weights) / count
  mean = float(optimize.brentq(gap, own, largest, xtol=1e-15, rtol=1e-9))
  while mean < 1.0 and gap(mean) < 0:  # Err on the safe side of the root.
    mean = min(1.0, mean * (1 + 1e-9) + 1e-15)
  return mean


def betting_share(shares: np.ndarray, failure_probability: float) -> float:
  """Returns the betting bound of a mean from a sample of values in [0, 1]."""
  validation.check_delta('failure_probability', failure_probability)
  if shares.size <= _MOST_POINTS:
    return largest_plausible_mean(
      shares, np.ones(shares.size), failure_probability
    )
  weights = _spread(shares)
  some = weights > 0
  return largest_plausible_mean(
    _POINTS[some], weights[some], failure_probability
  )


def student_t_quantile(
  freedom: npt.ArrayLike, failure_probability: float
) -> np.ndarray:
  """Returns F⁻¹(1-δ′), or 0 where it would make a bound from below."""
  # The lower tail, mirrored: 1 - δ′ would round to 1.
  return np.maximum(0.0, -special.stdtrit(freedom, failure_probability))


def _check_worst_case(log_worst_case: np.ndarray) -> None:
  if np.any(np.isinf(log_worst_case)):
    raise ValueError(
      'A distribution-free bound needs the worst case: give every event a '
      "worst_case_squared_distance, or use the 'student_t' estimator."
    )


def _spread(shares: np.ndarray) -> np.ndarray:
  """Moves each share to the two nearest `_POINTS`, keeping the mean.

  The logarithm of the capital is a concave function of each share, so this
  lowers it: the bound errs upwards.
  """
  right = np.searchsorted(_POINTS, shares, side='left').clip(1)
  left_points, right_points = _POINTS[right - 1], _POINTS[right]
  to_right = (shares - left_points) / (right_points - left_points)
  return np.bincount(right, to_right, _MOST_POINTS) + np.bincount(
    right - 1, 1.0 - to_right, _MOST_POINTS
  )


def _check(
  log_values: np.ndarray, log_worst_case: Optional[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the arguments of `from_sample` as arrays that fit each other."""
  log_values = np.asarray(log_values, dtype=np.float64)
  if log_values.ndim != 2 or log_values.shape[0] < FEWEST_UNITS:
    raise ValueError(
      f'A mean can be bounded from at least {FEWEST_UNITS} units. Found an '
      f'array [units, orders] of shape {log_values.shape}.'
    )
  if not (np.min(log_values) >= 0 and np.max(log_values) < np.inf):
    raise ValueError('log_values must be finite and non-negative.')
  if log_worst_case is None:
    log_worst_case = np.full(log_values.shape[1], np.inf)
  worst = np.asarray(log_worst_case, dtype=np.float64)
  if not np.all(np.isinf(worst)):
    # A sample above the worst case by rounding alone is the worst case.
    log_values = np.minimum(log_values, worst)
  return log_values, worst


def _shares_of_worst_case(
  log_values: np.ndarray, log_worst_case: np.ndarray
) -> np.ndarray:
  """Returns (y - 1) / (y_max - 1), which lies in [0, 1]."""
  _check_worst_case(log_worst_case)
  log_scale = log_space.log_scale(log_worst_case)
  largest = log_space.scaled_excess(log_worst_case[np.newaxis], log_scale)
  # At distance zero (y_max = 1) every share is zero as well.
  largest = np.where(largest > 0, largest, 1.0)
  return np.minimum(
    log_space.scaled_excess(log_values, log_scale) / largest, 1.0
  )


@dataclasses.dataclass(frozen=True)
class Reported:
  """A bound of log E[y] that was taken elsewhere, where the sample is.

  Attributes:
    log_bound: For every order.
    failure_probability: δ′, with which it was taken.
  """

  log_bound: np.ndarray
  failure_probability: float
  count = 0  # Of units that are known here.

  def log_upper_bound(self, failure_probability: float) -> np.ndarray:
    """Returns the bound; the accountant sees to it that δ′ is enough."""
    del failure_probability
    return self.log_bound

  def to_state(self) -> dict[str, Any]:
    """Returns plain data from which `from_state` makes an equal object."""
    return {
      'log_bound': self.log_bound.tolist(),
      'failure_probability': self.failure_probability,
    }

  @classmethod
  def from_state(cls, state: dict[str, Any], orders: int) -> 'Reported':
    """Restores what `to_state` returned; raises ValueError otherwise."""
    log_bound = np.array(state['log_bound'], dtype=np.float64)
    if log_bound.shape != (orders,) or not np.all(log_bound >= 0):
      raise ValueError(f'log_bound is not one of {orders} orders')
    failure_probability = validation.check_delta(
      'failure_probability', state['failure_probability']
    )
    return cls(log_bound, failure_probability)


ESTIMATORS: dict[str, type[MeanBound]] = {
  'betting': Betting,
  'bernstein': Bernstein,
  'student_t': StudentT,
  'population': Population,
}
