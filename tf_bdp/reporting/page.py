"""Turns what a training run left in its directory into a page for people.

The page stands alone: no scripts, no other files, no requests. Its texts pass
through `_element`, which escapes whatever it did not make itself.
"""

import base64
import csv
import html
import importlib
import io
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional, Union

import numpy as np

from tf_bdp import accounting
from tf_bdp.accounting import applicability, comparison, privacy_report

# Matplotlib is imported when there is something to draw: it is an extra, and
# slow. Mypy is not led to it, as it is in newer Python than we support.
_Figure = Any
_Axes = Any
_MetricsRow = dict[str, Optional[float]]


class _Column(NamedTuple):
  heading: str
  format: str


_COLUMNS = {
  'round': _Column('Round', '.0f'),
  'participants': _Column('Participants', '.0f'),
  'failed_clients': _Column('Failed', '.0f'),
  'clip_norm': _Column('Clip norm', '.4g'),
  'accuracy': _Column('Accuracy', '.2%'),
  'loss': _Column('Loss', '.4f'),
  'dp_epsilon': _Column('DP epsilon', '.3f'),
  'bdp_epsilon': _Column('BDP epsilon', '.3f'),
  'seconds': _Column('Seconds', '.1f'),
}
_MOST_ROWS = 20
_STRIDES = tuple(digit * 10**power for power in range(8) for digit in (1, 2, 5))
_MISSING = '–'

# The figures for the summary, best first. Both of DP are bounds for anyone. Of
# BDP, the fewer assumptions the better; the paper's is never a headline, as it
# under-reports for a unit that stays (see the statement).
_HEADLINE_DP = ('DP, PLD', 'DP, RDP')
_HEADLINE_BDP = ('BDP, distribution-free', 'BDP, panel', 'BDP, holder')


class _Style(NamedTuple):
  """How a curve looks: it differs in more than its colour."""

  label: str
  color: str
  marker: str
  fill: str


# The blue and the vermilion of Okabe and Ito (2008), "Color universal design".
_CURVES = {
  'dp_epsilon': _Style('DP', '#0072b2', 'o', '#0072b2'),
  'bdp_epsilon': _Style('BDP', '#c44e00', 's', 'white'),
}
_INK = '#2b3440'
_LARGE_RANGE = 30.0  # Beyond this ratio an axis is logarithmic.
_DOTS_PER_INCH = 180
_MARKS = 20

_VERDICT_MARKS = {'ok': '✓', 'doubtful': '?', 'not applicable': '✕'}

_CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: #2b3440;
  font: 15px/1.5 "Segoe UI", "Helvetica Neue", Arial, "Liberation Sans",
    sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 36px 24px 56px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 20px; color: #16202b;
  overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 10px; padding-bottom: 6px;
  border-bottom: 1px solid #d5dbe1; color: #16202b; break-after: avoid; }
p { margin: 8px 0; }
.figures { display: grid; grid-template-columns: repeat(4, 1fr); margin: 0;
  border: 1px solid #d5dbe1; border-radius: 6px; }
.figures div { padding: 14px 18px; border-left: 1px solid #d5dbe1; }
.figures div:first-child { border-left: 0; }
.figures dt { font-size: 13px; color: #5a6673; }
.figures dd { margin: 0; font-size: 13px; line-height: 1.35; color: #5a6673; }
.figures dd.value { font-size: 26px; font-weight: 600; color: #16202b;
  font-variant-numeric: tabular-nums; }
.notes { margin: 20px 0 0; padding: 12px 18px; background: #fff7e0;
  border: 1px solid #dcc273; border-left: 6px solid #b98900;
  border-radius: 4px; }
.notes strong { color: #5c4400; }
.notes ul { margin: 4px 0 0; padding-left: 20px; }
.notes li { overflow-wrap: anywhere; }
.notes li + li { margin-top: 4px; }
.hint { color: #5a6673; font-size: 14px; }
table { width: 100%; border-collapse: collapse; font-size: 14px;
  line-height: 1.4; }
th, td { padding: 6px 10px; text-align: left; vertical-align: top;
  border-bottom: 1px solid #e4e8ec; overflow-wrap: break-word; }
thead th { border-bottom: 2px solid #9aa5b1; vertical-align: bottom;
  font-size: 13px; color: #46515d; overflow-wrap: normal; }
tbody th { font-weight: 600; overflow-wrap: normal; }
tr { break-inside: avoid; }
.number { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
thead .number { white-space: normal; }
.metrics th, .metrics td { padding: 4px 8px; }
.settings { table-layout: fixed; }
.settings th:first-child { width: 34%; }
.settings th, .settings td { overflow-wrap: anywhere; }
.settings td { font-family: "DejaVu Sans Mono", Consolas, Menlo, monospace;
  font-size: 13px; white-space: pre-wrap; }
.verdict { display: inline-block; padding: 1px 10px; border-radius: 10px;
  border: 1px solid; font-size: 13px; font-weight: 600; white-space: nowrap; }
.ok { color: #14603f; background: #e6f4ec; }
.doubtful { color: #6f4e00; background: #fff3d1; }
.not-applicable { color: #8f1d14; background: #fde9e6; }
.plots { display: grid; grid-template-columns: 1fr 1fr; gap: 20px 24px; }
figure { margin: 0; break-inside: avoid; }
figure.wide { grid-column: 1 / -1; }
figure img { display: block; width: 100%; height: auto; }
figcaption { font-size: 13px; line-height: 1.45; color: #5a6673;
  margin-top: 4px; }
pre { margin: 0; padding: 16px 18px; overflow-x: auto; background: #f5f7f9;
  border: 1px solid #e0e5ea; border-radius: 4px;
  font: 13px/1.45 "DejaVu Sans Mono", Consolas, Menlo, monospace; }
@media screen and (max-width: 700px) {
  .figures { grid-template-columns: 1fr 1fr; }
  .figures div:nth-child(odd) { border-left: 0; }
  table { display: block; overflow-x: auto; }
  th, td { white-space: nowrap; }
  .settings { display: table; }
  .settings th { white-space: normal; }
  .plots { grid-template-columns: 1fr; }
}
@media print {
  @page { margin: 15mm; }
  body { font-size: 12px; print-color-adjust: exact;
    -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  h2 { margin-top: 24px; }
  table, thead th, .verdict, .hint, figcaption, .figures dt, .figures dd {
    font-size: 11px; }
  th, td, .metrics th, .metrics td { padding: 3px 6px; }
  .settings td { font-size: 10px; }
  .figures, .notes { break-inside: avoid; }
  pre { font-size: 10px; white-space: pre-wrap; }
}
"""


def write(
  directory: Union[str, 'os.PathLike[str]'],
  *,
  title: str,
  settings: Mapping[str, Any],
  privacy: privacy_report.PrivacyReport,
  distances: Optional[np.ndarray],
  notes: Sequence[str] = (),
  example_privacy: Optional[privacy_report.PrivacyReport] = None,
) -> pathlib.Path:
  """Writes the statement, the settings, the plots and the page of a run.

  The statement comes first, so that it is there whatever befalls the plots.
  Each file appears whole or not at all.

  Args:
    directory: Where `metrics.csv` is and the report goes.
    title: The heading of the page.
    settings: The flags of the run.
    privacy: The run accounted for by DP and BDP.
    distances: ‖Δ‖ of every round and sampled unit, in units of the clip norm,
      an array [rounds, units]; None if there are none to show.
    notes: Caveats, one sentence each, shown in a box at the top.
    example_privacy: The same run accounted for at the level of examples, where
      it protects both.

  Returns:
    The path of the page, `report.html`.

  Raises:
    ValueError: If `metrics.csv` or the distances are not of the right form.
  """
  directory = pathlib.Path(directory)
  reports = [privacy, *([example_privacy] if example_privacy else [])]
  statement = '\n\n'.join(part.statement() for part in reports)
  _replace(directory / 'statement.txt', f'{statement}\n'.encode())
  settings_text = json.dumps(dict(settings), indent=2, default=_plain) + '\n'
  _replace(directory / 'settings.json', settings_text.encode())
  metrics = _read_metrics(directory / 'metrics.csv')
  distances = _checked_distances(distances)
  images = {
    'epsilon_over_rounds.png': _png(_plot_epsilons(metrics)),
    'accuracy_over_epsilon.png': _png(_plot_accuracy(metrics)),
    'distances.png': _png(
      _plot_distances(distances, privacy.worst_case_distance)
    ),
  }
  for name, image in images.items():
    _replace(directory / name, image)
  page = _page(
    title,
    *(_summary(metrics, part) for part in reports),
    _notes(notes, metrics, reports),
    *(_privacy_section(part) for part in reports),
    _plots_section(list(images.values()), metrics, distances, privacy),
    _element('h2', 'Privacy statement'),
    _element('pre', statement),
    _settings_section(settings),
    _metrics_section(metrics),
  )
  path = directory / 'report.html'
  _replace(path, page.encode())
  return path


# Files.


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


def _read_metrics(path: pathlib.Path) -> list[_MetricsRow]:
  """Returns the rows of `metrics.csv`; None stands for a blank."""
  with path.open(newline='', encoding='utf-8') as file:
    return [
      {name: _number(row.get(name), name, line) for name in _COLUMNS}
      for line, row in enumerate(csv.DictReader(file), start=2)
    ]


def _number(text: Optional[str], name: str, line: int) -> Optional[float]:
  """Returns the number that a field of `metrics.csv` holds, if any."""
  if text is None or not text.strip():
    return None
  try:
    return float(text)
  except ValueError:
    raise ValueError(
      f'{name} in line {line} of metrics.csv must be a number or blank. '
      f'Found {text!r}.'
    ) from None


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


# Metrics.


def _series(metrics: Iterable[_MetricsRow], name: str) -> np.ndarray:
  """Returns a column of the metrics; blanks are NaN."""
  values = [row[name] for row in metrics]
  return np.array([np.nan if value is None else value for value in values])


def _evaluated(metrics: Iterable[_MetricsRow]) -> list[_MetricsRow]:
  return [row for row in metrics if row['accuracy'] is not None]


def _spaced(metrics: Sequence[_MetricsRow]) -> list[_MetricsRow]:
  """Returns few enough rows: every 2nd, 5th, 10th, ... round, and the last.

  Round strides, as evaluations tend to fall on round numbers, too.
  """
  for stride in _STRIDES:
    rows = [row for row in metrics[:-1] if (row['round'] or 0) % stride == 0]
    if len(rows) < _MOST_ROWS:
      return [*rows, *metrics[-1:]]
  return list(metrics[-_MOST_ROWS:])


def _format(value: Optional[float], specification: str) -> str:
  return _MISSING if value is None else format(value, specification)


# Plots.


def _new_figure(width: float, height: float) -> _Figure:
  """Returns a figure with the Agg canvas, outside of pyplot's global state."""
  figure_lib = importlib.import_module('matplotlib.figure')
  backend_agg = importlib.import_module('matplotlib.backends.backend_agg')
  figure = figure_lib.Figure(figsize=(width, height), layout='constrained')
  figure.set_facecolor('white')
  backend_agg.FigureCanvasAgg(figure)
  return figure


def _png(figure: _Figure) -> bytes:
  buffer = io.BytesIO()
  figure.savefig(buffer, format='png', dpi=_DOTS_PER_INCH, facecolor='auto')
  return buffer.getvalue()


def _placeholder(width: float, message: str) -> _Figure:
  """Returns a figure that says why there is nothing to see."""
  figure = _new_figure(width, 1.4)
  figure.set_facecolor('#f5f7f9')
  figure.text(0.5, 0.5, message, ha='center', va='center', color=_INK)
  return figure


def _plot_epsilons(metrics: Sequence[_MetricsRow]) -> _Figure:
  """Plots ε over the rounds."""
  if not metrics:
    return _placeholder(4.6, 'No rounds were recorded.')
  figure = _new_figure(4.6, 3.5)
  axes = figure.add_subplot()
  rounds = _series(metrics, 'round')
  for name, style in _CURVES.items():
    _draw_curve(axes, rounds, _series(metrics, name), style)
  _scale_epsilon(axes.set_yscale, axes.yaxis, metrics)
  axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
  _finish(axes, 'Round', 'Epsilon')
  return figure


def _plot_accuracy(metrics: Sequence[_MetricsRow]) -> _Figure:
  """Plots the accuracy of the evaluated rounds over the ε spent by then."""
  metrics = _evaluated(metrics)
  if not metrics:
    return _placeholder(4.6, 'No round was evaluated.')
  figure = _new_figure(4.6, 3.5)
  axes = figure.add_subplot()
  for name, style in _CURVES.items():
    epsilons = _series(metrics, name)
    _draw_curve(axes, epsilons, _series(metrics, 'accuracy'), style)
  _scale_epsilon(axes.set_xscale, axes.xaxis, metrics)
  axes.yaxis.set_major_formatter(_percent)
  _finish(axes, 'Epsilon', 'Accuracy')
  return figure


def _draw_curve(
  axes: _Axes, x: np.ndarray, y: np.ndarray, style: _Style
) -> None:
  """Draws a curve, dashed across what is infinite or missing."""
  finite = np.isfinite(x) & np.isfinite(y)
  marked = np.flatnonzero(finite)[::-1]
  marked = marked[:: math.ceil(marked.size / _MARKS) or 1]
  axes.plot(
    x[finite], y[finite], linestyle='--', linewidth=1.0, color=style.color
  )
  axes.plot(
    np.where(finite, x, np.nan),
    np.where(finite, y, np.nan),
    color=style.color,
    linewidth=1.8,
    marker=style.marker,
    markersize=5.5,
    markerfacecolor=style.fill,
    markeredgewidth=1.4,
    markevery=marked.tolist(),
    label=style.label if marked.size else f'{style.label}: nothing finite',
  )


def _scale_epsilon(
  set_scale: Callable[..., None], axis: Any, metrics: Sequence[_MetricsRow]
) -> None:
  """Makes the axis of ε logarithmic if the range is large."""
  values = np.concatenate([_series(metrics, name) for name in _CURVES])
  values = values[np.isfinite(values) & (values > 0)]
  ratio = np.max(values) / np.min(values) if values.size else 1.0
  if ratio > _LARGE_RANGE:
    set_scale('log', subs=(2, 5))
    axis.set_major_formatter('{x:g}')
    axis.set_minor_formatter('{x:g}' if ratio < 1e3 else '')


def _plot_distances(distances: np.ndarray, worst_case: float) -> _Figure:
  """Plots how the distances are distributed, over all and by round."""
  if not distances.size:
    return _placeholder(9.6, 'No distances were recorded.')
  figure = _new_figure(9.6, 3.5)
  figure.get_layout_engine().set(w_pad=0.12)
  left, right = figure.subplots(1, 2)
  _draw_histogram(left, distances, worst_case)
  _draw_quantiles(right, distances)
  return figure


def _draw_histogram(
  axes: _Axes, distances: np.ndarray, worst_case: float
) -> None:
  """Draws the histogram over all rounds and units."""
  values = np.ravel(distances)
  largest = max(float(np.max(values)), 1e-9)
  # The shape of the histogram matters more than the way to the worst case.
  is_near = worst_case <= 3 * largest
  top = max(largest, worst_case) if is_near else largest
  axes.hist(
    values,
    bins=np.linspace(0.0, top, 41).tolist(),
    weights=np.full(values.size, 1 / values.size),
    color='#8fb4cf',
    edgecolor='white',
    linewidth=0.6,
  )
  median = float(np.median(values))
  axes.axvline(median, color='#0072b2', label=f'median {median:.3g}')
  label = f'clipping allows {worst_case:g}'
  if is_near:
    axes.axvline(worst_case, color=_INK, linestyle='--', label=label)
  else:
    axes.plot([], [], ' ', label=f'{label} (off the chart)')
  axes.yaxis.set_major_formatter(_percent)
  _finish(axes, 'Distance in units of the clip norm', 'Share of the distances')


def _draw_quantiles(axes: _Axes, distances: np.ndarray) -> None:
  """Draws the median, the 90% quantile and the largest of every round."""
  rounds = np.arange(1, len(distances) + 1)
  median, most = np.quantile(distances, (0.5, 0.9), axis=1)
  largest = np.max(distances, axis=1)
  marker = '.' if len(rounds) < 2 * _MARKS else ''
  axes.fill_between(rounds, most, largest, color='#dfe9f1', linewidth=0)
  axes.fill_between(rounds, median, most, color='#b5cfe2', linewidth=0)
  for values, line, label in (
    (largest, ':', 'largest'),
    (most, '--', '90% are below'),
    (median, '-', 'median'),
  ):
    axes.plot(rounds, values, line, color='#0b5788', marker=marker, label=label)
  axes.set_ylim(0.0, 1.05 * max(float(np.max(largest)), 1e-9))
  axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
  _finish(axes, 'Round', 'Distance in units of the clip norm')


def _percent(tick: float, position: int) -> str:
  del position  # Matplotlib passes it to every formatter.
  return f'{100 * tick:.4g}%'


def _finish(axes: _Axes, x_label: str, y_label: str) -> None:
  """Labels the axes and takes away what says nothing."""
  axes.set_xlabel(x_label, color=_INK)
  axes.set_ylabel(y_label, color=_INK)
  axes.tick_params(which='both', colors=_INK, labelsize=9.5)
  axes.grid(color='#e4e8ec', linewidth=0.8)
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)
  axes.spines[['left', 'bottom']].set_color('#9aa5b1')
  axes.legend(  # Above the plot, where it hides nothing.
    loc='lower left',
    bbox_to_anchor=(0.0, 1.0),
    ncols=3,
    fontsize=9.5,
    labelcolor=_INK,
    frameon=False,
    columnspacing=1.5,
  )


# The page.


class _Markup(str):
  """Text that is HTML already."""

  __slots__ = ()


def _element(tag: str, *content: str, **attributes: str) -> _Markup:
  """Returns an element; all content but markup is escaped.

  >>> _element('p', 'a < b', _element('b', '!'), class_='hint')
  '<p class="hint">a &lt; b<b>!</b></p>'
  """
  names = ''.join(
    f' {name.rstrip("_")}="{html.escape(value)}"'
    for name, value in attributes.items()
  )
  inner = ''.join(
    part if isinstance(part, _Markup) else html.escape(part) for part in content
  )
  return _Markup(f'<{tag}{names}>{inner}</{tag}>')


def _void_element(tag: str, **attributes: str) -> _Markup:
  """Returns an element that has no content and no end tag."""
  return _Markup(_element(tag, **attributes).removesuffix(f'</{tag}>'))


def _join(parts: Iterable[str]) -> _Markup:
  return _Markup('\n'.join(parts))


def _table(
  headings: Sequence[str],
  rows: Iterable[Sequence[str]],
  numeric: Sequence[int] = (),
  class_: str = '',
) -> _Markup:
  """Returns a table whose first column names its rows."""

  def cells(tag: str, row: Sequence[str]) -> list[_Markup]:
    return [
      _element(
        'th' if index == 0 else tag,
        cell,
        **({'class_': 'number'} if index in numeric else {}),
        **({'scope': 'row'} if index == 0 and tag == 'td' else {}),
      )
      for index, cell in enumerate(row)
    ]

  return _element(
    'table',
    _element('thead', _element('tr', *cells('th', headings))),
    _element('tbody', _join(_element('tr', *cells('td', row)) for row in rows)),
    **({'class_': class_} if class_ else {}),
  )


def _page(title: str, *sections: _Markup) -> str:
  """Returns the whole page."""
  head = (
    _void_element('meta', charset='utf-8'),
    _void_element(
      'meta', name='viewport', content='width=device-width, initial-scale=1'
    ),
    # Or a browser asks the server for one.
    _void_element('link', rel='icon', href='data:,'),
    _element('title', title),
    _element('style', _Markup(_CSS)),
  )
  main = _element('main', _join([_element('h1', title), *sections]))
  body = _element('body', main)
  page = _element(
    'html', _join([_element('head', _join(head)), body]), lang='en'
  )
  return f'<!DOCTYPE html>\n{page}\n'


def _summary(
  metrics: Sequence[_MetricsRow],
  privacy: privacy_report.PrivacyReport,
) -> _Markup:
  """Returns the figures to see first."""
  evaluated = _evaluated(metrics)
  accuracy, when = _MISSING, 'no round was evaluated'
  if evaluated:
    accuracy = _format(evaluated[-1]['accuracy'], '.2%')
    when = f'after round {_format(evaluated[-1]["round"], ".0f")}'
  delta = f'at delta = {privacy.delta:g}'
  dp_row = _headline(privacy, _HEADLINE_DP)
  bdp_row = _headline(privacy, _HEADLINE_BDP)
  figures = [
    ('Final accuracy', accuracy, when),
    (
      'Rounds',
      str(privacy.rounds),
      f'noise multiplier {privacy.noise_multiplier:g}, participation '
      f'probability {privacy.participation_probability:g}',
    ),
    ('DP epsilon', *_described(dp_row, delta), f'for any {privacy.unit}'),
    (
      'BDP epsilon',
      *_described(bdp_row, delta),
      f'for {privacy.one_unit} drawn from the same population',
    ),
  ]
  return _element(
    'dl', _join(_figure_entry(*entry) for entry in figures), class_='figures'
  )


def _figure_entry(name: str, value: str, *remarks: str) -> _Markup:
  return _element(
    'div',
    _element('dt', name),
    _element('dd', value, class_='value'),
    *(_element('dd', remark) for remark in remarks),
  )


def _headline(
  privacy: privacy_report.PrivacyReport, methods: Sequence[str]
) -> Optional[comparison.Row]:
  """Returns the row of the first of the methods that has a figure."""
  rows = {row.method: row for row in privacy.rows if row.epsilon is not None}
  return next((rows[method] for method in methods if method in rows), None)


def _described(row: Optional[comparison.Row], delta: str) -> tuple[str, str]:
  """Returns the figure and how it came about."""
  if row is None:
    return _MISSING, 'no method applies'
  method = row.method.partition(', ')[2]
  return _format(row.epsilon, '.3f'), f'{method}, {delta}'


def _notes(
  notes: Sequence[str],
  metrics: Sequence[_MetricsRow],
  reports: Sequence[privacy_report.PrivacyReport],
) -> _Markup:
  """Returns the box of caveats: the caller's, and what the figures tell."""
  notes = list(notes)
  privacy = reports[0]
  findings = [finding for part in reports for finding in part.findings]
  if applicability.worst_verdict(findings) != 'ok':
    notes.append(
      'Not all assumptions of BDP fit the data (see below): rely on the DP '
      'figures.'
    )
  if len(metrics) != privacy.rounds:
    notes.append(
      f'The privacy figures account for {privacy.rounds} rounds, but '
      f'metrics.csv has {len(metrics)}.'
    )
  notes.append(
    'The BDP figures and the distances were computed from private data: '
    'publishing this page is a release of its own.'
  )
  return _element(
    'div',
    _element('strong', 'Before you use these figures'),
    _element('ul', _join(_element('li', note) for note in notes)),
    class_='notes',
  )


def _privacy_section(
  privacy: privacy_report.PrivacyReport,
) -> _Markup:
  """Returns the table of all methods, and whether BDP applies."""
  rows = [
    (
      row.method,
      _format(row.epsilon, '.3f'),
      f'{row.delta:g}',
      _format(row.order, 'd'),
      _attacker(row),
      row.assumption,
    )
    for row in privacy.rows
  ]
  headings = ('Method', 'Epsilon', 'Delta', 'Order', 'Attacker', 'Assumes')
  return _join(
    [
      _element('h2', f'Differential and Bayesian privacy of {privacy.unit}s'),
      _table(headings, rows, numeric=(1, 2, 3, 4)),
      _element(
        'p',
        'Attacker: the most often that someone who guesses the presence of '
        f'{privacy.one_unit} from even odds can be right, '
        '1 / (1 + exp(-epsilon)).',
        class_='hint',
      ),
      _element('h2', 'Do the data fit the assumptions of BDP?'),
      _table(
        ('Check', 'Verdict', 'Meaning', 'Figures'),
        [_finding_cells(finding) for finding in privacy.findings],
      ),
    ]
  )


def _attacker(row: comparison.Row) -> str:
  if row.epsilon is None:
    return _MISSING
  return f'{accounting.attack_success_bound(row.epsilon):.4f}'


def _finding_cells(finding: applicability.Finding) -> tuple[str, ...]:
  """Returns the row of one check; the verdict has a sign and a colour."""
  verdict = _element(
    'span',
    f'{_VERDICT_MARKS[finding.verdict]} {finding.verdict}',
    class_=f'verdict {finding.verdict.replace(" ", "-")}',
  )
  figures = ', '.join(
    f'{name.replace("_", " ")} {value:.3g}'
    for name, value in finding.figures.items()
  )
  return finding.check, verdict, finding.meaning, figures


def _plots_section(
  images: Sequence[bytes],
  metrics: Sequence[_MetricsRow],
  distances: np.ndarray,
  privacy: privacy_report.PrivacyReport,
) -> _Markup:
  """Returns the three plots."""
  unit = privacy.unit
  rounds, units = distances.shape
  sample = f': {units} {unit}s in {rounds} rounds' if distances.size else ''
  captions = (
    'Figure 1. The epsilon spent by each round, as the run recorded it, at '
    f'delta = {privacy.delta:g}. Dashed across rounds without a finite figure.',
    'Figure 2. The accuracy of the evaluated rounds over the epsilon spent by '
    'then. Further left is more private, higher is more accurate.',
    f'Figure 3. How far one {unit} moves what is released{sample}. Left, all '
    'distances; right, their quantiles by round. '
    'BDP gains where most of them are far below what clipping allows.',
  )
  alternatives = (
    f'Plot of epsilon over the rounds. {_ends(metrics)}',
    f'Plot of accuracy over epsilon. {_ends(_evaluated(metrics))}',
    f'Histogram and quantiles of the distances. {_spread(distances)}',
  )
  figures = [
    _plot(image, caption, alternative, 'wide' if index == 2 else 'half')
    for index, (image, caption, alternative) in enumerate(
      zip(images, captions, alternatives)
    )
  ]
  return _join(
    [
      _element('h2', 'Course of the run'),
      _element('div', _join(figures), class_='plots'),
    ]
  )


def _ends(metrics: Sequence[_MetricsRow]) -> str:
  """Says where the curves end, for those who do not see them."""
  if not metrics:
    return 'There are no rounds to show.'
  texts = []
  for column in ('round', 'accuracy', *_CURVES):
    heading, specification = _COLUMNS[column]
    value = _format(metrics[-1][column], specification)
    texts.append(
      f'{heading.lower() if column not in _CURVES else heading} {value}'
    )
  return f'It ends at {", ".join(texts)}.'


def _spread(distances: np.ndarray) -> str:
  if not distances.size:
    return 'There are no distances to show.'
  median, most = np.quantile(distances, (0.5, 0.9))
  return (
    f'Median {median:.3g}, 90% below {most:.3g}, largest '
    f'{np.max(distances):.3g}, in units of the clip norm.'
  )


def _plot(image: bytes, caption: str, alternative: str, class_: str) -> _Markup:
  """Returns a plot as part of the page itself."""
  source = f'data:image/png;base64,{base64.b64encode(image).decode("ascii")}'
  return _element(
    'figure',
    _void_element('img', src=source, alt=alternative),
    _element('figcaption', caption),
    class_=class_,
  )


def _settings_section(settings: Mapping[str, Any]) -> _Markup:
  rows = [(str(name), str(value)) for name, value in settings.items()]
  return _join(
    [
      _element('h2', 'Settings'),
      _table(('Setting', 'Value'), rows, class_='settings'),
    ]
  )


def _metrics_section(metrics: Sequence[_MetricsRow]) -> _Markup:
  """Returns some rows of the metrics."""
  rows = _spaced(metrics)
  headings = [column.heading for column in _COLUMNS.values()]
  cells = [
    [_format(row[name], column.format) for name, column in _COLUMNS.items()]
    for row in rows
  ]
  return _join(
    [
      _element('h2', 'Metrics'),
      _element(
        'p',
        f'{len(rows)} of {len(metrics)} rounds; all are in metrics.csv.',
        class_='hint',
      ),
      _table(headings, cells, range(len(headings)), 'metrics'),
    ]
  )
