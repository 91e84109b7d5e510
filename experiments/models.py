"""Keras models of the experiments; their outputs are logits."""

import pathlib
from typing import Optional

import tensorflow as tf

from experiments import aptos, downloads
from tf_bdp import validation

RESNET50_FEATURES = 2048
DOWNLOADED_WEIGHTS = 'imagenet'
FINE_TUNE = ('none', 'backbone', 'backbone_with_batch_norm')
_RESNET50_FILE = 'resnet50_weights_tf_dim_ordering_tf_kernels_notop.h5'
_RESNET50_URL = (
  'https://storage.googleapis.com/tensorflow/keras-applications/resnet/'
  + _RESNET50_FILE
)
_RESNET50_MD5 = '4d473c1dd8becc155b73f8504c6f6626'


def mnist_cnn(
  seed: Optional[int] = None,
  activation: str = 'relu',
  filters: int = 16,
  kernel_size: int = 8,
  normalised: bool = False,
) -> tf.keras.Model:
  """The CNN of TF Privacy's MNIST tutorial: 26,010 weights.

  Two convolutions and two dense layers.

  Args:
    seed: Of the initial weights.
    filters: Of the first convolution; the second and the dense layer have twice
      as many. Fewer weights carry less noise.
    activation: Between the layers. Bounded ones such as 'tanh' do better where
      updates are clipped and noised (Papernot et al., "Tempered Sigmoid
      Activations for Deep Learning with Differential Privacy").
    kernel_size: Of the first convolution. The tutorial has 8; 5 takes two
      thirds of the time.
    normalised: Whether each image, and what the last layer gets of it, has mean
      0 and deviation 1, pools average, and all logits are 0 at first. The model
      then learns more in its first rounds, where noise leaves few of them. Each
      image is normalised by itself, which needs no privacy of its own.
  """
  validation.check_positive_integer('filters', filters)
  validation.check_positive_integer('kernel_size', kernel_size)
  _set_seed(seed)
  layers = tf.keras.layers

  def normalisation() -> list[tf.keras.layers.Layer]:
    if not normalised:
      return []
    # With one group it is layer normalisation. Keras' layer of that name, which
    # computes by a fused operation, aborted joint runs on MNIST.
    return [layers.GroupNormalization(1, center=False, scale=False)]

  pool = layers.AveragePooling2D if normalised else layers.MaxPool2D
  return tf.keras.Sequential(
    [
      layers.Input((28, 28, 1)),
      *normalisation(),
      layers.Conv2D(
        filters, kernel_size, strides=2, padding='same', activation=activation
      ),
      pool(2, 1),
      layers.Conv2D(
        2 * filters, 4, strides=2, padding='valid', activation=activation
      ),
      pool(2, 1),
      layers.Flatten(),
      layers.Dense(2 * filters),
      *normalisation(),
      layers.Activation(activation),
      layers.Dense(
        10, kernel_initializer='zeros' if normalised else 'glorot_uniform'
      ),
    ]
  )


def linear(features: int, classes: int = 10) -> tf.keras.Model:
  """One linear layer on features, whose weights are 0 at first.

  Args:
    features: How many.
    classes: How many logits.
  """
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      layers.Input((features,)),
      layers.Dense(classes, use_bias=False, kernel_initializer='zeros'),
    ]
  )


def aptos_head(seed: Optional[int] = None) -> tf.keras.Model:
  """The last layer of a ResNet-50 for APTOS 2019: 10,245 weights.

  It takes features of the frozen rest; see `features`.

  Args:
    seed: Of the initial weights.
  """
  _set_seed(seed)
  inputs = tf.keras.Input((RESNET50_FEATURES,))
  return tf.keras.Model(inputs, _head(inputs))


def resnet50(
  weights: str, fine_tune: str = 'none', seed: Optional[int] = None
) -> tf.keras.Model:
  """A ResNet-50 for APTOS 2019; it takes images of bytes, red first.

  Args:
    weights: Of all but the last layer: a file, or 'imagenet' to download them.
    fine_tune: What is trained apart from the last layer. 'none': nothing; then
      `aptos_head` on cached features is the same and much faster. 'backbone':
      all but the batch normalisations, which stay in inference mode.
      'backbone_with_batch_norm': these, too, which the training refuses because
      their averages would not be private.
    seed: Of the initial weights of the last layer.
  """
  validation.check_choice('fine_tune', fine_tune, FINE_TUNE)
  backbone = resnet50_backbone(weights)
  if fine_tune != 'none':
    for layer in backbone.layers:
      layer.trainable = (
        fine_tune == 'backbone_with_batch_norm'
        or not isinstance(layer, tf.keras.layers.BatchNormalization)
      )
  _set_seed(seed)
  return tf.keras.Model(backbone.inputs, _head(backbone.output))


def resnet50_backbone(weights: str) -> tf.keras.Model:
  """A frozen ResNet-50 without its top, from images to 2048 features.

  Args:
    weights: A file, or 'imagenet' to download them.
  """
  file = resnet50_weights_file(weights)
  inputs = tf.keras.Input((aptos.IMAGE_SIZE, aptos.IMAGE_SIZE, 3))
  try:
    backbone = tf.keras.applications.ResNet50(
      include_top=False,
      weights=file,
      pooling='avg',
      input_tensor=tf.keras.applications.resnet50.preprocess_input(inputs),
    )
  except (OSError, ValueError) as error:
    raise ValueError(
      f'{file} must have the weights of a ResNet-50 without its top, as Keras '
      f'writes them. Found: {error}. Give {_RESNET50_FILE} by '
      '--resnet50_weights=FILE.'
    ) from error
  backbone.trainable = False
  return backbone


def resnet50_weights_file(weights: str) -> str:
  """Returns the file of the weights, downloaded if need be.

  Args:
    weights: A file, or 'imagenet' to download them.

  Raises:
    ValueError: They are not there and cannot be had.
  """
  if weights != DOWNLOADED_WEIGHTS:
    if not pathlib.Path(weights).is_file():
      raise ValueError(
        f'There is no file {weights!r}. Give one with the weights of a '
        'ResNet-50 without its top by --resnet50_weights=FILE, or '
        f'--resnet50_weights={DOWNLOADED_WEIGHTS} to download them.'
      )
    return weights
  cached = pathlib.Path('~/.keras/models', _RESNET50_FILE).expanduser()
  try:
    if not cached.exists():
      downloads.check_reachable(_RESNET50_URL)
    return tf.keras.utils.get_file(
      _RESNET50_FILE,
      _RESNET50_URL,
      cache_subdir='models',
      file_hash=_RESNET50_MD5,
    )
  except Exception as error:  # Keras raises just that.
    raise ValueError(
      f'The weights of ResNet-50 are not in {cached} and could not be '
      f'downloaded ({error}). Get them from {_RESNET50_URL} on a machine with '
      'internet access and pass --resnet50_weights=FILE.'
    ) from error


def _head(features: tf.Tensor) -> tf.Tensor:
  """The last layer, on features of length 1.

  That takes nothing from other images, as standardisation would, and so needs
  no privacy of its own. It bounds the gradient of an image by 2.
  """
  normalised = tf.keras.layers.UnitNormalization()(features)
  return tf.keras.layers.Dense(aptos.CLASSES)(normalised)


def _set_seed(seed: Optional[int]) -> None:
  if seed is not None:
    tf.keras.utils.set_random_seed(seed)
