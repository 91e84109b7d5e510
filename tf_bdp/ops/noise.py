"""Noise of the Gaussian mechanisms, as TensorFlow operations."""

import os
from collections.abc import Sequence
from typing import Optional

import numpy as np
import tensorflow as tf
import tensorflow_privacy as tfp

from tf_bdp.mechanisms import base

# The stream of clients' noise. Those of the server are not negative.
_CLIENT_STREAM = -1


def add_noise(
  tensors: Sequence[tf.Tensor],
  deviation: tf.Tensor,
  seed: Optional[int],
  round_number: tf.Tensor,
  purpose: int = base.UPDATE_NOISE,
) -> list[tf.Tensor]:
  """Adds Gaussian noise, from TF Privacy's query unless it is seeded.

  Args:
    tensors: What is to be released.
    deviation: The noise's standard deviation.
    seed: For experiments only: makes the noise of a round reproducible, and
      thereby worthless as protection against whoever knows the seed. Without
      it, TF Privacy draws from TensorFlow's generator; outside of TFF that is
      predictable after `tf.random.set_seed`, so use `secure_normal` there.
    round_number: Tells the rounds of one seed apart.
    purpose: Tells the noises of one round apart.
  """
  tensors = list(tensors)
  if seed is None:
    query = tfp.GaussianSumQuery(1.0, 1.0)
    state = query.make_global_state(1.0, deviation)
    noised, _, _ = query.get_noised_result(tensors, state)
    return noised
  sizes = [tf.size(tensor) for tensor in tensors]
  # One stream for the whole vector, however it is split into tensors.
  noise = tf.random.stateless_normal(
    [tf.add_n(sizes)],
    seed=tf.stack(
      [
        tf.constant(seed, tf.int32),
        tf.cast(round_number, tf.int32) * 2 + purpose,
      ]
    ),
  )
  return [
    tensor + deviation * tf.reshape(part, tf.shape(tensor))
    for tensor, part in zip(tensors, tf.split(noise, sizes))
  ]


def client_normal(
  size: int,
  seed: int,
  round_number: tf.Tensor,
  client: tf.Tensor,
  step: tf.Tensor,
) -> tf.Tensor:
  """Returns standard normals for one step of a client, by the seed."""
  stream = tf.constant([seed, _CLIENT_STREAM], tf.int32)
  for number in (round_number, client, step):
    stream = tf.random.experimental.stateless_fold_in(
      stream, tf.cast(number, tf.int32)
    )
  return tf.random.stateless_normal([size], stream)


def secure_normal(size: int) -> np.ndarray:
  """Returns independent standard normals from the system's entropy source.

  Box and Muller's transform of 53-bit uniforms from `os.urandom`, for noise
  that nobody can predict or reproduce.
  """
  pairs = (size + 1) // 2
  words = np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64)
  uniforms = ((words >> np.uint64(11)) + 0.5) * 2.0**-53
  radius, angle = uniforms.reshape(2, pairs)
  radius = np.sqrt(-2.0 * np.log(radius))
  angle = 2.0 * np.pi * angle
  normals = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
  return normals[:size].astype(np.float32)
