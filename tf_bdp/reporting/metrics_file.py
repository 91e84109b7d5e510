"""Reads metrics.csv, to which a run adds one row in every round."""

import csv
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional, Union

import numpy as np

from tf_bdp.reporting import formatting

# The figures of one round by column; None stands for a blank.
Row = dict[str, Optional[float]]


class Column(NamedTuple):
  """How a column is headed, and how its numbers are written."""

  heading: str
  specification: str


COLUMNS = {
  'round': Column('Round', '.0f'),
  'participants': Column('Participants', '.0f'),
  'failed_clients': Column('Failed', '.0f'),
  'clip_norm': Column('Clip norm', '.4g'),
  'accuracy': Column('Accuracy', '.2%'),
  'loss': Column('Loss', '.4f'),
  'seconds': Column('Seconds', '.1f'),
}
_EPSILON = '_epsilon'
_STRIDES = tuple(digit * 10**power for power in range(8) for digit in (1, 2, 5))


def read(path: Union[str, 'os.PathLike[str]']) -> list[Row]:
  """Returns the rows of the file.

  Args:
    path: The file's name.

  Raises:
    ValueError: A field is neither blank nor a number.
  """
  with open(path, newline='', encoding='utf-8') as file:
    reader = csv.DictReader(file)
    names = [*COLUMNS, *epsilon_columns(reader.fieldnames or ())]
    return [
      {name: _number(fields.get(name), name, line) for name in names}
      for line, fields in enumerate(reader, start=2)
    ]


def epsilon_columns(names: Iterable[str]) -> list[str]:
  """Returns which columns hold ε: of a claim, or of a unit and a claim."""
  return [name for name in names if name.endswith(_EPSILON)]


def epsilon_column(claim: str) -> str:
  """Returns the column of a claim about the first unit."""
  return f'{claim}{_EPSILON}'


def column(name: str) -> Column:
  """Returns how a column is headed; that of ε by the name of its claim."""
  if name in COLUMNS:
    return COLUMNS[name]
  claim = name.removesuffix(_EPSILON).replace('_', ', ')
  return Column(f'Epsilon, {claim}', '.3f')


def evaluated(rows: Iterable[Row]) -> list[Row]:
  """Returns the rounds after which the model was evaluated."""
  return [row for row in rows if row['accuracy'] is not None]


def series(rows: Iterable[Row], name: str) -> np.ndarray:
  """Returns a column; blanks are NaN."""
  values = [row.get(name) for row in rows]
  return np.array([np.nan if value is None else value for value in values])


def spaced(rows: Sequence[Row], most: int) -> list[Row]:
  """Returns at most `most` rows: every 2nd, 5th, 10th, ..., and the last.

  The strides are round numbers because evaluations tend to fall on those.

  Args:
    rows: The rows of all rounds.
    most: How many to return at most.
  """
  for stride in _STRIDES:
    chosen = [row for row in rows[:-1] if (row['round'] or 0) % stride == 0]
    if len(chosen) < most:
      return [*chosen, *rows[-1:]]
  return list(rows[-most:])


def text(row: Row, name: str) -> str:
  """Returns a figure as the page shows it."""
  return formatting.number(row.get(name), column(name).specification)


def _number(field: Optional[str], name: str, line: int) -> Optional[float]:
  """Returns the number that a field holds, if any."""
  if field is None or not field.strip():
    return None
  try:
    return float(field)
  except ValueError:
    raise ValueError(
      f'{name} in line {line} of metrics.csv must be a number or blank. '
      f'Found {field!r}.'
    ) from None
