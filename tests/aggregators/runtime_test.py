"""Tests that TFF's worker ends with its process, and that there is one."""

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
import tensorflow_federated as tff

from tf_bdp.aggregators import runtime

# Each runs a TFF computation, prints the process of the worker that it started,
# and ends in its own way. The worker inherits the standard output.
_PROGRAM = """
  import os, sys, time
  os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
  %s
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
_AGGREGATORS = """
  from tf_bdp import aggregators
  aggregators.ClientPrivacyFactory
"""
_LEARNING = """
  from tf_bdp import learning
  learning.build_fed_sgd
"""
_SIMULATION = """
  from tf_bdp.aggregators import runtime
  runtime.use_simulation_context()
"""
_REAP = """
  from tf_bdp.aggregators import runtime
  runtime.reap_on_exit()
"""
# What is imported, how it ends, with which code, and whether it is started as a
# shell starts its background jobs, with interrupts ignored.
_PROGRAMS = {
  'normal': (_AGGREGATORS, 'pass', 0, False),
  'background': (_AGGREGATORS, 'pass', 0, True),
  'learning_background': (_LEARNING, 'pass', 0, True),
  'simulation_background': (_SIMULATION, 'pass', 0, True),
  'sys_exit': (_LEARNING, 'sys.exit(3)', 3, False),
  'exception': (_REAP, 'raise RuntimeError("on purpose")', 1, True),
  'sigterm': (_REAP, 'time.sleep(600)', -signal.SIGTERM, False),
  'sigkill': (_REAP, 'time.sleep(600)', -signal.SIGKILL, False),
}
# It takes a few seconds, and more where the machine has other work; what is
# tested for took for ever.
_PATIENCE = 60.0


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


def _start(program):
  imports, ending, _, in_background = program
  ignore = ['sh', '-c', 'trap "" INT; exec "$@"', 'sh']
  text = textwrap.dedent(_PROGRAM) % (textwrap.dedent(imports), ending)
  return subprocess.Popen(
    [*(ignore if in_background else []), sys.executable, '-c', text],
    cwd=pathlib.Path(__file__).parents[2],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env={**os.environ, 'TF_BDP_OWNER': ''},
  )


@pytest.fixture(scope='module')
def programs():
  """The programs, started together because importing TFF takes seconds."""
  started = {name: _start(program) for name, program in _PROGRAMS.items()}
  found = {name: _workers(process) for name, process in started.items()}
  yield {name: (started[name], found[name]) for name in started}
  for process in started.values():
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()
  # Should a test have failed, its workers must not stay.
  for pid in (pid for pids in found.values() for pid in pids):
    with contextlib.suppress(psutil.NoSuchProcess):
      worker = psutil.Process(pid)
      if worker.name().startswith('worker_binary'):
        worker.kill()


@pytest.mark.parametrize('name', _PROGRAMS)
def test_the_worker_ends_with_its_process_and_closes_the_output(programs, name):
  process, workers = programs[name]
  code = _PROGRAMS[name][2]
  assert len(workers) == 1
  if code < 0:
    # It has outlived the ends of the programs before it.
    assert _is_running(process.pid)
    assert all(_is_running(pid) for pid in workers)
    process.send_signal(-code)
  # Returns at the end of the output, which the worker holds open.
  _, errors = process.communicate(timeout=_PATIENCE)
  assert process.returncode == code
  assert all(_is_gone_soon(pid) for pid in workers)
  assert 'Exception ignored' not in errors
  assert ('Traceback' in errors) == (name == 'exception')


def test_watching_twice_starts_one_watchdog():
  runtime.reap_on_exit()
  before = psutil.Process().children()
  owner = os.environ['TF_BDP_OWNER']
  runtime.reap_on_exit()
  assert os.environ['TF_BDP_OWNER'] == owner
  assert {p.pid for p in psutil.Process().children()} == {p.pid for p in before}


def _own_workers():
  return {
    child.pid
    for child in psutil.Process().children(recursive=True)
    if child.name().startswith('worker_binary')
  }


def test_there_is_one_simulation_context_with_one_worker():
  stack = tff.framework.get_context_stack()
  default, before = stack.current, _own_workers()
  try:
    for _ in range(2):
      runtime.use_simulation_context()
      assert stack.current is runtime.simulation_context()
  finally:
    tff.framework.set_default_context(default)
  # Its own, if no other test has asked for it before.
  assert len(_own_workers() - before) <= 1
  again = _own_workers()
  assert runtime.simulation_context() is runtime.simulation_context()
  assert _own_workers() == again


@pytest.mark.slow
def test_a_context_is_dropped_although_interrupts_are_ignored():
  # TFF interrupts the worker of a dropped context and waits for its end.
  program = """
    import signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import numpy as np
    from tf_bdp.aggregators import runtime
    runtime.reap_on_exit()
    import tensorflow_federated as tff

    @tff.tensorflow.computation(np.int32)
    def next_number(number):
      return number + 1

    assert next_number(1) == 2
    runtime.use_simulation_context()
    assert next_number(2) == 3
  """
  command = [sys.executable, '-c', textwrap.dedent(program)]
  subprocess.run(command, check=True, timeout=60)
