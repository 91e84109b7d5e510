"""Rounds as TFF processes: the server adds noise, or clients do."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp.aggregators import (
  cost_reports,
  distance_samples,
  private_mean,
  secure_sums,
)
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import (
  example_batches,
  federated_data,
  instance_processes,
  losses,
  processes,
  sampling,
)
from tf_bdp.mechanisms import base
from tf_bdp.mechanisms import measurements as measurements_lib

# Secure sums need a bound of what clients send. It leaves room for this many
# standard deviations of noise; what is beyond is cut off after noise was added.
_NOISE_BOUND = 8.0


class DoneRound(NamedTuple):
  """A round that TFF has run.

  Attributes:
    weights: Of the server before the round.
    number: Counts from 0.
    participants: The clients that took part.
    metrics: Of the round.
  """

  weights: Any
  number: int
  participants: Sequence[int]
  metrics: Mapping[str, Any]


class Rounds(abc.ABC):
  """A TFF process, its clients' data, and the measurement of a panel.

  Attributes:
    process: The learning process.
  """

  process: tff.learning.templates.LearningProcess

  def __init__(
    self,
    mechanism: base.Mechanism,
    algorithm: algorithm_lib.Algorithm,
    reporting: Optional[Mapping[str, cost_reports.Reporting]],
    noise_seed: Optional[int],
  ):
    """Keeps what all kinds need; arguments: see `TffEngine`."""
    self._mechanism = mechanism
    self._algorithm = algorithm
    self._reporting = reporting
    self._noise_seed = noise_seed

  @abc.abstractmethod
  def dataset(self, round_number: int, client: int) -> tf.data.Dataset:
    """Returns the data with which a client takes part in a round."""

  def squared_norms(
    self,
    weights: Any,
    round_number: int,
    clients: Sequence[int],
    clip_norm: np.float32,
  ) -> np.ndarray:
    """Returns ‖u‖² of clients before a round; 0 if there is no usable u.

    Args:
      weights: Of the server before the round.
      round_number: Counts from 0.
      clients: Whom to measure.
      clip_norm: C, to which updates are clipped.
    """
    raise ValueError(
      "A filter of clients' own budgets needs the server's noise alone."
    )

  @abc.abstractmethod
  def measure_panel(
    self,
    done: DoneRound,
    panel: Sequence[int],
    measured: measurements_lib.Measurements,
  ) -> measurements_lib.Measurements:
    """Returns a round's measurements, with the panel's in them.

    Args:
      done: The round.
      panel: The clients that are measured.
      measured: What the round's own metrics say.
    """

  def _aggregator(
    self, client_count: int, bound: Optional[float] = None
  ) -> private_mean.PrivateMeanFactory:
    """Returns the aggregator, with secure sums where costs are reported."""
    measurement: Optional[private_mean.Measurement] = None
    clips, summation = self._mechanism.aggregation.clips, None
    if self._reporting is not None:
      summation = secure_sums.SecureSummation(None if clips else bound)
      if clips:
        measurement = cost_reports.ClientCosts(self._reporting['client'])
    elif clips:
      measurement = distance_samples.DistanceSample(
        max(1, client_count), with_aggregate=True
      )
    return instance_processes.build_aggregator(
      self._mechanism,
      noise_seed=self._noise_seed,
      summation=summation,
      measurement=measurement,
    )

  def _with_panel(
    self,
    measured: measurements_lib.Measurements,
    participants: Sequence[int],
    panel: Sequence[int],
    usable: np.ndarray,
    squared_norms: np.ndarray,
    squared_deviations: np.ndarray,
  ) -> measurements_lib.Measurements:
    """Replaces the participants' measures by those of the panel."""
    aggregation = self._mechanism.aggregation
    counted = usable | aggregation.counts_failed
    taking_part = np.isin(panel, participants) & counted
    squared = aggregation.measure(
      squared_norms, squared_deviations, taking_part, measured.participants
    )
    return measured._replace(
      # A client that would be left out moves nothing.
      squared_measures=np.where(counted, squared, 0.0),
      taking_part=taking_part,
      panel=True,
    )


class ClientRounds(Rounds):
  """The server alone adds noise."""

  def __init__(
    self,
    model_fn: Callable[[], tf.keras.Model],
    data: federated_data.FederatedData,
    sampler: sampling.Sampler,
    *common: Any,
  ):
    """Builds the process; arguments: `TffEngine`, then `Rounds`."""
    super().__init__(*common)
    self._data = data
    self._sampler = sampler
    algorithm = self._algorithm
    spec = (
      tf.TensorSpec([None, *data.features.shape[1:]], data.features.dtype),
      tf.TensorSpec([None], data.labels.dtype),
    )

    def tff_model_fn() -> tff.learning.models.VariableModel:
      return tff.learning.models.from_keras_model(
        keras_model=model_fn(),
        loss=losses.of(algorithm.client_loss),
        input_spec=spec,
      )

    options: dict[str, Any] = {'server_optimizer': server_optimizer(algorithm)}
    if self._reporting is not None:
      options['metrics_aggregator'] = (
        tff.learning.metrics.secure_sum_then_finalize
      )
    aggregator = self._aggregator(data.client_count)
    if algorithm.local_learning_rate is None:
      self.process = processes.build_fed_sgd(
        tff_model_fn, aggregator, **options
      )
      client_update = _gradient
    else:
      client = tff.learning.optimizers.build_sgdm(algorithm.local_learning_rate)
      self.process = processes.build_fed_avg(
        tff_model_fn, aggregator, client, **options
      )
      client_update = _weight_change(algorithm.local_learning_rate)
    self._measure = processes.build_panel_measurement(
      tff_model_fn, client_update
    )

  def dataset(self, round_number: int, client: int) -> tf.data.Dataset:
    """Returns the client's examples, in batches."""
    indices = self._algorithm.examples_of(
      self._data, self._sampler, round_number, client
    )
    dataset = tf.data.Dataset.from_tensor_slices(
      (self._data.features[indices], self._data.labels[indices])
    )
    if self._algorithm.name == 'fed_sgd':
      return dataset.batch(max(1, len(indices)))
    batches = dataset.batch(self._algorithm.client_batch_size)
    return batches.repeat(self._algorithm.client_epochs)

  def measure_panel(
    self,
    done: DoneRound,
    panel: Sequence[int],
    measured: measurements_lib.Measurements,
  ) -> measurements_lib.Measurements:
    """Compares the panel's updates with the mean of the participants."""
    norms, deviations = self._compared(
      done.weights,
      done.metrics['aggregator']['aggregate'],
      measured.clip_norm,
      done.number,
      panel,
    )
    return self._with_panel(
      measured, done.participants, panel, norms > 0, norms, deviations
    )

  def squared_norms(
    self,
    weights: Any,
    round_number: int,
    clients: Sequence[int],
    clip_norm: np.float32,
  ) -> np.ndarray:
    """Returns ‖u‖² of clients before a round; see `Rounds`."""
    # There is no mean yet; what they are compared with does not matter.
    norms, _ = self._compared(
      weights, weights.trainable, clip_norm, round_number, clients
    )
    return norms

  def _compared(
    self,
    weights: Any,
    aggregate: Any,
    clip_norm: Any,
    round_number: int,
    clients: Sequence[int],
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns ‖u‖² and ‖u - ū‖² of clients, given the mean ū."""
    rows = self._measure(
      {'weights': weights, 'aggregate': aggregate, 'clip_norm': clip_norm},
      [self.dataset(round_number, client) for client in clients],
      [np.int32(member) for member in range(len(clients))],
    )
    _, norms, deviations = rows[np.argsort(rows[:, 0])].T
    return norms, deviations


class ExampleRounds(Rounds):
  """Clients add noise, and tell how far examples move what they send."""

  def __init__(
    self,
    model_fn: Callable[[], tf.keras.Model],
    data: federated_data.FederatedData,
    sampler: sampling.Sampler,
    *common: Any,
  ):
    """Builds the process; arguments: `TffEngine`, then `Rounds`."""
    super().__init__(*common)
    local = self._mechanism.local
    assert local is not None
    if local.reference_is_last_mean:
      raise ValueError(
        "TFF's clients are not sent the last mean. Leave out "
        'reference_is_last_mean, or use the other engine.'
      )
    self._batches = example_batches.ExampleBatches(
      data, local, self._algorithm, sampler
    )
    measurement: instance_processes.Measurement
    measurement = instance_processes.moves_by_example(self._batches)
    if self._reporting is not None:
      measurement = cost_reports.ExampleCosts(
        local, max(data.holdings), self._reporting
      )
    parts = (model_fn, self._batches, measurement, self._noise_seed)
    bound = local.clip_norm * (
      1.0 + _NOISE_BOUND * local.client_noise_per_clip_norm
    )
    if self._algorithm.local_learning_rate is not None:
      bound *= self._algorithm.local_learning_rate * local.local_steps
    self.process = instance_processes.build_process(
      model_fn,
      instance_processes.build_client_work(*parts),
      self._aggregator(data.client_count, bound),
      server_optimizer=server_optimizer(self._algorithm),
    )
    if self._reporting is None:
      self._measure = instance_processes.build_panel_measurement(*parts)

  def dataset(self, round_number: int, client: int) -> tf.data.Dataset:
    """Returns the client's draw, as one element."""
    return instance_processes.part_dataset(self._batches, round_number, client)

  def measure_panel(
    self,
    done: DoneRound,
    panel: Sequence[int],
    measured: measurements_lib.Measurements,
  ) -> measurements_lib.Measurements:
    """Measures the panel's examples, and its clients if these are protected."""
    mechanism, local = self._mechanism, self._batches.mechanism
    compares = mechanism.aggregation.compares
    if compares and self._noise_seed is None:
      raise ValueError(
        'In split privacy a panel is measured by its noisy updates, which TFF '
        'cannot compute a second time. Use panel_size = 0 or the other engine.'
      )
    read = instance_processes.MovesByExample.read
    answers = read(done.metrics['client_work'], local.local_steps)
    clients = self._batches.clients(done.participants, panel)
    others = list(panel) if compares else clients[len(done.participants) :]
    compared: dict[int, np.ndarray] = {}
    if others:
      aggregate = done.metrics['aggregator'].get(
        'aggregate', done.weights.trainable
      )
      more, rows = self._measure(
        {
          'weights': done.weights,
          'round_number': done.number,
          'aggregate': aggregate,
        },
        [self.dataset(done.number, client) for client in others],
      )
      answers = {**read(more, local.local_steps), **answers}
      compared = {int(row[0]): row[1:] for row in np.asarray(rows)}
    measured = measured._replace(
      examples=self._batches.groups(
        {c: self._batches.draw(done.number, c) for c in clients},
        {c: answers[c].examples.squared_moves for c in clients},
        done.participants,
        panel,
      )
    )
    if 'client' not in mechanism.units:
      return measured
    norms = np.array([answers[client].squared_norm for client in panel])
    deviations = norms
    if compares:
      norms, deviations = np.array([compared[client] for client in panel]).T
    usable = np.array([answers[client].usable for client in panel])
    return self._with_panel(
      measured, done.participants, panel, usable, norms, deviations
    )


def server_optimizer(
  algorithm: algorithm_lib.Algorithm,
) -> tff.learning.optimizers.Optimizer:
  """Returns the server's optimiser."""
  optimizer = tff.learning.optimizers.build_sgdm(
    algorithm.learning_rate, algorithm.momentum or None
  )
  if algorithm.learning_rate_decay == 1:
    return optimizer
  return tff.learning.optimizers.schedule_learning_rate(
    optimizer,
    lambda number: algorithm.learning_rate_at(tf.cast(number, tf.float32)),
  )


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
