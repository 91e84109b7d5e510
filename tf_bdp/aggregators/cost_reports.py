"""Costs that clients bound themselves and report by secure sums.

The server learns, for every order, a sum or a maximum of costs over clients,
and the number of clients; never a distance, nor the cost of a single client.
`ClientCosts` and `ExampleCosts` run in TFF contexts that have secure sums; see
`secure_sums`.
"""

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp import array_namespace
from tf_bdp.accounting import events, log_space, sampled_gaussian
from tf_bdp.aggregators import private_mean, secure_sums
from tf_bdp.mechanisms import client as client_mechanism
from tf_bdp.mechanisms import instance, joint, measurements
from tf_bdp.ops import client_costs, private_steps

Reporting = events.Reporting


class ClientCosts(NamedTuple):
  """The server learns sums of clients' costs instead of their distances.

  A `Measurement` of `private_mean`.

  Attributes:
    reporting: How the mean cost is bounded.
  """

  reporting: Reporting

  def learn(
    self,
    aggregation: client_mechanism.ClientMechanism,
    values: private_mean.RoundValues,
  ) -> 'collections.OrderedDict[str, tff.Value]':
    """Returns sums of the clients' costs; see `private_mean.Measurement`."""

    @tff.tensorflow.computation(np.float32, np.int32, np.float32)
    def squared_distance(squared_measure, count, clip_norm):
      return aggregation.squared_distances(
        squared_measure, True, count, clip_norm
      )

    @tff.tensorflow.computation(np.int32)
    def worst_case(count):
      worst = aggregation.worst_case_squared_distance('client', count)
      return array_namespace.of(count).float64(worst)

    count = values.participants
    measured = private_mean.measure_clients(aggregation, values)
    sent = map(tff.federated_broadcast, (count, values.clip_norm))
    distances = tff.federated_map(squared_distance, (measured, *sent))
    costs = sum_client_costs(
      distances,
      values.record.counted,
      tff.federated_map(worst_case, count),
      aggregation.participation_probability,
      self.reporting,
    )
    return collections.OrderedDict(client_costs=costs)


def sum_client_costs(
  squared_distances: tff.Value,
  usable: tff.Value,
  worst_case: tff.Value,
  participation_probability: float,
  reporting: Reporting,
  inclusion: Optional[tff.Value] = None,
) -> tff.Value:
  """Sums what the bound of the clients' mean cost needs.

  Clients return exp(p ℓ) and its square as shares of a public scale: the
  largest cost of any client, rounded up to a grid. So sums do not overflow, and
  small costs do not vanish beside the worst case.

  Args:
    squared_distances: r² of every client.
    usable: 1 for clients that count, 0 for others.
    worst_case: The largest possible r², at the server.
    participation_probability: q.
    reporting: How to bound.
    inclusion: The inclusion probability, at the server; 1 by default.

  Returns:
    What `bound_of_client_costs` takes, placed at the server.
  """
  if inclusion is None:
    inclusion = tff.federated_value(np.float64(1.0), tff.SERVER)

  def costs_at(
    squared_distance: tf.Tensor, probability: tf.Tensor
  ) -> tf.Tensor:
    costs = client_costs.log_moments(
      squared_distance[tf.newaxis], participation_probability, reporting.orders
    )
    return reporting.power * log_space.included(costs[0], probability)

  @tff.tensorflow.computation(np.float64, np.float64)
  def log_worst_case(worst, probability):
    return costs_at(worst, probability)

  @tff.tensorflow.computation(np.float64, np.int32, np.float64, np.float64)
  def powered_costs(squared_distance, is_usable, worst, probability):
    squared = tf.where(is_usable > 0, tf.minimum(squared_distance, worst), 0.0)
    return costs_at(squared, probability)

  costs_type = tff.TensorType(np.float64, [len(reporting.orders)])

  @tff.tensorflow.computation(costs_type, costs_type)
  def shares(costs, scale):
    first, second = client_costs.scaled_moments(costs, scale)
    return tf.stack([first, second])

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
  return tff.federated_zip(
    collections.OrderedDict(
      count=tff.federated_secure_sum(usable, 1), sums=sums, scale=scale
    )
  )


def bound_of_client_costs(
  sums: Mapping[str, Any],
  worst_case: float,
  participation_probability: float,
  reporting: Reporting,
  inclusion: float = 1.0,
) -> measurements.ReportedCosts:
  """Returns a bound of (1/p) log E[exp p ℓ] over clients.

  Args:
    sums: What `sum_client_costs` returned.
    worst_case: The largest possible r².
    participation_probability: q.
    reporting: How to bound.
    inclusion: The inclusion probability.
  """
  costs = np.full(len(reporting.orders), np.inf)
  if worst_case < np.inf:  # There is noise.
    limit = sampled_gaussian.log_moments(
      [worst_case], participation_probability, reporting.orders
    )[0]
    first_sum, second_sum = np.asarray(sums['sums'])
    costs = client_costs.bound_from_sums(
      int(sums['count']),
      first_sum,
      second_sum,
      reporting.power * log_space.included(limit, inclusion),
      reporting.failure_probability,
      reporting.estimator,
      sums['scale'],
      float(secure_sums.resolution()),
    )
  return measurements.ReportedCosts(
    costs / reporting.power, reporting.failure_probability
  )


class ExampleCosts(NamedTuple):
  """Clients bound the costs of their examples; sums or maxima are reported.

  A `Measurement` of `learning.instance_processes`. The server gets the number
  of usable clients and, for every step and order, the sum of the clients'
  example costs (sequential) or the largest of them; where clients are hidden by
  their own noise, also what `sum_client_costs` returns. Only participants
  report, so the chance to take part does not lower the costs of examples.

  Attributes:
    mechanism: The mechanism whose noise hides the examples.
    longest: The most examples that any client has.
    reporting: How the costs of each unit are bounded.
  """

  mechanism: instance.InstanceMechanism
  longest: int
  reporting: Mapping[str, Reporting]

  def message(
    self, update: private_steps.ClientUpdate, part: Mapping[str, Any]
  ) -> Any:
    """Returns what the client's bound is made from; it stays at the client."""
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
      usable=tf.cast(private_steps.is_usable(update.sent), tf.int32),
      holding=part['holding'],
    )

  def aggregate(self, messages: tff.Value) -> tff.Value:
    """Returns what the server learns."""

    @tff.tensorflow.computation(np.int32)
    def upper_costs(count):
      return self._upper_costs(count)

    count = tff.federated_secure_sum(messages.usable, 1)
    bound = self._build_bound(messages.type_signature.member)
    costs = tff.federated_map(bound, (messages, tff.federated_broadcast(count)))
    limit = tff.federated_map(upper_costs, count)
    if self.mechanism.adds_up_clients:
      reduced = secure_sums.secure_sum(costs, limit)
    else:
      reduced = secure_sums.secure_maximum(costs, limit)
    result = collections.OrderedDict(count=count, example_costs=reduced)
    if self.mechanism.bounds_clients:
      result['client_costs'] = self._sum_client_costs(messages, count)
    return tff.federated_zip(result)

  def _upper_costs(self, count: tf.Tensor) -> tf.Tensor:
    """Returns the worst case of examples, for every step and order."""
    worst = self.mechanism.worst_case_squared_distance('example', count)
    costs = client_costs.log_moments(
      tf.reshape(array_namespace.of(count).float64(worst), [1]),
      self.mechanism.largest_example_probability,
      self.reporting['example'].orders,
    )
    # A little more: clients compute the same number with other rounding.
    upper = costs[0] * (1.0 + 1e-9)
    return tf.tile(upper[tf.newaxis], [self.mechanism.local_steps, 1])

  def _build_bound(self, message_type: tff.Type) -> tff.Computation:
    """Builds what a client computes: a bound for every step and order."""
    mechanism, reporting = self.mechanism, self.reporting['example']

    @tff.tensorflow.computation(message_type, np.int32)
    def bound(message, count):
      float64 = array_namespace.of(count).float64
      probability = mechanism.example_probability(message['holding'])
      worst = mechanism.worst_case_squared_distance('example', count)
      worst = tf.reshape(float64(worst), [1])
      limit = client_costs.log_moments(worst, probability, reporting.orders)[0]
      moves = float64(message['squared_moves'])
      moves = mechanism.example_squared_distances(moves, count)
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
        # An unusable update counts with its worst case.
        row = tf.where(message['usable'] > 0, row, limit)
        rows.append(tf.where(message['taken'][step], row, 0.0))
      costs = tf.stack(rows)
      no_examples = tf.equal(message['holding'], 0)
      return tf.where(no_examples, tf.zeros_like(costs), costs)

    return bound

  def _sum_client_costs(self, messages: tff.Value, count: tff.Value) -> Any:
    """Sums the costs of clients: zero-out adjacency, hidden by all noise."""
    mechanism = self.mechanism
    assert isinstance(mechanism, joint.JointMechanism)

    @tff.tensorflow.computation(np.float32, np.int32)
    def squared_distance(squared_norm, count):
      squared = tf.cast(squared_norm, tf.float64) / mechanism.clip_norm**2
      return mechanism.client_squared_distances(squared, count)

    @tff.tensorflow.computation(np.int32)
    def worst_case(count):
      worst = mechanism.worst_case_squared_distance(
        'client', tf.maximum(count, 1)
      )
      return array_namespace.of(count).float64(worst)

    @tff.tensorflow.computation(np.int32)
    def inclusion(count):
      return mechanism.inclusion_probability(count)

    distances = tff.federated_map(
      squared_distance,
      (messages.squared_norm, tff.federated_broadcast(count)),
    )
    return sum_client_costs(
      distances,
      messages.usable,
      tff.federated_map(worst_case, count),
      1.0,
      self.reporting['client'],
      tff.federated_map(inclusion, count),
    )


def read(
  metrics: Mapping[str, Any],
  mechanism: Any,
  reporting: Mapping[str, Reporting],
) -> dict[str, measurements.ReportedCosts]:
  """Returns the reported costs of each unit.

  Args:
    metrics: What the server learnt by `ClientCosts`, `ExampleCosts` or both.
    mechanism: The mechanism of the round.
    reporting: How the costs of each unit were bounded.
  """
  result = {}
  if 'client_costs' in metrics:
    sums = metrics['client_costs']
    count = int(metrics['participants'])
    own_noise = not mechanism.aggregation.clips
    if own_noise:
      count = max(1, count)
    result['client'] = bound_of_client_costs(
      sums,
      float(mechanism.worst_case_squared_distance('client', count)),
      1.0 if own_noise else mechanism.participation_probability,
      reporting['client'],
      float(mechanism.inclusion_probability(count)) if own_noise else 1.0,
    )
  if 'example_costs' in metrics:
    result['example'] = measurements.ReportedCosts(
      np.sum(metrics['example_costs'], axis=0),
      reporting['example'].failure_probability,
    )
  return result
