"""The training script at every level of privacy, run as a user runs it.

Client privacy, the default, has tests of its own.
"""

import concurrent.futures
import csv
import json
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments import run as run_lib
from tf_bdp.training import checkpoint

_ROOT = pathlib.Path(__file__).parents[2]
_SMALL = (
  *('--clients=12', '--filters=2', '--client_batch_size=16', '--noise_seed=1'),
  *('--rounds=3', '--evaluate_every=3'),
)
# Enough rounds, and slow enough, to be killed between two of them.
_LONG = ('--rounds=12', '--evaluate_every=1', '--checkpoint_every=2')
_LEVELS = {
  'instance_sequential': (),
  'instance_parallel': ('--clipping=example', '--panel_examples=5', *_LONG),
  'instance_aggregate': ('--server_noise_multiplier=0.5',),
  'joint': ('--example_delta=1e-4', '--estimator=student_t'),
  'split': ('--server_noise_multiplier=1', '--algorithm=fed_avg'),
}
_BOTH = ('joint', 'split')
_ACCOUNTINGS = {
  'instance_sequential': 'Sequential accounting',
  'instance_parallel': 'Parallel accounting',
  'instance_aggregate': 'Aggregate accounting',
  'joint': 'Aggregate accounting',
  'split': 'Parallel accounting',
}
_SERVER_SAW_ALL = 'The server saw each client'
_SERVER_SAW_SUMS = 'The server saw sums of updates'


def _command(directory, *flags):
  module = [sys.executable, '-m', 'experiments.train']
  return [*module, f'--report_dir={directory}', *flags]


def _run(directory, *flags):
  """Runs the script; its output goes to files, which no worker can hold up."""
  directory.mkdir(exist_ok=True)
  printed, errors = directory / 'printed.txt', directory / 'errors.txt'
  with open(printed, 'w') as out, open(errors, 'w') as err:
    code = subprocess.run(
      _command(directory, *flags),
      cwd=_ROOT,
      stdout=out,
      stderr=err,
      timeout=200,
      check=False,
    ).returncode
  return code, printed.read_text(), errors.read_text()


def _flags(level):
  return (f'--level={level}', *_SMALL, *_LEVELS[level])


def _rows(directory):
  with open(directory / 'metrics.csv', newline='') as file:
    return [
      {name: value for name, value in row.items() if name != 'seconds'}
      for row in csv.DictReader(file)
    ]


@pytest.fixture(name='runs', scope='module')
def _runs(tmp_path_factory):
  """One run of each level, two at a time."""
  root = tmp_path_factory.mktemp('levels')

  def run(level):
    return _run(root / level, *_flags(level))

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    results = dict(zip(_LEVELS, pool.map(run, _LEVELS)))
  for level, (code, _, errors) in results.items():
    assert code == 0, f'{level}: {errors[-3000:]}'
  return {level: (root / level, results[level][1]) for level in _LEVELS}


def _units(level):
  return ('client', 'example') if level in _BOTH else ('example',)


@pytest.mark.parametrize('level', _LEVELS)
def test_the_report_directory_has_all_that_was_promised(runs, level):
  directory, printed = runs[level]
  for name in (
    *('statement.txt', 'settings.json', 'metrics.csv', 'report.html'),
    *('epsilon_over_rounds.png', 'accuracy_over_epsilon.png', 'distances.png'),
    *('checkpoint.npz', 'model/saved_model.pb', 'tensorboard'),
  ):
    assert (directory / name).exists(), name
  settings = json.loads((directory / 'settings.json').read_text())
  assert settings['level'] == level
  assert f'Report: {directory / "report.html"}' in printed


@pytest.mark.parametrize('level', _LEVELS)
def test_every_unit_that_is_protected_has_its_figures_and_no_other(runs, level):
  directory, printed = runs[level]
  statement = (directory / 'statement.txt').read_text()
  page = (directory / 'report.html').read_text()
  for unit in ('client', 'example'):
    wanted = unit in _units(level)
    assert (f'Privacy of {unit}s:' in printed) == wanted
    for text in (statement, page):
      assert (f'{unit.capitalize()}-level DP' in text) == wanted
      assert (f'{unit.capitalize()}-level BDP' in text) == wanted
  if level == 'joint':
    assert 'at delta = 0.001' in statement
    assert 'at delta = 0.0001' in statement


@pytest.mark.parametrize('level', _LEVELS)
def test_every_row_has_epsilons_of_what_is_protected(runs, level):
  directory, _ = runs[level]
  rows = _rows(directory)
  prefixes = ('', 'example_') if level in _BOTH else ('',)
  names = {f'{p}{kind}_epsilon' for p in prefixes for kind in ('dp', 'bdp')}
  assert {name for name in rows[0] if 'epsilon' in name} == names
  assert len(rows) == (12 if level == 'instance_parallel' else 3)
  for row in rows:
    for prefix in prefixes:
      bdp, dp = (
        float(row[f'{prefix}{kind}_epsilon']) for kind in ('bdp', 'dp')
      )
      assert 0 <= bdp <= dp < np.inf


@pytest.mark.parametrize('level', _LEVELS)
def test_the_page_says_how_was_accounted_and_what_the_server_saw(runs, level):
  page = (runs[level][0] / 'report.html').read_text()
  for accounting in set(_ACCOUNTINGS.values()):
    assert (accounting in page) == (_ACCOUNTINGS[level] == accounting)
  assert _SERVER_SAW_ALL in page
  assert _SERVER_SAW_SUMS not in page
  assert ('zero-out adjacency' in page) == (level == 'joint')
  assert ('the noise of the server alone' in page) == (level == 'split')
  batch = level != 'instance_parallel'
  assert ('Batch gradients were clipped as a whole' in page) == batch
  assert 'The noise was seeded' in page


@pytest.mark.slow
def test_a_run_killed_midway_ends_as_if_it_had_not_been(runs, tmp_path):
  level = 'instance_parallel'
  with subprocess.Popen(
    _command(tmp_path, *_flags(level)),
    cwd=_ROOT,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  ) as process:
    path = tmp_path / 'metrics.csv'
    while process.poll() is None and not (
      path.exists() and path.read_text().count('\n') > 5
    ):
      time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
  assert process.returncode == -signal.SIGKILL
  assert 5 <= len(_rows(tmp_path)) < 12
  code, _, errors = _run(tmp_path, *_flags(level), '--resume')
  assert code == 0, errors
  directory, _ = runs[level]
  assert _rows(tmp_path) == _rows(directory)
  ours, theirs = (
    checkpoint.load(path / 'checkpoint.npz').arrays
    for path in (tmp_path, directory)
  )
  assert ours.keys() == theirs.keys()
  for name, array in ours.items():
    np.testing.assert_array_equal(array, theirs[name])
  assert (tmp_path / 'statement.txt').read_text() == (
    (directory / 'statement.txt').read_text()
  )


@pytest.mark.slow
def test_a_run_with_secure_aggregation_reports_costs_and_no_distances(tmp_path):
  code, printed, errors = _run(
    tmp_path,
    *('--level=joint', '--engine=tff', '--secure_aggregation', *_SMALL),
    *('--clients=6', '--rounds=2', '--evaluate_every=2'),
    *('--participation_probability=0.9', '--estimator=student_t'),
  )
  assert code == 0, errors[-3000:]
  rows = _rows(tmp_path)
  assert len(rows) == 2
  for prefix in ('', 'example_'):
    last = {k: float(rows[-1][f'{prefix}{k}_epsilon']) for k in ('dp', 'bdp')}
    assert 0 < last['bdp'] <= last['dp'] < np.inf
  page = (tmp_path / 'report.html').read_text()
  assert _SERVER_SAW_SUMS in page
  assert _SERVER_SAW_ALL not in page
  assert 'There are no distances to show.' in page
  assert not (tmp_path / 'distances.npz').exists()
  arrays = checkpoint.load(tmp_path / 'checkpoint.npz').arrays
  assert {'reported_client', 'reported_example'} <= arrays.keys()
  assert arrays['squared_measures'].size == 0
  assert 'examples_squared_moves' not in arrays
  for unit in ('clients', 'examples'):
    assert f'Privacy of {unit}:' in printed


# What is refused.


def test_a_mistake_gets_a_sentence_and_leaves_nothing_behind(tmp_path):
  code, _, errors = _run(tmp_path, '--level=joint', '--secure_aggregation')
  assert code == 1
  assert 'Error: --secure_aggregation is done by TFF' in errors
  assert 'Add --engine=tff' in errors
  assert 'Traceback' not in errors
  assert not (tmp_path / 'checkpoint.npz').exists()


@pytest.mark.parametrize(
  ('level', 'name', 'value'),
  [
    ('client', 'server_noise_multiplier', 1.0),
    ('client', 'clipping', 'example'),
    ('client', 'example_accounting', 'parallel'),
    ('client', 'joint_reference', 'last_mean'),
    ('client', 'panel_examples', 5),
    ('client', 'example_delta', 1e-4),
    ('client', 'example_bdp_epsilon_budget', 1.0),
    ('instance_parallel', 'example_delta', 1e-4),
    ('instance_parallel', 'example_bdp_epsilon_budget', 1.0),
    ('instance_aggregate', 'joint_reference', 'last_mean'),
    ('split', 'joint_reference', 'last_mean'),
    ('split', 'mechanism', 'sum'),
    ('joint', 'mechanism', 'sum'),
    ('joint', 'clip_quantile', 0.5),
  ],
)
def test_a_flag_without_effect_at_a_level_is_refused(level, name, value):
  sentence = f'--{name} has no effect with --level={level}. Leave it out.'
  with pytest.raises(ValueError, match=sentence):
    run_lib.Settings(level=level, **{name: value})


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    ({'panel_size': 5}, 'Leave out --panel_size and --panel_examples'),
    ({'panel_examples': 5}, 'Leave out --panel_size and --panel_examples'),
    ({'estimator': 'betting'}, 'The betting estimator needs the single costs'),
    ({'engine': 'inprocess'}, 'Add --engine=tff'),
  ],
)
def test_what_secure_sums_do_not_allow_is_refused(changes, sentence):
  settings = {'level': 'joint', 'engine': 'tff', 'secure_aggregation': True}
  run_lib.Settings(**settings)
  with pytest.raises(ValueError, match=sentence):
    run_lib.Settings(**{**settings, **changes})


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    (
      {'level': 'joint', 'algorithm': 'fed_avg'},
      'Joint privacy is for FedSGD only',
    ),
    ({'level': 'split'}, 'needs both a noise_multiplier'),
    (
      {'level': 'instance_sequential', 'panel_examples': 5},
      'there is no panel of examples',
    ),
    (
      {'level': 'joint', 'panel_examples': 5, 'panel_size': 0},
      'A panel of examples needs a panel of clients',
    ),
    (
      {'level': 'instance_parallel', 'server_noise_multiplier': 1.0},
      'server_noise_multiplier must be 0',
    ),
    (
      {'level': 'instance_parallel', 'example_accounting': 'sequential'},
      "is accounted for as 'parallel'",
    ),
    (
      {'level': 'split', 'example_accounting': 'aggregate'},
      'cannot be counted together',
    ),
    ({'level': 'joint', 'noise_multiplier': -1.0}, 'must be non-negative'),
    ({'level': 'joint', 'client_batch_size': 0}, 'must be a positive integer'),
    ({'level': 'joint', 'delta': 0.0}, 'delta must be above 0'),
    (
      {'level': 'joint', 'joint_reference': 'last_mean', 'engine': 'tff'},
      'not sent the last mean',
    ),
  ],
)
def test_settings_that_do_not_fit_the_level_are_refused_before_any_round(
  changes, sentence, tmp_path
):
  with pytest.raises(ValueError, match=sentence):
    run_lib.run(run_lib.Settings(clients=12, filters=2, **changes), tmp_path)
  assert not list(tmp_path.iterdir())
