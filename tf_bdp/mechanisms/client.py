"""The client-level Gaussian mechanisms: their noise and their distances.

Pure arithmetic, shared by the aggregators and engines, so that what is released
and what is accounted for cannot drift apart. Section V-A of the paper; `mean`
is the paper's mechanism, `sum` that of TFF and DP-FedAvg.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Optional

import dp_accounting
import numpy as np

from tf_bdp import validation
from tf_bdp.accounting import events, mean_bounds

KINDS = ('mean', 'sum')


@dataclasses.dataclass(frozen=True)
class GaussianMechanism:
  """What a round releases, for n participants with clipped updates u_i.

    mean: (1/n) Σ u_i + N(0, (z C / n̄)² I)
    sum:  (Σ u_i + N(0, (z C)² I)) / n̄

  Attributes:
    kind: 'mean' or 'sum'.
    noise_multiplier: z. With adaptive clipping it is that of both releases
      together, the update and the count of clipped clients.
    clip_norm: C; with adaptive clipping the one of the first round.
    participation_probability: α, the chance that a client takes part.
    expected_clients: n̄ = α N.
    clip_quantile: With adaptive clipping, the share of updates whose norm
      should be below the clip norm (Andrew et al. 2021); None for a fixed one.
    clip_learning_rate: How fast the clip norm follows.
    clipped_count_deviation: The noise on the count of clients below the clip
      norm; by default n̄ / 20, or 2 z if that is more.
  """

  kind: str
  noise_multiplier: float
  clip_norm: float
  participation_probability: float
  expected_clients: float
  clip_quantile: Optional[float] = None
  clip_learning_rate: float = 0.2
  clipped_count_deviation: Optional[float] = None

  units = ('client',)  # What is protected.
  clips_updates = True

  def __post_init__(self) -> None:
    validation.check_choice('kind', self.kind, KINDS)
    if not 0 <= self.noise_multiplier < math.inf:
      raise ValueError(
        'noise_multiplier must be non-negative and finite. Found '
        f'{self.noise_multiplier}.'
      )
    validation.check_positive('clip_norm', self.clip_norm)
    validation.check_positive('expected_clients', self.expected_clients)
    validation.check_probability(
      'participation_probability', self.participation_probability
    )
    if self.clip_quantile is None:
      return
    validation.check_probability('clip_quantile', self.clip_quantile)
    validation.check_positive('clip_learning_rate', self.clip_learning_rate)
    validation.check_positive('clipped_count_deviation', self.count_deviation)
    if self.noise_multiplier and self.update_noise_multiplier <= 0:
      raise ValueError(
        'clipped_count_deviation must be above half the noise multiplier. '
        f'Found {self.count_deviation}.'
      )

  @property
  def count_deviation(self) -> float:
    """σ_b, the deviation of the noise on the count for adaptive clipping."""
    if self.clipped_count_deviation is not None:
      return self.clipped_count_deviation
    return max(self.expected_clients / 20, 2 * self.noise_multiplier)

  @property
  def update_noise_multiplier(self) -> float:
    """The update's own z, which with the count makes up the whole z.

    Andrew, Thakkar, McMahan and Ramaswamy (2021), Theorem 1:
    z⁻² = z_update⁻² + (2 σ_b)⁻².
    """
    if self.clip_quantile is None or not self.noise_multiplier:
      return self.noise_multiplier
    rest = self.noise_multiplier**-2 - (2 * self.count_deviation) ** -2
    return rest**-0.5 if rest > 0 else 0.0

  @property
  def noise_per_clip_norm(self) -> float:
    """The deviation of the noise in what is released, over C."""
    return self.update_noise_multiplier / self.expected_clients

  def worst_case_squared_distance(self, participants: int) -> float:
    """Returns the largest r² of any client in a round of n participants."""
    if not self.noise_multiplier:
      return math.inf
    return self.to_squared_distance(self._worst_case_move(participants) ** 2)

  def _worst_case_move(self, participants: int) -> float:
    """How far a client can move the released mean, over C."""
    if self.kind == 'sum':
      return 1 / self.expected_clients
    # Of two clients at opposite ends, one is alone at C when the other leaves.
    return (0.0, 1.0)[participants] if participants < 2 else 2 / participants

  def squared_distances(
    self,
    squared_measures: np.ndarray,
    taking_part: np.ndarray,
    participants: int,
    clip_norm: float,
  ) -> np.ndarray:
    """Returns r² of measured clients.

    Args:
      squared_measures: For 'sum' ‖u‖², for 'mean' ‖u - ū‖² with ū the mean of
        the participants' clipped updates; ‖u‖² where a participant is alone.
      taking_part: Whether each client took part.
      participants: n.
      clip_norm: C of the round.
    """
    moves = np.asarray(squared_measures, np.float64) / clip_norm**2
    if self.kind == 'sum':
      moves = moves / self.expected_clients**2
    elif participants == 0:
      moves = np.zeros_like(moves)
    else:
      # ‖u - mean of the others‖ / (number of others + 1). For a participant
      # that is ‖u - ū‖ / (n - 1), since u is part of ū.
      others = np.where(taking_part, max(participants - 1, 1), participants + 1)
      moves = moves / others**2
    worst = self.worst_case_squared_distance(participants)
    # Rounding in float32 must not carry a clipped update beyond the worst case.
    return np.minimum(self.to_squared_distance(moves), worst)

  def to_squared_distance(self, squared_moves: Any) -> Any:
    """Divides by the noise; adds the bit that adaptive clipping releases."""
    squared = squared_moves / self.noise_per_clip_norm**2
    if self.clip_quantile is not None:
      # A count of ±1/2, released with its own Gaussian noise: the two releases
      # are one Gaussian mechanism, whose squared distances add.
      squared = squared + 0.25 / self.count_deviation**2
    return squared

  def event(
    self,
    squared_measures: np.ndarray,
    taking_part: np.ndarray,
    participants: int,
    clip_norm: float,
    panel: bool,
  ) -> dp_accounting.DpEvent:
    """Returns the round as an event for `BayesianAccountant`.

    With too few measured clients for an estimate it is the worst case, and
    without noise it is a non-private event.
    """
    if not self.noise_multiplier:
      return dp_accounting.NonPrivateDpEvent()
    worst = self.worst_case_squared_distance(participants)
    q = self.participation_probability
    if np.size(squared_measures) >= mean_bounds.FEWEST_UNITS:
      distances = self.squared_distances(
        squared_measures, taking_part, participants, clip_norm
      )
      return events.BayesianGaussianEvent(distances, q, worst, panel)
    if worst == 0:
      return dp_accounting.NoOpDpEvent()
    gaussian = dp_accounting.GaussianDpEvent(worst**-0.5)
    return dp_accounting.PoissonSampledDpEvent(q, gaussian)

  def events(
    self,
    squared_measures: np.ndarray,
    taking_part: np.ndarray,
    groups: Any,
    participants: int,
    clip_norm: float,
    panel: bool,
  ) -> dict[str, dp_accounting.DpEvent]:
    """Returns a round's event for each of `units`; no examples are measured."""
    del groups
    event = self.event(
      squared_measures, taking_part, participants, clip_norm, panel
    )
    return {'client': event}

  def reported_event(
    self,
    unit: str,
    costs: np.ndarray,
    failure_probability: float,
    participants: int,
  ) -> dp_accounting.DpEvent:
    """Returns a round of which the server learnt the cost of every order."""
    del unit
    worst = self.worst_case_squared_distance(participants)
    if not self.noise_multiplier:
      return dp_accounting.NonPrivateDpEvent()
    if not worst:
      return dp_accounting.NoOpDpEvent()
    return events.ReportedCostEvent(
      costs, failure_probability, self.participation_probability, worst
    )

  def clip_norm_growth(self, share_below: Any) -> Any:
    """Returns log(next C / C), given the noised share of updates below C.

    The geometric update of Andrew et al. (2021), Section 2.1.
    """
    return -self.clip_learning_rate * (share_below - self.clip_quantile)

  def to_scalars(self) -> dict[str, float]:
    """Returns the parameters as numbers, to travel with measurements."""
    return {
      'is_mean': float(self.kind == 'mean'),
      'noise_multiplier': self.noise_multiplier,
      'participation_probability': self.participation_probability,
      'expected_clients': self.expected_clients,
      'clip_quantile': -1.0
      if self.clip_quantile is None
      else self.clip_quantile,
      'count_deviation': self.count_deviation,
    }

  @classmethod
  def from_scalars(cls, scalars: Mapping[str, Any]) -> 'GaussianMechanism':
    """Restores what the accounting needs from `to_scalars`."""
    quantile = float(scalars['clip_quantile'])
    return cls(
      kind='mean' if scalars['is_mean'] else 'sum',
      noise_multiplier=float(scalars['noise_multiplier']),
      clip_norm=1.0,
      participation_probability=float(scalars['participation_probability']),
      expected_clients=float(scalars['expected_clients']),
      clip_quantile=None if quantile < 0 else quantile,
      clipped_count_deviation=float(scalars['count_deviation']),
    )
