"""The page that sets our figures beside the paper's, from the CSV files."""

import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import epsilon_curves, figures, paper, tables

PAGE = 'README.md'
_NUMERALS = {1: 'I', 2: 'II', 3: 'III', 4: 'IV'}
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
  found = {
    table: tables.read(results / f'table_{table}.csv')
    for table in paper.TITLES
    if (results / f'table_{table}.csv').exists()
  }
  if found:
    parts += [_glance(found), _behind(found)]
  for table, rows in found.items():
    parts.append(_section(table, rows))
    path = results / f'tuning_{table}.csv'
    if path.exists():
      parts.append(_tuning_section(table, tables.read(path)))
  for figure, text in FIGURES.items():
    if (results / f'figure_{figure}.png').exists():
      parts.append(
        f'## Figure {figure}\n\n`python -m experiments.reproduce '
        f'--figure={figure}`\n\n![Figure {figure}](figure_{figure}.png)\n\n'
        f'{text}'
      )
  page = results / PAGE
  page.write_text('\n\n'.join(parts) + '\n', encoding='utf-8')
  return page


FIGURES = {
  1: (
    'Growth of ε of examples since the first evaluated round, by the '
    "paper's accounting with the exact divergence, δ = 1e-5. "
    '`figure_1.csv` has the other accountings.'
  ),
  2: (
    'Test accuracy over rounds. `figure_2.csv` has ε of clients at each point.'
  ),
}


def _printed(cell: tables.Cell) -> dict[str, float]:
  """Returns the paper's accuracies by the column that ours are in."""
  joint = isinstance(cell, paper.JointCell)
  return {
    'baseline': cell.baseline,
    'dp_mechanism' if joint else 'dp_paper': cell.dp_accuracy,
    'bdp_paper': cell.bdp_accuracy,
  }


def _mine(rows: Sequence[_Row], cell: tables.Cell) -> list[_Row]:
  return [row for row in rows if row['cell'] == cell.name]


def name_of(table: int, cell: tables.Cell) -> str:
  """Returns what a cell is called, such as 'II, 100 clients'."""
  name = figures.PANELS.get(cell.name, f'{cell.clients:,} clients')
  return f'{_NUMERALS[table]}, {name}'


def _glance(found: Mapping[int, Sequence[_Row]]) -> str:
  """Returns every cell in one line."""
  lines = [
    '## At a glance',
    '',
    "Accuracy, the paper's → ours, at the paper's (ε, δ). DP counts as the "
    'paper does; so does BDP. Beside it: with composition that holds for a '
    'person who stays all rounds (a panel), and the default of this library, '
    'which in addition assumes nothing about how costs are distributed over '
    'people. –: no round is within the budget.',
    '',
    '| table | no privacy | DP | BDP | BDP, sound composition | BDP, sound |',
    '|---|---|---|---|---|---|',
  ]
  for table, rows in found.items():
    for cell in tables.cells_of(table):
      mine = _mine(rows, cell)
      if not mine:
        continue
      compared = [
        f'{value:.0%} → {_accuracy(mine, method) or "–"}'
        for method, value in _printed(cell).items()
      ]
      sound = [
        _accuracy(mine, method) or '–'
        for method in ('bdp_panel', 'bdp_distribution_free')
      ]
      cells = (name_of(table, cell), *compared, *sound)
      lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join(lines)


def _behind(found: Mapping[int, Sequence[_Row]]) -> str:
  """Returns which cells stay behind the paper's, by how much and why."""
  lines = []
  for table, rows in found.items():
    for cell in tables.cells_of(table):
      mine = _mine(rows, cell)
      for method, printed in _printed(cell).items() if mine else ():
        accuracies = _accuracies(mine, method)
        title = 'no privacy'
        if method != 'baseline':
          title = epsilon_curves.METHODS[method]
        where = f'- Table {name_of(table, cell)}, {title}: '
        if not accuracies:
          lines.append(f'{where}no round within the budget; {_why(mine)}')
          continue
        points = 100 * (statistics.mean(accuracies) - printed)
        if round(points, 1) >= 0:
          continue
        reason = _why(mine)
        if method == 'baseline':
          reason = '300 rounds of FedSGD, not tuned further.'
        elif _budget_is_left(mine, method):
          reason += (
            f' Not the budget but the {mine[0]["setting_rounds"]} rounds ended '
            'it: more of them, or less noise, would have been within it.'
          )
        lines.append(f'{where}{-points:.1f} points; {reason}')
  if not lines:
    return "## Behind the paper\n\nNo cell is behind the paper's."
  return '\n'.join(['## Behind the paper', '', _BEHIND, '', *lines])


_BEHIND = (
  'What keeps a private cell behind is noise. Beside '
  'each cell: the length of the noise of one round, where the mean of clipped '
  'updates has at most length 1, and how far a client is from the others, in '
  'shares of the worst case that DP assumes. Clients with two classes each '
  'disagree: their mean is short, their distance long, and BDP saves little. '
  "The paper's direction of the divergence costs O(q) instead of O(q²) where "
  'few of many clients take part; the exact one is in the tables below.'
)


def _budget_is_left(rows: Sequence[_Row], method: str) -> bool:
  """Whether all rounds of all runs are within the budget."""
  return all(row[f'{method}_rounds'] == row['setting_rounds'] for row in rows)


def _why(rows: Sequence[_Row]) -> str:
  row = rows[0]
  size, noise = int(row['model_size']), float(row['setting_noise_multiplier'])
  clients = int(row['setting_clients']) * float(
    row['setting_participation_probability']
  )
  if row['setting_level'] != 'client':
    clients = math.sqrt(clients)  # Each client adds its own noise.
  length = noise * math.sqrt(size) / clients
  distance = statistics.mean(_values(rows, 'distance'))
  return f'noise {length:.1f}, distance {distance:.0%}.'


def _section(table: int, rows: Sequence[_Row]) -> str:
  """Returns a table with ours beside the paper's."""
  lines = [
    f'## Table {_NUMERALS[table]}: {paper.TITLES[table]}',
    '',
    f'`python -m experiments.reproduce --table={table}`'
    + ('; examples at (0.1, 1e-5).' if table == 4 else ''),
    '',
    f'| {"data" if table == 4 else "clients"} | accounting | (ε, δ) | paper | '
    'ours | difference | rounds | ε after the last round |',
    '|---|---|---|---|---|---|---|---|',
  ]
  for cell in tables.cells_of(table):
    mine = _mine(rows, cell)
    if not mine:
      continue
    printed = _printed(cell)
    lines.append(_line(cell.name, 'none', '', printed, mine, 'baseline'))
    for method, title in epsilon_curves.METHODS.items():
      if f'{method}_accuracy' in mine[0]:
        budget = float(mine[0][f'{method}_budget'])
        privacy = f'({budget:g}, {float(mine[0]["setting_delta"]):g})'
        lines.append(_line(cell.name, title, privacy, printed, mine, method))
  return '\n'.join(lines)


def _tuning_section(table: int, rows: Sequence[_Row]) -> str:
  """Returns what was tried for a table's hyper-parameters."""
  lines = [
    f'### Tried for Table {_NUMERALS[table]}',
    '',
    f'`python -m experiments.reproduce --table={table} --tune`: accuracy on '
    'validation data at the budgets, one run each; the used values first, then '
    'one of them changed.',
    '',
    '| cell | changed | DP | BDP | BDP, sound composition | after all rounds |',
    '|---|---|---|---|---|---|',
  ]
  for row in rows:
    changed = f'{row["setting"]} = {row["value"]}' if row['setting'] else '–'
    dp = 'dp_mechanism' if table == 4 else 'dp_paper'
    accuracies = [
      _accuracy([row], method) or '–'
      for method in (dp, 'bdp_paper', 'bdp_panel')
    ]
    final = f'{float(row["final_accuracy"]):.1%}'
    cells = (row['cell'], changed, *accuracies, final)
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join(lines)


def _line(
  name: str,
  title: str,
  privacy: str,
  printed: Mapping[str, float],
  rows: Sequence[_Row],
  method: str,
) -> str:
  """Returns one line of a table."""
  accuracies = _accuracies(rows, method)
  difference = ''
  if method in printed and accuracies:
    difference = f'{100 * (statistics.mean(accuracies) - printed[method]):+.1f}'
  rounds = final = ''
  if method != 'baseline':
    stops = _values(rows, f'{method}_rounds')
    rounds = _with_deviation(stops, '{:.0f}'.format)
    final = _with_deviation(
      _values(rows, f'{method}_final_epsilon'), '{:.2f}'.format
    )
  cells = (
    str(name),
    title,
    privacy,
    f'{printed[method]:.0%}' if method in printed else '',
    _accuracy(rows, method) or 'no round within the budget',
    difference,
    rounds,
    final,
  )
  return f'| {" | ".join(cells)} |'


def _accuracies(rows: Sequence[_Row], method: str) -> list[float]:
  return _values(rows, method if method == 'baseline' else f'{method}_accuracy')


def _accuracy(rows: Sequence[_Row], method: str) -> str:
  return _with_deviation(_accuracies(rows, method), '{:.1%}'.format)


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
