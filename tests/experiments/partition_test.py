"""Splits over clients, against what defines them."""

import time

import numpy as np
import pytest

from experiments import datasets, partition

# The training examples of each digit in MNIST.
_MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def _dataset(counts, versions=1):
  labels = np.repeat(np.arange(len(counts)), counts)
  labels = np.random.default_rng(0).permutation(labels)
  examples = len(labels) * versions
  return datasets.Dataset(
    np.arange(examples, dtype=np.float32)[:, np.newaxis],
    np.tile(labels, versions),
    np.zeros((1, 1), np.float32),
    np.zeros(1, np.int64),
    versions,
  )


def _holdings(data):
  return np.stack([data.indices(c) for c in range(data.client_count)])


def _class_counts(data):
  classes = len(np.unique(data.labels))
  return np.stack(
    [
      np.bincount(data.labels[row], minlength=classes)
      for row in _holdings(data)
    ]
  )


@pytest.mark.parametrize('kind', partition.KINDS)
@pytest.mark.parametrize('clients', [100, 1000, 10000])
def test_as_many_clients_as_in_the_paper_load_in_seconds(kind, clients):
  dataset = _dataset(_MNIST_COUNTS)
  start = time.monotonic()
  data = partition.split(dataset, kind, clients, 600, seed=0)
  assert time.monotonic() - start < 10
  holdings = _holdings(data)
  assert holdings.shape == (clients, 600)
  assert holdings.dtype == np.int32
  assert data.features is dataset.train_features
  assert np.all(np.diff(np.sort(holdings, axis=1), axis=1) > 0)


def test_iid_uses_every_example_once_before_any_twice():
  data = partition.split(_dataset(_MNIST_COUNTS), 'iid', 100, 600, seed=0)
  uses = np.bincount(_holdings(data).ravel(), minlength=60000)
  assert np.all(uses == 1)
  # The 100 x 10 counts of classes, about their expectation: chi-squared with
  # 99 x 9 = 891 degrees of freedom, deviation 42; without replacement less.
  expected = 600 * np.array(_MNIST_COUNTS) / 60000
  statistic = np.sum((_class_counts(data) - expected) ** 2 / expected)
  assert 891 - 5 * 42 < statistic < 891 + 5 * 42


def test_iid_repeats_evenly_and_never_within_a_client():
  # 7 does not divide 10, so that hands go over the end of the data.
  data = partition.split(_dataset([4, 6]), 'iid', 100, 7, seed=0)
  holdings = _holdings(data)
  assert all(len(set(row)) == 7 for row in holdings)
  assert np.all(np.bincount(holdings.ravel()) == 70)
  assert len({tuple(sorted(row)) for row in holdings}) > 50


def test_shards_are_of_one_class_and_two_are_dealt_to_a_client():
  data = partition.split(_dataset(_MNIST_COUNTS), 'shards', 100, 600, seed=0)
  counts = _class_counts(data)
  assert np.all(np.isin(counts, [0, 300, 600]))
  for row in _holdings(data):
    for shard in row.reshape(2, 300):
      assert len(np.unique(data.labels[shard])) == 1
  # Of 194 shards 19.4 are of a class, so 18.4 of 193 partners are of the same
  # one: 9.5 of 100 clients. Within five deviations of a binomial.
  assert 1 <= np.count_nonzero(counts == 600) <= 25


def test_shards_of_one_pass_are_disjoint():
  # 97 clients take the 194 whole shards that MNIST has.
  data = partition.split(_dataset(_MNIST_COUNTS), 'shards', 97, 600, seed=0)
  uses = np.bincount(_holdings(data).ravel(), minlength=60000)
  assert uses.max() == 1
  held = np.sum(_class_counts(data), axis=0)
  assert held.tolist() == [count // 300 * 300 for count in _MNIST_COUNTS]


def test_shards_leave_out_others_each_time_and_are_cut_anew():
  data = partition.split(_dataset([25, 25]), 'shards', 200, 20, seed=0)
  holdings = _holdings(data)
  # 5 of each 25 are left out of a pass; of 100 passes, 80 hold an example,
  # with a deviation of 4.
  uses = np.bincount(holdings.ravel(), minlength=50)
  assert np.all(np.abs(uses - 80) < 5 * 4)
  assert len({tuple(sorted(row)) for row in holdings.reshape(-1, 10)}) > 390


def test_an_odd_shard_is_left_out():
  data = partition.split(_dataset([30]), 'shards', 4, 20, seed=0)
  assert all(len(set(row)) == 20 for row in _holdings(data))


@pytest.mark.parametrize('beta', [0.1, 1.0])
def test_dirichlet_mixes_have_the_moments_of_the_distribution(beta):
  counts = np.array([2000, 3000, 5000])
  data = partition.split(
    _dataset(counts), 'dirichlet', 4000, 100, seed=0, dirichlet_beta=beta
  )
  shares = _class_counts(data) / 100
  # Mean p; the variance of Dirichlet and multinomial together is
  # p (1 - p) (a + n) / (n (a + 1)), for a = 3 beta and n = 100.
  prior = counts / 10000
  total = 3 * beta
  variance = prior * (1 - prior) * (total + 100) / (100 * (total + 1))
  np.testing.assert_allclose(
    shares.mean(axis=0), prior, atol=5 * np.sqrt(variance.max() / 4000)
  )
  np.testing.assert_allclose(shares.var(axis=0), variance, rtol=0.1)


def test_dirichlet_is_between_single_classes_and_iid():
  def classes(beta):
    data = partition.split(
      _dataset([1000] * 10), 'dirichlet', 100, 100, 0, dirichlet_beta=beta
    )
    return np.mean(np.count_nonzero(_class_counts(data), axis=1))

  assert classes(1e-6) == 1
  assert 2 < classes(0.1) < 6
  # All but (1 - 1 / 10)^100 of the classes, as in independent draws.
  assert classes(1e6) > 9.99


def test_dirichlet_uses_a_class_evenly_and_never_twice_within_a_client():
  dataset = _dataset([30, 50])
  data = partition.split(dataset, 'dirichlet', 300, 40, 0, dirichlet_beta=0.3)
  holdings = _holdings(data)
  assert all(len(set(row)) == 40 for row in holdings)
  uses = np.bincount(holdings.ravel(), minlength=80)
  for label in (0, 1):
    of_class = uses[dataset.train_labels == label]
    assert of_class.max() - of_class.min() <= 1


def test_dirichlet_fills_up_with_other_classes_where_one_has_too_few():
  data = partition.split(
    _dataset([30, 50]), 'dirichlet', 300, 60, 0, dirichlet_beta=0.01
  )
  counts = _class_counts(data)
  assert np.all(counts.sum(axis=1) == 60)
  # Those that want one class get all there is of it.
  assert {tuple(row) for row in counts} >= {(30, 30), (10, 50)}


@pytest.mark.parametrize('kind', partition.KINDS)
def test_no_client_holds_two_versions_of_an_image_and_all_are_used(kind):
  dataset = _dataset([60, 140], versions=4)
  data = partition.split(dataset, kind, 40, 50, seed=0)
  holdings = _holdings(data)
  images = holdings % 200
  assert all(len(set(row)) == 50 for row in images)
  # Each version in its turn: an image's uses are equally many of each.
  uses = np.bincount(holdings.ravel(), minlength=800).reshape(4, 200)
  assert np.all(uses.max(axis=0) - uses.min(axis=0) <= 1)
  assert np.array_equal(data.labels[holdings], data.labels[images])


def test_a_single_use_takes_all_versions_alike():
  dataset = _dataset([2000], versions=4)
  data = partition.split(dataset, 'iid', 1, 2000, seed=0)
  uses = np.bincount(data.indices(0) // 2000, minlength=4)
  # Binomial: 500 with a deviation of 19.4.
  assert np.all(np.abs(uses - 500) < 5 * 19.4)


@pytest.mark.parametrize('kind', partition.KINDS)
def test_a_split_is_given_by_its_seed(kind):
  dataset = _dataset([50, 50], versions=2)
  first, again, other = (
    _holdings(partition.split(dataset, kind, 10, 20, seed))
    for seed in (1, 1, 2)
  )
  np.testing.assert_array_equal(first, again)
  assert not np.array_equal(first, other)


@pytest.mark.parametrize(
  'kind, share', [('iid', 7), ('shards', 6), ('dirichlet', 7)]
)
def test_zero_examples_mean_an_equal_share(kind, share):
  data = partition.split(_dataset([50, 50]), kind, 14, 0, seed=0)
  assert _holdings(data).shape == (14, share)


def test_an_equal_share_of_versions_is_at_most_all_images():
  data = partition.split(_dataset([5, 5], versions=4), 'iid', 2, 0, seed=0)
  assert _holdings(data).shape == (2, 10)


@pytest.mark.parametrize(
  'arguments, sentence',
  [
    (('random', 5, 10, 0), "partition must be one of .*Found 'random'"),
    (('iid', 0, 10, 0), 'clients must be a positive integer. Found 0'),
    (('iid', 5, -1, 0), 'examples_per_client must be a positive .* Found -1'),
    (('iid', 101, 0, 0), 'There are 100 examples for 101 clients'),
    (('shards', 51, 0, 0), 'There are 100 examples for 51 clients'),
    (('iid', 5, 101, 0), 'at most 100, .* Found 101'),
    (('shards', 5, 11, 0), 'a multiple of 2, .* Found 11'),
    (('shards', 5, 60, 0), 'Class 0 has 20 examples and a shard 30.*most 40'),
    (('dirichlet', 5, 10, 0, 0.0), 'dirichlet_beta must be positive'),
    (('dirichlet', 5, 10, 0, float('nan')), 'dirichlet_beta must be positive'),
  ],
)
def test_bad_arguments_get_a_sentence(arguments, sentence):
  with pytest.raises(ValueError, match=sentence):
    partition.split(_dataset([20, 80]), *arguments)
