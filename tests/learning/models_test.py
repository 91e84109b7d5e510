"""Tests of which models are refused, and with which sentences."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.mechanisms import builders
from tf_bdp import learning
from tf_bdp.learning import models

_LAYERS = tf.keras.layers


def _keras_model():
  return tf.keras.Sequential([_LAYERS.Input((3,)), _LAYERS.Dense(2)])


def _tff_model():
  return tff.learning.models.from_keras_model(
    _keras_model(),
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    input_spec=(
      tf.TensorSpec([None, 3], tf.float32),
      tf.TensorSpec([None], tf.int64),
    ),
  )


@pytest.mark.parametrize(
  'layer, sentence',
  [
    (_LAYERS.BatchNormalization, 'batch normalisation in training'),
    (lambda: _LAYERS.Dropout(0.5), 'is random'),
    (lambda: _LAYERS.GaussianNoise(0.5), 'is random'),
    # Also inside of another.
    (
      lambda: tf.keras.Sequential([_LAYERS.Dense(2), _LAYERS.Dropout(0.5)]),
      'is random',
    ),
  ],
)
def test_layers_that_the_accounting_does_not_cover_are_refused(layer, sentence):
  layers = [_LAYERS.Flatten(), layer(), _LAYERS.Dense(2)]
  with pytest.raises(ValueError, match=sentence):
    models.check(tf.keras.Sequential(layers))


def test_a_frozen_batch_normalisation_is_fine():
  frozen = _LAYERS.BatchNormalization(trainable=False)
  layers = [_LAYERS.Flatten(), frozen, _LAYERS.Dense(2)]
  models.check(tf.keras.Sequential(layers))


def test_a_model_of_tff_is_refused_with_a_way_out():
  sentence = 'must return a tf.keras.Model.*give the Keras model that it was'
  with pytest.raises(TypeError, match=sentence):
    models.check(_tff_model())


def test_an_instance_process_of_a_tff_model_is_refused():
  data = learning.FederatedData(
    np.zeros((6, 3), np.float32), np.zeros(6, int), [np.arange(6)]
  )
  batches = learning.ExampleBatches(
    data,
    builders.make_mechanism('instance_parallel'),
    learning.Algorithm(),
    learning.Sampler(1),
  )
  with pytest.raises(TypeError, match=r'must return a tf\.keras\.Model'):
    learning.build_private_process(_tff_model, batches)
  learning.build_private_process(_keras_model, batches)
