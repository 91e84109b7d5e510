"""What the number of rounds tells.

Two populations differ by one client. Whatever they make a run release must be
hard to tell apart, and the number of rounds is released with the model.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data
from tf_bdp.reporting import notes
from tf_bdp.training import loop
from tf_bdp.training import plan as plan_lib

_CLIENTS, _EXAMPLES, _ROUNDS = 40, 4, 50


def _model():
  tf.keras.utils.set_random_seed(0)
  # Without a bias gradients are as long as the features.
  layers = [
    tf.keras.layers.Input((4,)),
    tf.keras.layers.Dense(3, use_bias=False),
  ]
  return tf.keras.Sequential(layers)


@functools.cache
def _data(first=None, others=0.1):
  """Clients with updates as long as that; the first may be another, or none."""
  generator = np.random.default_rng(0)
  count = _CLIENTS * _EXAMPLES
  features = generator.normal(size=(count, 4))
  features /= np.linalg.norm(features, axis=1, keepdims=True)
  features = (others * features).astype(np.float32)
  labels = generator.integers(0, 3, count)
  clients = np.split(np.arange(count), _CLIENTS)
  if first is None:
    clients[0] = np.zeros(0, np.int64)
  else:
    features[:_EXAMPLES] *= first / others
    features[:_EXAMPLES] = features[0]
    labels[:_EXAMPLES] = labels[0]
  return federated_data.FederatedData(features, labels, clients)


@functools.cache
def _engine(first, others):
  data = _data(first, others)
  return _plan(data).engine(_model, data)


def _plan(data, **accounting):
  return plan_lib.Plan.of(
    data,
    plan_lib.Privacy(
      mechanism='sum', noise_multiplier=2.0, participation_probability=1.0
    ),
    algorithm_lib.Algorithm(learning_rate=1e-3, momentum=0.0),
    accounting=plan_lib.Accounting(
      delta=1e-3, estimator='population', **accounting
    ),
    schedule=plan_lib.Schedule(
      rounds=_ROUNDS, evaluate_every=_ROUNDS, checkpoint_every=_ROUNDS
    ),
    seeds=plan_lib.Seeds(sampling_seed=1, noise_seed=1),
  )


def _train(directory, first=None, others=0.1, **accounting):
  """Returns the plan and the progress of a run."""
  plan = _plan(_data(first, others), **accounting)
  done = loop.train(
    _engine(first, others),
    plan,
    lambda weights: {'accuracy': 0.0, 'loss': 0.0},
    directory,
  )
  return plan, done


def test_a_bayesian_budget_lets_one_client_decide_on_the_rounds(tmp_path):
  # The figures of the specification: 273 rounds, or 1.
  _, quiet = _train(tmp_path / 'quiet', bdp_epsilon_budget=0.8)
  plan, loud = _train(tmp_path / 'loud', first=50.0, bdp_epsilon_budget=0.8)
  assert quiet.round_number >= 40
  assert loud.round_number <= 1
  # Everybody can see which it was, however little a round says. So the run
  # says that the number of rounds does.
  for done in (quiet, loud):
    if done.stopped:
      assert 'number of rounds tells something about the data' in done.stopped
    assert any(
      'So the number of rounds does' in n for n in notes.of_run(plan, done)
    )


def test_a_budget_of_dp_ends_all_runs_alike(tmp_path):
  _, quiet = _train(tmp_path / 'quiet', dp_epsilon_budget=7.0)
  plan, loud = _train(tmp_path / 'loud', first=50.0, dp_epsilon_budget=7.0)
  assert 10 < quiet.round_number == loud.round_number < _ROUNDS
  assert quiet.stopped == loud.stopped
  assert 'differential privacy' in loud.stopped
  assert 'tells' not in loud.stopped
  assert not any(
    'So the number of rounds' in n for n in notes.of_run(plan, loud)
  )


@pytest.mark.parametrize('first', [None, 0.05, 50.0])
def test_with_a_filter_all_runs_have_the_planned_rounds(first, tmp_path):
  _, done = _train(tmp_path, first, others=50.0, filter=3.0)
  assert done.round_number == _ROUNDS and not done.stopped
  active = [row['active_clients'] for row in done.rows]
  # Everybody else is loud and has left long before, at the same time.
  gone = active.index(min(active))
  assert gone < 10
  # To end the run when nobody is left would tell whether the quiet one is in
  # it: after the same few rounds, or never. So the run goes on, with noise.
  # Who has nothing to send is never charged, and counts as active.
  assert active[-1] == (0 if first == 50.0 else 1)
  if first == 0.05:
    assert done.measurements[-1].participants == 1
  else:
    assert done.measurements[-1].participants == 0
  moved = [np.any(np.ravel(part)) for part in done.state.last_mean[:1]]
  assert all(moved)


def test_a_filter_and_a_bayesian_budget_exclude_each_other():
  with pytest.raises(ValueError, match='Leave out --bdp_epsilon_budget'):
    _plan(_data(), filter=3.0, bdp_epsilon_budget=1.0)
