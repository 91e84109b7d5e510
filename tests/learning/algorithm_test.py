"""Tests of how clients and server learn, apart from privacy."""

import dataclasses
import math

import numpy as np
import pytest

from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data, sampling


@pytest.mark.parametrize(
  ('name', 'value', 'sentence'),
  [
    ('name', 'fed_prox', "algorithm must be one of .*Found 'fed_prox'"),
    ('client_loss', 'hinge', "client_loss must be one of .*Found 'hinge'"),
    ('learning_rate', 0.0, 'learning_rate must be positive'),
    ('learning_rate_decay', 1.1, 'learning_rate_decay must be at most 1'),
    ('learning_rate_decay', 0.0, 'learning_rate_decay must be positive'),
    ('momentum', 1.0, r'momentum must be in \[0, 1\). Found 1.0.'),
    ('momentum', -0.1, 'momentum must be in'),
    ('momentum', math.nan, 'momentum must be in'),
    ('client_learning_rate', -1.0, 'client_learning_rate must be positive'),
    ('client_epochs', 0, 'client_epochs must be a positive integer'),
    ('client_batch_size', 1.5, 'client_batch_size must be a positive integer'),
    ('examples_per_round', -1, 'examples_per_round must be a positive integer'),
  ],
)
def test_bad_settings_are_refused_with_a_sentence(name, value, sentence):
  with pytest.raises(ValueError, match=sentence):
    algorithm_lib.Algorithm(**{name: value})


def test_losses_of_all_data_are_for_gradients_of_all_data():
  with pytest.raises(ValueError, match='Use it with fed_sgd, not with fed_avg'):
    algorithm_lib.Algorithm('fed_avg', client_loss='balanced')


def test_drawn_examples_are_for_gradients():
  with pytest.raises(ValueError, match='examples_per_round is for fed_sgd'):
    algorithm_lib.Algorithm('fed_avg', examples_per_round=4)


@pytest.mark.parametrize(
  'holding, batch_size, epochs, steps',
  [(9, 3, 1, 3), (10, 3, 1, 4), (10, 3, 2, 8), (2, 3, 1, 1), (0, 3, 1, 1)],
)
def test_local_steps_are_as_many_as_examples_fill_batches(
  holding, batch_size, epochs, steps
):
  fed_avg = algorithm_lib.Algorithm('fed_avg', client_epochs=epochs)
  assert fed_avg.local_steps(holding, batch_size) == steps
  fed_sgd = dataclasses.replace(fed_avg, name='fed_sgd')
  assert fed_sgd.local_steps(holding, batch_size) == 1


def test_only_fed_avg_has_a_learning_rate_of_clients():
  fed_sgd = algorithm_lib.Algorithm(client_learning_rate=0.3)
  assert fed_sgd.local_learning_rate is None
  fed_avg = dataclasses.replace(fed_sgd, name='fed_avg')
  assert fed_avg.local_learning_rate == 0.3


def test_the_servers_learning_rate_falls_by_the_same_factor_in_every_round():
  rule = algorithm_lib.Algorithm(learning_rate=0.5, learning_rate_decay=0.9)
  for number in range(4):
    wanted = 0.5 * 0.9**number
    assert rule.learning_rate_at(number) == pytest.approx(wanted)


def test_an_update_is_of_all_examples_or_of_some_drawn_anew():
  features = np.zeros((20, 1), np.float32)
  clients = [np.arange(3), np.arange(19, 5, -1)]
  data = federated_data.FederatedData(features, np.zeros(20, int), clients)
  sampler = sampling.Sampler(2, seed=2)
  every = algorithm_lib.Algorithm()
  some = algorithm_lib.Algorithm(examples_per_round=4)
  np.testing.assert_array_equal(
    every.examples_of(data, sampler, 0, 1), clients[1]
  )
  drawn = [tuple(some.examples_of(data, sampler, n, 1)) for n in range(3)]
  assert len(set(drawn)) == 3
  for number, rows in enumerate(drawn):
    wanted = clients[1][sampler.subset(number, 1, 14, 4)]
    assert rows == tuple(wanted)
  # All, where there are no more.
  np.testing.assert_array_equal(
    some.examples_of(data, sampler, 0, 0), clients[0]
  )
