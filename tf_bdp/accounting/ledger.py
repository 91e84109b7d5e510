"""What took place, round by round, as differential privacy sees it."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Optional, Union

import dp_accounting

from tf_bdp import validation
from tf_bdp.accounting import events


class Entry(NamedTuple):
  """Rounds of a sampled Gaussian mechanism, at the worst distance.

  Attributes:
    squared_distance: The worst-case r²; infinite if there is none.
    participation_probability: q.
    estimated: Whether sampled units stand for a smaller cost than this.
    repeats: How many such rounds in a row.
    inclusion_probability: As of `BayesianGaussianEvent`.
  """

  squared_distance: float
  participation_probability: float
  estimated: bool
  repeats: int
  inclusion_probability: float = 1.0


# Events of which the cost is below that of the worst case.
Estimated = Union[
  events.BayesianGaussianEvent, events.ParallelEvent, events.ReportedCostEvent
]
_ESTIMATED = (
  events.BayesianGaussianEvent,
  events.ParallelEvent,
  events.ReportedCostEvent,
)


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
    worst = event.worst_case_squared_distance
    worst = math.inf if worst is None else worst
    yield (
      event,
      Entry(
        worst,
        event.participation_probability,
        True,
        count,
        event.inclusion_probability,
      ),
    )
  elif isinstance(event, dp_accounting.NonPrivateDpEvent):
    yield None, Entry(math.inf, 1.0, False, count)
  elif isinstance(event, dp_accounting.PoissonSampledDpEvent):
    q = validation.check_probability(
      'sampling_probability', event.sampling_probability
    )
    yield None, Entry(_squared_distance(event.event), q, False, count)
  else:
    yield None, Entry(_squared_distance(event), 1.0, False, count)


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
  """
  builder = dp_accounting.DpEventBuilder()
  for entry in entries:
    builder.compose(_dp_event_of(entry), entry.repeats)
  return builder.build()


def _dp_event_of(entry: Entry) -> dp_accounting.DpEvent:
  if entry.participation_probability == 0 or entry.squared_distance == 0:
    return dp_accounting.NoOpDpEvent()
  if math.isinf(entry.squared_distance):
    return dp_accounting.NonPrivateDpEvent()
  event = dp_accounting.GaussianDpEvent(1 / math.sqrt(entry.squared_distance))
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
  """Returns plain data from which `from_state` makes equal entries."""
  return [
    [None if math.isinf(squared_distance) else squared_distance, *rest]
    for squared_distance, *rest in entries
  ]


def from_state(state: list[list[Any]]) -> tuple[Entry, ...]:
  """Restores what `to_state` returned; raises ValueError if it is not that."""
  entries = []
  for squared_distance, q, estimated, repeats, inclusion in state:
    if squared_distance is None:
      squared_distance = math.inf
    else:
      validation.check_squared_distances('r²', squared_distance)
    if not isinstance(estimated, bool):
      raise ValueError('an entry of the ledger is not one')
    validation.check_probability('participation_probability', q)
    validation.check_probability('inclusion_probability', inclusion)
    validation.check_positive_integer('repeats', repeats)
    entries.append(Entry(squared_distance, q, estimated, repeats, inclusion))
  return tuple(entries)
