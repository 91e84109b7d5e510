"""Clipping of updates, as TensorFlow operations."""

from collections.abc import Sequence

import tensorflow as tf


def clip(
  update: Sequence[tf.Tensor], clip_norm: tf.Tensor
) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
  """Clips an update to a global norm; an unusable one becomes zero.

  An update is unusable if it or its norm is NaN or infinite, or if it is all
  zeros: TFF's client work puts zeros in place of an update that is not finite.

  Returns:
    The clipped update, whether it is usable, and its norm before clipping.
  """
  norm = tf.linalg.global_norm(update)
  usable = tf.math.is_finite(norm) & (norm > 0)
  norm = tf.where(usable, norm, 0.0)
  # Exactly one below the clip norm, so that small updates keep their bits.
  scale = tf.where(norm <= clip_norm, 1.0, clip_norm / norm)
  clipped = [
    tf.where(usable, part * scale, tf.zeros_like(part)) for part in update
  ]
  return clipped, usable, norm


def squared_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
  """Returns the sum of squares over all tensors."""
  return tf.add_n([tf.reduce_sum(tf.square(tensor)) for tensor in tensors])


def compare(
  number: tf.Tensor,
  update: Sequence[tf.Tensor],
  mean: Sequence[tf.Tensor],
) -> tf.Tensor:
  """Returns a client's number, ‖u‖² and ‖u - ū‖², as one row."""
  away = [part - other for part, other in zip(update, mean)]
  return tf.stack(
    [tf.cast(number, tf.float32), squared_norm(update), squared_norm(away)]
  )
