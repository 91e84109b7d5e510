"""Tests of private steps against batches with and without each example."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.mechanisms import oracles
from tf_bdp.learning import losses
from tf_bdp.mechanisms import instance as instance_mechanism
from tf_bdp.mechanisms import joint
from tf_bdp.ops import private_steps

_FEATURES, _CLASSES, _BATCH_SIZE = 4, 3, 5


def _mechanism(clip_norm, kind=instance_mechanism.InstanceMechanism, **options):
  options = {
    'accounting': 'parallel',
    'noise_multiplier': 0.7,
    'batch_size': _BATCH_SIZE,
    'participation_probability': 1.0,
    'clients_per_round': 1.0,
    'total_examples': 100,
    **options,
  }
  return kind(clip_norm=float(clip_norm), **options)


def _linear(dtype='float32'):
  """At zero weights, whose gradients are as large as the features."""
  tf.keras.utils.set_random_seed(1)
  layers = [
    tf.keras.layers.Input((_FEATURES,), dtype=dtype),
    tf.keras.layers.Dense(
      _CLASSES, use_bias=False, kernel_initializer='zeros', dtype=dtype
    ),
  ]
  return tf.keras.Sequential(layers)


def _convolution(dtype='float32'):
  tf.keras.utils.set_random_seed(1)
  layers = [
    tf.keras.layers.Input((5, 5, 2), dtype=dtype),
    tf.keras.layers.Conv2D(3, 3, activation='tanh', dtype=dtype),
    tf.keras.layers.Flatten(dtype=dtype),
    tf.keras.layers.Dense(_CLASSES, dtype=dtype),
  ]
  return tf.keras.Sequential(layers)


@functools.cache
def _gradient_graph(model_fn):
  """The gradient of a batch's mean loss by its own tape, in float64."""
  model, copy = model_fn(), model_fn('float64')
  copy.set_weights([w.astype(np.float64) for w in model.get_weights()])

  def gradient(features, labels):
    with tf.GradientTape() as tape:
      loss = losses.mean_loss(labels, copy(features))
    parts = tape.gradient(loss, copy.trainable_variables)
    return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

  return tf.function(gradient, reduce_retracing=True)


@functools.cache
def _size(model_fn):
  return sum(np.size(w) for w in model_fn().get_weights())


def _batch_gradient(model_fn, features, labels):
  """The same, and 0 without examples."""
  if not len(labels):
    return np.zeros(_size(model_fn))
  gradient = _gradient_graph(model_fn)
  return gradient(
    tf.constant(features, tf.float64), tf.constant(labels)
  ).numpy()


@functools.cache
def _step_graph(model_fn, mechanism):
  model = model_fn()

  def step(features, labels, drawn):
    return private_steps.step(model, features, labels, drawn, mechanism)

  return tf.function(step, reduce_retracing=True)


class _BruteForce:
  """Batches with and without each example, by gradients of their own."""

  def __init__(self, model_fn, features, labels, drawn, clip_norm):
    def gradient(chosen):
      return _batch_gradient(model_fn, features[chosen], labels[chosen])

    examples = np.arange(len(labels))
    self.whole = gradient(drawn)
    self.others = [gradient(drawn ^ (examples == i)) for i in examples]
    self.update = oracles.clip(self.whole, clip_norm)
    squared = [
      np.sum((self.update - oracles.clip(other, clip_norm)) ** 2)
      for other in self.others
    ]
    self.squared_moves = np.array(squared) / clip_norm**2
    gaps = [np.sum((self.whole - other) ** 2) for other in self.others]
    self.squared_gaps = np.array(gaps) / clip_norm**2
    own = [np.sum(gradient(examples == i) ** 2) for i in examples]
    counts = np.sum(drawn) + np.where(drawn, -1, 1)
    # How accurate ‖g - h‖² can be: g - h = ± (g - g_x) / |B ± x|.
    sizes = np.sum(self.whole**2) + np.array(own)
    self.sizes = sizes / np.maximum(counts, 1) ** 2 / clip_norm**2


def _compared(features, labels, drawn, clip_norm, model_fn=_linear, **options):
  """A step, and what it should be."""
  found = _step_graph(model_fn, _mechanism(clip_norm, **options))(
    tf.constant(features), tf.constant(labels), tf.constant(drawn)
  )
  wanted = _BruteForce(model_fn, features, labels, drawn, clip_norm)
  return (*(part.numpy().astype(np.float64) for part in found), wanted)


def _check_bounds(found, wanted):
  assert np.all(np.isfinite(found))
  # Never less than it is, and never more than without clipping.
  assert np.all(found >= wanted.squared_moves * (1 - 1e-7))
  assert np.all(found <= wanted.squared_gaps + 1e-5 * wanted.sizes)


def _examples(count=8, scale=1.0, seed=0):
  generator = np.random.default_rng(seed)
  features = scale * generator.normal(size=(count, _FEATURES))
  labels = generator.integers(0, _CLASSES, count)
  return features.astype(np.float32), labels


_SOME = np.arange(8) % 3 != 1  # Five of eight.


# Clipping of a batch.


@pytest.mark.parametrize(
  ('scale', 'clip_norm', 'tolerance'),
  [
    (1.0, 1e3, 1e-4),
    (1.0, 1e-1, 5e-3),
    (1e12, 1e15, 1e-4),
    (1e12, 1e11, 5e-3),
    (1e-12, 1e-9, 1e-4),
    (1e-12, 1e-13, 5e-3),
  ],
  ids=lambda value: f'{value:g}',
)
def test_moves_are_those_of_batches_with_and_without_an_example(
  scale, clip_norm, tolerance
):
  features, labels = _examples(scale=scale)
  update, moves, wanted = _compared(features, labels, _SOME, clip_norm)
  _check_bounds(moves, wanted)
  np.testing.assert_allclose(moves, wanted.squared_moves, rtol=tolerance)
  np.testing.assert_allclose(update, wanted.update, atol=1e-6 * clip_norm)
  is_clipped = np.linalg.norm(wanted.whole) > clip_norm
  assert is_clipped == (clip_norm < scale)


def test_moves_are_right_where_only_one_side_is_clipped():
  features, labels = _examples()
  features[0] *= 6  # In the batch.
  features[1] *= 20  # Not in it.
  probe = _compared(features, labels, _SOME, 1.0)[-1]
  whole = np.linalg.norm(probe.whole)
  norms = [np.linalg.norm(other) for other in probe.others]
  assert norms[0] < whole < norms[1]
  for clip_norm, clipped in (
    ((norms[0] + whole) / 2, whole),
    ((whole + norms[1]) / 2, norms[1]),
  ):
    assert clipped > clip_norm
    update, moves, wanted = _compared(features, labels, _SOME, clip_norm)
    _check_bounds(moves, wanted)
    np.testing.assert_allclose(moves, wanted.squared_moves, rtol=1e-3)
    np.testing.assert_allclose(update, wanted.update, atol=1e-6)


@pytest.mark.parametrize('clip_norm', [0.01, 100.0])
def test_a_batch_of_one_is_compared_with_no_gradient(clip_norm):
  features, labels = _examples()
  only = np.arange(8) == 3
  update, moves, wanted = _compared(features, labels, only, clip_norm)
  _check_bounds(moves, wanted)
  np.testing.assert_allclose(moves, wanted.squared_moves, rtol=2e-2)
  assert moves[3] * clip_norm**2 == pytest.approx(np.sum(update**2), rel=2e-5)


@pytest.mark.parametrize('clip_norm', [0.01, 100.0])
def test_an_empty_batch_sends_nothing_and_is_moved_by_what_comes(clip_norm):
  features, labels = _examples()
  update, moves, wanted = _compared(
    features, labels, np.zeros(8, bool), clip_norm
  )
  np.testing.assert_array_equal(update, 0.0)
  _check_bounds(moves, wanted)
  np.testing.assert_allclose(moves, wanted.squared_moves, rtol=2e-5)


def test_no_examples_at_all_make_no_update_and_no_moves():
  for clipping in instance_mechanism.CLIPPINGS:
    update, moves, _ = _compared(
      np.zeros((0, _FEATURES), np.float32),
      np.zeros(0, np.int64),
      np.zeros(0, bool),
      1.0,
      clipping=clipping,
    )
    np.testing.assert_array_equal(update, np.zeros(_FEATURES * _CLASSES))
    assert moves.shape == (0,)


@pytest.mark.parametrize('clip_norm', [0.1, 100.0])
def test_identical_examples_move_nothing(clip_norm):
  features, labels = (np.repeat(part[:1], 8, 0) for part in _examples())
  _, moves, wanted = _compared(features, labels, _SOME, clip_norm)
  norm = np.linalg.norm(wanted.whole)
  assert np.all(wanted.squared_moves < 1e-25)
  # What rounding leaves: relative to ‖g‖², over |B ∖ x|².
  assert np.all(moves >= 0)
  limit = 1e-5 * norm * max(norm, clip_norm) / clip_norm**2
  assert np.all(moves <= limit)
  # One of its own makes a difference.
  features[0] *= 2
  _, moves, wanted = _compared(features, labels, _SOME, clip_norm)
  _check_bounds(moves, wanted)
  if clip_norm > norm:
    np.testing.assert_allclose(moves, wanted.squared_moves, rtol=1e-2)
    assert moves[0] > 10 * moves[3]


def test_opposite_examples_cancel_and_each_moves_all_the_way():
  features, _ = _examples()
  features[1] = -features[0]
  labels = np.zeros(8, np.int64)
  pair = np.arange(8) < 2
  update, moves, wanted = _compared(features, labels, pair, 0.1)
  np.testing.assert_allclose(update, 0.0, atol=1e-7)
  _check_bounds(moves, wanted)
  np.testing.assert_allclose(moves[:2], 1.0, rtol=1e-4)


@pytest.mark.parametrize('ratio', [1e2, 1e3, 1e4, 1e5])
def test_an_example_that_outweighs_its_batch_is_never_underrated(ratio):
  # Without it the batch's gradient, all but lost in rounding, points away.
  for seed in range(8):
    features, _ = _examples(2, seed=seed)
    features[1] = 0.1 * features[1] - features[0]
    features[0] *= ratio
    labels, drawn = np.array([0, 1]), np.ones(2, bool)
    features /= np.linalg.norm(features[1])
    _, moves, wanted = _compared(features, labels, drawn, 0.7)
    _check_bounds(moves, wanted)
    assert np.all(moves <= 4 * (1 + 1e-5))


def test_moves_are_never_underrated_for_batches_of_all_kinds():
  generator = np.random.default_rng(2)
  for seed in range(60):
    features, labels = _examples(6, seed=seed)
    scales = generator.uniform(-3, 3, (6, 1)) + generator.uniform(-2, 2)
    features *= (10**scales).astype(np.float32)
    drawn = generator.random(6) < generator.random()
    _, moves, wanted = _compared(features, labels, drawn, 1.0)
    _check_bounds(moves, wanted)


@pytest.mark.parametrize('bad', [0, 1], ids=['drawn', 'not_drawn'])
def test_gradients_whose_squares_overflow_count_as_the_worst_case(bad):
  features, labels = _examples()
  features[bad] *= np.float32(1e25)
  update, moves, _ = _compared(features, labels, _SOME, 0.5)
  assert np.linalg.norm(update) <= 0.5 * (1 + 1e-6)
  assert moves[bad] == 4.0
  assert np.all((moves >= 0) & (moves <= 4.0 * (1 + 1e-5)))


@pytest.mark.parametrize('clip_norm', [0.2, 30.0])
def test_moves_of_a_network_are_those_of_brute_force(clip_norm):
  generator = np.random.default_rng(4)
  features = generator.normal(size=(8, 5, 5, 2)).astype(np.float32)
  labels = generator.integers(0, _CLASSES, 8)
  update, moves, wanted = _compared(
    features, labels, _SOME, clip_norm, _convolution
  )
  _check_bounds(moves, wanted)
  np.testing.assert_allclose(moves, wanted.squared_moves, rtol=5e-3)
  np.testing.assert_allclose(update, wanted.update, atol=1e-6)


# Clipping of examples.


def _example_gradients(features, labels):
  rows = range(len(labels))
  return np.array(
    [_batch_gradient(_linear, features[[i]], labels[[i]]) for i in rows]
  )


@pytest.mark.parametrize('scale', [1e-10, 1.0, 1e10, 1e25])
def test_clipped_gradients_of_examples_are_summed_over_the_batch_size(scale):
  features, labels = _examples(scale=scale)
  features[:2] *= 0.01  # One drawn and one not drawn, below the clip norm.
  clip_norm = 0.5 * min(scale, 1e12)
  gradients = _example_gradients(features, labels)
  norms = np.linalg.norm(gradients, axis=1)
  if scale < 1e12:
    assert 0 < np.sum(norms[_SOME] < clip_norm) < np.sum(_SOME)
  update, moves, _ = _compared(
    features, labels, _SOME, clip_norm, clipping='example'
  )
  clipped = np.array([oracles.clip(g, clip_norm) for g in gradients])
  wanted = np.sum(clipped[_SOME], axis=0) / _BATCH_SIZE
  if scale > 1e20:  # Norms beyond float32: nothing is left of them.
    wanted = np.zeros_like(wanted)
  np.testing.assert_allclose(update, wanted, atol=1e-5 * clip_norm)
  wanted = np.minimum(norms / clip_norm, 1) ** 2 / _BATCH_SIZE**2
  np.testing.assert_allclose(moves, wanted, rtol=1e-5)


def test_no_example_moves_the_sum_by_more_than_is_told():
  features, labels = _examples(scale=2.0)
  update, moves, _ = _compared(features, labels, _SOME, 0.6, clipping='example')
  for i in range(8):
    other, _, _ = _compared(
      *(features, labels, _SOME ^ (np.arange(8) == i), 0.6), clipping='example'
    )
    squared = np.sum((update - other) ** 2) / 0.36
    assert squared == pytest.approx(moves[i], rel=5e-5)
    assert squared <= moves[i] * (1 + 1e-6)


@pytest.mark.parametrize('drawn', [2, 8])
def test_a_joint_update_is_no_longer_than_the_clip_norm(drawn):
  # Eight identical examples where two are expected.
  features, labels = (np.repeat(part[:1], 8, 0) for part in _examples())
  chosen = np.arange(8) < drawn
  norms = {}
  for kind in (joint.JointMechanism, instance_mechanism.InstanceMechanism):
    update, moves, _ = _compared(
      *(10 * features, labels, chosen, 0.6),
      kind=kind,
      accounting='aggregate',
      clipping='example',
      batch_size=2,
    )
    norms[kind] = np.linalg.norm(update) / 0.6
    np.testing.assert_allclose(moves, 0.25, rtol=1e-6)
  assert norms[joint.JointMechanism] == pytest.approx(1.0, rel=1e-5)
  assert norms[joint.JointMechanism] <= 1 + 1e-6
  alone = norms[instance_mechanism.InstanceMechanism]
  assert alone == pytest.approx(drawn / 2, rel=1e-5)


# Updates.


def _normal(size):
  def normal(number):
    return tf.random.stateless_normal(
      [size], tf.stack([7, number]), dtype=tf.float64
    )

  return normal


def _batches(steps=3):
  generator = np.random.default_rng(3)
  features = generator.normal(size=(8, 5, 5, 2)).astype(np.float32)
  labels = generator.integers(0, _CLASSES, 8)
  return features, labels, generator.random((steps, 8)) < 0.6


class _Client:
  """The updates of one client."""

  def __init__(self, mechanism, learning_rate=None, in_graph=False):
    self._model = _convolution()
    normal = _normal(_size(_convolution))
    features, labels, drawn = _batches(mechanism.local_steps)

    def compute(step_count):
      return private_steps.client_update(
        self._model,
        tf.constant(features),
        tf.constant(labels),
        tf.constant(drawn),
        step_count,
        mechanism,
        learning_rate,
        normal,
      )

    self._compute = tf.function(compute) if in_graph else compute

  def update(self, step_count):
    before = self._model.get_weights()
    result = self._compute(tf.constant(step_count))
    for found, wanted in zip(self._model.get_weights(), before):
      np.testing.assert_array_equal(found, wanted)
    return [part.numpy() for part in result]


@pytest.mark.parametrize('noise', [0.0, 0.7])
@pytest.mark.parametrize('clipping', instance_mechanism.CLIPPINGS)
def test_fed_sgd_sends_the_clipped_gradient_and_noise(clipping, noise):
  mechanism = _mechanism(0.6, clipping=clipping, noise_multiplier=noise)
  sent, clipped, moves = _Client(mechanism).update(1)
  features, labels, drawn = _batches(1)
  step = private_steps.step(
    _convolution(), features, labels, tf.constant(drawn[0]), mechanism
  )
  np.testing.assert_array_equal(clipped, step.update)
  np.testing.assert_array_equal(moves, [step.squared_moves])
  deviation = noise * 0.6 / (1 if clipping == 'batch' else _BATCH_SIZE)
  added = _normal(sent.size)(0).numpy() * deviation
  np.testing.assert_allclose(sent, clipped + added, atol=1e-6)
  if noise:
    # On the grid of the noise, so that floats do not betray the gradient.
    step = 2.0 ** np.floor(np.log2(2.0**-20 * deviation / sent.size**0.5))
    steps = np.asarray(sent, np.float64) / step
    np.testing.assert_array_equal(steps, np.round(steps))


@pytest.mark.parametrize('in_graph', [False, True], ids=['eager', 'graph'])
@pytest.mark.parametrize('clipping', instance_mechanism.CLIPPINGS)
def test_fed_avg_takes_noisy_steps_as_a_loop_by_hand_does(clipping, in_graph):
  clip_norm = 0.6 if clipping == 'batch' else 2.5
  mechanism = _mechanism(clip_norm, clipping=clipping, local_steps=3)
  client = _Client(mechanism, 0.4, in_graph)
  features, labels, drawn = _batches()
  model = _convolution()
  start = np.concatenate([np.ravel(w) for w in model.get_weights()])
  weights = start.astype(np.float64)
  deviation = mechanism.client_noise_per_clip_norm * clip_norm
  results, steps = [client.update(count) for count in range(4)], []
  for number in range(4):
    # A client takes as many steps as it is told to, and no more.
    sent, clipped, moves = results[number]
    np.testing.assert_allclose(sent, start - weights, atol=1e-6)
    np.testing.assert_array_equal(clipped, 0.0)
    # The moves of a step are those at its own weights.
    for found, step in zip(moves, steps):
      np.testing.assert_allclose(found, step.squared_moves, rtol=1e-4)
    if number == 3:
      break
    step = private_steps.step(
      model, features, labels, tf.constant(drawn[number]), mechanism
    )
    noise = _normal(start.size)(number).numpy() * deviation
    weights -= 0.4 * (step.update.numpy() + noise)
    parts = private_steps.parts(
      tf.constant(weights, tf.float32), model.trainable_variables
    )
    model.set_weights(parts)
    steps.append(step)
  # And other ones at other weights.
  moves = results[3][2]
  assert not np.allclose(moves[0], moves[1], rtol=1e-2)


def test_a_vector_is_cut_into_the_shapes_of_variables_and_back():
  variables = _convolution().trainable_variables
  vector = private_steps.flat(variables)
  for part, variable in zip(private_steps.parts(vector, variables), variables):
    np.testing.assert_array_equal(part, variable)
