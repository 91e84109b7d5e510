"""Which examples clients draw where examples are protected."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

import numpy as np

from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data, sampling
from tf_bdp.mechanisms import instance, measurements


class Draw(NamedTuple):
  """A client's part in a round.

  Attributes:
    indices: The client's examples that are drawn or measured. Never empty: if
      there are none, one example that is neither drawn nor measured.
    drawn: Whether each is in the batch of each step, [steps, examples].
    measured: Whether each is measured in each step, [steps, examples].
    step_count: How many of the steps the client takes.
  """

  indices: np.ndarray
  drawn: np.ndarray
  measured: np.ndarray
  step_count: int


@dataclasses.dataclass(frozen=True)
class ExampleBatches:
  """Draws batches, the same for the same seed, round and client.

  Attributes:
    data: The clients' data.
    mechanism: What clients do with the batches.
    algorithm: FedSGD, with one step a round, or FedAvg.
    sampler: Draws the batches.
  """

  data: federated_data.FederatedData
  mechanism: instance.InstanceMechanism
  algorithm: algorithm_lib.Algorithm
  sampler: sampling.Sampler

  def __post_init__(self) -> None:
    if self.algorithm.client_loss != 'plain':
      raise ValueError(
        f'client_loss={self.algorithm.client_loss} makes the gradient of each '
        'example depend on the classes of the others that its client holds, '
        'which the privacy of examples does not count. Use it with client '
        'privacy only.'
      )
    if self.algorithm.examples_per_round:
      raise ValueError(
        'examples_per_round is for client privacy. Where examples are '
        'protected, the batch size says how many a client draws.'
      )
    if self.algorithm.name != 'fed_sgd':
      self.mechanism.check_fed_avg()
    holdings = self.data.holdings
    for client, holding in enumerate(holdings):
      if len(np.unique(self.data.indices(client))) < holding:
        raise ValueError(
          f'Client {client} holds an example several times: it would count for '
          'more than one. Leave out the copies.'
        )
    self.mechanism.check_holdings(holdings)
    steps = self.algorithm.local_steps(max(holdings), self.mechanism.batch_size)
    if self.mechanism.local_steps != steps:
      raise ValueError(
        f'{self.algorithm.name} takes up to {steps} local steps with these '
        f'data. Found local_steps = {self.mechanism.local_steps}.'
      )

  def clients(
    self, participants: Sequence[int], panel: Sequence[int]
  ) -> list[int]:
    """Returns whose updates to compute: participants, then absent ones."""
    if not self.mechanism.measures_absent_clients:
      return list(participants)
    return federated_data.participants_first(participants, panel)

  def draw(self, round_number: int, client: int) -> Draw:
    """Draws a client's batches."""
    mechanism, held = self.mechanism, np.asarray(self.data.indices(client))
    drawn = self.sampler.batches(
      round_number,
      client,
      held.size,
      float(mechanism.draw_probability(held.size)),
      mechanism.local_steps,
    )
    measured = drawn
    if mechanism.panel_examples:
      members = self.sampler.panel_examples(
        client, held.size, mechanism.panel_examples
      )
      measured = np.broadcast_to(members, drawn.shape)
    used = np.any(drawn | measured, axis=0)
    indices, drawn, measured = held[used], drawn[:, used], measured[:, used]
    if not indices.size:
      # TensorFlow's convolutions take no empty batch, so compute an example
      # that is not in the batch: the client's own if it has any, as another's
      # gradient might not be finite and would spoil the sum.
      indices = np.append(held, 0)[:1].astype(np.int64)
      drawn = measured = np.zeros((mechanism.local_steps, 1), bool)
    steps = self.algorithm.local_steps(held.size, mechanism.batch_size)
    return Draw(indices, drawn, measured, steps)

  def groups(
    self,
    draws: Mapping[int, Draw],
    squared_moves: Mapping[int, Optional[np.ndarray]],
    participants: Sequence[int],
    panel: Sequence[int],
  ) -> measurements.ExampleGroups:
    """Returns the measured examples in groups.

    Args:
      draws: The draws of all clients whose updates were computed.
      squared_moves: The squared moves of these clients' examples, [steps,
        examples], padded; without clients whose updates cannot be used.
      participants: The clients that take part.
      panel: The clients that are measured, taking part or not.
    """
    members = list(draws) if self.mechanism.averages_noise else participants
    if self.mechanism.panel_examples:
      members = panel
    released = set(draws if self.mechanism.averages_noise else participants)
    measured = {
      client: measurements.MeasuredClient(
        self.data.holdings[client],
        draws[client].step_count if client in released else 0,
        draws[client].measured if client in released else np.zeros((0, 0)),
        squared_moves.get(client),
      )
      for client in members
    }
    unmeasured = [
      client
      for client in participants
      if client not in measured and self.data.holdings[client]
    ]
    return self.mechanism.groups(measured, set(panel), unmeasured)
