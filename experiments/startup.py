"""How the scripts start, and how they end where they cannot go on."""

import logging
import os
import signal
import sys
import warnings
from typing import Any, Callable

from absl import logging as absl_logging

from experiments import flags
from tf_bdp.analysis import command_line


def start(main: Callable[[], None], to_go_on: str) -> None:
  """Parses the flags and runs a script.

  Args:
    main: Does the work, and imports TensorFlow only there: --help and mistakes
      in flags are answered before. Its errors are told in one sentence.
    to_go_on: How to go on after Ctrl-C.
  """
  if {'--help', '-help', '-h', '-?', '--helpshort'} & set(sys.argv):
    print(flags.help_text(sys.modules['__main__'].__doc__))
    sys.exit(0)
  arguments = command_line.parse_flags(sys.argv)
  silence_tensorflow()
  sys.unraisablehook = _interrupt_again
  # TensorFlow has it off on processors without AVX-512, where convolutions then
  # take three times as long.
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '1')
  try:
    command_line.call(main, arguments)
  except RuntimeError as error:
    sys.exit(f'Error: {error}')
  except KeyboardInterrupt:
    print(f'\nInterrupted. To go on: {to_go_on}.', file=sys.stderr)
    sys.exit(130)


def silence_tensorflow() -> None:
  """Hides all but errors; to be called before TensorFlow is imported."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  logging.getLogger('tensorflow').setLevel(logging.ERROR)
  absl_logging.set_verbosity(absl_logging.ERROR)
  warnings.filterwarnings('ignore', 'pkg_resources is deprecated')


def _interrupt_again(ignored: Any) -> None:
  """Repeats a Ctrl-C that Python was about to ignore; see `unraisablehook`.

  JAX, which TFF imports, has a callback in the garbage collector. A Ctrl-C that
  comes while it runs is printed there, and training would go on.
  """
  if issubclass(ignored.exc_type, KeyboardInterrupt):
    # A little later: here it would be ignored once more.
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
  else:
    sys.__unraisablehook__(ignored)
