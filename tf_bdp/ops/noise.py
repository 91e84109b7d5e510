"""Noise of the Gaussian mechanisms, as TensorFlow operations.

Sums of floats have gaps that depend on what is summed. So in float32 many a
noised value would be impossible with other data, whatever the noise: it would
tell the two apart. Here values are rounded to a grid of powers of two, float64
noise is rounded to the same grid, and the two are added exactly. That is the
Gaussian mechanism applied to rounded values, its result rounded: what the last
rounding does is post-processing. The first one moves a vector by no more than
`GRID_DISTANCE` standard deviations of the noise, which mechanisms account for.
"""

import os
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import tensorflow as tf

from tf_bdp import array_namespace
from tf_bdp.mechanisms import base

# The stream of clients' noise. Those of the server are not negative.
_CLIENT_STREAM = -1
# A float64's sign and exponent.
_NOT_MANTISSA = np.int64(-(2**52))


def add_noise(
  tensors: Sequence[tf.Tensor],
  deviation: Any,
  seed: Optional[int],
  round_number: tf.Tensor,
  purpose: int = base.UPDATE_NOISE,
) -> list[tf.Tensor]:
  """Draws Gaussian noise and adds it; see `add_normals`.

  Args:
    tensors: What is to be released.
    deviation: The noise's standard deviation.
    seed: For experiments only: makes the noise of a round reproducible, and
      thereby worthless as protection against whoever knows the seed. Without
      it the noise is that of `fresh_normal`, for TFF's graphs; elsewhere add
      `secure_normal`.
    round_number: Tells the rounds of one seed apart.
    purpose: Tells the noises of one round apart.
  """
  tensors = list(tensors)
  size = tf.add_n([tf.size(tensor) for tensor in tensors])
  if seed is None:
    return add_normals(tensors, deviation, fresh_normal(size))
  # One stream for the whole vector, however it is split into tensors.
  normals = tf.random.stateless_normal(
    [size],
    seed=tf.stack(
      [
        tf.constant(seed, tf.int32),
        tf.cast(round_number, tf.int32) * 2 + purpose,
      ]
    ),
    dtype=tf.float64,
  )
  return add_normals(tensors, deviation, normals)


def add_normals(
  tensors: Sequence[tf.Tensor], deviation: Any, normals: tf.Tensor
) -> list[tf.Tensor]:
  """Adds noise of a standard deviation s, all on one grid.

  With d coordinates the grid's step g is the largest power of two that is at
  most 2^-20 s / √d. Rounding moves each of two vectors by at most g/2 in every
  coordinate, hence their difference by at most √d g, or 2^-20 s. Dividing and
  multiplying by g is exact, and so is the sum, as long as values are below
  2^52 g; clipped ones are, unless the noise is far too little for privacy.

  Args:
    tensors: What is to be released.
    deviation: s, a number or a tensor; without noise, 0, they stay as they are.
    normals: Independent standard normals in float64, one for each coordinate of
      all tensors.

  Returns:
    The noised tensors, rounded to their own types.
  """
  # `tf.cast` would first make float32 of a Python number.
  deviation = array_namespace.of_tensorflow().float64(deviation)
  is_noisy = deviation > 0
  size = tf.cast(tf.size(normals), tf.float64)
  step = _power_of_two_below(base.GRID_DISTANCE * deviation / tf.sqrt(size))
  step = tf.where(is_noisy, step, tf.ones_like(step))
  noise = tf.round(normals * (deviation / step))
  sizes = [tf.size(tensor) for tensor in tensors]
  noised = []
  for tensor, part in zip(tensors, tf.split(noise, sizes)):
    steps = tf.round(tf.cast(tensor, tf.float64) / step)
    total = (steps + tf.reshape(part, tf.shape(tensor))) * step
    total = tf.cast(total, tensor.dtype)
    noised.append(tf.where(is_noisy, total, tensor))
  return noised


def _power_of_two_below(number: tf.Tensor) -> tf.Tensor:
  """Returns the largest power of two that is at most a positive float64."""
  bits = tf.bitwise.bitwise_and(tf.bitcast(number, tf.int64), _NOT_MANTISSA)
  return tf.bitcast(bits, tf.float64)


def fresh_normal(size: tf.Tensor) -> tf.Tensor:
  """Returns float64 standard normals that are new in every call of a graph.

  TFF's worker runs no Python, so they come from TensorFlow's Philox generator.
  Its key is drawn, whenever a graph is started, from a Mersenne Twister that
  each process seeds once by 32 bits from /dev/urandom (TensorFlow's
  `random::New64`). No seed of TensorFlow's changes that, and nobody can have
  the noise again; but 32 bits are no protection against someone who tries them
  all. The in-process engine has `secure_normal`.
  """
  # Not `tf.random.normal`, whose seed a model function may have set.
  return tf.raw_ops.RandomStandardNormal(
    shape=tf.reshape(size, [1]), dtype=tf.float64, seed=0, seed2=0
  )


def client_normal(
  size: int,
  seed: int,
  round_number: tf.Tensor,
  client: tf.Tensor,
  step: tf.Tensor,
) -> tf.Tensor:
  """Returns float64 normals for one step of a client, by the seed."""
  stream = tf.constant([seed, _CLIENT_STREAM], tf.int32)
  for number in (round_number, client, step):
    stream = tf.random.experimental.stateless_fold_in(
      stream, tf.cast(number, tf.int32)
    )
  return tf.random.stateless_normal([size], stream, dtype=tf.float64)


def secure_normal(size: int) -> np.ndarray:
  """Returns float64 standard normals from the system's entropy source.

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
  return normals[:size]
