"""TFF learning processes that protect examples, and clients with them.

A process is put together from two parts that can be replaced: the client work
clips, adds noise and measures; the aggregator takes the mean. What the server
learns of the examples is up to a `Measurement`.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional, Protocol

import dp_accounting
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp import aggregators
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import example_batches
from tf_bdp.mechanisms import instance as instance_mechanism
from tf_bdp.ops import clipping, noise, private_steps

_Structure = Mapping[str, Any]
_KerasModelFn = Callable[[], tf.keras.Model]


class Measurement(Protocol):
  """What clients tell of their examples, and what becomes of it."""

  def message(
    self, update: private_steps.ClientUpdate, part: _Structure
  ) -> Any:
    """Returns a client's message, as TensorFlow operations.

    Args:
      update: The client's.
      part: The element of its dataset; see `part_spec`.
    """

  def aggregate(self, messages: tff.Value) -> tff.Value:
    """Returns what the server learns, given the messages at the clients."""


class Answer(NamedTuple):
  """What a client told: is its update usable, ‖u‖², and squared moves."""

  usable: bool
  squared_norm: float
  squared_moves: np.ndarray


class MovesByExample(NamedTuple):
  """Every client sends every squared move: the server is trusted with all.

  The server gets an array of one row for each client: whether its update is
  usable, its number, ‖u‖² before noise, and the squared moves of all its
  examples and steps, padded.

  Attributes:
    longest: The most examples that any client has.
    steps: The most steps that any client takes.
  """

  longest: int
  steps: int

  @classmethod
  def of(cls, batches: example_batches.ExampleBatches) -> 'MovesByExample':
    """Returns the measurement for such batches."""
    data = batches.data
    longest = max(len(data.indices(c)) for c in range(data.client_count))
    return cls(longest, batches.mechanism.local_steps)

  def message(
    self, update: private_steps.ClientUpdate, part: _Structure
  ) -> tf.Tensor:
    """Returns the client's row."""
    size = tf.shape(update.squared_moves)[1]
    moves = tf.pad(update.squared_moves, [[0, 0], [0, self.longest - size]])
    head = tf.stack(
      [
        tf.cast(private_steps.is_usable(update.sent), tf.float32),
        tf.cast(part['client'], tf.float32),
        tf.reduce_sum(tf.square(update.clipped)),
      ]
    )
    row = tf.concat([head, tf.reshape(moves, [-1])], 0)
    return tf.ensure_shape(row, [3 + self.steps * self.longest])

  def aggregate(self, messages: tff.Value) -> tff.Value:
    """Returns all rows."""
    return tff.aggregators.federated_sample(messages, 2**20)

  def read(self, rows: np.ndarray) -> dict[int, Answer]:
    """Returns what each client told."""
    return {
      int(row[1]): Answer(
        bool(row[0]),
        float(row[2]),
        row[3:].reshape(self.steps, self.longest),
      )
      for row in np.asarray(rows)
    }


def part_spec(
  features: tf.TensorSpec, labels: tf.TensorSpec, steps: int
) -> 'collections.OrderedDict[str, tf.TensorSpec]':
  """Returns the type of the only element of a client's dataset.

  Args:
    features: Of one example.
    labels: Of one example.
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
  """Returns `part_spec` of such batches."""
  data = batches.data
  return part_spec(
    tf.TensorSpec(data.features.shape[1:], data.features.dtype),
    tf.TensorSpec([], data.labels.dtype),
    batches.mechanism.local_steps,
  )


def build_private_process(
  model_fn: _KerasModelFn,
  batches: example_batches.ExampleBatches,
  server_optimizer: Optional[tff.learning.optimizers.Optimizer] = None,
  noise_seed: Optional[int] = None,
) -> tff.learning.templates.LearningProcess:
  """Builds the learning process of a level, from its usual parts.

  Clients take part with `part_dataset`; `events_of_round` makes the
  accountants' events of a round's metrics.

  Args:
    model_fn: Makes a Keras model, anew at each call.
    batches: The clients' data, mechanism and algorithm.
    server_optimizer: By default plain SGD with learning rate 0.1.
    noise_seed: For experiments only.
  """
  client_work = build_client_work(
    model_fn,
    spec_of(batches),
    batches.mechanism,
    batches.algorithm,
    MovesByExample.of(batches),
    noise_seed,
  )
  aggregator = build_aggregator(batches.mechanism, noise_seed)
  return build_process(model_fn, client_work, aggregator, server_optimizer)


def events_of_round(
  metrics: Mapping[str, Any],
  batches: example_batches.ExampleBatches,
  round_number: int,
  participants: Sequence[int],
) -> dict[str, dp_accounting.DpEvent]:
  """Returns a round's events for the accountants of clients and examples.

  Args:
    metrics: Of a process from `build_private_process`.
    batches: What it was built for, without a panel of examples.
    round_number: Counts from 0.
    participants: The clients whose datasets the process was given.
  """
  if batches.mechanism.panel_examples:
    raise ValueError(
      'A panel is measured in rounds in which it takes no part, too: use '
      '`tff_instance_engine`, or panel_examples = 0.'
    )
  answers = MovesByExample.of(batches).read(metrics['client_work'])
  groups = batches.groups(
    {c: batches.draw(round_number, c) for c in participants},
    {c: a.squared_moves for c, a in answers.items() if a.usable},
    participants,
    [],
  )
  counts = metrics['aggregator']
  squared = counts.get('squared_measures')
  if squared is None:
    squared = [a.squared_norm for a in answers.values() if a.usable]
  squared = np.asarray(squared)
  return batches.mechanism.events(
    squared,
    np.ones(squared.shape, bool),
    groups,
    int(counts['participants']),
    batches.mechanism.clip_norm,
    panel=False,
  )


def build_client_work(
  model_fn: _KerasModelFn,
  spec: 'collections.OrderedDict[str, tf.TensorSpec]',
  mechanism: instance_mechanism.InstanceMechanism,
  algorithm: algorithm_lib.Algorithm,
  measurement: Measurement,
  noise_seed: Optional[int] = None,
) -> tff.learning.templates.ClientWorkProcess:
  """Builds the clients' part: clip, add noise, measure.

  Args:
    model_fn: Makes a Keras model, anew at each call.
    spec: `part_spec` of the data.
    mechanism: Clipping and noise.
    algorithm: FedSGD or FedAvg.
    measurement: What the clients tell of their examples.
    noise_seed: For experiments only; see `noise.client_normal`.

  Returns:
    A process whose state counts the rounds.
  """
  work, weights_type, data_type = _build_work(
    model_fn, spec, mechanism, algorithm, measurement, noise_seed
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
  spec: 'collections.OrderedDict[str, tf.TensorSpec]',
  mechanism: instance_mechanism.InstanceMechanism,
  algorithm: algorithm_lib.Algorithm,
  measurement: Measurement,
  noise_seed: Optional[int] = None,
) -> tff.Computation:
  """Builds the computation that measures clients without their taking part.

  Arguments as for `build_client_work`.

  Returns:
    A computation of the server's model weights, the round's number and an
    aggregate, and of the clients' data. It returns what `measurement` makes of
    their messages; and rows of a client's number, ‖u‖² and the squared distance
    from the aggregate, u being the clipped noisy update.
  """
  work, weights_type, data_type = _build_work(
    model_fn, spec, mechanism, algorithm, measurement, noise_seed
  )
  update_type = weights_type.trainable

  @tff.tensorflow.computation(update_type, update_type, data_type)
  def compare(update, aggregate, dataset):
    clipped, _, _ = clipping.clip(
      tf.nest.flatten(update), tf.constant(mechanism.clip_norm, tf.float32)
    )
    away = [p - m for p, m in zip(clipped, tf.nest.flatten(aggregate))]
    client = dataset.get_single_element()['client']
    return tf.stack(
      [
        tf.cast(client, tf.float32),
        clipping.squared_norm(clipped),
        clipping.squared_norm(away),
      ]
    )

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
  spec: 'collections.OrderedDict[str, tf.TensorSpec]',
  mechanism: instance_mechanism.InstanceMechanism,
  algorithm: algorithm_lib.Algorithm,
  measurement: Measurement,
  noise_seed: Optional[int],
) -> tuple[tff.Computation, tff.Type, tff.Type]:
  """Returns what a client computes, and the types of weights and data."""
  algorithm_lib.check_model(model_fn())
  weights_type, _ = _weights_type(model_fn)
  data_type = tff.SequenceType(tff.types.tensorflow_to_type(spec))

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
          # TFF seeds this anew from the system in every call. Not so
          # `tf.random.normal`, if the model function has set a seed.
          return tf.raw_ops.RandomStandardNormal(
            shape=[size], dtype=tf.float32, seed=0, seed2=0
          )
        return noise.client_normal(
          size, noise_seed, round_number, part['client'], step
        )

      update = private_steps.client_update(
        model,
        part['features'],
        part['labels'],
        part['drawn'],
        part['step_count'],
        mechanism,
        algorithm,
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
  mechanism: instance_mechanism.InstanceMechanism,
  noise_seed: Optional[int] = None,
  **options: Any,
) -> tff.aggregators.UnweightedAggregationFactory:
  """Returns the aggregator of a level.

  In 'split' a `ClientPrivacyFactory`; elsewhere the mean of what clients sent,
  a `NoisyMeanFactory`, with the server's noise on top if there is any. Options
  are theirs.
  """
  if mechanism.level == 'split':
    return aggregators.ClientPrivacyFactory(
      mechanism.server, noise_seed=noise_seed, **options
    )
  return aggregators.NoisyMeanFactory(
    mechanism.noise_per_clip_norm * mechanism.clip_norm,
    noise_seed=noise_seed,
    **options,
  )


def _weights_type(
  model_fn: _KerasModelFn,
) -> tuple[tff.StructType, tff.Computation]:
  """Returns the type of the model's weights, and what makes the first ones."""

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
