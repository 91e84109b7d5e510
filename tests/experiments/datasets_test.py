"""Data sets, and the validation data that are held out of them."""

import numpy as np
import pytest

from experiments import datasets, downloads


def _dataset(versions=1):
  """Features that tell the image and the version, for 10, 20 and 70 images."""
  labels = np.random.default_rng(0).permutation(
    np.repeat([0, 1, 2], [10, 20, 70])
  )
  features = [100 * version + np.arange(100) for version in range(versions)]
  return datasets.Dataset(
    np.concatenate(features).astype(np.float32)[:, np.newaxis],
    np.tile(labels, versions),
    np.full((5, 1), -1.0, np.float32),
    np.zeros(5, np.int64),
    versions,
  )


def test_validation_takes_the_same_share_of_each_class_and_no_test_data():
  held_out = datasets.hold_out_validation(_dataset(), 0.3, seed=1)
  assert np.bincount(held_out.test_labels).tolist() == [3, 6, 21]
  assert np.bincount(held_out.train_labels).tolist() == [7, 14, 49]
  both = np.concatenate([held_out.train_features, held_out.test_features])
  np.testing.assert_array_equal(np.sort(both[:, 0]), np.arange(100))


def test_labels_stay_with_their_examples():
  dataset = _dataset()
  held_out = datasets.hold_out_validation(dataset, 0.3, seed=1)
  for features, labels in (
    (held_out.train_features, held_out.train_labels),
    (held_out.test_features, held_out.test_labels),
  ):
    images = features[:, 0].astype(int)
    np.testing.assert_array_equal(dataset.train_labels[images], labels)


def test_all_versions_of_an_image_fall_on_the_same_side():
  dataset = _dataset(versions=3)
  held_out = datasets.hold_out_validation(dataset, 0.2, seed=1)
  validated = held_out.test_features[:, 0]
  trained = held_out.train_features[:, 0]
  assert validated.max() < 100  # Plain ones only.
  assert len(trained) == 3 * 80
  assert held_out.train_versions == 3
  assert not set(validated) & set(trained % 100)
  # What remains is again all images in one version, then in the next.
  by_version = trained.reshape(3, 80)
  np.testing.assert_array_equal(by_version, by_version[0] + [[0], [100], [200]])


def test_validation_is_chosen_by_the_seed():
  first, again, other = (
    datasets.hold_out_validation(_dataset(), 0.3, seed).test_features
    for seed in (1, 1, 2)
  )
  np.testing.assert_array_equal(first, again)
  assert not np.array_equal(first, other)


@pytest.mark.parametrize(
  'share, sentence',
  [
    (0, 'above 0 and below 1. Found 0'),
    (1.0, 'above 0 and below 1. Found 1.0'),
    (float('nan'), 'above 0 and below 1. Found nan'),
    (0.001, 'leaves 0 for validation and 100 for training'),
    (0.999, 'leaves 100 for validation and 0 for training'),
  ],
)
def test_a_share_that_leaves_one_side_empty_gets_a_sentence(share, sentence):
  with pytest.raises(ValueError, match=sentence):
    datasets.hold_out_validation(_dataset(), share, seed=0)


def test_digits_are_images_in_the_unit_interval_without_overlap():
  dataset = datasets.load('digits')
  assert dataset.train_features.shape == (1500, 28, 28, 1)
  assert dataset.test_features.shape == (297, 28, 28, 1)
  assert dataset.train_features.min() == 0
  assert dataset.train_features.max() == 1
  train = {image.tobytes() for image in dataset.train_features}
  assert not train & {image.tobytes() for image in dataset.test_features}


def test_an_unknown_name_gets_a_sentence():
  with pytest.raises(
    ValueError, match=r"dataset must be one of .*Found 'cifar'"
  ):
    datasets.load('cifar')


def test_data_that_are_not_there_get_a_sentence_how_to_get_them(
  monkeypatch, tmp_path
):
  def unreachable(url):
    raise OSError('no route')

  monkeypatch.setattr(downloads, 'check_reachable', unreachable)
  with pytest.raises(ValueError, match=r'no route.*pass --data_dir=DIR'):
    datasets.load('mnist', str(tmp_path))
