"""What a round tells the accountant: the distances of its sampled units."""

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

import attr
import dp_accounting
import numpy as np
import numpy.typing as npt

from tf_bdp import validation
from tf_bdp.accounting import mean_bounds

# Norms that were clipped in float32 exceed the clip norm by rounding.
_ROUNDING = 1e-4


# Worst cases r² with their probabilities, where the worst case of a round is
# itself drawn: (probability, r²) pairs whose probabilities add up to one.
Mixture = tuple[tuple[float, float], ...]


def check_mixture(pairs: Iterable[Sequence[float]]) -> Mixture:
  """Returns the pairs as a `Mixture`; raises ValueError if they are not one."""
  array = np.array([tuple(pair) for pair in pairs], dtype=np.float64)
  if array.ndim != 2 or array.shape[1] != 2:
    raise ValueError('A mixture must be pairs of a probability and an r².')
  probabilities, squared_distances = array.T
  if not np.all((probabilities >= 0) & (probabilities <= 1)):
    raise ValueError('The probabilities of a mixture must be from 0 to 1.')
  validation.check_squared_distances('r² of a mixture', squared_distances)
  if not abs(math.fsum(probabilities) - 1) < 1e-9:
    raise ValueError('The probabilities of a mixture must add up to one.')
  return tuple(zip(probabilities.tolist(), squared_distances.tolist()))


def _convert_labels(labels: Iterable[int]) -> tuple[int, ...]:
  labels = tuple(labels)
  if not all(isinstance(label, numbers.Integral) for label in labels):
    raise ValueError("labels must be integers, such as clients' numbers.")
  return tuple(int(label) for label in labels)


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
    inclusion_probability: The chance a that the unit's group, such as its
      client, takes part at all, where that shows in the release even without
      the unit. By joint convexity E[(p/q)^(λ+1)] is then at most
      1 - a + a exp ℓ: less is gained than from being sampled unseen.
    worst_case_mixture: What differential privacy is charged instead of
      `worst_case_squared_distance`, which then is that of this round alone:
      the worst cases of all rounds that could have been, with their
      probabilities.
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
  inclusion_probability: float = attr.ib(default=1.0, converter=float)
  worst_case_mixture: Optional[Mixture] = attr.ib(
    default=None, converter=attr.converters.optional(check_mixture)
  )

  def __attrs_post_init__(self) -> None:
    for name in ('participation_probability', 'inclusion_probability'):
      validation.check_probability(name, getattr(self, name))
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

  @property
  def groups(self) -> tuple['BayesianGaussianEvent', ...]:
    """The event as the only one of a `ParallelEvent`."""
    return (self,)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ParallelEvent(dp_accounting.DpEvent):
  """One round of several groups of units, such as the data sets of clients.

  A unit is in one group only and loses what that group loses: for each order
  the accountant takes the largest cost (the paper's parallel accounting).

  Attributes:
    groups: The events of the groups. In a panel, the i-th is the same group in
      every round.
    labels: Which group each is, such as the client's number, if groups change
      from round to round: what a unit loses is then added up over the rounds of
      its own group. Without labels the largest cost of each round is added up.
    other_participation_probability: The largest q of units in groups that took
      part without being measured, for which the worst case must hold as well.
  """

  groups: tuple[BayesianGaussianEvent, ...] = attr.ib(
    converter=tuple,
    validator=attr.validators.deep_iterable(
      attr.validators.instance_of(BayesianGaussianEvent)
    ),
  )
  labels: Optional[tuple[int, ...]] = attr.ib(
    default=None, converter=attr.converters.optional(_convert_labels)
  )
  other_participation_probability: float = attr.ib(default=0.0, converter=float)

  def __attrs_post_init__(self) -> None:
    validation.check_probability(
      'other_participation_probability', self.other_participation_probability
    )
    if not self.groups:
      raise ValueError('groups must be at least one event. Found none.')
    if self.labels is not None and (
      len(set(self.labels)) != len(self.groups)
      or len(self.labels) != len(self.groups)
    ):
      raise ValueError('labels must be one for each group, all different.')
    if self.labels is not None and self.other_participation_probability:
      raise ValueError(
        'Labels tell who alone lost anything: with them, all groups that took '
        'part must be there, and other_participation_probability be 0. Found '
        f'{self.other_participation_probability}.'
      )
    if len({group.panel for group in self.groups}) > 1:
      raise ValueError('All groups must be panels, or none.')

  @property
  def panel(self) -> bool:
    """Whether every group is a panel."""
    return self.groups[0].panel

  @property
  def participation_probability(self) -> float:
    """The largest q of all groups."""
    return max(
      self.other_participation_probability,
      *(group.participation_probability for group in self.groups),
    )

  @property
  def inclusion_probability(self) -> float:
    """The largest chance of a group to take part."""
    return max(group.inclusion_probability for group in self.groups)

  @property
  def worst_case_squared_distance(self) -> Optional[float]:
    """The largest r² that any unit could have; None if a group has no limit."""
    worst = [group.worst_case_squared_distance for group in self.groups]
    known = [value for value in worst if value is not None]
    return max(known) if len(known) == len(worst) else None

  @property
  def worst_case_mixture(self) -> Optional[Mixture]:
    """That of all groups, or the largest r² of any if they differ."""
    mixtures = {group.worst_case_mixture for group in self.groups}
    if len(mixtures) == 1:
      return mixtures.pop()
    largest = self.worst_case_squared_distance
    if largest is None:  # A group without a limit may have no mixture either.
      return None
    for mixture in mixtures - {None}:
      largest = max(largest, *(r2 for p, r2 in mixture or () if p > 0))
    return ((1.0, largest),)


def _convert_costs(costs: Iterable[float]) -> tuple[float, ...]:
  result = tuple(float(cost) for cost in costs)
  if not all(0 <= cost < np.inf for cost in result):
    raise ValueError('costs must be finite and non-negative.')
  return result


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ReportedCostEvent(dp_accounting.DpEvent):
  """One round whose cost was bounded where the distances are.

  It is what a server composes that learns a sum or a maximum of costs, and no
  distances.

  Attributes:
    costs: For every order of the accountant an upper bound of log E[exp ℓ], or
      of (1/T) log E[exp T ℓ] for an accountant with total_rounds = T.
    failure_probability: δ′, the chance of each order's bound to fail.
    participation_probability: The largest q of any unit.
    worst_case_squared_distance: The largest r² that any unit could have.
    inclusion_probability: As of `BayesianGaussianEvent`, the largest.
    worst_case_mixture: As of `BayesianGaussianEvent`.
  """

  costs: tuple[float, ...] = attr.ib(
    converter=_convert_costs,
    repr=lambda costs: f'<{len(costs)} orders>',
  )
  failure_probability: float = attr.ib(converter=float)
  participation_probability: float = attr.ib(converter=float)
  worst_case_squared_distance: float = attr.ib(converter=float)
  inclusion_probability: float = attr.ib(default=1.0, converter=float)
  worst_case_mixture: Optional[Mixture] = attr.ib(
    default=None, converter=attr.converters.optional(check_mixture)
  )

  def __attrs_post_init__(self) -> None:
    validation.check_delta('failure_probability', self.failure_probability)
    for name in ('participation_probability', 'inclusion_probability'):
      validation.check_probability(name, getattr(self, name))
    validation.check_squared_distances(
      'worst_case_squared_distance', self.worst_case_squared_distance
    )


@attr.s(frozen=True, slots=True, auto_attribs=True)
class MixedGaussianEvent(dp_accounting.DpEvent):
  """One round of which only the worst case is known, and that is drawn.

  Such as a mean over a number n of others that is secret: given n the round is
  a sampled Gaussian mechanism of worst case r(n).

  Attributes:
    mixture: The worst cases r² with their probabilities.
    participation_probability: q.
  """

  mixture: Mixture = attr.ib(converter=check_mixture)
  participation_probability: float = attr.ib(converter=float)

  def __attrs_post_init__(self) -> None:
    validation.check_probability(
      'participation_probability', self.participation_probability
    )


class Reporting(NamedTuple):
  """How costs are bounded where the distances are.

  Attributes:
    orders: The orders λ of the server's accountant.
    estimator: 'student_t' or 'bernstein'.
    failure_probability: δ′ of each bound.
    power: T of composition by Hölder's inequality; 1 for the product.
  """

  orders: tuple[int, ...]
  estimator: str
  failure_probability: float
  power: int
