"""Measures clients in the clear: the server learns how far each one is.

The clipped mean is sent back to the round's clients, and each answers with its
squared distance, so the server never collects updates. Distances are raw client
data without noise: whoever sees them is inside the trust boundary.
"""

import collections
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp import validation
from tf_bdp.aggregators import private_mean


class DistanceSample:
  """Measures a random sample of the round's clients."""

  def __init__(self, most: int = 1024, *, with_aggregate: bool = False):
    """Makes a measurement.

    Args:
      most: The most clients that are measured.
      with_aggregate: Whether the metrics hold the mean before noise, which
        measuring a panel needs.
    """
    self._most = validation.check_positive_integer('max_distances', most)
    self._with_aggregate = with_aggregate

  def learn(
    self, aggregation: Any, values: private_mean.RoundValues
  ) -> 'collections.OrderedDict[str, tff.Value]':
    """Returns the squared measures; see `private_mean.Measurement`."""
    measured = private_mean.measure_clients(aggregation, values)
    answer = tff.tensorflow.computation(_answer, (np.int32, np.float32))
    sample = tff.aggregators.federated_sample(
      tff.federated_map(answer, (values.record.counted, measured)), self._most
    )
    counted = tff.tensorflow.computation(
      _counted, tff.TensorType(np.float32, [None, 2])
    )
    learnt = collections.OrderedDict(
      squared_measures=tff.federated_map(counted, sample)
    )
    if self._with_aggregate:
      learnt['aggregate'] = values.aggregate
    return learnt


def _answer(counted: tf.Tensor, squared_measure: tf.Tensor) -> tf.Tensor:
  return tf.stack([tf.cast(counted, tf.float32), squared_measure])


def _counted(sample: tf.Tensor) -> tf.Tensor:
  return tf.boolean_mask(sample[:, 1], sample[:, 0] > 0)
