"""A clip norm that follows a quantile of the updates' norms.

Andrew, Thakkar, McMahan and Ramaswamy (2021), "Differentially private learning
with adaptive clipping". Each round also releases a noisy count of the updates
below the clip norm, which costs privacy of its own.
"""

import dataclasses
from typing import Any, Optional

from tf_bdp import array_namespace, validation
from tf_bdp.mechanisms import base


@dataclasses.dataclass(frozen=True)
class AdaptiveClipping:
  """How the clip norm follows the norms of updates.

  Attributes:
    quantile: The share of updates whose norm should be below the clip norm.
    learning_rate: How fast the clip norm follows.
    count_deviation: σ_b, the standard deviation of the noise on the count of
      clients below the clip norm; None for n̄ / 20, or 2 z if that is more.
  """

  quantile: float
  learning_rate: float = 0.2
  count_deviation: Optional[float] = None

  def __post_init__(self) -> None:
    validation.check_probability('clip_quantile', self.quantile)
    validation.check_positive('clip_learning_rate', self.learning_rate)
    if self.count_deviation is not None:
      validation.check_positive('clipped_count_deviation', self.count_deviation)

  def resolved(
    self, noise_multiplier: float, clients_per_round: float
  ) -> 'AdaptiveClipping':
    """Returns the settings with `count_deviation` filled in and checked."""
    deviation = self.count_deviation
    if deviation is None:
      deviation = max(clients_per_round / 20, 2 * noise_multiplier)
    if noise_multiplier and 2 * deviation <= noise_multiplier:
      raise ValueError(
        'clipped_count_deviation must be above half the noise multiplier. '
        f'Found {deviation}.'
      )
    return dataclasses.replace(self, count_deviation=deviation)

  def update_noise_multiplier(self, noise_multiplier: float) -> float:
    """Returns the noise multiplier of the update alone.

    Update and count together then have the given noise multiplier z. Theorem 1:
    z⁻² = z_update⁻² + (2 σ_b)⁻².
    """
    assert self.count_deviation is not None
    if not noise_multiplier:
      return 0.0
    return (noise_multiplier**-2 - (2 * self.count_deviation) ** -2) ** -0.5

  @property
  def count_squared_distance(self) -> float:
    """What the count adds to r².

    A count of ±1/2, released with its own Gaussian noise: the two releases are
    one Gaussian mechanism, whose squared distances add.
    """
    assert self.count_deviation is not None
    return float(base.on_grid(0.25 / self.count_deviation**2))

  def next_clip_norm(self, clip_norm: Any, share_below: Any) -> Any:
    """Returns the next C, given the noised share of updates below C.

    The geometric update of Section 2.1.
    """
    growth = -self.learning_rate * (share_below - self.quantile)
    return clip_norm * array_namespace.of(growth).exp(growth)
