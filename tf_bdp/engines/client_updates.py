"""Updates of clients, computed a few at a time by TensorFlow functions.

Clients of a chunk are computed in one graph, spread over all devices.
`PlainUpdates` are clipped gradients or weight changes. `PrivateUpdates` carry
noise of their clients; how far each example moves them is measured.
"""

import abc
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import (
  example_batches,
  federated_data,
  losses,
  models,
  sampling,
)
from tf_bdp.mechanisms import base, instance, measurements
from tf_bdp.ops import clipping, noise, private_steps

# Bytes of examples, and of updates, that one chunk of clients may take.
_CHUNK_EXAMPLES = 128 * 2**20
_CHUNK_UPDATES = 256 * 2**20
_PARALLEL_CLIENTS = 16


class RoundInputs(NamedTuple):
  """What all clients of a round get.

  Attributes:
    round_number: Counts from 0.
    clip_norm: The clip norm of the round.
    last_mean: What the last round released, as one vector.
  """

  round_number: int
  clip_norm: Any
  last_mean: np.ndarray


class Chunk(NamedTuple):
  """Updates of some clients, and what is known about them.

  Attributes:
    updates: What the server is to sum, [clients, weights]; zero if unusable.
    usable: Whether each update is finite and not zero.
    norms: Norms of the updates before the server clips them.
    squared_norms: ‖u‖² of each client after clipping. Where clients add noise
      and the server does not clip, before that noise and relative to what
      stands for an absent client.
    squared_moves: Where clients add noise, the squared moves of each client's
      examples.
  """

  updates: tf.Tensor
  usable: np.ndarray
  norms: np.ndarray
  squared_norms: np.ndarray
  squared_moves: Sequence[np.ndarray] = ()


class ClientUpdates(abc.ABC):
  """Computes updates; subclasses say what a client computes.

  Attributes:
    size: The number of weights.
    repeatable: Whether updates are the same when computed a second time.
  """

  repeatable = True

  def __init__(
    self,
    model_fn: Callable[[], tf.keras.Model],
    data: federated_data.FederatedData,
    algorithm: algorithm_lib.Algorithm,
    sampler: sampling.Sampler,
    strategy: tf.distribute.Strategy,
  ):
    """Builds the model and the graphs; arguments: see `InProcessEngine`."""
    self._data = data
    with tf.device('/CPU:0'):
      self._features = tf.constant(data.features)
      self._labels = tf.constant(data.labels)
    self._algorithm = algorithm
    self._sampler = sampler
    self._strategy = strategy
    if algorithm.name == 'fed_avg' and self._replicas > 1:
      raise ValueError(
        'fed_avg runs on one device: its local steps change the weights. Use '
        'fed_sgd to spread clients over several.'
      )
    with strategy.scope():
      self._model = model_fn()
    models.check(self._model)
    self._variables = self._model.trainable_variables
    self._shapes = [variable.shape for variable in self._variables]
    self.size = sum(shape.num_elements() for shape in self._shapes)
    self._graph = tf.function(
      self._chunk,
      # Values of several devices do not fit a signature.
      input_signature=self._signature() if self._replicas == 1 else None,
      reduce_retracing=True,
    )

  @property
  def _replicas(self) -> int:
    return int(self._strategy.num_replicas_in_sync)

  def weights(self) -> np.ndarray:
    """Returns the model's weights as one vector."""
    flat = [np.ravel(variable.numpy()) for variable in self._variables]
    return np.concatenate(flat).astype(np.float32)

  def assign(self, weights: np.ndarray) -> None:
    """Gives the model its weights."""
    for variable, part in zip(self._variables, self.parts(weights)):
      variable.assign(part)

  def parts(self, vector: np.ndarray) -> list[np.ndarray]:
    """Cuts a vector into the shapes of the trainable weights."""
    cuts = np.cumsum([shape.num_elements() for shape in self._shapes])[:-1]
    parts = np.split(vector, cuts)
    return [p.reshape(shape) for p, shape in zip(parts, self._shapes)]

  @abc.abstractmethod
  def clients(
    self, round_number: int, participants: Sequence[int], panel: Sequence[int]
  ) -> list[int]:
    """Returns whose updates to compute: participants, then absent ones."""

  @abc.abstractmethod
  def groups(
    self,
    clients: Sequence[int],
    chunks: Sequence[Chunk],
    participants: Sequence[int],
    panel: Sequence[int],
  ) -> Optional[measurements.ExampleGroups]:
    """Returns what was measured of examples, if anything."""

  @abc.abstractmethod
  def _signature(self) -> list[tf.TensorSpec]:
    """Returns the types of `_rows` and `_shared`."""

  @abc.abstractmethod
  def _example_count(self, client: int) -> int:
    """Returns how many examples a client's update takes."""

  @abc.abstractmethod
  def _rows(
    self, inputs: RoundInputs, clients: Sequence[int]
  ) -> tuple[np.ndarray, ...]:
    """Returns what updates are computed from, one row for each client."""

  @abc.abstractmethod
  def _shared(self, inputs: RoundInputs) -> list[tf.Tensor]:
    """Returns what all clients get."""

  @abc.abstractmethod
  def _chunk(self, *arguments: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Computes a chunk as a graph, given `_rows` and `_shared`."""

  def chunks(
    self, inputs: RoundInputs, clients: Sequence[int]
  ) -> Iterator[tuple[slice, Chunk]]:
    """Yields updates of a few clients at a time."""
    most_clients = max(1, _CHUNK_UPDATES // (4 * self.size)) * self._replicas
    most_examples = _CHUNK_EXAMPLES // self._data.features[:1].nbytes
    start = 0
    while start < len(clients):
      stop, largest = start, 1
      while stop < len(clients) and stop - start < most_clients:
        # All are padded to the largest.
        largest = max(largest, self._example_count(clients[stop]))
        padded = (stop + 1 - start) * largest
        if stop > start and padded > most_examples * self._replicas:
          break
        stop += 1
      rows = slice(start, stop)
      yield rows, self._run(inputs, clients[rows])
      start = stop

  def _run(self, inputs: RoundInputs, clients: Sequence[int]) -> Chunk:
    """Computes the updates of a chunk, spread over the devices."""
    shared = self._shared(inputs)
    if self._replicas == 1:
      outputs = [self._graph(*self._rows(inputs, clients), *shared)]
    else:
      shares = np.array_split(np.asarray(clients), self._replicas)
      batches = [self._rows(inputs, share.tolist()) for share in shares]
      distributed = [
        self._strategy.experimental_distribute_values_from_function(
          lambda context, part=part: tf.constant(
            batches[context.replica_id_in_sync_group][part]
          )
        )
        for part in range(len(batches[0]))
      ]
      result = self._strategy.run(self._graph, (*distributed, *shared))
      outputs = list(
        zip(*(self._strategy.experimental_local_results(r) for r in result))
      )
    updates, usable, norms, squared = (
      tf.concat(parts, 0) for parts in zip(*(part[:4] for part in outputs))
    )
    # Moves are padded differently on each device.
    moves = [
      row for part in outputs for more in part[4:] for row in more.numpy()
    ]
    return Chunk(updates, usable.numpy(), norms.numpy(), squared.numpy(), moves)

  def _map_clients(
    self,
    one_client: Callable[..., Any],
    inputs: tuple[tf.Tensor, ...],
    *more: tf.TensorSpec,
  ) -> tuple[tf.Tensor, ...]:
    # Local steps change the weights, so there clients take turns.
    sequential = self._algorithm.name == 'fed_avg'
    return tf.map_fn(
      one_client,
      inputs,
      fn_output_signature=(
        tf.TensorSpec([self.size], tf.float32),
        tf.TensorSpec([], tf.bool),
        tf.TensorSpec([], tf.float32),
        tf.TensorSpec([], tf.float32),
        *more,
      ),
      parallel_iterations=1 if sequential else _PARALLEL_CLIENTS,
    )

  def _examples(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.device('/CPU:0'):  # Where all examples are.
      return tf.gather(self._features, indices), tf.gather(
        self._labels, indices
      )


class PlainUpdates(ClientUpdates):
  """Clipped updates without noise, for mechanisms of the server alone."""

  def clients(
    self, round_number: int, participants: Sequence[int], panel: Sequence[int]
  ) -> list[int]:
    """Returns the participants, then the other members of the panel."""
    del round_number
    return federated_data.participants_first(participants, panel)

  def groups(self, *everything: Any) -> None:
    """Returns nothing: examples are not measured."""

  def _signature(self) -> list[tf.TensorSpec]:
    return [
      tf.TensorSpec([None, None], tf.int64),
      tf.TensorSpec([None], tf.int32),
      tf.TensorSpec([], tf.float32),
    ]

  def _example_count(self, client: int) -> int:
    count = self._data.holdings[client]
    return min(count, self._algorithm.examples_per_round or count)

  def _rows(
    self, inputs: RoundInputs, clients: Sequence[int]
  ) -> tuple[np.ndarray, ...]:
    """Returns the indices of clients' examples, padded, and their numbers."""
    return federated_data.padded(
      [
        self._algorithm.examples_of(
          self._data, self._sampler, inputs.round_number, client
        )
        for client in clients
      ]
    )

  def _shared(self, inputs: RoundInputs) -> list[tf.Tensor]:
    return [tf.constant(inputs.clip_norm)]

  def _chunk(self, *arguments: tf.Tensor) -> tuple[tf.Tensor, ...]:
    indices, sizes, clip_norm = arguments
    compute = {'fed_sgd': self._gradient, 'fed_avg': self._weight_change}
    local_update = compute[self._algorithm.name]

    def one_client(inputs: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
      held, size = inputs
      # A client without examples computes on padding; the result is not used.
      features, labels = self._examples(held[: tf.maximum(size, 1)])
      update = private_steps.flat(local_update(features, labels))
      (clipped,), usable, norm = clipping.clip([update], clip_norm)
      squared = tf.square(tf.minimum(norm, clip_norm))
      usable = usable & (size > 0)
      clipped = tf.where(usable, clipped, tf.zeros_like(clipped))
      return clipped, usable, norm, squared

    return self._map_clients(one_client, (indices, sizes))

  def _gradient(
    self, features: tf.Tensor, labels: tf.Tensor
  ) -> Sequence[tf.Tensor]:
    """FedSGD's update: the gradient of the client's mean loss."""
    with tf.GradientTape() as tape:
      outputs = self._model(features, training=True)
      loss = losses.mean_loss(labels, outputs, self._algorithm.client_loss)
    return tape.gradient(
      loss, self._variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )

  def _weight_change(
    self, features: tf.Tensor, labels: tf.Tensor
  ) -> Sequence[tf.Tensor]:
    """FedAvg's update: by how much local training lowers the weights."""
    before = [tf.identity(variable) for variable in self._variables]
    batch = self._algorithm.client_batch_size
    rate = self._algorithm.client_learning_rate
    for _ in range(self._algorithm.client_epochs):
      for start in tf.range(0, tf.shape(features)[0], batch):
        stop = start + batch
        gradient = self._gradient(features[start:stop], labels[start:stop])
        for variable, part in zip(self._variables, gradient):
          variable.assign_sub(rate * part)
    change = [b - v for b, v in zip(before, self._variables)]
    for variable, value in zip(self._variables, before):
      variable.assign(value)
    return change


class PrivateUpdates(ClientUpdates):
  """Updates that carry their clients' noise, and the moves of examples."""

  repeatable = False

  def __init__(
    self,
    mechanism: base.Mechanism,
    noise_seed: Optional[int],
    *common: Any,
  ):
    """Builds the model and the graphs.

    Args:
      mechanism: With a local part.
      noise_seed: As of `InProcessEngine`.
      *common: As of `ClientUpdates`.
    """
    assert mechanism.local is not None
    self._mechanism: instance.InstanceMechanism = mechanism.local
    self._clips = mechanism.aggregation.clips
    self._noise_seed = noise_seed
    _, data, algorithm, sampler, _ = common
    self._batches = example_batches.ExampleBatches(
      data, self._mechanism, algorithm, sampler
    )
    self._draws: dict[int, example_batches.Draw] = {}  # Of the current round.
    super().__init__(*common)

  def clients(
    self, round_number: int, participants: Sequence[int], panel: Sequence[int]
  ) -> list[int]:
    """Returns whose updates to compute, and draws their examples."""
    clients = self._batches.clients(participants, panel)
    self._draws = {c: self._batches.draw(round_number, c) for c in clients}
    return clients

  def groups(
    self,
    clients: Sequence[int],
    chunks: Sequence[Chunk],
    participants: Sequence[int],
    panel: Sequence[int],
  ) -> measurements.ExampleGroups:
    """Returns what was measured of examples."""
    usable = [flag for chunk in chunks for flag in chunk.usable]
    moves = [rows for chunk in chunks for rows in chunk.squared_moves]
    known = {c: m for c, m, ok in zip(clients, moves, usable) if ok}
    return self._batches.groups(self._draws, known, participants, panel)

  def _signature(self) -> list[tf.TensorSpec]:
    return [
      tf.TensorSpec([None, None], tf.int64),
      tf.TensorSpec([None], tf.int32),
      tf.TensorSpec([None, self._mechanism.local_steps, None], tf.bool),
      tf.TensorSpec([None], tf.int32),
      tf.TensorSpec([None], tf.int32),
      tf.TensorSpec([], tf.int32),
      tf.TensorSpec([self.size], tf.float32),
    ]

  def _example_count(self, client: int) -> int:
    return len(self._draws[client].indices)

  def _rows(
    self, inputs: RoundInputs, clients: Sequence[int]
  ) -> tuple[np.ndarray, ...]:
    """Returns the batches of clients, padded to the size of the largest."""
    del inputs
    draws = [self._draws[client] for client in clients]
    indices, sizes = federated_data.padded([draw.indices for draw in draws])
    steps = self._mechanism.local_steps
    drawn = np.zeros((len(clients), steps, indices.shape[1]), bool)
    for row, draw in enumerate(draws):
      drawn[row, :, : sizes[row]] = draw.drawn
    step_counts = np.array([draw.step_count for draw in draws], np.int32)
    return indices, sizes, drawn, step_counts, np.array(clients, np.int32)

  def _shared(self, inputs: RoundInputs) -> list[tf.Tensor]:
    return [tf.constant(inputs.round_number), tf.constant(inputs.last_mean)]

  def _chunk(self, *arguments: tf.Tensor) -> tuple[tf.Tensor, ...]:
    *rows, round_number, last_mean = arguments
    mechanism = self._mechanism
    longest = tf.shape(rows[0])[1]
    reference = tf.zeros_like(last_mean)
    if mechanism.reference_is_last_mean:
      reference = tf.clip_by_norm(last_mean, mechanism.clip_norm)

    def one_client(inputs: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
      held, size, in_batch, step_count, client = inputs
      features, labels = self._examples(held[:size])
      update = private_steps.client_update(
        self._model,
        features,
        labels,
        in_batch[:, :size],
        step_count,
        mechanism,
        self._algorithm.local_learning_rate,
        lambda step: self._normal(round_number, client, step),
      )
      sent = update.sent
      norm = tf.norm(sent)
      squared = tf.reduce_sum(tf.square(update.clipped - reference))
      if self._clips:
        (sent,), _, _ = clipping.clip([sent], mechanism.clip_norm)
        squared = tf.square(tf.minimum(norm, mechanism.clip_norm))
      usable = private_steps.is_usable(update.sent)
      sent = tf.where(usable, sent, tf.zeros_like(sent))
      padding = [[0, 0], [0, longest - size]]
      moves = tf.pad(update.squared_moves, padding)
      return sent, usable, norm, squared, moves

    return self._map_clients(
      one_client,
      tuple(rows),
      tf.TensorSpec([mechanism.local_steps, None], tf.float32),
    )

  def _normal(
    self, round_number: tf.Tensor, client: tf.Tensor, step: tf.Tensor
  ) -> tf.Tensor:
    """Returns a client's noise; without a seed, from the system's entropy."""
    if self._noise_seed is not None:
      return noise.client_normal(
        self.size, self._noise_seed, round_number, client, step
      )
    normals = tf.numpy_function(noise.secure_normal, [self.size], tf.float64)
    return tf.ensure_shape(normals, [self.size])
