"""The training scripts at every level of privacy, as a user runs them."""

import functools
import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from experiments import features
from tests.experiments import aptos_folder, scripts
from tf_bdp.training import checkpoint

_SMALL = (
  *('--clients=12', '--filters=2', '--client_batch_size=16', '--noise_seed=1'),
  '--sampling_seed=0',
  *('--dataset=digits', '--examples_per_client=50', '--evaluate_every=3'),
  '--rounds=3',
)
_LEVELS = {
  'client': ('--noise_multiplier=20',),
  'instance_sequential': (),
  'instance_parallel': ('--clipping=example', '--panel_examples=5'),
  'instance_aggregate': ('--server_noise_multiplier=0.5',),
  'joint': ('--example_delta=1e-4',),
  'split': ('--server_noise_multiplier=4', '--algorithm=fed_avg'),
}
# Those that are made for a family of levels have other defaults.
_SCRIPTS = {
  'instance_aggregate': 'instance_privacy',
  'joint': 'joint_privacy',
}
_BOTH = ('joint', 'split')
_ACCOUNTINGS = {
  'client': '',
  'instance_sequential': 'Sequential accounting',
  'instance_parallel': 'Parallel accounting',
  'instance_aggregate': 'Aggregate accounting',
  'joint': 'Aggregate accounting',
  'split': 'Parallel accounting',
}
_SERVER_SAW_ALL = 'The server saw each client'
_SERVER_SAW_SUMS = 'The server saw sums of updates'


def _flags(level):
  return (f'--level={level}', *_SMALL, *_LEVELS[level])


def _train(directory, *flags, script='train', **options):
  return scripts.run(script, f'--report_dir={directory}', *flags, **options)


@pytest.fixture(name='runs', scope='module')
def _runs(tmp_path_factory):
  """One run of each level: its directory and what it printed."""
  root, runs = tmp_path_factory.mktemp('levels'), {}
  for level in _LEVELS:
    script = _SCRIPTS.get(level, 'train')
    result = _train(root / level, *_flags(level), script=script)
    assert result.code == 0, f'{level}: {result.errors[-3000:]}'
    runs[level] = root / level, result.printed
  return runs


@pytest.fixture(name='of_clients')
def _of_clients(runs):
  return runs['client'][0]


def _units(level):
  if level == 'client':
    return ('client',)
  return ('client', 'example') if level in _BOTH else ('example',)


@pytest.mark.parametrize('level', _LEVELS)
def test_the_report_directory_has_all_that_was_promised(runs, level):
  directory, printed = runs[level]
  for name in (
    *('statement.txt', 'settings.json', 'metrics.csv', 'report.html'),
    *('privacy.json', 'PRIVATE.txt'),
    *('epsilon_over_rounds.png', 'accuracy_over_epsilon.png', 'distances.png'),
    *('checkpoint.npz', 'model/saved_model.pb', 'tensorboard'),
  ):
    assert (directory / name).exists(), name
  assert (directory / 'distances.npz').exists() == (level == 'client')
  settings = json.loads((directory / 'settings.json').read_text())
  assert (settings['level'], settings['clients']) == (level, 12)
  assert f'Report: {directory / "report.html"}' in printed
  for claim in ('dp', 'sample', 'paper'):
    assert re.search(rf'^{claim}[* ]', printed, re.M)
  everybody = level in ('client', *_BOTH)  # All clients are in the panel.
  for claim in ('census', 'each'):
    assert bool(re.search(rf'^{claim}[* ]', printed, re.M)) == everybody


@pytest.mark.parametrize('level', _LEVELS)
def test_every_unit_that_is_protected_has_its_figures_and_no_other(runs, level):
  directory, printed = runs[level]
  statement = (directory / 'statement.txt').read_text()
  page = (directory / 'report.html').read_text()
  for unit in ('client', 'example'):
    wanted = unit in _units(level)
    assert (f'Privacy of {unit}s' in printed) == wanted
    for text in (statement, page):
      assert (f'{unit.capitalize()}-level privacy' in text) == wanted
  if level == 'joint':
    assert 'at delta = 0.001' in statement
    assert 'at delta = 0.0001' in statement


@pytest.mark.parametrize('level', _LEVELS)
def test_every_row_has_epsilons_of_what_is_protected(runs, level):
  directory, _ = runs[level]
  rows = scripts.rows(directory)
  prefixes = ('', 'example_') if level in _BOTH else ('',)
  names = [name for name in rows[0] if 'epsilon' in name]
  assert len(rows) == 3
  for row in rows[:2]:  # Only the last one was evaluated.
    assert not any(row[name] for name in names)
  last = {name: float(rows[2][name]) for name in names}
  for prefix in prefixes:
    assert f'{prefix}sample_epsilon' in names
    dp = last[f'{prefix}dp_epsilon']
    for claim in ('each', 'census', 'sample'):
      # Bounds that may fail keep a tenth of delta, which DP does not.
      most = 1.04 * dp if claim == 'sample' else dp
      assert 0 <= last.get(f'{prefix}{claim}_epsilon', 0.0) <= most
    assert dp < np.inf


@pytest.mark.parametrize('level', _LEVELS)
def test_the_page_says_how_was_accounted_and_what_the_server_saw(runs, level):
  page = (runs[level][0] / 'report.html').read_text()
  for accounting in set(_ACCOUNTINGS.values()) - {''}:
    assert (accounting in page) == (_ACCOUNTINGS[level] == accounting)
  assert (_SERVER_SAW_ALL in page) == (level != 'client')
  assert _SERVER_SAW_SUMS not in page
  assert ('zero-out adjacency' in page) == (level == 'joint')
  assert ('the noise of the server alone' in page) == (level == 'split')
  batch = level not in ('client', 'instance_parallel')
  assert ('Batch gradients were clipped as a whole' in page) == batch
  assert 'The noise was seeded' in page


def test_the_saved_model_has_the_accuracy_of_the_last_row(of_clients):
  import tensorflow as tf

  from experiments import datasets

  dataset = datasets.load('digits')
  model = tf.keras.models.load_model(of_clients / 'model')
  predicted = np.argmax(model.predict(dataset.test_features, verbose=0), axis=1)
  accuracy = np.mean(predicted == dataset.test_labels)
  last = scripts.rows(of_clients)[-1]
  assert accuracy == pytest.approx(float(last['accuracy']))


def _command(directory):
  """Runs the command on a run's distances; returns its claims by name."""
  output = subprocess.check_output(
    [
      *(sys.executable, '-m', 'tf_bdp.analysis.compute_bdp_privacy'),
      f'--distances_file={directory / "distances.npz"}',
      *('--noise_multiplier=20', '--participation_probability=0.5'),
      *('--delta=1e-3', '--mechanism=mean', '--format=json'),
    ],
    text=True,
  )
  return {row['claim']: row for row in json.loads(output)['claims']}


def _claims(directory):
  report = json.loads((directory / 'privacy.json').read_text())['client']
  return {row['claim']: row for row in report['claims']}


def test_the_command_makes_the_claims_of_the_report(of_clients):
  found, wanted = _command(of_clients), _claims(of_clients)
  assert list(found) == ['dp', 'each', 'census', 'sample', 'paper']
  assert found.keys() == wanted.keys()
  for name, row in found.items():
    assert row['epsilon'] == pytest.approx(wanted[name]['epsilon'], rel=1e-3)
    assert row['recommended'] == wanted[name]['recommended']


def test_distances_of_clients_that_are_no_panel_are_not_saved_as_one(tmp_path):
  result = _train(tmp_path, *_flags('client'), '--rounds=1', '--panel_size=0')
  assert result.code == 0, result.errors
  assert (tmp_path / 'report.html').exists()
  found, wanted = _command(tmp_path), _claims(tmp_path)
  assert list(found) == list(wanted) == ['dp', 'sample', 'paper']
  for name, row in found.items():
    assert row['epsilon'] == pytest.approx(wanted[name]['epsilon'], rel=1e-3)


def test_held_out_clients_have_a_file_and_a_finding_of_their_own(tmp_path):
  flags = ('--held_out_clients=4', '--rounds=1')
  result = _train(tmp_path, *_flags('client'), *flags)
  assert result.code == 0, result.errors
  with np.load(tmp_path / 'held_out_distances.npz') as file:
    assert file['distances'].shape == (1, 4)
  page = (tmp_path / 'report.html').read_text()
  assert 'held-out gap' in page
  assert '4 clients, drawn at random, never trained' in page


def test_a_fixed_number_of_clients_has_a_report_of_dp_alone(tmp_path):
  result = _train(
    tmp_path, *_flags('client'), '--sampling=fixed_size', '--rounds=2'
  )
  assert result.code == 0, result.errors
  assert 'dp* ' in result.printed
  for claim in ('each', 'census', 'sample', 'paper'):
    assert f'\n{claim}' not in result.printed
  assert [row['participants'] for row in scripts.rows(tmp_path)] == ['6', '6']
  page = (tmp_path / 'report.html').read_text()
  assert 'replace-one adjacency' in page


# Runs that go on.


def test_a_run_of_secret_draws_can_be_resumed(tmp_path):
  flags = [f for f in _flags('client') if not f.startswith('--sampling_seed')]
  for more in (('--rounds=2',), ('--rounds=4', '--resume')):
    result = _train(tmp_path, *flags, *more, report=False)
    assert result.code == 0, result.errors
  assert len(scripts.rows(tmp_path)) == 4
  contents = checkpoint.load(tmp_path / 'checkpoint.npz').contents
  assert len(bytes.fromhex(contents['private_panel_key'])) == 32
  assert contents['settings']['sampling_seed'] is None


def test_another_run_is_not_overwritten_and_other_settings_are_named(
  of_clients,
):
  result = _train(of_clients, *_flags('client'))
  assert result.code == 1
  assert result.errors.startswith('Error: ')
  assert 'holds a run already' in result.errors
  result = _train(of_clients, *_flags('client'), '--resume', '--clip_norm=3')
  assert result.code == 1
  assert 'clip_norm: 1.0 in the checkpoint, 3.0 here' in result.errors


def test_a_run_that_is_resumed_is_not_discarded(of_clients):
  before = (of_clients / 'metrics.csv').read_text()
  flags = (*_flags('client'), '--overwrite', '--resume')
  result = _train(of_clients, *flags, report=False)
  assert result.code == 0, result.errors
  assert (of_clients / 'metrics.csv').read_text() == before


def test_a_run_can_have_more_rounds_than_planned(of_clients, tmp_path):
  for flags in (('--rounds=2',), ('--rounds=3', '--resume')):
    result = _train(tmp_path, *_flags('client'), *flags, report=False)
    assert result.code == 0, result.errors
  ours, theirs = scripts.rows(tmp_path), scripts.rows(of_clients)
  # The second round was the last one, and evaluated.
  assert ours[1]['census_epsilon'] and not theirs[1]['census_epsilon']
  assert ours[-1] == theirs[-1]


def test_rounds_that_composition_counted_on_stay_as_they_are(runs):
  directory, _ = runs['instance_sequential']
  flags = (*_flags('instance_sequential'), '--rounds=4', '--resume')
  result = _train(directory, *flags)
  assert result.code == 1
  assert 'The run was planned for 3 rounds' in result.errors


@pytest.mark.slow
@pytest.mark.parametrize(
  ('engine', 'level', 'sent'),
  [
    ('inprocess', 'client', signal.SIGKILL),
    ('tff', 'instance_parallel', signal.SIGINT),
  ],
)
def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(
  tmp_path, engine, level, sent
):
  flags = (
    *(f'--engine={engine}', *_flags(level)),
    *('--rounds=200', '--evaluate_every=4', '--checkpoint_every=2'),
  )
  cut, whole = tmp_path / 'cut', tmp_path / 'whole'
  process, said = scripts.run_until(5, sent, cut, *flags)
  done = len(scripts.rows(cut))
  assert 5 <= done < 100
  assert 'Traceback' not in said
  if sent == signal.SIGINT:
    assert process.returncode == 130
    assert 'To go on: the same command with --resume' in said
  else:
    assert process.returncode == -signal.SIGKILL
  flags = (*flags, f'--rounds={done + 2}')
  for directory in (cut, whole):
    result = _train(directory, *flags, '--resume', report=False)
    assert result.code == 0, result.errors
  scripts.assert_same_run(cut, whole, arrays=engine == 'inprocess')


@pytest.mark.slow
def test_a_run_with_secure_aggregation_reports_costs_and_no_distances(tmp_path):
  result = _train(
    tmp_path,
    *('--level=joint', '--engine=tff', '--secure_aggregation', *_SMALL),
    *('--clients=6', '--rounds=2', '--evaluate_every=2'),
    *('--participation_probability=0.9', '--estimator=student_t'),
  )
  assert result.code == 0, result.errors[-3000:]
  rows = scripts.rows(tmp_path)
  assert len(rows) == 2
  for prefix in ('', 'example_'):
    last = {k: float(rows[-1][f'{prefix}{k}_epsilon']) for k in ('dp', 'paper')}
    assert 0 < last['paper'] <= last['dp'] < np.inf
  page = (tmp_path / 'report.html').read_text()
  assert _SERVER_SAW_SUMS in page
  assert _SERVER_SAW_ALL not in page
  assert 'There are no distances to show.' in page
  assert not (tmp_path / 'distances.npz').exists()
  arrays = checkpoint.load(tmp_path / 'checkpoint.npz').arrays
  measured = {
    name.removeprefix('measured_'): array for name, array in arrays.items()
  }
  assert {'reported_client', 'reported_example'} <= measured.keys()
  assert measured['squared_measures'].size == 0
  assert 'examples_squared_moves' not in measured
  for unit in ('clients', 'examples'):
    assert f'Privacy of {unit}' in result.printed


# What is refused, and what is answered at once.


@pytest.mark.parametrize(
  ('flags', 'sentence'),
  [
    (['--noise_multiplier=-1'], 'noise_multiplier must be non-negative'),
    (['--delta=0'], 'delta must be above 0'),
    (['--participation_probability=1.5'], 'must be between 0 and 1'),
    (['--clients=5000'], 'There are 1500 examples for 5000 clients'),
    (['--clients=0'], 'clients must be a positive integer'),
    (['--rounds=-1'], 'rounds must be a positive integer'),
    (['--panel_size=101'], 'The panel must be at most the 100 clients'),
    (['--level=none'], 'should be one of'),
    (['--learning_rate=fast'], 'Pass --help to see the flags'),
    (['extra'], "The command takes flags only. Found 'extra'"),
    (['--level=joint', '--secure_aggregation'], 'Add --engine=tff'),
  ],
)
def test_a_mistake_gets_a_sentence_and_leaves_nothing_behind(
  tmp_path, flags, sentence
):
  result = _train(tmp_path, *flags)
  assert result.code == 1
  assert result.errors.startswith('Error: ')
  assert sentence in result.errors
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  'script, level',
  [
    ('client_privacy', 'joint'),
    ('instance_privacy', 'client'),
    ('joint_privacy', 'client'),
  ],
)
def test_a_script_refuses_the_levels_of_others(tmp_path, script, level):
  result = _train(tmp_path, f'--level={level}', script=script)
  assert result.code == 1
  assert 'This script is for --level=' in result.errors
  assert not list(tmp_path.iterdir())


# Real data.


@scripts.needs_mnist
def test_mnist_is_learnt_from_tensorflow_datasets(tmp_path):
  result = _train(
    tmp_path,
    *(f'--data_dir={scripts.MNIST}', '--clients=1000', '--rounds=2'),
    *('--participation_probability=0.02', '--panel_size=20', '--filters=2'),
    '--evaluate_every=2',
    script='client_privacy',
  )
  assert result.code == 0, result.errors
  assert len(scripts.rows(tmp_path)) == 2
  for unit, wanted in {'client': True, 'example': False}.items():
    assert (f'Privacy of {unit}s' in result.printed) == wanted


@aptos_folder.needs_real
def test_real_retina_images_are_learnt_from_their_features(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(
    features,
    'aptos_features',
    functools.partial(features.aptos_features, test_size=40),
  )
  table = (aptos_folder.REAL / 'train.csv').read_text().splitlines()
  (tmp_path / 'train.csv').write_text('\n'.join(table[:110]) + '\n')
  (tmp_path / 'train_images').symlink_to(aptos_folder.REAL / 'train_images')
  flags = (
    *('--dataset=aptos', f'--data_dir={tmp_path}', '--augmentation_versions=1'),
    *(f'--resnet50_weights={aptos_folder.REAL_WEIGHTS}', '--clients=6'),
    *(
      '--participation_probability=0.9',
      '--rounds=30',
      '--evaluate_every=30',
      '--examples_per_client=10',
    ),
    *('--noise_multiplier=0.1', '--learning_rate=1.0', '--noise_seed=1'),
    *(f'--cache_dir={tmp_path / "cache"}', '--seed=1', '--sampling_seed=1'),
  )
  result = _train(tmp_path / 'run', *flags, script='client_privacy')
  assert result.code == 0, result.errors
  last = scripts.rows(tmp_path / 'run')[-1]
  # Half of the images are of one class.
  assert float(last['accuracy']) > 0.55
