"""The mean of updates that carry their clients' own noise."""

import dataclasses
from typing import Any

import numpy as np

from tf_bdp import array_namespace
from tf_bdp.mechanisms import base, client


@dataclasses.dataclass(frozen=True)
class NoisyMean:
  """Takes the mean of what the n participants sent; may add noise on top.

  Attributes:
    noise_per_clip_norm: Standard deviation of the server's own noise, over C.
    clip_norm: C, to which clients clipped before they added their noise.
  """

  noise_per_clip_norm: float
  clip_norm: float

  clips = False
  compares = False
  counts_failed = False

  def initial_state(self) -> client.ClippingState:
    """Returns the clip norm, which never changes."""
    return client.ClippingState(np.float32(self.clip_norm))

  def release(
    self, state: client.ClippingState, sums: base.Sums, add_noise: base.AddNoise
  ) -> base.Release:
    """Makes the mean; adds the server's noise if anybody took part."""
    xp = array_namespace.of(sums.usable)
    divisor = xp.maximum(sums.usable, 1.0)
    mean = [part / divisor for part in sums.update]
    result = mean
    if self.noise_per_clip_norm:
      deviation = self.noise_per_clip_norm * self.clip_norm
      noised = add_noise(mean, deviation, base.UPDATE_NOISE)
      result = [xp.where(sums.usable > 0, n, m) for n, m in zip(noised, mean)]
    return base.Release(result, mean, state)

  def measure(
    self,
    squared_norm: Any,
    squared_deviation: Any,
    taking_part: Any,
    participants: Any,
  ) -> Any:
    """Returns ‖u‖², where u is the client's update before its noise."""
    del squared_deviation, taking_part, participants
    return squared_norm
