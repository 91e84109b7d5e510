"""Which examples clients draw at instance level, and which are measured."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data, sampling
from tf_bdp.mechanisms import instance as instance_mechanism


class Draw(NamedTuple):
  """A client's part in a round.

  Attributes:
    indices: Its examples that are drawn or measured; at least one, if need be
      of others, and then neither drawn nor measured.
    drawn: Whether each is in the batch of each step, [steps, examples].
    measured: Whether each is measured in each step, [steps, examples].
    step_count: How many of the steps the client takes.
  """

  indices: np.ndarray
  drawn: np.ndarray
  measured: np.ndarray
  step_count: int


def _check_local_training(
  mechanism: instance_mechanism.InstanceMechanism,
) -> None:
  """Raises ValueError for what FedAvg does not admit, even of one step."""
  if mechanism.level == 'joint':
    raise ValueError(instance_mechanism.JOINT_IS_FOR_FED_SGD)
  if mechanism.averages_noise and mechanism.server_noise_multiplier:
    raise ValueError(
      'In fed_avg clients scale their noise by their learning rate, and the '
      "server's noise cannot be added to it: server_noise_multiplier must be "
      f'0. Found {mechanism.server_noise_multiplier}.'
    )


@dataclasses.dataclass(frozen=True)
class ExampleBatches:
  """Draws batches, the same for the same seed, round and client.

  Attributes:
    data: The clients' data.
    mechanism: Whose batches they are.
    algorithm: FedSGD, with one step a round, or FedAvg.
    seed: Of the run. Amplification by sampling holds against those who do not
      know it.
  """

  data: federated_data.FederatedData
  mechanism: instance_mechanism.InstanceMechanism
  algorithm: algorithm_lib.Algorithm
  seed: int

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
      _check_local_training(self.mechanism)
    holdings = [self._holding(c) for c in range(self.data.client_count)]
    for client, holding in enumerate(holdings):
      if len(np.unique(self.data.indices(client))) < holding:
        raise ValueError(
          f'Client {client} holds an example several times: it would count for '
          'more than one. Leave out the copies.'
        )
    instance_mechanism.check_holdings(self.mechanism, holdings)
    steps = self.algorithm.local_steps(max(holdings), self.mechanism.batch_size)
    if self.mechanism.local_steps != steps:
      raise ValueError(
        f'{self.algorithm.name} takes up to {steps} local steps with these '
        f'data. Found local_steps = {self.mechanism.local_steps}.'
      )

  def _holding(self, client: int) -> int:
    return len(self.data.indices(client))

  def clients(
    self, participants: Sequence[int], panel: Sequence[int]
  ) -> list[int]:
    """Returns whose updates to compute: the participants, then the others."""
    mechanism = self.mechanism
    if not (mechanism.averages_noise or 'client' in mechanism.units):
      return list(participants)  # Nothing is released of others.
    taking_part = set(participants)
    return [*participants, *(c for c in panel if c not in taking_part)]

  def draw(self, round_number: int, client: int) -> Draw:
    """Draws a client's batches."""
    mechanism, holding = self.mechanism, self._holding(client)
    drawn = sampling.batches(
      self.seed,
      round_number,
      client,
      holding,
      mechanism.draw_probability(holding),
      mechanism.local_steps,
    )
    measured = drawn
    if mechanism.panel_examples:
      members = sampling.panel_examples(
        self.seed, client, holding, mechanism.panel_examples
      )
      measured = np.broadcast_to(members, drawn.shape)
    used = np.any(drawn | measured, axis=0)
    indices = np.asarray(self.data.indices(client))[used]
    drawn, measured = drawn[:, used], measured[:, used]
    if not indices.size:
      # TensorFlow's convolutions take no empty batch: one example, not in it,
      # and the client's own if it has any, which another's might spoil.
      indices = np.append(self.data.indices(client), 0)[:1].astype(np.int64)
      drawn = measured = np.zeros((mechanism.local_steps, 1), bool)
    steps = self.algorithm.local_steps(holding, mechanism.batch_size)
    return Draw(indices, drawn, measured, steps)

  def groups(
    self,
    draws: Mapping[int, Draw],
    squared_moves: Mapping[int, np.ndarray],
    participants: Sequence[int],
    panel: Sequence[int],
  ) -> instance_mechanism.ExampleGroups:
    """Returns the measured examples in groups.

    Args:
      draws: Of every client whose update was computed.
      squared_moves: Theirs, [steps, examples], padded; none of a client whose
        update cannot be used, to whom the worst case is ascribed.
      participants: The clients that take part.
      panel: The clients that are measured, taking part or not.
    """
    mechanism = self.mechanism
    members = list(draws) if mechanism.averages_noise else list(participants)
    if mechanism.panel_examples:
      members = list(panel)
    taking_part, always = set(participants), set(panel)
    worst = mechanism.worst_case_move**2
    groups: list[tuple[int, int, int, np.ndarray]] = []
    for client in members:
      holding = self._holding(client)
      if not holding:
        continue
      released = mechanism.averages_noise or client in taking_part
      for step in range(mechanism.local_steps):
        if not released or (
          client in draws and step >= draws[client].step_count
        ):
          if not mechanism.panel_examples:
            continue
          moves = np.zeros(min(mechanism.panel_examples, holding))
        else:
          measured = draws[client].measured[step]
          moves = np.full(np.count_nonzero(measured), worst)
          if client in squared_moves:
            moves = squared_moves[client][step, : measured.size][measured]
        groups.append((client, step, holding, moves))
    if not groups:
      return instance_mechanism.ExampleGroups.empty()
    clients, steps, holdings, moves = zip(*groups)
    return instance_mechanism.ExampleGroups(
      np.array(clients, np.int64),
      np.array(steps, np.int64),
      np.array(holdings, np.int64),
      np.array([part.size for part in moves], np.int64),
      np.concatenate(moves).astype(np.float32),
      np.array([client in always for client in clients], bool),
    )
