"""How clients and server learn: what is refused."""

import pytest

from tf_bdp.learning import algorithm as algorithm_lib


@pytest.mark.parametrize(
  ('name', 'value', 'sentence'),
  [
    ('name', 'fed_prox', "algorithm must be one of .*Found 'fed_prox'"),
    ('learning_rate', 0.0, 'learning_rate must be positive'),
    ('learning_rate_decay', 1.1, 'learning_rate_decay must be at most 1'),
    ('momentum', 1.0, r'momentum must be in \[0, 1\). Found 1.0.'),
    ('momentum', -0.1, 'momentum must be in'),
    ('momentum', float('nan'), 'momentum must be in'),
    ('client_learning_rate', -1.0, 'client_learning_rate must be positive'),
    ('client_epochs', 0, 'client_epochs must be a positive integer'),
    ('client_batch_size', 1.5, 'client_batch_size must be a positive integer'),
    ('examples_per_round', -1, 'examples_per_round must be a positive integer'),
    ('client_loss', 'none', 'client_loss must be one of'),
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


def test_the_learning_rate_decays_by_a_factor_a_round():
  algorithm = algorithm_lib.Algorithm(
    learning_rate=0.5, learning_rate_decay=0.8
  )
  assert algorithm.learning_rate_at(0) == 0.5
  assert algorithm.learning_rate_at(3) == pytest.approx(0.5 * 0.8**3)
