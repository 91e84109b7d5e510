"""Keras models of the experiments; their outputs are logits."""

from typing import Optional

import tensorflow as tf


def mnist_cnn(seed: Optional[int] = None) -> tf.keras.Model:
  """The CNN of TF Privacy's MNIST tutorial: 26,010 weights.

  Two convolutions and two dense layers.

  Args:
    seed: Of the initial weights.
  """
  if seed is not None:
    tf.keras.utils.set_random_seed(seed)
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      layers.Input((28, 28, 1)),
      layers.Conv2D(16, 8, strides=2, padding='same', activation='relu'),
      layers.MaxPool2D(2, 1),
      layers.Conv2D(32, 4, strides=2, padding='valid', activation='relu'),
      layers.MaxPool2D(2, 1),
      layers.Flatten(),
      layers.Dense(32, activation='relu'),
      layers.Dense(10),
    ]
  )
