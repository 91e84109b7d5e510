"""Worst cases that are drawn: few pairs (probability, r²) in place of many.

A mean over a secret number n of clients has another worst case r(n)² for each
n, some of them next to impossible. Parts of such a mixture are merged upwards:
a probability may move to a larger r², never to a smaller one, and none is left
out. What is charged by the merged mixture is at least what the original costs.
"""

import functools

import numpy as np

from tf_bdp.accounting import events

# What is rarer than this in one round is told from nothing by no figure: it
# counts as the largest r², and as a sure loss where distributions are made.
NEGLIGIBLE = 1e-20

MOST_PARTS = 96
# How far apart parts are at most that are merged: this over the eighth root of
# their probability, in the logarithm of r. More, if there are too many parts.
_FINEST = 2e-4


@functools.lru_cache(maxsize=64)
def merged(mixture: events.Mixture) -> events.Mixture:
  """Returns a mixture of at most `MOST_PARTS` parts that costs no less.

  The likelier parts are, the nearer they must be to count as one. In order of
  r²; the probabilities add up to one but for rounding.

  >>> merged(((0.5, 1.0), (0.25, 4.0), (0.25, 1.0)))
  ((0.75, 1.0), (0.25, 4.0))
  """
  pairs = np.array(mixture)
  squared, place = np.unique(pairs[:, 1], return_inverse=True)
  # The largest come first, to which the others move.
  squared = squared[::-1]
  weights = np.bincount(place.ravel(), pairs[:, 0])[::-1]
  weights = weights / np.sum(weights)
  impossible = np.cumsum(weights) <= NEGLIGIBLE
  if np.any(weights[impossible]):
    rest = ~impossible
    squared = np.append(squared[0], squared[rest])
    weights = np.append(np.sum(weights[impossible]), weights[rest])
  squared, weights = squared[weights > 0], weights[weights > 0]
  width, parts = _FINEST, _merged(squared, weights, _FINEST)
  while len(parts) > MOST_PARTS:
    width *= 1.5
    parts = _merged(squared, weights, width)
  return tuple(reversed(parts))


def _merged(
  squared: np.ndarray, weights: np.ndarray, width: float
) -> list[tuple[float, float]]:
  """Merges neighbours, the largest of which comes first, into that one."""
  with np.errstate(divide='ignore'):
    logarithms = np.log(squared) / 2
  parts: list[tuple[float, float]] = []
  start = np.inf
  for r2, weight, logarithm in zip(
    squared.tolist(), weights.tolist(), logarithms.tolist()
  ):
    together = weight + (parts[-1][0] if parts else 0.0)
    if parts and (start - logarithm) * together**0.125 <= width:
      parts[-1] = (together, parts[-1][1])
    else:
      parts.append((weight, r2))
      start = logarithm
  return parts


def largest(mixture: events.Mixture) -> float:
  """Returns the largest r² that can be drawn."""
  return max(squared for probability, squared in mixture if probability > 0)
