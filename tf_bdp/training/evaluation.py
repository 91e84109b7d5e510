"""Accuracy and loss of a model on held-out examples."""

import pathlib
from collections.abc import Sequence
from typing import Optional

import numpy as np
import tensorflow as tf

from tf_bdp.learning import losses

_BATCH_SIZE = 1000


class Evaluator:
  """Evaluates trainable weights, and saves the model that has them."""

  def __init__(
    self,
    model: tf.keras.Model,
    features: np.ndarray,
    labels: np.ndarray,
    feature_map: Optional[tf.keras.Model] = None,
  ):
    """Takes the model and the examples.

    Args:
      model: A Keras model whose outputs are logits.
      features: Its inputs.
      labels: Their classes.
      feature_map: What the features were made by, beforehand; a saved model
        does that itself.
    """
    self._model = model
    self._features = features
    self._labels = labels
    self._feature_map = feature_map
    self._predict = tf.function(model, reduce_retracing=True)

  def evaluate(self, weights: Sequence[np.ndarray]) -> dict[str, float]:
    """Returns 'accuracy' and 'loss'."""
    self._assign(weights)
    logits = np.concatenate(
      [
        self._predict(self._features[start : start + _BATCH_SIZE]).numpy()
        for start in range(0, len(self._labels), _BATCH_SIZE)
      ]
    )
    correct = np.argmax(logits, axis=-1) == self._labels
    loss = losses.LOSS(self._labels, logits)
    return {'accuracy': float(np.mean(correct)), 'loss': float(loss)}

  def save(self, weights: Sequence[np.ndarray], path: pathlib.Path) -> None:
    """Writes the model as a SavedModel."""
    self._assign(weights)
    model = self._model
    if self._feature_map is not None:
      images = self._feature_map
      model = tf.keras.Model(images.inputs, model(images.output))
    model.save(path)

  def _assign(self, weights: Sequence[np.ndarray]) -> None:
    for variable, value in zip(self._model.trainable_variables, weights):
      variable.assign(value)
