"""What the training loop needs from an engine, and the engines by name."""

import abc
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Union

import dp_accounting
import numpy as np

from tf_bdp import validation
from tf_bdp.learning import sampling
from tf_bdp.mechanisms import base as mechanisms
from tf_bdp.mechanisms import measurements as measurements_lib


class Round(NamedTuple):
  """The outcome of a round.

  Attributes:
    state: The engine's state after the round.
    measurements: What was measured of clients and examples.
    events: The round's event for the accountant of each protected unit.
  """

  state: Any
  measurements: measurements_lib.Measurements
  events: dict[str, dp_accounting.DpEvent]


class Engine(abc.ABC):
  """Runs rounds. Engines differ in how, not in what comes out.

  Attributes:
    mechanism: What a round releases.
    client_count: How many clients there are.
    sampler: What draws the examples that clients use.
  """

  mechanism: mechanisms.Mechanism
  client_count: int
  sampler: sampling.Sampler

  def run_round(
    self,
    state: Any,
    round_number: int,
    participants: Sequence[int],
    panel: Sequence[int],
    held_out: Sequence[int] = (),
  ) -> Round:
    """Runs one round.

    Args:
      state: The state before it.
      round_number: Counts from 0; gives each round of a noise seed its own
        noise.
      participants: The clients that take part.
      panel: The clients that are measured, taking part or not.
      held_out: Clients that never take part, measured like the panel.
    """
    local = self.mechanism.local
    if local is not None and local.panel_examples and not panel:
      raise ValueError(
        'A panel of examples is of the clients of a panel. Found '
        f'panel_examples = {local.panel_examples} without any.'
      )
    state, measured = self.release(
      state, round_number, participants, [*panel, *held_out]
    )
    measured = measured._replace(held_out=len(held_out))
    return Round(state, measured, self.mechanism.events(measured))

  @abc.abstractmethod
  def release(
    self,
    state: Any,
    round_number: int,
    participants: Sequence[int],
    panel: Sequence[int],
  ) -> tuple[Any, measurements_lib.Measurements]:
    """Runs one round; returns the next state and what was measured.

    Arguments as for `run_round`.
    """

  @abc.abstractmethod
  def initial_state(self) -> Any:
    """Returns the state before the first round."""

  @abc.abstractmethod
  def model_weights(self, state: Any) -> list[np.ndarray]:
    """Returns the trainable weights, in the model's order."""

  @abc.abstractmethod
  def to_arrays(self, state: Any) -> dict[str, np.ndarray]:
    """Returns the state as arrays, for a checkpoint."""

  @abc.abstractmethod
  def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> Any:
    """Restores what `to_arrays` returned."""


# All engines by name: a class, or 'module:class', which is imported when the
# engine is made, as importing TFF takes seconds.
ENGINES: dict[str, Union[str, Callable[..., Engine]]] = {
  'inprocess': 'tf_bdp.engines.in_process:InProcessEngine',
  'tff': 'tf_bdp.engines.tff:TffEngine',
}


def create(name: str, *arguments: Any, **options: Any) -> Engine:
  """Makes an engine.

  Args:
    name: One of `ENGINES`.
    *arguments: Positional arguments of the engine; see `InProcessEngine`.
    **options: Its keyword arguments.
  """
  found = ENGINES[validation.check_choice('engine', name, tuple(ENGINES))]
  if isinstance(found, str):
    module, _, attribute = found.partition(':')
    found = getattr(importlib.import_module(module), attribute)
  assert callable(found)
  return found(*arguments, **options)
