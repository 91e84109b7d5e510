"""Feature maps against naive versions, in saved models, and from the cache."""

import math

import numpy as np
import pytest
import tensorflow as tf

from experiments import datasets, feature_maps, models
from tf_bdp.training import evaluation


def _naive_histograms(image, grid, orientations):
  """Returns the features of one image, pixel by pixel."""
  height, width = image.shape
  histograms = np.zeros((grid, grid, orientations))
  for y in range(height):
    for x in range(width):
      across = image[y, min(x + 1, width - 1)] - image[y, max(x - 1, 0)]
      down = image[min(y + 1, height - 1), x] - image[max(y - 1, 0), x]
      turn = math.atan2(down, across) / (2 * math.pi) * orientations
      low = math.floor(turn)
      rows = [cell for cell in range(grid) if y >= height * cell // grid]
      columns = [cell for cell in range(grid) if x >= width * cell // grid]
      votes = histograms[rows[-1], columns[-1]]
      length = math.hypot(across, down)
      votes[low % orientations] += length * (low + 1 - turn)
      votes[(low + 1) % orientations] += length * (turn - low)
  roots = np.sqrt(histograms.ravel())
  roots -= roots.mean()
  return roots / np.linalg.norm(roots)


@pytest.mark.parametrize('grid, orientations', [(4, 8), (7, 8), (3, 5), (1, 3)])
def test_histograms_are_those_of_a_naive_version(grid, orientations):
  images = np.random.default_rng(0).uniform(0, 1, (3, 28, 26, 1))
  layer = feature_maps.OrientationHistograms(grid, orientations)
  expected = [
    _naive_histograms(image[..., 0], grid, orientations) for image in images
  ]
  found = layer(images.astype(np.float32)).numpy()
  assert found.shape == (3, layer.size)
  np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize('kind', tuple(feature_maps.KINDS))
def test_brightness_and_contrast_do_not_matter_and_length_is_one(kind):
  images = np.random.default_rng(1).uniform(0, 1, (4, 8, 8, 1)).astype('f4')
  feature_map = feature_maps.build(kind, (8, 8, 1))
  found = feature_map(images).numpy()
  np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
  np.testing.assert_allclose(
    feature_map(0.5 * images + 0.2).numpy(), found, atol=1e-4
  )


@pytest.mark.parametrize('kind', tuple(feature_maps.KINDS))
def test_an_empty_image_has_features_of_zero(kind):
  feature_map = feature_maps.build(kind, (8, 8, 1))
  found = feature_map(np.zeros((1, 8, 8, 1), np.float32)).numpy()
  np.testing.assert_array_equal(found, 0)


@pytest.mark.parametrize('kind', tuple(feature_maps.KINDS))
def test_there_is_nothing_to_train(kind):
  assert not feature_maps.build(kind, (8, 8, 1)).trainable_variables


@pytest.mark.parametrize('options', [{'grid': 0}, {'orientations': -1}])
def test_impossible_grids_are_refused(options):
  with pytest.raises(ValueError, match=next(iter(options))):
    feature_maps.OrientationHistograms(**options)


def _dataset():
  generator = np.random.default_rng(2)
  images = generator.uniform(0, 1, (30, 8, 8, 1)).astype(np.float32)
  labels = np.arange(30) % 10
  return datasets.Dataset(images[:20], labels[:20], images[20:], labels[20:])


def test_features_are_computed_once(tmp_path, monkeypatch):
  feature_map = feature_maps.build('orientations', (8, 8, 1), grid=2)
  first = feature_maps.apply(feature_map, _dataset(), str(tmp_path))
  np.testing.assert_allclose(
    first.train_features, feature_map(_dataset().train_features), atol=1e-6
  )
  again = feature_maps.build('orientations', (8, 8, 1), grid=2)
  monkeypatch.setattr(tf, 'function', None)
  second = feature_maps.apply(again, _dataset(), str(tmp_path))
  np.testing.assert_array_equal(second.train_features, first.train_features)
  np.testing.assert_array_equal(second.test_features, first.test_features)


def test_other_images_or_options_are_not_taken_from_the_cache(tmp_path):
  def apply(dataset, **options):
    feature_map = feature_maps.build('orientations', (8, 8, 1), **options)
    return feature_maps.apply(feature_map, dataset, str(tmp_path))

  first = apply(_dataset(), grid=2)
  changed = _dataset()
  changed.train_features[0, 0, 0, 0] += 0.5
  other = apply(changed, grid=2)
  assert not np.array_equal(other.train_features, first.train_features)
  assert apply(_dataset(), grid=4).train_features.shape == (20, 128)


def test_a_damaged_cache_is_computed_anew(tmp_path):
  feature_map = feature_maps.build('pixels', (8, 8, 1))
  first = feature_maps.apply(feature_map, _dataset(), str(tmp_path))
  for file in tmp_path.iterdir():
    file.write_bytes(file.read_bytes()[:100])
  second = feature_maps.apply(feature_map, _dataset(), str(tmp_path))
  np.testing.assert_array_equal(second.train_features, first.train_features)


def test_a_saved_model_takes_images(tmp_path):
  feature_map = feature_maps.build('orientations', (8, 8, 1), grid=2)
  dataset = feature_maps.apply(feature_map, _dataset(), str(tmp_path))
  evaluator = evaluation.Evaluator(
    models.linear(32), dataset.test_features, dataset.test_labels, feature_map
  )
  weights = np.random.default_rng(3).normal(size=(32, 10)).astype(np.float32)
  evaluator.save([weights], tmp_path / 'model')
  loaded = tf.keras.models.load_model(tmp_path / 'model')
  np.testing.assert_allclose(
    loaded(_dataset().test_features),
    dataset.test_features @ weights,
    rtol=1e-4,
    atol=1e-5,
  )
