"""Privacy of examples by noise of the clients: Section V-B of the paper.

Every client clips the gradients of a batch and adds noise before it sends
them. The three instance levels differ in how the costs are counted.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Optional

import dp_accounting
import numpy as np

from tf_bdp import array_namespace, validation
from tf_bdp.accounting import events as events_lib
from tf_bdp.accounting import mean_bounds
from tf_bdp.mechanisms import base, noisy_mean
from tf_bdp.mechanisms import measurements as measurements_lib

ACCOUNTINGS = ('sequential', 'parallel', 'aggregate')
CLIPPINGS = ('batch', 'example')

_CAVEATS = {
  'sequential': (
    'Sequential accounting: costs of all clients are added up, with q = B / N '
    'of all examples, as if a person were drawn anew from all clients in every '
    'round. DP and BDP figures of examples are not proven for a person who '
    'stays with one client; aggregate accounting is the sound reading.'
  ),
  'parallel': (
    'Parallel accounting: every client counts its own examples with q = B / '
    'N_i, and the largest cost of any client is reported. It holds even if the '
    "server sees each client's noisy update."
  ),
  'aggregate': (
    'Aggregate accounting: the noise of all participants hides an example. It '
    'holds for the released mean only: the server, or whoever takes the mean, '
    'must be trusted or see nothing but sums, and clients that collude can '
    'take their own noise away.'
  ),
}


@dataclasses.dataclass(frozen=True)
class InstanceMechanism:
  """What clients send, for a batch of b examples with gradients g_x.

    clipping='batch' (the paper):  clip(1/b Σ g_x, C) + N(0, (σ C)² I)
    clipping='example' (DP-SGD):  (Σ clip(g_x, C) + N(0, (σ C)² I)) / B

  Several local steps each release this. The server takes the mean of what the
  n participants sent, and may add noise N(0, (z C / n̄)² I) of its own.

  Attributes:
    accounting: 'sequential', the paper's, which under-reports for a person who
      stays with one client; 'parallel'; or 'aggregate'.
    noise_multiplier: σ.
    clip_norm: C.
    batch_size: B. Each example is drawn with probability B / N_i.
    participation_probability: α, the chance that a client takes part.
    clients_per_round: n̄ = α N, the expected number of participants.
    total_examples: How many examples all clients have together; sequential
      accounting sends it to the clients.
    smallest_holding: The fewest examples that any client has.
    clipping: 'batch' or 'example'.
    server_noise_multiplier: z.
    local_steps: The most steps that a client takes in a round.
    panel_examples: How many examples of a client are measured in every round,
      drawn or not; with 0 the drawn examples are measured.
  """

  accounting: str
  noise_multiplier: float
  clip_norm: float
  batch_size: int
  participation_probability: float
  clients_per_round: float
  total_examples: int
  smallest_holding: int = 1
  clipping: str = 'batch'
  server_noise_multiplier: float = 0.0
  local_steps: int = 1
  panel_examples: int = 0

  units: ClassVar[tuple[str, ...]] = ('example',)
  # Neighbours differ in an example, not in who the clients are. How many take
  # part may be known: a client is one of n out of N with probability n / N
  # however they are drawn, see `inclusion_probability`.
  samplings: ClassVar[tuple[str, ...]] = base.SAMPLINGS
  # Whether a client's whole update is clipped as well; see `joint`.
  bounds_clients = False
  # What stands for an absent client; see `joint`.
  reference_is_last_mean = False

  def __post_init__(self) -> None:
    validation.check_choice('accounting', self.accounting, ACCOUNTINGS)
    validation.check_choice('clipping', self.clipping, CLIPPINGS)
    base.check_common(self)
    validation.check_not_negative(
      'server_noise_multiplier', self.server_noise_multiplier
    )
    for name in (
      *('batch_size', 'total_examples', 'local_steps'),
      'smallest_holding',
    ):
      validation.check_positive_integer(name, getattr(self, name))
    if self.panel_examples:
      self._check_panel()
    self._check_server_noise()

  def _check_panel(self) -> None:
    validation.check_positive_integer('panel_examples', self.panel_examples)
    if self.panel_examples < mean_bounds.FEWEST_UNITS:
      raise ValueError(
        f'panel_examples must be at least {mean_bounds.FEWEST_UNITS}, or 0 for '
        f'none. Found {self.panel_examples}.'
      )
    if self.adds_up_clients:
      raise ValueError(
        'Sequential accounting takes an example as drawn anew from all clients '
        'in every round, so there is no panel of examples. Leave '
        'panel_examples at 0, or account by aggregate or parallel.'
      )

  def _check_server_noise(self) -> None:
    if self.server_noise_multiplier and self.accounting != 'aggregate':
      raise ValueError(
        f'At level {self.level!r} what clients send is accounted for, before '
        'the server adds anything: server_noise_multiplier must be 0. Found '
        f'{self.server_noise_multiplier}.'
      )

  def check_fed_avg(self) -> None:
    """Raises ValueError if FedAvg, even with one step, is not covered."""
    if self.averages_noise and self.server_noise_multiplier:
      raise ValueError(
        'In fed_avg clients scale their noise by their learning rate, and the '
        "server's noise cannot be added to it: server_noise_multiplier must be "
        f'0. Found {self.server_noise_multiplier}.'
      )

  @property
  def level(self) -> str:
    """The name of the level."""
    return f'instance_{self.accounting}'

  @property
  def local(self) -> 'InstanceMechanism':
    """The mechanism itself: clients run it."""
    return self

  @property
  def aggregation(self) -> base.Aggregation:
    """The mean of what clients sent, with the server's noise on top."""
    return noisy_mean.NoisyMean(self.noise_per_clip_norm, self.clip_norm)

  def relation(self, unit: str) -> dp_accounting.NeighboringRelation:
    """Returns adding or removing one example."""
    del unit
    return base.ADD_OR_REMOVE_ONE

  @property
  def client_noise_per_clip_norm(self) -> float:
    """The standard deviation of the noise in what a client sends, over C."""
    if self.clipping == 'example':
      return self.noise_multiplier / self.batch_size
    return self.noise_multiplier

  @property
  def noise_per_clip_norm(self) -> float:
    """The standard deviation of the server's noise in the mean, over C."""
    return self.server_noise_multiplier / self.clients_per_round

  @property
  def averages_noise(self) -> bool:
    """Whether the other clients' noise hides an example, too.

    It does if nothing but the mean is released and clients take a single step.
    With several steps, a client's later gradients depend on its own noise, and
    it takes part in all of its steps or in none. Each step is then accounted
    for as in parallel accounting, which holds whatever follows the step.
    """
    return self.accounting == 'aggregate' and self.local_steps == 1

  @property
  def adds_up_clients(self) -> bool:
    """Whether the costs of clients are added up; else the largest counts."""
    return self.accounting == 'sequential'

  @property
  def counts_locally(self) -> bool:
    """Whether clients bound their own loss, trusting nobody else."""
    return self.accounting == 'parallel'

  @property
  def measures_absent_clients(self) -> bool:
    """Whether clients of a panel matter in rounds that they are not in."""
    return self.averages_noise or 'client' in self.units

  @property
  def largest_example_probability(self) -> float:
    """An upper bound of q over all examples."""
    if self.adds_up_clients:
      return min(1.0, self.batch_size / self.total_examples)
    return self.draw_probability(self.smallest_holding)

  def draw_probability(self, holding: Any) -> Any:
    """Returns the chance that an example is in its client's batch."""
    xp = array_namespace.of(holding)
    return xp.minimum(self.batch_size / xp.maximum(xp.float64(holding), 1), 1)

  def example_probability(self, holding: Any) -> Any:
    """Returns q of the examples of a client that has `holding` of them."""
    if self.adds_up_clients:
      xp = array_namespace.of(holding)
      drawn = xp.minimum(xp.float64(self.batch_size), xp.float64(holding))
      return drawn / self.total_examples
    return self.draw_probability(holding)

  def inclusion_probability(self, participants: Any) -> Any:
    """Returns the chance that a client is one of the n that took part.

    Whether a client takes part shows in the release even without the unit in
    question, by the client's noise and its other examples. So α does not
    amplify privacy as sampling does: it helps by joint convexity only (see
    `BayesianGaussianEvent`). As n is public, the chance is n / N.
    """
    xp = array_namespace.of(participants)
    clients = self.clients_per_round / self.participation_probability
    return xp.minimum(xp.float64(participants) / clients, 1)

  def example_variance(self, participants: Any) -> Any:
    """Returns the variance, over C², of the noise that hides an example's move.

    Args:
      participants: n; a number or a tensor.
    """
    if self.averages_noise:
      count = _at_least_one(participants)
      return self.mean_variance(count) * count**2
    return self.client_noise_per_clip_norm**2

  def mean_variance(self, participants: Any) -> Any:
    """Returns the variance, over C², of the noise in the released mean of n."""
    own = self.client_noise_per_clip_norm**2 / _at_least_one(participants)
    return own + self.noise_per_clip_norm**2

  @property
  def worst_case_move(self) -> float:
    """How far an example can move what its client sends, over C.

    Two clipped batch gradients are at most 2 C apart; to a sum of clipped
    gradients over B, one example contributes at most C / B.
    """
    return 2.0 if self.clipping == 'batch' else 1.0 / self.batch_size

  def worst_case_squared_distance(self, unit: str, participants: Any) -> Any:
    """Returns the largest r² of any example, with n participants."""
    del unit
    # Noise of the server hides nothing where it sees what each client sends.
    server_noise = self.averages_noise and self.noise_per_clip_norm
    if not (self.noise_multiplier or server_noise):
      return math.inf
    return self.worst_case_move**2 / self.example_variance(participants)

  def groups(
    self,
    clients: Mapping[int, measurements_lib.MeasuredClient],
    panel: Collection[int],
    unmeasured_clients: Collection[int] = (),
  ) -> measurements_lib.ExampleGroups:
    """Returns the measured examples in groups, one for each client and step.

    Args:
      clients: What is known of each measured client.
      panel: The clients that are measured in every round.
      unmeasured_clients: Others that took part with examples.
    """
    groups, absent = [], []
    for number, client in clients.items():
      for step in range(self.local_steps if client.holding else 0):
        if step >= client.step_count:
          if not self.panel_examples:
            continue
          # A panel keeps its size: where nothing was released, nothing moves.
          # So it is of clients that are absent, unless the mean hides them.
          moves = np.zeros(min(self.panel_examples, client.holding))
        else:
          measured = client.measured[step]
          moves = np.full(np.count_nonzero(measured), self.worst_case_move**2)
          if client.squared_moves is not None:
            moves = client.squared_moves[step, : measured.size][measured]
        groups.append((number, step, client.holding, moves, number in panel))
        absent.append(step >= client.step_count)
    return measurements_lib.ExampleGroups.of(groups, absent, unmeasured_clients)

  def events(
    self, measurements: measurements_lib.Measurements
  ) -> dict[str, dp_accounting.DpEvent]:
    """Returns the round as an event for an accountant of examples."""
    if measurements.reported is not None:
      return {'example': self._reported_event(measurements)}
    if measurements.examples is None:
      raise ValueError(f'level {self.level!r} needs measured examples.')
    return {
      'example': self._example_event(
        measurements.examples, measurements.participants
      )
    }

  def _example_event(
    self, groups: measurements_lib.ExampleGroups, participants: int
  ) -> dp_accounting.DpEvent:
    if math.isinf(self.worst_case_squared_distance('example', participants)):
      return dp_accounting.NonPrivateDpEvent()
    if not groups.sizes.size or (self.averages_noise and not participants):
      return dp_accounting.NoOpDpEvent()
    all_known = self._knows_who_lost(groups)
    parts: list[dp_accounting.DpEvent] = list(
      self._group_events(groups, participants, all_known)
    )
    if not self.adds_up_clients:
      # Clients that are not in a panel may have fewer examples.
      others = self.panel_examples and not all_known
      parts = [
        events_lib.ParallelEvent(
          [parts[i] for i in chosen],
          groups.clients[chosen] if all_known else None,
          self.largest_example_probability if others else 0.0,
        )
        for step in np.unique(groups.steps)
        for chosen in [np.flatnonzero(groups.steps == step)]
      ]
    return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)

  def _knows_who_lost(self, groups: measurements_lib.ExampleGroups) -> bool:
    """Tells whether all clients that lost anything in a round are in groups.

    Where what each client sends is counted, an example loses in the rounds of
    its own client, and nothing in those that the client was not in. Who takes
    part is no secret there, so nothing is gained by drawing clients. Of
    participants all are measured. If one is not because it is not in a panel,
    the worst case of the round counts for everybody.
    """
    if self.averages_noise or self.adds_up_clients:
      return False
    if not self.panel_examples:
      return True
    recorded = groups.absent.size == groups.sizes.size
    return recorded and not groups.unmeasured_clients.size

  def local_events(
    self, measurements: measurements_lib.Measurements
  ) -> dict[int, dp_accounting.DpEvent]:
    """Returns a round's event for each client that keeps its own accounts.

    A client that composes these events bounds what its examples lose by all
    that it sends, without trusting the server. It takes parallel accounting.
    """
    groups = measurements.examples
    if not self.counts_locally or groups is None:
      raise ValueError(
        'Clients bound their own loss in parallel accounting. Found '
        f'accounting = {self.accounting!r}.'
      )
    if not self.noise_multiplier:
      clients = np.unique(groups.clients).tolist()
      return {client: dp_accounting.NonPrivateDpEvent() for client in clients}
    parts: dict[int, list[dp_accounting.DpEvent]] = {}
    # Each looks at itself alone.
    found = self._group_events(groups, measurements.participants, True)
    for client, event in zip(groups.clients.tolist(), found):
      parts.setdefault(client, []).append(event)
    return {
      client: dp_accounting.ComposedDpEvent(steps)
      for client, steps in parts.items()
    }

  def _group_events(
    self,
    groups: measurements_lib.ExampleGroups,
    participants: int,
    all_known: bool,
  ) -> Iterator[events_lib.BayesianGaussianEvent]:
    """Yields each group's event; its worst case if too few were measured.

    A client that is measured in every round is charged for its chance to take
    part. Any other is measured only when it took part, and charged in full.

    Args:
      groups: The groups.
      participants: n.
      all_known: Whether an event's worst case stands for its own client alone;
        that of an absent one is then nothing.
    """
    worst = float(self.worst_case_squared_distance('example', participants))
    variance = float(self.example_variance(participants))
    included = float(self.inclusion_probability(participants))
    absent = np.zeros(groups.sizes.size, bool)
    if all_known and groups.absent.size and not self.averages_noise:
      absent = groups.absent
    for moves, holding, always, limit in zip(
      groups.moves(),
      groups.holdings,
      groups.in_every_round,
      np.where(absent, 0.0, worst).tolist(),
    ):
      squared = np.asarray(moves, np.float64) / variance
      if squared.size < mean_bounds.FEWEST_UNITS:
        squared = np.full(mean_bounds.FEWEST_UNITS, limit)
      yield events_lib.BayesianGaussianEvent(
        # Rounding in float32 must not carry a move beyond the worst case.
        np.minimum(squared, limit),
        float(self.example_probability(holding)),
        limit,
        bool(self.panel_examples),
        included if self.averages_noise and always else 1.0,
      )

  def _reported_event(
    self, measurements: measurements_lib.Measurements
  ) -> dp_accounting.DpEvent:
    """Returns the event of a round in which clients reported costs.

    These are sums: over clients and steps in sequential accounting, else over
    steps. The server learns the largest cost of a round and not whose it is, so
    it is added up over all rounds, as if one client had been in all of them.
    """
    assert measurements.reported is not None
    if not measurements.participants:
      return dp_accounting.NoOpDpEvent()
    if not self.noise_multiplier:
      return dp_accounting.NonPrivateDpEvent()
    repeats = self.local_steps
    if self.adds_up_clients:
      repeats *= measurements.participants
    costs, failure_probability = measurements.reported['example']
    event = events_lib.ReportedCostEvent(
      np.asarray(costs) / repeats,
      failure_probability,
      float(self.largest_example_probability),
      float(
        self.worst_case_squared_distance('example', measurements.participants)
      ),
    )
    return dp_accounting.SelfComposedDpEvent(event, repeats)

  def is_panel(self, unit: str, panel_size: int) -> bool:
    """Whether there is a panel of clients, or of examples."""
    return bool(self.panel_examples if unit == 'example' else panel_size)

  def cost_count(self, unit: str, rounds: int, client_count: int) -> int:
    """Returns how many costs of a unit are added up."""
    if unit == 'client':
      return rounds
    steps = rounds * self.local_steps
    return steps * client_count if self.adds_up_clients else steps

  def counted_otherwise(self) -> dict[str, base.Mechanism]:
    """Returns the mechanism with each accounting that its measurements allow.

    Sequential accounting needs the participants' examples alone, which are
    measured for the other accountings as well; the reverse does not hold.
    """
    ways = dict.fromkeys(('sequential', self.accounting))
    result: dict[str, base.Mechanism] = {}
    if 'client' in self.units:
      result['client'] = self
    for accounting in ways:
      changed = self
      if accounting != self.accounting:
        changed = dataclasses.replace(
          self, accounting=accounting, panel_examples=0
        )
      result[f'example_{accounting}'] = changed
    return result

  def paper_dp_event(self) -> Optional[dp_accounting.DpEvent]:
    """Returns nothing: the paper counts as we do."""
    return None

  def description(self, unit: str) -> base.Description:
    """Returns what a report says about the protection of examples."""
    del unit
    return base.Description(self.clipping, self.noise_multiplier, None)

  def caveats(self) -> list[str]:
    """Returns what figures of examples rest on."""
    accounting = self.accounting
    if accounting == 'aggregate' and not self.averages_noise:
      accounting = 'parallel'
    caveats = [_CAVEATS[accounting]]
    if self.accounting != accounting:
      caveats.append(
        'With several local steps the noise of other clients cannot be '
        'counted, so aggregate accounting is that of parallel.'
      )
    return caveats

  def check_holdings(self, holdings: Sequence[int]) -> None:
    """Raises ValueError for clients with too few examples."""
    smallest = min((holding for holding in holdings if holding), default=0)
    if smallest < self.smallest_holding:
      raise ValueError(
        f'smallest_holding is {self.smallest_holding}, but a client has '
        f'{smallest} examples.'
      )
    if self.panel_examples and smallest < mean_bounds.FEWEST_UNITS:
      raise ValueError(
        f'A panel of examples needs clients with at least '
        f'{mean_bounds.FEWEST_UNITS} examples. Found one with {smallest}.'
      )


def _at_least_one(participants: Any) -> Any:
  xp = array_namespace.of(participants)
  return xp.maximum(xp.float64(participants), 1)


def arguments(options: Any, facts: base.Facts) -> dict[str, Any]:
  """Returns the constructor's arguments, except `accounting`."""
  noise = options.noise_multiplier
  if noise is None:
    noise = 0.3 if options.clipping == 'batch' else 2.0
  return {
    'noise_multiplier': noise,
    'clip_norm': options.clip_norm,
    'batch_size': facts.batch_size,
    'participation_probability': options.participation_probability,
    'clients_per_round': options.participation_probability * facts.client_count,
    'total_examples': sum(facts.holdings),
    'smallest_holding': min(filter(None, facts.holdings), default=1),
    'clipping': options.clipping,
    'server_noise_multiplier': options.server_noise_multiplier,
    'local_steps': facts.local_steps,
    'panel_examples': options.panel_examples,
  }


@base.register(*(f'instance_{accounting}' for accounting in ACCOUNTINGS))
def _make(options: Any, facts: base.Facts) -> InstanceMechanism:
  """Makes the mechanism of an instance level."""
  options.check_idle(
    *('mechanism', 'clip_quantile', 'joint_reference', 'example_accounting')
  )
  accounting = options.level.removeprefix('instance_')
  return InstanceMechanism(accounting, **arguments(options, facts))
