"""metrics.csv and TensorBoard's events: one row a round, each round once."""

import contextlib
import csv
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable

import tensorflow as tf

METRICS_FILE = 'metrics.csv'
_TENSORBOARD = 'tensorboard'
_COLUMNS = (
  *('round', 'participants', 'failed_clients', 'clip_norm', 'accuracy'),
  *('loss', 'dp_epsilon', 'bdp_epsilon', 'seconds'),
)
_MORE_COLUMNS = ('{}_dp_epsilon', '{}_bdp_epsilon')


@contextlib.contextmanager
def open_log(
  directory: pathlib.Path,
  units: Sequence[str],
  rows: Sequence[Mapping[str, Any]],
  more: Sequence[str] = (),
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
  """Opens the log of a run; yields a function that adds a row.

  Both files are written anew with the known rows: a run that was killed may
  have logged rounds that its checkpoint does not have.

  Args:
    directory: The directory of the run.
    units: What is protected; the second one has columns of its own.
    rows: The rounds that are done.
    more: Further columns.
  """
  columns = _COLUMNS + tuple(
    name.format(unit) for unit in units[1:] for name in _MORE_COLUMNS
  )
  columns += tuple(more)
  shutil.rmtree(directory / _TENSORBOARD, ignore_errors=True)
  board = tf.summary.create_file_writer(str(directory / _TENSORBOARD))
  path = directory / METRICS_FILE
  temporary = path.with_name(METRICS_FILE + '.part')
  with open(temporary, 'w', newline='', encoding='utf-8') as file:
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    writer.writerows(rows)
  os.replace(temporary, path)
  with (
    open(path, 'a', newline='', encoding='utf-8') as file,
    board.as_default(),
  ):
    for row in rows:
      _show(row)

    def add(row: Mapping[str, Any]) -> None:
      csv.DictWriter(file, columns).writerow(row)
      file.flush()
      _show(row)

    yield add


def _show(row: Mapping[str, Any]) -> None:
  for name, value in row.items():
    if name != 'round' and value != '':
      tf.summary.scalar(name, value, step=row['round'])
