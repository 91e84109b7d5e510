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
_FIRST_COLUMNS = (
  *('round', 'participants', 'failed_clients', 'clip_norm', 'accuracy', 'loss'),
)
_LAST_COLUMNS = ('seconds',)


@contextlib.contextmanager
def open_log(
  directory: pathlib.Path,
  epsilons: Sequence[str],
  rows: Sequence[Mapping[str, Any]],
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
  """Opens the log of a run; yields a function that adds a row.

  Both files are written anew with the known rows: a run that was killed may
  have logged rounds that its checkpoint does not have.

  Args:
    directory: The directory of the run.
    epsilons: The columns of figures; see `Plan.epsilon_columns`.
    rows: The rounds that are done.
  """
  columns = (*_FIRST_COLUMNS, *epsilons, *_LAST_COLUMNS)
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
