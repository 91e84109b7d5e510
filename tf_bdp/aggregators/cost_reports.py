"""Costs that clients bound themselves and report by secure sums.

The server learns, for every order, a sum or a maximum of costs over clients,
and the number of clients; never a distance, nor a cost of a single client.
Both run in contexts that know secure sums; see `secure_aggregation`.
"""

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp.accounting import accountant, events, sampled_gaussian
from tf_bdp.aggregators import secure_sums
from tf_bdp.mechanisms import instance as instance_mechanism
from tf_bdp.ops import client_costs, private_steps

Reporting = events.Reporting


def sum_client_costs(
  squared_distances: tff.Value,
  usable: tff.Value,
  worst_case: tff.Value,
  participation_probability: float,
  reporting: Reporting,
  inclusion: Optional[tff.Value] = None,
) -> tff.Value:
  """Sums what the bound of the clients' mean cost needs.

  Clients return exp(p ℓ) and its square as shares of a public scale, the
  largest of them rounded up to a grid, so that sums neither overflow nor drown
  in what is not seen of the worst case.

  Args:
    squared_distances: r² of every client.
    usable: Whether it counts.
    worst_case: The largest possible r², at the server.
    participation_probability: q.
    reporting: How to bound.
    inclusion: The inclusion probability, at the server; 1 by default.

  Returns:
    At the server what `bound_of_client_costs` takes.
  """
  if inclusion is None:
    inclusion = tff.federated_value(np.float64(1.0), tff.SERVER)

  def costs_at(
    squared_distance: tf.Tensor, probability: tf.Tensor
  ) -> tf.Tensor:
    costs = client_costs.log_moments(
      squared_distance[tf.newaxis], participation_probability, reporting.orders
    )
    return reporting.power * client_costs.included(costs[0], probability)

  @tff.tensorflow.computation(np.float64, np.float64)
  def log_worst_case(worst, probability):
    return costs_at(worst, probability)

  @tff.tensorflow.computation(np.float64, np.bool_, np.float64, np.float64)
  def powered_costs(squared_distance, is_usable, worst, probability):
    squared = tf.where(is_usable, tf.minimum(squared_distance, worst), 0.0)
    return costs_at(squared, probability)

  costs_type = tff.TensorType(np.float64, [len(reporting.orders)])

  @tff.tensorflow.computation(costs_type, costs_type)
  def shares(costs, scale):
    first, second = client_costs.scaled_moments(costs, scale)
    return tf.stack([first, second])

  @tff.tensorflow.computation(np.bool_)
  def as_integer(is_usable):
    return tf.cast(is_usable, tf.int32)

  limit = tff.federated_map(log_worst_case, (worst_case, inclusion))
  costs = tff.federated_map(
    powered_costs,
    (
      squared_distances,
      usable,
      tff.federated_broadcast(worst_case),
      tff.federated_broadcast(inclusion),
    ),
  )
  scale = secure_sums.secure_maximum(costs, limit)
  sums = secure_sums.secure_sum(
    tff.federated_map(shares, (costs, tff.federated_broadcast(scale))), 1.0
  )
  count = tff.federated_secure_sum(tff.federated_map(as_integer, usable), 1)
  return tff.federated_zip(
    collections.OrderedDict(count=count, sums=sums, scale=scale)
  )


def bound_of_client_costs(
  sums: Mapping[str, Any],
  worst_case: float,
  participation_probability: float,
  reporting: Reporting,
  inclusion: float = 1.0,
) -> np.ndarray:
  """Returns (1/p) log E[exp p ℓ] of clients, bounded from `sum_client_costs`.

  Args:
    sums: What the server learnt.
    worst_case: The largest possible r².
    participation_probability: q.
    reporting: How to bound.
    inclusion: The inclusion probability.
  """
  if worst_case == np.inf:  # There is no noise.
    return np.full(len(reporting.orders), np.inf)
  costs = sampled_gaussian.log_moments(
    [worst_case], participation_probability, reporting.orders
  )[0]
  limit = reporting.power * accountant.included(costs, inclusion)
  first_sum, second_sum = np.asarray(sums['sums'])
  bound = client_costs.bound_from_sums(
    int(sums['count']),
    first_sum,
    second_sum,
    limit,
    reporting.failure_probability,
    reporting.estimator,
    sums['scale'],
    float(secure_sums.resolution()),
  )
  return bound / reporting.power


class ReportedCosts(NamedTuple):
  """Clients bound the costs of their examples; sums or maxima are reported.

  A `Measurement` of `instance_processes`. The server gets the number of usable
  clients, the example costs summed over all clients and steps (sequential) or
  the largest of any client summed over steps; and in 'joint' the sums of
  `sum_client_costs`. Clients report when they take part, so their chance to do
  so does not lower the costs of examples.

  Attributes:
    mechanism: Whose noise hides the examples.
    longest: The most examples that any client has.
    examples: How the costs of examples are bounded.
    clients: How those of clients are, in 'joint'.
  """

  mechanism: instance_mechanism.InstanceMechanism
  longest: int
  examples: Reporting
  clients: Reporting

  def message(
    self, update: private_steps.ClientUpdate, part: Mapping[str, Any]
  ) -> Any:
    """Returns what the client needs to know of its update."""
    size = tf.shape(update.squared_moves)[1]
    padding = [[0, 0], [0, self.longest - size]]
    shape = [self.mechanism.local_steps, self.longest]
    taken = tf.range(self.mechanism.local_steps) < part['step_count']
    measured = part['measured'] & taken[:, tf.newaxis]
    return collections.OrderedDict(
      squared_moves=tf.ensure_shape(
        tf.pad(update.squared_moves, padding), shape
      ),
      measured=tf.ensure_shape(tf.pad(measured, padding), shape),
      taken=taken,
      squared_norm=tf.reduce_sum(tf.square(update.clipped)),
      usable=private_steps.is_usable(update.sent),
      holding=part['holding'],
    )

  def aggregate(self, messages: tff.Value) -> tff.Value:
    """Returns what the server learns."""

    @tff.tensorflow.computation(np.bool_)
    def as_integer(is_usable):
      return tf.cast(is_usable, tf.int32)

    @tff.tensorflow.computation(np.int32)
    def upper_costs(count):
      return self._upper_example_costs(count)

    count = tff.federated_secure_sum(
      tff.federated_map(as_integer, messages.usable), 1
    )
    bound = self._build_bound(messages.type_signature.member)
    costs = tff.federated_map(bound, (messages, tff.federated_broadcast(count)))
    limit = tff.federated_map(upper_costs, count)
    if self.mechanism.accounting == 'sequential':
      reduced = secure_sums.secure_sum(costs, limit)
    else:
      reduced = secure_sums.secure_maximum(costs, limit)
    result = collections.OrderedDict(count=count, example_costs=reduced)
    if self.mechanism.level == 'joint':
      result['clients'] = self._sum_client_costs(messages, count)
    return tff.federated_zip(result)

  def _upper_example_costs(self, count: tf.Tensor) -> tf.Tensor:
    """The worst case of any client's examples, for every step and order."""
    squared = self.mechanism.worst_case_move**2
    squared = squared / _example_variance(self.mechanism, count)
    costs = client_costs.log_moments(
      tf.reshape(squared, [1]),
      self.mechanism.largest_example_probability,
      self.examples.orders,
    )
    # A little more, for the same number computed in another way is another.
    upper = costs[0] * (1.0 + 1e-9)
    return tf.tile(upper[tf.newaxis], [self.mechanism.local_steps, 1])

  def _build_bound(self, message_type: tff.Type) -> tff.Computation:
    """What a client computes: its examples' cost of every step and order."""
    mechanism, reporting = self.mechanism, self.examples

    @tff.tensorflow.computation(message_type, np.int32)
    def bound(message, count):
      variance = _example_variance(mechanism, count)
      probability = _example_probability(mechanism, message['holding'])
      worst = tf.reshape(mechanism.worst_case_move**2 / variance, [1])
      limit = client_costs.log_moments(worst, probability, reporting.orders)[0]
      moves = tf.cast(message['squared_moves'], tf.float64) / variance
      moves = tf.minimum(moves, worst)
      rows = []
      for step in range(mechanism.local_steps):
        costs = client_costs.log_moments(
          tf.where(message['measured'][step], moves[step], 0.0),
          probability,
          reporting.orders,
        )
        row = client_costs.bound_of_mean(
          costs,
          message['measured'][step],
          reporting.failure_probability,
          reporting.estimator,
          limit,
          reporting.power,
        )
        # Of a client whose update is unusable the worst is assumed.
        row = tf.where(message['usable'], row, limit)
        rows.append(tf.where(message['taken'][step], row, 0.0))
      costs = tf.stack(rows)
      no_examples = tf.equal(message['holding'], 0)
      return tf.where(no_examples, tf.zeros_like(costs), costs)

    return bound

  def _sum_client_costs(self, messages: tff.Value, count: tff.Value) -> Any:
    """The client part of 'joint': zero-out adjacency, the noise of all."""
    mechanism = self.mechanism

    @tff.tensorflow.computation(np.float32, np.int32)
    def squared_distance(squared_norm, count):
      number = tf.cast(tf.maximum(count, 1), tf.float64)
      squared = tf.cast(squared_norm, tf.float64) / mechanism.clip_norm**2
      return squared / (number**2 * mechanism.mean_variance(number))

    @tff.tensorflow.computation(np.int32)
    def worst_case(count):
      number = tf.cast(tf.maximum(count, 1), tf.float64)
      return 1.0 / (number**2 * mechanism.mean_variance(number))

    @tff.tensorflow.computation(np.int32)
    def inclusion(count):
      return _inclusion_probability(mechanism, count)

    distances = tff.federated_map(
      squared_distance,
      (messages.squared_norm, tff.federated_broadcast(count)),
    )
    return sum_client_costs(
      distances,
      messages.usable,
      tff.federated_map(worst_case, count),
      1.0,
      self.clients,
      tff.federated_map(inclusion, count),
    )

  def read(self, metrics: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the reported costs of each unit, for every order."""
    result = {'example': np.sum(metrics['example_costs'], axis=0)}
    if 'clients' in metrics:
      count = int(metrics['count'])
      result['client'] = bound_of_client_costs(
        metrics['clients'],
        self.mechanism.worst_case_client_squared_distance(max(1, count)),
        1.0,
        self.clients,
        self.mechanism.inclusion_probability(count),
      )
    return result


def _example_variance(
  mechanism: instance_mechanism.InstanceMechanism, count: tf.Tensor
) -> tf.Tensor:
  """`InstanceMechanism.example_variance`, as a float64 tensor."""
  number = tf.cast(tf.maximum(count, 1), tf.float64)
  return tf.convert_to_tensor(mechanism.example_variance(number), tf.float64)


def _example_probability(
  mechanism: instance_mechanism.InstanceMechanism, holding: tf.Tensor
) -> tf.Tensor:
  """`InstanceMechanism.example_probability`, as TensorFlow operations."""
  batch = tf.constant(float(mechanism.batch_size), tf.float64)
  holding = tf.cast(holding, tf.float64)
  if mechanism.accounting == 'sequential':
    return tf.minimum(batch, holding) / float(mechanism.total_examples)
  return tf.minimum(batch / tf.maximum(holding, 1.0), 1.0)


def _inclusion_probability(
  mechanism: instance_mechanism.InstanceMechanism, count: tf.Tensor
) -> tf.Tensor:
  """`InstanceMechanism.inclusion_probability`, as TensorFlow operations."""
  clients = mechanism.expected_clients / mechanism.participation_probability
  return tf.minimum(tf.cast(count, tf.float64) / clients, 1.0)
