"""Ends TFF's worker process, whatever ends this one.

TFF starts its C++ worker as a child that outlives a normal exit of Python and
keeps its standard output open, so pipes and CI hang. A watchdog, itself a tiny
process, notices the end of this one (also by SIGKILL) and ends the worker.
"""

import os
import secrets
import subprocess
import sys

_OWNER_VARIABLE = 'TF_BDP_OWNER'
# Reads until this process is gone, then ends the workers it has left. They are
# known by the environment they inherited, so no other process is touched.
_WATCHDOG = """
import sys, time, psutil
sys.stdin.read()
for _ in range(3):
  for process in psutil.process_iter(['name']):
    try:
      if process.info['name'].startswith('worker_binary') and (
        process.environ().get(sys.argv[1]) == sys.argv[2]
      ):
        process.kill()
    except psutil.Error:
      pass
  time.sleep(0.5)
"""

_watchdog: 'subprocess.Popen[bytes] | None' = None


def reap_on_exit() -> None:
  """Sees to it that workers started from now on end with this process.

  Call it before the first TFF computation. Calling it again does nothing.
  """
  global _watchdog
  if _watchdog is not None:
    return
  owner = secrets.token_hex(16)
  os.environ[_OWNER_VARIABLE] = owner
  _watchdog = subprocess.Popen(
    [sys.executable, '-c', _WATCHDOG, _OWNER_VARIABLE, owner],
    stdin=subprocess.PIPE,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    # Not to be interrupted together with this process from the terminal.
    start_new_session=True,
  )
