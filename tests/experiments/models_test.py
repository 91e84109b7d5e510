"""The models: what is trained in them, and where their weights come from."""

import time

import numpy as np
import pytest
import tensorflow as tf

from experiments import downloads, models
from tests.experiments import aptos_folder
from tf_bdp.learning import losses
from tf_bdp.learning import models as model_checks


@pytest.fixture(name='weights', scope='module')
def _weights(tmp_path_factory):
  """The real weights, or where there are none random ones."""
  if aptos_folder.REAL_WEIGHTS.exists():
    return str(aptos_folder.REAL_WEIGHTS)
  file = tmp_path_factory.mktemp('weights') / 'resnet50.h5'
  tf.keras.applications.ResNet50(
    include_top=False, weights=None, pooling='avg'
  ).save_weights(file)
  return str(file)


def _images(count=2):
  size = 224
  return np.stack([aptos_folder.pixels(n, size, size) for n in range(count)])


def test_the_mnist_cnn_has_the_weights_of_the_tutorial():
  assert models.mnist_cnn(0).count_params() == 26010


def test_a_bounded_activation_changes_the_layers_but_not_the_weights():
  relu, tanh = models.mnist_cnn(3), models.mnist_cnn(3, activation='tanh')
  for ours, theirs in zip(relu.get_weights(), tanh.get_weights()):
    np.testing.assert_array_equal(ours, theirs)
  used = [
    layer.activation.__name__
    for layer in tanh.layers
    if hasattr(layer, 'activation')
  ]
  assert used == ['tanh', 'tanh', 'linear', 'tanh', 'linear']


def test_a_normalised_cnn_sees_neither_brightness_nor_contrast_of_an_image():
  model = models.mnist_cnn(3, activation='tanh', normalised=True)
  model_checks.check(model)
  images = np.random.default_rng(0).uniform(0, 1, (5, 28, 28, 1))
  np.testing.assert_array_equal(model(images), np.zeros((5, 10)))
  model.set_weights(
    [
      np.random.default_rng(n).normal(0, 0.1, w.shape)
      for n, w in enumerate(model.get_weights())
    ]
  )
  logits = model(images)
  assert np.min(np.std(logits, axis=0)) > 1e-3
  np.testing.assert_allclose(model(4 * images - 1), logits, atol=1e-2)
  # Each by itself: what else is in the batch does not matter.
  np.testing.assert_allclose(model(images[2:3]), logits[2:3], atol=1e-5)
  # What the last layer gets.
  activation = model.layers[-2]
  features = tf.keras.Model(model.inputs, activation.input)(images)
  np.testing.assert_allclose(np.mean(features, axis=1), 0, atol=1e-5)
  np.testing.assert_allclose(np.std(features, axis=1), 1, atol=2e-2)


def test_a_normalised_cnn_has_as_many_weights():
  plain, other = models.mnist_cnn(0), models.mnist_cnn(0, normalised=True)
  assert plain.count_params() == other.count_params()


@pytest.mark.parametrize('model_fn', [models.mnist_cnn, models.aptos_head])
def test_initial_weights_are_given_by_the_seed(model_fn):
  first, again, other = (model_fn(s).get_weights()[0] for s in (1, 1, 2))
  np.testing.assert_array_equal(first, again)
  assert not np.array_equal(first, other)


def test_the_head_is_softmax_regression_on_scaled_features():
  model = models.aptos_head(0)
  model_checks.check(model)
  assert [v.shape for v in model.trainable_variables] == [(2048, 5), (5,)]
  features = np.random.default_rng(0).uniform(0, 3, (4, 2048))
  kernel, bias = model.get_weights()
  scaled = features / np.linalg.norm(features, axis=1, keepdims=True)
  np.testing.assert_allclose(
    model(features.astype(np.float32)), scaled @ kernel + bias, atol=1e-5
  )


def test_without_fine_tuning_the_network_is_the_head_on_its_features(weights):
  network = models.resnet50(weights, fine_tune='none', seed=5)
  model_checks.check(network)
  head = models.aptos_head(5)
  ours, theirs = network.trainable_variables, head.trainable_variables
  assert len(ours) == len(theirs) == 2
  for variable, value in zip(ours, theirs):
    np.testing.assert_array_equal(variable, value)
  # Features by Keras alone.
  backbone = tf.keras.applications.ResNet50(
    include_top=False, weights=weights, pooling='avg'
  )
  images = _images()
  features = backbone(
    tf.keras.applications.resnet50.preprocess_input(images.astype(np.float32))
  )
  np.testing.assert_allclose(
    network(images), head(features), rtol=1e-4, atol=1e-5
  )


def test_the_backbone_is_trained_with_its_normalisations_at_rest(weights):
  network = models.resnet50(weights, fine_tune='backbone')
  model_checks.check(network)
  # 53 convolutions and the last layer, each with weights and biases.
  assert len(network.trainable_variables) == 2 * 54
  averages = [v.numpy() for v in network.non_trainable_variables]
  assert len(averages) == 4 * 53
  images = _images()
  with tf.GradientTape() as tape:
    logits = network(images, training=True)
    loss = losses.mean_loss(tf.constant([0, 4], tf.int64), logits)
  gradients = tape.gradient(loss, network.trainable_variables)
  assert all(np.any(gradient) for gradient in gradients[::2])
  np.testing.assert_allclose(
    logits, network(images, training=False), rtol=1e-4, atol=1e-5
  )
  for before, after in zip(averages, network.non_trainable_variables):
    np.testing.assert_array_equal(before, after)


def test_trained_normalisations_are_refused_by_name(weights):
  network = models.resnet50(weights, fine_tune='backbone_with_batch_norm')
  with pytest.raises(ValueError, match="Layer 'conv1_bn' is a batch normalis"):
    model_checks.check(network)


def test_an_unknown_way_of_fine_tuning_gets_a_sentence(weights):
  with pytest.raises(ValueError, match=r"fine_tune must be .*Found 'all'"):
    models.resnet50(weights, fine_tune='all')


def test_weights_that_are_not_there_get_a_sentence(tmp_path):
  with pytest.raises(ValueError, match=r'There is no file .*nets\.h5.*=FILE'):
    models.resnet50(str(tmp_path / 'nets.h5'))


def test_weights_of_something_else_get_a_sentence(tmp_path):
  text = tmp_path / 'text.h5'
  text.write_text('no weights')
  other = tmp_path / 'other.h5'
  models.mnist_cnn(0).save_weights(other)
  for file in (text, other):
    with pytest.raises(ValueError, match=r'must have the weights of a ResNet'):
      models.resnet50_backbone(str(file))


def test_weights_that_cannot_be_downloaded_get_a_sentence_at_once(
  monkeypatch, tmp_path
):
  def unreachable(url):
    assert url.startswith('https://')
    raise OSError('no route')

  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.setattr(downloads, 'check_reachable', unreachable)
  start = time.monotonic()
  with pytest.raises(ValueError, match=r'no route.*--resnet50_weights=FILE'):
    models.resnet50('imagenet')
  assert time.monotonic() - start < 5


def test_a_download_that_breaks_off_gets_the_sentence_too(
  monkeypatch, tmp_path
):
  def broken(*args, **kwargs):
    raise Exception('URL fetch failure')

  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.setattr(downloads, 'check_reachable', lambda url: None)
  monkeypatch.setattr(tf.keras.utils, 'get_file', broken)
  with pytest.raises(ValueError, match=r'URL fetch.*--resnet50_weights=FILE'):
    models.resnet50('imagenet')
