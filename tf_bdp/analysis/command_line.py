"""How commands start: flags are parsed, and mistakes are told in sentences."""

import functools
import sys
from typing import Callable

from absl import app, flags


def parse_flags(arguments: list[str]) -> list[str]:
  """Parses the flags and returns what is left of the command line.

  Unlike absl's own way, --help is no failure: it exits with 0.

  Args:
    arguments: The command line, the program's name first.
  """
  app.define_help_flags()
  try:
    return flags.FLAGS(arguments)
  except SystemExit:  # Nothing but the flags that show help exits here.
    sys.exit(0)
  except flags.Error as error:
    sys.exit(f'Error: {error}\nPass --help to see the flags.')


def call(main: Callable[[], None], arguments: list[str]) -> None:
  """Calls the main function of a command; mistakes are told in one sentence.

  Args:
    main: Does the work; a ValueError or an OSError from it ends the process,
      without a traceback.
    arguments: What is left of the command line, the program's name first.
  """
  if len(arguments) > 1:
    words = ' '.join(arguments[1:])
    sys.exit(f'Error: The command takes flags only. Found {words!r}.')
  try:
    main()
  except (ValueError, OSError) as error:
    sys.exit(f'Error: {error}')


def run(main: Callable[[], None], description: str) -> None:
  """Runs a command that takes nothing but flags.

  Args:
    main: Does the work; see `call`.
    description: What `--help` says above the flags.
  """
  # A console script is another main module than the one with the flags; let
  # --help show them all the same.
  sys.modules['__main__'].__doc__ = description
  for flag in flags.FLAGS.get_key_flags_for_module(main.__module__):
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
  app.run(functools.partial(call, main), flags_parser=parse_flags)
