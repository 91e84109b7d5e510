"""The client-level Gaussian mechanisms: Section V-A of the paper.

`mean` is the paper's mechanism; TFF and DP-FedAvg use `sum`. Both what is
released and what is accounted for are here, for all engines.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Optional

import dp_accounting
import numpy as np

from tf_bdp import array_namespace, validation
from tf_bdp.accounting import events as events_lib
from tf_bdp.accounting import mean_bounds
from tf_bdp.mechanisms import adaptive_clipping, base
from tf_bdp.mechanisms import measurements as measurements_lib

KINDS = ('mean', 'sum')


class ClippingState(NamedTuple):
  """The clip norm of the next round."""

  clip_norm: Any


@dataclasses.dataclass(frozen=True)
class ClientMechanism:
  """What a round releases, for n participants with clipped updates u_i.

    mean: (1/n) Σ u_i + N(0, (z C / n̄)² I)
    sum:  (Σ u_i + N(0, (z C)² I)) / n̄

  If always n clients are drawn (fixed_size), both are the sum: n is known, and
  whose update is not usable counts as zero. Neighbours then differ by one
  client in another's place, which moves the sum by up to 2 C.

  Attributes:
    kind: 'mean' or 'sum'.
    noise_multiplier: z. With adaptive clipping it covers both releases, the
      update and the count of unclipped clients.
    clip_norm: C; with adaptive clipping, C of the first round.
    participation_probability: α, the chance that a client takes part.
    clients_per_round: n̄ = α N, the expected number of participants.
    adaptive: How the clip norm follows the updates; None for a fixed one.
    sampling: 'poisson' or 'fixed_size': how participants are drawn.
  """

  kind: str
  noise_multiplier: float
  clip_norm: float
  participation_probability: float
  clients_per_round: float
  adaptive: Optional[adaptive_clipping.AdaptiveClipping] = None
  sampling: str = 'poisson'

  level = 'client'
  units: ClassVar[tuple[str, ...]] = ('client',)
  clips = True
  local = None

  def __post_init__(self) -> None:
    validation.check_choice('kind', self.kind, KINDS)
    validation.check_choice('sampling', self.sampling, base.SAMPLINGS)
    base.check_common(self)
    if self.is_fixed_size and round(self.clients_per_round) < 1:
      raise ValueError(
        'sampling=fixed_size draws the expected number of clients, rounded: '
        f'found {self.clients_per_round:g}, which is nobody.'
      )
    if self.adaptive is not None:
      resolved = self.adaptive.resolved(
        self.noise_multiplier, self.clients_per_round
      )
      object.__setattr__(self, 'adaptive', resolved)

  @property
  def aggregation(self) -> 'ClientMechanism':
    """The mechanism itself: all of it is at the server."""
    return self

  @property
  def is_fixed_size(self) -> bool:
    """Whether every round has the same number of participants."""
    return self.sampling == 'fixed_size'

  @property
  def samplings(self) -> tuple[str, ...]:
    """How participants may be drawn."""
    return (self.sampling,)

  @property
  def compares(self) -> bool:
    """Whether clients are measured by their distance from the mean."""
    return self.kind == 'mean'

  @property
  def noise_per_clip_norm(self) -> float:
    """The standard deviation of the noise in what is released, over C."""
    noise = self.noise_multiplier
    if self.adaptive is not None:
      noise = self.adaptive.update_noise_multiplier(noise)
    return noise / self.clients_per_round

  def initial_state(self) -> ClippingState:
    """Returns the first clip norm."""
    return ClippingState(np.float32(self.clip_norm))

  def release(
    self, state: ClippingState, sums: base.Sums, add_noise: base.AddNoise
  ) -> base.Release:
    """Makes the mean or the sum over n̄, adds noise and adapts the clip norm."""
    divisor = self.clients_per_round
    if self.kind == 'mean' and not self.is_fixed_size:
      divisor = array_namespace.of(sums.usable).maximum(sums.usable, 1.0)
    aggregate = [part / divisor for part in sums.update]
    result: Sequence[Any] = aggregate
    if self.noise_multiplier:
      deviation = self.noise_per_clip_norm * state.clip_norm
      result = add_noise(aggregate, deviation, base.UPDATE_NOISE)
    clip_norm = state.clip_norm
    if self.adaptive is not None:
      # Half a count each way, so that nobody counts for more than one half.
      below = sums.below - sums.usable / 2
      if self.noise_multiplier:
        (below,) = add_noise(
          [below], self.adaptive.count_deviation, base.COUNT_NOISE
        )
      share = below / self.clients_per_round + 0.5
      clip_norm = self.adaptive.next_clip_norm(clip_norm, share)
    return base.Release(result, aggregate, ClippingState(clip_norm))

  def measure(
    self,
    squared_norm: Any,
    squared_deviation: Any,
    taking_part: Any,
    participants: Any,
  ) -> Any:
    """Returns ‖u‖² under 'sum', ‖u - ū‖² under 'mean'.

    A lone participant cannot be compared with others: its measure is ‖u‖².
    Without any participant there is no ū, and nobody moves anything.
    """
    if not self.compares:
      return squared_norm
    xp = array_namespace.of(squared_norm, participants)
    # Not by `==`, which compares objects in the graphs that TFF makes.
    alone = taking_part & xp.equal(participants, 1)
    return xp.where(alone, squared_norm, squared_deviation)

  def relation(self, unit: str) -> dp_accounting.NeighboringRelation:
    """Returns adding or removing one client.

    Where always n take part, a client is replaced by another.
    """
    del unit
    if self.is_fixed_size:
      return dp_accounting.NeighboringRelation.REPLACE_ONE
    return base.ADD_OR_REMOVE_ONE

  def worst_case_squared_distance(self, unit: str, participants: Any) -> Any:
    """Returns the largest r² of any client in a round of n participants."""
    del unit
    if not self.noise_multiplier:
      return math.inf
    if self.is_fixed_size:
      # ‖u - u′‖ <= 2 C, and the count of those below C moves by 1, not by 1/2.
      return 4 * self._squared_distance(1 / self.clients_per_round**2)
    if self.kind == 'sum':
      return self._squared_distance(1 / self.clients_per_round**2)
    # A client is at most 2 C away from the mean of the others, and moves the
    # mean of n by 1/n of that; a lone participant moves it by C.
    xp = array_namespace.of(participants)
    count = xp.float64(participants)
    move = xp.where(count < 2, count, 2 / xp.maximum(count, 1.0))
    return self._squared_distance(move**2)

  def squared_distances(
    self,
    squared_measures: Any,
    taking_part: Any,
    participants: Any,
    clip_norm: Any,
  ) -> Any:
    """Returns r² of measured clients.

    Args:
      squared_measures: What `measure` returned for each client.
      taking_part: Whether each client took part.
      participants: n.
      clip_norm: C of the round.
    """
    xp = array_namespace.of(squared_measures, participants)
    count = xp.float64(participants)
    moves = xp.float64(squared_measures) / xp.float64(clip_norm) ** 2
    if self.kind == 'sum':
      moves = moves / self.clients_per_round**2
    else:
      # ‖u - mean of the others‖ / (number of others + 1). For a participant
      # that is ‖u - ū‖ / (n - 1), since u is part of ū.
      others = xp.where(taking_part, xp.maximum(count - 1.0, 1.0), count + 1.0)
      moves = xp.where(count > 0, moves / others**2, 0.0 * moves)
    worst = self.worst_case_squared_distance('client', participants)
    # Rounding in float32 must not carry a clipped update beyond the worst case.
    return xp.minimum(self._squared_distance(moves), worst)

  def _squared_distance(self, squared_moves: Any) -> Any:
    """Divides by the noise variance; adds what the adaptive count costs."""
    squared = squared_moves / self.noise_per_clip_norm**2
    if self.adaptive is not None:
      squared = squared + self.adaptive.count_squared_distance
    return squared

  def events(
    self, measurements: measurements_lib.Measurements
  ) -> dict[str, dp_accounting.DpEvent]:
    """Returns the round as an event for an accountant of clients."""
    return {'client': self.event(measurements)}

  def event(
    self, measurements: measurements_lib.Measurements
  ) -> dp_accounting.DpEvent:
    """Returns the round as an event.

    With too few measured clients for an estimate it is the worst case, and
    without noise it is a non-private event. Clients that train and held-out
    ones are two groups of a parallel event. Where always n take part, only the
    worst case is known: what another client in the same place would have sent
    is not measured.
    """
    if self.is_fixed_size:
      return self._fixed_size_event()
    count = measurements.participants
    worst = float(self.worst_case_squared_distance('client', count))
    q = self.participation_probability
    too_few = measurements.squared_measures.size < mean_bounds.FEWEST_UNITS
    if measurements.reported is not None and 0 < worst < math.inf:
      costs, failure_probability = measurements.reported['client']
      return events_lib.ReportedCostEvent(costs, failure_probability, q, worst)
    if too_few or math.isinf(worst):
      return base.worst_case_event(worst, q)
    distances = self.squared_distances(
      measurements.squared_measures,
      measurements.taking_part,
      count,
      measurements.clip_norm,
    )
    held_out = measurements.held_out
    halves = np.split(distances, [distances.size - held_out])
    groups = [
      events_lib.BayesianGaussianEvent(half, q, worst, measurements.panel)
      for half in halves[: 2 if held_out else 1]
    ]
    # Of clients that train and those that do not, the larger figure counts.
    return events_lib.ParallelEvent(groups) if held_out else groups[0]

  def _fixed_size_event(self) -> dp_accounting.DpEvent:
    """Returns a round of n participants for a `ReplaceOneAccountant`."""
    worst = self.worst_case_squared_distance('client', None)
    if math.isinf(worst):
      return dp_accounting.NonPrivateDpEvent()
    return dp_accounting.SampledWithoutReplacementDpEvent(
      round(self.clients_per_round / self.participation_probability),
      round(self.clients_per_round),
      dp_accounting.GaussianDpEvent(worst**-0.5),
    )

  def is_panel(self, unit: str, panel_size: int) -> bool:
    """Whether there is a panel of clients."""
    del unit
    return bool(panel_size)

  def cost_count(self, unit: str, rounds: int, client_count: int) -> int:
    """Returns the number of rounds: each has one cost."""
    del unit, client_count
    return rounds

  def counted_otherwise(self) -> dict[str, base.Mechanism]:
    """Returns the mechanism as the only way to count."""
    return {'client': self}

  def paper_dp_event(self) -> Optional[dp_accounting.DpEvent]:
    """Returns a round of sensitivity C, as the paper counts DP.

    That is right for a sum over a fixed number of clients. The worst case of a
    mean is larger; see `worst_case_squared_distance`. The paper does not draw
    a fixed number of clients.
    """
    if self.is_fixed_size:
      return None
    return base.worst_case_event(
      self.noise_multiplier**-2, self.participation_probability
    )

  def description(self, unit: str) -> base.Description:
    """Returns what a report says about the protection of clients."""
    del unit
    return base.Description(
      self.kind, self.noise_multiplier, self.participation_probability
    )

  def caveats(self) -> list[str]:
    """Returns what the figures rest on."""
    if self.is_fixed_size:
      return [
        'Always the same number of clients took part, which everybody knows. '
        'Figures are for replace-one adjacency, one client in the place of '
        'another, and of differential privacy alone: how far two clients are '
        'from each other was not measured.'
      ]
    return []


@base.register('client')
def _make(options: Any, facts: base.Facts) -> ClientMechanism:
  """Makes the mechanism of the level 'client'."""
  options.check_idle(
    *('server_noise_multiplier', 'clipping', 'example_accounting'),
    *('joint_reference', 'panel_examples'),
  )
  adaptive = None
  if options.clip_quantile is not None:
    adaptive = adaptive_clipping.AdaptiveClipping(options.clip_quantile)
  noise = options.noise_multiplier
  return ClientMechanism(
    kind=options.mechanism,
    noise_multiplier=2.0 if noise is None else noise,
    clip_norm=options.clip_norm,
    participation_probability=options.participation_probability,
    clients_per_round=options.participation_probability * facts.client_count,
    adaptive=adaptive,
    sampling=options.sampling,
  )
