"""Speed and memory of the norms of all examples' gradients.

The norms, the batch's gradient and its inner product with every example's, for
CNNs with 26,010 and 1,663,370 weights. Alternatives: the batch's gradient
alone, and a pass backward for each example. All in this process, in turn; the
fastest of several runs counts.
"""

import resource
from typing import Any, Callable

import numpy as np
import tensorflow as tf
from absl import app, flags

from benchmarks import rounds, timing
from experiments import models
from tf_bdp.learning import losses
from tf_bdp.ops import example_gradients

_EACH = flags.DEFINE_bool(
  'each', True, 'Whether to time a pass for each example as well.'
)
_RUNS = flags.DEFINE_integer('runs', 30, 'Runs of each.')
_MODELS = {
  'mnist_cnn': lambda: models.mnist_cnn(0),
  'larger CNN': rounds.large_model,
}
_BATCHES = (('mnist_cnn', 32), ('mnist_cnn', 600), ('larger CNN', 64))


def _batch(size: int) -> tuple[tf.Tensor, tf.Tensor]:
  generator = np.random.default_rng(0)
  features = generator.random((size, 28, 28, 1), dtype=np.float32)
  return tf.constant(features), tf.constant(generator.integers(0, 10, size))


def _bare_gradient(model: tf.keras.Model) -> Callable[..., Any]:
  @tf.function
  def gradient(features: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
      loss = losses.mean_loss(labels, model(features, training=True))
    return tape.gradient(loss, model.trainable_variables)

  return gradient


def _with_examples(
  model: tf.keras.Model,
  of_batch: Callable[..., example_gradients.ExampleGradients],
) -> Callable[..., Any]:
  @tf.function
  def gradient(features: tf.Tensor, labels: tf.Tensor) -> Any:
    examples = of_batch(model, features, labels)
    size = tf.shape(labels)[0]
    mean = examples.weighted_sum(tf.fill([size], 1 / tf.cast(size, tf.float32)))
    return examples.squared_norms, mean, examples.inner_products(mean)

  return gradient


def _run(
  function: Callable[..., Any], batch: tuple[tf.Tensor, tf.Tensor]
) -> Callable[[], object]:
  return lambda: [part.numpy() for part in tf.nest.flatten(function(*batch))]


def _compare(name: str, size: int) -> None:
  model = _MODELS[name]()
  batch = _batch(size)
  functions = {
    "the batch's gradient alone": _bare_gradient(model),
    'with all norms and products': _with_examples(
      model, example_gradients.of_batch
    ),
  }
  if _EACH.value:
    functions['a pass for each example'] = _with_examples(
      model, example_gradients._OneByOne
    )
  seconds = timing.fastest_in_turn(
    {key: _run(function, batch) for key, function in functions.items()},
    _RUNS.value,
  )
  bare = seconds["the batch's gradient alone"]
  print(f'\n{name}, {size} examples: milliseconds, ratio to the first')
  for key, value in seconds.items():
    print(f'  {key:<28}{1e3 * value:8.1f}{value / bare:8.2f}x')


def _memory(size: int) -> None:
  model = _MODELS['larger CNN']()
  batch = _batch(size)
  print(f'larger CNN, {size} examples: peak memory above that before')
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  for name, function in (
    ("the batch's gradient alone", _bare_gradient(model)),
    (
      'with all norms and products',
      _with_examples(model, example_gradients.of_batch),
    ),
  ):
    function(*batch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f'  {name:<28}{(peak - before) / 2**20:8.2f} GiB')


def main(argv: list[str]) -> None:
  """Prints all tables."""
  del argv
  _memory(600)  # First: peaks only rise.
  for name, size in _BATCHES:
    _compare(name, size)


if __name__ == '__main__':
  app.run(main)
