"""The flags that say which distances were recorded, shared by the commands."""

import sys
from typing import Callable, NamedTuple, Optional

import numpy as np
from absl import app, flags

from tf_bdp.accounting import recorded_distances

_DISTANCES_FILE = flags.DEFINE_string(
  'distances_file',
  None,
  'File of recorded distances in units of the clip norm: .npz with an array '
  '"distances" [rounds, units] and optionally "panel", or .csv with one row a '
  'round.',
)
_DISTANCES = flags.DEFINE_list(
  'distances',
  None,
  'Instead of a file: the distances of the sampled units, the same in every '
  'round, in units of the clip norm.',
)
_ROUNDS = flags.DEFINE_integer(
  'rounds',
  None,
  'Number of rounds. Needed with --distances and with a file of one row, which '
  'then stands for every round; otherwise the number of rows.',
)
_PANEL = flags.DEFINE_bool(
  'panel',
  None,
  'Whether the columns are the same units in every round. By default what the '
  'file says; a .csv file does not say, and is taken not to be a panel.',
)
PARTICIPATION_PROBABILITY = flags.DEFINE_float(
  'participation_probability',
  None,
  'Probability that a unit takes part in a round.',
)
DELTA = flags.DEFINE_float('delta', 1e-6, 'Target delta.')
MECHANISM = flags.DEFINE_enum(
  'mechanism',
  'sum',
  ['sum', 'mean'],
  'What the noise is added to: the sum of the clipped updates (TFF, '
  'DP-FedAvg), which a unit moves by at most the clip norm, or their mean (the '
  'paper), which it moves by at most twice the clip norm over their number.',
)
_WORST_CASE_DISTANCE = flags.DEFINE_float(
  'worst_case_distance',
  None,
  'Largest distance that clipping allows, in units of the clip norm. By '
  'default what the file says, else 1 for --mechanism=sum and 2 for '
  '--mechanism=mean.',
)
UNIT = flags.DEFINE_enum(
  'unit', 'client', ['client', 'example'], 'What is protected.'
)
FORMAT = flags.DEFINE_enum(
  'format', 'text', ['text', 'json'], 'For people or for programs.'
)


class Recording(NamedTuple):
  """The distances that the flags name."""

  distances: np.ndarray
  panel: bool
  worst_case_distance: np.ndarray


def recording() -> Recording:
  """Returns the recorded distances; raises ValueError on flags that clash."""
  if (_DISTANCES_FILE.value is None) == (_DISTANCES.value is None):
    raise ValueError('Give either --distances_file or --distances.')
  if _DISTANCES_FILE.value is not None:
    distances, panel, worst = recorded_distances.load(_DISTANCES_FILE.value)
  else:
    # The same distances in every round: everybody stays where they are.
    distances, panel, worst = _numbers(_DISTANCES.value)[np.newaxis], True, None
    if _ROUNDS.value is None:
      raise ValueError('--distances needs --rounds.')
  if _PANEL.value is not None:
    panel = _PANEL.value
  distances = _repeat(distances, _ROUNDS.value)
  if _WORST_CASE_DISTANCE.value is not None:
    worst = np.array(_WORST_CASE_DISTANCE.value)
  elif worst is None:
    worst = np.array({'sum': 1.0, 'mean': 2.0}[MECHANISM.value])
  return Recording(distances, panel, np.broadcast_to(worst, len(distances)))


def _numbers(words: list[str]) -> np.ndarray:
  try:
    return np.array([float(word) for word in words])
  except ValueError as error:
    raise ValueError(f'--distances must be numbers: {error}.') from error


def _repeat(distances: np.ndarray, rounds: Optional[int]) -> np.ndarray:
  if rounds is None or rounds == len(distances):
    return distances
  if rounds < 1:
    raise ValueError(f'--rounds must be positive. Found {rounds}.')
  if len(distances) > 1:
    raise ValueError(
      f'--rounds={rounds}, but the file has {len(distances)} rounds. Leave '
      '--rounds out, or give one row for all rounds.'
    )
  return np.broadcast_to(distances, (rounds, distances.shape[1]))


def run(main: Callable[[list[str]], None], description: str) -> None:
  """Runs a command; what is wrong with its input is said in one sentence.

  Args:
    main: The command's main function.
    description: What `--help` says above the flags.
  """

  def guarded(argv: list[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(f'Unexpected arguments: {argv[1:]}.')
    try:
      main(argv)
    except (ValueError, OSError) as error:
      sys.exit(f'Error: {error}')

  # A console script is another main module than the one with the flags; let
  # --help show them all the same.
  sys.modules['__main__'].__doc__ = description
  for module in (main.__module__, __name__):
    for flag in flags.FLAGS.flags_by_module_dict().get(module, []):
      flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
  app.run(guarded)
