"""The report of a training run: statement, files, page, and a summary."""

import csv
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from tf_bdp.accounting import (
  comparison,
  events,
  ledger,
  privacy_report,
  recorded_distances,
  replace_one,
)
from tf_bdp.reporting import notes as notes_lib
from tf_bdp.reporting import page
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
  if distances is not None and plan.panel_size and mechanism.local is None:
    worst = _worst_distances('client', plan, progress)
    trained = distances[:, : plan.panel_size]
    recorded_distances.save(directory / DISTANCES_FILE, trained, True, worst)
    if plan.accounting.held_out_clients:
      # A file of its own: the larger figure of the two counts.
      recorded_distances.save(
        directory / HELD_OUT_DISTANCES_FILE,
        distances[:, plan.panel_size :],
        True,
        worst,
      )
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
    distances=distances,
    notes=[*notes_lib.of_run(plan, progress), *notes],
  )
  for unit, part in privacy.items():
    lines.append(f'Privacy of {unit}s:\n{comparison.format_table(part.rows)}')
  return '\n\n'.join([*lines, f'Report: {path}'])


def privacy_of(
  unit: str, plan: plan_lib.Plan, progress: progress_lib.Progress
) -> privacy_report.PrivacyReport:
  """Accounts for all rounds at the level of one unit."""
  rounds = progress.events_of(unit)
  description = plan.mechanism.description(unit)
  probability = description.participation_probability
  if probability is None:
    parts = [entry for event in rounds for _, entry in ledger.rounds_of(event)]
    found = (entry.participation_probability for entry in parts)
    probability = max(found, default=0.0)
  return privacy_report.PrivacyReport.from_events(
    rounds,
    noise_multiplier=description.noise_multiplier,
    participation_probability=probability,
    delta=plan.delta_of(unit),
    worst_case_distance=float(np.max(_worst_distances(unit, plan, progress))),
    mechanism=description.release,
    unit=unit,
    sampling=plan.sampling,
    neighboring_relation=plan.mechanism.relation(unit),
    reported_to=progress.accountants[unit] if plan.secure_aggregation else None,
  )


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
) -> Optional[np.ndarray]:
  """Returns the distances of every round and unit, [rounds, units], to show.

  Where rounds do not measure equally many, they are shown by their quantiles.
  """
  if plan.mechanism.relation(unit) is replace_one.REPLACE_ONE:
    return None
  squared = [
    np.concatenate([group.squared_distances for group in event.groups])
    for part in progress.events_of(unit)
    for event, _ in ledger.rounds_of(part)
    if isinstance(event, (events.BayesianGaussianEvent, events.ParallelEvent))
  ]
  if not squared:
    return None
  if len({part.size for part in squared}) > 1 or unit == 'example':
    grid = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    squared = [np.quantile(part, grid) for part in squared]
  noise = plan.mechanism.description(unit).noise_multiplier
  return noise * np.sqrt(squared)


def _write_local_epsilons(
  path: pathlib.Path, plan: plan_lib.Plan, progress: progress_lib.Progress
) -> None:
  """Writes the bound that each client keeps for its own examples."""
  with open(path, 'w', newline='', encoding='utf-8') as file:
    writer = csv.writer(file)
    writer.writerow(('client', 'dp_epsilon', 'bdp_epsilon'))
    local = local_epsilons(plan, progress)
    writer.writerows((client, *pair) for client, pair in local.items())


def local_epsilons(
  plan: plan_lib.Plan, progress: progress_lib.Progress
) -> dict[int, tuple[float, float]]:
  """Returns what each client's examples lost by everything that it sent.

  A client that does not trust the server keeps this bound for itself. It takes
  parallel accounting.

  Returns:
    For each client, ε of DP and of BDP.
  """
  local, delta = plan.mechanism.local, plan.delta_of('example')
  assert local is not None
  accountants: dict[int, Any] = {}
  for measured in progress.measurements:
    for client, event in local.local_events(measured).items():
      if client not in accountants:
        accountants[client] = plan.accountant('example')
      accountants[client].compose(event)
  return {
    client: (a.get_worst_case_epsilon(delta), a.get_epsilon(delta))
    for client, a in sorted(accountants.items())
  }
