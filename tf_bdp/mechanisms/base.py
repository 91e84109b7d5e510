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

# Which of a round's two noises on the server is drawn.
UPDATE_NOISE = 0
COUNT_NOISE = 1
# Adds noise to tensors or arrays: of (values, deviation, purpose).
AddNoise = Callable[[Sequence[Any], Any, int], Sequence[Any]]


class Sums(NamedTuple):
  """What is known of all participants' updates together.

  Attributes:
    update: Their sum, in parts.
    usable: How many there were.
    below: How many had a norm below the clip norm.
  """

  update: Sequence[Any]
  usable: Any
  below: Any


class Release(NamedTuple):
  """What comes out of a round.

  Attributes:
    result: The mean with its noise: all that is released.
    aggregate: The mean before noise, in parts.
    state: The aggregation's state for the next round.
  """

  result: Sequence[Any]
  aggregate: Sequence[Any]
  state: Any


class Aggregation(Protocol):
  """Makes what is released of what clients sent; may keep state.

  Attributes:
    clips: Whether updates are clipped before they are summed. If not, clients
      did that before they added noise.
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
      state: Of the round.
      sums: Over the participants; arrays or tensors.
      add_noise: Draws the noise.
    """

  def measure(
    self,
    squared_norm: Any,
    squared_deviation: Any,
    taking_part: Any,
    participants: Any,
  ) -> Any:
    """Returns what to keep of a client, given ‖u‖² and ‖u - ū‖²."""


class Mechanism(Protocol):
  """What a round releases, what it costs, and for whom.

  Attributes:
    level: Its name in `LEVELS`.
    units: What is protected: 'client', 'example' or both, the first of which
      a run's own delta and budget are for.
    noise_multiplier: The noise's deviation in units of the clip norm; with 0
      there is no privacy.
    clip_norm: C.
    participation_probability: α, the chance that a client takes part.
    clients_per_round: n̄ = α N, the expected number of participants.
    aggregation: What the server does.
    local: What clients do before, if anything.
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

  def relation(self, unit: str) -> dp_accounting.NeighboringRelation:
    """Returns which pairs of data sets a unit's figures are about."""

  def worst_case_squared_distance(self, unit: str, participants: Any) -> Any:
    """Returns the largest r² that clipping allows, with n participants."""

  def events(
    self, measurements: measurements_lib.Measurements
  ) -> dict[str, dp_accounting.DpEvent]:
    """Returns what a round tells the accountant of each unit."""

  def is_panel(self, unit: str, panel_size: int) -> bool:
    """Whether a unit's distances are those of a panel, given one of clients."""

  def cost_count(self, unit: str, rounds: int, client_count: int) -> int:
    """Returns how many costs are added up, for composition by Hölder."""

  def counted_otherwise(self) -> 'dict[str, Mechanism]':
    """Returns every way to account for what was measured, by a name for it."""

  def paper_dp_event(self) -> Optional[dp_accounting.DpEvent]:
    """Returns a round as the paper counts DP, where that differs."""

  def description(self, unit: str) -> 'Description':
    """Returns what a report says of a unit's protection."""

  def caveats(self) -> list[str]:
    """Returns what the figures rest on, a sentence each."""


class Description(NamedTuple):
  """What a report says of the protection of a unit.

  Attributes:
    release: What the noise is added to, a name that the report knows.
    noise_multiplier: Of the noise that protects the unit.
    participation_probability: Of a unit; None where it differs by unit.
  """

  release: str
  noise_multiplier: float
  participation_probability: Optional[float]


class Facts(NamedTuple):
  """What a mechanism has to know of the data, and of how clients learn.

  Attributes:
    holdings: How many examples each client has.
    batch_size: How many of them a client draws for a step on average.
    local_steps: The most steps that a client takes in a round.
  """

  holdings: Sequence[int]
  batch_size: int = 1
  local_steps: int = 1

  @property
  def client_count(self) -> int:
    """The number of clients, N."""
    return len(self.holdings)


# Every level that there is, with what makes its mechanism of options (see
# `tf_bdp.training.plan.Privacy`) and facts of the data.
LEVELS: dict[str, Callable[[Any, Facts], Mechanism]] = {}


def register(
  *levels: str,
) -> Callable[
  [Callable[[Any, Facts], Mechanism]],
  Callable[[Any, Facts], Mechanism],
]:
  """Enters a function into `LEVELS`, under one or several names."""

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
  """Returns a round of which only the worst case is known."""
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
