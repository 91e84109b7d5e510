"""The installed commands, run as a user runs them."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tf_bdp.accounting import recorded_distances

_PRIVACY = 'compute_bdp_privacy'
_NOISE = 'compute_noise_from_bdp_budget'


def _run(command, *flags):
  script = pathlib.Path(sys.executable).with_name(command)
  return subprocess.run(
    [str(script), *flags], capture_output=True, text=True, check=False
  )


@pytest.fixture(name='file')
def _file(tmp_path):
  rng = np.random.default_rng(0)
  distances = np.minimum(0.2 * rng.lognormal(0.0, 0.3, (10, 40)), 1.0)
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
  assert 'Epsilon, panel' in result.stdout


def test_csv_file_is_the_npz_file_once_it_is_called_a_panel(file):
  common = (
    '--noise_multiplier=1.0',
    '--participation_probability=0.1',
    '--format=json',
  )
  npz = _run(_PRIVACY, f'--distances_file={file}', *common)
  csv = _run(
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


def test_noise_command_keeps_the_budget_it_was_given(file):
  common = (
    f'--distances_file={file}',
    '--participation_probability=0.1',
    '--delta=1e-4',
    '--format=json',
  )
  result = _run(_NOISE, *common, '--epsilon=1.5')
  assert result.returncode == 0, result.stderr
  noise = json.loads(result.stdout)
  assert noise['retrospective'] is True
  multiplier = noise['noise_multipliers']['BDP, panel']
  report = _run(_PRIVACY, *common, f'--noise_multiplier={multiplier!r}')
  rows = {row['method']: row for row in json.loads(report.stdout)['rows']}
  assert 1.2 < rows['BDP, panel']['epsilon'] <= 1.5


@pytest.mark.parametrize(
  'flags, sentence',
  [
    ([], 'Give either --distances_file or --distances.'),
    (['--distances=1,2,3'], '--distances needs --rounds.'),
    (['--distances=1,x', '--rounds=1'], '--distances must be numbers'),
    (['--distances_file=no.npz'], 'There is no file of distances at no.npz.'),
    (['--distances=0.1,0.1', '--rounds=3'], 'at least 3 sampled units'),
    (['--distances=0.1,0.1,0.1', '--rounds=0'], '--rounds must be positive'),
    (['--distances=0.1,0.1,5', '--rounds=3'], 'exceed worst_case'),
    (['--sampling=none'], '--sampling=none: value should be one of'),
    (['--round=3'], "Unknown command line flag 'round'"),
    (['distances.npz'], "takes flags only. Found 'distances.npz'."),
  ],
)
def test_bad_flags_get_one_sentence_and_no_traceback(flags, sentence):
  result = _run(
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
