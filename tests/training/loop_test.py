import csv
import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tf_bdp.accounting import BayesianAccountant
from tf_bdp.engines import in_process as inprocess_engine
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data
from tf_bdp.mechanisms import client as mechanism_lib
from tf_bdp.training import evaluation
from tf_bdp.training import loop as training

_CLIENTS = 12
_SETTINGS = {'name': 'test', 'clients': _CLIENTS}


def _model():
  tf.keras.utils.set_random_seed(0)
  layers = [
    tf.keras.layers.Input((4, 4, 1)),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(3),
  ]
  return tf.keras.Sequential(layers)


@pytest.fixture(name='data', scope='module')
def _data():
  generator = np.random.default_rng(0)
  labels = generator.integers(0, 3, 120)
  features = generator.normal(size=(120, 4, 4, 1)).astype(np.float32)
  features[np.arange(120), labels, 0, 0] += 3
  clients = np.array_split(np.arange(120), _CLIENTS)
  return federated_data.FederatedData(features, labels, clients)


def _engine(data, noise_multiplier=1.0, noise_seed=3, learning_rate=0.5):
  mechanism = mechanism_lib.GaussianMechanism(
    'mean', noise_multiplier, 1.0, 0.5, 0.5 * _CLIENTS
  )
  algorithm = algorithm_lib.Algorithm(learning_rate=learning_rate, momentum=0.5)
  return inprocess_engine.InProcessEngine(
    _model, data, mechanism, algorithm, noise_seed=noise_seed
  )


_CONFIG = training.TrainingConfig(
  rounds=9,
  client_count=_CLIENTS,
  delta=1e-3,
  panel_size=_CLIENTS,
  evaluate_every=2,
  checkpoint_every=3,
)


def _train(engine, data, directory, config=_CONFIG, resume=False, **settings):
  evaluator = evaluation.Evaluator(_model(), data.features, data.labels)
  return training.train(
    engine,
    config,
    evaluator.evaluate,
    directory,
    {**_SETTINGS, **settings},
    resume=resume,
  )


def _rows(directory):
  with open(directory / training.METRICS_FILE, newline='') as file:
    return [
      {name: value for name, value in row.items() if name != 'seconds'}
      for row in csv.DictReader(file)
    ]


def test_a_run_learns_and_leaves_a_row_for_every_round(data, tmp_path):
  config = dataclasses.replace(_CONFIG, rounds=30)
  engine = _engine(data, noise_multiplier=0.3)
  progress = _train(engine, data, tmp_path, config)
  rows = _rows(tmp_path)
  assert [int(row['round']) for row in rows] == list(range(1, 31))
  evaluated = [int(r['round']) for r in rows if r['accuracy']]
  assert evaluated == list(range(2, 31, 2))
  assert float(rows[-1]['accuracy']) > 0.8
  assert progress.round_number == 30
  assert list((tmp_path / 'tensorboard').iterdir())


def test_epsilons_are_those_of_an_accountant_fed_by_hand(data, tmp_path):
  engine = _engine(data)
  progress = _train(engine, data, tmp_path)
  accountant = BayesianAccountant(estimator='betting')
  for event in training.events_of(engine.mechanism, _CONFIG, progress)[
    'client'
  ]:
    accountant.compose(event)
  last = progress.rows[-1]
  by_moments, _ = accountant.get_epsilon_and_optimal_order(1e-3)
  assert last['bdp_epsilon'] == by_moments
  assert last['dp_epsilon'] == accountant.get_worst_case_epsilon(1e-3)
  assert last['bdp_epsilon'] <= last['dp_epsilon']


@pytest.mark.parametrize('rounds', [1, 3, 4, 7, 8])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
  data, tmp_path, rounds
):
  whole = _train(_engine(data), data, tmp_path / 'whole')
  engine = _engine(data)
  run_round, done = engine.run_round, []

  def interrupted(*arguments):
    if len(done) == rounds:
      raise KeyboardInterrupt
    done.append(None)
    return run_round(*arguments)

  engine.run_round = interrupted
  with pytest.raises(KeyboardInterrupt):
    _train(engine, data, tmp_path / 'cut')
  resumed = _train(_engine(data), data, tmp_path / 'cut', resume=True)
  assert _rows(tmp_path / 'cut') == _rows(tmp_path / 'whole')
  for one, other in zip(whole.state, resumed.state):
    np.testing.assert_array_equal(one, other)
  assert whole.accountants['client'].state_dict() == (
    resumed.accountants['client'].state_dict()
  )


def test_resuming_a_finished_run_changes_nothing(data, tmp_path):
  _train(_engine(data), data, tmp_path)
  before = _rows(tmp_path)
  progress = _train(_engine(data), data, tmp_path, resume=True)
  assert progress.round_number == _CONFIG.rounds
  assert _rows(tmp_path) == before


def test_training_stops_before_the_round_that_would_exceed_the_budget(
  data, tmp_path
):
  whole = _train(_engine(data), data, tmp_path / 'whole')
  budget = whole.rows[4]['bdp_epsilon'] + 1e-6
  config = dataclasses.replace(_CONFIG, bdp_epsilon_budget=budget)
  progress = _train(_engine(data), data, tmp_path / 'stopped', config)
  assert progress.round_number == 5
  assert progress.rows[-1]['bdp_epsilon'] <= budget
  assert whole.rows[5]['bdp_epsilon'] > budget
  assert 'exceed the budget' in progress.stopped
  again = _train(_engine(data), data, tmp_path / 'stopped', config, resume=True)
  assert again.round_number == 5


def test_dp_alone_stops_while_training_goes_on(data, tmp_path):
  whole = _train(_engine(data), data, tmp_path / 'whole')
  budget = whole.rows[3]['dp_epsilon'] + 1e-6
  config = dataclasses.replace(_CONFIG, dp_epsilon_budget=budget)
  progress = _train(_engine(data), data, tmp_path / 'run', config)
  assert progress.round_number == _CONFIG.rounds
  assert progress.dp_stop['round'] == 4
  assert progress.dp_stop['accuracy'] == whole.rows[3]['accuracy']


def test_without_a_panel_composition_is_by_hoelder(data, tmp_path):
  config = dataclasses.replace(_CONFIG, panel_size=0, estimator='student_t')
  progress = _train(_engine(data), data, tmp_path, config)
  assert progress.accountants['client'].settings['composition'] == 'holder'
  assert (
    progress.accountants['client'].settings['total_rounds'] == _CONFIG.rounds
  )
  assert np.isfinite(progress.rows[-1]['bdp_epsilon'])


def test_without_noise_epsilon_is_infinite(data, tmp_path):
  progress = _train(_engine(data, noise_multiplier=0.0), data, tmp_path)
  assert progress.rows[-1]['bdp_epsilon'] == np.inf
  assert progress.rows[-1]['dp_epsilon'] == np.inf


def test_other_settings_are_refused_by_name(data, tmp_path):
  _train(_engine(data), data, tmp_path)
  with pytest.raises(ValueError, match=r"name: 'test' in .*, 'other' here"):
    _train(_engine(data), data, tmp_path, resume=True, name='other')


def test_a_directory_with_a_run_is_not_overwritten(data, tmp_path):
  _train(_engine(data), data, tmp_path)
  with pytest.raises(ValueError, match='holds a run already'):
    _train(_engine(data), data, tmp_path)


def test_a_damaged_checkpoint_is_refused(data, tmp_path):
  _train(_engine(data), data, tmp_path)
  path = tmp_path / training.CHECKPOINT_FILE
  path.write_bytes(path.read_bytes()[:1000])
  with pytest.raises(ValueError, match='is not a checkpoint'):
    _train(_engine(data), data, tmp_path, resume=True)


def test_failed_clients_are_counted_and_left_out(data, tmp_path):
  features = data.features.copy()
  features[data.indices(0)] = 3e38  # Overflows in the forward pass.
  clients = [data.indices(client) for client in range(_CLIENTS)]
  broken = federated_data.FederatedData(features, data.labels, clients)
  progress = _train(_engine(broken), data, tmp_path)
  failed = sum(row['failed_clients'] for row in progress.rows)
  assert 0 < failed <= _CONFIG.rounds
  assert np.all(np.isfinite(progress.state.weights))


def test_a_round_in_which_all_fail_stops_with_an_error(data, tmp_path):
  features = np.full_like(data.features, 3e38)
  clients = [data.indices(client) for client in range(_CLIENTS)]
  broken = federated_data.FederatedData(features, data.labels, clients)
  with pytest.raises(RuntimeError, match='No update of round 1 could be used'):
    _train(_engine(broken), data, tmp_path)


@pytest.mark.parametrize(
  'changes, sentence',
  [
    ({'rounds': 0}, 'rounds must be a positive integer'),
    ({'delta': 0.0}, 'delta must be above 0'),
    ({'sampling': 'none'}, 'sampling must be one of'),
    ({'panel_size': 2}, 'panel_size must be at least 3'),
    ({'panel_size': 99}, 'panel must be at most the 12 clients'),
    ({'bdp_epsilon_budget': -1.0}, 'bdp_epsilon_budget must be positive'),
  ],
)
def test_bad_configurations_are_refused(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    dataclasses.replace(_CONFIG, **changes)
