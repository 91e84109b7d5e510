"""What a round tells the accountant: the distances of its sampled units."""

from typing import Optional

import attr
import dp_accounting
import numpy as np
import numpy.typing as npt

from tf_bdp import validation
from tf_bdp.accounting import mean_bounds

# Norms that were clipped in float32 exceed the clip norm by rounding.
_ROUNDING = 1e-4


def _convert_distances(values: npt.ArrayLike) -> np.ndarray:
  array = validation.check_squared_distances('squared_distances', values)
  if array.ndim != 1 or array.size < mean_bounds.FEWEST_UNITS:
    raise ValueError(
      'squared_distances must be a list of at least '
      f'{mean_bounds.FEWEST_UNITS} sampled units. Found shape {array.shape}. '
      'Account for a round with fewer by its worst case, a '
      'dp_accounting.PoissonSampledDpEvent of a GaussianDpEvent.'
    )
  array = array.copy()
  array.flags.writeable = False
  return array


@attr.s(frozen=True, slots=True, auto_attribs=True)
class BayesianGaussianEvent(dp_accounting.DpEvent):
  """One round of a Gaussian mechanism, with the distances of sampled units.

  Attributes:
    squared_distances: r² of every sampled unit: the squared norm by which the
      unit moves the round's result, over the variance of the noise.
    participation_probability: The probability q that a unit is in the round.
    worst_case_squared_distance: The largest r² that any unit could have, if
      clipping gives one. The distribution-free estimators need it, and with it
      no cost is reported above that of differential privacy.
    panel: Whether the units are a panel: drawn once, and measured in the same
      order in every round, taking part or not.
  """

  squared_distances: np.ndarray = attr.ib(
    converter=_convert_distances,
    eq=attr.cmp_using(eq=np.array_equal),
    hash=False,
    # The distances are private data and do not belong in messages.
    repr=lambda distances: f'<{distances.size} units>',
  )
  participation_probability: float = attr.ib(converter=float)
  worst_case_squared_distance: Optional[float] = attr.ib(
    default=None, converter=attr.converters.optional(float)
  )
  panel: bool = False

  def __attrs_post_init__(self) -> None:
    validation.check_probability(
      'participation_probability', self.participation_probability
    )
    worst = self.worst_case_squared_distance
    if worst is None:
      return
    if not 0 <= worst <= validation.LARGEST_SQUARED_DISTANCE:
      raise ValueError(
        'worst_case_squared_distance must be non-negative and finite. Found '
        f'{worst}.'
      )
    above = self.squared_distances > worst * (1 + _ROUNDING)
    if np.any(above):
      raise ValueError(
        f'{np.count_nonzero(above)} of {above.size} squared_distances exceed '
        f'worst_case_squared_distance = {worst}. Either the units were not '
        'clipped or the two are not divided by the same noise.'
      )
    # What is above it by rounding raises the worst case, to be safe.
    worst = max(worst, float(np.max(self.squared_distances)))
    object.__setattr__(self, 'worst_case_squared_distance', worst)
