import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from tf_bdp.aggregators import runtime

# Each runs a TFF computation, prints the process of the worker that it started,
# and ends in its own way. The worker inherits the standard output.
_PROGRAM = """
  import os, sys, time
  os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
  from tf_bdp.learning import tff_worker
  runtime.reap_on_exit()
  import numpy as np
  import psutil
  import tensorflow_federated as tff

  @tff.tensorflow.computation(np.int32)
  def next_number(number):
    return number + 1

  assert next_number(41) == 42
  children = psutil.Process().children(recursive=True)
  workers = [c for c in children if c.name().startswith('worker_binary')]
  print('WORKERS', *(worker.pid for worker in workers), flush=True)
  %s
"""
_ENDINGS = {
  'normal': 'pass',
  'sys_exit': 'sys.exit(3)',
  'exception': 'raise RuntimeError("on purpose")',
  'sigterm': 'time.sleep(600)',
  'sigkill': 'time.sleep(600)',
}
_SIGNALS = {'sigterm': signal.SIGTERM, 'sigkill': signal.SIGKILL}
_CODES = {
  'normal': 0,
  'sys_exit': 3,
  'exception': 1,
  'sigterm': -signal.SIGTERM,
  'sigkill': -signal.SIGKILL,
}
_PATIENCE = 8.0


def _is_running(pid):
  try:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


def _is_gone_soon(pid):
  end = time.monotonic() + _PATIENCE
  while time.monotonic() < end:
    if not _is_running(pid):
      return True
    time.sleep(0.1)
  return False


def _workers(process):
  """Reads the numbers of the workers from the program's output."""
  for line in process.stdout:
    if line.startswith('WORKERS'):
      return [int(word) for word in line.split()[1:]]
  raise AssertionError('The program printed no workers.')


@pytest.fixture(scope='module')
def programs():
  """The programs, started together because importing TFF takes seconds."""
  started = {
    name: subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent(_PROGRAM % ending)],
      cwd=pathlib.Path(__file__).parents[2],
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
      env={**os.environ, 'TF_BDP_OWNER': ''},
    )
    for name, ending in _ENDINGS.items()
  }
  found = {name: _workers(process) for name, process in started.items()}
  yield {name: (started[name], found[name]) for name in started}
  for process in started.values():
    process.kill()
    process.wait()
    process.stdout.close()
  # Should a test have failed, its workers must not stay.
  for pid in (pid for pids in found.values() for pid in pids):
    with contextlib.suppress(psutil.NoSuchProcess):
      worker = psutil.Process(pid)
      if worker.name().startswith('worker_binary'):
        worker.kill()


@pytest.mark.parametrize('ending', _ENDINGS)
def test_the_worker_ends_with_its_process_and_closes_the_output(
  programs, ending
):
  process, workers = programs[ending]
  assert len(workers) == 1
  if ending in _SIGNALS:
    # It has outlived the ends of the programs before it.
    assert _is_running(process.pid)
    assert all(_is_running(pid) for pid in workers)
    process.send_signal(_SIGNALS[ending])
  # Returns at the end of the output, which the worker holds open.
  process.communicate(timeout=_PATIENCE)
  assert process.returncode == _CODES[ending]
  assert all(_is_gone_soon(pid) for pid in workers)


def test_watching_twice_starts_one_watchdog():
  runtime.reap_on_exit()
  before = psutil.Process().children()
  owner = os.environ['TF_BDP_OWNER']
  runtime.reap_on_exit()
  assert os.environ['TF_BDP_OWNER'] == owner
  assert {p.pid for p in psutil.Process().children()} == {p.pid for p in before}
