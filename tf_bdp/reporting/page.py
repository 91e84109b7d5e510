"""Turns what a training run left in its directory into a page for people.

The page stands alone: no scripts, no other files, no requests. Its structure
is in templates/report.html.jinja; here is what goes into it.
"""

import json
import math
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
from tf_bdp.accounting import claims as claims_lib
from tf_bdp.reporting import formatting, metrics_file, plots

_TEMPLATES = pathlib.Path(__file__).parent / 'templates'
_VERDICT_MARKS = {'ok': '✓', 'doubtful': '?', 'not applicable': '✕'}
_MOST_ROWS = 20

# What the page does not show of metrics.csv: how many took part is private, and
# how many failed and how long it took tell about it.
_PRIVATE_COLUMNS = ('participants', 'failed_clients', 'seconds')


def write(
  directory: Union[str, 'os.PathLike[str]'],
  *,
  title: str,
  settings: Mapping[str, Any],
  privacy: Sequence[privacy_report.PrivacyReport],
  distances: Optional[np.ndarray],
  notes: Sequence[str] = (),
  expected_participants: Optional[float] = None,
) -> pathlib.Path:
  """Writes the statement, the figures, the plots and the page of a run.

  The statement comes first, so that it is there whatever befalls the plots.
  Each file appears whole or not at all.

  Args:
    directory: Where `metrics.csv` is and the report goes.
    title: The heading of the page.
    settings: The flags of the run.
    privacy: What can be claimed of the run, once for each unit that it
      protects. The plots and their captions speak of the first unit.
    distances: ‖Δ‖ of every round and sampled unit, in units of the clip norm,
      an array [rounds, units]; None if there are none to show.
    notes: Caveats, one sentence each, shown in a box at the top.
    expected_participants: How many clients take part in a round, in
      expectation; the page does not tell how many did.

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
  figures = {report.unit: report.to_dict() for report in privacy}
  _replace(directory / 'privacy.json', _json(figures))
  _replace(directory / 'settings.json', _json(dict(settings)))
  rows = metrics_file.read(directory / 'metrics.csv')
  distances = _checked_distances(distances)
  shown = _curves(rows, privacy[0])
  headline = [name for name in shown if name in _headline_claims(privacy[0])]
  pictures = {
    'epsilon_over_rounds': plots.epsilon_over_rounds(rows, shown),
    'accuracy_over_epsilon': plots.accuracy_over_epsilon(rows, headline),
    'distances': plots.spread_of_distances(
      distances, privacy[0].worst_case_distance
    ),
  }
  for name, plot in pictures.items():
    _replace(directory / f'{name}.png', plot.png)
  page = _template().render(
    title=title,
    summaries=[
      _summary(rows, report, expected_participants) for report in privacy
    ],
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
  environment.globals['attacker'] = claims_lib.ATTACKER
  environment.globals['seeded_draws'] = privacy_report.SEEDED_DRAWS
  environment.filters['number'] = formatting.number
  environment.filters['attack_success_bound'] = _attack_success_bound
  environment.filters['in_words'] = claims_lib.in_words
  environment.filters['in_plain_words'] = claims_lib.in_plain_words
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


def _json(value: Mapping[str, Any]) -> bytes:
  return (json.dumps(_finite(value), indent=2, default=_plain) + '\n').encode()


def _finite(value: Any) -> Any:
  """Returns plain data with None for numbers that JSON cannot hold."""
  if isinstance(value, Mapping):
    return {str(name): _finite(part) for name, part in value.items()}
  if isinstance(value, (list, tuple)):
    return [_finite(part) for part in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


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


def _headline_claims(report: privacy_report.PrivacyReport) -> list[str]:
  """Returns the claim that is recommended, and DP beside it."""
  return list(dict.fromkeys([report.recommended.claim.name, 'dp']))


def _curves(
  rows: Sequence[metrics_file.Row], report: privacy_report.PrivacyReport
) -> list[str]:
  """Returns the claims of which the metrics have figures."""
  columns = metrics_file.epsilon_columns(rows[0] if rows else ())
  names = [row.claim.name for row in report.claims]
  return [n for n in names if metrics_file.epsilon_column(n) in columns]


def _summary(
  rows: Sequence[metrics_file.Row],
  report: privacy_report.PrivacyReport,
  expected_participants: Optional[float],
) -> list[_Figure]:
  """Returns the figures to see first, the recommended claim before all."""
  accuracy, when = formatting.MISSING, 'no round was evaluated'
  for row in metrics_file.evaluated(rows)[-1:]:
    accuracy = metrics_file.text(row, 'accuracy')
    when = f'after round {metrics_file.text(row, "round")}'
  course = [f'noise multiplier {report.noise_multiplier:g}']
  if expected_participants is not None:
    course.append(f'{expected_participants:g} participants expected in each')
  claimed = {row.claim.name: row for row in report.claims}
  figures = [
    _epsilon(claimed[name], report) for name in _headline_claims(report)
  ]
  return [
    *figures,
    _Figure('Final accuracy', accuracy, [when]),
    _Figure('Rounds', str(report.rounds), course),
  ]


def _epsilon(
  row: claims_lib.ClaimedEpsilon, report: privacy_report.PrivacyReport
) -> _Figure:
  """Returns the card of a claim."""
  protected = claims_lib.in_words(row.claim.protects, report.unit)
  remarks = [f'at delta = {row.delta:g}', protected.partition(';')[0]]
  if row.recommended:
    remarks.insert(1, 'recommended')
  known = [k for k in report.known_draws if k.claim == row.claim]
  if known:
    value = formatting.number(known[0].epsilon, '.3f')
    remarks.append(f'{value} against whoever knows the seed of the draws')
  name = f'{report.unit.capitalize()}s, epsilon by {row.claim.name}'
  return _Figure(name, formatting.number(row.epsilon, '.3f'), remarks)


def _caveats(
  rows: Sequence[metrics_file.Row],
  privacy: Sequence[privacy_report.PrivacyReport],
) -> list[str]:
  """Returns the caveats that follow from the figures themselves."""
  notes = []
  findings = [finding for report in privacy for finding in report.findings]
  if applicability.worst_verdict(findings) != 'ok':
    notes.append(
      'Not all assumptions of BDP fit the data (see below): rely on the claim '
      'dp.'
    )
  if len(rows) != privacy[0].rounds:
    notes.append(
      f'The privacy figures account for {privacy[0].rounds} rounds, but '
      f'metrics.csv has {len(rows)}.'
    )
  notes.append(
    'Claims other than dp and filter, and the distances, were computed from '
    'private data: publishing this page is a release of its own.'
  )
  return notes


class _Metrics(NamedTuple):
  """The table of metrics: some rows of all rounds, as text."""

  headings: Sequence[str]
  rows: Sequence[Sequence[str]]
  rounds: int


def _metrics(rows: Sequence[metrics_file.Row]) -> _Metrics:
  columns = [
    name for name in (rows[0] if rows else ()) if name not in _PRIVATE_COLUMNS
  ]
  return _Metrics(
    headings=[metrics_file.column(name).heading for name in columns],
    rows=[
      [metrics_file.text(row, name) for name in columns]
      for row in metrics_file.spaced(metrics_file.evaluated(rows), _MOST_ROWS)
    ],
    rounds=len(rows),
  )
