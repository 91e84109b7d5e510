"""The examples of README and docs, executed as they stand there."""

import pathlib
import re

import numpy as np

_ROOT = pathlib.Path(__file__).parents[1]


def _block(containing, file='README.md'):
  text = (_ROOT / file).read_text()
  blocks = re.findall(r'```python\n(.*?)```', text, re.S)
  (block,) = (block for block in blocks if containing in block)
  return block


def test_the_example_of_the_accountant_runs():
  generator = np.random.default_rng(0)
  names = {'rounds': 0.01 * generator.random((5, 200))}
  exec(_block('BayesianGaussianEvent('), names)
  assert 0 < names['epsilon'] < np.inf


def test_the_example_of_a_tff_pipeline_runs():
  import tensorflow as tf
  import tensorflow_federated as tff

  generator = np.random.default_rng(0)

  def client():
    features = generator.normal(size=(8, 3)).astype(np.float32)
    labels = generator.integers(0, 2, 8)
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(4)

  def model_fn():
    layers = [tf.keras.layers.Input((3,)), tf.keras.layers.Dense(2)]
    return tff.learning.models.from_keras_model(
      tf.keras.Sequential(layers),
      loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      input_spec=client().element_spec,
    )

  names = {
    'tff': tff,
    'model_fn': model_fn,
    'rounds': [[client() for _ in range(n)] for n in (4, 5, 2)],
  }
  exec(_block('ClientPrivacyFactory'), names)
  assert 0 < names['epsilon'] < np.inf
  # Keras binds its classes to the kind of graph a model was made in last.
  tf.keras.Sequential([tf.keras.layers.Dense(1)])


def test_the_example_of_a_process_at_instance_level_runs():
  import tensorflow as tf

  from tf_bdp import learning

  generator = np.random.default_rng(0)
  features = generator.normal(size=(120, 3)).astype(np.float32)
  labels = generator.integers(0, 2, 120)
  data = learning.FederatedData(features, labels, np.split(np.arange(120), 4))

  def model_fn():
    layers = [tf.keras.layers.Input((3,)), tf.keras.layers.Dense(2)]
    return tf.keras.Sequential(layers)

  names = {
    'data': data,
    'model_fn': model_fn,
    'rounds': [[0, 1, 2], [3], [1, 2]],
  }
  exec(_block('build_private_process', 'docs/training.md'), names)
  assert 0 < names['epsilon'] < np.inf
  # Keras binds its classes to the kind of graph a model was made in last.
  tf.keras.Sequential([tf.keras.layers.Dense(1)])
