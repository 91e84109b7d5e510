"""Which Keras models can be trained privately."""

from typing import Any

import tensorflow as tf


def check(model: Any) -> None:
  """Raises an error for models that the accounting does not cover."""
  if not isinstance(model, tf.keras.Model):
    raise TypeError(
      'model_fn must return a tf.keras.Model, whose layers tell the gradients '
      f'of single examples. Found {type(model).__name__}. Of a TFF model give '
      'the Keras model that it was made of.'
    )
  for layer in model.submodules:
    if isinstance(layer, tf.keras.layers.BatchNormalization):
      if layer.trainable:
        raise ValueError(
          f'Layer {layer.name!r} is a batch normalisation in training mode: '
          'its moving averages would leave the clients neither clipped nor '
          'noised. Freeze it (trainable=False), or use another normalisation.'
        )
    elif isinstance(layer, tf.keras.__internal__.layers.BaseRandomLayer):
      raise ValueError(
        f'Layer {layer.name!r} is random: the updates that are measured would '
        'not be those that are released. Leave it out.'
      )
