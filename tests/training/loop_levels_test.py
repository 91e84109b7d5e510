"""The training loop at every level of privacy."""

import csv
import functools

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

from tf_bdp.accounting import events
from tf_bdp.engines import base as engine
from tf_bdp.engines import in_process as inprocess_engine
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data
from tf_bdp.mechanisms import client as mechanism
from tf_bdp.mechanisms import instance as instance_mechanism
from tf_bdp.training import evaluation
from tf_bdp.training import loop as training

_CLIENTS, _EXAMPLES, _BATCH_SIZE = 8, 12, 6
_ROUNDS = 6
_BOTH = ('joint', 'split')
# Algorithm, and settings of mechanism and configuration.
_LEVELS = {
  'client': ('fed_sgd', {}, {'panel_size': 5}),
  'instance_sequential': ('fed_sgd', {}, {'panel_size': 0}),
  'instance_parallel': (
    *('fed_avg', {'panel_examples': 3, 'clipping': 'example'}),
    {'panel_size': 4},
  ),
  'instance_aggregate': (
    *('fed_sgd', {'server_noise_multiplier': 1.0}),
    {'panel_size': 0},
  ),
  'joint': ('fed_sgd', {'panel_examples': 4}, {'panel_size': 5}),
  'split': ('fed_avg', {'server_noise_multiplier': 2.0}, {'panel_size': 0}),
}
_UNITS = {
  'client': ('client',),
  'joint': ('client', 'example'),
  'split': ('client', 'example'),
}


def _model():
  tf.keras.utils.set_random_seed(0)
  layers = [
    tf.keras.layers.Input((4,)),
    tf.keras.layers.Dense(3),
  ]
  return tf.keras.Sequential(layers)


@functools.cache
def _data():
  generator = np.random.default_rng(0)
  count = _CLIENTS * _EXAMPLES
  labels = generator.integers(0, 3, count)
  features = generator.normal(size=(count, 4)).astype(np.float32)
  features[np.arange(count), labels] += 2
  return federated_data.FederatedData(
    features, labels, np.array_split(np.arange(count), _CLIENTS)
  )


def _mechanism(level, **changes):
  name, options, _ = _LEVELS[level]
  expected = 0.5 * _CLIENTS
  if level == 'client':
    settings = {
      'kind': 'mean',
      'noise_multiplier': 1.5,
      'clip_norm': 1.0,
      'participation_probability': 0.5,
      'expected_clients': expected,
      **changes,
    }
    return mechanism.GaussianMechanism(**settings)
  settings = {
    'level': level,
    'noise_multiplier': 1.5,
    'clip_norm': 1.0,
    'batch_size': _BATCH_SIZE,
    'participation_probability': 0.5,
    'expected_clients': expected,
    'total_examples': _CLIENTS * _EXAMPLES,
    'smallest_holding': _EXAMPLES,
    'local_steps': algorithm_lib.Algorithm(name).local_steps(
      _EXAMPLES, _BATCH_SIZE
    ),
    **options,
    **changes,
  }
  return instance_mechanism.InstanceMechanism(**settings)


@functools.cache
def _engine(level, **changes):
  algorithm = algorithm_lib.Algorithm(
    _LEVELS[level][0],
    learning_rate=0.5,
    momentum=0.5,
    client_learning_rate=0.5,
  )
  return inprocess_engine.InProcessEngine(
    _model,
    _data(),
    _mechanism(level, **changes),
    algorithm,
    noise_seed=3,
    seed=2,
  )


@functools.cache
def _evaluator():
  return evaluation.Evaluator(_model(), _data().features, _data().labels)


def _config(level, **changes):
  settings = {
    'rounds': _ROUNDS,
    'client_count': _CLIENTS,
    'delta': 1e-3,
    'estimator': 'student_t',
    'example_estimator': 'student_t',
    'evaluate_every': 2,
    'checkpoint_every': 2,
    **_LEVELS[level][2],
  }
  if level in _BOTH:
    settings['example_delta'] = 1e-2
  return training.TrainingConfig(**{**settings, **changes})


def _train(
  level, directory, config=None, resume=False, runner=None, settings=None
):
  return training.train(
    runner or _engine(level),
    config or _config(level),
    _evaluator().evaluate,
    directory,
    settings or {'level': level},
    resume=resume,
  )


@pytest.fixture(name='whole', scope='module')
def _whole(tmp_path_factory):
  """Runs that nothing interrupts."""

  @functools.cache
  def run(level):
    directory = tmp_path_factory.mktemp(level)
    return directory, _train(level, directory)

  return run


def _rows(directory):
  with open(directory / training.METRICS_FILE, newline='') as file:
    return [
      {name: value for name, value in row.items() if name != 'seconds'}
      for row in csv.DictReader(file)
    ]


def _units(level):
  return _UNITS.get(level, ('example',))


def _check_same(one, other):
  """Compares the progress of two runs in all but the time they took."""
  assert one.round_number == other.round_number
  assert [{**row, 'seconds': 0} for row in one.rows] == [
    {**row, 'seconds': 0} for row in other.rows
  ]
  for left, right in zip(one.state, other.state, strict=True):
    np.testing.assert_array_equal(left, right)
  assert one.accountants.keys() == other.accountants.keys()
  for unit, accountant in one.accountants.items():
    assert accountant.state_dict() == other.accountants[unit].state_dict()
  for left, right in zip(one.measured, other.measured, strict=True):
    np.testing.assert_array_equal(left.squared_measures, right.squared_measures)
    np.testing.assert_array_equal(left.taking_part, right.taking_part)
    assert (left.examples is None) == (right.examples is None)
    if left.examples is not None:
      for part, same in zip(left.examples, right.examples, strict=True):
        np.testing.assert_array_equal(part, same)


# Runs.


@pytest.mark.parametrize('level', _LEVELS)
def test_a_run_leaves_a_row_a_round_with_all_that_is_protected(whole, level):
  directory, progress = whole(level)
  rows = _rows(directory)
  assert [int(row['round']) for row in rows] == list(range(1, _ROUNDS + 1))
  assert [bool(row['accuracy']) for row in rows] == [False, True] * 3
  names = {'dp_epsilon', 'bdp_epsilon'}
  if level in _BOTH:
    names |= {'example_dp_epsilon', 'example_bdp_epsilon'}
  assert {name for name in rows[0] if 'epsilon' in name} == names
  assert tuple(progress.accountants) == _units(level)
  for row in progress.rows:
    for prefix in ('', 'example_') if level in _BOTH else ('',):
      assert 0 <= row[f'{prefix}bdp_epsilon'] <= row[f'{prefix}dp_epsilon']
  last = progress.rows[-1]
  assert all(0 < last[name] < np.inf for name in names)
  # The file says what the run says.
  for row, wanted in zip(rows, progress.rows):
    for name in names:
      assert float(row[name]) == wanted[name]


@pytest.mark.parametrize('level', _LEVELS)
def test_epsilons_are_those_of_accountants_fed_by_hand(whole, level):
  _, progress = whole(level)
  config, own = _config(level), _engine(level).mechanism
  rounds = training.events_of(own, config, progress)
  assert tuple(rounds) == _units(level)
  for unit, accountant in config.accountants(own).items():
    prefix = 'example_' if level in _BOTH and unit == 'example' else ''
    delta = 1e-2 if prefix else 1e-3
    assert len(rounds[unit]) == _ROUNDS
    for event, row in zip(rounds[unit], progress.rows):
      accountant.compose(event)
      epsilon, _ = accountant.get_epsilon_and_optimal_order(delta)
      assert row[f'{prefix}bdp_epsilon'] == epsilon
      dp = accountant.get_worst_case_epsilon(delta)
      assert row[f'{prefix}dp_epsilon'] == dp


@pytest.mark.parametrize('level', _LEVELS)
def test_events_are_made_of_what_engines_measure(whole, level):
  # The rounds run by hand once more, outside of the loop.
  _, progress = whole(level)
  config, runner = _config(level), _engine(level)
  own, state = runner.mechanism, runner.initial_state()
  rounds = training.events_of(own, config, progress)
  members = []
  if config.panel_size:
    members = training.sampling.panel(0, _CLIENTS, config.panel_size).tolist()
  for number in range(_ROUNDS):
    cohort = training.sampling.participants('poisson', 0, number, _CLIENTS, 0.5)
    output = runner.run_round(state, number, cohort.tolist(), members)
    state = output.state
    squared, taking_part = output.squared_measures, None
    if output.panel_squared_measures is not None:
      squared = output.panel_squared_measures
      taking_part = output.panel_taking_part
    if taking_part is None:
      taking_part = np.ones(squared.shape, bool)
    wanted = own.events(
      *(squared, taking_part, output.examples, output.participants),
      *(output.clip_norm, bool(members)),
    )
    for unit, event in wanted.items():
      assert rounds[unit][number] == event
  for left, right in zip(progress.state, state):
    np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize('level', _LEVELS)
def test_composition_is_by_panels_where_there_are_and_else_by_hoelder(level):
  accountants = _config(level).accountants(_mechanism(level))
  wanted = {
    'client': {'client': None},
    # Every step of every client counts.
    'instance_sequential': {'example': _ROUNDS * _CLIENTS},
    'instance_parallel': {'example': None},
    'instance_aggregate': {'example': _ROUNDS},
    'joint': {'client': None, 'example': None},
    'split': {'client': _ROUNDS, 'example': 2 * _ROUNDS},
  }[level]
  assert {
    unit: accountant.settings['total_rounds']
    for unit, accountant in accountants.items()
  } == wanted
  for accountant in accountants.values():
    settings = accountant.settings
    panel = settings['total_rounds'] is None
    assert settings['composition'] == ('panel' if panel else 'holder')


# Interruptions.


@pytest.mark.parametrize('rounds', [1, 2, 5])
@pytest.mark.parametrize('level', _LEVELS)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
  whole, level, rounds, tmp_path, monkeypatch
):
  runner, done = _engine(level), []
  run_round = runner.run_round

  def interrupted(*arguments):
    if len(done) == rounds:
      raise KeyboardInterrupt
    done.append(None)
    return run_round(*arguments)

  with monkeypatch.context() as patch:
    patch.setattr(runner, 'run_round', interrupted)
    with pytest.raises(KeyboardInterrupt):
      _train(level, tmp_path)
  resumed = _train(level, tmp_path, resume=True)
  directory, progress = whole(level)
  _check_same(resumed, progress)
  assert _rows(tmp_path) == _rows(directory)
  config, own = _config(level), runner.mechanism
  assert training.events_of(own, config, resumed) == (
    training.events_of(own, config, progress)
  )


@pytest.mark.parametrize('level', _LEVELS)
def test_resuming_a_finished_run_changes_nothing(whole, level):
  directory, progress = whole(level)
  before = _rows(directory)
  _check_same(_train(level, directory, resume=True), progress)
  assert _rows(directory) == before


def test_another_level_is_not_resumed(whole):
  directory, _ = whole('joint')
  with pytest.raises(ValueError, match=r"level: 'joint' in .*, 'split' here"):
    _train('split', directory, resume=True)
  # Nor another noise of the same level, of which the settings tell.
  settings = {'level': 'joint', 'noise_multiplier': 2.0}
  with pytest.raises(ValueError, match=r'noise_multiplier: None .*2\.0 here'):
    _train('joint', directory, resume=True, settings=settings)
  with pytest.raises(ValueError, match='holds a run already'):
    _train('joint', directory)


# Budgets.


@pytest.mark.parametrize(
  ('level', 'unit'),
  [
    ('client', 'client'),
    ('instance_sequential', 'example'),
    ('instance_parallel', 'example'),
    ('instance_aggregate', 'example'),
    *((level, unit) for level in _BOTH for unit in ('client', 'example')),
  ],
)
def test_training_stops_before_the_round_that_would_exceed_a_budget(
  whole, level, unit, tmp_path
):
  _, progress = whole(level)
  prefix = 'example_' if level in _BOTH and unit == 'example' else ''
  spent = [row[f'{prefix}bdp_epsilon'] for row in progress.rows]
  # The first round from the second on that costs something.
  stop = next(i for i in range(2, _ROUNDS) if spent[i] > spent[i - 1] + 1e-6)
  budget = spent[stop - 1] + 1e-7
  config = _config(level, **{f'{prefix}bdp_epsilon_budget': budget})
  stopped = _train(level, tmp_path, config)
  assert stopped.round_number == len(stopped.rows) == stop
  assert stopped.rows[-1][f'{prefix}bdp_epsilon'] <= budget < spent[stop]
  whose = f" {unit}s'" if level in _BOTH else ''
  assert stopped.stopped.startswith(
    f'the next round would exceed the{whose} budget of epsilon = '
  )
  # The round that would have exceeded it is dropped: neither accountant has it.
  config = _config(level, rounds=stop)
  shorter = _train(level, tmp_path / 'shorter', config)
  for one, other in zip(stopped.state, shorter.state, strict=True):
    np.testing.assert_array_equal(one, other)
  for row, wanted in zip(stopped.rows, progress.rows):
    assert row[f'{prefix}bdp_epsilon'] == wanted[f'{prefix}bdp_epsilon']
  config = _config(level, **{f'{prefix}bdp_epsilon_budget': budget})
  again = _train(level, tmp_path, config, resume=True)
  _check_same(again, stopped)
  assert again.stopped == stopped.stopped


@pytest.mark.parametrize('level', ['instance_aggregate', 'joint'])
def test_the_round_at_which_dp_alone_stops_is_recorded(whole, level, tmp_path):
  _, progress = whole(level)
  budget = progress.rows[2]['dp_epsilon'] + 1e-6
  assert progress.rows[3]['dp_epsilon'] > budget
  config = _config(level, dp_epsilon_budget=budget)
  found = _train(level, tmp_path, config)
  assert found.dp_stop['round'] == 3
  assert found.round_number == _ROUNDS


# Noise.


@pytest.mark.parametrize('level', ['instance_parallel', 'joint', 'split'])
def test_without_noise_every_epsilon_is_infinite(level, tmp_path):
  changes = {'noise_multiplier': 0.0}
  if level == 'split':
    changes['server_noise_multiplier'] = 0.0
  progress = _train(level, tmp_path, runner=_engine(level, **changes))
  last = progress.rows[-1]
  found = [value for name, value in last.items() if 'epsilon' in name]
  assert found == [np.inf] * (4 if level in _BOTH else 2)
  assert last['accuracy'] > 0.5


# What is refused.


@pytest.mark.parametrize(
  ('at', 'changes', 'sentence'),
  [
    (
      *('joint', {'noise_multiplier': -1.0}),
      'noise_multiplier must be non-negative',
    ),
    (
      *('split', {'server_noise_multiplier': -1.0}),
      'server_noise_multiplier must be non-negative',
    ),
    (
      *('joint', {'noise_multiplier': float('nan')}),
      'noise_multiplier must be non-negative',
    ),
    ('joint', {'clip_norm': 0.0}, 'clip_norm must be positive'),
    ('joint', {'batch_size': 0}, 'batch_size must be a positive integer'),
    (
      *('joint', {'participation_probability': 1.5}),
      'must be between 0 and 1',
    ),
    ('joint', {'local_steps': 2}, 'Joint privacy is for FedSGD only'),
    ('joint', {'panel_examples': 2}, 'panel_examples must be at least 3'),
    (
      *('instance_sequential', {'panel_examples': 3}),
      'there is no panel of examples',
    ),
    (
      *('instance_parallel', {'server_noise_multiplier': 1.0}),
      'server_noise_multiplier must be 0',
    ),
    (
      *('instance_parallel', {'accounting': 'aggregate'}),
      "is accounted for as 'parallel'",
    ),
    ('split', {'accounting': 'aggregate'}, 'cannot be counted together'),
    ('split', {'server_noise_multiplier': 0.0}, 'needs both'),
    ('split', {'reference_is_last_mean': True}, "is for level 'joint'"),
    ('joint', {'clipping': 'none'}, 'clipping must be one of'),
  ],
)
def test_a_bad_mechanism_is_refused(at, changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    _mechanism(at, **changes)


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    ({'delta': 0.0}, 'delta must be above 0'),
    ({'delta': -1e-3}, 'delta must be above 0'),
    ({'example_delta': 0.0}, 'example_delta must be above 0'),
    (
      {'example_bdp_epsilon_budget': 0.0},
      'example_bdp_epsilon_budget must be positive',
    ),
    ({'panel_size': 2}, 'panel_size must be at least 3'),
  ],
)
def test_a_bad_configuration_is_refused(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    _config('joint', **changes)


@pytest.mark.parametrize(
  ('level', 'changes', 'sentence'),
  [
    (
      'joint',
      {'panel_size': 0},
      'A panel of examples needs a panel of clients',
    ),
    ('instance_parallel', {'panel_size': 0}, 'needs a panel of clients'),
    *(
      (level, {name: 0.5}, 'are for levels that protect clients as well')
      for level in ('client', 'instance_aggregate')
      for name in ('example_delta', 'example_bdp_epsilon_budget')
    ),
  ],
)
def test_settings_that_do_not_fit_are_refused_before_any_round(
  level, changes, sentence, tmp_path, monkeypatch
):
  runner = _engine(level)

  def run_round(*arguments):
    raise AssertionError('A round was run.')

  monkeypatch.setattr(runner, 'run_round', run_round)
  with pytest.raises(ValueError, match=sentence):
    _train(level, tmp_path, _config(level, **changes))
  assert not (tmp_path / training.CHECKPOINT_FILE).exists()


def test_data_that_do_not_fit_the_mechanism_are_refused():
  for algorithm, changes, sentence in (
    ('fed_avg', {'local_steps': 1}, 'takes up to 2 local steps'),
    ('fed_sgd', {'smallest_holding': 13}, 'a client has 12 examples'),
  ):
    with pytest.raises(ValueError, match=sentence):
      inprocess_engine.InProcessEngine(
        _model,
        _data(),
        _mechanism('instance_sequential', **changes),
        algorithm_lib.Algorithm(algorithm),
      )


# Reported costs.


class _Reporter(engine.Engine):
  """Reports made-up costs, of which the last round has none."""

  def __init__(self, level, config):
    self.mechanism = _mechanism(level, panel_examples=0)
    self._orders = {
      unit: len(reporting.orders)
      for unit, reporting in config.reporting(self.mechanism).items()
    }

  def initial_state(self):
    return np.float64(1.0)

  def run_round(self, state, round_number, participants, panel):
    assert not panel
    count = len(participants) if round_number < _ROUNDS - 1 else 0
    generator = np.random.default_rng(round_number)
    reported = {
      unit: generator.random(orders) * 0.01 * bool(count)
      for unit, orders in self._orders.items()
    }
    return engine.RoundOutput(
      state=state + round_number,
      participants=count,
      failed_clients=0,
      clip_norm=1.0,
      squared_measures=np.zeros(0),
      reported=reported,
    )

  def model_weights(self, state):
    return [v.numpy() for v in _model().trainable_variables]

  def to_arrays(self, state):
    return {'state': np.asarray(state)}

  def from_arrays(self, arrays):
    return arrays['state'][()]


@pytest.mark.parametrize('level', ['instance_sequential', 'joint', 'split'])
def test_reported_costs_survive_a_checkpoint(level, tmp_path):
  config = _config(level, panel_size=0)
  runner = _Reporter(level, config)
  whole = _train(level, tmp_path / 'whole', config, runner=runner)
  cut = _Reporter(level, config)
  run_round = cut.run_round

  def interrupted(state, round_number, *arguments):
    if round_number == 3:
      raise KeyboardInterrupt
    return run_round(state, round_number, *arguments)

  cut.run_round = interrupted
  with pytest.raises(KeyboardInterrupt):
    _train(level, tmp_path / 'cut', config, runner=cut)
  resumed = _train(level, tmp_path / 'cut', config, resume=True, runner=runner)
  assert whole.state == resumed.state == 1.0 + sum(range(_ROUNDS))
  assert [{**row, 'seconds': 0} for row in whole.rows] == [
    {**row, 'seconds': 0} for row in resumed.rows
  ]
  rounds = training.events_of(runner.mechanism, config, whole)
  assert rounds == training.events_of(runner.mechanism, config, resumed)
  for unit, accountant in config.accountants(runner.mechanism).items():
    assert whole.accountants[unit].state_dict() == (
      resumed.accountants[unit].state_dict()
    )
    for event in rounds[unit]:
      accountant.compose(event)
    assert accountant.state_dict() == whole.accountants[unit].state_dict()
    assert isinstance(rounds[unit][-1], dp_accounting.NoOpDpEvent)
    first = rounds[unit][0]
    if unit == 'example':
      first = first.event
    assert isinstance(first, events.ReportedCostEvent)


def test_costs_of_clients_and_steps_are_reported_together_and_counted_so():
  own = _mechanism('instance_sequential', local_steps=2)
  event = own.reported_event('example', np.full(4, 6.0), 1e-6, 3)
  assert event.count == 3 * 2
  assert event.event.costs == (1.0,) * 4
  own = _mechanism('split')
  event = own.reported_event('example', np.full(4, 6.0), 1e-6, 3)
  assert event.count == 2
  assert event.event.costs == (3.0,) * 4


def test_a_failing_client_is_counted_at_every_level(tmp_path):
  features = _data().features.copy()
  features[_data().indices(0)] = 3e38  # Overflows in the forward pass.
  clients = [_data().indices(client) for client in range(_CLIENTS)]
  broken = federated_data.FederatedData(features, _data().labels, clients)
  for level in ('joint', 'instance_sequential'):
    runner = inprocess_engine.InProcessEngine(
      _model, broken, _mechanism(level), algorithm_lib.Algorithm(), noise_seed=3
    )
    progress = _train(level, tmp_path / level, runner=runner)
    failed = sum(row['failed_clients'] for row in progress.rows)
    assert 0 < failed <= _ROUNDS
    assert np.all(np.isfinite(progress.state.weights))
