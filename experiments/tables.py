"""Tables I to IV of the paper, as CSV files: a row for each cell and seed."""

import csv
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import epsilon_curves, jobs, paper

# Which curves of clients and examples a column of Table IV goes by. Free of
# assumptions, the few examples of a client give the worst case: that of DP.
_JOINT_METHODS = {
  'dp_mechanism': ('dp_mechanism', ('example_sequential', 'dp_mechanism')),
  'bdp_paper': ('bdp_paper', ('example_sequential', 'bdp_paper')),
  'bdp_paper_l_part': (
    'bdp_paper_l_part',
    ('example_sequential', 'bdp_paper_l_part'),
  ),
  'bdp_panel': ('bdp_panel', ('example_aggregate', 'bdp_holder')),
  'bdp_distribution_free': (
    'bdp_distribution_free',
    ('example_aggregate', 'dp_mechanism'),
  ),
}


Cell = paper.ClientCell | paper.JointCell


def cells_of(
  table: int, clients: Sequence[int] = (), tasks: Sequence[str] = ()
) -> list[Cell]:
  """Returns a table's cells.

  Args:
    table: 1 to 4.
    clients: Of Tables I to III only cells with so many clients; all if empty.
    tasks: Of Table IV only these cells; all if empty.
  """
  if table == 4:
    return [c for c in paper.JOINT_TABLE if not tasks or c.name in tasks]
  cells = paper.CLIENT_TABLES[table]
  return [c for c in cells if not clients or c.clients in clients]


def write(
  table: int,
  cells: Sequence[Cell],
  places: jobs.Places,
  results: pathlib.Path,
  seeds: int,
  tiny: bool = False,
) -> pathlib.Path:
  """Runs some of a table's cells and writes its file, keeping others' rows.

  Args:
    table: 1 to 4.
    cells: As `cells_of` returns.
    places: Where data and runs are.
    results: Where the file goes.
    seeds: How many runs cells with 100 clients have; others have one.
    tiny: Whether only to see that everything works.
  """
  rows = [
    _row(table, cell, seed, places, tiny)
    for cell in cells
    for seed in range(seeds if cell.clients == 100 else 1)
  ]
  path = results / f'table_{table}.csv'
  update(path, rows, table, ('cell', 'seed'))
  return path


def read(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the rows of a file that `update` wrote."""
  with open(path, newline='', encoding='utf-8') as file:
    return list(csv.DictReader(file))


def update(
  path: pathlib.Path,
  rows: Sequence[Mapping[str, Any]],
  table: int,
  key: Sequence[str],
) -> None:
  """Writes rows of a table's cells to a file, beside others that it has.

  Args:
    path: The CSV file.
    rows: The rows.
    table: 1 to 4; its cells give the order.
    key: The columns in which old rows that new ones replace are like them.
  """

  def identity(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[column]) for column in key)

  replaced = {identity(row) for row in rows}
  old = read(path) if path.exists() else []
  merged = [*rows, *(row for row in old if identity(row) not in replaced)]
  order = [cell.name for cell in cells_of(table)]
  merged.sort(
    key=lambda row: (order.index(row['cell']), int(row.get('seed', 0)))
  )
  columns = list(dict.fromkeys(name for row in merged for name in row))
  temporary = path.with_suffix('.part')
  with open(temporary, 'w', newline='', encoding='utf-8') as file:
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    writer.writerows(merged)
  temporary.replace(path)


def settings_of(table: int, cell: Cell, kind: str) -> dict[str, Any]:
  """Returns the settings of a cell's run, 'private' or 'baseline'."""
  values = {'clients': cell.clients}
  values |= jobs.load_settings(f'table_{table}', cell.name, kind)
  if isinstance(cell, paper.ClientCell):
    values['delta'] = cell.delta
  elif kind == 'private':
    values |= {'delta': cell.client_delta, 'example_delta': cell.example_delta}
  return values


def stop_columns(cell: Cell, private: jobs.Summary) -> dict[str, Any]:
  """Returns where each accounting stops a cell's private run."""
  row: dict[str, Any] = {}
  if isinstance(cell, paper.ClientCell):
    for method, curve in private.curves['client'].items():
      is_dp = method.startswith('dp')
      budget = cell.dp_epsilon if is_dp else cell.bdp_epsilon
      row |= _stop_columns(method, [(curve, budget)], private)
    return row
  for column, (client, (variant, example)) in _JOINT_METHODS.items():
    curve = private.curves[variant][example]
    budgets = [
      (private.curves['client'][client], cell.client_epsilon),
      (curve, cell.example_epsilon),
    ]
    row |= _stop_columns(column, budgets, private)
    stop = row[f'{column}_rounds']
    if stop:
      row[f'{column}_example_epsilon'] = curve[private.at.index(stop)]
  return row


def _row(
  table: int, cell: Cell, seed: int, places: jobs.Places, tiny: bool
) -> dict[str, Any]:
  """Runs a cell, private and not."""
  private, baseline = (
    jobs.summary_of(
      jobs.make(settings_of(table, cell, kind), seed, places, tiny),
      places,
      f'table_{table}-{cell.name}-{kind}-{seed}',
    )
    for kind in ('private', 'baseline')
  )
  return {
    'cell': cell.name,
    'seed': seed,
    'baseline': baseline.accuracies[-1],
    **stop_columns(cell, private),
    'final_accuracy': private.accuracies[-1],
    'distance': private.distances['client'],
    'model_size': private.model_size,
    **{f'setting_{k}': v for k, v in private.settings.items()},
  }


def _stop_columns(
  method: str,
  budgets: Sequence[tuple[Sequence[float], float]],
  summary: jobs.Summary,
) -> dict[str, Any]:
  stop = epsilon_curves.stop_at(
    budgets, summary.at, summary.accuracy_by_round()
  )
  return {
    f'{method}_accuracy': '' if stop.accuracy is None else stop.accuracy,
    f'{method}_rounds': stop.round_number,
    f'{method}_epsilon': stop.epsilon,
    f'{method}_budget': budgets[0][1],
    f'{method}_final_epsilon': budgets[0][0][-1],
  }
