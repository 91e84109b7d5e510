"""The Gaussian mechanism on clients: its noise, distances and events.

Pure arithmetic, shared by the engines and the TFF processes, so that what is
released and what is accounted for cannot drift apart. Sections V-B and V-C of
the paper: instance privacy, joint privacy, and the split baseline.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import dp_accounting
import numpy as np

from tf_bdp import validation
from tf_bdp.accounting import events, mean_bounds
from tf_bdp.mechanisms import client as mechanism_lib

INSTANCE_LEVELS = (
  'instance_sequential',
  'instance_parallel',
  'instance_aggregate',
)
LEVELS = (*INSTANCE_LEVELS, 'joint', 'split')
ACCOUNTINGS = ('sequential', 'parallel', 'aggregate')
CLIPPINGS = ('batch', 'example')
JOINT_IS_FOR_FED_SGD = (
  'Joint privacy is for FedSGD only: in FedAvg every noisy step changes the '
  'point at which the next gradient is taken, and the noise that remains in '
  'the update is not what was added.'
)


class ExampleGroups(NamedTuple):
  """How far the examples of clients move what their clients send.

  A group is the examples measured at one client in one of its local steps.

  Attributes:
    clients: The client of each group.
    steps: The local step of each group, from 0.
    holdings: How many examples each group's client has.
    sizes: How many of them were measured.
    squared_moves: ‖f(B) - f(B∖x)‖² / C², f being what the noise is added to;
      all groups in a row.
    in_every_round: Whether each group's client is measured in every round,
      taking part or not; if not, it is because it took part.
  """

  clients: np.ndarray
  steps: np.ndarray
  holdings: np.ndarray
  sizes: np.ndarray
  squared_moves: np.ndarray
  in_every_round: np.ndarray

  @classmethod
  def empty(cls) -> 'ExampleGroups':
    """Returns no groups."""
    none = np.zeros(0, np.int64)
    moves, in_every_round = np.zeros(0, np.float32), np.zeros(0, bool)
    return cls(none, none, none, none, moves, in_every_round)

  def moves(self) -> list[np.ndarray]:
    """Returns the squared moves of each group."""
    return np.split(self.squared_moves, np.cumsum(self.sizes)[:-1])


@dataclasses.dataclass(frozen=True)
class InstanceMechanism:
  """What clients send, for a batch of b examples with gradients g_x.

    clipping='batch' (the paper):  clip(1/b Σ g_x, C) + N(0, (σ C)² I)
    clipping='example' (DP-SGD):  (Σ clip(g_x, C) + N(0, (σ C)² I)) / B

  Several local steps each release this. The server takes the mean of what the
  n participants sent, and may add noise N(0, (z C / n̄)² I) of its own.
  Sequential accounting is the paper's: it under-reports for a person who stays
  with one client.

  Attributes:
    level: 'instance_sequential', 'instance_parallel', 'instance_aggregate';
      'joint': the clients' noise also counts towards client privacy; 'split':
      it does not, and the server's own noise hides clients.
    noise_multiplier: σ.
    clip_norm: C.
    batch_size: B. Each example is drawn with probability B / N_i.
    participation_probability: α, the chance that a client takes part.
    expected_clients: n̄ = α N.
    total_examples: How many examples all clients have together; sequential
      accounting sends it to the clients.
    smallest_holding: The fewest examples that any client has.
    clipping: 'batch' or 'example'.
    server_noise_multiplier: z.
    accounting: How the examples' costs are counted where the level does not
      say: in 'joint' as 'sequential', 'parallel' or 'aggregate' (by default),
      in 'split' as 'sequential' or 'parallel' (by default).
    local_steps: The most steps a client takes in a round.
    panel_examples: How many examples of a client are measured in every round,
      drawn or not; with 0 those that were drawn are.
    reference_is_last_mean: In 'joint', what stands for an absent client: the
      last released mean, clipped to C, instead of 0.
  """

  level: str
  noise_multiplier: float
  clip_norm: float
  batch_size: int
  participation_probability: float
  expected_clients: float
  total_examples: int
  smallest_holding: int = 1
  clipping: str = 'batch'
  server_noise_multiplier: float = 0.0
  accounting: str = ''
  local_steps: int = 1
  panel_examples: int = 0
  reference_is_last_mean: bool = False

  # What engines ask of any mechanism.
  kind = 'mean'
  clip_quantile = None

  def __post_init__(self) -> None:
    validation.check_choice('level', self.level, LEVELS)
    implied = self.level.removeprefix('instance_')
    if self.level in INSTANCE_LEVELS:
      if self.accounting not in ('', implied):
        raise ValueError(
          f'level {self.level!r} is accounted for as {implied!r}. Found '
          f'accounting = {self.accounting!r}.'
        )
      object.__setattr__(self, 'accounting', implied)
    elif not self.accounting:
      default = 'aggregate' if self.level == 'joint' else 'parallel'
      object.__setattr__(self, 'accounting', default)
    validation.check_choice('accounting', self.accounting, ACCOUNTINGS)
    validation.check_choice('clipping', self.clipping, CLIPPINGS)
    for name in ('noise_multiplier', 'server_noise_multiplier'):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(
          f'{name} must be non-negative and finite. Found '
          f'{getattr(self, name)}.'
        )
    validation.check_positive('clip_norm', self.clip_norm)
    for name in (
      *('batch_size', 'total_examples', 'local_steps'),
      'smallest_holding',
    ):
      validation.check_positive_integer(name, getattr(self, name))
    validation.check_probability(
      'participation_probability', self.participation_probability
    )
    validation.check_positive('expected_clients', self.expected_clients)
    self._check_combination()

  def _check_combination(self) -> None:
    """Raises ValueError for settings that contradict each other."""
    if self.panel_examples:
      validation.check_positive_integer('panel_examples', self.panel_examples)
    if self.panel_examples and self.panel_examples < mean_bounds.FEWEST_UNITS:
      raise ValueError(
        f'panel_examples must be at least {mean_bounds.FEWEST_UNITS}, or 0 for '
        f'none. Found {self.panel_examples}.'
      )
    if self.panel_examples and self.accounting == 'sequential':
      raise ValueError(
        'Sequential accounting takes an example as drawn anew from all clients '
        'in every round, so there is no panel of examples. Leave '
        'panel_examples at 0, or account by aggregate or parallel.'
      )
    if self.level == 'joint' and self.local_steps > 1:
      raise ValueError(JOINT_IS_FOR_FED_SGD)
    counts_server_noise = self.level in ('joint', 'split') or (
      self.accounting == 'aggregate'
    )
    if self.server_noise_multiplier and not counts_server_noise:
      raise ValueError(
        f'At level {self.level!r} what clients send is accounted for, before '
        'the server adds anything: server_noise_multiplier must be 0. Found '
        f'{self.server_noise_multiplier}.'
      )
    if self.level == 'split' and self.accounting == 'aggregate':
      raise ValueError(
        'Split privacy clips what clients send, after their noise: the noise '
        'in the mean is not Gaussian, and cannot be counted together. Account '
        'by parallel or sequential.'
      )
    if self.level == 'split' and not (
      bool(self.server_noise_multiplier) == bool(self.noise_multiplier)
    ):
      raise ValueError(
        'Split privacy needs both a noise_multiplier, for examples, and a '
        'server_noise_multiplier, for clients. Found '
        f'{self.noise_multiplier} and {self.server_noise_multiplier}.'
      )
    if self.reference_is_last_mean and self.level != 'joint':
      raise ValueError(
        f"reference_is_last_mean is for level 'joint'. Found {self.level!r}."
      )

  @property
  def units(self) -> tuple[str, ...]:
    """What is protected."""
    return (
      ('example',)
      if self.level in INSTANCE_LEVELS
      else (
        'client',
        'example',
      )
    )

  @property
  def client_noise_per_clip_norm(self) -> float:
    """The deviation of the noise in what a client sends, over C."""
    if self.clipping == 'example':
      return self.noise_multiplier / self.batch_size
    return self.noise_multiplier

  @property
  def noise_per_clip_norm(self) -> float:
    """The deviation of the server's own noise in the mean, over C."""
    return self.server_noise_multiplier / self.expected_clients

  @property
  def clips_updates(self) -> bool:
    """Whether the server clips what clients send."""
    return self.level == 'split'

  @property
  def server(self) -> mechanism_lib.GaussianMechanism:
    """The client-level mechanism of 'split', on the noisy updates."""
    return mechanism_lib.GaussianMechanism(
      'mean',
      self.server_noise_multiplier,
      self.clip_norm,
      self.participation_probability,
      self.expected_clients,
    )

  @property
  def averages_noise(self) -> bool:
    """Whether the other clients' noise hides an example, too.

    Only if nothing but the mean is released, and if the noise is that of one
    step: with several, a client's later gradients depend on its own noise, and
    a client's chance to take part is one for all its steps. Then the steps
    count as in parallel accounting, which holds for whatever follows them.
    """
    return self.accounting == 'aggregate' and self.local_steps == 1

  @property
  def largest_example_probability(self) -> float:
    """At least q of every example."""
    if self.accounting == 'sequential':
      return min(1.0, self.batch_size / self.total_examples)
    return self.example_probability(self.smallest_holding)

  def draw_probability(self, holding: int) -> float:
    """Returns the chance of an example to be in its client's batch."""
    return min(1.0, self.batch_size / max(1, holding))

  def example_probability(self, holding: int) -> float:
    """Returns q of the examples of a client that has `holding` of them."""
    if self.accounting == 'sequential':
      return min(self.batch_size, holding) / self.total_examples
    return self.draw_probability(holding)

  def inclusion_probability(self, participants: int) -> float:
    """Returns the chance of a client to be one of the n that took part.

    A client that takes part shows by its noise and in the mean, whether or not
    a unit of it is there, so that α is not the chance of being sampled unseen:
    it counts by joint convexity only (see `BayesianGaussianEvent`). As n is
    public, it is n / N.
    """
    clients = self.expected_clients / self.participation_probability
    return min(1.0, participants / clients)

  def example_variance(self, participants: Any) -> Any:
    """The variance, over C², of the noise that hides a move of one client.

    Args:
      participants: n, at least 1; a number or a tensor.
    """
    if self.averages_noise:
      return self.mean_variance(participants) * participants**2
    return self.client_noise_per_clip_norm**2

  def mean_variance(self, participants: Any) -> Any:
    """The variance, over C², of the noise in the released mean of n."""
    own = self.client_noise_per_clip_norm**2 / participants
    return own + self.noise_per_clip_norm**2

  @property
  def worst_case_move(self) -> float:
    """How far an example can move what its client sends, over C.

    Two clipped batch gradients are at most 2 C apart; of a sum of clipped
    gradients over B, one is C / B.
    """
    return 2.0 if self.clipping == 'batch' else 1.0 / self.batch_size

  def worst_case_squared_distance(self, participants: int) -> float:
    """Returns the largest r² of any example, with n participants."""
    variance = self.example_variance(max(1, participants))
    return self.worst_case_move**2 / variance if variance else math.inf

  def example_event(
    self, groups: ExampleGroups, participants: int
  ) -> dp_accounting.DpEvent:
    """Returns a round as an event for an accountant of examples."""
    if not self.example_variance(max(1, participants)):
      return dp_accounting.NonPrivateDpEvent()
    if not groups.sizes.size or (self.averages_noise and not participants):
      return dp_accounting.NoOpDpEvent()
    parts = [
      self._group_event(moves, int(holding), participants, bool(always))
      for moves, holding, always in zip(
        groups.moves(), groups.holdings, groups.in_every_round
      )
    ]
    if self.accounting != 'sequential':
      parts = [
        events.ParallelEvent(
          part for part, other in zip(parts, groups.steps) if other == step
        )
        for step in np.unique(groups.steps)
      ]
    return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)

  def local_events(
    self, groups: ExampleGroups, participants: int
  ) -> dict[int, dp_accounting.DpEvent]:
    """Returns a round as each client sees it, which trusts nobody else.

    In parallel accounting a client's own accountant, fed with these, bounds
    what its examples lose by all that it sends.
    """
    if self.accounting != 'parallel':
      raise ValueError(
        'Clients bound their own loss in parallel accounting. Found '
        f'accounting = {self.accounting!r}.'
      )
    if not self.noise_multiplier:
      clients = np.unique(groups.clients).tolist()
      return {client: dp_accounting.NonPrivateDpEvent() for client in clients}
    parts: dict[int, list[dp_accounting.DpEvent]] = {}
    for client, moves, holding in zip(
      groups.clients, groups.moves(), groups.holdings
    ):
      event = self._group_event(moves, int(holding), participants, False)
      parts.setdefault(int(client), []).append(event)
    return {
      client: dp_accounting.ComposedDpEvent(events)
      for client, events in parts.items()
    }

  def _group_event(
    self,
    squared_moves: np.ndarray,
    holding: int,
    participants: int,
    in_every_round: bool,
  ) -> events.BayesianGaussianEvent:
    """Returns the event of one client's step; its worst case if too small.

    A client that is charged in every round is charged for its chance to come;
    one that is charged when it came, is charged for that.
    """
    inclusion = 1.0
    if self.averages_noise and in_every_round:
      inclusion = self.inclusion_probability(participants)
    worst = self.worst_case_squared_distance(participants)
    squared = np.asarray(squared_moves, np.float64)
    squared = squared / self.example_variance(max(1, participants))
    if squared.size < mean_bounds.FEWEST_UNITS:
      squared = np.full(mean_bounds.FEWEST_UNITS, worst)
    return events.BayesianGaussianEvent(
      # Rounding in float32 must not carry a move beyond the worst case.
      np.minimum(squared, worst),
      self.example_probability(holding),
      worst,
      bool(self.panel_examples),
      inclusion,
    )

  def client_event(
    self,
    squared_measures: np.ndarray,
    taking_part: np.ndarray,
    participants: int,
    clip_norm: float,
    panel: bool,
  ) -> dp_accounting.DpEvent:
    """Returns a round as an event for an accountant of clients.

    In 'split' as `GaussianMechanism.event`. In 'joint' adjacency is zero-out:
    an absent client contributes its noise, around 0 or the last mean, so that
    it moves the mean of n by ‖u_i‖ / n, hidden by the noise of all.

    Args:
      squared_measures: In 'joint' ‖u_i‖² of measured clients before noise, or
        their squared distance from the last mean.
      taking_part: Whether each took part.
      participants: n.
      clip_norm: C.
      panel: Whether the clients are the same in every round.
    """
    if self.level == 'split':
      return self.server.event(
        squared_measures, taking_part, participants, clip_norm, panel
      )
    variance = self.mean_variance(max(1, participants))
    if not variance:
      return dp_accounting.NonPrivateDpEvent()
    if not participants:
      return dp_accounting.NoOpDpEvent()
    worst = self.worst_case_client_squared_distance(participants)
    squared = np.asarray(squared_measures, np.float64) / clip_norm**2
    squared = np.minimum(squared / (participants**2 * variance), worst)
    if squared.size < mean_bounds.FEWEST_UNITS:
      squared = np.full(mean_bounds.FEWEST_UNITS, worst)
    return events.BayesianGaussianEvent(
      squared, 1.0, worst, panel, self.inclusion_probability(participants)
    )

  def worst_case_client_squared_distance(self, participants: int) -> float:
    """Returns the largest r² of any client, with n participants."""
    if self.level == 'split':
      return self.server.worst_case_squared_distance(participants)
    variance = self.mean_variance(max(1, participants))
    move = 2.0 if self.reference_is_last_mean else 1.0
    if not variance:
      return math.inf
    return move**2 / (participants**2 * variance) if participants else 0.0

  def events(
    self,
    squared_measures: np.ndarray,
    taking_part: np.ndarray,
    groups: Optional[ExampleGroups],
    participants: int,
    clip_norm: float,
    panel: bool,
  ) -> dict[str, dp_accounting.DpEvent]:
    """Returns a round's event for each of `units`."""
    if groups is None:
      raise ValueError(f'level {self.level!r} needs measured examples.')
    result = {}
    if 'client' in self.units:
      result['client'] = self.client_event(
        squared_measures, taking_part, participants, clip_norm, panel
      )
    result['example'] = self.example_event(groups, participants)
    return result

  def reported_event(
    self,
    unit: str,
    costs: np.ndarray,
    failure_probability: float,
    participants: int,
  ) -> dp_accounting.DpEvent:
    """Returns a round of which the server learnt the cost of every order.

    Args:
      unit: 'client' or 'example'.
      costs: For examples summed over all that counts: clients and steps in
        sequential accounting, else steps.
      failure_probability: δ′ of the bounds.
      participants: n.
    """
    if not participants:
      return dp_accounting.NoOpDpEvent()
    if not self.noise_multiplier:
      return dp_accounting.NonPrivateDpEvent()
    if unit == 'client' and self.level == 'split':
      return self.server.reported_event(
        unit, costs, failure_probability, participants
      )
    if unit == 'client':
      return events.ReportedCostEvent(
        costs,
        failure_probability,
        1.0,
        self.worst_case_client_squared_distance(participants),
        self.inclusion_probability(participants),
      )
    repeats = self.local_steps
    if self.accounting == 'sequential':
      repeats *= participants
    event = events.ReportedCostEvent(
      np.asarray(costs) / repeats,
      failure_probability,
      self.largest_example_probability,
      self.worst_case_squared_distance(participants),
    )
    return dp_accounting.SelfComposedDpEvent(event, repeats)


def total_steps(
  mechanism: InstanceMechanism, rounds: int, client_count: int
) -> int:
  """Returns how many costs are added up, for composition by Hölder."""
  steps = rounds * mechanism.local_steps
  return steps * client_count if mechanism.accounting == 'sequential' else steps


def check_holdings(
  mechanism: InstanceMechanism, holdings: Sequence[int]
) -> None:
  """Raises ValueError for clients with too few examples."""
  smallest = min((holding for holding in holdings if holding), default=0)
  if smallest < mechanism.smallest_holding:
    raise ValueError(
      f'smallest_holding is {mechanism.smallest_holding}, but a client has '
      f'{smallest} examples.'
    )
  if mechanism.panel_examples and smallest < mean_bounds.FEWEST_UNITS:
    raise ValueError(
      f'A panel of examples needs clients with at least '
      f'{mean_bounds.FEWEST_UNITS} examples. Found one with {smallest}.'
    )
