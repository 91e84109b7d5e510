"""Rounds in this process, as TensorFlow functions, on GPUs where there are any.

TFF's worker computes on CPUs only. This engine does the same round with the
same mathematics. Updates are computed in chunks of clients and kept only where
they are needed again.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import tensorflow as tf

from tf_bdp.engines import base, client_updates
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data, sampling
from tf_bdp.mechanisms import base as mechanisms
from tf_bdp.mechanisms import measurements as measurements_lib
from tf_bdp.ops import noise

# Above this many bytes updates are computed a second time instead of kept.
_MOST_KEPT_UPDATES = 1200 * 2**20


class InProcessState(NamedTuple):
  """The state between rounds.

  Attributes:
    weights: The model's weights, as one vector.
    velocity: The momentum vector of the server's optimiser.
    last_mean: What the last round released.
    aggregation: The mechanism's own state, which includes the clip norm.
  """

  weights: np.ndarray
  velocity: np.ndarray
  last_mean: np.ndarray
  aggregation: Any


class InProcessEngine(base.Engine):
  """The round as `tf.function`s in this process."""

  def __init__(
    self,
    model_fn: Callable[[], tf.keras.Model],
    data: federated_data.FederatedData,
    *,
    mechanism: mechanisms.Mechanism,
    algorithm: algorithm_lib.Algorithm,
    sampler: sampling.Sampler,
    noise_seed: Optional[int] = None,
    reporting: Optional[Mapping[str, Any]] = None,
    strategy: Optional[tf.distribute.Strategy] = None,
  ):
    """Builds the model and the graphs.

    Args:
      model_fn: Makes a Keras model whose outputs are logits.
      data: The clients' data.
      mechanism: What is released.
      algorithm: FedSGD or FedAvg, and the server's optimiser.
      sampler: Draws the examples that clients use, if they do not use all.
      noise_seed: For experiments only; without it the noise comes from the
        system's entropy source.
      reporting: Must be None: this engine has no secure aggregation.
      strategy: How to spread clients over devices; by default over all GPUs
        if there are several.
    """
    if reporting is not None:
      raise ValueError(
        'Secure aggregation is done by the secure sums of TFF: use its engine.'
      )
    self.mechanism = mechanism
    self.client_count = data.client_count
    self.sampler = sampler
    self._aggregation = mechanism.aggregation
    self._algorithm = algorithm
    self._noise_seed = noise_seed
    parts = (
      model_fn,
      data,
      algorithm,
      sampler,
      strategy or _default_strategy(),
    )
    self._updates: client_updates.ClientUpdates
    if mechanism.local is None:
      self._updates = client_updates.PlainUpdates(*parts)
    else:
      self._updates = client_updates.PrivateUpdates(
        mechanism, noise_seed, *parts
      )
    self._initial = self._updates.weights()
    self._deviation_graph = tf.function(
      _squared_deviations, reduce_retracing=True
    )

  def initial_state(self) -> InProcessState:
    """Returns the model's initial weights, with zero momentum."""
    zeros = np.zeros_like(self._initial)
    return InProcessState(
      self._initial, zeros, zeros, self._aggregation.initial_state()
    )

  def model_weights(self, state: InProcessState) -> list[np.ndarray]:
    """Returns the trainable weights, in the model's order."""
    return self._updates.parts(state.weights)

  def to_arrays(self, state: InProcessState) -> dict[str, np.ndarray]:
    """Returns the state as arrays."""
    *vectors, aggregation = state
    return {**dict(zip(state._fields, vectors)), **aggregation._asdict()}

  def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> InProcessState:
    """Restores what `to_arrays` returned."""
    initial = self.initial_state()
    expected = self.to_arrays(initial)
    for name, array in expected.items():
      found = arrays[name].shape if name in arrays else None
      if found != np.shape(array):
        raise ValueError(
          f'{name} of the checkpoint has shape {found}, not '
          f'{np.shape(array)}: it is of another model.'
        )
    own = initial.aggregation._fields
    return InProcessState(
      arrays['weights'],
      arrays['velocity'],
      arrays['last_mean'],
      initial.aggregation._replace(**{name: arrays[name] for name in own}),
    )

  def release(
    self,
    state: InProcessState,
    round_number: int,
    participants: Sequence[int],
    panel: Sequence[int],
  ) -> tuple[InProcessState, measurements_lib.Measurements]:
    """Runs one round; see `Engine.run_round`."""
    self._updates.assign(state.weights)
    clip_norm = float(state.aggregation.clip_norm)
    inputs = client_updates.RoundInputs(
      round_number, state.aggregation.clip_norm, state.last_mean
    )
    clients = self._updates.clients(round_number, participants, panel)
    active = np.arange(len(clients)) < len(participants)
    compares = self._aggregation.compares
    keep = compares and (
      not self._updates.repeatable
      or 4 * self._updates.size * len(clients) <= _MOST_KEPT_UPDATES
    )

    total = np.zeros(self._updates.size, np.float32)
    kept: list[tf.Tensor] = []
    chunks = []
    for rows, chunk in self._updates.chunks(inputs, clients):
      weights = (active[rows] & chunk.usable).astype(np.float32)
      total += tf.linalg.matvec(
        chunk.updates, weights, transpose_a=True
      ).numpy()
      if keep:
        kept.append(chunk.updates)
      chunks.append(chunk._replace(updates=None))

    usable = _concatenated([chunk.usable for chunk in chunks]).astype(bool)
    norms = _concatenated([chunk.norms for chunk in chunks])
    squared = _concatenated([chunk.squared_norms for chunk in chunks])
    counted = active & usable
    count = int(np.count_nonzero(counted))
    below = np.count_nonzero(counted & (norms <= clip_norm))
    released = self._aggregation.release(
      state.aggregation,
      mechanisms.Sums([total], np.float32(count), np.float32(below)),
      lambda *noised: self._noised(round_number, *noised),
    )
    if compares and count:
      deviations = self._deviations(
        clients, inputs, released.aggregate[0], kept
      )
      squared = self._aggregation.measure(squared, deviations, counted, count)

    measured = measurements_lib.Measurements(
      count,
      len(participants) - count,
      clip_norm,
      squared[counted],
      np.ones(count, bool),
      examples=self._updates.groups(clients, chunks, participants, panel),
    )
    if panel and 'client' in self.mechanism.units:
      position = {client: row for row, client in enumerate(clients)}
      members = [position[client] for client in panel]
      measured = measured._replace(
        # A client whose update cannot be computed moves nothing.
        squared_measures=np.where(usable, squared, 0.0)[members],
        taking_part=counted[members],
        panel=True,
      )
    return self._next_state(state, round_number, released), measured

  def _next_state(
    self,
    state: InProcessState,
    round_number: int,
    released: mechanisms.Release,
  ) -> InProcessState:
    """Takes the server's step."""
    update = np.asarray(released.result[0], np.float32)
    velocity = np.float32(self._algorithm.momentum) * state.velocity + update
    rate = np.float32(self._algorithm.learning_rate_at(round_number))
    return InProcessState(
      state.weights - rate * velocity,
      velocity,
      update,
      tf.nest.map_structure(np.float32, released.state),
    )

  def _noised(
    self,
    round_number: int,
    values: Sequence[np.ndarray],
    deviation: float,
    purpose: int,
  ) -> list[np.ndarray]:
    """Adds the server's noise; without a seed, from the system's entropy."""
    if self._noise_seed is None:
      return [
        value
        + np.float32(deviation)
        * noise.secure_normal(np.size(value)).reshape(np.shape(value))
        for value in values
      ]
    noised = noise.add_noise(
      [tf.constant(value, tf.float32) for value in values],
      tf.constant(deviation, tf.float32),
      self._noise_seed,
      tf.constant(round_number),
      purpose,
    )
    return [value.numpy() for value in noised]

  def _deviations(
    self,
    clients: Sequence[int],
    inputs: client_updates.RoundInputs,
    aggregate: np.ndarray,
    kept: Sequence[tf.Tensor],
  ) -> np.ndarray:
    """Returns ‖u - ū‖² of every client, from kept or recomputed updates."""
    mean = tf.constant(aggregate, tf.float32)
    updates: Iterable[tf.Tensor] = kept
    if not kept:
      chunks = self._updates.chunks(inputs, clients)
      updates = (chunk.updates for _, chunk in chunks)
    parts = [self._deviation_graph(chunk, mean).numpy() for chunk in updates]
    return np.concatenate(parts)


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


def _concatenated(parts: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate([np.zeros(0), *parts])


def _squared_deviations(updates: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
  return tf.reduce_sum(tf.square(updates - mean), axis=1)


def _default_strategy() -> tf.distribute.Strategy:
  if len(tf.config.list_logical_devices('GPU')) > 1:
    return tf.distribute.MirroredStrategy()
  return tf.distribute.get_strategy()
