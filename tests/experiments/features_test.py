"""Cached features: each is computed once, and is the network's."""

import functools
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from experiments import aptos, features
from tests.experiments import aptos_folder

_ROOT = pathlib.Path(__file__).parents[2]
_VARIED = features.Augmentation(versions=3, seed=7)


def _random_weights(file, seed):
  tf.keras.utils.set_random_seed(seed)
  tf.keras.applications.ResNet50(
    include_top=False, weights=None, pooling='avg'
  ).save_weights(file)
  return str(file)


@pytest.fixture(name='weights', scope='module')
def _weights(tmp_path_factory):
  """The real weights, or where there are none random ones."""
  if aptos_folder.REAL_WEIGHTS.exists():
    return str(aptos_folder.REAL_WEIGHTS)
  return _random_weights(tmp_path_factory.mktemp('weights') / 'w.h5', seed=0)


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  """Five images, real ones where there are any."""
  contents = [aptos_folder.png(n, height=240, width=300) for n in range(5)]
  if aptos_folder.REAL.exists():
    train, _ = aptos.list_images(str(aptos_folder.REAL))
    contents = [path.read_bytes() for path in train.paths[:5]]
  return aptos_folder.write(
    tmp_path_factory.mktemp('aptos') / 'data',
    [(f'{n}.png', n, content) for n, content in enumerate(contents)],
  )


@pytest.fixture(name='images')
def _images(folder):
  return aptos.list_images(folder, test_size=0)[0]


@functools.lru_cache
def _network(file):
  return _BUILD_NETWORK(file)


_BUILD_NETWORK = features._network


@pytest.fixture(name='computed', autouse=True)
def _computed(monkeypatch):
  """Lists the images of each part that is computed; parts have two images."""
  computed = []
  compute_part = features._compute_part

  def recorded(images, *args):
    computed.append([path.name for path in images.paths])
    return compute_part(images, *args)

  monkeypatch.setattr(features, '_compute_part', recorded)
  monkeypatch.setattr(features, '_network', _network)
  monkeypatch.setattr(features, '_IMAGES_PER_PART', 2)
  return computed


_PARTS = [['0.png', '1.png'], ['2.png', '3.png'], ['4.png']]


def _parts(cache):
  return sorted(cache.rglob('part-*.npz'))


@pytest.fixture(name='cache', scope='module')
def _cache(tmp_path_factory):
  return tmp_path_factory.mktemp('whole')


@pytest.fixture(name='whole', scope='module')
def _whole(folder, weights, cache):
  """The features of an uninterrupted run with parts of one size."""
  images, _ = aptos.list_images(folder, test_size=0)
  patch = pytest.MonkeyPatch()
  with patch.context() as context:
    context.setattr(features, '_IMAGES_PER_PART', 2)
    context.setattr(features, '_network', _network)
    return features.compute(images, weights, _VARIED, cache)


def test_features_are_those_of_the_network_version_by_version(
  images, weights, whole
):
  # By Keras alone, one image at a time.
  backbone = tf.keras.applications.ResNet50(
    include_top=False, weights=weights, pooling='avg'
  )
  assert whole.shape == (15, 2048)
  assert whole.dtype == np.float32
  for row, (path, content) in enumerate(zip(images.paths, images.hashes)):
    versions = features.make_versions(aptos.read_square(path), content, _VARIED)
    pixels = versions.astype(np.float32)
    expected = backbone(tf.keras.applications.resnet50.preprocess_input(pixels))
    np.testing.assert_allclose(
      whole[row::5], expected, rtol=1e-3, atol=1e-3 * np.max(expected)
    )


def test_what_is_cached_is_not_computed_again(
  images, weights, cache, whole, computed
):
  again = features.compute(images, weights, _VARIED, cache)
  assert not computed
  np.testing.assert_array_equal(again, whole)


def test_an_interrupted_computation_goes_on_where_it_stopped(
  images, weights, whole, computed, monkeypatch, tmp_path
):
  recorded = features._compute_part

  def interrupted(part, *args):
    if part.paths[0].name == '2.png':
      raise KeyboardInterrupt
    return recorded(part, *args)

  with monkeypatch.context() as context:
    context.setattr(features, '_compute_part', interrupted)
    with pytest.raises(KeyboardInterrupt):
      features.compute(images, weights, _VARIED, tmp_path)
  assert computed == _PARTS[:1]
  # What a kill leaves of a part that is being written.
  (cached,) = _parts(tmp_path)
  half = cached.with_name('part-00001.npz.part')
  half.write_bytes(cached.read_bytes()[:100])
  resumed = features.compute(images, weights, _VARIED, tmp_path)
  assert computed == _PARTS
  np.testing.assert_array_equal(resumed, whole)


@pytest.mark.parametrize(
  'damage',
  [
    lambda content: content[: len(content) // 2],
    lambda content: b'',
    lambda content: content[:3000] + b'\x00\x01' + content[3002:],
  ],
  ids=['cut', 'empty', 'changed'],
)
def test_a_damaged_part_is_computed_again_and_no_other(
  images, weights, cache, whole, computed, tmp_path, damage
):
  shutil.copytree(cache, tmp_path, dirs_exist_ok=True)
  part = _parts(tmp_path)[1]
  content = part.read_bytes()
  assert damage(content) != content
  part.write_bytes(damage(content))
  computed.clear()
  repaired = features.compute(images, weights, _VARIED, tmp_path)
  assert computed == _PARTS[1:2]
  np.testing.assert_array_equal(repaired, whole)
  assert part.read_bytes() == content


@pytest.mark.parametrize(
  'augmentation',
  [
    features.Augmentation(versions=2, seed=7),
    features.Augmentation(versions=3, seed=8),
    features.Augmentation(versions=3, seed=7, smallest_crop=0.5),
  ],
)
def test_another_augmentation_is_computed_anew(
  images, weights, computed, tmp_path, augmentation
):
  one = images.part(0, 1)
  plain = features.compute(one, weights, _VARIED, tmp_path)
  other = features.compute(one, weights, augmentation, tmp_path)
  assert computed == [['0.png'], ['0.png']]
  np.testing.assert_allclose(plain[0], other[0], rtol=1e-3, atol=1e-3)
  if augmentation.versions == 3:
    assert not np.allclose(plain[1], other[1], rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_other_contents_of_an_image_or_weights_are_computed_anew(
  weights, computed, tmp_path
):
  def compute(number, weights):
    folder = tmp_path / f'{number}-{len(computed)}'
    contents = aptos_folder.png(number)
    aptos_folder.write(folder, [('eye.png', 0, contents)])
    images, _ = aptos.list_images(str(folder), test_size=0)
    return features.compute(
      images, weights, features.Augmentation(), tmp_path / 'cache'
    )

  first = compute(0, weights)
  other_image = compute(1, weights)
  other_weights = compute(0, _random_weights(tmp_path / 'w.h5', seed=1))
  assert len(computed) == 3
  assert not np.allclose(first, other_image)
  assert not np.allclose(first, other_weights)
  # The folder and the name of the weights' file do not matter.
  copy = tmp_path / 'copy.h5'
  copy.write_bytes(pathlib.Path(weights).read_bytes())
  np.testing.assert_array_equal(compute(0, str(copy)), first)
  assert len(computed) == 3


def test_versions_depend_on_the_image_the_seed_and_nothing_else():
  image = aptos_folder.pixels(0, 224, 224)
  many = features.make_versions(image, 'a1', features.Augmentation(4, 7))
  few = features.make_versions(image, 'a1', features.Augmentation(2, 7))
  np.testing.assert_array_equal(many[:2], few)
  np.testing.assert_array_equal(many[0], image)
  for content, seed in (('a2', 7), ('a1', 8)):
    other = features.make_versions(
      image, content, features.Augmentation(2, seed)
    )
    np.testing.assert_array_equal(other[0], image)
    assert not np.array_equal(other[1], many[1])
  assert len({version.tobytes() for version in many}) == 4


def test_versions_are_crops_of_the_range_in_all_four_orientations():
  # A gradient in each direction tells how large a crop is, and how it lies.
  size = 224
  down, right = np.meshgrid(np.arange(size), np.arange(size), indexing='ij')
  image = np.stack([down, right, down * 0], axis=-1).astype(np.uint8)
  versions = features.make_versions(
    image, 'a1', features.Augmentation(versions=200)
  )[1:].astype(float)
  heights = versions[:, -1, 0, 0] - versions[:, 0, 0, 0]
  widths = versions[:, 0, -1, 1] - versions[:, 0, 0, 1]
  assert {(h > 0, w > 0) for h, w in zip(heights, widths)} == {
    *((True, True), (True, False), (False, True), (False, False)),
  }
  areas = np.abs(heights * widths) / (size - 1) ** 2
  # Two pixels of rounding in each direction.
  assert 0.8 - 0.02 < areas.min() < 0.82
  assert 0.98 < areas.max() <= 1
  assert abs(np.mean(areas) - 0.9) < 0.02


def test_the_data_set_has_versions_for_training_and_plain_tests(
  folder, weights, whole, tmp_path
):
  dataset = features.aptos_features(
    folder, weights, versions=3, seed=7, cache_dir=str(tmp_path), test_size=2
  )
  assert dataset.train_versions == 3
  assert dataset.train_labels.tolist() == [2, 3, 4] * 3
  assert dataset.test_labels.tolist() == [0, 1]
  # Features do not depend on which other images there are.
  expected = whole.reshape(3, 5, 2048)
  tolerance = {'rtol': 1e-3, 'atol': 1e-3 * np.max(whole)}
  np.testing.assert_allclose(
    dataset.train_features.reshape(3, 3, 2048), expected[:, 2:], **tolerance
  )
  np.testing.assert_allclose(
    dataset.test_features, expected[0, :2], **tolerance
  )


@pytest.mark.slow
def test_another_process_waits_for_the_one_that_computes(tmp_path):
  code = (
    'import pathlib, sys\n'
    'from experiments import features\n'
    'with features._alone_in(pathlib.Path(sys.argv[1])):\n'
    '  print("alone", flush=True)\n'
  )
  with features._alone_in(tmp_path):
    process = subprocess.Popen(
      [sys.executable, '-c', code, str(tmp_path)],
      cwd=_ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )
    assert 'waiting' in process.stdout.readline()
    assert process.poll() is None
  output, _ = process.communicate(timeout=30)
  assert output == 'alone\n'


@pytest.mark.parametrize(
  'arguments, sentence',
  [
    ({'versions': 0}, 'versions must be a positive integer. Found 0'),
    ({'seed': -1}, 'seed must be 0 or more. Found -1'),
    ({'smallest_crop': 0.0}, 'above 0 and at most 1. Found 0.0'),
    ({'smallest_crop': 1.1}, 'above 0 and at most 1. Found 1.1'),
  ],
)
def test_a_bad_augmentation_gets_a_sentence(arguments, sentence):
  with pytest.raises(ValueError, match=sentence):
    features.Augmentation(**arguments)


def test_weights_are_missed_before_anything_is_computed(images, tmp_path):
  with pytest.raises(ValueError, match=r'There is no file'):
    features.compute(images, str(tmp_path / 'none.h5'), _VARIED, tmp_path)
  assert not list(tmp_path.iterdir())
