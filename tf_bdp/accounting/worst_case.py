"""What rounds cost at their worst case: the side of differential privacy.

Somebody who belongs to a group, such as an example to its client, loses in the
rounds of that group and in those that count for everybody. All is computed for
each group; the one that loses most counts.
"""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple, Optional

import numpy as np

from tf_bdp.accounting import (
  events,
  ledger,
  log_space,
  loss_distribution,
  privacy_profiles,
  sampled_gaussian,
  unit_ledger,
)

# Profiles of more groups than this are a little coarser.
_MOST_AT_FINE_RESOLUTION = 16


class Kind(NamedTuple):
  """Rounds that are alike.

  Attributes:
    worst_cases: The worst-case r² with their probabilities.
    participation_probability: q.
    inclusion_probability: a, as of `BayesianGaussianEvent`.
  """

  worst_cases: events.Mixture
  participation_probability: float
  inclusion_probability: float

  @property
  def is_drawn(self) -> bool:
    """Whether there are several worst cases, one of which is drawn."""
    return len(self.worst_cases) > 1

  @property
  def is_free(self) -> bool:
    """Whether such rounds cost nothing."""
    squared, q, a = self.worst_cases[-1][1], *self[1:]
    return squared == 0 or (squared < math.inf and q * a == 0)


# Rounds of a group: how many there were of each kind, in order.
Rounds = tuple[tuple[Kind, int], ...]
# Of each label; of None alone, if there are no labels.
RoundsByLabel = dict[Optional[int], Rounds]


def by_label(entries: Iterable[ledger.Entry]) -> RoundsByLabel:
  """Returns the rounds of each label, those that count for all included."""
  everybody: dict[Kind, int] = {}
  own: dict[Optional[int], dict[Kind, int]] = {}
  for entry in entries:
    if not entry.groups:
      _count(everybody, entry, entry.repeats)
    for label, part in entry.groups:
      _count(own.setdefault(label, {}), part, entry.repeats)
  result: RoundsByLabel = {}
  for owner, kinds in (own or {None: {}}).items():
    together = dict(everybody)
    for kind, count in kinds.items():
      together[kind] = together.get(kind, 0) + count
    result[owner] = tuple(sorted(together.items()))
  return result


def _count(kinds: dict[Kind, int], entry: ledger.Entry, repeats: int) -> None:
  kind = Kind(
    entry.worst_cases,
    entry.participation_probability,
    entry.inclusion_probability,
  )
  if not kind.is_free:
    kinds[kind] = kinds.get(kind, 0) + repeats


def costs(
  rounds_by_label: RoundsByLabel, orders: tuple[int, ...], direction: str
) -> dict[Optional[int], np.ndarray]:
  """Returns the log-moments of all rounds of each label, for every order."""
  return {
    label: sum(
      (count * cost(kind, orders, direction) for kind, count in rounds),
      np.zeros(len(orders)),
    )
    for label, rounds in rounds_by_label.items()
  }


@functools.lru_cache(maxsize=4096)
def cost(kind: Kind, orders: tuple[int, ...], direction: str) -> np.ndarray:
  """Returns the log-moment of one round, for every order.

  Of a worst case that is drawn, log Σ_n p_n exp ℓ(λ; r_n²): the moment of the
  draw and the result together, of which what is released is a function.
  """
  probabilities, squared = zip(*kind.worst_cases)
  if math.isinf(squared[-1]):
    return np.full(len(orders), math.inf)
  found = sampled_gaussian.log_moments(
    squared, kind.participation_probability, orders, direction
  )
  if kind.is_drawn:
    scale = log_space.log_scale(np.max(found, axis=0))
    with np.errstate(divide='ignore'):  # Where nothing moves the cost is 0.
      log_excess = np.log(probabilities @ log_space.scaled_excess(found, scale))
    found = log_space.log1p_exp(scale + log_excess)[np.newaxis]
  return log_space.included(found[0], kind.inclusion_probability)


def profiles(rounds_by_label: RoundsByLabel) -> privacy_profiles.Profiles:
  """Returns δ(ε) of differential privacy, one for each label that matters."""
  return _profiles(_undominated(rounds_by_label.values()))


def _undominated(groups: Iterable[Rounds]) -> tuple[Rounds, ...]:
  """Leaves out groups that lose no more than another, which saves time.

  One that had no more rounds, none of them with a larger r², q or a than any of
  the other's: divergences grow with each of the three. (For q and a by joint
  convexity, with what is released without the unit.)
  """
  distinct = sorted(set(groups))
  if len(distinct) == 1:
    return tuple(distinct)
  least: list[tuple[float, ...]] = []
  most: list[tuple[float, ...]] = []
  for rounds in distinct:
    count = sum(count for _, count in rounds)
    for ends, end, place in ((least, min, 0), (most, max, -1)):
      kinds = [(k[0][place][1], *k[1:]) for k, _ in rounds] or [(0.0,) * 3]
      ends.append((count, *map(end, zip(*kinds))))
  low, high = np.array(least), np.array(most)
  kept: list[int] = []
  for i in np.argsort(-np.sum(np.log(np.maximum(low, 1e-300)), axis=1)):
    if not np.any(np.all(high[i] <= low[kept], axis=1)):
      kept.append(int(i))
  return tuple(distinct[i] for i in sorted(kept))


@functools.lru_cache(maxsize=8)
def _profiles(groups: tuple[Rounds, ...]) -> privacy_profiles.Profiles:
  counts: dict[Kind, np.ndarray] = {}
  for place, rounds in enumerate(groups):
    for kind, count in rounds:
      counts.setdefault(kind, np.zeros(len(groups)))[place] = count
  units = unit_ledger.UnitLedger.empty(len(groups))
  mixed = []
  for kind, repeats in counts.items():
    (*_, (_, largest)), q, a = kind
    if math.isinf(largest):
      return privacy_profiles.UnboundedProfiles()
    if kind.is_drawn:
      mixed.append((loss_distribution.MixedLevel.of(*kind), repeats))
    else:
      units = units.added(largest, q, a, repeats)
  few = len(groups) <= _MOST_AT_FINE_RESOLUTION
  return units.profiles(
    privacy_profiles.OF_ONE if few else privacy_profiles.OF_MANY, mixed=mixed
  )
