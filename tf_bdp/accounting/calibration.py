"""The noise that a budget would have needed, for distances on record."""

import math
from collections.abc import Sequence
from typing import Callable, Optional

import dp_accounting
import numpy as np
import numpy.typing as npt

from tf_bdp import validation
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import events

_SMALLEST_NOISE_MULTIPLIER = 1e-4
_LARGEST_NOISE_MULTIPLIER = 1e6


def events_from_distances(
  distances: npt.ArrayLike,
  noise_multiplier: float,
  participation_probability: float,
  worst_case_distance: Optional[npt.ArrayLike] = 1.0,
  panel: bool = False,
) -> list[events.BayesianGaussianEvent]:
  """Returns the events of recorded rounds at a noise multiplier.

  Args:
    distances: ‖Δ‖ of every round and unit, in units of the clip norm: an array
      [rounds, units].
    noise_multiplier: z, the noise's deviation in units of the clip norm.
    participation_probability: q.
    worst_case_distance: The largest distance clipping allows, in the same
      units: 1 where clipped updates are summed, 2 where they are averaged.
      One number, or one a round.
    panel: Whether column i is the same unit in every round.

  Returns:
    One event a round.
  """
  noise = validation.check_positive('noise_multiplier', noise_multiplier)
  rows = validation.check_squared_distances('distances', distances)
  if rows.ndim != 2:
    raise ValueError(
      f'distances must be an array [rounds, units]. Found shape {rows.shape}.'
    )
  worst: list[Optional[float]] = [None] * len(rows)
  if worst_case_distance is not None:
    if np.ndim(worst_case_distance) == 0:
      validation.check_positive(
        'worst_case_distance', float(np.asarray(worst_case_distance))
      )
    limits = validation.check_squared_distances(
      'worst_case_distance', worst_case_distance
    )
    worst = list((np.broadcast_to(limits, len(rows)) / noise) ** 2)
  return [
    events.BayesianGaussianEvent(
      (row / noise) ** 2, participation_probability, limit, panel
    )
    for row, limit in zip(rows, worst)
  ]


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
  validation.check_positive('target_epsilon', target_epsilon)
  validation.check_delta('target_delta', target_delta)

  def keeps_budget(noise_multiplier: float) -> bool:
    accountant = make_accountant()
    for event in make_events(noise_multiplier):
      accountant.compose(event)
    return accountant.get_epsilon(target_delta) <= target_epsilon

  enough = 1.0
  while not keeps_budget(enough):
    enough *= 2
    if enough > _LARGEST_NOISE_MULTIPLIER:
      raise ValueError(
        f'No noise multiplier up to {_LARGEST_NOISE_MULTIPLIER:g} keeps '
        f'({target_epsilon}, {target_delta}). Raise epsilon or delta.'
      )
  too_little = enough / 2
  while keeps_budget(too_little):
    enough, too_little = too_little, too_little / 2
    if too_little < _SMALLEST_NOISE_MULTIPLIER:
      return enough
  while enough / too_little > 1 + relative_tolerance:
    middle = math.sqrt(enough * too_little)
    if keeps_budget(middle):
      enough = middle
    else:
      too_little = middle
  return enough
