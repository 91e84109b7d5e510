"""Log-moments of many units at once, from chords that lie above the function.

ℓ(λ; r², q) is the logarithm of a mixture of exponentials of r², hence convex in
r², and so is the maximum of two of them: the straight line between two exact
values is an upper bound in between. The table places its nodes so that the
bound is nowhere more than 1e-6 above the exact value, relative to it. It is
made once for each q and then answers at the price of a linear interpolation.
"""

import functools

import numpy as np

from tf_bdp.accounting import sampled_gaussian

# A little less than the promised 1e-6; rounding takes the rest.
_LARGEST_RELATIVE_GAP = 9e-7
# Above the rounding of exact values, so that no chord ends below the truth.
_ROUND_UP = 1 + 1e-11
# Segment s holds the distances in [16^s, 16^(s+1)); it is made when first used
# and does not depend on what was asked before, so results are reproducible.
_LOG2_SEGMENT = 4
_MOST_PARTS = 64
# Below this many units, exact evaluation is as cheap.
_FEWEST_UNITS = 512
# Above this, only exact evaluation.
_LARGEST_SQUARED_DISTANCE = 1e100


def log_moments_upper_bound(
  squared_distances: np.ndarray,
  participation_probability: float,
  orders: tuple[int, ...],
  direction: str,
) -> np.ndarray:
  """Returns the log-moments, or up to 1e-6 more where there are many units."""
  if (
    squared_distances.size < _FEWEST_UNITS
    or np.max(squared_distances) > _LARGEST_SQUARED_DISTANCE
  ):
    return sampled_gaussian.log_moments(
      squared_distances, participation_probability, orders, direction
    )
  table = _table(participation_probability, orders, direction)
  return table.evaluate(squared_distances)


class ChordTable:
  """Upper bounds of ℓ(λ; r², q) for one q, by interpolation."""

  def __init__(self, q: float, orders: tuple[int, ...], direction: str):
    self._q = q
    self._orders = orders
    self._direction = direction
    self._segments = range(0)
    self._nodes = [np.zeros(1) for _ in orders]
    self._values = [np.zeros(1) for _ in orders]
    self._last = (np.zeros(0), np.zeros((0, len(orders))))

  def evaluate(self, squared_distances: np.ndarray) -> np.ndarray:
    """Returns the bounds as an array [units, orders], not to be changed.

    The last answer is kept, for the next accountant of the same rounds.
    """
    if np.array_equal(squared_distances, self._last[0]):
      return self._last[1]
    ascending = np.argsort(squared_distances, kind='stable')
    distances = squared_distances[ascending]
    positive = distances[np.searchsorted(distances, 0.0, side='right') :]
    if positive.size:
      self._cover(positive[0], positive[-1])
    columns = np.empty((len(self._orders), distances.size))
    for column, nodes, values in zip(columns, self._nodes, self._values):
      column[:] = np.interp(distances, nodes, values)
    result = np.empty((distances.size, len(self._orders)))
    result[ascending] = columns.T
    result.flags.writeable = False
    self._last = (squared_distances.copy(), result)
    return result

  def _cover(self, smallest: float, largest: float) -> None:
    """Extends the table to all segments between two positive distances."""
    first, last = (
      int(np.floor(np.log2(distance) / _LOG2_SEGMENT))
      for distance in (smallest, largest)
    )
    if self._segments:
      first = min(first, self._segments[0])
      last = max(last, self._segments[-1])
    segments = range(first, last + 1)
    if segments == self._segments:
      return
    for column in range(len(self._orders)):
      self._extend(column, segments)
    self._segments = segments

  def _extend(self, column: int, segments: range) -> None:
    """Replaces one order's nodes by those of `segments`."""
    known = self._segments
    before = [s for s in segments if not known or s < known[0]]
    after = [s for s in segments if known and s > known[-1]]
    pieces = (
      [(self._nodes[column][1:], self._values[column][1:])] if known else []
    )
    pieces = [self._segment(column, s) for s in before] + pieces
    pieces += [self._segment(column, s) for s in after]
    nodes, values = (np.concatenate(parts) for parts in zip(*pieces))
    # Neighbouring segments share a node.
    nodes, index = np.unique(nodes, return_index=True)
    self._nodes[column] = np.concatenate([[0.0], nodes])
    self._values[column] = np.concatenate([[0.0], values[index]])

  def _segment(
    self, column: int, segment: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes of one segment, dense enough, and the exact values there.

    Halving the distance of the nodes makes the gap about four times smaller.
    """
    nodes = 2.0 ** (_LOG2_SEGMENT * (segment + np.linspace(0.0, 1.0, 9)))
    values = self._exact(column, nodes)
    while True:
      # Zero only where ℓ underflows as a whole.
      smallest = np.maximum(values[:-1], np.finfo(float).tiny)
      excess = self._largest_gaps(column, nodes, values) / smallest
      excess /= _LARGEST_RELATIVE_GAP
      if np.all(excess <= 1):
        # A border's value must not depend on the segment that it is made for:
        # the last bit of exact values depends on what is evaluated with them.
        values[0] = self._exact(column, nodes[:1])[0]
        values[-1] = self._exact(column, nodes[-1:])[0]
        return nodes, values * _ROUND_UP
      parts = np.ceil(np.sqrt(np.clip(excess, 1, _MOST_PARTS**2))).astype(int)
      left = np.repeat(nodes[:-1], parts)
      step = np.repeat(np.diff(nodes) / parts, parts)
      index = np.arange(left.size) - np.repeat(np.cumsum(parts) - parts, parts)
      nodes = np.append(left + index * step, nodes[-1])
      values = self._exact(column, nodes)

  def _largest_gaps(
    self, column: int, nodes: np.ndarray, values: np.ndarray
  ) -> np.ndarray:
    """Bounds how far each chord rises above the function between its nodes.

    The gap is concave and zero at both nodes. Given its values at the three
    quarter points, in every quarter it lies below the lines through two
    neighbouring points, drawn on into it: two such lines in the inner quarters,
    which cross there, and one in the outer quarters.
    """
    width = np.diff(nodes)
    places = np.array([0.25, 0.5, 0.75])[:, np.newaxis]
    inside = nodes[:-1] + places * width
    chords = values[:-1] + places * np.diff(values)
    exact = self._exact(column, inside.ravel()).reshape(inside.shape)
    first, middle, third = np.maximum(chords - exact, 0.0)

    def crossing(near: np.ndarray, far: np.ndarray) -> np.ndarray:
      rise, fall = 4 * near, 4 * (middle - far)
      total = np.maximum(rise + fall, np.finfo(float).tiny)
      return np.maximum(middle, rise * (middle + fall / 2) / total)

    inner = np.maximum(crossing(first, third), crossing(third, first))
    outer = 2 * np.maximum(first, third) - middle
    # Nor is it ever more than twice what it is in the middle.
    return np.minimum(np.maximum(inner, outer), 2 * middle)

  def _exact(self, column: int, distances: np.ndarray) -> np.ndarray:
    order = self._orders[column : column + 1]
    values = sampled_gaussian.log_moments(
      distances, self._q, order, self._direction
    )
    return values[:, 0]


@functools.lru_cache(maxsize=16)
def _table(q: float, orders: tuple[int, ...], direction: str) -> ChordTable:
  return ChordTable(q, orders, direction)


def clear_cache() -> None:
  """Forgets all tables, for measurements and for memory."""
  _table.cache_clear()
