"""The page that sets our figures beside the paper's, from the CSV files."""

import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Optional

from experiments import epsilon_curves, paper, tables

PAGE = 'README.md'
_Row = dict[str, Any]


def write(results: pathlib.Path) -> pathlib.Path:
  """Writes the page from whatever tables and figures are there."""
  parts = [
    '# Results\n\nWritten by `python -m experiments.reproduce`; every number '
    'here is from the CSV file beside it, which has all settings, one row for '
    'each cell and seed. Accuracies are on the test data, mean ± deviation '
    "where there are several seeds; ours minus the paper's in percentage "
    'points. Each run was trained once and stopped, for each way of '
    'accounting, at the last evaluated round within the budget.'
  ]
  for table in paper.CLIENT_TABLES:
    path = results / f'table_{table}.csv'
    if path.exists():
      parts.append(_client_section(table, tables.read(path)))
  path = results / 'table_4.csv'
  if path.exists():
    parts.append(_joint_section(tables.read(path)))
  for figure, text in _FIGURES.items():
    if (results / f'figure_{figure}.png').exists():
      parts.append(
        f'## Figure {figure}\n\n`python -m experiments.reproduce '
        f'--figure={figure}`\n\n![Figure {figure}](figure_{figure}.png)\n\n'
        f'{text}'
      )
  page = results / PAGE
  page.write_text('\n\n'.join(parts) + '\n', encoding='utf-8')
  return page


_FIGURES = {
  1: (
    'Growth of ε of examples since the first evaluated round, by the '
    "paper's accounting with the exact divergence, δ = 1e-5. "
    '`figure_1.csv` has the other accountings.'
  ),
  2: (
    'Test accuracy over rounds. `figure_2.csv` has ε of clients at each point.'
  ),
}


def _client_section(table: int, rows: Sequence[_Row]) -> str:
  """Returns Tables I to III with ours beside."""
  lines = [
    f'## Table {"I" * table}: {paper.TITLES[table]}',
    '',
    f'`python -m experiments.reproduce --table={table}`',
    '',
    '| clients | accounting | (ε, δ) | paper | ours | difference | rounds | '
    'ε after the last round |',
    '|---|---|---|---|---|---|---|---|',
  ]
  for cell in paper.CLIENT_TABLES[table]:
    mine = [row for row in rows if row['cell'] == str(cell.clients)]
    if not mine:
      continue
    lines.append(
      _line(cell.clients, 'none', '', cell.baseline, mine, 'baseline')
    )
    for method, title in epsilon_curves.METHODS.items():
      if f'{method}_accuracy' not in mine[0]:
        continue
      is_dp = method.startswith('dp')
      epsilon = cell.dp_epsilon if is_dp else cell.bdp_epsilon
      printed = {
        'dp_paper': cell.dp_accuracy,
        'bdp_paper': cell.bdp_accuracy,
      }.get(method)
      privacy = f'({epsilon:g}, {cell.delta:g})'
      lines.append(_line(cell.clients, title, privacy, printed, mine, method))
  return '\n'.join(lines)


def _joint_section(rows: Sequence[_Row]) -> str:
  """Returns Table IV with ours beside."""
  lines = [
    f'## Table IV: {paper.TITLES[4]}',
    '',
    '`python -m experiments.reproduce --table=4`; examples at (0.1, 1e-5).',
    '',
    '| data | accounting | (ε, δ) | paper | ours | difference | rounds | '
    'ε after the last round |',
    '|---|---|---|---|---|---|---|---|',
  ]
  for cell in paper.JOINT_TABLE:
    mine = [row for row in rows if row['cell'] == cell.cell]
    if not mine:
      continue
    lines.append(_line(cell.cell, 'none', '', cell.baseline, mine, 'baseline'))
    printed = {'dp_mechanism': cell.dp_accuracy, 'bdp_paper': cell.bdp_accuracy}
    for method, title in epsilon_curves.METHODS.items():
      if f'{method}_accuracy' not in mine[0]:
        continue
      privacy = f'({cell.client_epsilon:g}, {cell.client_delta:g})'
      lines.append(
        _line(cell.cell, title, privacy, printed.get(method), mine, method)
      )
  return '\n'.join(lines)


def _line(
  name: Any,
  title: str,
  privacy: str,
  printed: Optional[float],
  rows: Sequence[_Row],
  method: str,
) -> str:
  """Returns one line of a table."""
  is_baseline = method == 'baseline'
  accuracies = _values(rows, method if is_baseline else f'{method}_accuracy')
  ours = _with_deviation(accuracies, '{:.1%}'.format)
  difference = ''
  if printed is not None and accuracies:
    difference = f'{100 * (statistics.mean(accuracies) - printed):+.1f}'
  rounds = final = ''
  if not is_baseline:
    stops = _values(rows, f'{method}_rounds')
    rounds = _with_deviation(stops, '{:.0f}'.format)
    final = _with_deviation(
      _values(rows, f'{method}_final_epsilon'), '{:.2f}'.format
    )
  cells = (
    str(name),
    title,
    privacy,
    '' if printed is None else f'{printed:.0%}',
    ours or 'no round within the budget',
    difference,
    rounds,
    final,
  )
  return f'| {" | ".join(cells)} |'


def _values(rows: Sequence[_Row], column: str) -> list[float]:
  return [float(row[column]) for row in rows if row.get(column, '') != '']


def _with_deviation(
  values: Sequence[float], form: Callable[[float], str]
) -> str:
  if not values:
    return ''
  text = form(statistics.mean(values))
  if len(values) > 1:
    text += f' ± {form(statistics.stdev(values))}'
  return text
