"""Runs of the scripts, and what they leave behind."""

import contextlib
import csv
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from absl.testing import flagsaver

from experiments import train
from tf_bdp.training import checkpoint

ROOT = pathlib.Path(__file__).parents[2]
MNIST = ROOT.parent / 'shared/data/tensorflow_datasets'
needs_mnist = pytest.mark.skipif(
  not MNIST.exists(), reason='needs MNIST in ../shared/data'
)


class Result(NamedTuple):
  code: int
  printed: str
  errors: str


def _for_cnn(script, flags):
  """Returns the flags with the CNN as the model, if they do not name one."""
  if script != 'train' or any('--model' in str(flag) for flag in flags):
    return flags
  return ('--model=cnn', *flags)


def run(script, *flags, report=True):
  """Runs a script by its command line, in this process.

  Args:
    script: Its module in `experiments`.
    *flags: Of the command line; those of 'train' are for the CNN unless they say
      otherwise.
    report: Whether to save the model and to write the report, which take
      longer than the rounds of a small run.
  """
  code = 0
  flags = _for_cnn(script, flags)
  with (
    flagsaver.flagsaver(),
    # TFF's worker wants files.
    tempfile.TemporaryFile('w+') as printed,
    tempfile.TemporaryFile('w+') as errors,
    contextlib.redirect_stdout(printed),
    contextlib.redirect_stderr(errors),
    mock.patch.object(sys, 'argv', [script, *map(str, flags)]),
    mock.patch.object(sys, 'unraisablehook', sys.unraisablehook),
    contextlib.nullcontext() if report else _without_report(),
  ):
    try:
      if script == 'train':
        train.run()
      else:
        runpy.run_module(f'experiments.{script}', run_name='__main__')
    except SystemExit as end:
      code = end.code
      if isinstance(code, str):  # As Python itself does with it.
        errors.write(code)
        code = 1
    return Result(code, *(map(_contents, (printed, errors))))


def _contents(file):
  file.seek(0)
  return file.read()


@contextlib.contextmanager
def _without_report():
  from tf_bdp.reporting import run_report
  from tf_bdp.training import evaluation

  with (
    mock.patch.object(run_report, 'write', return_value=''),
    mock.patch.object(evaluation.Evaluator, 'save'),
  ):
    yield


def run_apart(script, *flags, cwd=ROOT):
  """Runs a script in a process of its own."""
  flags = _for_cnn(script, flags)
  done = subprocess.run(
    [sys.executable, '-m', f'experiments.{script}', *map(str, flags)],
    cwd=cwd,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=300,
    check=False,
  )
  return Result(done.returncode, done.stdout, done.stderr)


def run_until(rounds, sent, directory, *flags):
  """Runs the training script until it has done some rounds.

  Args:
    rounds: After how many rounds a signal is sent.
    sent: The signal; to the whole group of processes, as a terminal does.
    directory: Of the run.
    *flags: Of the script.

  Returns:
    The process, which has ended, and what it said.
  """
  directory.mkdir(exist_ok=True)
  said, metrics = directory / 'said.txt', directory / 'metrics.csv'
  with (
    open(said, 'w') as file,
    subprocess.Popen(
      [
        *(sys.executable, '-m', 'experiments.train'),
        *_for_cnn('train', flags),
        f'--report_dir={directory}',
      ],
      cwd=ROOT,
      stdout=file,
      stderr=file,
      start_new_session=True,
      # Interrupts are ignored by what a shell starts in the background.
      preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process,
  ):
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline:
      if metrics.exists() and metrics.read_text().count('\n') > rounds:
        break
      time.sleep(0.005)
    os.killpg(process.pid, sent)
    process.wait(60)
  return process, said.read_text()


def rows(directory):
  """Returns metrics.csv, but for how long rounds took."""
  with open(directory / 'metrics.csv', newline='') as file:
    return [
      {name: value for name, value in row.items() if name != 'seconds'}
      for row in csv.DictReader(file)
    ]


def assert_same_run(ours, theirs, arrays=True):
  """Compares two directories, up to the order of sums in other threads.

  Args:
    ours: A directory.
    theirs: Another.
    arrays: Whether to compare the checkpoints' arrays; TFF's come in any order.
  """
  for mine, other in zip(rows(ours), rows(theirs), strict=True):
    assert mine.keys() == other.keys()
    for name, value in mine.items():
      expected = other[name] and pytest.approx(float(other[name]), rel=1e-4)
      assert (value and float(value)) == expected, name
  if not arrays:
    return
  mine, other = (
    checkpoint.load(directory / 'checkpoint.npz').arrays
    for directory in (ours, theirs)
  )
  assert mine.keys() == other.keys()
  for name, array in mine.items():
    if np.issubdtype(array.dtype, np.number):
      np.testing.assert_allclose(array, other[name], rtol=1e-3, atol=1e-5)
    else:
      np.testing.assert_array_equal(array, other[name])
