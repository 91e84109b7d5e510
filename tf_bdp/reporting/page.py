"""Turns what a training run left in its directory into a page for people.

The page stands alone: no scripts, no other files, no requests. Its structure
is in templates/report.html.jinja; here is what goes into it.
"""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import jinja2
import numpy as np

from tf_bdp.accounting import (
  applicability,
  comparison,
  conversion,
  privacy_report,
)
from tf_bdp.reporting import formatting, metrics_file, plots

_TEMPLATES = pathlib.Path(__file__).parent / 'templates'
_VERDICT_MARKS = {'ok': '✓', 'doubtful': '?', 'not applicable': '✕'}
_MOST_ROWS = 20

# The figures for the summary, best first. Both of DP are bounds for anyone. Of
# BDP, the fewer assumptions the better; the paper's is never a headline, as it
# under-reports for a unit that stays (see the statement).
_HEADLINE_DP = ('DP, PLD', 'DP, RDP')
_HEADLINE_BDP = ('BDP, distribution-free', 'BDP, panel', 'BDP, holder')


def write(
  directory: Union[str, 'os.PathLike[str]'],
  *,
  title: str,
  settings: Mapping[str, Any],
  privacy: Sequence[privacy_report.PrivacyReport],
  distances: Optional[np.ndarray],
  notes: Sequence[str] = (),
) -> pathlib.Path:
  """Writes the statement, the settings, the plots and the page of a run.

  The statement comes first, so that it is there whatever befalls the plots.
  Each file appears whole or not at all.

  Args:
    directory: Where `metrics.csv` is and the report goes.
    title: The heading of the page.
    settings: The flags of the run.
    privacy: The run accounted for by DP and BDP, once for each unit that it
      protects. The plots and their captions speak of the first unit.
    distances: ‖Δ‖ of every round and sampled unit, in units of the clip norm,
      an array [rounds, units]; None if there are none to show.
    notes: Caveats, one sentence each, shown in a box at the top.

  Returns:
    The path of the page, `report.html`.

  Raises:
    ValueError: If `metrics.csv` or the distances are not of the right form, or
      if there is no privacy report.
  """
  if not privacy:
    raise ValueError('privacy must hold a report for each unit. Found none.')
  directory = pathlib.Path(directory)
  statement = '\n\n'.join(report.statement() for report in privacy)
  _replace(directory / 'statement.txt', f'{statement}\n'.encode())
  settings_text = json.dumps(dict(settings), indent=2, default=_plain) + '\n'
  _replace(directory / 'settings.json', settings_text.encode())
  rows = metrics_file.read(directory / 'metrics.csv')
  distances = _checked_distances(distances)
  pictures = {
    'epsilon_over_rounds': plots.epsilon_over_rounds(rows),
    'accuracy_over_epsilon': plots.accuracy_over_epsilon(rows),
    'distances': plots.spread_of_distances(
      distances, privacy[0].worst_case_distance
    ),
  }
  for name, plot in pictures.items():
    _replace(directory / f'{name}.png', plot.png)
  page = _template().render(
    title=title,
    summaries=[_summary(rows, report) for report in privacy],
    notes=[*notes, *_caveats(rows, privacy)],
    reports=privacy,
    plots=pictures,
    distances=distances,
    statement=statement,
    settings={str(name): str(value) for name, value in settings.items()},
    metrics=_metrics(rows),
  )
  path = directory / 'report.html'
  _replace(path, page.encode())
  return path


def _template() -> jinja2.Template:
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_TEMPLATES),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
  )
  environment.globals['verdict_marks'] = _VERDICT_MARKS
  environment.filters['number'] = formatting.number
  environment.filters['attack_success_bound'] = _attack_success_bound
  return environment.get_template('report.html.jinja')


def _attack_success_bound(row: comparison.Row) -> Optional[float]:
  if row.epsilon is None:
    return None
  return conversion.attack_success_bound(row.epsilon, row.delta)


def _replace(path: pathlib.Path, content: bytes) -> None:
  """Writes a file under another name, then gives it its own."""
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  try:
    temporary.write_bytes(content)
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
  """Returns what JSON can hold of a value that it does not know."""
  if isinstance(value, (np.generic, np.ndarray)):
    return value.tolist()
  return str(value)


def _checked_distances(distances: Optional[np.ndarray]) -> np.ndarray:
  """Returns distances [rounds, units], empty if there are none."""
  if distances is None:
    return np.empty((0, 0))
  distances = np.asarray(distances, dtype=np.float64)
  if distances.ndim != 2 or not np.all(np.isfinite(distances)):
    raise ValueError(
      'distances must be a finite array [rounds, units]. Found shape '
      f'{distances.shape} with {np.sum(~np.isfinite(distances))} values that '
      'are not finite.'
    )
  return distances


class _Figure(NamedTuple):
  """A figure to see first, with what it is about."""

  name: str
  value: str
  remarks: Sequence[str]


def _summary(
  rows: Sequence[metrics_file.Row], report: privacy_report.PrivacyReport
) -> list[_Figure]:
  """Returns the figures to see first."""
  accuracy, when = formatting.MISSING, 'no round was evaluated'
  for row in metrics_file.evaluated(rows)[-1:]:
    accuracy = metrics_file.text(row, 'accuracy')
    when = f'after round {metrics_file.text(row, "round")}'
  noise = (
    f'noise multiplier {report.noise_multiplier:g}, participation probability '
    f'{report.participation_probability:g}'
  )
  population = f'for {report.one_unit} drawn from the same population'
  return [
    _Figure('Final accuracy', accuracy, [when]),
    _Figure('Rounds', str(report.rounds), [noise]),
    _headline('DP epsilon', report, _HEADLINE_DP, f'for any {report.unit}'),
    _headline('BDP epsilon', report, _HEADLINE_BDP, population),
  ]


def _headline(
  name: str,
  report: privacy_report.PrivacyReport,
  methods: Sequence[str],
  whom: str,
) -> _Figure:
  """Returns the ε of the first of the methods that has one."""
  rows: dict[str, comparison.Row] = {
    row.method: row for row in report.rows if row.epsilon is not None
  }
  for method in methods:
    if method in rows:
      value = formatting.number(rows[method].epsilon, '.3f')
      how = f'{method.partition(", ")[2]}, at delta = {report.delta:g}'
      return _Figure(name, value, [how, whom])
  return _Figure(name, formatting.MISSING, ['no method applies', whom])


def _caveats(
  rows: Sequence[metrics_file.Row],
  privacy: Sequence[privacy_report.PrivacyReport],
) -> list[str]:
  """Returns the caveats that follow from the figures themselves."""
  notes = []
  findings = [finding for report in privacy for finding in report.findings]
  if applicability.worst_verdict(findings) != 'ok':
    notes.append(
      'Not all assumptions of BDP fit the data (see below): rely on the DP '
      'figures.'
    )
  if len(rows) != privacy[0].rounds:
    notes.append(
      f'The privacy figures account for {privacy[0].rounds} rounds, but '
      f'metrics.csv has {len(rows)}.'
    )
  notes.append(
    'The BDP figures and the distances were computed from private data: '
    'publishing this page is a release of its own.'
  )
  return notes


class _Metrics(NamedTuple):
  """The table of metrics: some rows of all rounds, as text."""

  headings: Sequence[str]
  rows: Sequence[Sequence[str]]
  rounds: int


def _metrics(rows: Sequence[metrics_file.Row]) -> _Metrics:
  columns = metrics_file.COLUMNS
  return _Metrics(
    headings=[column.heading for column in columns.values()],
    rows=[
      [metrics_file.text(row, name) for name in columns]
      for row in metrics_file.spaced(rows, _MOST_ROWS)
    ],
    rounds=len(rows),
  )
