"""Many rounds composed at once: fast, and in little memory."""

import collections
from collections.abc import Iterator, Sequence
from typing import Optional

import dp_accounting

from tf_bdp.accounting import progress

# Units whose costs are computed together.
_MOST_UNITS_AT_ONCE = 2**14


def compose(
  rounds: Sequence[dp_accounting.DpEvent],
  accountants: Sequence[Optional[dp_accounting.PrivacyAccountant]],
) -> None:
  """Composes rounds with some accountants; None stands for no accountant."""
  total = len({id(event) for event in rounds})
  with progress.bar('Accounting', total, 'round') as bar:
    for chunk in chunks(rounds):
      for accountant in accountants:
        if accountant is not None:
          accountant.compose(chunk)
      bar.update(len(chunk.events))


def chunks(
  rounds: Sequence[dp_accounting.DpEvent],
) -> Iterator[dp_accounting.ComposedDpEvent]:
  """Yields the rounds as composed events, those of one object as one round."""
  distinct = {id(event): event for event in rounds}
  counts = collections.Counter(map(id, rounds))
  chunk: list[dp_accounting.DpEvent] = []
  units = 0
  for key, event in distinct.items():
    chunk.append(dp_accounting.SelfComposedDpEvent(event, counts[key]))
    units += _size(event)
    if units >= _MOST_UNITS_AT_ONCE:
      yield dp_accounting.ComposedDpEvent(chunk)
      chunk, units = [], 0
  if chunk:
    yield dp_accounting.ComposedDpEvent(chunk)


def _size(event: dp_accounting.DpEvent) -> int:
  """Returns how many units an event measured, at least one."""
  groups = getattr(event, 'groups', ())
  return max(1, sum(group.squared_distances.size for group in groups))
