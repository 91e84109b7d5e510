"""Figures 1 and 2 of the paper, as CSV and PNG files."""

import csv
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import jobs, tables

PANELS = {
  'aptos': 'APTOS 2019',
  'mnist_iid': 'MNIST, i.i.d.',
  'mnist_shards': 'MNIST, non-i.i.d.',
}
_FIGURE_1_CLIENTS = (100, 1000)
# How the paper accounts; the sound figures are in the CSV file beside it.
_FIGURE_1_METHOD = 'bdp_paper_l_part'
# The table and the clients of a panel.
_FIGURE_2_CELLS = {
  'aptos': (3, 100),
  'mnist_iid': (2, 1000),
  'mnist_shards': (1, 1000),
}
_FIGURE_2_KINDS = {
  'baseline': 'non-private',
  'private': 'client only',
  'joint': 'joint',
  'split': 'split',
}
_EXAMPLE_DELTA = 1e-5
# Okabe and Ito's colours, and another dash for each curve.
_STYLES = (
  {'color': '#0072b2', 'linestyle': '-'},
  {'color': '#c44e00', 'linestyle': '--'},
  {'color': '#009e73', 'linestyle': '-.'},
  {'color': '#8c4b82', 'linestyle': ':'},
)


def write(
  figure: int,
  places: jobs.Places,
  results: pathlib.Path,
  panels: Sequence[str] = (),
  tiny: bool = False,
) -> pathlib.Path:
  """Runs what a figure shows and writes its CSV and PNG files.

  Args:
    figure: 1 or 2.
    places: Where data and runs are.
    results: Where the files go. They keep what they have of other panels.
    panels: Only these of `PANELS`; all if empty.
    tiny: Whether only to see that everything works.

  Returns:
    The PNG file.
  """
  path = results / f'figure_{figure}.csv'
  old = tables.read(path) if path.exists() else []
  rows_of = _rows_of_1 if figure == 1 else _rows_of_2
  rows = []
  for panel in PANELS:
    if not panels or panel in panels:
      rows += rows_of(panel, places, tiny)
    else:
      rows += [row for row in old if row['panel'] == panel]
  with open(path, 'w', newline='', encoding='utf-8') as file:
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
  return plot(figure, rows, results / f'figure_{figure}.png')


def _rows_of_1(
  panel: str, places: jobs.Places, tiny: bool
) -> list[dict[str, Any]]:
  """ε of examples, sequential and parallel, of the same runs."""
  rows = []
  for clients in _FIGURE_1_CLIENTS:
    values = jobs.load_settings('figure_1', panel, str(clients))
    summary = jobs.summary_of(
      jobs.make({'clients': clients} | values, 0, places, tiny),
      places,
      f'figure_1-{panel}-{clients}',
    )
    for accounting in ('sequential', 'parallel'):
      for method, curve in summary.curves[f'example_{accounting}'].items():
        rows += [
          {
            'panel': panel,
            'curve': f'{accounting}, {clients} clients',
            'method': method,
            'round': number,
            'value': epsilon,
          }
          for number, epsilon in zip(summary.at, curve)
        ]
  return rows


def _rows_of_2(
  panel: str, places: jobs.Places, tiny: bool
) -> list[dict[str, Any]]:
  """Accuracy over rounds, by what is protected and how."""
  rows = []
  table, clients = _FIGURE_2_CELLS[panel]
  (cell,) = tables.cells_of(table, [clients])
  for kind, label in _FIGURE_2_KINDS.items():
    if kind in ('baseline', 'private'):
      values = tables.settings_of(table, cell, kind)
    else:
      values = jobs.load_settings('figure_2', panel, kind)
      values |= {'clients': clients, 'delta': cell.delta}
      values['example_delta'] = _EXAMPLE_DELTA
    summary = jobs.summary_of(
      jobs.make(values, 0, places, tiny),
      places,
      f'figure_2-{panel}-{kind}',
      examples=kind in ('baseline', 'private'),  # As the tables do.
    )
    curves = summary.curves.get('client', {})
    epsilons = curves.get('bdp_panel', [''] * len(summary.at))
    rows += [
      {
        'panel': panel,
        'curve': label,
        'method': 'accuracy',
        'round': number,
        'value': accuracy,
        'client_epsilon': epsilon,
      }
      for number, accuracy, epsilon in zip(
        summary.at, summary.accuracies, epsilons
      )
    ]
  return rows


def plot(
  figure: int, rows: Sequence[Mapping[str, Any]], path: pathlib.Path
) -> pathlib.Path:
  """Draws a figure from the rows of its CSV file."""
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  wanted = _FIGURE_1_METHOD if figure == 1 else 'accuracy'
  shown = [panel for panel in PANELS if any(r['panel'] == panel for r in rows)]
  plot_figure, axes = pyplot.subplots(
    1,
    len(shown),
    figsize=(4 * len(shown), 3.6),
    layout='constrained',
    squeeze=False,
  )
  for axis, panel in zip(axes[0], shown):
    chosen = [r for r in rows if (r['panel'], r['method']) == (panel, wanted)]
    for style, name in zip(
      _STYLES, dict.fromkeys(row['curve'] for row in chosen)
    ):
      curve = [row for row in chosen if row['curve'] == name]
      numbers = [int(row['round']) for row in curve]
      values = [float(row['value']) for row in curve]
      if figure == 1:  # As in the paper: growth since the first value.
        numbers, values = numbers[1:], [v - values[0] for v in values[1:]]
      axis.plot(numbers, values, label=name, linewidth=1.8, **style)
    if figure == 2:  # The runs of tables can be longer.
      ends = {row['curve']: int(row['round']) for row in chosen}
      axis.set_xlim(0, min(ends.values()))
    axis.set_title(PANELS[panel])
    axis.set_xlabel('communication round')
    if figure == 1:
      axis.set_yscale('log')
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
  label = 'growth of ε' if figure == 1 else 'test accuracy'
  axes[0, 0].set_ylabel(label)
  plot_figure.savefig(path, dpi=150)
  pyplot.close(plot_figure)
  return path
