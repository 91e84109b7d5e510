"""Rounds on TFF's C++ runtime."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tree

from tf_bdp import aggregators
from tf_bdp.aggregators import cost_reports, runtime, secure_sums
from tf_bdp.engines import base as engine
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data, processes
from tf_bdp.mechanisms import client as mechanism_lib


class TffState(NamedTuple):
  """TFF's own state of the process."""

  process: tff.learning.templates.LearningAlgorithmState


class TffEngine(engine.Engine):
  """The round as a TFF learning process."""

  def __init__(
    self,
    model_fn: Callable[[], tf.keras.Model],
    data: federated_data.FederatedData,
    mechanism: mechanism_lib.GaussianMechanism,
    algorithm: algorithm_lib.Algorithm,
    noise_seed: Optional[int] = None,
    reporting: Optional[Mapping[str, cost_reports.Reporting]] = None,
    seed: int = 0,
  ):
    """Builds the process.

    Args:
      model_fn: As for `InProcessEngine`, like the others below.
      data: The clients' data.
      mechanism: What is released.
      algorithm: FedSGD or FedAvg, and the server's optimiser.
      noise_seed: For experiments only.
      reporting: Of each unit; makes updates and costs reach the server by
        secure sums alone, simulated by TFF's test runtime.
      seed: Of the examples that clients draw.
    """
    self._start(model_fn, mechanism, reporting)
    self._data = data
    self._algorithm = algorithm
    self._seed = seed
    spec = (
      tf.TensorSpec([None, *data.features.shape[1:]], data.features.dtype),
      tf.TensorSpec([None], data.labels.dtype),
    )

    def tff_model_fn() -> tff.learning.models.VariableModel:
      return tff.learning.models.from_keras_model(
        keras_model=model_fn(), loss=algorithm.loss, input_spec=spec
      )

    factory = aggregators.ClientPrivacyFactory(
      mechanism,
      max_distances=max(1, data.client_count),
      noise_seed=noise_seed,
      release_aggregate=reporting is None,
      reporting=None if reporting is None else reporting['client'],
    )
    server = server_optimizer(algorithm)
    metrics_aggregator = None
    if reporting is not None:
      metrics_aggregator = tff.learning.metrics.secure_sum_then_finalize
    if algorithm.name == 'fed_sgd':
      self._process = processes.build_fed_sgd(
        tff_model_fn, factory, server, metrics_aggregator
      )
      client_update = _gradient
    else:
      client = tff.learning.optimizers.build_sgdm(
        algorithm.client_learning_rate
      )
      self._process = processes.build_fed_avg(
        tff_model_fn, factory, client, server, metrics_aggregator
      )
      client_update = _weight_change(algorithm.client_learning_rate)
    self._measure_panel = processes.build_panel_measurement(
      tff_model_fn, client_update, mechanism.kind
    )
    # Keras binds its classes to the kind of graph in which a model was made
    # last, and TFF makes models in old ones: bind them back for this process.
    model_fn()

  def _start(
    self,
    model_fn: Callable[[], tf.keras.Model],
    mechanism: engine.Mechanism,
    reporting: Optional[Mapping[str, cost_reports.Reporting]],
  ) -> None:
    """Prepares TFF's runtime, and what all of its engines have."""
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
    runtime.reap_on_exit()
    if reporting is not None:
      secure_sums.set_simulation_context()
    model = model_fn()
    algorithm_lib.check_model(model)
    self.mechanism = mechanism
    self._reporting = reporting
    self._initial_weights = [v.numpy() for v in model.trainable_variables]

  def initial_state(self) -> TffState:
    """Returns the process's initial state, with the model's initial weights."""
    state = self._process.initialize()
    weights = self._process.get_model_weights(state)
    weights = tff.learning.models.ModelWeights(
      trainable=list(self._initial_weights), non_trainable=weights.non_trainable
    )
    return TffState(self._process.set_model_weights(state, weights))

  def model_weights(self, state: TffState) -> list[np.ndarray]:
    """Returns the trainable weights, in the model's order."""
    weights = self._process.get_model_weights(state.process)
    return [np.asarray(part) for part in weights.trainable]

  def to_arrays(self, state: TffState) -> dict[str, np.ndarray]:
    """Returns the leaves of the state."""
    leaves = tree.flatten(state.process)
    return {f'leaf_{i}': np.asarray(leaf) for i, leaf in enumerate(leaves)}

  def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> TffState:
    """Restores what `to_arrays` returned."""
    template = self._process.initialize()
    if len(tree.flatten(template)) != len(arrays):
      raise ValueError('The checkpoint is not one of this TFF process.')
    leaves = [arrays[f'leaf_{i}'] for i in range(len(arrays))]
    # Scalars come back as arrays without dimensions; TFF wants them plain.
    plain = [leaf if leaf.ndim else leaf.item() for leaf in leaves]
    return TffState(tree.unflatten_as(template, plain))

  def run_round(
    self,
    state: TffState,
    round_number: int,
    participants: Sequence[int],
    panel: Sequence[int],
  ) -> engine.RoundOutput:
    """Runs one round, then measures the panel against its aggregate."""
    datasets = functools.partial(self._dataset, round_number)
    before = self._process.get_model_weights(state.process)
    output = self._process.next(
      state.process, [datasets(client) for client in participants]
    )
    measured = output.metrics['aggregator']
    count = int(measured['participants'])
    if self._reporting is not None:
      return self._reported(TffState(output.state), measured)
    result = engine.RoundOutput(
      state=TffState(output.state),
      participants=count,
      failed_clients=int(measured['failed_clients']),
      clip_norm=float(measured['clip_norm']),
      squared_measures=np.asarray(measured['squared_measures']),
    )
    if not panel:
      return result
    rows = self._measure_panel(
      {
        'weights': before,
        'aggregate': measured['aggregate'],
        'clip_norm': measured['clip_norm'],
      },
      [datasets(client) for client in panel],
      [np.int32(member) for member in range(len(panel))],
    )
    rows = rows[np.argsort(rows[:, 0])]
    taking_part = np.isin(panel, participants) & (rows[:, 1] > 0)
    # Alone, a client is compared with nothing.
    alone = taking_part & (count == 1)
    measures = np.where(alone, rows[:, 1], rows[:, 2])
    return result._replace(
      panel_squared_measures=np.where(rows[:, 1] > 0, measures, 0.0),
      panel_taking_part=taking_part,
    )

  def _reported(
    self, state: TffState, measured: Mapping[str, Any]
  ) -> engine.RoundOutput:
    """Returns a round of which the server learnt only sums."""
    assert self._reporting is not None
    count = int(measured['participants'])
    costs = cost_reports.bound_of_client_costs(
      measured['client_costs'],
      self.mechanism.worst_case_squared_distance(count),
      self.mechanism.participation_probability,
      self._reporting['client'],
    )
    return engine.RoundOutput(
      state=state,
      participants=count,
      failed_clients=int(measured['failed_clients']),
      clip_norm=float(measured['clip_norm']),
      squared_measures=np.zeros(0),
      reported={'client': costs},
    )

  def _dataset(self, round_number: int, client: int) -> tf.data.Dataset:
    indices = self._algorithm.examples_of(
      self._data, self._seed, round_number, client
    )
    dataset = tf.data.Dataset.from_tensor_slices(
      (self._data.features[indices], self._data.labels[indices])
    )
    if self._algorithm.name == 'fed_sgd':
      return dataset.batch(max(1, len(indices)))
    batches = dataset.batch(self._algorithm.client_batch_size)
    return batches.repeat(self._algorithm.client_epochs)


def server_optimizer(
  algorithm: algorithm_lib.Algorithm,
) -> tff.learning.optimizers.Optimizer:
  """Returns the server's optimiser."""
  optimizer = tff.learning.optimizers.build_sgdm(
    algorithm.learning_rate, algorithm.momentum or None
  )
  if algorithm.learning_rate_decay == 1:
    return optimizer

  def rate(round_number: tf.Tensor) -> tf.Tensor:
    decay = tf.constant(algorithm.learning_rate_decay, tf.float32)
    passed = tf.cast(round_number, tf.float32)
    return algorithm.learning_rate * decay**passed

  return tff.learning.optimizers.schedule_learning_rate(optimizer, rate)


def _gradient(
  model: tff.learning.models.VariableModel,
  weights: Any,
  dataset: tf.data.Dataset,
) -> list[tf.Tensor]:
  """FedSGD's update: the gradient of the client's mean loss."""
  variables = _assigned(model, weights)

  def accumulate(state: Any, batch: Any) -> Any:
    sums, total = state
    gradient, output = _batch_gradient(model, batch)
    count = tf.cast(output.num_examples, tf.float32)
    sums = tuple(s + count * g for s, g in zip(sums, gradient))
    return sums, total + count

  initial = (tuple(tf.zeros_like(v) for v in variables), tf.constant(0.0))
  sums, total = dataset.reduce(initial, accumulate)
  return [part / total for part in sums]


def _weight_change(learning_rate: float) -> Callable[..., list[tf.Tensor]]:
  """FedAvg's update: by how much local training lowers the weights."""

  def client_update(
    model: tff.learning.models.VariableModel,
    weights: Any,
    dataset: tf.data.Dataset,
  ) -> list[tf.Tensor]:
    variables = _assigned(model, weights)

    def step(count: tf.Tensor, batch: Any) -> tf.Tensor:
      gradient, _ = _batch_gradient(model, batch)
      for variable, part in zip(variables, gradient):
        variable.assign_sub(learning_rate * part)
      return count + 1

    dataset.reduce(tf.constant(0), step)
    return [b - v for b, v in zip(weights.trainable, variables)]

  return client_update


def _batch_gradient(
  model: tff.learning.models.VariableModel, batch: Any
) -> tuple[Sequence[tf.Tensor], tff.learning.models.BatchOutput]:
  with tf.GradientTape() as tape:
    output = model.forward_pass(batch)
  gradient = tape.gradient(
    output.loss,
    model.trainable_variables,
    unconnected_gradients=tf.UnconnectedGradients.ZERO,
  )
  return gradient, output


def _assigned(
  model: tff.learning.models.VariableModel, weights: Any
) -> Sequence[tf.Variable]:
  """Gives the model the weights; returns its trainable variables."""
  own = tff.learning.models.ModelWeights.from_model(model)
  tf.nest.map_structure(lambda variable, w: variable.assign(w), own, weights)
  return model.trainable_variables
