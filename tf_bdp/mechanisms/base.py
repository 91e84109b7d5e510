"""What every mechanism can be asked, whatever it protects.

A mechanism says what a round releases, and what that costs whom. It has up to
two parts: a `local` one, which clients run on their own data before they send
anything, and an `Aggregation`, which makes one released mean of what they sent.
Nothing here depends on TensorFlow: formulas take numbers, arrays or tensors.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional, Protocol

import dp_accounting

from tf_bdp import validation
from tf_bdp.mechanisms import measurements as measurements_lib

if TYPE_CHECKING:
  from tf_bdp.mechanisms import instance

ADD_OR_REMOVE_ONE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE

# How participants may be drawn; see `learning.Sampler`.
SAMPLINGS = ('poisson', 'fixed_size')

# Which of the server's two noises of a round is drawn: each has its own stream.
UPDATE_NOISE = 0
COUNT_NOISE = 1
# Adds Gaussian noise: a function of arrays or tensors, the standard deviation,
# and the purpose, which is one of the two above.
AddNoise = Callable[[Sequence[Any], Any, int], Sequence[Any]]


class Sums(NamedTuple):
  """Sums over the participants of a round.

  Attributes:
    update: The sum of their updates, one array or tensor for each part.
    usable: How many updates were usable.
    below: How many of these had a norm of at most the clip norm.
  """

  update: Sequence[Any]
  usable: Any
  below: Any


class Release(NamedTuple):
  """What comes out of a round.

  Attributes:
    result: The mean with its noise: all that is released.
    aggregate: The mean before noise, in the same parts.
    state: The aggregation's state for the next round.
  """

  result: Sequence[Any]
  aggregate: Sequence[Any]
  state: Any


class Aggregation(Protocol):
  """Makes what is released from what clients sent; may keep state.

  Attributes:
    clips: Whether updates are clipped before they are summed. If not, clients
      have clipped them before they added noise of their own.
    compares: Whether a client is measured by its distance from the mean of the
      participants, instead of by its own norm.
  """

  @property
  def clips(self) -> bool: ...

  @property
  def compares(self) -> bool: ...

  def initial_state(self) -> Any:
    """Returns the state before the first round, a NamedTuple of numbers.

    Its field `clip_norm` is the clip norm of the round to come.
    """

  def release(self, state: Any, sums: Sums, add_noise: AddNoise) -> Release:
    """Makes the mean, adds noise and moves the state on.

    Args:
      state: The state before the round.
      sums: Sums over the participants; arrays or tensors.
      add_noise: Adds noise of a given standard deviation.
    """

  def measure(
    self,
    squared_norm: Any,
    squared_deviation: Any,
    taking_part: Any,
    participants: Any,
  ) -> Any:
    """Returns the squared measure of a client; see `measurements`.

    Args:
      squared_norm: ‖u‖², where u is the client's clipped update.
      squared_deviation: ‖u - ū‖², where ū is the mean of the participants.
      taking_part: Whether the client takes part.
      participants: n.
    """


class Mechanism(Protocol):
  """What a round releases, what it costs, and for whom.

  Attributes:
    level: Its name in `LEVELS`.
    units: What is protected: 'client', 'example' or both. A run's `delta` and
      `bdp_epsilon_budget` are those of the first.
    noise_multiplier: The standard deviation of the noise, in units of the clip
      norm; with 0 there is no privacy.
    clip_norm: C.
    participation_probability: α, the chance that a client takes part.
    clients_per_round: n̄ = α N, the expected number of participants.
    aggregation: What the server does.
    local: What clients do to their updates before, if anything.
    samplings: How participants may be drawn for its events to hold.
  """

  @property
  def level(self) -> str: ...

  @property
  def units(self) -> tuple[str, ...]: ...

  @property
  def noise_multiplier(self) -> float: ...

  @property
  def clip_norm(self) -> float: ...

  @property
  def participation_probability(self) -> float: ...

  @property
  def clients_per_round(self) -> float: ...

  @property
  def aggregation(self) -> Aggregation: ...

  @property
  def local(self) -> 'Optional[instance.InstanceMechanism]': ...

  @property
  def samplings(self) -> tuple[str, ...]: ...

  def relation(self, unit: str) -> dp_accounting.NeighboringRelation:
    """Returns which data sets are neighbours in the guarantee of a unit."""

  def worst_case_squared_distance(self, unit: str, participants: Any) -> Any:
    """Returns the largest r² that clipping allows, with n participants."""

  def events(
    self, measurements: measurements_lib.Measurements
  ) -> dict[str, dp_accounting.DpEvent]:
    """Returns a round's event for the accountant of each unit."""

  def is_panel(self, unit: str, panel_size: int) -> bool:
    """Whether a unit is measured on a panel, with that many panel clients."""

  def cost_count(self, unit: str, rounds: int, client_count: int) -> int:
    """Returns how many costs of a unit a run adds up, for Hölder's T."""

  def counted_otherwise(self) -> 'dict[str, Mechanism]':
    """Returns the mechanism under every accounting of its measurements."""

  def paper_dp_event(self) -> Optional[dp_accounting.DpEvent]:
    """Returns a round as the paper counts DP, if that differs from ours."""

  def description(self, unit: str) -> 'Description':
    """Returns what a report says about the protection of a unit."""

  def caveats(self) -> list[str]:
    """Returns what the figures rest on, a sentence each."""


class Description(NamedTuple):
  """What a report says about the protection of a unit.

  Attributes:
    release: What the noise is added to, a name that the report knows.
    noise_multiplier: The multiplier of the noise that protects the unit.
    participation_probability: The chance that a unit is sampled; None if it is
      not the same for all units.
  """

  release: str
  noise_multiplier: float
  participation_probability: Optional[float]


class Facts(NamedTuple):
  """What a mechanism has to know about the data, and how clients learn.

  Attributes:
    holdings: How many examples each client has.
    batch_size: How many of them a client draws for a step on average.
    local_steps: The most steps that a client takes in a round.
    held_out_clients: How many of the clients never take part.
  """

  holdings: Sequence[int]
  batch_size: int = 1
  local_steps: int = 1
  held_out_clients: int = 0

  @property
  def client_count(self) -> int:
    """The number of clients that may take part, N."""
    return len(self.holdings) - self.held_out_clients


# All levels by name. Each value makes the level's mechanism from options (see
# `tf_bdp.training.plan.Privacy`) and from facts about the data.
LEVELS: dict[str, Callable[[Any, Facts], Mechanism]] = {}


def register(
  *levels: str,
) -> Callable[
  [Callable[[Any, Facts], Mechanism]],
  Callable[[Any, Facts], Mechanism],
]:
  """Registers a function in `LEVELS`, under one or several names."""

  def enter(
    make: Callable[[Any, Facts], Mechanism],
  ) -> Callable[[Any, Facts], Mechanism]:
    for level in levels:
      LEVELS[level] = make
    return make

  return enter


def worst_case_event(
  squared_distance: float, participation_probability: float
) -> dp_accounting.DpEvent:
  """Returns the event of a round of which only the worst case is known."""
  if math.isinf(squared_distance):
    return dp_accounting.NonPrivateDpEvent()
  if not squared_distance:
    return dp_accounting.NoOpDpEvent()
  return dp_accounting.PoissonSampledDpEvent(
    participation_probability,
    dp_accounting.GaussianDpEvent(squared_distance**-0.5),
  )


def check_common(mechanism: Any) -> None:
  """Raises ValueError for parameters that no mechanism can have."""
  validation.check_not_negative('noise_multiplier', mechanism.noise_multiplier)
  validation.check_positive('clip_norm', mechanism.clip_norm)
  validation.check_positive('clients_per_round', mechanism.clients_per_round)
  validation.check_probability(
    'participation_probability', mechanism.participation_probability
  )
