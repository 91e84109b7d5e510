"""TFF's runtime: ends its worker with this process; makes one test context.

TFF starts its C++ worker as a child that outlives a normal exit of Python and
keeps its standard output open, so pipes and CI hang. Here a normal exit ends
the worker; after any other exit, even by SIGKILL, a watchdog does, which is a
tiny process of its own. It is in the lowest layer that uses TFF, whose modules
call `reap_on_exit` when they are imported, so that nobody has to ask for it.
"""

import atexit
import functools
import os
import secrets
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
  import tensorflow_federated as tff

_OWNER_VARIABLE = 'TF_BDP_OWNER'
_WORKER = 'worker_binary'
# Reads until this process is gone, then ends the workers it has left. They are
# known by the environment they inherited, so no other process is touched.
_WATCHDOG = f"""
import sys, time, psutil
sys.stdin.read()
for _ in range(3):
  for process in psutil.process_iter(['name']):
    try:
      if process.info['name'].startswith({_WORKER!r}) and (
        process.environ().get(sys.argv[1]) == sys.argv[2]
      ):
        process.kill()
    except psutil.Error:
      pass
  time.sleep(0.5)
"""


@functools.cache
def reap_on_exit() -> None:
  """Makes TFF's workers end with this process.

  Call it before the first TFF computation. Calling it again does nothing.
  """
  if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
  ):
    # As in a shell's background jobs. TFF interrupts a worker whose context is
    # dropped, and waits until it has ended. Workers inherit that a signal is
    # ignored, but no handler; so this process ignores it by a handler.
    signal.signal(signal.SIGINT, lambda *_: None)
  owner = secrets.token_hex(16)
  os.environ[_OWNER_VARIABLE] = owner
  _watchdogs.append(
    subprocess.Popen(
      [sys.executable, '-c', _WATCHDOG, _OWNER_VARIABLE, owner],
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      # Not to be interrupted together with this process from the terminal.
      start_new_session=True,
    )
  )
  atexit.register(_end_workers)


_watchdogs: 'list[subprocess.Popen[bytes]]' = []


def _end_workers() -> None:
  """Ends this process's workers, before TFF waits for them.

  A context that is dropped interrupts its worker and waits until it has ended.
  Where interrupts are ignored, as in a shell's background jobs, that is for
  ever. After this there is nothing left to wait for.
  """
  for process in psutil.Process().children(recursive=True):
    try:
      if process.name().startswith(_WORKER):
        process.kill()
    except psutil.Error:
      pass
  simulation_context.cache_clear()
  tff: Any = sys.modules.get('tensorflow_federated')
  if tff is None:
    return

  class EndedContext(tff.framework.SyncContext):
    """Takes the place of TFF's own, which is dropped.

    That is now, while modules that its destructor needs are still there.
    """

    def invoke(self, comp: Any, arg: Any) -> Any:
      raise RuntimeError('This process is about to end.')

  tff.framework.set_default_context(EndedContext())


@functools.cache
def simulation_context() -> 'tff.framework.SyncExecutionContext':
  """Returns the context in which secure sums are plain ones, on this machine.

  It runs everything that TFF's own context does, and as fast. Nothing in it is
  secure: it is for simulations, and to test computations that are to run where
  there is a protocol. There is one, with one worker.
  """
  import tensorflow_federated as tff

  reap_on_exit()
  return tff.backends.test.create_sync_test_cpp_execution_context()


def use_simulation_context() -> None:
  """Makes TFF run all computations in the `simulation_context`."""
  import tensorflow_federated as tff

  tff.framework.set_default_context(simulation_context())
