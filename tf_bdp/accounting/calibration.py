"""The noise that a budget would have needed, for distances on record."""

import math
from collections.abc import Sequence
from typing import Callable, Optional, Union

import dp_accounting
import numpy as np
import numpy.typing as npt
from scipy import optimize

from tf_bdp import validation
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import events, long_runs, mean_bounds

_SMALLEST_NOISE_MULTIPLIER = 1e-4
_LARGEST_NOISE_MULTIPLIER = 1e6
# Logarithms of ε are told apart up to this.
_LARGEST_LOG_EPSILON = 50.0


class NoNoiseError(ValueError):
  """No noise keeps the budget."""


def events_from_distances(
  distances: Union[npt.ArrayLike, Sequence[npt.ArrayLike]],
  noise_multiplier: float,
  participation_probability: float,
  worst_case_distance: Optional[npt.ArrayLike] = 1.0,
  panel: bool = False,
  worst_case_mixture: Optional[npt.ArrayLike] = None,
) -> list[dp_accounting.DpEvent]:
  """Returns the events of recorded rounds at a noise multiplier.

  Rounds that are alike are one object, so that they can be composed together.

  Args:
    distances: ‖Δ‖ of every round and unit, in units of the clip norm: an array
      [rounds, units], or a list of arrays, one a round, that may differ in
      length.
    noise_multiplier: z, the noise's deviation in units of the clip norm.
    participation_probability: q.
    worst_case_distance: The largest distance clipping allows, in the same
      units: 1 where clipped updates are summed, 2 where they are averaged.
      One number, or one a round.
    panel: Whether column i is the same unit in every round.
    worst_case_mixture: Where the worst case of a round is drawn, pairs of a
      probability and a distance in the same units; DP is charged these.

  Returns:
    One event a round. Where a round of participants has too few to estimate
    from, its worst case.
  """
  noise = validation.check_positive('noise_multiplier', noise_multiplier)
  q = validation.check_probability(
    'participation_probability', participation_probability
  )
  if q == 0:
    raise ValueError(
      'participation_probability must be above 0: with 0 nobody takes part and '
      'nothing is to be accounted for.'
    )
  rows = _rows(distances, panel)
  worst = _worst_cases(worst_case_distance, len(rows))
  mixture = None
  if worst_case_mixture is not None:
    pairs = np.asarray(worst_case_mixture, np.float64)
    mixture = tuple((float(p), float(r / noise) ** 2) for p, r in pairs)
  made: dict[tuple[bytes, Optional[float]], dp_accounting.DpEvent] = {}
  result = []
  for number, (row, limit) in enumerate(zip(rows, worst), start=1):
    key = (row.tobytes(), limit)
    if key not in made:
      limit = None if limit is None else (limit / noise) ** 2
      validation.check_squared_distances(f'distances of round {number}', row)
      if row.size < mean_bounds.FEWEST_UNITS and not panel:
        made[key] = _worst_case_event(limit, q, mixture)
      else:
        made[key] = events.BayesianGaussianEvent(
          (row / noise) ** 2, q, limit, panel, worst_case_mixture=mixture
        )
    result.append(made[key])
  if not any(
    isinstance(e, events.BayesianGaussianEvent) for e in made.values()
  ):
    raise ValueError(
      f'No round has at least {mean_bounds.FEWEST_UNITS} sampled units, which '
      'an estimate takes.'
    )
  return result


def _rows(
  distances: Union[npt.ArrayLike, Sequence[npt.ArrayLike]], panel: bool
) -> list[np.ndarray]:
  rows = [np.asarray(row, np.float64) for row in distances]  # type: ignore
  if not rows or any(row.ndim != 1 for row in rows):
    found = np.shape(rows) if rows else (0,)
    raise ValueError(
      f'distances must be an array [rounds, units]. Found shape {found}.'
    )
  if panel and len({row.size for row in rows}) > 1:
    raise ValueError(
      'A panel is measured as a whole in every round. Found rounds of '
      f'{min(row.size for row in rows)} to {max(row.size for row in rows)} '
      'units; if they are those that took part, they are no panel.'
    )
  if panel and rows[0].size < mean_bounds.FEWEST_UNITS:
    raise ValueError(
      f'A panel must have at least {mean_bounds.FEWEST_UNITS} sampled units. '
      f'Found {rows[0].size}.'
    )
  return rows


def _worst_cases(
  worst_case_distance: Optional[npt.ArrayLike], rounds: int
) -> list[Optional[float]]:
  if worst_case_distance is None:
    return [None] * rounds
  if np.ndim(worst_case_distance) == 0:
    validation.check_positive(
      'worst_case_distance', float(np.asarray(worst_case_distance))
    )
  limits = validation.check_squared_distances(
    'worst_case_distance', worst_case_distance
  )
  if limits.size not in (1, rounds):
    raise ValueError(
      'worst_case_distance must be one number, or one a round. Found '
      f'{limits.size} for {rounds} rounds.'
    )
  return np.broadcast_to(limits, rounds).tolist()


def _worst_case_event(
  squared_distance: Optional[float], q: float, mixture: Optional[events.Mixture]
) -> dp_accounting.DpEvent:
  """Returns the event of a round of which only the worst case is known."""
  if mixture is not None:
    return events.MixedGaussianEvent(mixture, q)
  if squared_distance is None:
    return dp_accounting.NonPrivateDpEvent()
  if squared_distance == 0:
    return dp_accounting.NoOpDpEvent()
  return dp_accounting.PoissonSampledDpEvent(
    q, dp_accounting.GaussianDpEvent(squared_distance**-0.5)
  )


def calibrate_noise_multiplier(
  make_events: Callable[[float], Sequence[dp_accounting.DpEvent]],
  target_epsilon: float,
  target_delta: float,
  make_accountant: Callable[
    [], dp_accounting.PrivacyAccountant
  ] = accountant_lib.BayesianAccountant,
  relative_tolerance: float = 1e-4,
) -> float:
  """Returns the smallest noise multiplier that keeps (ε, δ), in retrospect.

  Retrospective: the distances were recorded at another noise, and with the
  noise they would change. Use it to plan the next run, never as the guarantee
  of one; that comes from the distances of the run itself.

  Args:
    make_events: Gives the events of all rounds at a noise multiplier.
    target_epsilon: ε.
    target_delta: δ.
    make_accountant: Makes a fresh accountant.
    relative_tolerance: How far above the smallest one the result may be.

  Returns:
    A noise multiplier that keeps the budget, to the tolerance the smallest.
  """
  validation.check_delta('target_delta', target_delta)

  def epsilon_at(noise_multiplier: float) -> float:
    accountant = make_accountant()
    long_runs.compose(make_events(noise_multiplier), [accountant])
    return accountant.get_epsilon(target_delta)

  return smallest_noise_multiplier(
    epsilon_at, target_epsilon, relative_tolerance
  )


def smallest_noise_multiplier(
  epsilon_at: Callable[[float], float],
  target_epsilon: float,
  relative_tolerance: float = 1e-4,
) -> float:
  """Returns the smallest noise multiplier at which ε is not above a target.

  Args:
    epsilon_at: ε as a function of the noise multiplier, with which it falls.
    target_epsilon: ε.
    relative_tolerance: How far above the smallest one the result may be.

  Raises:
    NoNoiseError: There is none.
  """
  validation.check_positive('target_epsilon', target_epsilon)

  def excess(log_noise: float) -> float:
    """Of log ε over the target's, which is nearly linear in log z."""
    epsilon = epsilon_at(math.exp(log_noise))
    log_epsilon = (
      math.log(epsilon)
      if 0 < epsilon < math.inf
      else (math.copysign(_LARGEST_LOG_EPSILON, epsilon - 1))
    )
    return log_epsilon - math.log(target_epsilon)

  enough = 1.0
  while epsilon_at(enough) > target_epsilon:
    enough *= 2
    if enough > _LARGEST_NOISE_MULTIPLIER:
      raise NoNoiseError(
        f'No noise multiplier up to {_LARGEST_NOISE_MULTIPLIER:g} keeps '
        f'epsilon = {target_epsilon}. Raise epsilon or delta.'
      )
  too_little = enough / 2
  while epsilon_at(too_little) <= target_epsilon:
    enough, too_little = too_little, too_little / 2
    if too_little < _SMALLEST_NOISE_MULTIPLIER:
      return enough
  step = math.log1p(relative_tolerance) / 4
  root = optimize.brentq(
    excess, math.log(too_little), math.log(enough), xtol=step, rtol=1e-12
  )
  noise = math.exp(root + step)
  while epsilon_at(noise) > target_epsilon:  # Err on the safe side.
    noise *= 1 + relative_tolerance / 4
  return min(noise, enough)
