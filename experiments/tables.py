"""Tables I to IV of the paper, as CSV files: a row for each cell and seed."""

import csv
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import epsilon_curves, jobs, paper

# Which curves of clients and examples a column of Table IV goes by.
_JOINT_METHODS = {
  'dp_mechanism': ('dp_mechanism', ('example_sequential', 'dp_mechanism')),
  'bdp_paper': ('bdp_paper', ('example_sequential', 'bdp_paper')),
  'bdp_paper_l_part': (
    'bdp_paper_l_part',
    ('example_sequential', 'bdp_paper_l_part'),
  ),
  'bdp_panel': ('bdp_panel', ('example_aggregate', 'bdp_holder')),
}


def write(
  table: int,
  places: jobs.Places,
  results: pathlib.Path,
  seeds: int,
  clients: Sequence[int] = (),
  tiny: bool = False,
) -> pathlib.Path:
  """Runs a table's cells and writes its file, keeping other cells' rows.

  Args:
    table: 1 to 4.
    places: Where data and runs are.
    results: Where the file goes.
    seeds: How many runs cells with 100 clients have; others have one.
    clients: Only cells with so many clients; all if empty.
    tiny: Whether only to see that everything works.
  """
  rows: list[dict[str, Any]] = []
  if table == 4:
    for joint_cell in paper.JOINT_TABLE:
      for seed in range(seeds):
        rows.append(_joint_row(joint_cell, seed, places, tiny))
  else:
    for cell in paper.CLIENT_TABLES[table]:
      if clients and cell.clients not in clients:
        continue
      for seed in range(seeds if cell.clients == 100 else 1):
        rows.append(_client_row(table, cell, seed, places, tiny))
  path = results / f'table_{table}.csv'
  known = {(row['cell'], int(row['seed'])) for row in rows}
  if path.exists():
    rows += [
      row for row in read(path) if (row['cell'], int(row['seed'])) not in known
    ]
  order = [row['cell'] for row in rows]
  if table != 4:
    order = sorted(set(order), key=int)
  rows.sort(key=lambda row: (order.index(row['cell']), int(row['seed'])))
  _write_csv(path, rows)
  return path


def read(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the rows of a file that `write` wrote."""
  with open(path, newline='', encoding='utf-8') as file:
    return list(csv.DictReader(file))


def _write_csv(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
  columns = list(dict.fromkeys(name for row in rows for name in row))
  temporary = path.with_suffix('.part')
  with open(temporary, 'w', newline='', encoding='utf-8') as file:
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    writer.writerows(rows)
  temporary.replace(path)


def _client_row(
  table: int,
  cell: paper.ClientCell,
  seed: int,
  places: jobs.Places,
  tiny: bool,
) -> dict[str, Any]:
  """Runs a cell of Tables I to III, private and not."""
  name, key = f'table_{table}', str(cell.clients)
  common = {'clients': cell.clients, 'delta': cell.delta}
  private, baseline = (
    jobs.summary_of(
      jobs.make(
        common | jobs.load_settings(name, 'clients', key, kind),
        seed,
        places,
        tiny,
      ),
      places,
      f'{name}-{key}-{kind}-{seed}',
    )
    for kind in ('private', 'baseline')
  )
  budgets = {
    method: cell.dp_epsilon if method.startswith('dp') else cell.bdp_epsilon
    for method in private.curves['client']
  }
  row = {'cell': key, 'seed': seed, 'baseline': baseline.accuracies[-1]}
  for method, curve in private.curves['client'].items():
    row |= _stop_columns(method, [(curve, budgets[method])], private)
  return row | _settings_columns(private)


def _joint_row(
  cell: paper.JointCell, seed: int, places: jobs.Places, tiny: bool
) -> dict[str, Any]:
  """Runs a row of Table IV."""
  deltas = {'delta': cell.client_delta, 'example_delta': cell.example_delta}
  settings = {
    kind: {'clients': 100} | jobs.load_settings('table_4', cell.cell, kind)
    for kind in ('private', 'baseline')
  }
  settings['private'] |= deltas
  private, baseline = (
    jobs.summary_of(
      jobs.make(values, seed, places, tiny),
      places,
      f'table_4-{cell.cell}-{kind}-{seed}',
    )
    for kind, values in settings.items()
  )
  row = {'cell': cell.cell, 'seed': seed, 'baseline': baseline.accuracies[-1]}
  for column, (client, (variant, example)) in _JOINT_METHODS.items():
    budgets = [
      (private.curves['client'][client], cell.client_epsilon),
      (private.curves[variant][example], cell.example_epsilon),
    ]
    row |= _stop_columns(column, budgets, private)
    stop = row[f'{column}_rounds']
    if stop:
      position = private.at.index(stop)
      row[f'{column}_example_epsilon'] = private.curves[variant][example][
        position
      ]
  return row | _settings_columns(private)


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


def _settings_columns(summary: jobs.Summary) -> dict[str, Any]:
  result = {'final_accuracy': summary.accuracies[-1]}
  return result | {f'setting_{k}': v for k, v in summary.settings.items()}
