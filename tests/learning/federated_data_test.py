"""Tests of who holds which examples."""

import numpy as np
import pytest

from tf_bdp.learning import federated_data

_FEATURES = np.arange(24, dtype=np.float32).reshape(6, 2, 2)
_LABELS = np.arange(6, dtype=np.int64) % 3
_CLIENTS = [np.array([4, 0]), np.array([1]), np.array([], int), np.arange(6)]


def _data():
  return federated_data.FederatedData(_FEATURES, _LABELS, _CLIENTS)


def test_a_client_has_its_own_examples_in_its_own_order():
  data = _data()
  assert data.client_count == 4
  np.testing.assert_array_equal(data.indices(0), [4, 0])


@pytest.mark.parametrize('clients', [[0, 1], [3, 2, 0], [1, 1], [2]])
def test_examples_are_padded_to_the_most_of_the_clients(clients):
  rows = [_CLIENTS[client] for client in clients]
  indices, sizes = federated_data.padded(rows)
  np.testing.assert_array_equal(sizes, [len(row) for row in rows])
  assert sizes.dtype == np.int32
  assert indices.shape == (len(clients), max(sizes))
  for found, own in zip(indices, rows):
    np.testing.assert_array_equal(found[: len(own)], own)


def test_nobody_has_nothing():
  indices, sizes = federated_data.padded([])
  assert indices.shape == (0, 0)
  assert sizes.shape == (0,)


def test_the_arrays_are_not_copied():
  data = _data()
  assert data.features is _FEATURES
  assert data.labels is _LABELS


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_features_that_are_not_finite_are_refused(bad):
  features = _FEATURES.copy()
  features[3, 1, 0] = bad
  with pytest.raises(ValueError, match='features must be finite'):
    federated_data.FederatedData(features, _LABELS, _CLIENTS)


def test_features_and_labels_must_be_equally_many():
  with pytest.raises(ValueError, match=r'equally many. Found 6 and 5'):
    federated_data.FederatedData(_FEATURES, _LABELS[:5], _CLIENTS)


def test_there_must_be_a_client():
  with pytest.raises(ValueError, match=r'at least one client. Found none'):
    federated_data.FederatedData(_FEATURES, _LABELS, [])


@pytest.mark.parametrize(
  'labels, found',
  [
    (np.eye(3, dtype=np.float32)[_LABELS], r'float32 of shape \(6, 3\)'),
    (np.eye(3, dtype=int)[_LABELS], r'int64 of shape \(6, 3\)'),
    (_LABELS.astype(float), r'float64 of shape \(6,\)'),
    (_LABELS[:, np.newaxis], r'int64 of shape \(6, 1\)'),
  ],
  ids=['one-hot', 'one-hot integers', 'floats', 'a column'],
)
def test_labels_that_are_not_one_integer_each_are_refused(labels, found):
  sentence = f'one integer for each example. Found {found}.* np.argmax'
  with pytest.raises(ValueError, match=sentence):
    federated_data.FederatedData(_FEATURES, labels, _CLIENTS)


@pytest.mark.parametrize('client', [-1, 4, 100])
def test_a_client_that_there_is_not_is_refused(client):
  sentence = f'There are 4 clients, numbered from 0. Found client {client}'
  with pytest.raises(ValueError, match=sentence):
    _data().indices(client)


@pytest.mark.parametrize('index', [-1, 6])
def test_examples_that_there_are_not_are_refused(index):
  clients = [np.array([0]), np.array([2, index])]
  sentence = 'Client 1 holds examples that there are not.* from 0 to 5'
  with pytest.raises(ValueError, match=sentence):
    federated_data.FederatedData(_FEATURES, _LABELS, clients)


def test_holdings_are_how_many_examples_each_client_has():
  assert _data().holdings == [2, 1, 0, 6]


def test_participants_come_first_and_nobody_twice():
  first = federated_data.participants_first
  assert first([3, 1], [0, 1, 2, 3]) == [3, 1, 0, 2]
  assert first([], [2]) == [2]
  assert first([2], []) == [2]
