"""Privacy costs computed by the clients, as TensorFlow operations.

`tf_bdp.accounting` computes log-moments, and upper confidence bounds of their
mean, from collected distances. These operations compute the same inside
`tff.tensorflow.computation`, so that no distance leaves its client. Where
examples are protected, a client's examples are the sample, and it bounds their
mean (`bound_of_mean`). Where clients are, each is one unit of the sample: it
sends its cost as a pair of numbers in [0, 1] (`scaled_moments`), whose sums are
all that the server needs (`bound_from_sums`).

Everything is float64 and errs upwards: a cost that is NaN counts as the worst
case.
"""

import math
from collections.abc import Sequence
from typing import Optional, Union

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_bdp import array_namespace, validation
from tf_bdp.accounting import log_space, mean_bounds

ESTIMATORS = ('student_t', 'bernstein')

_float64 = array_namespace.of_tensorflow().float64

_TensorLike = Union[tf.Tensor, npt.ArrayLike]

# TensorFlow flushes smaller numbers to zero.
_SMALLEST_SHARE = float(np.finfo(np.float64).tiny)
# Shares are rounded up by this relative amount. It is above their rounding
# error, most of which comes from exponents of up to 745.
_SHARE_ERROR = 1e-12
_ROUND_UP = 1.0 + 1e-15


def log_moments(
  squared_distances: _TensorLike,
  participation_probability: Union[tf.Tensor, float],
  orders: Sequence[int],
) -> tf.Tensor:
  """Returns the log-moments ℓ(λ; r², q) of every unit at every order.

  Theorem 3 of the paper, the direction 'tight' of
  `tf_bdp.accounting.sampled_gaussian.log_moments`, with which it agrees to
  about 1e-12, relative to ℓ however small it is.

  Args:
    squared_distances: r² of every unit, of shape [units].
    participation_probability: q, a number or a scalar tensor.
    orders: The orders λ, positive integers in increasing order.

  Returns:
    A float64 tensor of shape [units, orders]; NaN where r² or q is NaN, or q
    does not lie in [0, 1].
  """
  orders = validation.check_orders(orders)
  if not tf.is_tensor(participation_probability):
    participation_probability = validation.check_probability(
      'participation_probability', participation_probability
    )
  q = _float64(participation_probability)
  q = tf.where((q >= 0) & (q <= 1), q, np.nan)
  distances = _float64(squared_distances)
  # The terms of k = 0 and k = 1 have the exponent zero. Without them the sum,
  # of q^k (1-q)^(n-k) (exp(k(k-1) r²/2) - 1), is the excess over one, and keeps
  # its relative accuracy however small it is.
  k = np.arange(2.0, orders[-1] + 2)
  excesses = log_space.log_expm1(distances[:, tf.newaxis] * (k * (k - 1) / 2))
  columns = []
  for order in orders:  # One at a time, so that memory is units x terms.
    terms = excesses[:, :order] + _log_binomial(order + 1, k[:order], q)
    columns.append(tf.math.softplus(tf.reduce_logsumexp(terms, axis=1)))
  return tf.stack(columns, axis=1)


def bound_of_mean(
  log_values: _TensorLike,
  usable: _TensorLike,
  failure_probability: float,
  estimator: str,
  log_worst_case: _TensorLike,
  power: int = 1,
) -> tf.Tensor:
  """Returns an upper confidence bound of (1/p) log E[exp(p ℓ)].

  The bounds of `tf_bdp.accounting.mean_bounds`, taken of p ℓ of the units that
  are usable. Hölder's composition of T rounds needs the power p = T.

  Args:
    log_values: ℓ of every unit and order, of shape [units, orders]. The number
      of units must be static: fill up with units that are not usable.
    usable: Which units count, of shape [units].
    failure_probability: The probability δ′ that an order's bound fails.
    estimator: 'student_t' (Equation 5 of the paper) or 'bernstein' (Maurer and
      Pontil 2009, Theorem 4).
    log_worst_case: The largest possible ℓ of every order, of shape [orders].
    power: p.

  Returns:
    A float64 tensor of shape [orders], at most the worst case, which it is if
    fewer than three units are usable.
  """
  validation.check_delta('failure_probability', failure_probability)
  validation.check_choice('estimator', estimator, ESTIMATORS)
  power = validation.check_positive_integer('power', power)
  values = power * _float64(log_values)
  most = values.shape[0]
  if most is None:
    raise ValueError(
      'log_values must have a static number of units, for which quantiles are '
      f'made in advance. Found shape {values.shape}; fill it up with units '
      'that are not usable.'
    )
  worst = power * _float64(log_worst_case)
  usable = tf.cast(usable, tf.bool)[:, tf.newaxis]
  values = tf.where(usable, _at_most(values, worst), 0.0)
  count = tf.reduce_sum(tf.cast(usable, tf.int32))
  log_excess = _LOG_EXCESS_BOUNDS[estimator](
    values, usable, count, most, failure_probability, worst
  )
  bound = tf.math.softplus(log_excess)
  enough = count >= mean_bounds.FEWEST_UNITS
  return tf.where(enough, _at_most(bound, worst), worst) / power


def scaled_moments(
  log_values: _TensorLike, log_scale: _TensorLike
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns a client's cost in the form in which costs can be summed.

  Args:
    log_values: The client's ℓ of every order, of shape [orders].
    log_scale: A public bound of every client's ℓ, of the same shape. The worst
      case is such a bound. But secure sums have a fixed resolution, 2^-42 of
      the scale, below which the squares of costs vanish that are some 15 below
      the scale. What `secure_maximum` returned is a better scale.

  Returns:
    The shares (y - 1) / (y_max - 1) of y = exp ℓ, with y_max = exp(scale), and
    their squares, both in [0, 1] and never less than the truth; zero for ℓ = 0
    alone.
  """
  scale = _float64(log_scale)
  values = _at_most(_float64(log_values), scale)
  # (e^a - 1) / (e^b - 1) as e^(a-b) (1 - e^-a) / (1 - e^-b), where nothing
  # overflows, and the rounding of a and b themselves does not count.
  share = tf.math.divide_no_nan(tf.math.expm1(-values), tf.math.expm1(-scale))
  share = tf.exp(values - scale) * share
  # An infinite maximum says that some cost is not known.
  share = tf.where(tf.math.is_finite(scale), share, 1.0)

  def rounded_up(moment: tf.Tensor) -> tf.Tensor:
    moment = tf.maximum(moment * (1.0 + _SHARE_ERROR), _SMALLEST_SHARE)
    return tf.where(values > 0, tf.minimum(moment, 1.0), 0.0)

  share = rounded_up(share)
  return share, rounded_up(tf.square(share))


def bound_from_sums(
  count: int,
  first_sum: npt.ArrayLike,
  second_sum: npt.ArrayLike,
  log_worst_case: npt.ArrayLike,
  failure_probability: float,
  estimator: str,
  log_scale: Optional[npt.ArrayLike] = None,
  resolution: float = 0.0,
) -> np.ndarray:
  """Returns the server's upper confidence bound of log E[exp ℓ].

  What `tf_bdp.accounting.mean_bounds` would return for the clients' own values,
  or more: a variance that is the difference of two sums is known up to their
  rounding only, and is taken to be the largest that they admit.

  Args:
    count: The number of clients, which is public.
    first_sum: The clients' sum of the first of `scaled_moments`, of shape
      [orders].
    second_sum: The sum of the second.
    log_worst_case: The largest possible ℓ of every order.
    failure_probability: The probability δ′ that an order's bound fails.
    estimator: 'student_t' or 'bernstein'; see `bound_of_mean`.
    log_scale: The scale given to `scaled_moments`; the worst case by default.
    resolution: By how much a client's shares were rounded up before they were
      summed; `secure_sums.resolution()` for secure sums.

  Returns:
    An array of shape [orders], at most the worst case, which it is if there
    are fewer than three clients or a sum is not finite.
  """
  validation.check_delta('failure_probability', failure_probability)
  validation.check_choice('estimator', estimator, ESTIMATORS)
  worst = np.asarray(log_worst_case, dtype=np.float64)
  scale = worst if log_scale is None else np.asarray(log_scale, np.float64)
  if count < mean_bounds.FEWEST_UNITS:
    return worst.copy()
  with np.errstate(invalid='ignore', divide='ignore'):
    # Summing may have lost an ulp for each client.
    sum_error = (count + 8) * np.finfo(np.float64).eps
    mean = np.asarray(first_sum, np.float64) / count * (1.0 + sum_error)
    square = np.asarray(second_sum, np.float64) / count * (1.0 + sum_error)
    # Rounding up raised the mean, and through its square lowered the variance.
    error = 2.0 * (_SHARE_ERROR + sum_error)
    smallest_mean = np.maximum(mean * (1.0 - error) - resolution, 0.0)
    variance = np.maximum(square - smallest_mean**2, 0.0)
    log_unit = log_space.log_expm1(scale)
    if estimator == 'student_t':
      quantile = mean_bounds.student_t_quantile(count - 1, failure_probability)
      log_excess = log_unit + np.log(
        mean + quantile * np.sqrt(variance / (count - 1))
      )
    else:
      log_term = math.log(2.0 / failure_probability)
      deviation = np.sqrt(2.0 * variance * log_term / (count - 1))
      log_excess = np.logaddexp(
        log_unit + np.log(mean + deviation),
        log_space.log_expm1(worst)
        + math.log(7.0 * log_term / (3.0 * (count - 1))),
      )
    bound = log_space.log1p_exp(log_excess) * _ROUND_UP
  return np.where(bound < worst, bound, worst)


def _student_t_log_excess(
  values: tf.Tensor,
  usable: tf.Tensor,
  count: tf.Tensor,
  most: int,
  failure_probability: float,
  worst: tf.Tensor,
) -> tf.Tensor:
  """Returns log(E[y] - 1) as `mean_bounds.StudentT` bounds it."""
  del worst
  largest = tf.reduce_max(values, axis=0)
  smallest = tf.reduce_min(tf.where(usable, values, largest), axis=0)
  log_scale = log_space.log_scale(largest)
  mean, squares = _mean_and_squares(
    log_space.scaled_excess(values, log_scale), usable, count
  )
  number = tf.cast(tf.maximum(count, 1), tf.float64)
  deviation = tf.sqrt(squares / number)
  # Rounding must not look like a deviation, which t's quantile would magnify.
  differ = smallest < largest
  mean = tf.where(differ, mean, log_space.scaled_excess(largest, log_scale))
  deviation = tf.where(differ, deviation, 0.0)
  freedoms = np.maximum(np.arange(most + 1) - 1, 1)
  margins = mean_bounds.student_t_quantile(freedoms, failure_probability)
  margin = tf.gather(tf.constant(margins / np.sqrt(freedoms)), count)
  return log_scale + tf.math.log(mean + margin * deviation)


def _bernstein_log_excess(
  values: tf.Tensor,
  usable: tf.Tensor,
  count: tf.Tensor,
  most: int,
  failure_probability: float,
  worst: tf.Tensor,
) -> tf.Tensor:
  """Returns log(E[y] - 1) as `mean_bounds.Bernstein` bounds it."""
  del most
  log_scale = log_space.log_scale(worst)
  largest = log_space.scaled_excess(worst, log_scale)
  shares = log_space.scaled_excess(values, log_scale) / tf.where(
    largest > 0, largest, 1.0
  )
  mean, squares = _mean_and_squares(tf.minimum(shares, 1.0), usable, count)
  log_term = math.log(2.0 / failure_probability)
  number = tf.cast(tf.maximum(count, 2), tf.float64)
  deviation = tf.sqrt(2.0 * squares / (number - 1) * log_term / number)
  bound = mean + deviation + 7.0 * log_term / (3.0 * (number - 1))
  return log_space.log_expm1(worst) + tf.math.log(tf.minimum(bound, 1.0))


_LOG_EXCESS_BOUNDS = {
  'student_t': _student_t_log_excess,
  'bernstein': _bernstein_log_excess,
}


def _mean_and_squares(
  excess: tf.Tensor, usable: tf.Tensor, count: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the usable units' mean, and sum of squared deviations from it."""
  number = tf.cast(tf.maximum(count, 1), tf.float64)
  mean = tf.reduce_sum(tf.where(usable, excess, 0.0), axis=0) / number
  deviations = tf.where(usable, excess - mean, 0.0)
  return mean, tf.reduce_sum(tf.square(deviations), axis=0)


def _log_binomial(trials: int, k: np.ndarray, q: tf.Tensor) -> tf.Tensor:
  """Returns log Pr[B(n, q) = k]."""
  log_choices = [math.log(math.comb(trials, int(number))) for number in k]
  return (
    tf.constant(log_choices, tf.float64)
    + tf.math.xlogy(tf.constant(k, tf.float64), q)
    + tf.math.xlog1py(tf.constant(trials - k, tf.float64), -q)
  )


def _at_most(values: tf.Tensor, limit: tf.Tensor) -> tf.Tensor:
  """Returns the smaller of the two; the limit where there is no number."""
  return tf.where(values < limit, values, limit)
