"""Fixed, public feature maps: what a linear layer can learn from under noise.

At a given ε the noise of a round is as long as the square root of the number of
weights. A map that is the same for all data costs no privacy, and a linear
layer on it has far fewer weights than a network that learns its own features
(Tramèr and Boneh, "Differentially Private Learning Needs Better Features (or
Much More Data)", 2021).
"""

import hashlib
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import tensorflow as tf

from experiments import datasets
from tf_bdp import validation
from tf_bdp.training import checkpoint

# Another number makes all that was cached unknown.
_FORMAT = 1
_BATCH_SIZE = 1000


@tf.keras.utils.register_keras_serializable('tf_bdp')
class OrientationHistograms(tf.keras.layers.Layer):
  """Histograms of gradient orientations on a grid (Dalal and Triggs, 2005).

  Each pixel's gradient votes, by its length, for the two orientations next to
  its own, in the cell of the grid that the pixel is in. Square roots of the
  histograms are then centred and scaled to length 1, image by image.
  """

  def __init__(self, grid: int = 4, orientations: int = 8, **options: Any):
    """Makes the layer.

    Args:
      grid: How many cells there are from side to side.
      orientations: How many directions of a full turn are told apart.
      **options: Of every Keras layer.
    """
    super().__init__(trainable=False, **options)
    self.grid = validation.check_positive_integer('grid', grid)
    self.orientations = validation.check_positive_integer(
      'orientations', orientations
    )

  def call(self, images: tf.Tensor) -> tf.Tensor:
    """Returns [images, grid² × orientations] features of [images, h, w, 1]."""
    padded = tf.pad(images[..., 0], [[0, 0], [1, 1], [1, 1]], 'SYMMETRIC')
    across = padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]
    down = padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]
    length = tf.sqrt(across**2 + down**2)
    turn = tf.atan2(down, across) * (self.orientations / (2 * math.pi))
    away = turn[..., tf.newaxis] - tf.range(self.orientations, dtype=turn.dtype)
    # The distance on the circle, in orientations.
    away -= self.orientations * tf.round(away / self.orientations)
    votes = length[..., tf.newaxis] * tf.maximum(1 - tf.abs(away), 0.0)
    pooled = self._by_cell(votes)
    roots = tf.sqrt(tf.reshape(pooled, [tf.shape(images)[0], self.size]))
    centred = roots - tf.reduce_mean(roots, axis=1, keepdims=True)
    return tf.math.l2_normalize(centred, axis=1)

  def _by_cell(self, votes: tf.Tensor) -> tf.Tensor:
    """Adds up votes within the cells of the grid."""
    for axis in (1, 2):
      side = votes.shape[axis]
      edges = [side * i // self.grid for i in range(self.grid + 1)]
      sizes = [end - start for start, end in zip(edges, edges[1:])]
      cells = tf.split(votes, sizes, axis=axis)
      votes = tf.stack([tf.reduce_sum(cell, axis) for cell in cells], axis)
    return votes

  @property
  def size(self) -> int:
    """How many features an image has."""
    return self.grid**2 * self.orientations

  def compute_output_shape(self, input_shape: Any) -> tuple[Any, int]:
    """Returns the shape of the features."""
    return input_shape[0], self.size

  def get_config(self) -> dict[str, Any]:
    """Returns what a saved model needs to make the layer again."""
    return {
      **super().get_config(),
      'grid': self.grid,
      'orientations': self.orientations,
    }


@tf.keras.utils.register_keras_serializable('tf_bdp')
class Pixels(tf.keras.layers.Layer):
  """The pixels themselves, centred and scaled to length 1 image by image."""

  def __init__(self, **options: Any):
    """Makes the layer; takes the options of every Keras layer."""
    super().__init__(trainable=False, **options)

  def call(self, images: tf.Tensor) -> tf.Tensor:
    """Returns [images, h × w × channels] features."""
    flat = tf.reshape(
      images, [tf.shape(images)[0], math.prod(images.shape[1:])]
    )
    centred = flat - tf.reduce_mean(flat, axis=1, keepdims=True)
    return tf.math.l2_normalize(centred, axis=1)


KINDS: dict[str, Callable[..., tf.keras.layers.Layer]] = {
  'orientations': OrientationHistograms,
  'pixels': Pixels,
}


def build(
  kind: str, image_shape: Sequence[int], **options: Any
) -> tf.keras.Model:
  """Returns a feature map as a Keras model that has nothing to train.

  Args:
    kind: One of `KINDS`.
    image_shape: Height, width and channels.
    **options: Of the layer.
  """
  validation.check_choice('features', kind, tuple(KINDS))
  inputs = tf.keras.layers.Input(image_shape)
  return tf.keras.Sequential([inputs, KINDS[kind](**options)])


def apply(
  feature_map: tf.keras.Model, dataset: datasets.Dataset, cache_dir: str
) -> datasets.Dataset:
  """Returns the data set with the features of its images, computed once.

  Args:
    feature_map: What `build` returned.
    dataset: Images.
    cache_dir: Where computed features are kept.
  """
  folder = pathlib.Path(cache_dir).expanduser()
  return dataset._replace(
    train_features=_features(feature_map, dataset.train_features, folder),
    test_features=_features(feature_map, dataset.test_features, folder),
  )


def _features(
  feature_map: tf.keras.Model, images: np.ndarray, folder: pathlib.Path
) -> np.ndarray:
  """Returns the features of images, from the cache if they are there."""
  file = folder / f'map-{_key(feature_map, images)}.npz'
  try:
    return checkpoint.load(file).arrays['features']
  except (FileNotFoundError, ValueError, KeyError):  # None yet, or damaged.
    pass
  predict = tf.function(feature_map, reduce_retracing=True)
  parts = [
    predict(images[start : start + _BATCH_SIZE]).numpy()
    for start in range(0, len(images), _BATCH_SIZE)
  ]
  features = np.concatenate(parts)
  folder.mkdir(parents=True, exist_ok=True)
  checkpoint.save(file, {'features': features}, {})
  return features


def _key(feature_map: tf.keras.Model, images: np.ndarray) -> str:
  """Returns a name for all that the features depend on."""
  (layer,) = feature_map.layers
  options = layer.get_config()
  options.pop('name', None)  # Keras counts layers.
  facts = [_FORMAT, type(layer).__name__, options, images.shape]
  key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
  key.update(np.ascontiguousarray(images))
  return key.hexdigest()[:32]
