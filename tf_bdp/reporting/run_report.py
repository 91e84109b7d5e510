"""The report of a training run: statement, files, page, and a summary."""

import csv
import dataclasses
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from tf_bdp.accounting import (
  accountant,
  claims,
  events,
  ledger,
  privacy_report,
  recorded_distances,
  replace_one,
)
from tf_bdp.reporting import notes as notes_lib
from tf_bdp.reporting import page
from tf_bdp.training import known_draws
from tf_bdp.training import plan as plan_lib
from tf_bdp.training import progress as progress_lib

DISTANCES_FILE = 'distances.npz'
HELD_OUT_DISTANCES_FILE = 'held_out_distances.npz'
LOCAL_EPSILONS_FILE = 'local_epsilons.csv'
_QUANTILES = 100


def write(
  directory: pathlib.Path,
  plan: plan_lib.Plan,
  progress: progress_lib.Progress,
  *,
  title: str = 'Private federated learning',
  settings: Optional[Mapping[str, Any]] = None,
  notes: Sequence[str] = (),
) -> str:
  """Writes the report of a run into its directory; returns what to print.

  Args:
    directory: Where the run's metrics.csv is.
    plan: The plan of the run.
    progress: The run's progress when it ended.
    title: The heading of the page.
    settings: The settings that the page lists; by default those of the plan.
    notes: Caveats besides those that follow from the plan.
  """
  mechanism = plan.mechanism
  lines = [notes_lib.outcome(progress)]
  if not mechanism.noise_multiplier:
    lines.append('Trained without noise: there is no privacy to report.')
    return '\n'.join(lines)
  if not progress.rows:
    lines.append('No round was released: there is nothing to report.')
    return '\n'.join(lines)
  privacy = {unit: privacy_of(unit, plan, progress) for unit in mechanism.units}
  distances = _distances(mechanism.units[0], plan, progress)
  if any(row.size for row in distances) and mechanism.local is None:
    _save_distances(directory, plan, progress, distances)
  local = mechanism.local
  counts_locally = local is not None and local.counts_locally
  if counts_locally and not plan.secure_aggregation:
    _write_local_epsilons(directory / LOCAL_EPSILONS_FILE, plan, progress)
  path = page.write(
    directory,
    title=title,
    settings=plan_lib.public_settings(
      plan.settings() if settings is None else settings
    ),
    privacy=list(privacy.values()),
    distances=_shown(distances, mechanism.units[0]),
    notes=[*notes_lib.of_run(plan, progress), *notes],
    expected_participants=mechanism.clients_per_round,
  )
  for unit, part in privacy.items():
    table = claims.format_table(part.claims, unit)
    lines.append(
      f'Privacy of {unit}s (* recommended):\n{table}\n\n'
      + textwrap.fill(claims.in_plain_words(part.claims, unit), 79)
    )
    if part.known_draws:
      table = claims.format_table(part.known_draws, unit)
      lines.append(f'Against whoever knows the seed of the draws:\n{table}')
  private = progress_lib.PRIVATE_FILE
  lines.append(f'Private files, which {private} names, stay with the server.')
  return '\n\n'.join([*lines, f'Report: {path}'])


def _save_distances(
  directory: pathlib.Path,
  plan: plan_lib.Plan,
  progress: progress_lib.Progress,
  distances: Sequence[np.ndarray],
) -> None:
  """Saves distances of clients; those of held-out ones in a file of their own.

  The larger figure of the two counts.
  """
  held_out = plan.accounting.held_out_clients
  files = {DISTANCES_FILE: [row[: row.size - held_out] for row in distances]}
  if held_out:
    files[HELD_OUT_DISTANCES_FILE] = [row[-held_out:] for row in distances]
  for name, rows in files.items():
    recorded_distances.save(
      directory / name,
      rows,
      plan.is_panel('client'),
      _worst_distances('client', plan, progress),
      population=plan.measures_everybody('client'),
      worst_case_mixture=_mixture('client', plan, progress),
    )


def privacy_of(
  unit: str, plan: plan_lib.Plan, progress: progress_lib.Progress
) -> privacy_report.PrivacyReport:
  """Accounts for all rounds at the level of one unit.

  What can be claimed is told by the run's own accountant, as it was in the
  course of the run. Other ways to account are added as details.
  """
  rounds = progress.events_of(unit)
  description = plan.mechanism.description(unit)
  probability = description.participation_probability
  if probability is None:
    parts = [entry for event in rounds for _, entry in ledger.rounds_of(event)]
    found = (entry.participation_probability for entry in parts)
    probability = max(found, default=0.0)
  report = privacy_report.PrivacyReport.from_events(
    rounds,
    noise_multiplier=description.noise_multiplier,
    participation_probability=probability,
    delta=plan.delta_of(unit),
    worst_case_distance=_worst_distance(unit, plan, progress),
    mechanism=description.release,
    unit=unit,
    sampling=plan.sampling,
    neighboring_relation=plan.mechanism.relation(unit),
    reported_to=progress.accountants[unit] if plan.secure_aggregation else None,
    population=plan.measures_everybody(unit),
    asked_for=plan.claim_of(unit),
    filter_epsilon=plan.accounting.filter,
  )
  own = plan.report(unit, progress.accountants[unit])
  epsilons = {
    row.claim.name: row.epsilon for row in (*report.claims, *own)
  }  # Where both have a figure, the run's own.
  known = []
  if plan.seeds.sampling_seed is not None and plan.sampling == 'poisson':
    known = known_draws.report(unit, plan, progress)
  return dataclasses.replace(
    report,
    claims=claims.report(epsilons, report.delta, plan.claim_of(unit)),
    known_draws=known,
  )


def _worst_distance(
  unit: str, plan: plan_lib.Plan, progress: progress_lib.Progress
) -> float:
  """Returns how far clipping lets a unit move at most.

  Where the worst case is drawn, this is over all that could have been drawn: it
  does not tell how many took part.
  """
  mixture = _mixture(unit, plan, progress)
  if mixture is None:
    return float(np.max(_worst_distances(unit, plan, progress)))
  return float(np.max(mixture[:, 1]))


def _mixture(
  unit: str, plan: plan_lib.Plan, progress: progress_lib.Progress
) -> Optional[np.ndarray]:
  """Returns probabilities and worst cases that could have been drawn, if any.

  They are the same in every round; as rows of an array [pairs, 2].
  """
  noise = plan.mechanism.description(unit).noise_multiplier
  for event in progress.events_of(unit):
    for group in getattr(event, 'groups', ()):
      if group.worst_case_mixture is not None:
        pairs = np.array(group.worst_case_mixture)
        return np.stack([pairs[:, 0], noise * np.sqrt(pairs[:, 1])], axis=1)
  return None


def _worst_distances(
  unit: str, plan: plan_lib.Plan, progress: progress_lib.Progress
) -> np.ndarray:
  """Returns how far clipping lets a unit move, in each round."""
  worst = [
    plan.mechanism.worst_case_squared_distance(unit, part.participants)
    for part in progress.measurements
  ]
  noise = plan.mechanism.description(unit).noise_multiplier
  return noise * np.sqrt(np.array(worst, np.float64))


def _distances(
  unit: str, plan: plan_lib.Plan, progress: progress_lib.Progress
) -> list[np.ndarray]:
  """Returns the distances of the units that each round measured, if any."""
  if plan.mechanism.relation(unit) is replace_one.REPLACE_ONE:
    return []
  noise = plan.mechanism.description(unit).noise_multiplier
  rows = []
  for part in progress.events_of(unit):
    squared = [
      group.squared_distances
      for event, _ in ledger.rounds_of(part)
      if isinstance(event, (events.BayesianGaussianEvent, events.ParallelEvent))
      for group in event.groups
    ]
    rows.append(noise * np.sqrt(np.concatenate([np.zeros(0), *squared])))
  return rows


def _shown(rows: Sequence[np.ndarray], unit: str) -> Optional[np.ndarray]:
  """Returns distances to show, [rounds, units], of rounds that have some.

  Where rounds do not measure equally many, they are shown by their quantiles.
  """
  rows = [row for row in rows if row.size]
  if not rows:
    return None
  if len({row.size for row in rows}) > 1 or unit == 'example':
    grid = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    rows = [np.quantile(row, grid) for row in rows]
  return np.array(rows)


def _write_local_epsilons(
  path: pathlib.Path, plan: plan_lib.Plan, progress: progress_lib.Progress
) -> None:
  """Writes the bound that each client keeps for its own examples."""
  local = local_epsilons(plan, progress)
  names = list(dict.fromkeys(name for part in local.values() for name in part))
  with open(path, 'w', newline='', encoding='utf-8') as file:
    writer = csv.writer(file)
    writer.writerow(('client', *(f'{name}_epsilon' for name in names)))
    for client, epsilons in local.items():
      writer.writerow((client, *(epsilons[name] for name in names)))


def local_epsilons(
  plan: plan_lib.Plan, progress: progress_lib.Progress
) -> dict[int, dict[str, float]]:
  """Returns what each client's examples lost by everything that it sent.

  A client that does not trust the server keeps this bound for itself. It takes
  parallel accounting. It is by moments, which is quicker for many clients.

  Returns:
    For each client, ε by claim.
  """
  local, delta = plan.mechanism.local, plan.delta_of('example')
  assert local is not None
  accounting = plan.accounting
  if accounting.estimator in (None, *accountant.EXACT_ESTIMATORS):
    accounting = dataclasses.replace(accounting, estimator='bernstein')
  by_moments = dataclasses.replace(plan, accounting=accounting)
  accountants: dict[int, Any] = {}
  for measured in progress.measurements:
    for client, event in local.local_events(measured).items():
      if client not in accountants:
        accountants[client] = by_moments.accountant('example')
      accountants[client].compose(event)
  return {
    client: {row.claim.name: row.epsilon for row in part.report(delta)}
    for client, part in sorted(accountants.items())
  }
