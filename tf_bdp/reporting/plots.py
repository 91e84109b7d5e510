"""The three plots of a run: epsilon, accuracy and distances."""

import base64
import importlib
import io
import math
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from tf_bdp.reporting import metrics_file

# Matplotlib is imported when there is something to draw: it is an extra, and
# slow. Mypy is not led to it, as it is in newer Python than we support.
_Figure = Any
_Axes = Any

_INK = '#2b3440'
_LARGE_RANGE = 30.0  # Beyond this ratio an axis is logarithmic.
_HALF_PAGE, _WHOLE_PAGE = 4.6, 9.6  # Widths in inches.
_DOTS_PER_INCH = 180
_MARKS = 20


class _Style(NamedTuple):
  """How a curve looks: it differs in more than its colour."""

  label: str
  color: str
  marker: str
  fill: str


# By claim; colours of Okabe and Ito (2008), "Color universal design".
_CURVES = {
  'dp': _Style('dp', '#0072b2', 'o', '#0072b2'),
  'filter': _Style('filter', '#000000', 'v', '#000000'),
  'each': _Style('each', '#009e73', '^', '#009e73'),
  'census': _Style('census', '#c44e00', 's', 'white'),
  'sample': _Style('sample', '#8c4b82', 'D', 'white'),
  'paper': _Style('paper', '#7f7f7f', 'x', '#7f7f7f'),
}


class Plot(NamedTuple):
  """A picture, and what it shows in words, for those who do not see it."""

  png: bytes
  alternative: str

  @property
  def data_uri(self) -> str:
    """The picture as an address that holds it."""
    return f'data:image/png;base64,{base64.b64encode(self.png).decode("ascii")}'


def epsilon_over_rounds(
  rows: Sequence[metrics_file.Row], claims: Sequence[str]
) -> Plot:
  """Plots the ε that was spent by each evaluated round.

  Args:
    rows: The metrics of all rounds.
    claims: The names of the claims to draw.
  """
  rows = metrics_file.evaluated(rows)
  end = _end_of_curves(rows, claims)
  alternative = f'Plot of epsilon over the rounds. {end}'
  if not rows:
    return _placeholder(_HALF_PAGE, 'No round was evaluated.', alternative)
  figure = _new_figure(_HALF_PAGE)
  axes = figure.add_subplot()
  rounds = metrics_file.series(rows, 'round')
  for claim in claims:
    _draw_curve(axes, rounds, _epsilons(rows, claim), _CURVES[claim])
  _scale_epsilon(axes.set_yscale, axes.yaxis, rows, claims)
  _count_rounds(axes)
  _finish(axes, 'Round', 'Epsilon')
  return Plot(_png(figure), alternative)


def accuracy_over_epsilon(
  rows: Sequence[metrics_file.Row], claims: Sequence[str]
) -> Plot:
  """Plots the accuracy of the evaluated rounds over the ε spent by then.

  Args:
    rows: The metrics of all rounds.
    claims: The names of the claims to draw.
  """
  rows = metrics_file.evaluated(rows)
  end = _end_of_curves(rows, claims)
  alternative = f'Plot of accuracy over epsilon. {end}'
  if not rows:
    return _placeholder(_HALF_PAGE, 'No round was evaluated.', alternative)
  figure = _new_figure(_HALF_PAGE)
  axes = figure.add_subplot()
  accuracies = metrics_file.series(rows, 'accuracy')
  for claim in claims:
    _draw_curve(axes, _epsilons(rows, claim), accuracies, _CURVES[claim])
  _scale_epsilon(axes.set_xscale, axes.xaxis, rows, claims)
  axes.yaxis.set_major_formatter(_percent)
  _finish(axes, 'Epsilon', 'Accuracy')
  return Plot(_png(figure), alternative)


def spread_of_distances(distances: np.ndarray, worst_case: float) -> Plot:
  """Plots how the distances are distributed, over all and by round.

  Args:
    distances: In units of the clip norm, [rounds, units]; may be empty.
    worst_case: The largest distance that clipping allows.
  """
  alternative = 'Histogram and quantiles of the distances. '
  if not distances.size:
    alternative += 'There are no distances to show.'
    return _placeholder(_WHOLE_PAGE, 'No distances were recorded.', alternative)
  median, most = np.quantile(distances, (0.5, 0.9))
  alternative += (
    f'Median {median:.3g}, 90% below {most:.3g}, largest '
    f'{np.max(distances):.3g}, in units of the clip norm.'
  )
  figure = _new_figure(_WHOLE_PAGE)
  figure.get_layout_engine().set(w_pad=0.12)
  left, right = figure.subplots(1, 2)
  _draw_histogram(left, distances, worst_case)
  _draw_quantiles(right, distances)
  return Plot(_png(figure), alternative)


def _epsilons(rows: Sequence[metrics_file.Row], claim: str) -> np.ndarray:
  return metrics_file.series(rows, metrics_file.epsilon_column(claim))


def _end_of_curves(
  rows: Sequence[metrics_file.Row], claims: Sequence[str]
) -> str:
  """Says where the curves end."""
  if not rows:
    return 'There are no rounds to show.'
  figures = [
    f'accuracy {metrics_file.text(rows[-1], "accuracy")}',
    *(
      f'{claim} epsilon '
      + metrics_file.text(rows[-1], metrics_file.epsilon_column(claim))
      for claim in claims
    ),
  ]
  number = metrics_file.text(rows[-1], 'round')
  return f'It ends at round {number}, {", ".join(figures)}.'


def _new_figure(width: float, height: float = 3.5) -> _Figure:
  """Returns a figure with the Agg canvas, outside of pyplot's global state."""
  figure_lib = importlib.import_module('matplotlib.figure')
  backend_agg = importlib.import_module('matplotlib.backends.backend_agg')
  figure = figure_lib.Figure(figsize=(width, height), layout='constrained')
  figure.set_facecolor('white')
  backend_agg.FigureCanvasAgg(figure)
  return figure


def _placeholder(width: float, message: str, alternative: str) -> Plot:
  """Returns a plot that says why there is nothing to see."""
  figure = _new_figure(width, 1.4)
  figure.set_facecolor('#f5f7f9')
  figure.text(0.5, 0.5, message, ha='center', va='center', color=_INK)
  return Plot(_png(figure), alternative)


def _png(figure: _Figure) -> bytes:
  buffer = io.BytesIO()
  figure.savefig(buffer, format='png', dpi=_DOTS_PER_INCH, facecolor='auto')
  return buffer.getvalue()


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
  set_scale: Callable[..., None],
  axis: Any,
  rows: Sequence[metrics_file.Row],
  claims: Sequence[str],
) -> None:
  """Makes the axis of ε logarithmic if the range is large."""
  values = np.concatenate([_epsilons(rows, claim) for claim in claims])
  values = values[np.isfinite(values) & (values > 0)]
  ratio = np.max(values) / np.min(values) if values.size else 1.0
  if ratio > _LARGE_RANGE:
    set_scale('log', subs=(2, 5))
    axis.set_major_formatter('{x:g}')
    axis.set_minor_formatter('{x:g}' if ratio < 1e3 else '')


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
  _count_rounds(axes)
  _finish(axes, 'Round', 'Distance in units of the clip norm')


def _count_rounds(axes: _Axes) -> None:
  """Puts ticks at whole rounds only."""
  axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


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
