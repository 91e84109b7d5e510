"""The flags that the commands share: which run, and how to print the report."""

import json
from collections.abc import Sequence
from typing import Any, Optional, Protocol

import numpy as np
from absl import flags

from tf_bdp import validation
from tf_bdp.accounting import recorded_distances

_DISTANCES_FILE = flags.DEFINE_string(
  'distances_file',
  None,
  'File of recorded distances in units of the clip norm: .npz or .json, as '
  'tf_bdp.accounting.recorded_distances.load describes them, or .csv with one '
  'row a round.',
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
_POPULATION = flags.DEFINE_bool(
  'population',
  None,
  'Whether the panel is everybody, not a sample: then the claims "census" and '
  '"each" are made as well. By default what the file says, else not.',
)
_PARTICIPATION_PROBABILITY = flags.DEFINE_float(
  'participation_probability',
  None,
  'Probability that a unit takes part in a round.',
  required=True,
)
_DELTA = flags.DEFINE_float('delta', 1e-6, 'Target delta.')
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
_UNIT = flags.DEFINE_enum(
  'unit', 'client', ['client', 'example'], 'What is protected.'
)
_FORMAT = flags.DEFINE_enum(
  'format', 'text', ['text', 'json'], 'For people or for programs.'
)


# More would be a list too long for memory.
_MOST_ROUNDS = 1_000_000


class Report(Protocol):
  """What the commands print."""

  def statement(self) -> str:
    """Returns the report as text, for people."""

  def to_dict(self) -> dict[str, Any]:
    """Returns the report as plain data, for programs."""


def arguments() -> dict[str, Any]:
  """Returns what the flags say of the run, by the names of the library.

  Raises:
    ValueError: Flags clash, or one is missing.
    OSError: The file of distances cannot be read.
  """
  recorded = _recorded()
  return {
    'distances': recorded.distances,
    'worst_case_distance': recorded.worst_case_distances,
    'worst_case_mixture': recorded.worst_case_mixture,
    'panel': recorded.panel,
    'population': recorded.population,
    'participation_probability': _PARTICIPATION_PROBABILITY.value,
    'delta': _DELTA.value,
    'unit': _UNIT.value,
  }


def show(report: Report) -> None:
  """Prints a report in the format that the flags ask for."""
  if _FORMAT.value == 'json':
    print(json.dumps(report.to_dict(), indent=2))
  else:
    print(report.statement())


def _recorded() -> recorded_distances.RecordedDistances:
  """Returns the recorded distances, with the worst case of every round."""
  if (_DISTANCES_FILE.value is None) == (_DISTANCES.value is None):
    raise ValueError('Give either --distances_file or --distances.')
  if _DISTANCES_FILE.value is not None:
    recorded = recorded_distances.load(_DISTANCES_FILE.value)
  else:
    # The same distances in every round: everybody stays where they are.
    distances = _numbers(_DISTANCES.value)[np.newaxis]
    recorded = recorded_distances.RecordedDistances(distances, panel=True)
    if _ROUNDS.value is None:
      raise ValueError('--distances needs --rounds.')
  panel = recorded.panel if _PANEL.value is None else _PANEL.value
  population = recorded.population and panel
  if _POPULATION.value is not None:
    population = _POPULATION.value
  if population and not panel:
    raise ValueError(
      '--population says that the panel is everybody, and the units are no '
      'panel. If column i is the same unit in every round, add --panel.'
    )
  rows = _repeat(recorded.distances, _ROUNDS.value)
  worst, mixture = recorded.worst_case_distances, recorded.worst_case_mixture
  if _WORST_CASE_DISTANCE.value is not None:
    worst, mixture = np.array(_WORST_CASE_DISTANCE.value), None
  elif worst is None:
    worst = np.array({'sum': 1.0, 'mean': 2.0}[MECHANISM.value])
  if worst.ndim == 0:
    validation.check_positive('--worst_case_distance', float(worst))
  return recorded_distances.RecordedDistances(
    rows, panel, np.broadcast_to(worst, len(rows)), population, mixture
  )


def _numbers(words: list[str]) -> np.ndarray:
  try:
    return np.array([float(word) for word in words])
  except ValueError as error:
    raise ValueError(f'--distances must be numbers: {error}.') from error


def _repeat(
  rows: recorded_distances.Rows, rounds: Optional[int]
) -> Sequence[np.ndarray]:
  """Returns the rows of all rounds; a single one stands for each of them."""
  rows = list(rows)
  if rounds is None or rounds == len(rows):
    return rows
  if not 1 <= rounds <= _MOST_ROUNDS:
    raise ValueError(
      f'--rounds must be positive and at most {_MOST_ROUNDS:,}. Found {rounds}.'
    )
  if len(rows) > 1:
    raise ValueError(
      f'--rounds={rounds}, but the file has {len(rows)} rounds. Leave '
      '--rounds out, or give one row for all rounds.'
    )
  return rows * rounds
