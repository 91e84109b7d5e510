"""Aggregation processes and updates that the tests of this folder share."""

import collections
import functools

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp import aggregators
from tf_bdp.mechanisms import adaptive_clipping, client

CLIP = 1.5
EXPECTED = 4.0
PROBABILITY = 0.25
KINDS = client.KINDS
# How unlikely a true hypothesis must be before a test of it fails.
LEVEL = 1e-6
VALUE_TYPE = tff.to_type(
  collections.OrderedDict(a=(np.float32, [2]), b=(np.float32, [3]))
)
LONG = 20_000


def mechanism(
  kind, noise=0.0, *, expected=EXPECTED, quantile=None, deviation=0.8
):
  adaptive = None
  if quantile is not None:
    adaptive = adaptive_clipping.AdaptiveClipping(
      quantile, count_deviation=deviation
    )
  return client.ClientMechanism(
    kind, noise, CLIP, PROBABILITY, expected, adaptive
  )


@functools.cache
def process(kind, noise=0.0, quantile=None, seed=None, most=1024, long=False):
  """Of the mechanism, with the mean before noise among its measurements."""
  factory = aggregators.ClientPrivacyFactory(
    mechanism(kind, noise, quantile=quantile),
    noise_seed=seed,
    measurement=aggregators.DistanceSample(most, with_aggregate=True),
  )
  value_type = tff.TensorType(np.float32, [LONG]) if long else VALUE_TYPE
  return factory.create(value_type)


def value(vector):
  vector = np.asarray(vector, np.float32)
  return collections.OrderedDict(a=vector[:2], b=vector[2:])


def run(aggregation, updates, state=None):
  """One round of an aggregation process."""
  state = aggregation.initialize() if state is None else state
  return aggregation.next(state, [value(update) for update in updates])


def flat(structure):
  leaves = tf.nest.flatten(structure)
  return np.concatenate([np.ravel(leaf) for leaf in leaves]).astype(np.float64)


def clipped(updates, clip=CLIP):
  updates = np.reshape(np.asarray(updates, np.float64), (-1, 5))
  norms = np.linalg.norm(updates, axis=1, keepdims=True)
  return updates * np.minimum(1, clip / norms)


def released(kind, updates, expected=EXPECTED):
  """Of clipped updates, by the definition."""
  if kind == 'sum':
    return updates.sum(axis=0) / expected
  return updates.mean(axis=0) if len(updates) else np.zeros(5)


def leave_one_out(kind, updates):
  """‖f(U) − f(U∖u)‖ of every client, by the definition."""
  whole = released(kind, updates)
  return np.array(
    [
      np.linalg.norm(whole - released(kind, np.delete(updates, i, axis=0)))
      for i in range(len(updates))
    ]
  )


def vectors(count, seed=0):
  generator = np.random.default_rng(seed)
  # Norms from well below to well above the clip norm.
  return generator.normal(size=(count, 5)) * generator.uniform(
    0.2, 2, (count, 1)
  )
