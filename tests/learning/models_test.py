"""Which Keras models can be trained privately."""

import pytest
import tensorflow as tf

from tf_bdp.learning import models


@pytest.mark.parametrize(
  ('layer', 'sentence'),
  [
    (tf.keras.layers.BatchNormalization, 'batch normalisation in training'),
    (lambda: tf.keras.layers.Dropout(0.5), 'is random'),
  ],
)
def test_layers_that_the_accounting_does_not_cover_are_refused(layer, sentence):
  layers = [tf.keras.layers.Flatten(), layer(), tf.keras.layers.Dense(2)]
  with pytest.raises(ValueError, match=sentence):
    models.check(tf.keras.Sequential(layers))


def test_a_frozen_batch_normalisation_is_fine():
  frozen = tf.keras.layers.BatchNormalization(trainable=False)
  layers = [tf.keras.layers.Flatten(), frozen, tf.keras.layers.Dense(2)]
  models.check(tf.keras.Sequential(layers))


def test_what_is_no_keras_model_is_refused():
  with pytest.raises(
    TypeError, match=r'must return a tf.keras.Model.*Found int'
  ):
    models.check(3)
