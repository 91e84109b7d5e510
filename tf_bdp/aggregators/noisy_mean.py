"""A TFF aggregator for updates that carry their clients' noise."""

import collections
from typing import Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp.aggregators.client_privacy import _counting
from tf_bdp.ops import clipping, noise


class NoisyMeanFactory(tff.aggregators.UnweightedAggregationFactory):
  """The mean of updates that carry their clients' noise.

  Updates of all zeros do not count: that is what the client work puts in place
  of one that is not finite.
  """

  def __init__(
    self,
    deviation: float = 0.0,
    *,
    noise_seed: Optional[int] = None,
    sum_factory: Optional[tff.aggregators.UnweightedAggregationFactory] = None,
    secure_counts: bool = False,
  ):
    """Makes a factory.

    Args:
      deviation: Of the noise that the server adds to the mean.
      noise_seed: For experiments only; see `noise.add_noise`.
      sum_factory: Sums the updates; by default in the clear.
      secure_counts: Whether clients are counted by secure sums.
    """
    if not 0 <= deviation < np.inf:
      raise ValueError(
        f'deviation must be non-negative and finite. Found {deviation}.'
      )
    self._deviation = deviation
    self._noise_seed = noise_seed
    self._sum_factory = sum_factory or tff.aggregators.SumFactory()
    self._count = _counting(secure_counts)

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """Creates the process for updates of `value_type`."""
    summing = self._sum_factory.create(value_type)
    sum_state = summing.initialize.type_signature.result.member

    @tff.tensorflow.computation
    def first_round():
      return tf.constant(0, tf.int32)

    @tff.tensorflow.computation(np.int32)
    def next_round(number):
      return number + 1

    @tff.tensorflow.computation(value_type)
    def is_usable(value):
      norm = clipping.squared_norm(tf.nest.flatten(value))
      return tf.cast(norm > 0, tf.int32)

    @tff.tensorflow.computation(value_type, np.int32, np.int32)
    def release(total, count, number):
      divisor = tf.maximum(tf.cast(count, tf.float32), 1.0)
      mean = [part / divisor for part in tf.nest.flatten(total)]
      if self._deviation:
        noised = noise.add_noise(
          mean, tf.constant(self._deviation), self._noise_seed, number
        )
        # There is no noise if nobody came.
        mean = [tf.where(count > 0, n, m) for n, m in zip(noised, mean)]
      return tf.nest.pack_sequence_as(total, mean)

    @tff.tensorflow.computation(np.int32, np.int32)
    def counts(count, clients):
      return collections.OrderedDict(
        participants=count, failed_clients=clients - count
      )

    @tff.federated_computation
    def init_fn():
      number = tff.federated_eval(first_round, tff.SERVER)
      return tff.federated_zip((number, summing.initialize()))

    @tff.federated_computation(
      tff.FederatedType((np.int32, sum_state), tff.SERVER),
      tff.FederatedType(value_type, tff.CLIENTS),
    )
    def next_fn(state, value):
      summed = summing.next(state[1], value)
      count = self._count(tff.federated_map(is_usable, value))
      clients = self._count(tff.federated_value(1, tff.CLIENTS))
      result = tff.federated_map(release, (summed.result, count, state[0]))
      number = tff.federated_map(next_round, state[0])
      return tff.templates.MeasuredProcessOutput(
        tff.federated_zip((number, summed.state)),
        result,
        tff.federated_map(counts, (count, clients)),
      )

    return tff.templates.AggregationProcess(init_fn, next_fn)
