"""Rounds in this process, as TensorFlow functions, on GPUs where there are any.

TFF's worker computes on CPUs only. This engine does the same round with the
same mathematics. Clients are processed in chunks, each in one graph; updates
are clipped as they come, and kept only where they are needed again.
"""

import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from tf_bdp.engines import base as engine
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import example_batches, federated_data
from tf_bdp.mechanisms import instance as instance_mechanism
from tf_bdp.ops import clipping, noise, private_steps

# Bytes of examples, and of updates, that one chunk of clients may take.
_CHUNK_EXAMPLES = 128 * 2**20
_CHUNK_UPDATES = 256 * 2**20
_PARALLEL_CLIENTS = 16
# Above this many bytes updates are computed a second time instead of kept.
_MOST_KEPT_UPDATES = 1200 * 2**20


class InProcessState(NamedTuple):
  """Weights, velocity and last released mean as vectors, and the clip norm."""

  weights: np.ndarray
  velocity: np.ndarray
  clip_norm: Any
  last_mean: np.ndarray


class _Chunk(NamedTuple):
  """Updates of some clients, [clients, weights], and what is known of them.

  Attributes:
    updates: Clipped, where they are.
    usable: Whether each is finite.
    norms: Before clipping.
    squared_measures: At instance level, of each client before noise.
    squared_moves: At instance level, of the examples of each.
  """

  updates: tf.Tensor
  usable: np.ndarray
  norms: np.ndarray
  squared_measures: np.ndarray
  squared_moves: Sequence[np.ndarray] = ()


class InProcessEngine(engine.Engine):
  """The round as `tf.function`s in this process."""

  def __init__(
    self,
    model_fn: Callable[[], tf.keras.Model],
    data: federated_data.FederatedData,
    mechanism: engine.Mechanism,
    algorithm: algorithm_lib.Algorithm,
    noise_seed: Optional[int] = None,
    strategy: Optional[tf.distribute.Strategy] = None,
    seed: int = 0,
  ):
    """Builds the model and the graphs.

    Args:
      model_fn: Makes a Keras model whose outputs are logits.
      data: The clients' data.
      mechanism: What is released.
      algorithm: FedSGD or FedAvg, and the server's optimiser.
      noise_seed: For experiments only; without it the noise comes from the
        system's entropy source.
      strategy: How to spread clients over devices; by default over all GPUs
        if there are several.
      seed: Of the examples that clients draw.
    """
    self.mechanism = mechanism
    self._seed = seed
    self._data = data
    with tf.device('/CPU:0'):
      self._features = tf.constant(data.features)
      self._labels = tf.constant(data.labels)
    self._algorithm = algorithm
    self._noise_seed = noise_seed
    self._strategy = strategy or _default_strategy()
    if algorithm.name == 'fed_avg' and self._replicas > 1:
      raise ValueError(
        'fed_avg runs on one device: its local steps change the weights. Use '
        'fed_sgd to spread clients over several.'
      )
    with self._strategy.scope():
      self._model = model_fn()
    algorithm_lib.check_model(self._model)
    self._variables = self._model.trainable_variables
    self._shapes = [variable.shape for variable in self._variables]
    self._size = sum(shape.num_elements() for shape in self._shapes)
    local_update = {'fed_sgd': self._gradient, 'fed_avg': self._weight_change}
    self._local_update = local_update[algorithm.name]
    self._initial = self._flat([v.numpy() for v in self._variables])
    self._batches: Optional[example_batches.ExampleBatches] = None
    self._draws: dict[int, example_batches.Draw] = {}  # Of the current round.
    chunk: Callable[..., Any] = self._chunk
    signature = [
      tf.TensorSpec([None, None], tf.int64),
      tf.TensorSpec([None], tf.int32),
      tf.TensorSpec([], tf.float32),
    ]
    if isinstance(mechanism, instance_mechanism.InstanceMechanism):
      self._batches = example_batches.ExampleBatches(
        data, mechanism, algorithm, seed
      )
      chunk = self._private_chunk
      signature = [
        tf.TensorSpec([None, None], tf.int64),
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None, mechanism.local_steps, None], tf.bool),
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([], tf.int32),
        tf.TensorSpec([self._size], tf.float32),
      ]
    self._chunk_graph = tf.function(
      chunk,
      # Values of several devices do not fit a signature.
      input_signature=signature if self._replicas == 1 else None,
      reduce_retracing=True,
    )
    self._deviation_graph = tf.function(
      _squared_deviations, reduce_retracing=True
    )

  @property
  def _replicas(self) -> int:
    return int(self._strategy.num_replicas_in_sync)

  def initial_state(self) -> InProcessState:
    """Returns the model's initial weights, at rest."""
    return InProcessState(
      self._initial,
      np.zeros_like(self._initial),
      np.float32(self.mechanism.clip_norm),
      np.zeros_like(self._initial),
    )

  def model_weights(self, state: InProcessState) -> list[np.ndarray]:
    """Returns the trainable weights, in the model's order."""
    return self._parts(state.weights)

  def to_arrays(self, state: InProcessState) -> dict[str, np.ndarray]:
    """Returns the state as arrays."""
    return dict(state._asdict())

  def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> InProcessState:
    """Restores what `to_arrays` returned."""
    state = InProcessState(**arrays)
    for name, array in arrays.items():
      shape = () if name == 'clip_norm' else (self._size,)
      if array.shape != shape:
        raise ValueError(
          f'{name} of the checkpoint has shape {array.shape}, not {shape}: it '
          'is of another model.'
        )
    return state

  def run_round(
    self,
    state: InProcessState,
    round_number: int,
    participants: Sequence[int],
    panel: Sequence[int],
  ) -> engine.RoundOutput:
    """Runs one round."""
    self._assign(state.weights)
    clients = list(participants)
    if self._batches is not None:
      clients = self._batches.clients(participants, panel)
      self._draws = {c: self._batches.draw(round_number, c) for c in clients}
    else:
      taking_part = set(participants)
      clients += [c for c in panel if c not in taking_part]
    active = np.arange(len(clients)) < len(participants)
    clip_norm = float(state.clip_norm)
    compares = self.mechanism.kind == 'mean' and self.mechanism.clips_updates
    # Noisy updates cannot be computed a second time.
    keep = compares and (
      self._batches is not None
      or 4 * self._size * len(clients) <= _MOST_KEPT_UPDATES
    )
    kept: list[tf.Tensor] = []

    total = np.zeros(self._size, np.float32)
    chunks = []
    for rows, chunk in self._chunks(clients, round_number, state):
      weights = (active[rows] & chunk.usable).astype(np.float32)
      total += tf.linalg.matvec(
        chunk.updates, weights, transpose_a=True
      ).numpy()
      if keep:
        kept.append(chunk.updates)
      chunks.append(chunk._replace(updates=None))

    usable = np.concatenate([np.zeros(0, bool), *(c.usable for c in chunks)])
    norms = np.concatenate([np.zeros(0), *(c.norms for c in chunks)])
    counted = active & usable
    count = int(np.count_nonzero(counted))
    squared = np.concatenate(
      [np.zeros(0), *(c.squared_measures for c in chunks)]
    )
    divisor = self.mechanism.expected_clients
    if self.mechanism.kind == 'mean':
      divisor = max(count, 1)
    aggregate = total / np.float32(divisor)
    if compares and count:
      deviations = self._deviations(
        clients, round_number, state, aggregate, kept
      )
      # Alone, a client is compared with nothing.
      squared = np.where(counted & (count == 1), squared, deviations)
    below = np.count_nonzero(counted & (norms <= clip_norm)) - count / 2

    result = engine.RoundOutput(
      state=self._next_state(state, round_number, aggregate, below, count),
      participants=count,
      failed_clients=len(participants) - count,
      clip_norm=clip_norm,
      squared_measures=squared[counted],
    )
    if self._batches is not None:
      moves = [moves for chunk in chunks for moves in chunk.squared_moves]
      result = result._replace(
        examples=self._batches.groups(
          self._draws,
          {c: m for c, m, u in zip(clients, moves, usable) if u},
          participants,
          panel,
        )
      )
    if not panel or 'client' not in self.mechanism.units:
      return result
    position = {client: row for row, client in enumerate(clients)}
    members = [position[client] for client in panel]
    return result._replace(
      # One whose update cannot be computed moves nothing.
      panel_squared_measures=np.where(usable, squared, 0.0)[members],
      panel_taking_part=counted[members],
    )

  def _next_state(
    self,
    state: InProcessState,
    round_number: int,
    aggregate: np.ndarray,
    below: float,
    count: int,
  ) -> InProcessState:
    """Adds the server's noise, and takes its step."""
    mechanism = self.mechanism
    deviation = mechanism.noise_per_clip_norm * float(state.clip_norm)
    update = aggregate
    # Where noise is on top of the clients', there is none if nobody came.
    if mechanism.clips_updates or count:
      update = self._noised(
        aggregate, deviation, round_number, noise.UPDATE_NOISE
      )
    clip_norm = state.clip_norm
    if mechanism.clip_quantile is not None:
      (count,) = self._noised(
        np.array([below], np.float32),
        mechanism.count_deviation,
        round_number,
        noise.COUNT_NOISE,
      )
      share = count / mechanism.expected_clients + 0.5
      clip_norm = clip_norm * np.exp(mechanism.clip_norm_growth(share))
    velocity = np.float32(self._algorithm.momentum) * state.velocity + update
    rate = self._algorithm.learning_rate
    rate *= self._algorithm.learning_rate_decay**round_number
    step = np.float32(rate) * velocity
    return InProcessState(
      state.weights - step, velocity, np.float32(clip_norm), update
    )

  def _noised(
    self, values: np.ndarray, deviation: float, round_number: int, purpose: int
  ) -> np.ndarray:
    if not deviation:
      return values
    if self._noise_seed is None:
      normals = noise.secure_normal(values.size)
      return values + np.float32(deviation) * normals
    (noised,) = noise.add_noise(
      [tf.constant(values)],
      tf.constant(deviation, tf.float32),
      self._noise_seed,
      tf.constant(round_number),
      purpose,
    )
    return noised.numpy()

  def _chunks(
    self, clients: Sequence[int], round_number: int, state: InProcessState
  ) -> Iterator[tuple[slice, _Chunk]]:
    """Yields updates of a few clients at a time."""
    most_clients = max(1, _CHUNK_UPDATES // (4 * self._size)) * self._replicas
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
      yield rows, self._run_chunk(clients[rows], round_number, state)
      start = stop

  def _example_count(self, client: int) -> int:
    if self._batches is not None:
      return len(self._draws[client].indices)
    count = len(self._data.indices(client))
    return min(count, self._algorithm.examples_per_round or count)

  def _run_chunk(
    self, clients: Sequence[int], round_number: int, state: InProcessState
  ) -> _Chunk:
    """Computes the updates of a chunk, spread over the devices."""
    shared = [tf.constant(state.clip_norm)]
    arguments: Callable[..., tuple[np.ndarray, ...]] = functools.partial(
      self._held, round_number
    )
    if self._batches is not None:
      shared = [tf.constant(round_number), tf.constant(state.last_mean)]
      arguments = self._drawn
    if self._replicas == 1:
      outputs = [self._chunk_graph(*arguments(clients), *shared)]
    else:
      shares = np.array_split(np.asarray(clients), self._replicas)
      batches = [arguments(share.tolist()) for share in shares]
      distributed = [
        self._strategy.experimental_distribute_values_from_function(
          lambda context, part=part: tf.constant(
            batches[context.replica_id_in_sync_group][part]
          )
        )
        for part in range(len(batches[0]))
      ]
      result = self._strategy.run(self._chunk_graph, (*distributed, *shared))
      outputs = list(
        zip(*(self._strategy.experimental_local_results(r) for r in result))
      )
    moves: list[np.ndarray] = []
    if self._batches is not None:  # Padded differently on each device.
      moves = [row for *_, part in outputs for row in part.numpy()]
      outputs = [part[:-1] for part in outputs]
    updates, usable, norms, squared = (
      tf.concat(parts, 0) for parts in zip(*outputs)
    )
    return _Chunk(
      updates, usable.numpy(), norms.numpy(), squared.numpy(), moves
    )

  def _held(
    self, round_number: int, clients: Sequence[int]
  ) -> tuple[np.ndarray, ...]:
    """Returns the examples of clients' updates, padded to the most of them."""
    return federated_data.padded(
      [
        self._algorithm.examples_of(self._data, self._seed, round_number, c)
        for c in clients
      ]
    )

  def _drawn(self, clients: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Returns the batches of clients, padded to the largest of them."""
    draws = [self._draws[client] for client in clients]
    indices, sizes = federated_data.padded([draw.indices for draw in draws])
    assert self._batches is not None
    steps = self._batches.mechanism.local_steps
    drawn = np.zeros((len(clients), steps, indices.shape[1]), bool)
    for row, draw in enumerate(draws):
      drawn[row, :, : sizes[row]] = draw.drawn
    step_counts = np.array([draw.step_count for draw in draws], np.int32)
    return indices, sizes, drawn, step_counts, np.array(clients, np.int32)

  def _chunk(
    self,
    indices: tf.Tensor,
    sizes: tf.Tensor,
    clip_norm: tf.Tensor,
  ) -> tuple[tf.Tensor, ...]:
    """The clipped updates of a chunk of clients, as a graph."""

    def one_client(inputs: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
      held, size = inputs
      # One without examples computes with padding, to no effect.
      features, labels = self._examples(held[: tf.maximum(size, 1)])
      update = private_steps.flat(self._local_update(features, labels))
      (clipped,), usable, norm = clipping.clip([update], clip_norm)
      squared = tf.square(tf.minimum(norm, clip_norm))
      return clipped, usable & (size > 0), norm, squared

    return self._map_clients(one_client, (indices, sizes))

  def _private_chunk(
    self,
    indices: tf.Tensor,
    sizes: tf.Tensor,
    drawn: tf.Tensor,
    step_counts: tf.Tensor,
    clients: tf.Tensor,
    round_number: tf.Tensor,
    last_mean: tf.Tensor,
  ) -> tuple[tf.Tensor, ...]:
    """The noisy updates of a chunk of clients, and their examples' moves."""
    assert self._batches is not None
    mechanism = self._batches.mechanism
    longest = tf.shape(indices)[1]
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
        self._algorithm,
        lambda step: self._client_normal(round_number, client, step),
      )
      sent = update.sent
      norm = tf.norm(sent)
      squared = tf.reduce_sum(tf.square(update.clipped - reference))
      if mechanism.clips_updates:
        (sent,), _, _ = clipping.clip([sent], mechanism.clip_norm)
        squared = tf.square(tf.minimum(norm, mechanism.clip_norm))
      usable = private_steps.is_usable(update.sent)
      sent = tf.where(usable, sent, tf.zeros_like(sent))
      padding = [[0, 0], [0, longest - size]]
      moves = tf.pad(update.squared_moves, padding)
      return sent, usable, norm, squared, moves

    return self._map_clients(
      one_client,
      (indices, sizes, drawn, step_counts, clients),
      tf.TensorSpec([mechanism.local_steps, None], tf.float32),
    )

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
        tf.TensorSpec([self._size], tf.float32),
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

  def _client_normal(
    self, round_number: tf.Tensor, client: tf.Tensor, step: tf.Tensor
  ) -> tf.Tensor:
    """A client's noise, from the system's entropy source if not seeded."""
    if self._noise_seed is not None:
      return noise.client_normal(
        self._size, self._noise_seed, round_number, client, step
      )
    normals = tf.numpy_function(noise.secure_normal, [self._size], tf.float32)
    return tf.ensure_shape(normals, [self._size])

  def _gradient(
    self, features: tf.Tensor, labels: tf.Tensor
  ) -> Sequence[tf.Tensor]:
    """FedSGD's update: the gradient of the client's mean loss."""
    with tf.GradientTape() as tape:
      outputs = self._model(features, training=True)
      loss = algorithm_lib.mean_loss(
        labels, outputs, self._algorithm.client_loss
      )
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

  def _deviations(
    self,
    clients: Sequence[int],
    round_number: int,
    state: InProcessState,
    aggregate: np.ndarray,
    kept: Sequence[tf.Tensor],
  ) -> np.ndarray:
    """Returns ‖u - ū‖² of every client, from kept or recomputed updates."""
    mean = tf.constant(aggregate)
    updates: Iterable[tf.Tensor] = kept
    if not kept:
      chunks = self._chunks(clients, round_number, state)
      updates = (chunk.updates for _, chunk in chunks)
    parts = [self._deviation_graph(chunk, mean).numpy() for chunk in updates]
    return np.concatenate(parts)

  def _assign(self, weights: np.ndarray) -> None:
    for variable, part in zip(self._variables, self._parts(weights)):
      variable.assign(part)

  def _parts(self, flat: np.ndarray) -> list[np.ndarray]:
    cuts = np.cumsum([shape.num_elements() for shape in self._shapes])[:-1]
    parts = np.split(flat, cuts)
    return [p.reshape(shape) for p, shape in zip(parts, self._shapes)]

  def _flat(self, parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(part) for part in parts]).astype(np.float32)


def compute_clients_in_parallel() -> None:
  """Gives each operation one thread, and all cores to operations side by side.

  FedSGD's clients are independent, so on CPUs that is the better use of cores:
  small operations gain little from several threads. To be called before
  TensorFlow computes anything; afterwards, or with a GPU, it does nothing.
  """
  if tf.config.list_physical_devices('GPU'):
    return
  try:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(os.cpu_count() or 1)
  except RuntimeError:  # TensorFlow has started; its threads stay as they are.
    pass


def _squared_deviations(updates: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
  return tf.reduce_sum(tf.square(updates - mean), axis=1)


def _default_strategy() -> tf.distribute.Strategy:
  if len(tf.config.list_logical_devices('GPU')) > 1:
    return tf.distribute.MirroredStrategy()
  return tf.distribute.get_strategy()
