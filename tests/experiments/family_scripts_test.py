"""Tiny runs of the scripts for each family of the paper's experiments."""

import functools

import pytest

from experiments import features
from tests.experiments import aptos_folder, scripts

_TINY = (
  *('--clients=6', '--examples_per_client=20', '--rounds=2'),
  *('--evaluate_every=2', '--participation_probability=0.9', '--seed=1'),
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
  flags = (*_TINY, '--dataset=digits', '--filters=2')
  result = scripts.run(script, *flags, f'--report_dir={tmp_path}')
  assert result.code == 0, result.errors
  assert (tmp_path / 'report.html').exists()
  last = scripts.rows(tmp_path)[-1]
  assert last['round'] == '2'
  assert 0 <= float(last['accuracy']) <= 1
  for unit in ('client', 'example'):
    assert (f'Privacy of {unit}s:' in result.printed) == (unit in units)


@pytest.mark.parametrize(
  'script, level',
  [
    ('client_privacy', 'joint'),
    ('instance_privacy', 'client'),
    ('joint_privacy', 'client'),
  ],
)
def test_a_script_refuses_the_levels_of_others(tmp_path, script, level):
  result = scripts.run(script, f'--level={level}', f'--report_dir={tmp_path}')
  assert result.code == 1
  assert 'This script is for --level=' in result.errors
  assert not list(tmp_path.iterdir())


@scripts.needs_mnist
def test_mnist_is_learnt_from_tensorflow_datasets(tmp_path):
  result = scripts.run(
    'client_privacy',
    *(f'--data_dir={scripts.MNIST}', '--clients=1000', '--rounds=2'),
    *('--participation_probability=0.02', '--panel_size=20', '--filters=2'),
    *('--noise_multiplier=0.5', '--evaluate_every=2'),
    f'--report_dir={tmp_path}',
  )
  assert result.code == 0, result.errors
  assert len(scripts.rows(tmp_path)) == 2


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
    *(f'--resnet50_weights={aptos_folder.REAL_WEIGHTS}', *_TINY),
    *('--rounds=30', '--evaluate_every=30', '--examples_per_client=10'),
    *('--noise_multiplier=0.1', '--learning_rate=1.0', '--noise_seed=1'),
    *(f'--cache_dir={tmp_path / "cache"}', f'--report_dir={tmp_path / "run"}'),
  )
  result = scripts.run('client_privacy', *flags)
  assert result.code == 0, result.errors
  last = scripts.rows(tmp_path / 'run')[-1]
  # Half of the images are of one class.
  assert float(last['accuracy']) > 0.55
