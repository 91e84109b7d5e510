"""Tiny runs of the scripts for each family of the paper's experiments."""

import csv
import pathlib
import subprocess
import sys

import pytest

from tests.experiments import aptos_folder

_ROOT = pathlib.Path(__file__).parents[2]
_MNIST = aptos_folder.DATA / 'tensorflow_datasets'
_DATA = [f'--data_dir={_MNIST}'] if _MNIST.exists() else ['--dataset=digits']
_TINY = (
  *('--clients=6', '--examples_per_client=20', '--rounds=2'),
  *('--evaluate_every=2', '--participation_probability=0.9', '--seed=1'),
)


def _run(script, *flags):
  return subprocess.run(
    [sys.executable, '-m', f'experiments.{script}', *flags],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.parametrize(
  'script, units',
  [
    ('client_privacy', {'client'}),
    ('instance_privacy', {'example'}),
    ('joint_privacy', {'client', 'example'}),
  ],
)
def test_a_script_trains_and_reports_what_it_protects(tmp_path, script, units):
  result = _run(script, *_DATA, *_TINY, f'--report_dir={tmp_path}')
  assert result.returncode == 0, result.stderr
  assert (tmp_path / 'report.html').exists()
  with open(tmp_path / 'metrics.csv', encoding='utf-8') as file:
    *_, last = csv.DictReader(file)
  assert last['round'] == '2'
  assert 0 <= float(last['accuracy']) <= 1
  for unit in ('client', 'example'):
    assert (f'Privacy of {unit}s:' in result.stdout) == (unit in units)


@pytest.mark.parametrize(
  'script, level',
  [
    ('client_privacy', 'joint'),
    ('instance_privacy', 'client'),
    ('joint_privacy', 'client'),
  ],
)
def test_a_script_refuses_the_levels_of_others(tmp_path, script, level):
  result = _run(script, f'--level={level}', f'--report_dir={tmp_path}')
  assert result.returncode
  assert 'level' in result.stdout + result.stderr
  assert not list(tmp_path.iterdir())


@aptos_folder.needs_real
def test_real_retina_images_are_learnt_from_their_features(tmp_path):
  # The first 500 are the test's, so there must be a few more.
  table = (aptos_folder.REAL / 'train.csv').read_text().splitlines()
  (tmp_path / 'train.csv').write_text('\n'.join(table[:580]) + '\n')
  (tmp_path / 'train_images').symlink_to(aptos_folder.REAL / 'train_images')
  flags = (
    *('--dataset=aptos', f'--data_dir={tmp_path}', '--augmentation_versions=1'),
    *(f'--resnet50_weights={aptos_folder.REAL_WEIGHTS}', *_TINY),
    *('--rounds=30', '--evaluate_every=30', '--examples_per_client=10'),
    *('--noise_multiplier=0.1', '--learning_rate=1.0'),
    *(f'--cache_dir={tmp_path / "cache"}', f'--report_dir={tmp_path / "run"}'),
  )
  result = _run('client_privacy', *flags)
  assert result.returncode == 0, result.stderr
  with open(tmp_path / 'run' / 'metrics.csv', encoding='utf-8') as file:
    *_, last = csv.DictReader(file)
  # Half of the images are of one class.
  assert float(last['accuracy']) > 0.55
