"""The installed commands, run as a user runs them."""

import json
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from tf_bdp.accounting import recorded_distances

_PRIVACY = 'compute_bdp_privacy'
_NOISE = 'compute_noise_from_bdp_budget'


_GOOD = ('--distances=0.1,0.1,0.1', '--rounds=3')


def _run(command, *flags):
  """Runs an installed command as a user does."""
  script = pathlib.Path(sys.executable).with_name(command)
  return subprocess.run(
    [str(script), *flags], capture_output=True, text=True, check=False
  )


# Imports what is expensive once. Each command is then run by a process that is
# split off, and imports the command itself with its flags.
_SPLIT_OFF = """
import importlib, json, os, sys
from tf_bdp.accounting import noise_report, privacy_report
for line in sys.stdin:
  command, flags, *files = json.loads(line)
  if child := os.fork():
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
    continue
  for number, file in enumerate(files, 1):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
  sys.argv = [command, *flags]
  importlib.import_module(f'tf_bdp.analysis.{command}').run()
"""


@pytest.fixture(name='run', scope='module')
def _run_split_off(tmp_path_factory):
  """Runs commands as `_run` does, in a tenth of the time."""
  directory = tmp_path_factory.mktemp('commands')
  files = [directory / name for name in ('stdout', 'stderr')]

  def run(command, *flags):
    job = [command, flags, *map(str, files)]
    process.stdin.write(json.dumps(job) + '\n')
    process.stdin.flush()
    code = int(process.stdout.readline())
    outputs = (file.read_text('utf-8') for file in files)
    return subprocess.CompletedProcess(job, code, *outputs)

  with subprocess.Popen(
    [sys.executable, '-c', _SPLIT_OFF],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    yield run


@pytest.fixture(name='file')
def _file(tmp_path):
  rng = np.random.default_rng(0)
  distances = np.minimum(0.2 * rng.lognormal(0.0, 0.3, (3, 20)), 1.0)
  path = tmp_path / 'distances.npz'
  recorded_distances.save(path, distances, panel=True)
  np.savetxt(tmp_path / 'distances.csv', distances, delimiter=',')
  return path


def test_privacy_command_prints_a_statement(file):
  result = _run(
    _PRIVACY,
    f'--distances_file={file}',
    '--noise_multiplier=1.0',
    '--participation_probability=0.1',
    '--delta=1e-4',
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout.startswith('Client-level privacy: epsilon = ')
  assert "claim 'sample'" in result.stdout
  assert '\nsample*  ' in result.stdout
  assert '\ncensus' not in result.stdout
  assert 'BDP, panel' in result.stdout
  assert not result.stderr  # No bar where nobody watches.


def test_csv_file_is_the_npz_file_once_it_is_called_a_panel(run, file):
  common = (
    '--noise_multiplier=3.0',
    '--participation_probability=1',
    '--format=json',
  )
  npz = run(_PRIVACY, f'--distances_file={file}', *common)
  csv = run(
    _PRIVACY, f'--distances_file={file.with_suffix(".csv")}', '--panel', *common
  )
  assert json.loads(npz.stdout) == json.loads(csv.stdout)


def test_distances_from_a_flag_stand_for_every_round():
  module = ['-m', 'tf_bdp.analysis.compute_bdp_privacy']
  flags = ['--distances=0.1,0.2,0.3,0.4', '--rounds=7', '--noise_multiplier=2']
  flags += ['--participation_probability=0.5', '--format=json']
  output = subprocess.check_output([sys.executable, *module, *flags])
  report = json.loads(output)
  assert (report['rounds'], report['units']) == (7, 4)
  assert report['panel'] is True


def test_noise_command_keeps_the_budget_it_was_given(run, file):
  common = (
    f'--distances_file={file}',
    '--participation_probability=0.1',
    '--delta=1e-4',
    '--format=json',
  )
  result = run(_NOISE, *common, '--epsilon=1.5')
  assert result.returncode == 0, result.stderr
  noise = json.loads(result.stdout)
  assert noise['retrospective'] is True
  multiplier = noise['noise_multipliers']['sample']
  report = run(_PRIVACY, *common, f'--noise_multiplier={multiplier!r}')
  claims = {row['claim']: row for row in json.loads(report.stdout)['claims']}
  assert 1.49 < claims['sample']['epsilon'] <= 1.5


def test_a_panel_that_is_everybody_is_a_census(run, file):
  common = (
    f'--distances_file={file}',
    '--noise_multiplier=3.0',
    '--participation_probability=1',
    '--format=json',
  )
  sample, census = (
    json.loads(run(_PRIVACY, *common, flag).stdout)['claims']
    for flag in ('--nopopulation', '--population')
  )
  assert [row['claim'] for row in sample] == ['dp', 'sample', 'paper']
  assert [row['claim'] for row in census] == [
    *('dp', 'each', 'census', 'sample', 'paper'),
  ]
  (chosen,) = (row for row in census if row['recommended'])
  assert chosen['claim'] == 'census'
  assert chosen['reason'] == 'asked for; dp and each cost more epsilon'
  assert 0.5 < chosen['attack_success_bound'] < 1
  for row in census:
    for key in ('protects', 'against', 'needs', 'rests_on'):
      assert row[key]


def test_participants_of_any_number_can_be_accounted_for(run, tmp_path):
  rng = np.random.default_rng(0)
  rows = [0.05 * rng.random(n) for n in (40, 0, 55, 2, 48, 60)]
  path = tmp_path / 'distances.npz'
  recorded_distances.save(path, rows, panel=False)
  text = json.dumps({'distances': [row.tolist() for row in rows]})
  (tmp_path / 'distances.json').write_text(text)
  common = ('--participation_probability=1', '--format=json')
  reports = [
    run(
      _PRIVACY,
      f'--distances_file={tmp_path / name}',
      '--noise_multiplier=3',
      *common,
    )
    for name in ('distances.npz', 'distances.json')
  ]
  assert reports[0].stdout == reports[1].stdout, reports[0].stderr
  report = json.loads(reports[0].stdout)
  assert (report['rounds'], report['units'], report['panel']) == (6, 0, False)
  noise = run(_NOISE, f'--distances_file={path}', '--epsilon=3', *common)
  assert json.loads(noise.stdout)['rounds'] == 6, noise.stderr
  panel = run(
    _PRIVACY,
    f'--distances_file={path}',
    '--panel',
    '--noise_multiplier=3',
    *common,
  )
  assert panel.stderr == (
    'Error: A panel is measured as a whole in every round. Found rounds of 0 '
    'to 60 units; if they are those that took part, they are no panel.\n'
  )


def test_a_hundred_thousand_equal_rounds_are_no_more_work_than_one(run):
  flags = ['--distances=0.1,0.2,0.3,0.4', '--noise_multiplier=50']
  flags += ['--participation_probability=0.01', '--format=json']
  seconds = []
  for rounds in (1000, 100_000):
    start = time.perf_counter()
    result = run(_PRIVACY, *flags, f'--rounds={rounds}')
    seconds.append(time.perf_counter() - start)
    assert json.loads(result.stdout)['rounds'] == rounds, result.stderr
  # One by one they would take a minute; here it is reading them.
  assert seconds[1] < seconds[0] + 20


@pytest.mark.parametrize(
  'flags, sentence',
  [
    ([], 'Give either --distances_file or --distances.'),
    (['--distances=1,2,3'], '--distances needs --rounds.'),
    (['--distances=1,x', '--rounds=1'], '--distances must be numbers'),
    (['--distances_file=no.npz'], 'There is no file of distances at no.npz.'),
    (['--distances=0.1,0.1', '--rounds=3'], 'at least 3 sampled units'),
    (['--distances=0.1,nan,1', '--rounds=3'], 'Found 1 NaN of 3'),
    (['--distances=', '--rounds=3'], 'at least 3 sampled units. Found 0'),
    (
      [*_GOOD, '--participation_probability=0'],
      'participation_probability must be above 0',
    ),
    ([*_GOOD, '--participation_probability=nan'], 'between 0 and 1. Found nan'),
    ([*_GOOD, '--noise_multiplier=0'], 'noise_multiplier must be positive'),
    ([*_GOOD, '--delta=0'], 'delta must be above 0 and below 1'),
    ([*_GOOD, '--worst_case_distance=0'], '--worst_case_distance must be pos'),
    ([*_GOOD, '--nopanel', '--population'], 'the units are no panel'),
    (['--distances=0.1,0.1,0.1', '--rounds=9999999'], 'at most 1,000,000'),
    (['--distances=0.1,0.1,0.1', '--rounds=0'], '--rounds must be positive'),
    (['--distances=0.1,0.1,5', '--rounds=3'], 'exceed worst_case'),
    (['--sampling=none'], '--sampling=none: value should be one of'),
    (['--round=3'], "Unknown command line flag 'round'"),
    (['distances.npz'], "takes flags only. Found 'distances.npz'."),
  ],
)
def test_bad_flags_get_one_sentence_and_no_traceback(run, flags, sentence):
  result = run(
    _PRIVACY,
    '--noise_multiplier=1',
    '--participation_probability=0.1',
    *flags,
  )
  assert result.returncode == 1
  assert sentence in result.stderr
  assert result.stderr.startswith('Error: ')
  assert 'Traceback' not in result.stderr


def test_missing_flags_are_all_named():
  result = _run(_NOISE, '--distances=0.1,0.1,0.1', '--rounds=3')
  assert result.returncode == 1
  for flag in ('--epsilon', '--participation_probability'):
    assert f'Flag {flag} must have a value' in result.stderr


@pytest.mark.parametrize('command', [_PRIVACY, _NOISE])
def test_help_shows_the_description_and_the_flags(command):
  result = _run(command, '--help')
  assert result.returncode == 0
  assert 'Example:' in result.stdout
  assert '--participation_probability' in result.stdout
