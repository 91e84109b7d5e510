"""Joint privacy: the clients' noise hides clients, too. Section V-C.

Client i sends u_i + N(0, (σ C)² I). To remove the client would remove its noise
as well, and in high dimension Gaussians of different variance are far apart. So
adjacency is zero-out: an absent client still contributes noise, around 0 or the
last mean. A client then moves the mean of n by ‖u_i‖ / n, hidden by all noise.
"""

import dataclasses
import math
from typing import Any, ClassVar

import dp_accounting
import numpy as np

from tf_bdp import array_namespace
from tf_bdp.accounting import events as events_lib
from tf_bdp.accounting import mean_bounds
from tf_bdp.mechanisms import base, instance
from tf_bdp.mechanisms import measurements as measurements_lib

ONLY_FOR_FED_SGD = (
  'Joint privacy is for FedSGD only: in FedAvg every noisy step changes the '
  'point at which the next gradient is taken, and the noise that remains in '
  'the update is not what was added.'
)


@dataclasses.dataclass(frozen=True)
class JointMechanism(instance.InstanceMechanism):
  """One noise of the clients, counted for examples and for clients.

  Attributes are those of `InstanceMechanism`, and:
    reference_is_last_mean: Whether an absent client contributes noise around
      the last released mean, clipped to C, instead of around 0.
  """

  reference_is_last_mean: bool = False

  level = 'joint'
  units: ClassVar[tuple[str, ...]] = ('client', 'example')
  bounds_clients = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.local_steps > 1:
      raise ValueError(ONLY_FOR_FED_SGD)

  def _check_server_noise(self) -> None:
    """Allows noise of the server: it hides clients in every accounting."""

  def check_fed_avg(self) -> None:
    """Raises ValueError: FedAvg is not accounted for."""
    raise ValueError(ONLY_FOR_FED_SGD)

  def relation(self, unit: str) -> dp_accounting.NeighboringRelation:
    """Returns replacing a client by one that contributes noise alone."""
    if unit == 'client':
      return dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    return super().relation(unit)

  def client_squared_distances(
    self, squared_measures: Any, participants: Any
  ) -> Any:
    """Returns r² of clients.

    Args:
      squared_measures: ‖u_i‖² before noise, over C², or their squared distance
        from the reference.
      participants: n; with none, nobody moves anything.
    """
    xp = array_namespace.of(squared_measures, participants)
    count = xp.maximum(xp.float64(participants), 1)
    squared = xp.float64(squared_measures) / (
      count**2 * self.mean_variance(count)
    )
    squared = base.on_grid(squared, 1 + bool(self.noise_per_clip_norm))
    return xp.where(xp.float64(participants) > 0, squared, 0.0 * squared)

  def worst_case_squared_distance(self, unit: str, participants: Any) -> Any:
    """Returns the largest r² of any unit, with n participants."""
    if unit == 'example':
      return super().worst_case_squared_distance(unit, participants)
    if not (self.noise_multiplier or self.noise_per_clip_norm):
      return math.inf
    move = 2.0 if self.reference_is_last_mean else 1.0
    return self.client_squared_distances(move**2, participants)

  def events(
    self, measurements: measurements_lib.Measurements
  ) -> dict[str, dp_accounting.DpEvent]:
    """Returns the round as events for accountants of clients and examples."""
    client = self._client_event(measurements)
    return {'client': client, **super().events(measurements)}

  def _client_event(
    self, measurements: measurements_lib.Measurements
  ) -> dp_accounting.DpEvent:
    count = measurements.participants
    worst = float(self.worst_case_squared_distance('client', count))
    inclusion = float(self.inclusion_probability(count))
    if not 0 < worst < math.inf:
      return base.worst_case_event(worst, 1.0)
    if measurements.reported is not None:
      costs, failure_probability = measurements.reported['client']
      return events_lib.ReportedCostEvent(
        costs, failure_probability, 1.0, worst, inclusion
      )
    squared = np.asarray(measurements.squared_measures, np.float64)
    squared = squared / measurements.clip_norm**2
    squared = np.minimum(self.client_squared_distances(squared, count), worst)
    if squared.size < mean_bounds.FEWEST_UNITS:
      squared = np.full(mean_bounds.FEWEST_UNITS, worst)
    return events_lib.BayesianGaussianEvent(
      squared, 1.0, worst, measurements.panel, inclusion
    )

  def description(self, unit: str) -> base.Description:
    """Returns what a report says about the protection of a unit."""
    if unit == 'example':
      return super().description(unit)
    return base.Description(
      'joint', self.noise_multiplier, self.participation_probability
    )

  def caveats(self) -> list[str]:
    """Returns what the figures rest on."""
    reference = 'the last mean' if self.reference_is_last_mean else 'zero'
    return [
      *super().caveats(),
      'Client figures are for zero-out adjacency: an absent client contributes '
      f'noise around {reference}.',
    ]


@base.register('joint')
def _make(options: Any, facts: base.Facts) -> JointMechanism:
  """Makes the mechanism of the level 'joint'."""
  options.check_idle('mechanism', 'clip_quantile', 'least_participants')
  return JointMechanism(
    options.example_accounting or 'aggregate',
    **instance.arguments(options, facts),
    reference_is_last_mean=options.joint_reference == 'last_mean',
  )
