"""The privacy loss of one unit in one round, as masses on a grid.

With P = (1-q) N(0, 1) + q N(r, 1) the round's result with the unit and
Q = N(0, 1) the one without it, the loss is log P/Q under P if the unit is to be
removed, and log Q/P under Q if it is to be added. Masses are moved to the grid
by connecting the dots (Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, 2022,
"Connect the Dots"): what lies between two points is shared between them so that
its mass under either distribution stays, which only raises the hockey-stick
divergence, and raises it the least.
"""

import math
from typing import NamedTuple, Union

import numpy as np
from scipy import special

from tf_bdp.accounting import events, mixtures

DIRECTIONS = ('remove', 'add')

# Of the normal distribution; 1.8e-33 lies beyond it on either side.
_FARTHEST = 12.0
_LARGEST_EXPONENT = 700.0
# Shorter distances count as this one: a million of them cost nothing.
SMALLEST_DISTANCE = 1e-7


class Level(NamedTuple):
  """A round as one unit sees it.

  Attributes:
    distance: r, how far the unit moves the result, over the noise's deviation.
    participation_probability: q.
    inclusion_probability: a, as of `BayesianGaussianEvent`.
  """

  distance: float
  participation_probability: float
  inclusion_probability: float

  @property
  def scale(self) -> float:
    """About the deviation of the loss: log E[P/Q] is close to its square."""
    q, a = self.participation_probability, self.inclusion_probability
    # Above this the square is r² - 2 log(1/q), to all digits.
    squared = min(self.distance**2, _LARGEST_EXPONENT)
    excess = self.distance**2 - squared
    return math.sqrt(math.log1p(a * q * q * math.expm1(squared)) + excess)

  @property
  def largest_loss(self) -> float:
    """The largest loss that is not left out as next to impossible."""
    r, q, _ = self
    return float(_loss(np.array([r + _FARTHEST]), r, q)[0])


class MixedLevel(NamedTuple):
  """A round whose distance is drawn, whether or not the unit takes part.

  Its losses are those of the parts, each with its probability: that is what
  somebody loses to an attacker who learns the draw n together with the result.
  The hockey-stick divergence of such pairs, Σ_n p_n D(P_n‖Q_n), is that of the
  mixture of privacy loss distributions, because the loss at (n, x) is the one
  of x given n. Who does not learn n sees a function of the pair and by joint
  convexity nothing more: D(Σ_n p_n P_n‖Σ_n p_n Q_n) is at most as large. The
  draws of rounds are independent, so that losses of rounds add up as ever.

  Attributes:
    parts: The levels with their probabilities.
    infinite_mass: The probability of all others, which count as sure losses.
  """

  parts: tuple[tuple[float, Level], ...]
  infinite_mass: float = 0.0

  @classmethod
  def of(cls, mixture: events.Mixture, q: float, a: float) -> 'MixedLevel':
    """Returns the round of a merged mixture of r², in order of r².

    A part that is next to impossible, for which the grid would have to be
    coarse or large, counts as a sure loss.
    """
    beyond = sum(p for p, _ in mixture[-1:] if p <= mixtures.NEGLIGIBLE)
    kept = mixture[:-1] if beyond else mixture
    return cls(
      tuple(
        (p, Level(max(math.sqrt(squared), SMALLEST_DISTANCE), q, a))
        for p, squared in kept
      ),
      beyond,
    )

  @property
  def scale(self) -> float:
    """About the deviation of the loss."""
    return math.sqrt(sum(p * level.scale**2 for p, level in self.parts))

  @property
  def largest_loss(self) -> float:
    """The largest loss that is not left out as next to impossible."""
    return max(level.largest_loss for _, level in self.parts)


AnyLevel = Union[Level, MixedLevel]


class LossDistribution(NamedTuple):
  """A loss that is (first + i) steps with probability `masses[i]`.

  Attributes:
    first: The place of the first mass, in steps.
    masses: They add up to one, together with the next.
    infinite_mass: The probability that the loss is infinite.
  """

  first: int
  masses: np.ndarray
  infinite_mass: float


def loss_distribution(
  level: AnyLevel, step: float, direction: str
) -> LossDistribution:
  """Returns the loss of one round, rounded so that no divergence falls.

  Args:
    level: The round.
    step: The distance of two grid points.
    direction: 'remove' or 'add'.
  """
  if isinstance(level, Level):
    return _of_level(level, step, direction)
  losses = [(p, _of_level(part, step, direction)) for p, part in level.parts]
  first = min(loss.first for _, loss in losses)
  last = max(loss.first + loss.masses.size for _, loss in losses)
  masses = np.zeros(last - first)
  infinite_mass = level.infinite_mass
  for p, loss in losses:
    start = loss.first - first
    masses[start : start + loss.masses.size] += p * loss.masses
    infinite_mass += p * loss.infinite_mass
  return LossDistribution(first, masses, infinite_mass)


def _of_level(level: Level, step: float, direction: str) -> LossDistribution:
  """Returns the loss of a round whose distance is known."""
  r, q, a = level
  sign = 1.0 if direction == 'remove' else -1.0
  ends = np.array([-_FARTHEST, _FARTHEST + (r if direction == 'remove' else 0)])
  losses = np.sort(sign * _loss(ends, r, q)) / step
  first = min(0, math.floor(losses[0]))
  last = max(1, math.ceil(losses[1]))
  edges = step * np.arange(first, last + 1)
  places = np.sort(_place(sign * edges, r, q))  # In order of x.
  near, far = _interval_masses(places), _interval_masses(places - r)
  with_unit = (1 - q) * near + q * far
  upper, lower = with_unit, near
  if direction == 'add':  # In order of the loss, which falls with x.
    upper, lower = near[::-1], with_unit[::-1]
  below, upper, beyond = upper[0], upper[1:-1], upper[-1]

  # a + b = p and a e^-l + b e^-(l + h) = q of the two ends of every interval.
  growth = np.exp(np.minimum(edges[:-1], _LARGEST_EXPONENT))
  to_right = (upper - lower[1:-1] * growth) / -math.expm1(-step)
  to_right = np.clip(to_right, 0.0, upper)
  masses = np.append(upper - to_right, 0.0)
  masses[1:] += to_right
  masses[0] += below
  masses *= a
  masses[-first] += 1 - a
  return LossDistribution(first, masses, a * float(beyond))


def _loss(x: np.ndarray, r: float, q: float) -> np.ndarray:
  """Returns log P(x)/Q(x)."""
  exponent = r * x - r * r / 2
  if q == 1:
    return exponent
  # The first keeps its accuracy where losses are tiny, the second does not
  # overflow.
  return np.where(
    exponent < 1,
    np.log1p(q * np.expm1(np.minimum(exponent, 1.0))),
    np.logaddexp(math.log1p(-q), math.log(q) + exponent),
  )


def _place(loss: np.ndarray, r: float, q: float) -> np.ndarray:
  """Returns the x with the given loss; -inf below all losses."""
  if q == 1:
    return loss / r + r / 2
  # (exp l - (1-q)) exp -l, written so that nothing cancels.
  shrunk = np.exp(-np.maximum(loss, math.log1p(-q) - 1))
  if q < 0.5:
    rest = q * shrunk - np.expm1(-np.maximum(loss, math.log1p(-q) - 1))
  else:
    rest = 1 - (1 - q) * shrunk
  with np.errstate(divide='ignore'):
    log_rest = np.log(np.maximum(rest, 0.0))
  return (loss + log_rest - math.log(q)) / r + r / 2


def _interval_masses(x: np.ndarray) -> np.ndarray:
  """Returns the normal masses below, between and above ascending points."""
  below, above = special.ndtr(x), special.ndtr(-x)
  between = np.where(x[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
  return np.concatenate([below[:1], between, above[-1:]])
