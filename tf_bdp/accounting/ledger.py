"""What took place, round by round, as differential privacy sees it."""

import collections
import math
import typing
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Optional, Union

import dp_accounting
import numpy as np

from tf_bdp import validation
from tf_bdp.accounting import events, mixtures


class Entry(NamedTuple):
  """Rounds of a sampled Gaussian mechanism, at the worst distance.

  Attributes:
    squared_distance: The largest r² that any unit could have in these rounds;
      infinite if there is none. It limits what is estimated.
    participation_probability: q.
    estimated: Whether sampled units stand for a smaller cost than this.
    repeats: How many such rounds in a row.
    inclusion_probability: As of `BayesianGaussianEvent`.
    mixture: What differential privacy is charged, where that is not
      `squared_distance`: worst cases r² that could have been drawn, few and in
      order. Realised ones may cost more, so it limits no estimate.
    groups: The labels of those who alone lose anything, such as the clients
      that took part, each with an entry of its own. Empty if these rounds count
      for everybody. The rest of the entry is at least that of each.
  """

  squared_distance: float
  participation_probability: float
  estimated: bool
  repeats: int
  inclusion_probability: float = 1.0
  mixture: events.Mixture = ()
  groups: tuple[tuple[int, 'Entry'], ...] = ()

  @property
  def worst_cases(self) -> events.Mixture:
    """What differential privacy is charged, as a mixture in any case."""
    return self.mixture or ((1.0, self.squared_distance),)

  @property
  def realised(self) -> 'Entry':
    """The same at the limit of what is estimated, if it is estimated."""
    if not self.estimated:
      return self
    groups = tuple((label, part.realised) for label, part in self.groups)
    return self._replace(mixture=(), groups=groups)


# Events of which the cost is below that of the worst case.
Estimated = Union[
  events.BayesianGaussianEvent, events.ParallelEvent, events.ReportedCostEvent
]
_ESTIMATED = typing.get_args(Estimated)  # `isinstance` takes no Union in 3.9.


class UnsupportedPartError(Exception):
  """Carries the part of an event that cannot be accounted for."""

  def __init__(self, event: dp_accounting.DpEvent, message: str):
    super().__init__(message)
    self.event = event


def rounds_of(
  event: dp_accounting.DpEvent, count: int = 1
) -> Iterator[tuple[Optional[Estimated], Entry]]:
  """Yields the rounds that an event is composed of.

  Args:
    event: Any `DpEvent`.
    count: How often it took place.

  Yields:
    Pairs of the Bayesian event, if it is one, and the entry for the ledger,
    which for a parallel event is at least that of each of its groups.

  Raises:
    UnsupportedPartError: A part of the event is of an unknown kind.
    ValueError: A part has parameters out of range.
  """
  if isinstance(event, dp_accounting.NoOpDpEvent):
    return
  if isinstance(event, dp_accounting.SelfComposedDpEvent):
    repeats = validation.check_positive_integer('count', event.count)
    yield from rounds_of(event.event, count * repeats)
  elif isinstance(event, dp_accounting.ComposedDpEvent):
    for part in event.events:
      yield from rounds_of(part, count)
  elif isinstance(event, _ESTIMATED):
    yield event, _estimated_entry(event, count)
  elif isinstance(event, events.MixedGaussianEvent):
    mixture = mixtures.merged(event.mixture)
    q = event.participation_probability
    if len(mixture) == 1:
      yield None, Entry(mixture[0][1], q, False, count)
    else:
      largest = mixtures.largest(mixture)
      yield None, Entry(largest, q, False, count, mixture=mixture)
  elif isinstance(event, dp_accounting.NonPrivateDpEvent):
    yield None, Entry(math.inf, 1.0, False, count)
  elif isinstance(event, dp_accounting.PoissonSampledDpEvent):
    q = validation.check_probability(
      'sampling_probability', event.sampling_probability
    )
    yield None, Entry(_squared_distance(event.event), q, False, count)
  else:
    yield None, Entry(_squared_distance(event), 1.0, False, count)


def _estimated_entry(event: Estimated, count: int) -> Entry:
  worst = event.worst_case_squared_distance
  mixture = event.worst_case_mixture
  groups: tuple[tuple[int, Entry], ...] = ()
  if isinstance(event, events.ParallelEvent) and event.labels is not None:
    parts = (_estimated_entry(group, 1) for group in event.groups)
    groups = tuple(zip(event.labels, parts))
  return Entry(
    math.inf if worst is None else worst,
    event.participation_probability,
    True,
    count,
    event.inclusion_probability,
    () if mixture is None else mixtures.merged(mixture),
    groups,
  )


def _squared_distance(event: dp_accounting.DpEvent) -> float:
  """Returns r² of Gaussian mechanisms that see the same sample of units."""
  if isinstance(event, dp_accounting.GaussianDpEvent):
    noise = validation.check_positive(
      'noise_multiplier', event.noise_multiplier
    )
    squared_distance = (1 / noise) * (1 / noise)
    validation.check_squared_distances(
      '1 / noise_multiplier²', squared_distance
    )
    return squared_distance
  if isinstance(event, dp_accounting.SelfComposedDpEvent):
    repeats = validation.check_positive_integer('count', event.count)
    return repeats * _squared_distance(event.event)
  if isinstance(event, dp_accounting.ComposedDpEvent):
    return sum(_squared_distance(part) for part in event.events)
  raise UnsupportedPartError(
    event, 'Only Gaussian mechanisms, Poisson-sampled or not, are supported'
  )


def to_dp_event(entries: Iterable[Entry]) -> dp_accounting.DpEvent:
  """Returns the entries as an event for any accountant of dp_accounting.

  It has no event for what an `inclusion_probability` gains: that is left out.
  Nor has it one for a worst case that is drawn: the largest counts. Nor for
  somebody who is in one of several groups: there are as many rounds as the
  group had that came most often, each at the largest r² and q of any.
  """
  builder = dp_accounting.DpEventBuilder()
  repeats: collections.Counter[int] = collections.Counter()
  largest = Entry(0.0, 0.0, True, 1)
  for entry in entries:
    if not entry.groups:
      builder.compose(_dp_event_of(entry), entry.repeats)
    for label, part in entry.groups:
      worst = mixtures.largest(part.worst_cases)
      if worst == 0 or part.participation_probability == 0:
        continue
      repeats[label] += entry.repeats
      largest = largest._replace(
        squared_distance=max(largest.squared_distance, worst),
        participation_probability=max(largest[1], part[1]),
      )
  if repeats:
    builder.compose(_dp_event_of(largest), max(repeats.values()))
  return builder.build()


def _dp_event_of(entry: Entry) -> dp_accounting.DpEvent:
  squared_distance = mixtures.largest(entry.worst_cases)
  if entry.participation_probability == 0 or squared_distance == 0:
    return dp_accounting.NoOpDpEvent()
  if math.isinf(squared_distance):
    return dp_accounting.NonPrivateDpEvent()
  event = dp_accounting.GaussianDpEvent(1 / math.sqrt(squared_distance))
  if entry.participation_probability == 1:
    return event
  return dp_accounting.PoissonSampledDpEvent(
    entry.participation_probability, event
  )


def appended(entries: tuple[Entry, ...], new: Entry) -> tuple[Entry, ...]:
  """Returns the entries with one more, merged into the last if it is alike."""
  if entries and entries[-1]._replace(repeats=new.repeats) == new:
    new = new._replace(repeats=entries[-1].repeats + new.repeats)
    entries = entries[:-1]
  return (*entries, new)


def to_state(entries: Iterable[Entry]) -> list[list[Any]]:
  """Returns plain data from which `from_state` makes equal entries.

  Mixture and groups are left out where there are neither.
  """
  result = []
  for squared_distance, *rest, mixture, groups in entries:
    known = None if math.isinf(squared_distance) else squared_distance
    more = [
      [list(pair) for pair in mixture],
      [[label, *to_state([part])] for label, part in groups],
    ]
    result.append([known, *rest, *(more if mixture or groups else [])])
  return result


def from_state(state: list[list[Any]]) -> tuple[Entry, ...]:
  """Restores what `to_state` returned; raises ValueError if it is not that."""
  return tuple(_entry_from_state(row) for row in state)


def _entry_from_state(row: list[Any]) -> Entry:
  squared_distance, q, estimated, repeats, inclusion, *more = row
  if squared_distance is None:
    squared_distance = math.inf
  else:
    validation.check_squared_distances('r²', squared_distance)
  if not (isinstance(estimated, bool) and np.ndim(squared_distance) == 0):
    raise ValueError('an entry of the ledger is not one')
  validation.check_probability('participation_probability', q)
  validation.check_probability('inclusion_probability', inclusion)
  validation.check_positive_integer('repeats', repeats)
  entry = Entry(squared_distance, q, estimated, repeats, inclusion)
  if not more:
    return entry
  mixture, groups = more
  parts = tuple((label, _entry_from_state(part)) for label, part in groups)
  labels = [label for label, _ in parts if type(label) is int]
  if len(set(labels)) < len(parts) or (parts and not estimated):
    raise ValueError('groups of an entry have no labels')
  for _, part in parts:
    if part.repeats != 1 or not part.estimated or part.groups:
      raise ValueError('groups of an entry are not of its rounds')
  if mixture:
    mixture = events.check_mixture(mixture)
    if sorted(mixture, key=lambda pair: pair[1]) != list(mixture):
      raise ValueError('a mixture is not in order')
  return entry._replace(mixture=tuple(mixture), groups=parts)
