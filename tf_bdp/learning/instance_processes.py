"""TFF learning processes that protect examples, and clients with them.

A process is put together from two parts that can be replaced: the client work
clips, adds noise and measures; the aggregator takes the mean. A `Measurement`
decides what the server learns about the examples.
"""

import collections
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple, Optional, Protocol

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp.aggregators import distance_samples, private_mean, runtime
from tf_bdp.learning import example_batches, models
from tf_bdp.mechanisms import base
from tf_bdp.mechanisms import measurements as measurements_lib
from tf_bdp.ops import clipping, noise, private_steps

runtime.reap_on_exit()

_Structure = Mapping[str, Any]
_KerasModelFn = Callable[[], tf.keras.Model]


class Measurement(Protocol):
  """What clients report about their examples, and what the server learns."""

  def message(
    self, update: private_steps.ClientUpdate, part: _Structure
  ) -> Any:
    """Returns a client's message, as TensorFlow operations.

    Args:
      update: The client's update.
      part: The only element of its dataset; see `part_spec`.
    """

  def aggregate(self, messages: tff.Value) -> tff.Value:
    """Returns what the server learns, given the messages at the clients."""


class MovesByExample:
  """Every client sends every squared move: the server is trusted with all.

  The server gets an array of one row for each client. A row holds what `_HEAD`
  names, then the squared moves of all examples in all steps, padded, and then
  which of these were measured.
  """

  _HEAD = ('usable', 'client', 'squared_norm', 'holding', 'step_count')

  def __init__(self, longest: int, steps: int):
    """Makes a measurement.

    Args:
      longest: The most examples that any client has.
      steps: The most steps that any client takes.
    """
    self._longest = longest
    self._steps = steps

  def message(
    self, update: private_steps.ClientUpdate, part: _Structure
  ) -> tf.Tensor:
    """Returns the client's row."""
    head = {
      **part,
      'usable': private_steps.is_usable(update.sent),
      'squared_norm': tf.reduce_sum(tf.square(update.clipped)),
    }
    padding = [[0, 0], [0, self._longest - tf.shape(update.squared_moves)[1]]]
    tables = [
      tf.pad(tf.cast(table, tf.float32), padding)
      for table in (update.squared_moves, part['measured'])
    ]
    row = tf.concat(
      [
        tf.stack([tf.cast(head[name], tf.float32) for name in self._HEAD]),
        *(tf.reshape(table, [-1]) for table in tables),
      ],
      0,
    )
    size = len(self._HEAD) + 2 * self._steps * self._longest
    return tf.ensure_shape(row, [size])

  def aggregate(self, messages: tff.Value) -> tff.Value:
    """Returns all rows."""
    return tff.aggregators.federated_sample(messages, 2**20)

  @classmethod
  def read(cls, rows: np.ndarray, steps: int) -> 'dict[int, Answer]':
    """Returns what each client reported.

    Args:
      rows: What the server got.
      steps: The most steps that any client takes.
    """
    answers = {}
    for row in np.asarray(rows):
      head = dict(zip(cls._HEAD, row))
      moves, measured = row[len(cls._HEAD) :].reshape(2, steps, -1)
      answers[int(head['client'])] = Answer(
        bool(head['usable']),
        float(head['squared_norm']),
        measurements_lib.MeasuredClient(
          int(head['holding']),
          int(head['step_count']),
          measured > 0,
          moves if head['usable'] else None,
        ),
      )
    return answers


class Answer(NamedTuple):
  """What a client reported.

  Attributes:
    usable: Whether its update can be used.
    squared_norm: ‖u‖² before noise.
    examples: What was measured of its examples.
  """

  usable: bool
  squared_norm: float
  examples: measurements_lib.MeasuredClient


def part_spec(
  features: tf.TensorSpec, labels: tf.TensorSpec, steps: int
) -> 'collections.OrderedDict[str, tf.TensorSpec]':
  """Returns the type of the only element of a client's dataset.

  Args:
    features: The spec of one example's features.
    labels: The spec of one example's label.
    steps: The most local steps of a client.
  """
  return collections.OrderedDict(
    features=tf.TensorSpec([None, *features.shape], features.dtype),
    labels=tf.TensorSpec([None, *labels.shape], labels.dtype),
    drawn=tf.TensorSpec([steps, None], tf.bool),
    measured=tf.TensorSpec([steps, None], tf.bool),
    step_count=tf.TensorSpec([], tf.int32),
    client=tf.TensorSpec([], tf.int32),
    holding=tf.TensorSpec([], tf.int32),
  )


def part_dataset(
  batches: example_batches.ExampleBatches, round_number: int, client: int
) -> tf.data.Dataset:
  """Returns the dataset with which a client takes part in a round."""
  draw = batches.draw(round_number, client)
  data = batches.data
  return tf.data.Dataset.from_tensors(
    collections.OrderedDict(
      features=data.features[draw.indices],
      labels=data.labels[draw.indices],
      drawn=draw.drawn,
      measured=draw.measured,
      step_count=np.int32(draw.step_count),
      client=np.int32(client),
      holding=np.int32(len(data.indices(client))),
    )
  )


def spec_of(
  batches: example_batches.ExampleBatches,
) -> 'collections.OrderedDict[str, tf.TensorSpec]':
  """Returns the `part_spec` of the batches."""
  data = batches.data
  return part_spec(
    tf.TensorSpec(data.features.shape[1:], data.features.dtype),
    tf.TensorSpec([], data.labels.dtype),
    batches.mechanism.local_steps,
  )


def moves_by_example(
  batches: example_batches.ExampleBatches,
) -> MovesByExample:
  """Returns the measurement that fits the batches."""
  return MovesByExample(
    max(batches.data.holdings), batches.mechanism.local_steps
  )


def build_private_process(
  model_fn: _KerasModelFn,
  batches: example_batches.ExampleBatches,
  *,
  server_optimizer: Optional[tff.learning.optimizers.Optimizer] = None,
  noise_seed: Optional[int] = None,
) -> tff.learning.templates.LearningProcess:
  """Builds the learning process of a level, from its usual parts.

  The data of a participant are its `part_dataset`; `events_from_metrics` makes
  the accountants' events from the metrics of a round.

  Args:
    model_fn: Makes a Keras model, anew at each call.
    batches: The clients' data, mechanism and algorithm.
    server_optimizer: By default plain SGD with learning rate 0.1.
    noise_seed: For experiments only.
  """
  client_work = build_client_work(
    model_fn, batches, moves_by_example(batches), noise_seed
  )
  aggregator = build_aggregator(batches.mechanism, noise_seed=noise_seed)
  return build_process(
    model_fn, client_work, aggregator, server_optimizer=server_optimizer
  )


def build_client_work(
  model_fn: _KerasModelFn,
  batches: example_batches.ExampleBatches,
  measurement: Measurement,
  noise_seed: Optional[int] = None,
) -> tff.learning.templates.ClientWorkProcess:
  """Builds the clients' part: clip, add noise, measure.

  Args:
    model_fn: Makes a Keras model, anew at each call.
    batches: The clients' data, mechanism and algorithm.
    measurement: What the clients report about their examples.
    noise_seed: For experiments only; see `noise.client_normal`.

  Returns:
    A process whose state counts the rounds.
  """
  work, weights_type, data_type = _build_work(
    model_fn, batches, measurement, noise_seed
  )

  @tff.tensorflow.computation
  def first_round():
    return tf.constant(0, tf.int32)

  @tff.tensorflow.computation(np.int32)
  def next_round(round_number):
    return round_number + 1

  @tff.federated_computation
  def init_fn():
    return tff.federated_eval(first_round, tff.SERVER)

  @tff.federated_computation(
    tff.FederatedType(np.int32, tff.SERVER),
    tff.FederatedType(weights_type, tff.CLIENTS),
    tff.FederatedType(data_type, tff.CLIENTS),
  )
  def next_fn(state, weights, data):
    round_number = tff.federated_broadcast(state)
    done = tff.federated_map(work, (weights, data, round_number))
    return tff.templates.MeasuredProcessOutput(
      tff.federated_map(next_round, state),
      done.result,
      measurement.aggregate(done.message),
    )

  return tff.learning.templates.ClientWorkProcess(init_fn, next_fn)


def build_panel_measurement(
  model_fn: _KerasModelFn,
  batches: example_batches.ExampleBatches,
  measurement: Measurement,
  noise_seed: Optional[int] = None,
) -> tff.Computation:
  """Builds the computation that measures clients which do not take part.

  Arguments as for `build_client_work`.

  Returns:
    A computation that takes the server's model weights, the round's number, an
    aggregate, and the clients' data. It returns what `measurement` makes of the
    clients' messages; and for each client a row of its number, ‖u‖² and the
    squared distance of u from the aggregate, u being its clipped noisy update.
  """
  work, weights_type, data_type = _build_work(
    model_fn, batches, measurement, noise_seed
  )
  update_type = weights_type.trainable

  @tff.tensorflow.computation(update_type, update_type, data_type)
  def compare(update, aggregate, dataset):
    clipped, _, _ = clipping.clip(
      tf.nest.flatten(update),
      tf.constant(batches.mechanism.clip_norm, tf.float32),
    )
    client = dataset.get_single_element()['client']
    return clipping.compare(client, clipped, tf.nest.flatten(aggregate))

  server_type = collections.OrderedDict(
    weights=weights_type, round_number=np.int32, aggregate=update_type
  )

  @tff.federated_computation(
    tff.FederatedType(server_type, tff.SERVER),
    tff.FederatedType(data_type, tff.CLIENTS),
  )
  def measure(server, data):
    sent = tff.federated_broadcast(server)
    done = tff.federated_map(work, (sent.weights, data, sent.round_number))
    compared = tff.federated_map(
      compare, (done.result.update, sent.aggregate, data)
    )
    return (
      measurement.aggregate(done.message),
      tff.aggregators.federated_sample(compared, 2**20),
    )

  return measure


def _build_work(
  model_fn: _KerasModelFn,
  batches: example_batches.ExampleBatches,
  measurement: Measurement,
  noise_seed: Optional[int],
) -> tuple[tff.Computation, tff.Type, tff.Type]:
  """Returns what a client computes, and the types of weights and data."""
  models.check(model_fn())
  weights_type, _ = _weights_type(model_fn)
  data_type = tff.SequenceType(tff.types.tensorflow_to_type(spec_of(batches)))

  @tff.tensorflow.computation(weights_type, data_type, np.int32)
  def work(weights, dataset, round_number):
    model = model_fn()

    @tf.function  # Orders assignments and reads, which a plain graph does not.
    def compute(weights, dataset, round_number):
      _assign(model, weights)
      part = dataset.get_single_element()
      size = sum(v.shape.num_elements() for v in model.trainable_variables)

      def normal(step):
        if noise_seed is None:
          return noise.fresh_normal(size)
        return noise.client_normal(
          size, noise_seed, round_number, part['client'], step
        )

      update = private_steps.client_update(
        model,
        part['features'],
        part['labels'],
        part['drawn'],
        part['step_count'],
        batches.mechanism,
        batches.algorithm.local_learning_rate,
        normal,
      )
      usable = private_steps.is_usable(update.sent)
      sent = tf.where(usable, update.sent, tf.zeros_like(update.sent))
      parts = private_steps.parts(sent, model.trainable_variables)
      return parts, measurement.message(update, part)

    parts, message = compute(weights, dataset, round_number)
    return collections.OrderedDict(
      result=tff.learning.templates.ClientResult(
        update=parts, update_weight=tf.constant(1.0)
      ),
      message=message,
    )

  return work, weights_type, data_type


def build_process(
  model_fn: _KerasModelFn,
  client_work: tff.learning.templates.ClientWorkProcess,
  aggregator: tff.aggregators.UnweightedAggregationFactory,
  *,
  server_optimizer: Optional[tff.learning.optimizers.Optimizer] = None,
) -> tff.learning.templates.LearningProcess:
  """Puts client work and aggregator together.

  Args:
    model_fn: Makes a Keras model, anew at each call.
    client_work: `build_client_work`, or any other.
    aggregator: `build_aggregator`, or any other unweighted one.
    server_optimizer: By default plain SGD with learning rate 0.1.
  """
  weights_type, initial_weights = _weights_type(model_fn)
  if server_optimizer is None:
    server_optimizer = tff.learning.optimizers.build_sgdm(0.1)
  return tff.learning.templates.compose_learning_process(
    initial_weights,
    tff.learning.templates.build_broadcast_process(weights_type),
    client_work,
    tff.aggregators.as_weighted_aggregator(aggregator).create(
      weights_type.trainable, tff.TensorType(np.float32)
    ),
    tff.learning.templates.build_apply_optimizer_finalizer(
      server_optimizer, weights_type
    ),
  )


def build_aggregator(
  mechanism: base.Mechanism,
  *,
  noise_seed: Optional[int] = None,
  summation: Optional[private_mean.Summation] = None,
  measurement: Optional[private_mean.Measurement] = None,
) -> private_mean.PrivateMeanFactory:
  """Returns the aggregator of a mechanism.

  Args:
    mechanism: The mechanism, of any level.
    noise_seed: For experiments only.
    summation: How values of clients are summed; by default in the clear.
    measurement: What the server learns about clients; by default a sample of
      distances if the aggregation clips, else nothing.
  """
  aggregation = mechanism.aggregation
  if measurement is None and aggregation.clips:
    measurement = distance_samples.DistanceSample()
  return private_mean.PrivateMeanFactory(
    aggregation,
    noise_seed=noise_seed,
    summation=summation,
    measurement=measurement,
  )


def _weights_type(
  model_fn: _KerasModelFn,
) -> tuple[tff.StructType, tff.Computation]:
  """Returns the type of the model's weights, and what makes initial ones."""

  @tff.tensorflow.computation
  def initial_weights():
    model = model_fn()
    return tff.learning.models.ModelWeights(
      trainable=list(model.trainable_variables),
      non_trainable=list(model.non_trainable_variables),
    )

  return initial_weights.type_signature.result, initial_weights


def _assign(model: tf.keras.Model, weights: Any) -> None:
  own = (model.trainable_variables, model.non_trainable_variables)
  for variables, values in zip(own, (weights.trainable, weights.non_trainable)):
    for variable, value in zip(variables, values):
      variable.assign(value)
