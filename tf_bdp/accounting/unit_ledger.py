"""What every unit of a panel went through, round by round, in little memory.

Rounds that a unit surely takes part in are one Gaussian mechanism: their r² add
up. Of all other rounds it is counted how many were of each kind, a kind being a
distance r with the probabilities q and a. As long as there are few kinds they
are kept as they are; if there are many, distances are rounded up to powers of
`LEVEL_RATIO`, so that the counts do not grow with the number of rounds.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse

from tf_bdp import validation
from tf_bdp.accounting import loss_distribution, privacy_profiles

LEVEL_RATIO = 1.01
_MOST_EXACT_LEVELS = 256
# Rounds that wait for being counted together, which is faster.
_MOST_PENDING = 64


class _Rounds(NamedTuple):
  """Rounds of one event: of each unit a row [r, q, a], and how often."""

  units: np.ndarray
  kinds: np.ndarray
  repeats: np.ndarray


@dataclasses.dataclass(frozen=True)
class UnitLedger:
  """The rounds of a panel's units. Adding rounds makes a new ledger.

  Attributes:
    squared_mu: Σ_t r_t² of every unit over the rounds of sure participation.
    kinds: Rows [r, q, a] of all other rounds, each once.
    counts: How many of each kind every unit had, [units, kinds].
    exact: Whether no distance was rounded.
  """

  squared_mu: np.ndarray
  kinds: np.ndarray
  counts: sparse.csr_matrix
  exact: bool = True
  _pending: tuple[_Rounds, ...] = ()

  @classmethod
  def empty(cls, units: int) -> 'UnitLedger':
    """Returns the ledger of units that had no round."""
    counts = sparse.csr_matrix((units, 0))
    return cls(np.zeros(units), np.zeros((0, 3)), counts)

  @property
  def units(self) -> int:
    """The number of units."""
    return self.squared_mu.size

  def added(
    self,
    squared_distances: npt.ArrayLike,
    participation_probabilities: npt.ArrayLike,
    inclusion_probabilities: npt.ArrayLike,
    repeats: npt.ArrayLike,
  ) -> 'UnitLedger':
    """Returns the ledger with some more rounds.

    Args:
      squared_distances: r², of every unit or one for all.
      participation_probabilities: q, likewise.
      inclusion_probabilities: a, likewise.
      repeats: How many such rounds there were, likewise.
    """
    squared, q, a, counts = (
      np.broadcast_to(values, self.units)
      for values in (
        squared_distances,
        participation_probabilities,
        inclusion_probabilities,
        repeats,
      )
    )
    sure = (q == 1) & (a == 1)
    squared_mu = self.squared_mu + np.where(sure, counts * squared, 0.0)
    units = np.flatnonzero(
      ~sure & (squared > 0) & (q > 0) & (a > 0) & (counts > 0)
    )
    ledger = dataclasses.replace(self, squared_mu=squared_mu)
    if not units.size:
      return ledger
    distances = np.maximum(
      np.sqrt(squared), loss_distribution.SMALLEST_DISTANCE
    )
    kinds = np.stack([distances, q, a], axis=1)[units]
    pending = (*self._pending, _Rounds(units, kinds, counts[units]))
    ledger = dataclasses.replace(ledger, _pending=pending)
    return ledger.counted() if len(pending) >= _MOST_PENDING else ledger

  def counted(self) -> 'UnitLedger':
    """Returns the same ledger with nothing left to be counted."""
    if not self._pending:
      return self
    kinds, exact = self.kinds, self.exact
    new = np.concatenate([rounds.kinds for rounds in self._pending])
    if exact:
      together = np.unique(np.concatenate([kinds, new]), axis=0)
      exact = len(together) <= _MOST_EXACT_LEVELS
      kinds = kinds if exact else _rounded_up(kinds)
    new = new if exact else _rounded_up(new)
    together, column = np.unique(
      np.concatenate([kinds, new]), axis=0, return_inverse=True
    )
    column = column.ravel()  # One numpy release gives it another axis.
    before = self.counts.tocoo()
    rows = [before.row, *(rounds.units for rounds in self._pending)]
    columns = [column[before.col], column[len(kinds) :]]
    counts = [before.data] + [
      rounds.repeats.astype(np.float64) for rounds in self._pending
    ]
    entries = (
      np.concatenate(counts),
      (np.concatenate(rows), np.concatenate(columns)),
    )
    shape = (self.units, len(together))
    return UnitLedger(
      self.squared_mu, together, sparse.csr_matrix(entries, shape), exact
    )

  def profiles(
    self,
    resolution: privacy_profiles.Resolution = privacy_profiles.OF_MANY,
    least_epsilon: float = 0.0,
    mixed: Sequence[tuple[loss_distribution.MixedLevel, npt.ArrayLike]] = (),
  ) -> privacy_profiles.Profiles:
    """Returns δ_x(ε) of every unit; see `privacy_profiles.compose`.

    Args:
      resolution: How finely.
      least_epsilon: Up to which ε profiles must be known at least.
      mixed: Rounds whose distances were drawn, in addition, and how many of
        them every unit had, or one number for all.
    """
    ledger = self.counted()
    levels: list[loss_distribution.AnyLevel] = [
      *(loss_distribution.Level(*map(float, k)) for k in ledger.kinds),
      *(level for level, _ in mixed),
    ]
    counts = ledger.counts
    for _, repeats in mixed:
      column = np.broadcast_to(repeats, self.units).astype(np.float64)
      counts = sparse.hstack([counts, column[:, np.newaxis]], format='csr')
    return privacy_profiles.compose(
      ledger.squared_mu, levels, counts, resolution, least_epsilon
    )

  def to_state(self) -> dict[str, Any]:
    """Returns plain data from which `from_state` makes an equal ledger."""
    ledger = self.counted()
    counts = ledger.counts
    return {
      'squared_mu': ledger.squared_mu.tolist(),
      'kinds': ledger.kinds.tolist(),
      'counts': counts.data.tolist(),
      'columns': counts.indices.tolist(),
      'row_ends': counts.indptr[1:].tolist(),
      'exact': ledger.exact,
    }

  @classmethod
  def from_state(cls, state: dict[str, Any]) -> 'UnitLedger':
    """Restores what `to_state` returned; raises ValueError otherwise."""
    squared_mu = validation.check_squared_distances(
      'squared_mu', state['squared_mu']
    )
    kinds = validation.check_squared_distances(
      'kinds', np.reshape(state['kinds'], (-1, 3))
    )
    counts = np.asarray(state['counts'], dtype=np.float64)
    columns = _indices('columns', state['columns'], len(kinds) - 1)
    ends = _indices('row_ends', state['row_ends'], counts.size)
    starts = np.append(0, ends)
    if squared_mu.ndim != 1 or not isinstance(state['exact'], bool):
      raise ValueError('squared_mu or exact is not one')
    if np.any(kinds[:, 0] == 0) or np.any(
      (kinds[:, 1:] <= 0) | (kinds[:, 1:] > 1)
    ):
      raise ValueError('kinds are not rows [r, q, a] of rounds that cost')
    if (
      ends.shape != squared_mu.shape
      or columns.shape != counts.shape
      or counts.ndim != 1
      or np.any(np.diff(starts) < 0)
      or starts[-1] != counts.size
    ):
      raise ValueError('counts are not of these units and kinds')
    whole = np.isfinite(counts) & (counts == np.floor(counts))
    if not np.all(whole & (counts >= 1)):
      raise ValueError('counts must be positive integers')
    shape = (squared_mu.size, len(kinds))
    matrix = sparse.csr_matrix((counts, columns, starts), shape)
    return cls(squared_mu, kinds, matrix, state['exact'])


def _rounded_up(kinds: np.ndarray) -> np.ndarray:
  """Rounds distances up to the next power of `LEVEL_RATIO`."""
  distances = kinds[:, 0]
  power = np.ceil(np.log(distances) / math.log(LEVEL_RATIO))
  # The logarithm may have been rounded down.
  power += np.exp(power * math.log(LEVEL_RATIO)) < distances
  rounded = np.exp(power * math.log(LEVEL_RATIO))
  return np.column_stack([rounded, kinds[:, 1:]])


def _indices(name: str, values: Sequence[int], largest: int) -> np.ndarray:
  array = np.asarray(values)
  if array.size == 0:
    return np.zeros(0, dtype=np.int64)
  if array.dtype.kind != 'i' or np.any((array < 0) | (array > largest)):
    raise ValueError(f'{name} must be integers from 0 to {largest}')
  return array
