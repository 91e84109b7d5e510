"""Tests of the gradients of single examples against one gradient for each."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from experiments import models
from tf_bdp.ops import example_gradients

layers = tf.keras.layers
_EXAMPLES = 5
_CLASSES = 3
# Of what is computed in float32, relative to the largest value.
_ROUNDING = 1e-5


def _sequential(shape, *stack, dtype=tf.float32):
  return tf.keras.Sequential([layers.Input(shape, dtype=dtype), *stack])


def _convolution(channels=3, filters=4, size=3, **options):
  return _sequential(
    (9, 8, channels),
    layers.Conv2D(filters, size, activation='relu', **options),
    layers.MaxPool2D(2, 1),
    layers.Flatten(),
    layers.Dense(_CLASSES),
  )


def _branching():
  inputs = layers.Input((7, 7, 2))
  left = layers.Conv2D(4, 3, padding='same', activation='tanh')(inputs)
  right = layers.Conv2D(4, 1, use_bias=False)(inputs)
  joined = layers.Add()([left, right])
  pooled = layers.GlobalAveragePooling2D()(joined)
  flat = layers.Concatenate()([pooled, layers.Flatten()(joined)])
  return tf.keras.Model(inputs, layers.Dense(_CLASSES)(flat))


def _nested():
  inner = tf.keras.Sequential(
    [layers.Dense(6, activation='relu'), layers.Dense(5, activation='tanh')]
  )
  inputs = layers.Input((4,))
  middle = tf.keras.Model(inputs, layers.Dense(5)(inner(inputs)))
  return _sequential((4,), middle, layers.Dense(_CLASSES))


def _frozen():
  model = _sequential(
    (6, 6, 2),
    layers.Conv2D(3, 3, activation='relu'),
    layers.BatchNormalization(),
    layers.Conv2D(4, 3, activation='relu'),
    layers.Flatten(),
    layers.Dense(4, activation='relu'),
    layers.Dense(_CLASSES),
  )
  for index in (0, 1, 4):
    model.layers[index].trainable = False
  return model


class _TwoLayers(tf.keras.Model):
  """Subclasses say how the two dense layers make logits."""

  def __init__(self):
    super().__init__(name='two_layers')
    self.first = layers.Dense(4, activation='tanh', name='first')
    self.last = layers.Dense(_CLASSES, name='last')

  @classmethod
  def built(cls):
    model = cls()
    model.build((None, 6))
    return model

  def call(self, inputs):
    return self.last(self.first(inputs) + inputs[:, :4])


class _UsesWeightsTwice(_TwoLayers):
  def call(self, inputs):
    codes = self.first(inputs)
    return self.last(codes + (codes @ tf.transpose(self.first.kernel))[:, :4])


class _IsTraced(_TwoLayers):
  @tf.function
  def call(self, inputs):
    return super().call(inputs)


class _CallsInABranch(_TwoLayers):
  def call(self, inputs):
    codes = tf.cond(
      tf.reduce_all(tf.math.is_finite(inputs)),
      lambda: self.first(inputs),
      lambda: inputs[:, :4],
    )
    return self.last(codes)


class _HasItsOwnVariable(_TwoLayers):
  def __init__(self):
    super().__init__()
    self.scale = self.add_weight('scale', (), initializer='ones')

  def call(self, inputs):
    return self.scale * super().call(inputs)


class _OwnDense(layers.Dense):
  def call(self, inputs):
    return 2 * super().call(inputs)


def _share_a_layer():
  shared = layers.Dense(4, activation='tanh', name='shared')
  return _sequential((4,), shared, shared, layers.Dense(_CLASSES))


def _share_a_variable():
  model = _sequential(
    (4,),
    layers.Dense(4, name='first'),
    layers.Dense(4, name='second'),
    layers.Dense(_CLASSES),
  )
  first, second, _ = model.layers
  second.kernel = first.kernel
  return model


def _fold_steps_into_examples():
  return _sequential(
    (4, 6),
    layers.Lambda(lambda batch: tf.reshape(batch, [-1, 6])),
    layers.Dense(5, activation='tanh', name='folded'),
    layers.Lambda(lambda rows: tf.reshape(rows, [-1, 20])),
    layers.Dense(_CLASSES),
  )


def _recurrent():
  return _sequential(
    (5,),
    layers.Embedding(6, 4, name='embedding'),
    layers.GRU(3, name='recurrent'),
    layers.Dense(_CLASSES),
    dtype=tf.int32,
  )


def _with(layer, shape=(6, 6, 2)):
  return _sequential(
    shape,
    layer,
    layers.Activation('tanh'),
    layers.Flatten(),
    layers.Dense(_CLASSES),
  )


_FAST = {
  'mnist_cnn': models.mnist_cnn,
  'one dense layer': lambda: _sequential((4,), layers.Dense(_CLASSES)),
  'wide dense layers': lambda: _sequential(
    (40,), layers.Dense(30, activation='relu'), layers.Dense(_CLASSES)
  ),
  'few positions': lambda: _with(layers.Dense(30), (2, 40)),
  'many positions': lambda: _with(layers.Dense(4), (9, 3)),
  'positions in a plane': lambda: _with(layers.Dense(3), (4, 3, 2)),
  'positions without number': lambda: _sequential(
    (None, 3),
    layers.Dense(4, activation='tanh'),
    layers.GlobalAveragePooling1D(),
    layers.Dense(_CLASSES),
  ),
  'integer features': lambda: _sequential(
    (4,), layers.Dense(_CLASSES), dtype=tf.int32
  ),
  'strides': lambda: _convolution(strides=(2, 3)),
  'strides, same': lambda: _convolution(strides=(3, 2), padding='same'),
  'strides, same, channels': lambda: _convolution(
    8, strides=2, padding='same', size=(4, 3)
  ),
  'strides wider than windows': lambda: _convolution(8, size=2, strides=3),
  'windows of a pixel': lambda: _convolution(size=1, strides=(2, 3)),
  'dilation': lambda: _convolution(dilation_rate=2),
  'dilation, same, channels': lambda: _convolution(
    8, dilation_rate=(2, 3), padding='same'
  ),
  'no bias': lambda: _convolution(use_bias=False),
  'many channels': lambda: _convolution(24, 30, padding='same'),
  'few windows': lambda: _convolution(24, 60, size=(7, 6), name='few'),
  'image without size': lambda: _sequential(
    (None, None, 8),
    layers.Conv2D(4, 3, padding='same', activation='relu'),
    layers.GlobalAveragePooling2D(),
    layers.Dense(_CLASSES),
  ),
  'activation that is a layer': lambda: _sequential(
    (4,), layers.Dense(5, activation=layers.LeakyReLU()), layers.Dense(3)
  ),
  'branch': _branching,
  'nested': _nested,
  'frozen': _frozen,
  'subclassed': _TwoLayers.built,
}
# With the layers that make them slow.
_SLOW = {
  'normalisation': (
    lambda: _with(layers.LayerNormalization(name='norm')),
    ['norm'],
  ),
  'gru': (_recurrent, ['embedding', 'recurrent']),
  'shared layer': (_share_a_layer, ['shared']),
  'shared variable': (_share_a_variable, ['first', 'second']),
  'depthwise': (
    lambda: _with(layers.DepthwiseConv2D(3, name='depthwise')),
    ['depthwise'],
  ),
  'groups': (
    lambda: _convolution(4, groups=2, name='grouped'),
    ['grouped'],
  ),
  'one dimension': (
    lambda: _with(layers.Conv1D(3, 2, name='conv'), (6, 2)),
    ['conv'],
  ),
  'trained activation': (
    lambda: _with(layers.Dense(3, activation=layers.PReLU(), name='d'), (4,)),
    ['d'],
  ),
  'subclass of a layer': (lambda: _with(_OwnDense(4, name='own')), ['own']),
  'time distributed': (
    lambda: _with(
      layers.TimeDistributed(layers.Dense(3), name='steps'), (4, 6)
    ),
    ['steps'],
  ),
  'folded steps': (_fold_steps_into_examples, ['folded']),
  'weights used twice': (_UsesWeightsTwice.built, ['first']),
  'call in a branch': (_CallsInABranch.built, ['first']),
  'traced by itself': (_IsTraced.built, ['first', 'last']),
  'variable of the model': (
    _HasItsOwnVariable.built,
    ['two_layers'],
  ),
}
_MODELS = {**_FAST, **{name: model for name, (model, _) in _SLOW.items()}}


@functools.cache
def _model(name):
  tf.keras.utils.set_random_seed(1)
  model = _MODELS[name]()
  generator = np.random.default_rng(2)
  for variable in model.trainable_variables:
    if 'bias' in variable.name:  # They start at zero.
      noise = generator.normal(size=variable.shape, scale=0.2)
      variable.assign(noise.astype(np.float32))
  return model


def _batch(model, examples=_EXAMPLES, seed=3):
  generator = np.random.default_rng(seed)
  shape, dtype = (6,), tf.float32
  if model.inputs:
    dtype = model.inputs[0].dtype
    shape = [7 if size is None else size for size in model.input_shape[1:]]
  if dtype == tf.int32:
    features = generator.integers(0, 6, (examples, *shape))
  else:
    features = generator.normal(size=(examples, *shape))
  labels = generator.integers(0, _CLASSES, examples)
  return tf.constant(features, dtype), tf.constant(labels, tf.int32)


def _weights(examples):
  weights = np.random.default_rng(4).normal(size=examples)
  return tf.constant(weights, tf.float32)


def _direction(model):
  generator = np.random.default_rng(5)
  return [
    tf.constant(generator.normal(size=variable.shape), tf.float32)
    for variable in model.trainable_variables
  ]


def _flat(tensors):
  return np.concatenate([np.ravel(tf.convert_to_tensor(t)) for t in tensors])


def _one_by_one(model, features, labels):
  """All that is asked for, from a gradient for each example: the definition."""
  losses, gradients = [], []
  for feature, label in zip(features, labels):
    with tf.GradientTape() as tape:
      logits = model(feature[tf.newaxis], training=True)
      loss = tf.nn.sparse_softmax_cross_entropy_with_logits(
        label[tf.newaxis], logits
      )
    gradient = tape.gradient(
      loss,
      model.trainable_variables,
      unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    losses.append(loss[0])
    gradients.append(_flat(gradient).astype(np.float64))
  gradients = np.array(gradients)
  return (
    np.array(losses),
    np.sum(gradients**2, axis=1),
    _weights(len(gradients)).numpy() @ gradients,
    gradients @ _flat(_direction(model)),
  )


@functools.cache
def _expected(name):
  """Of the model's usual batch."""
  model = _model(name)
  return _one_by_one(model, *_batch(model))


def _all(model, features, labels, weights, direction):
  gradients = example_gradients.of_batch(model, features, labels)
  return (
    gradients.losses,
    gradients.squared_norms,
    gradients.weighted_sum(weights),
    gradients.inner_products(direction),
  )


def _computed(model, features, labels, run=_all):
  losses, squared_norms, total, products = run(
    model, features, labels, _weights(len(labels)), _direction(model)
  )
  variables = model.trainable_variables
  assert all(isinstance(part, tf.Tensor) for part in total)
  assert [part.shape for part in total] == [v.shape for v in variables]
  return losses, squared_norms, _flat(total), products


def _check(computed, expected):
  for one, other in zip(computed, expected):
    assert np.shape(one) == np.shape(other)
    tolerance = _ROUNDING * np.max(np.abs(other))
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def _in_a_graph(model, *arguments):
  features, labels, _, direction = arguments
  specs = [
    tf.TensorSpec([None, *features.shape[1:]], features.dtype),
    tf.TensorSpec([None], labels.dtype),
    tf.TensorSpec([None], tf.float32),
    [tf.TensorSpec(part.shape, part.dtype) for part in direction],
  ]
  return tf.function(
    functools.partial(_all, model), input_signature=specs, autograph=False
  )(*arguments)


@pytest.mark.parametrize('name', _MODELS)
def test_all_results_are_those_of_a_gradient_for_each_example(name):
  model = _model(name)
  _check(_computed(model, *_batch(model)), _expected(name))


@pytest.mark.parametrize('name', _MODELS)
def test_graphs_for_any_number_of_examples_compute_the_same(name):
  model = _model(name)
  _check(_computed(model, *_batch(model), run=_in_a_graph), _expected(name))
  # A wrong one is not to hide below the largest.
  squared_norms = _expected(name)[1]
  assert min(squared_norms) > 100 * _ROUNDING * max(squared_norms)


@pytest.mark.parametrize('name', _FAST)
def test_dense_layers_and_convolutions_are_fast(name):
  model = _model(name)
  assert not example_gradients.slow_layers(model, _batch(model)[0])


@pytest.mark.parametrize('name', _SLOW)
def test_the_layers_that_make_a_model_slow_are_named(name):
  model = _model(name)
  slow = example_gradients.slow_layers(model, _batch(model)[0])
  assert slow == _SLOW[name][1]


def test_layers_that_compute_with_fewer_bits_are_slow():
  layer = layers.Dense(_CLASSES, dtype='mixed_bfloat16', name='short')
  model = _sequential((4,), layer)
  assert example_gradients.slow_layers(model, _batch(model)[0]) == ['short']


def test_norms_keep_their_digits_where_positions_cancel_out():
  # The second position takes away all but a thousandth of the first.
  tf.keras.utils.set_random_seed(7)
  model = _sequential(
    (2, 40),
    layers.Dense(30, use_bias=False),
    layers.Lambda(lambda outputs: outputs[:, 0] - outputs[:, 1]),
    layers.Dense(_CLASSES, use_bias=False),
  )
  features, labels = _batch(model)
  changed = features[:, :1] * (1 + 1e-3 * features[:, 1:])
  features = tf.concat([features[:, :1], changed], axis=1)
  gradients = example_gradients.of_batch(model, features, labels)
  expected = _one_by_one(model, features, labels)[1]
  np.testing.assert_allclose(gradients.squared_norms, expected, rtol=1e-4)


@pytest.mark.parametrize(
  ('name', 'loops'), [('mnist_cnn', False), ('depthwise', True)]
)
def test_only_slow_models_loop_over_examples(name, loops):
  model = _model(name)
  traced = tf.function(functools.partial(_all, model)).get_concrete_function(
    *_batch(model), _weights(_EXAMPLES), _direction(model)
  )
  kinds = {operation.type for operation in traced.graph.get_operations()}
  assert bool(kinds & {'While', 'StatelessWhile'}) == loops


@pytest.mark.parametrize(
  'name', ['nested', 'few positions', 'trained activation']
)
@pytest.mark.parametrize('run', [_all, _in_a_graph])
def test_an_empty_batch_has_no_norms_and_a_sum_of_zeros(name, run):
  model = _model(name)
  losses, squared_norms, total, products = _computed(
    model, *_batch(model, examples=0), run=run
  )
  assert np.shape(losses) == np.shape(squared_norms) == (0,)
  assert np.shape(products) == (0,)
  np.testing.assert_array_equal(total, np.zeros(model.count_params()))


@pytest.mark.parametrize('name', ['mnist_cnn', 'few positions', 'shared layer'])
def test_clients_of_different_sizes_can_be_mapped_over(name):
  model = _model(name)
  sizes = [2, 5, 1]
  batches = [_batch(model, size, seed) for seed, size in enumerate(sizes)]
  direction = _direction(model)

  @tf.function
  def of_clients(features, labels, sizes):
    def one_client(client):
      features, labels, size = client
      results = _all(
        model,
        features[:size],
        labels[:size],
        tf.ones([size]),
        direction,
      )
      losses, squared_norms, total, products = results
      padding = [[0, 5 - size]]
      return (
        *(tf.pad(part, padding) for part in (losses, squared_norms, products)),
        tf.concat([tf.reshape(part, [-1]) for part in total], 0),
      )

    return tf.map_fn(
      one_client,
      (features, labels, sizes),
      fn_output_signature=(tf.float32,) * 4,
    )

  features, labels = (
    tf.stack([_padded(part) for part in parts]) for parts in zip(*batches)
  )
  mapped = of_clients(features, labels, tf.constant(sizes))
  for size, batch, *results in zip(sizes, batches, *mapped):
    losses, squared_norms, _, products = _one_by_one(model, *batch)
    expected = (losses, squared_norms, products)
    _check([result[:size] for result in results[:3]], expected)
    with tf.GradientTape() as tape:
      loss = tf.nn.sparse_softmax_cross_entropy_with_logits(
        batch[1], model(batch[0], training=True)
      )
    total = _flat(tape.gradient(loss, model.trainable_variables))
    _check([results[3]], [total])


def _padded(tensor, size=5):
  missing = size - tensor.shape[0]
  return tf.pad(tensor, [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1))


@pytest.mark.parametrize('name', ['mnist_cnn', 'branch', 'normalisation'])
def test_tff_computes_the_same(name):
  model = _model(name)
  features, labels = _batch(model)
  values = [variable.numpy() for variable in model.trainable_variables]
  part_types = [(np.float32, value.shape) for value in values]

  @tff.tensorflow.computation(
    [tff.TensorType(*part) for part in part_types],
    tff.TensorType(np.float32, [None, *features.shape[1:]]),
    tff.TensorType(np.int32, [None]),
    tff.TensorType(np.float32, [None]),
    [tff.TensorType(*part) for part in part_types],
  )
  def compute(values, features, labels, weights, direction):
    model = _MODELS[name]()

    @tf.function
    def assigned(values, *arguments):
      for variable, value in zip(model.trainable_variables, values):
        variable.assign(value)
      return _all(model, *arguments)

    return assigned(list(values), features, labels, weights, list(direction))

  try:
    losses, squared_norms, total, products = compute(
      values,
      features.numpy(),
      labels.numpy(),
      _weights(_EXAMPLES).numpy(),
      [part.numpy() for part in _direction(model)],
    )
  finally:
    _MODELS[name]()  # Keras binds its classes to the last graph mode.
  _check((losses, squared_norms, _flat(total), products), _expected(name))


def test_a_model_is_left_as_it_was():
  model = _model('branch')
  features, labels = _batch(model)
  before = model(features).numpy()
  attributes = [dict(vars(layer)) for layer in model.layers]
  example_gradients.of_batch(model, features, labels)
  np.testing.assert_array_equal(model(features), before)
  for layer, old in zip(model.layers, attributes):
    assert vars(layer).keys() == old.keys()
    assert vars(layer).get('activation') is old.get('activation')


@pytest.mark.parametrize('place', ['call', 'activation'])
def test_layers_are_restored_after_an_exception(place, monkeypatch):
  failing = []

  def activation(inputs):
    if failing:
      raise RuntimeError('on purpose')
    return tf.nn.relu(inputs)

  tf.keras.utils.set_random_seed(6)
  model = _sequential(
    (4,), layers.Dense(5, activation=activation), layers.Dense(_CLASSES)
  )
  features, labels = _batch(model)
  before = model(features).numpy()
  with monkeypatch.context() as context:
    failing.append(True)
    if place == 'call':
      context.setattr(
        layers.Dense, 'call', lambda layer, inputs: activation(inputs)
      )
    with pytest.raises(RuntimeError, match='on purpose'):
      example_gradients.of_batch(model, features, labels)
  failing.clear()
  assert model.layers[0].activation is activation
  assert not any('call' in vars(layer) for layer in model.layers)
  np.testing.assert_array_equal(model(features), before)
  _check(
    _computed(model, features, labels), _one_by_one(model, features, labels)
  )
