"""TFF learning processes with Bayesian privacy, and what they measure."""

import collections
from typing import Any, Callable, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp.aggregators import runtime
from tf_bdp.ops import clipping

runtime.reap_on_exit()

_ModelFn = Callable[[], tff.learning.models.VariableModel]


def build_fed_sgd(
  model_fn: _ModelFn,
  aggregator: tff.aggregators.UnweightedAggregationFactory,
  *,
  server_optimizer: Optional[tff.learning.optimizers.Optimizer] = None,
  metrics_aggregator: Optional[Callable[..., Any]] = None,
) -> tff.learning.templates.LearningProcess:
  """Builds federated SGD with a private aggregator.

  Args:
    model_fn: Makes a TFF model, anew at each call.
    aggregator: `ClientPrivacyFactory.mean` or `.sum`, or any other unweighted
      aggregation factory.
    server_optimizer: By default plain SGD with learning rate 0.1.
    metrics_aggregator: Aggregates the clients' training metrics, as in TFF; by
      default a sum in the clear.

  Returns:
    A learning process. Its metrics hold the aggregator's measurements, from
    which `events_from_metrics` makes the accountant's events.
  """
  check_unweighted(aggregator)
  if server_optimizer is None:
    server_optimizer = tff.learning.optimizers.build_sgdm(0.1)
  return tff.learning.algorithms.build_fed_sgd(
    model_fn,
    server_optimizer_fn=server_optimizer,
    model_aggregator=tff.aggregators.as_weighted_aggregator(aggregator),
    metrics_aggregator=metrics_aggregator,
  )


def build_fed_avg(
  model_fn: _ModelFn,
  aggregator: tff.aggregators.UnweightedAggregationFactory,
  client_optimizer: tff.learning.optimizers.Optimizer,
  *,
  server_optimizer: Optional[tff.learning.optimizers.Optimizer] = None,
  metrics_aggregator: Optional[Callable[..., Any]] = None,
) -> tff.learning.templates.LearningProcess:
  """Builds unweighted federated averaging with a private aggregator.

  Arguments as for `build_fed_sgd`; the server's learning rate is 1 by default.
  """
  check_unweighted(aggregator)
  if server_optimizer is None:
    server_optimizer = tff.learning.optimizers.build_sgdm(1.0)
  return tff.learning.algorithms.build_unweighted_fed_avg(
    model_fn,
    client_optimizer_fn=client_optimizer,
    server_optimizer_fn=server_optimizer,
    model_aggregator=aggregator,
    metrics_aggregator=metrics_aggregator,
  )


def check_unweighted(aggregator: Any) -> None:
  """Raises TypeError for an aggregator that weighs clients."""
  if not isinstance(aggregator, tff.aggregators.UnweightedAggregationFactory):
    raise TypeError(
      'aggregator must be an UnweightedAggregationFactory. With weights, such '
      'as numbers of examples, a client moves the result by its weight times '
      'the clip norm, and the sum of the weights is private data itself; '
      f'neither is accounted for. Found {type(aggregator).__name__}.'
    )


def build_panel_measurement(
  model_fn: _ModelFn, client_update: Callable[..., Any]
) -> tff.Computation:
  """Builds the computation that measures a panel of clients.

  Args:
    model_fn: Makes a TFF model.
    client_update: A TensorFlow function of the model, the weights and a
      dataset, that returns the client's update.

  Returns:
    A computation that takes the server's model weights before the round, the
    mean without noise, the clip norm, and the data and numbers of the panel's
    clients. It returns a row for each client: its number, ‖u‖² and ‖u - ū‖².
  """
  with tf.Graph().as_default():
    model = model_fn()
    weights_type = tff.learning.models.weights_type_from_model(model)
    element_type = tff.types.tensorflow_to_type(model.input_spec)
  data_type = tff.SequenceType(element_type)
  update_type = weights_type.trainable

  @tff.tensorflow.computation(
    weights_type, update_type, np.float32, data_type, np.int32
  )
  def measure(weights, aggregate, clip_norm, dataset, number):
    model = model_fn()

    @tf.function  # Orders assignments and reads, which a plain graph does not.
    def update_of(weights, dataset):
      return client_update(model, weights, dataset)

    update = update_of(weights, dataset)
    clipped, _, _ = clipping.clip(tf.nest.flatten(update), clip_norm)
    return clipping.compare(number, clipped, tf.nest.flatten(aggregate))

  server_type = collections.OrderedDict(
    weights=weights_type, aggregate=update_type, clip_norm=np.float32
  )

  @tff.federated_computation(
    tff.FederatedType(server_type, tff.SERVER),
    tff.FederatedType(data_type, tff.CLIENTS),
    tff.FederatedType(np.int32, tff.CLIENTS),
  )
  def measure_panel(server, data, numbers):
    sent = tff.federated_broadcast(server)
    measured = tff.federated_map(
      measure, (sent.weights, sent.aggregate, sent.clip_norm, data, numbers)
    )
    return tff.aggregators.federated_sample(measured, 2**20)

  return measure_panel
