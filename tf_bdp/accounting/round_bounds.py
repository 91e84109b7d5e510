"""Rounds that are bounded one by one: 'holder' and 'product'."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Optional, Union

import numpy as np

from tf_bdp import validation
from tf_bdp.accounting import mean_bounds

BoundOfMean = Union[mean_bounds.MeanBound, mean_bounds.Reported]


@dataclasses.dataclass(frozen=True)
class RoundBounds:
  """Samples of exp ℓ (product) or exp T ℓ (holder) that stood for rounds.

  Attributes:
    samples: One for each group of units.
    repeats: How many such rounds.
    labels: Which group each is. Without them everybody is in the one with the
      largest bound.
  """

  samples: tuple[BoundOfMean, ...]
  repeats: int
  labels: Optional[tuple[int, ...]] = None
  _bounds: dict[float, np.ndarray] = dataclasses.field(
    default_factory=dict, compare=False
  )

  def log_upper_bounds(self, failure_probability: float) -> np.ndarray:
    """Returns a bound of log E for each group and order; the last are kept."""
    if failure_probability not in self._bounds:
      bounds = [s.log_upper_bound(failure_probability) for s in self.samples]
      self._bounds.clear()
      self._bounds[failure_probability] = np.array(bounds)
    return self._bounds[failure_probability]

  def log_upper_bound(self, failure_probability: float) -> np.ndarray:
    """Returns the largest bound of all groups, for every order."""
    return np.max(self.log_upper_bounds(failure_probability), axis=0)

  def to_state(self) -> list[Any]:
    """Returns plain data; without labels where there are none."""
    samples = [sample.to_state() for sample in self.samples]
    labels = [] if self.labels is None else [list(self.labels)]
    return [samples, self.repeats, *labels]

  @classmethod
  def from_state(cls, state: Any, estimator: str, orders: int) -> 'RoundBounds':
    """Restores what `to_state` returned; raises ValueError otherwise."""
    samples, repeats, *more = state
    if not samples:
      raise ValueError('a round has no sample')
    labels = None
    if more:
      ((*labels,),) = more
      if len(labels) != len(samples):
        raise ValueError('a round has other labels than samples')
    return cls(
      tuple(_sample_from_state(part, estimator, orders) for part in samples),
      validation.check_positive_integer('repeats', repeats),
      None if labels is None else tuple(labels),
    )


def _sample_from_state(state: Any, estimator: str, orders: int) -> BoundOfMean:
  kind: Any = mean_bounds.Reported
  if 'failure_probability' not in state:
    kind = mean_bounds.ESTIMATORS[estimator]
  return kind.from_state(state, orders)


def totals(
  rounds: Iterable[RoundBounds],
  labels: Sequence[Optional[int]],
  orders: int,
  failure_probability: float,
  power: int,
) -> np.ndarray:
  """Returns what bounds of all rounds add up to, [labels, orders].

  A unit with a label loses what its own group does in the rounds of that group,
  and in rounds without labels the most of any group. All of it is true of the
  unit if the bounds of its own groups hold, one a round and order: those of
  groups that it is not in may fail. (Which rounds are its own is known without
  looking at the data.)

  Args:
    rounds: All rounds.
    labels: All labels that occur; None alone, if there are none.
    orders: How many orders.
    failure_probability: δ′ of each bound.
    power: T, of which the costs are multiples; 1 for 'product'.
  """
  total = np.zeros((len(labels), orders))
  places = {label: place for place, label in enumerate(labels)}
  for part in rounds:
    share = part.repeats / power
    if part.labels is None:
      total += part.log_upper_bound(failure_probability) * share
    else:
      own = [places[label] for label in part.labels]
      total[own] += part.log_upper_bounds(failure_probability) * share
  return total
