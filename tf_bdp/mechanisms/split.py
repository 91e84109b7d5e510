"""The split baseline of Section VI-D: two noises, each counted on its own.

Clients add noise, which is counted for examples alone. The server clips what
they sent and adds noise of its own, which is counted for clients alone.
"""

import dataclasses
from typing import Any, ClassVar

import dp_accounting

from tf_bdp.mechanisms import base, client, instance
from tf_bdp.mechanisms import measurements as measurements_lib


@dataclasses.dataclass(frozen=True)
class SplitMechanism(instance.InstanceMechanism):
  """Noise of the clients for examples, and of the server for clients."""

  level = 'split'
  units: ClassVar[tuple[str, ...]] = ('client', 'example')
  # The client-level mechanism counts clients as added or removed.
  samplings: ClassVar[tuple[str, ...]] = ('poisson',)

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.accounting == 'aggregate':
      raise ValueError(
        'Split privacy clips what clients send, after their noise: the noise '
        'in the mean is not Gaussian, and cannot be counted together. Account '
        'by parallel or sequential.'
      )

  def _check_server_noise(self) -> None:
    if bool(self.server_noise_multiplier) != bool(self.noise_multiplier):
      raise ValueError(
        'Split privacy needs both a noise_multiplier, for examples, and a '
        'server_noise_multiplier, for clients. Found '
        f'{self.noise_multiplier} and {self.server_noise_multiplier}.'
      )

  @property
  def aggregation(self) -> client.ClientMechanism:
    """The client-level mechanism, applied to the noisy updates."""
    return client.ClientMechanism(
      'mean',
      self.server_noise_multiplier,
      self.clip_norm,
      self.participation_probability,
      self.clients_per_round,
    )

  def worst_case_squared_distance(self, unit: str, participants: Any) -> Any:
    """Returns the largest r² of any unit, with n participants."""
    if unit == 'client':
      return self.aggregation.worst_case_squared_distance(unit, participants)
    return super().worst_case_squared_distance(unit, participants)

  def events(
    self, measurements: measurements_lib.Measurements
  ) -> dict[str, dp_accounting.DpEvent]:
    """Returns the round as events for accountants of clients and examples."""
    return {
      **self.aggregation.events(measurements),
      **super().events(measurements),
    }

  def description(self, unit: str) -> base.Description:
    """Returns what a report says about the protection of a unit."""
    if unit == 'client':
      return self.aggregation.description(unit)
    return super().description(unit)

  def caveats(self) -> list[str]:
    """Returns what the figures rest on."""
    return [
      *super().caveats(),
      'Client figures count the noise of the server alone, those of examples '
      'the noise of the clients alone.',
    ]


@base.register('split')
def _make(options: Any, facts: base.Facts) -> SplitMechanism:
  """Makes the mechanism of the level 'split'."""
  options.check_idle('mechanism', 'clip_quantile', 'joint_reference')
  return SplitMechanism(
    options.example_accounting or 'parallel',
    **instance.arguments(options, facts),
  )
