"""The training script, run as a user runs it."""

import csv
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from tf_bdp.training import checkpoint

_ROOT = pathlib.Path(__file__).parents[2]
_MNIST = _ROOT.parent / 'shared/data/tensorflow_datasets'
_SMALL = (
  *('--clients=20', '--rounds=12', '--checkpoint_every=2', '--noise_seed=1'),
  *('--evaluate_every=3', '--participation_probability=0.7'),
)


def _command(directory, *flags):
  module = [sys.executable, '-m', 'experiments.train']
  return [*module, f'--report_dir={directory}', *flags]


def _run(directory, *flags, timeout=200):
  return subprocess.run(
    _command(directory, *flags),
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=timeout,
    check=False,
  )


def _rows(directory):
  with open(directory / 'metrics.csv', newline='') as file:
    return [
      {name: value for name, value in row.items() if name != 'seconds'}
      for row in csv.DictReader(file)
    ]


@pytest.fixture(name='whole', scope='module')
def _whole(tmp_path_factory):
  directory = tmp_path_factory.mktemp('whole')
  result = _run(directory, *_SMALL)
  assert result.returncode == 0, result.stderr
  return directory, result.stdout


def test_a_run_prints_the_table_and_the_path_of_its_report(whole):
  directory, printed = whole
  for method in ('DP, RDP', 'DP, PLD', 'BDP, panel', 'BDP, distribution-free'):
    assert method in printed
  assert f'Report: {directory / "report.html"}' in printed


def test_distances_of_clients_that_are_no_panel_are_not_saved_as_one(tmp_path):
  result = _run(tmp_path, *_SMALL, '--rounds=2', '--panel_size=0')
  assert result.returncode == 0, result.stderr
  assert (tmp_path / 'report.html').exists()
  assert not (tmp_path / 'distances.npz').exists()


def test_the_report_directory_has_all_that_was_promised(whole):
  directory, _ = whole
  for name in (
    *('statement.txt', 'settings.json', 'metrics.csv', 'report.html'),
    *('epsilon_over_rounds.png', 'accuracy_over_epsilon.png', 'distances.png'),
    *('distances.npz', 'model/saved_model.pb', 'tensorboard'),
  ):
    assert (directory / name).exists(), name
  settings = json.loads((directory / 'settings.json').read_text())
  assert settings['clients'] == 20
  assert 'The noise was seeded' in (directory / 'report.html').read_text()


def test_the_saved_model_has_the_accuracy_of_the_last_row(whole):
  import tensorflow as tf

  from experiments import datasets

  directory, _ = whole
  dataset = datasets.load('digits')
  model = tf.keras.models.load_model(directory / 'model')
  predicted = np.argmax(model.predict(dataset.test_features, verbose=0), axis=1)
  accuracy = np.mean(predicted == dataset.test_labels)
  assert accuracy == pytest.approx(float(_rows(directory)[-1]['accuracy']))


def test_the_command_gives_the_statement_of_the_report(whole):
  directory, _ = whole
  output = subprocess.check_output(
    [
      *(sys.executable, '-m', 'tf_bdp.analysis.compute_bdp_privacy'),
      f'--distances_file={directory / "distances.npz"}',
      *('--noise_multiplier=2', '--participation_probability=0.7'),
      *('--delta=1e-3', '--mechanism=mean'),
    ],
    text=True,
  )
  lines = (directory / 'statement.txt').read_text().splitlines()
  epsilons = [line for line in lines if line.startswith('    Epsilon')]
  assert len(epsilons) == 7
  assert [x for x in output.splitlines() if 'Epsilon,' in x] == epsilons


@pytest.mark.slow
def test_a_run_killed_at_many_points_ends_as_if_it_had_not_been(
  whole, tmp_path
):
  for rows in (0, 1, 4, 5, 9, 12):
    with subprocess.Popen(
      _command(tmp_path, *_SMALL, '--resume'),
      cwd=_ROOT,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    ) as process:
      deadline = time.monotonic() + 100
      while process.poll() is None and time.monotonic() < deadline:
        path = tmp_path / 'metrics.csv'
        if path.exists() and path.read_text().count('\n') > rows:
          break
        time.sleep(0.01)
      process.kill()
  result = _run(tmp_path, *_SMALL, '--resume')
  assert result.returncode == 0, result.stderr
  assert _rows(tmp_path) == _rows(whole[0])
  ours, theirs = (
    checkpoint.load(directory / 'checkpoint.npz').arrays
    for directory in (tmp_path, whole[0])
  )
  for name in ours:
    np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.slow
def test_the_tff_engine_survives_a_kill_and_leaves_no_worker(tmp_path):
  flags = (
    *('--engine=tff', '--clients=8', '--rounds=4', '--checkpoint_every=1'),
    *('--examples_per_client=20', '--noise_seed=1', '--evaluate_every=2'),
  )
  whole = tmp_path / 'whole'
  result = _run(whole, *flags)
  assert result.returncode == 0, result.stderr
  cut = tmp_path / 'cut'
  with subprocess.Popen(
    _command(cut, *flags),
    cwd=_ROOT,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  ) as process:
    path = cut / 'metrics.csv'
    while process.poll() is None and not (
      path.exists() and path.read_text().count('\n') > 2
    ):
      time.sleep(0.05)
    workers = _workers(process.pid)
    process.send_signal(signal.SIGKILL)
  assert workers
  psutil.wait_procs(workers, timeout=20)
  assert not any(worker.is_running() for worker in workers)
  result = _run(cut, *flags, '--resume')
  assert result.returncode == 0, result.stderr
  assert _rows(cut) == _rows(whole)


def _workers(pid):
  children = psutil.Process(pid).children(recursive=True)
  return [child for child in children if 'worker_binary' in child.name()]


def test_another_run_is_not_overwritten_and_other_settings_are_named(whole):
  directory, _ = whole
  result = _run(directory, *_SMALL)
  assert result.returncode == 1
  assert 'holds a run already' in result.stderr
  result = _run(directory, *_SMALL, '--resume', '--clip_norm=3')
  assert result.returncode == 1
  assert 'clip_norm: 1.0 in the checkpoint, 3.0 here' in result.stderr
  assert 'Traceback' not in result.stderr


def test_a_run_that_is_resumed_is_not_discarded(whole):
  directory, _ = whole
  before = (directory / 'metrics.csv').read_text()
  result = _run(directory, *_SMALL, '--overwrite', '--resume')
  assert result.returncode == 0, result.stderr
  assert (directory / 'metrics.csv').read_text() == before


@pytest.mark.parametrize(
  'flags, sentence',
  [
    (['--noise_multiplier=-1'], 'noise_multiplier must be non-negative'),
    (['--delta=0'], 'delta must be above 0'),
    (['--participation_probability=1.5'], 'must be between 0 and 1'),
    (['--clients=5000'], 'There are 1500 examples for 5000 clients'),
  ],
)
def test_bad_flags_get_a_sentence(tmp_path, flags, sentence):
  result = _run(tmp_path, *flags)
  assert result.returncode == 1
  assert sentence in result.stderr
  assert 'Traceback' not in result.stderr


@pytest.mark.skipif(not _MNIST.exists(), reason='needs MNIST in ../shared/data')
def test_mnist_is_learnt_from_tensorflow_datasets(tmp_path):
  result = _run(
    tmp_path,
    *('--dataset=mnist', f'--data_dir={_MNIST}', '--clients=1000'),
    *('--participation_probability=0.02', '--rounds=3', '--panel_size=20'),
    *('--noise_multiplier=0.5', '--evaluate_every=3'),
  )
  assert result.returncode == 0, result.stderr
  assert len(_rows(tmp_path)) == 3


def test_help_answers_without_loading_tensorflow():
  start = time.monotonic()
  result = subprocess.run(
    [sys.executable, '-X', 'importtime', '-m', 'experiments.train', '--help'],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    check=False,
    env=dict(os.environ),
  )
  assert result.returncode == 0
  assert '--noise_multiplier' in result.stdout
  assert 'tensorflow' not in result.stderr
  assert time.monotonic() - start < 20
