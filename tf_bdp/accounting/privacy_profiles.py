"""Privacy profiles: δ_x(ε) of every unit x, for all of its rounds together.

δ_x(ε) is the hockey-stick divergence of order exp ε of all that is released
with and without x, in the worse of the two directions. Rounds that the unit
surely takes part in are one Gaussian mechanism with a closed form; others are
composed as sums of privacy losses, by one Fourier transform for each kind of
round and one matrix product for all units. Whatever is approximate is bounded
and added: a profile is nowhere below the truth.
"""

import abc
import math
from collections.abc import Iterator, Sequence
from typing import Callable, NamedTuple, Union

import numpy as np
from scipy import fft, optimize, signal, sparse, special

from tf_bdp.accounting import loss_distribution as loss_lib


class Resolution(NamedTuple):
  """How finely profiles are computed.

  Attributes:
    tolerance: How much of ε the grid of losses may cost, about.
    epsilon_ratio: δ_x is tabulated at 0 and at powers of this, the same for all
      data, so that where an estimate is taken does not depend on the sample.
    most_epsilons: How many powers.
  """

  tolerance: float
  epsilon_ratio: float
  most_epsilons: int


OF_MANY = Resolution(1e-4, 1.005, 2500)
OF_ONE = Resolution(5e-5, 1.0005, 25_000)

# Losses beyond the grid have at most this probability, which is added to δ.
_LOG_NEGLIGIBLE = math.log(1e-16)
# Profiles end where moments show that δ is below this.
_LOG_SMALLEST_DELTA = -690.0
# Orders of the moments that bound the tails: from this to that, over the
# deviation of the loss; from 1 on, where few rounds lose much more than others.
_LEAST_SCALED_ORDER, _LARGEST_SCALED_ORDER = 0.1, 60.0
_ORDERS = 32
_MOST_POINTS_FOR_MOMENTS = 2048
# In how many steps one round's loss is told at most.
_MOST_STEPS_OF_ROUND = 2**16
# Numbers kept at once: of spectra, and of the units' distributions.
_MOST_SPECTRUM = 2**25
_MOST_BLOCK = 2**21
_LARGEST_GRID = 2**20
_LARGEST_EXPONENT = 690.0
_NO_BOUND = 1e300
# Units whose squared deviations differ by less share a grid.
_LOG_GROUP = math.log(10.0)
# Where ε is looked for in a profile; about the z of δ_x(ε) = 1e-6.
_TYPICAL_DEVIATIONS = 5.0

# Of deviations; beyond, ε is above 5,000 and of no use to anyone.
_LARGEST_SCALE = 100.0
_ROUND_UP = 1 + 1e-9
# Below this, shares of δ are not told apart.
NEGLIGIBLE_DELTA = 1e-20
_TINY = 1e-300


def gaussian_delta(
  mu: np.ndarray, epsilon: Union[float, np.ndarray]
) -> np.ndarray:
  """Returns Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ), for μ >= 0 and ε >= 0.

  The exact divergence of Gaussian mechanisms (Balle and Wang 2018, Theorem 8)
  with μ² = Σ_t r_t². With Mills' ratio, so that it keeps its relative accuracy
  where both terms are nearly the same or underflow.

  >>> gaussian_delta(np.array([0.0, 1.0]), 1.0).round(4).tolist()
  [0.0, 0.1269]
  """
  # Beyond 1000 deviations, or below 1e-150, nothing changes in float64.
  near = np.clip(epsilon / np.maximum(mu, 1e-150) - mu / 2, -1e3, 1e3)
  far = near + mu
  density = np.exp(-(near**2) / 2) / 2
  mills = special.erfcx(np.maximum(near, 0.0) / math.sqrt(2))
  rest = density * special.erfcx(far / math.sqrt(2))
  upper = np.where(near > 0, density * mills, special.ndtr(-near))
  # Both terms are right to a few units in the last place; err upwards.
  delta = upper * (1 + 1e-15) - rest * (1 - 1e-15)
  return np.where(mu > 0, np.clip(delta, 0.0, 1.0), 0.0)


class Shares(NamedTuple):
  """What units have of the worst case, at one ε.

  Attributes:
    shares: δ_x over δ_worst for every unit x, from 0 to 1.
    largest_delta: δ_worst.
  """

  shares: np.ndarray
  largest_delta: float


class Profiles(abc.ABC):
  """δ_x(ε) of some units.

  Attributes:
    units: How many.
    largest_epsilon: Up to which ε the profiles are known.
  """

  units: int
  largest_epsilon: float

  @abc.abstractmethod
  def deltas(self, epsilon: Union[float, np.ndarray]) -> np.ndarray:
    """Returns δ_x(ε) of every unit, at one ε or at one for each."""

  @abc.abstractmethod
  def shares(self, worst: 'Profiles') -> Callable[[float], 'Shares']:
    """Returns the shares in δ_worst(ε) as functions of ε that do not grow.

    Args:
      worst: The worst case; of several units, the one who loses most counts.
    """

  def individual_epsilons(self, delta: float) -> np.ndarray:
    """Returns the smallest ε with δ_x(ε) <= δ for every unit."""
    low = np.zeros(self.units)
    high = np.full(self.units, self.largest_epsilon)
    unknown = self.deltas(self.largest_epsilon) > delta
    none = self.deltas(0.0) <= delta
    for _ in range(50):
      middle = (low + high) / 2
      enough = self.deltas(middle) <= delta
      high = np.where(enough, middle, high)
      low = np.where(enough, low, middle)
    return np.where(none, 0.0, np.where(unknown, math.inf, high))


def smallest_epsilon(
  statistic: Callable[[float], float], delta: float, largest: float
) -> float:
  """Returns the smallest ε with statistic(ε) <= δ, or a trifle more.

  Args:
    statistic: A function of ε that does not grow.
    delta: δ.
    largest: The largest ε to look at.

  Returns:
    ε; infinite if it is more than `largest`.
  """
  if statistic(0.0) <= delta:
    return 0.0
  if statistic(largest) > delta:
    return math.inf
  if delta == 0:
    return largest
  log_delta = math.log(delta)

  def gap(epsilon: float) -> float:
    return math.log(max(statistic(epsilon), 1e-320)) - log_delta

  epsilon = float(
    optimize.brentq(gap, 0.0, largest, xtol=1e-12 * largest, rtol=1e-9)
  )
  while statistic(epsilon) > delta:  # Err on the safe side of the root.
    epsilon *= _ROUND_UP
  return epsilon


class GaussianProfiles(Profiles):
  """Of units that surely take part in every round."""

  def __init__(self, squared_mu: np.ndarray):
    """Takes μ² = Σ_t r_t² of every unit."""
    self.units = squared_mu.size
    self._mu = np.sqrt(squared_mu)
    largest = float(np.max(self._mu, initial=0.0))
    # Beyond this δ is zero in float64.
    self.largest_epsilon = largest * (largest / 2 + 40)

  def deltas(self, epsilon: Union[float, np.ndarray]) -> np.ndarray:
    """Returns δ_x(ε) of every unit, at one ε or at one for each."""
    return gaussian_delta(self._mu, epsilon)

  def shares(self, worst: Profiles) -> Callable[[float], Shares]:
    """Returns the shares in δ_worst(ε) as functions of ε that do not grow.

    They fall if the worst case is Gaussian as well: the logarithm has the
    derivative 1/(R_worst - 1) - 1/(R_x - 1), where R, which is
    Φ(μ/2 - ε/μ) / e^ε Φ(-μ/2 - ε/μ), grows with μ because the normal hazard
    rate over its argument falls. Of other worst cases that is not known, and
    they are made to fall.
    """
    if isinstance(worst, TabulatedProfiles):
      end = worst.largest_epsilon
      epsilons = _epsilons(end, end, OF_MANY)
      table = np.stack([self.deltas(e) for e in epsilons], axis=1)
      return TabulatedProfiles(epsilons, table).shares(worst)

    def at(epsilon: float) -> Shares:
      largest = float(np.max(worst.deltas(epsilon)))
      deltas = self.deltas(epsilon)
      return Shares(np.minimum(deltas / max(largest, _TINY), 1.0), largest)

    return at


class UnboundedProfiles(Profiles):
  """Of units whose distances nothing limits, or too far away: δ = 1."""

  def __init__(self, units: int = 1):
    """Takes the number of units."""
    self.units = units
    self.largest_epsilon = 0.0

  def deltas(self, epsilon: Union[float, np.ndarray]) -> np.ndarray:
    """Returns δ_x(ε) of every unit, at one ε or at one for each."""
    return np.ones(self.units)

  def shares(self, worst: Profiles) -> Callable[[float], Shares]:
    """Returns the shares in δ_worst(ε) as functions of ε that do not grow."""
    return lambda e: Shares(np.ones(self.units), float(np.max(worst.deltas(e))))


class TabulatedProfiles(Profiles):
  """Of any units, from values at some ε.

  δ_x is convex in exp ε, so a chord between two values lies above it.
  """

  def __init__(self, epsilons: np.ndarray, table: np.ndarray):
    """Takes the values, an array [units, epsilons]."""
    self.units = len(table)
    self.largest_epsilon = float(epsilons[-1])
    self._epsilons = epsilons
    self._table = table

  def deltas(self, epsilon: Union[float, np.ndarray]) -> np.ndarray:
    """Returns δ_x(ε) of every unit, at one ε or at one for each."""
    if np.ndim(epsilon) == 0 and np.isinf(epsilon):
      return np.zeros(self.units)
    left = np.searchsorted(self._epsilons, epsilon, side='right') - 1
    left = np.minimum(left, self._epsilons.size - 2)
    start, end = self._epsilons[left], self._epsilons[left + 1]
    # As shares of exp(end), which may be more than a float holds.
    place = np.expm1(np.minimum(epsilon, end) - start)
    weight = place / np.expm1(np.minimum(end - start, 700.0))
    rows = np.arange(self.units)
    return (1 - weight) * self._table[rows, left] + weight * self._table[
      rows, left + 1
    ]

  def shares(self, worst: Profiles) -> Callable[[float], Shares]:
    """Returns the shares in δ_worst(ε) as functions of ε that do not grow.

    Both are those at the nearest tabulated ε below, and no share is less than
    at any tabulated ε above, as far as the worst case is not negligible. There,
    a share is that of two truncation errors; it counts as one.
    """
    largest = np.array([np.max(worst.deltas(e)) for e in self._epsilons])
    known = np.count_nonzero(largest >= NEGLIGIBLE_DELTA)
    table = np.minimum(self._table[:, :known] / largest[:known], 1.0)
    table = np.maximum.accumulate(table[:, ::-1], axis=1)[:, ::-1]

    def at(epsilon: float) -> Shares:
      left = np.searchsorted(self._epsilons, epsilon, side='right') - 1
      if left >= known:
        return Shares(np.ones(self.units), NEGLIGIBLE_DELTA)
      return Shares(table[:, left], float(largest[left]))

    return at


def compose(
  squared_mu: np.ndarray,
  levels: Sequence[loss_lib.AnyLevel],
  counts: sparse.csr_matrix,
  resolution: Resolution = OF_MANY,
  least_epsilon: float = 0.0,
) -> Profiles:
  """Returns the profiles of units after all of their rounds.

  Args:
    squared_mu: Σ_t r_t² of every unit, over the rounds that it surely takes
      part in.
    levels: The kinds of the other rounds.
    counts: How many rounds of each kind every unit had, [units, levels].
    resolution: How finely.
    least_epsilon: Up to which ε profiles must be known at least.
  """
  if not len(levels) or not counts.nnz:
    return GaussianProfiles(squared_mu)
  levels, counts = _with_gaussians(squared_mu, levels, counts)
  first, same = _distinct_rows(counts)
  counts = counts[first]
  scales = np.array([level.scale for level in levels])
  squared_scales = counts @ scales**2
  # As many equal rounds would have the same loss; those that cost nothing
  # next to others do not count.
  rounds = (counts @ scales) ** 2 / np.maximum(squared_scales, _TINY)
  groups = np.ceil(np.log(np.maximum(squared_scales, _TINY)) / _LOG_GROUP)
  groups[squared_scales == 0] = -np.inf
  groups[squared_scales > _LARGEST_SCALE**2] = np.inf

  parts = []
  for group in np.unique(groups[np.isfinite(groups)]):
    units = np.flatnonzero(groups == group)
    chosen = counts[units]
    used = np.flatnonzero(np.asarray(chosen.sum(axis=0)).ravel())
    part = _Composition(
      [levels[i] for i in used],
      chosen[:, used],
      math.exp(group * _LOG_GROUP / 2),
      max(1.0, float(np.max(rounds[units]))),
      resolution.tolerance,
    )
    parts.append((units, part))
  if not parts:
    return UnboundedProfiles(squared_mu.size)
  ends = [part.largest_epsilon for _, part in parts]
  largest = max(*ends, least_epsilon)
  epsilons = _epsilons(min(ends), largest, resolution)
  table = np.zeros((counts.shape[0], epsilons.size))
  table[np.isposinf(groups)] = 1.0
  for units, part in parts:
    for block, deltas in part.deltas(epsilons):
      table[units[block]] = deltas
  return TabulatedProfiles(epsilons, table[same])


def _with_gaussians(
  squared_mu: np.ndarray,
  levels: Sequence[loss_lib.AnyLevel],
  counts: sparse.csr_matrix,
) -> tuple[list[loss_lib.AnyLevel], sparse.csr_matrix]:
  """Makes the rounds of sure participation one more round of every unit."""
  distances, column = np.unique(np.sqrt(squared_mu), return_inverse=True)
  ones = (np.ones(column.size), (np.arange(column.size), column))
  gaussians = sparse.csr_matrix(ones, (column.size, distances.size))
  some = distances > 0
  extra = [loss_lib.Level(float(r), 1.0, 1.0) for r in distances[some]]
  return [*levels, *extra], sparse.csr_matrix(
    sparse.hstack([counts, gaussians[:, some]])
  )


def _distinct_rows(
  counts: sparse.csr_matrix,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns where each row that differs first occurs, and which one each is."""
  counts.sort_indices()
  found: dict[tuple[bytes, bytes], int] = {}
  first, same = [], []
  for unit, (start, end) in enumerate(zip(counts.indptr, counts.indptr[1:])):
    key = (
      counts.indices[start:end].tobytes(),
      counts.data[start:end].tobytes(),
    )
    if key not in found:
      first.append(unit)
    same.append(found.setdefault(key, len(found)))
  return np.array(first), np.array(same)


def _epsilons(
  smallest: float, largest: float, resolution: Resolution
) -> np.ndarray:
  """Returns 0 and the fixed points up to the one that covers `largest`."""
  ratio = math.log(resolution.epsilon_ratio)
  last = math.ceil(math.log(largest) / ratio)
  first = math.floor(math.log(smallest / 1e4) / ratio)
  first = max(first, last - resolution.most_epsilons)
  return np.append(0.0, np.exp(ratio * np.arange(first, last + 1)))


class _Direction(NamedTuple):
  """What units of one group lose, in one direction.

  Attributes:
    losses: The distribution of each level's loss.
    log_moments: log E[exp λS] of every unit's finite loss, [units, orders].
    infinite_masses: The probability of an infinite loss, of every unit.
  """

  losses: list[loss_lib.LossDistribution]
  log_moments: np.ndarray
  infinite_masses: np.ndarray


class _Spectrum(NamedTuple):
  """Fourier transforms of losses, without high frequencies that vanish.

  Attributes:
    logarithms: log |F| and arg F of every level, side by side.
    left_out: A bound of what every unit's masses lose with the rest.
  """

  logarithms: np.ndarray
  left_out: np.ndarray


class _Composition:
  """Composes the rounds of units whose losses are of about the same size."""

  def __init__(
    self,
    levels: Sequence[loss_lib.AnyLevel],
    counts: sparse.csr_matrix,
    scale: float,
    rounds: float,
    tolerance: float,
  ):
    """Chooses the grid.

    Args:
      levels: The kinds of rounds.
      counts: How many of each, [units, levels].
      scale: About the deviation of a unit's loss, at most.
      rounds: To how many equal rounds those of a unit amount, at most.
      tolerance: How much of ε the grid may cost, about.
    """
    self._counts = counts
    self._orders = np.geomspace(
      min(_LEAST_SCALED_ORDER / scale, 1.0),
      _LARGEST_SCALED_ORDER / scale,
      _ORDERS,
    )
    # Connecting dots adds at most h²/4 to the variance of a round.
    deviations = _TYPICAL_DEVIATIONS / (_TYPICAL_DEVIATIONS + scale)
    self._step = max(
      scale * math.sqrt(8 * tolerance * deviations / rounds) / 2,
      max(level.largest_loss for level in levels) / _MOST_STEPS_OF_ROUND,
    )
    most = min(_LARGEST_GRID, _MOST_SPECTRUM // len(levels))
    while True:
      self._directions = [
        self._prepare(levels, direction) for direction in loss_lib.DIRECTIONS
      ]
      size, self._top = self._window()
      if size <= most:
        break
      self._step *= size / most * 1.01
    self._size = fft.next_fast_len(size, real=True)
    self.largest_epsilon = max(
      self._largest_loss(part, _LOG_SMALLEST_DELTA) for part in self._directions
    )

  def deltas(self, epsilons: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields δ_x at the given ε, [units, epsilons], some units at a time."""
    units = self._counts.shape[0]
    length = max(1, _MOST_BLOCK // self._size)
    blocks = [slice(i, i + length) for i in range(0, units, length)]
    result = np.zeros((units, epsilons.size))
    for part in self._directions:
      spectrum = self._spectrum(part.losses)
      for block in blocks:
        found = self._block_deltas(spectrum, part, block, epsilons)
        np.maximum(result[block], found, out=result[block])
    for block in blocks:
      yield block, result[block]

  def _prepare(
    self, levels: Sequence[loss_lib.AnyLevel], direction: str
  ) -> _Direction:
    losses = [
      loss_lib.loss_distribution(level, self._step, direction)
      for level in levels
    ]
    # Moments need no fine grid. A power lies below its chords: masses moved to
    # the two coarse points around them, about their mean, have larger moments.
    first = min(loss.first for loss in losses)
    last = max(loss.first + loss.masses.size for loss in losses)
    stride = max(1, (last - first) // _MOST_POINTS_FOR_MOMENTS)
    points = first + stride * np.arange((last - first) // stride + 2)
    orders = np.concatenate([self._orders, -self._orders])
    exponents = self._step * np.multiply.outer(points, orders)
    # Orders whose moments overflow bound nothing.
    fits = np.max(exponents, axis=0) < _LARGEST_EXPONENT
    powers = np.exp(exponents[:, fits])
    log_moments = np.full((len(levels), orders.size), _NO_BOUND)
    for row, loss in zip(log_moments, losses):
      steps = loss.first - first + np.arange(loss.masses.size)
      left, beyond = np.divmod(steps, stride)
      to_right = loss.masses * (beyond / stride)
      masses = np.bincount(left, loss.masses - to_right, points.size)
      masses[1:] += np.bincount(left, to_right, points.size)[:-1]
      row[fits] = np.log(masses @ powers)
    infinite = np.array([loss.infinite_mass for loss in losses])
    return _Direction(
      losses,
      self._counts @ log_moments,
      -np.expm1(self._counts @ np.log1p(-infinite)),
    )

  def _window(self) -> tuple[int, int]:
    """Returns how many steps losses span, and the last one.

    By Chernoff's bound no unit's loss is more likely than negligible to lie
    outside. What is below wraps around to the top, which errs upwards.
    """
    top, bottom = (
      math.ceil(
        max(
          self._largest_loss(part, _LOG_NEGLIGIBLE, sign)
          for part in self._directions
        )
        / self._step
      )
      for sign in (1, -1)
    )
    return top + bottom + 2, top

  def _largest_loss(
    self, part: _Direction, log_probability: float, sign: int = 1
  ) -> float:
    """Bounds all units' losses, or their negatives, but for a probability."""
    moments = np.split(part.log_moments, 2, axis=1)[sign < 0]
    ends = np.min((moments - log_probability) / self._orders, axis=1)
    return max(float(np.max(ends)), self._step)

  def _spectrum(
    self, losses: Sequence[loss_lib.LossDistribution]
  ) -> '_Spectrum':
    """Transforms the losses, and leaves out what vanishes for all units."""
    log_magnitudes = np.empty((len(losses), self._size // 2 + 1))
    phases = np.empty_like(log_magnitudes)
    for log_magnitude, phase, loss in zip(log_magnitudes, phases, losses):
      places = (loss.first + np.arange(loss.masses.size)) % self._size
      masses = np.bincount(places, loss.masses, self._size)
      transformed = fft.rfft(masses)
      magnitude = np.maximum(np.abs(transformed), 1e-300)
      np.log(magnitude, out=log_magnitude)
      phase[:] = np.angle(transformed)
    kept = log_magnitudes.shape[1]
    left_out = np.full(self._counts.shape[0], -np.inf)
    while kept > 1:
      # No magnitude beyond is larger than the product of the largest ones.
      largest = np.max(log_magnitudes[:, kept // 2 :], axis=1)
      bound = self._counts @ largest + math.log(self._size)
      if np.max(bound) > _LOG_NEGLIGIBLE:
        break
      kept, left_out = kept // 2, bound
    return _Spectrum(
      np.concatenate([log_magnitudes[:, :kept], phases[:, :kept]], axis=1),
      np.exp(left_out),
    )

  def _block_deltas(
    self,
    spectrum: _Spectrum,
    part: _Direction,
    block: slice,
    epsilons: np.ndarray,
  ) -> np.ndarray:
    """Returns δ_x of some units in one direction, [units, epsilons]."""
    counts = self._counts[block].toarray()
    log_magnitude, phase = np.split(counts @ spectrum.logarithms, 2, axis=1)
    magnitude = np.exp(log_magnitude)
    transformed = magnitude * np.cos(phase) + 1j * (magnitude * np.sin(phase))
    masses = fft.irfft(transformed, self._size, axis=1, overwrite_x=True)

    beyond = part.log_moments[block, : self._orders.size]
    top = self._top * self._step
    outside = np.exp(np.min(beyond - self._orders * top, axis=1))
    rounding = _rounding_error(masses, np.sum(counts, axis=1))
    error = outside + rounding + spectrum.left_out[block]
    error += part.infinite_masses[block]
    # A loss of k steps is at index k; below 0, counted from the end.
    result = self._hockey_stick(masses[:, : self._top + 1], epsilons)
    result += error[:, np.newaxis]
    by_moments = self._bound_by_moments(beyond, epsilons)
    by_moments += part.infinite_masses[block, np.newaxis]
    return np.minimum(np.minimum(result, by_moments), 1.0)

  def _hockey_stick(
    self, masses: np.ndarray, epsilons: np.ndarray
  ) -> np.ndarray:
    """Returns Σ_{s > ε} p(s) (1 - exp(ε - s)) for losses s of 0, 1, … steps."""
    falling = np.maximum(masses[:, ::-1], 0.0)
    # Pr[S > s] of every step s, from the last one down.
    above = np.cumsum(falling, axis=1) - falling
    # δ(s) = (1 - e^-h) Pr[S > s] + e^-h δ(s + h).
    decay = math.exp(-self._step)
    curve = signal.lfilter([1 - decay], [1, -decay], above, axis=1)[:, ::-1]
    left = np.minimum(epsilons / self._step, self._top - 1).astype(int)
    # Linear in exp ε between two steps; zero beyond the last.
    beyond = np.minimum(epsilons - left * self._step, self._step)
    place = np.expm1(beyond) / math.expm1(self._step)
    return (1 - place) * curve[:, left] + place * curve[:, left + 1]

  def _bound_by_moments(
    self, log_moments: np.ndarray, epsilons: np.ndarray
  ) -> np.ndarray:
    """Returns the best bound of δ_x by any order, [units, epsilons].

    Canonne, Kamath and Steinke (arXiv:2004.00010), Proposition 12. It is of
    use where δ_x is so small that Fourier transforms give nothing but noise.
    """
    best = np.full((len(log_moments), epsilons.size), np.inf)
    for order, moments in zip(self._orders, log_moments.T):
      factor = (order + 1) * math.log(order / (order + 1)) - math.log(order)
      bound = (moments + factor)[:, np.newaxis] - order * epsilons
      np.minimum(best, bound, out=best)
    return np.exp(np.minimum(best, 0.0))


def _rounding_error(masses: np.ndarray, rounds: np.ndarray) -> np.ndarray:
  """Bounds by how much rounding can have lowered δ_x.

  A transform is right to about ε log2(n) of its norm and its T-th power to T
  times that; errors of all masses together are at most √n times their norm.
  """
  size = masses.shape[1]
  norms = np.sqrt(np.einsum('us,us->u', masses, masses) * size)
  units = np.finfo(float).eps * (8 * math.log2(size) + 2 * rounds)
  return units * norms
