"""What a client computes at instance level, as TensorFlow operations.

A step clips the gradient of a batch and tells how far each example moves it,
exactly, from one pass over the examples (see `example_gradients`).
"""

from collections.abc import Sequence
from typing import Callable, NamedTuple, Optional

import tensorflow as tf

from tf_bdp.mechanisms import instance as instance_mechanism
from tf_bdp.ops import clipping, example_gradients, noise

# Squared norms and inner products come from float32 sums of many terms; this
# is above their relative rounding error.
_ROUNDING = 4e-6


class ClientUpdate(NamedTuple):
  """What a client computes in a round.

  Attributes:
    sent: Its noisy update, as one vector.
    clipped: The update before noise; zero if there are several steps.
    squared_moves: Squared moves of the examples, [steps, examples].
  """

  sent: tf.Tensor
  clipped: tf.Tensor
  squared_moves: tf.Tensor


class Step(NamedTuple):
  """The outcome of a step.

  Attributes:
    update: What the noise is to be added to, as one vector.
    squared_moves: ‖f(B) - f(B∖x)‖² / C² of every example, or for one that is
      not in the batch ‖f(B) - f(B∪x)‖² / C².
  """

  update: tf.Tensor
  squared_moves: tf.Tensor


def step(
  model: tf.keras.Model,
  features: tf.Tensor,
  labels: tf.Tensor,
  drawn: tf.Tensor,
  mechanism: instance_mechanism.InstanceMechanism,
) -> Step:
  """Computes the clipped gradient of a batch, and its examples' moves.

  Args:
    model: The model, with the weights at which the gradient is taken.
    features: Features of all examples that are in the batch or measured.
    labels: Labels of these examples.
    drawn: Whether each example is in the batch.
    mechanism: Says how to clip.
  """
  gradients = example_gradients.of_batch(model, features, labels)
  if mechanism.clipping == 'batch':
    return _clipped_as_batch(gradients, drawn, mechanism.clip_norm)
  return _clipped_by_example(gradients, drawn, mechanism)


def client_update(
  model: tf.keras.Model,
  features: tf.Tensor,
  labels: tf.Tensor,
  drawn: tf.Tensor,
  step_count: tf.Tensor,
  mechanism: instance_mechanism.InstanceMechanism,
  learning_rate: Optional[float],
  normal: Callable[[tf.Tensor], tf.Tensor],
) -> ClientUpdate:
  """Computes a client's private update.

  Args:
    model: The model with the server's weights, which are restored afterwards.
    features: Features of all examples that are drawn or measured.
    labels: Labels of these examples.
    drawn: Whether each is in the batch of each step, [steps, examples].
    step_count: How many of the steps the client takes.
    mechanism: Says how to clip, and how much noise to add.
    learning_rate: The learning rate of FedAvg's local steps; its update is how
      much the noisy steps lower the weights. None for FedSGD, whose update is
      the noisy gradient.
    normal: Returns the standard normals of a step in float64, one for each
      weight.
  """
  deviation = mechanism.client_noise_per_clip_norm * mechanism.clip_norm

  def noised(update: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    if not deviation:
      return update
    return noise.add_normals([update], deviation, normal(number))[0]

  if learning_rate is None:
    result = step(model, features, labels, drawn[0], mechanism)
    sent = noised(result.update, tf.constant(0))
    return ClientUpdate(sent, result.update, result.squared_moves[tf.newaxis])

  variables = model.trainable_variables
  before = [tf.identity(variable) for variable in variables]
  squared_moves = tf.TensorArray(
    tf.float32, mechanism.local_steps, element_shape=[None]
  )
  for number in tf.range(mechanism.local_steps):
    result = step(model, features, labels, drawn[number], mechanism)
    squared_moves = squared_moves.write(number, result.squared_moves)
    taken = tf.cast(number < step_count, tf.float32)
    change = noised(result.update, number)
    change = change * learning_rate * taken
    for variable, part in zip(variables, parts(change, variables)):
      variable.assign_sub(part)
  sent = flat([b - v for b, v in zip(before, variables)])
  for variable, value in zip(variables, before):
    variable.assign(value)
  return ClientUpdate(sent, tf.zeros_like(sent), squared_moves.stack())


def parts(
  vector: tf.Tensor, variables: Sequence[tf.Variable]
) -> list[tf.Tensor]:
  """Cuts a vector into the shapes of variables."""
  sizes = [variable.shape.num_elements() for variable in variables]
  cut = tf.split(vector, sizes)
  return [tf.reshape(p, v.shape) for p, v in zip(cut, variables)]


def _clipped_as_batch(
  gradients: example_gradients.ExampleGradients,
  drawn: tf.Tensor,
  clip_norm: float,
) -> Step:
  weights = tf.cast(drawn, tf.float32)
  count = tf.reduce_sum(weights)
  mean = gradients.weighted_sum(weights / tf.maximum(count, 1.0))
  squared_moves = _leave_one_out(
    squared_norm=clipping.squared_norm(mean),
    squared_norms=gradients.squared_norms,
    products=gradients.inner_products(mean),
    drawn=drawn,
    count=count,
    clip_norm=clip_norm,
  )
  update = flat(mean)
  norm = tf.norm(update)
  # Exactly one below the clip norm, so that small updates keep their bits.
  scale = tf.where(norm <= clip_norm, 1.0, clip_norm / norm)
  return Step(update * scale, squared_moves / clip_norm**2)


def _leave_one_out(
  squared_norm: tf.Tensor,
  squared_norms: tf.Tensor,
  products: tf.Tensor,
  drawn: tf.Tensor,
  count: tf.Tensor,
  clip_norm: float,
) -> tf.Tensor:
  """Returns ‖clip(g) - clip(h)‖² for every h, the mean without or with x.

  With s = -1 for an example x of the batch and s = 1 for another, and b the
  size of the batch, h = (b g + s g_x) / (b + s), hence g - h = s (g - g_x) /
  (b + s). For vectors scaled by a and c,

    ‖a g - c h‖² = (a‖g‖ - c‖h‖)² + a c (‖g - h‖² - (‖g‖ - ‖h‖)²).

  The result is rounded up: ‖h‖ is least accurate where g_x makes up most of the
  batch, and of all values within its rounding error the worst is taken.
  Clipping is a projection, so the result is at most ‖g - h‖.
  """
  squared_norm, squared_norms, products, count = (
    tf.cast(part, tf.float64)
    for part in (squared_norm, squared_norms, products, count)
  )
  sign = tf.where(drawn, tf.constant(-1.0, tf.float64), 1.0)
  others = count + sign
  # A batch of one leaves nothing behind, which is no gradient at all.
  empty = others < 0.5
  others = tf.maximum(others, 1.0)
  size = squared_norm + squared_norms
  gap = tf.maximum(size - 2.0 * products, 0.0) + _ROUNDING * size
  gap = tf.where(empty, squared_norm, gap / tf.square(others))
  whole = tf.square(count) * squared_norm + squared_norms
  cross = 2.0 * count * products
  rest = (whole + sign * cross) / tf.square(others)
  error = _ROUNDING * (whole + tf.abs(cross)) / tf.square(others)
  # The result grows with ‖h‖² up to this, and falls beyond.
  worst = tf.maximum(squared_norm - gap, clip_norm**2)
  rest = tf.clip_by_value(worst, rest - error, rest + error)
  rest = tf.where(empty, tf.zeros_like(rest), rest)

  norm, rest_norm = tf.sqrt(squared_norm), tf.sqrt(rest)
  scale, rest_scale = (
    tf.minimum(clip_norm / tf.maximum(n, 1e-300), 1.0)
    for n in (norm, rest_norm)
  )
  difference = tf.abs(norm - rest_norm) - _ROUNDING * (norm + rest_norm)
  across = tf.maximum(gap - tf.square(tf.maximum(difference, 0.0)), 0.0)
  across = tf.minimum(across, 4.0 * norm * rest_norm)  # If opposite.
  along = tf.square(scale * norm - rest_scale * rest_norm)
  moved = along + scale * rest_scale * across
  moved = tf.minimum(moved, gap) * (1.0 + _ROUNDING)
  # Where norms overflow float32, assume the worst case.
  moved = tf.where(tf.math.is_finite(moved), moved, 4.0 * clip_norm**2)
  return tf.cast(moved, tf.float32)


def _clipped_by_example(
  gradients: example_gradients.ExampleGradients,
  drawn: tf.Tensor,
  mechanism: instance_mechanism.InstanceMechanism,
) -> Step:
  clip_norm, batch_size = mechanism.clip_norm, mechanism.batch_size
  norms = tf.sqrt(gradients.squared_norms)
  scales = tf.where(norms <= clip_norm, 1.0, clip_norm / norms)
  # Rounding in the norms must not let a gradient pass that is longer than C.
  scales = scales * (1.0 - _ROUNDING)
  weights = tf.cast(drawn, tf.float32) * scales / batch_size
  update = flat(gradients.weighted_sum(weights))
  if mechanism.bounds_clients:
    # More examples than expected must not make a client count for more.
    update = tf.clip_by_norm(update, clip_norm)
  moves = tf.minimum(norms / clip_norm, 1.0) / batch_size
  return Step(update, tf.square(moves))


def is_usable(update: tf.Tensor) -> tf.Tensor:
  """Whether an update is finite and not zero (TFF marks failures by zeros)."""
  norm = tf.norm(update)
  return tf.math.is_finite(norm) & (norm > 0)


def flat(parts: Sequence[tf.Tensor]) -> tf.Tensor:
  """Returns the tensors as one vector."""
  return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
