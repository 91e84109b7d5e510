"""Hyper-parameters beside the chosen ones, compared on validation data.

The file of a table has, for a cell's private run, the values that are used and
in its table `tried` others for some of them. Each of these takes the place of
the used one in a run of its own, with all else as it is.
"""

import pathlib
from collections.abc import Sequence

from experiments import jobs, tables

# Of validation data, splits and noise; no table uses it.
_SEED = 1000


def write(
  table: int,
  cells: Sequence[tables.Cell],
  places: jobs.Places,
  results: pathlib.Path,
  tiny: bool = False,
) -> pathlib.Path:
  """Runs what was tried for some of a table's cells and writes its file.

  Args:
    table: 1 to 4.
    cells: As `tables.cells_of` returns.
    places: Where data and runs are.
    results: Where the file goes. It keeps other cells' rows.
    tiny: Whether only to see that everything works.
  """
  path = results / f'tuning_{table}.csv'
  for cell in cells:
    tried = jobs.load_tried(f'table_{table}', cell.name, 'private')
    if not tried:
      continue
    rows = []
    for setting, value in (('', ''), *tried):
      values = tables.settings_of(table, cell, 'private')
      if setting:
        values[setting] = value
      summary = jobs.summary_of(
        jobs.make(values | {'evaluate_on': 'validation'}, _SEED, places, tiny),
        places,
        f'tuning_{table}-{cell.name}',
      )
      rows.append(
        {
          'cell': cell.name,
          'setting': setting,
          'value': value,
          **tables.stop_columns(cell, summary),
          'final_accuracy': summary.accuracies[-1],
        }
      )
    tables.update(path, rows, table, ('cell',))
  return path
