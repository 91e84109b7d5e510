"""What the training loop asks of an engine, whichever it is."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from tf_bdp.mechanisms import client as mechanism_lib
from tf_bdp.mechanisms import instance as instance_mechanism

Mechanism = Union[
  mechanism_lib.GaussianMechanism, instance_mechanism.InstanceMechanism
]


class RoundOutput(NamedTuple):
  """What a round did and measured.

  Attributes:
    state: The engine's state after the round.
    participants: n, without the clients whose updates were unusable.
    failed_clients: How many were left out for that.
    clip_norm: The clip norm of the round.
    squared_measures: Of the participants; see
      `GaussianMechanism.squared_distances`.
    panel_squared_measures: The same of every panel member, in its order.
    panel_taking_part: Whether each panel member took part.
    examples: At instance level, how far examples move their client's update.
    reported: Under secure aggregation, the costs of each unit, for every order;
      nothing else is measured then.
  """

  state: Any
  participants: int
  failed_clients: int
  clip_norm: float
  squared_measures: np.ndarray
  panel_squared_measures: Optional[np.ndarray] = None
  panel_taking_part: Optional[np.ndarray] = None
  examples: Optional[instance_mechanism.ExampleGroups] = None
  reported: Optional[Mapping[str, np.ndarray]] = None


class Engine(abc.ABC):
  """Runs rounds. Engines differ in how, not in what comes out."""

  mechanism: Mechanism

  @abc.abstractmethod
  def initial_state(self) -> Any:
    """Returns the state before the first round."""

  @abc.abstractmethod
  def run_round(
    self,
    state: Any,
    round_number: int,
    participants: Sequence[int],
    panel: Sequence[int],
  ) -> RoundOutput:
    """Runs one round.

    Args:
      state: The state before it.
      round_number: Counts from 0; tells the noises of a seed apart.
      participants: The clients that take part.
      panel: The clients that are measured, taking part or not.
    """

  @abc.abstractmethod
  def model_weights(self, state: Any) -> list[np.ndarray]:
    """Returns the trainable weights, in the model's order."""

  @abc.abstractmethod
  def to_arrays(self, state: Any) -> dict[str, np.ndarray]:
    """Returns the state as arrays, for a checkpoint."""

  @abc.abstractmethod
  def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> Any:
    """Restores what `to_arrays` returned."""
