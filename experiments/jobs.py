"""The runs behind the paper's tables and figures, each done once and kept.

A run is known by its settings: where they change it is another run, and what
two tables share is trained once.
"""

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import tomllib

from experiments import epsilon_curves, run
from tf_bdp.training import plan as plan_lib

HYPERPARAMETERS = pathlib.Path(__file__).parent / 'hyperparameters'
# A summary without examples has a name of its own.
_SUMMARY_FILES = {True: 'summary.json', False: 'summary_of_clients.json'}


class Places(NamedTuple):
  """Where data are, and where runs are kept."""

  mnist_dir: Optional[str]
  aptos_dir: Optional[str]
  resnet50_weights: str
  cache_dir: str
  work_dir: pathlib.Path


class Summary(NamedTuple):
  """What tables and figures need of a run.

  Attributes:
    settings: Of the run.
    at: The evaluated rounds.
    accuracies: After each of them.
    curves: ε after each of them, by unit and method; the unit is 'client', or
      'example' and how its costs were counted.
    distances: By which a unit moves the release, in the quadratic mean over
      units and rounds, as a share of the worst case of differential privacy;
      by unit as above.
    model_size: The number of weights.
  """

  settings: dict[str, Any]
  at: list[int]
  accuracies: list[float]
  curves: dict[str, dict[str, list[float]]]
  distances: dict[str, float]
  model_size: int

  def accuracy_by_round(self) -> dict[int, float]:
    """Returns the accuracies by round."""
    return dict(zip(self.at, self.accuracies))


def load_settings(name: str, *path: str) -> dict[str, Any]:
  """Returns the settings of a run, from general ones to its own.

  Args:
    name: The file in `hyperparameters`, without .toml.
    *path: The tables to go down to, such as 'clients', '100', 'private'. Values
      of outer tables hold for inner ones.
  """
  values: dict[str, Any] = {}
  for table in _tables(name, path):
    values |= {k: v for k, v in table.items() if not isinstance(v, dict)}
  return values


def load_tried(name: str, *path: str) -> list[tuple[str, Any]]:
  """Returns settings and values that were tried in place of those of a run.

  Args:
    name: As of `load_settings`.
    *path: As of `load_settings`.
  """
  *_, table = _tables(name, (*path, 'tried'))
  return [(key, value) for key, values in table.items() for value in values]


def _tables(name: str, path: Sequence[str]) -> Iterator[dict[str, Any]]:
  """Yields the tables of a file, from the outermost one inwards."""
  with open(HYPERPARAMETERS / f'{name}.toml', 'rb') as file:
    table: dict[str, Any] = tomllib.load(file)
  yield table
  for key in path:
    table = table.get(key, {})
    yield table


def make(
  values: Mapping[str, Any], seed: int, places: Places, tiny: bool = False
) -> run.Settings:
  """Returns the settings of a run.

  Args:
    values: As `load_settings` gives them.
    seed: Of data, sampling, initial weights and noise.
    places: Where data are.
    tiny: Whether only to see that everything works.
  """
  values = {
    **values,
    **{'seed': seed, 'sampling_seed': seed, 'noise_seed': seed},
  }
  if tiny:
    values |= {
      'rounds': 4,
      'evaluate_every': 2,
      'clients': min(values['clients'], 12),
      'examples_per_client': 20,
      'panel_size': min(values.get('panel_size', 12), 12),
      'participation_probability': 0.7,
    }
    if places.mnist_dir is None and values['dataset'] == 'mnist':
      values['dataset'] = 'digits'
  is_aptos = values['dataset'] == 'aptos'
  return run.Settings.of(
    **values,
    data_dir=places.aptos_dir if is_aptos else places.mnist_dir,
    resnet50_weights=places.resnet50_weights,
    cache_dir=places.cache_dir,
  )


def digest(settings: run.Settings) -> str:
  """Returns by what a run is known."""
  known = settings.determining()
  # Earlier releases had no such settings: with these values a run is the one
  # that it was there.
  for name, value in {
    'sampling_seed': known['seed'],
    'held_out_clients': 0,
    'least_participants': None,
    'filter': None,
    'model': 'cnn',
    'features': 'orientations',
    'feature_grid': 4,
    'feature_orientations': 8,
  }.items():
    if known[name] == value:
      del known[name]
  text = json.dumps(known, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def summary_of(
  settings: run.Settings, places: Places, name: str, examples: bool = True
) -> Summary:
  """Trains, resumes or recalls a run.

  Args:
    settings: Of the run.
    places: Where it is kept.
    name: Part of its folder's name, for people.
    examples: Whether to account for examples, which takes long.
  """
  known = sorted(places.work_dir.glob(f'*-{digest(settings)}'))
  new = places.work_dir / f'{name}-{digest(settings)}'
  directory = known[0] if known else new
  path = directory / _SUMMARY_FILES[examples]
  if not path.exists():
    print(f'Training {directory.name} ({settings.schedule.rounds} rounds)')
    outcome = run.run(settings, directory, resume=True)
    summary = _summarise(settings.determining(), outcome, examples)
    temporary = path.with_suffix('.part')
    temporary.write_text(json.dumps(summary._asdict()), encoding='utf-8')
    temporary.replace(path)
  return Summary(**json.loads(path.read_text(encoding='utf-8')))


def _summarise(
  settings: dict[str, Any], outcome: run.Outcome, examples: bool
) -> Summary:
  """Accounts for a run in every way."""
  plan, progress, model_size = outcome
  rows = [r for r in progress.rows if r['accuracy'] != '']
  at = [row['round'] for row in rows]
  curves, distances = {}, {}
  ways = plan.mechanism.counted_otherwise()
  for name, mechanism in (
    ways.items() if plan.mechanism.noise_multiplier else ()
  ):
    unit = name.partition('_')[0]
    if unit != 'client' and not examples:
      continue
    counted = dataclasses.replace(plan, mechanism=mechanism)
    events = [mechanism.events(m)[unit] for m in progress.measurements]
    curves[name] = _curves(unit, counted, events, at)
    distances[name] = _mean_distance(events)
  accuracies = [float(row['accuracy']) for row in rows]
  return Summary(settings, at, accuracies, curves, distances, model_size)


def _mean_distance(rounds: Sequence[Any]) -> float:
  """Returns the quadratic mean of r over that of the worst case."""
  shares = [
    np.mean(group.squared_distances) / group.worst_case_squared_distance
    for event in rounds
    for group in getattr(event, 'groups', ())
  ]
  return float(np.sqrt(np.mean(shares))) if shares else math.nan


def _curves(
  unit: str,
  plan: plan_lib.Plan,
  events: Sequence[Any],
  at: list[int],
) -> dict[str, list[float]]:
  mechanism = plan.mechanism
  curves = epsilon_curves.compute(
    events,
    at,
    plan.delta_of(unit),
    mechanism.cost_count(unit, plan.schedule.rounds, plan.client_count),
    mechanism.paper_dp_event(),
    plan.is_panel(unit),
    plan.measures_everybody(unit),
  )
  # JSON has no infinity.
  return {
    method: [value if math.isfinite(value) else 1e9 for value in curve]
    for method, curve in curves.items()
  }
