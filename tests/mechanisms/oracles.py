"""The truth of what is released, without any of the library's formulas.

What a round releases is the mean of n noisy vectors. With probability a = n/N
the unit's client is one of them, and that shows: it brings its place in the
mean. So the two worlds are

  P = (1 - a) A + a B1 with the unit,    Q = (1 - a) A + a B0 without it,

where A is the release of n others; B0 that of n - 1 others and of the client
without the unit, and B1 with it. All are mixtures of Gaussians, over who takes
part and what is drawn. Their divergences are integrated numerically, sampled,
and composed by Fourier transforms of the whole privacy loss.
"""

import dataclasses
import itertools
import math

import numpy as np
from scipy import fft, special, stats


def clip(vector, norm):
  length = np.linalg.norm(vector)
  return vector if length <= norm else vector * (norm / length)


def on_grid(squared_distances, noises=1):
  """r² where values are rounded to the grid of each noise, of r 2^-20 or less.

  What is not moved at all is rounded alike.
  """
  distances = np.sqrt(squared_distances)
  return np.where(distances > 0, (distances + noises * 2.0**-20) ** 2, 0.0)


@dataclasses.dataclass(frozen=True)
class Worlds:
  """Mixtures of Gaussians with and without a unit, of the same variance.

  Attributes:
    weights: Of the parts.
    present: Their means with the unit, [parts, dimensions].
    absent: Their means without it.
    variance: Of all parts.
  """

  weights: np.ndarray
  present: np.ndarray
  absent: np.ndarray
  variance: float

  @property
  def deviation(self):
    return math.sqrt(self.variance)

  def log_density(self, points, with_unit):
    """Of points [..., dimensions]."""
    means = self.present if with_unit else self.absent
    squared = np.stack([np.sum((points - m) ** 2, axis=-1) for m in means], -1)
    constant = means.shape[1] / 2 * math.log(2 * math.pi * self.variance)
    return special.logsumexp(
      -squared / (2 * self.variance) - constant, axis=-1, b=self.weights
    )

  def axes(self, order, width):
    """A grid that holds the mass of all integrands up to an order.

    Point by point P^(λ+1) Q^(-λ) is at most the mean of that of the parts, for
    it is jointly convex; that of a part is around (λ+1) p - λ q.
    """
    shift = self.present - self.absent
    centres = [self.absent - order * shift, self.present + order * shift]
    margin, step = 12 * self.deviation, width * self.deviation
    return [
      np.arange(low - margin, high + margin, step)
      for low, high in zip(np.min(centres, (0, 1)), np.max(centres, (0, 1)))
    ]

  def log_moments(self, orders, width):
    """λ D_{λ+1}(P‖Q) and λ D_{λ+1}(Q‖P), by the trapezoidal rule.

    Of analytic functions that vanish at both ends it is exact up to
    exp(-const / width).

    Args:
      orders: All λ.
      width: Of the grid's steps, in deviations.
    """
    axes = self.axes(max(orders), width)
    points = np.stack(np.meshgrid(*axes, indexing='ij'), axis=-1)
    volume = math.log(width * self.deviation) * len(axes)
    p, q = (self.log_density(points, with_unit) for with_unit in (True, False))
    return np.array(
      [
        [special.logsumexp(top + order * (top - bottom)) for order in orders]
        for top, bottom in ((p, q), (q, p))
      ]
    ) + np.float64(volume)

  def distribution(self, points, axis, with_unit):
    """The probability to be below the points along one axis."""
    centres = (self.present if with_unit else self.absent)[:, axis]
    parts = stats.norm.cdf(points[:, np.newaxis], centres, self.deviation)
    return parts @ self.weights

  def delta(self, epsilon, rounds, rounded=np.ceil, step=2e-4):
    """δ at ε of so many rounds on a line, the larger of both directions.

    The privacy loss is rounded up to multiples of the step, so that δ is not
    too small (or down, not too large), and convolved with itself by Fourier
    transforms, which hold all losses; δ = E_P[(1 - exp(ε - L))+].
    """
    (points,) = self.axes(0, 5e-4)
    p, q = (self.log_density(points[:, None], w) for w in (True, False))
    result = 0.0
    for top, bottom in ((p, q), (q, p)):
      mass = np.exp(top) * 5e-4 * self.deviation
      assert abs(np.sum(mass) - 1) < 1e-9
      losses = rounded((top - bottom) / step).astype(int)
      lowest = int(losses.min())
      size = fft.next_fast_len(rounds * (int(losses.max()) - lowest) + 1)
      single = np.bincount(losses - lowest, mass, size)
      composed = fft.irfft(fft.rfft(single) ** rounds, size)
      totals = step * (np.arange(size) + rounds * lowest)
      gains = -np.expm1(np.minimum(epsilon - totals, 0.0))
      result = max(result, float(np.sum(composed * gains)))
    return result


@dataclasses.dataclass(frozen=True)
class Definition:
  """What clients send and what is released, by the paper's definitions.

  Attributes:
    clipping: 'batch' or 'example'.
    clip_norm: C.
    noise_multiplier: σ of each client.
    server_noise_multiplier: z.
    batch_size: B.
    expected_clients: n̄.
  """

  clipping: str
  clip_norm: float
  noise_multiplier: float
  server_noise_multiplier: float
  batch_size: int
  expected_clients: float

  def sent(self, gradients):
    """What the noise is added to, for the gradients of a batch, [b, size]."""
    if not len(gradients):
      return np.zeros(np.shape(gradients)[1])
    if self.clipping == 'batch':
      return clip(np.mean(gradients, axis=0), self.clip_norm)
    clipped = [clip(gradient, self.clip_norm) for gradient in gradients]
    return np.sum(clipped, axis=0) / self.batch_size

  def squared_moves(self, batch):
    """‖f(B) - f(B∖x)‖² / C² of all examples of a batch."""
    rest = [self.sent(np.delete(batch, i, axis=0)) for i in range(len(batch))]
    moves = self.sent(batch) - rest
    return np.sum(moves**2, axis=1) / self.clip_norm**2

  def farthest_move(self, held, example):
    """The largest squared move of an example, by what else is drawn."""
    return max(
      self.squared_moves(np.concatenate([rest, [example]]))[-1]
      for rest, _ in _draws(held, 0.5)
    )

  @property
  def client_deviation(self):
    """Of the noise in what a client sends."""
    deviation = self.noise_multiplier * self.clip_norm
    return deviation / (self.batch_size if self.clipping == 'example' else 1)

  @property
  def server_deviation(self):
    """Of the noise that the server adds to the mean."""
    noise = self.server_noise_multiplier * self.clip_norm
    return noise / self.expected_clients

  def mean_variance(self, count):
    """Of the noise in the mean of what so many clients send."""
    own = count * self.client_deviation**2 / count**2
    return own + self.server_deviation**2

  def client_worlds(self, others, update, reference, count):
    """Of a client that may be one of the n, beside all choices of others."""
    inclusion = count / (len(others) + 1)
    rounds = []
    with_client = _choices(others, count - 1)
    for chosen in with_client:
      present, absent = ([*chosen, mine] for mine in (update, reference))
      rounds.append((inclusion / len(with_client), present, absent))
    if inclusion < 1:
      without = _choices(others, count)
      rounds += [((1 - inclusion) / len(without), c, c) for c in without]
    weights, present, absent = zip(*rounds)
    return Worlds(
      np.array(weights),
      np.mean(present, axis=1),
      np.mean(absent, axis=1),
      self.mean_variance(count),
    )

  def example_worlds(self, others, held, example, count):
    """Of an example that may be in the batch of a client that may be there.

    Args:
      others: What the other clients send, without noise.
      held: The other examples of its client.
      example: Its gradient.
      count: n.
    """
    chance = min(1.0, self.batch_size / (len(held) + 1))
    parts = []
    for rest, weight in _draws(held, chance):
      without = self.sent(rest)
      joined = self.sent(np.concatenate([rest, [example]]))
      for probability, mine in ((chance, joined), (1 - chance, without)):
        if weight * probability:
          worlds = self.client_worlds(others, mine, without, count)
          parts.append((weight * probability * worlds.weights, worlds))
    means, which = np.unique(
      [
        np.concatenate([present, absent])
        for _, worlds in parts
        for present, absent in zip(worlds.present, worlds.absent)
      ],
      axis=0,
      return_inverse=True,
    )
    weights = np.concatenate([weights for weights, _ in parts])
    return Worlds(
      np.bincount(which.ravel(), weights),
      *np.split(means, 2, axis=1),
      self.mean_variance(count),
    )

  def released(self, generator, others, mine, count):
    """Draws n of all clients, and their noise; takes the mean; adds the server's.

    Args:
      generator: Of random numbers.
      others: What each of the others sends, [clients, dimensions].
      mine: What the client sends, [samples, dimensions].
      count: n.
    """
    sent = np.repeat(others[np.newaxis], len(mine), axis=0)
    sent = np.concatenate([mine[:, np.newaxis], sent], axis=1)
    ranks = np.argsort(generator.random(sent.shape[:2]), axis=1)
    sent = np.take_along_axis(sent, ranks[:, :count, np.newaxis], axis=1)
    sent = sent + self.client_deviation * generator.normal(size=sent.shape)
    noise = generator.normal(size=mine.shape)
    return sent.mean(axis=1) + self.server_deviation * noise


def _choices(others, count):
  """All choices of so many others; one, if they are all alike."""
  if all(np.array_equal(other, others[0]) for other in others):
    return [tuple(others[:count])]
  return list(itertools.combinations(others, count))


def _draws(held, chance):
  """All that may be drawn of the examples held, with its probability."""
  for drawn in itertools.product((False, True), repeat=len(held)):
    weight = math.prod(chance if d else 1 - chance for d in drawn)
    yield np.asarray(held)[list(drawn)], weight
