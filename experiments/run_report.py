"""The report of a training run: statement, files, page, and a summary."""

import csv
import pathlib
from collections.abc import Mapping
from typing import Any, Optional

import dp_accounting
import numpy as np

from experiments import run
from tf_bdp.accounting import (
  comparison,
  events,
  ledger,
  privacy_report,
  recorded_distances,
)
from tf_bdp.engines import base as engine
from tf_bdp.mechanisms import instance as instance_mechanism
from tf_bdp.reporting import page as report
from tf_bdp.training import loop as training

DISTANCES_FILE = 'distances.npz'
LOCAL_EPSILONS_FILE = 'local_epsilons.csv'
_QUANTILES = 100


def write(
  directory: pathlib.Path, settings: Mapping[str, Any], outcome: run.Outcome
) -> str:
  """Writes the report and returns what to print."""
  mechanism, config, progress, *_ = outcome
  lines = [_outcome(progress)]
  if not mechanism.noise_multiplier:
    lines.append('Trained without noise: there is no privacy to report.')
    return '\n'.join(lines)
  if not progress.rows:
    lines.append('No round was released: there is nothing to report.')
    return '\n'.join(lines)
  rounds = training.events_of(mechanism, config, progress)
  privacy = {
    unit: _privacy(unit, mechanism, config, progress, rounds[unit])
    for unit in mechanism.units
  }
  distances = _distances(mechanism.units[0], mechanism, progress, rounds)
  is_panel = config.panel_size and mechanism.units == ('client',)
  if distances is not None and is_panel:
    recorded_distances.save(
      directory / DISTANCES_FILE,
      distances,
      True,
      _worst_distances('client', mechanism, progress),
    )
  counts_locally = getattr(mechanism, 'accounting', '') == 'parallel'
  if counts_locally and not settings['secure_aggregation']:
    _write_local_epsilons(directory / LOCAL_EPSILONS_FILE, outcome)
  page = report.write(
    directory,
    title=f'Private federated learning on {settings["dataset"]}',
    settings=settings,
    privacy=list(privacy.values()),
    distances=distances,
    notes=_notes(mechanism, settings, progress),
  )
  for unit, part in privacy.items():
    lines.append(f'Privacy of {unit}s:\n{comparison.format_table(part.rows)}')
  return '\n\n'.join([*lines, f'Report: {page}'])


def _write_local_epsilons(path: pathlib.Path, outcome: run.Outcome) -> None:
  """Writes the bound that each client keeps for its own examples."""
  local = training.local_epsilons(
    outcome.mechanism, outcome.config, outcome.progress
  )
  with open(path, 'w', newline='', encoding='utf-8') as file:
    writer = csv.writer(file)
    writer.writerow(('client', 'dp_epsilon', 'bdp_epsilon'))
    writer.writerows((client, *pair) for client, pair in local.items())


def _privacy(
  unit: str,
  mechanism: engine.Mechanism,
  config: training.TrainingConfig,
  progress: training.Progress,
  rounds: list[dp_accounting.DpEvent],
) -> privacy_report.PrivacyReport:
  """Accounts for all rounds at the level of one unit."""
  reported = any(part.reported is not None for part in progress.measured)
  return privacy_report.PrivacyReport.from_events(
    rounds,
    noise_multiplier=_noise_multiplier(unit, mechanism),
    participation_probability=mechanism.participation_probability
    if unit == 'client'
    else _probability(rounds),
    delta=config.delta_of(unit, mechanism),
    worst_case_distance=float(
      np.max(_worst_distances(unit, mechanism, progress))
    ),
    mechanism=_mechanism_name(unit, mechanism),
    neighboring_relation=_neighboring_relation(unit, mechanism),
    unit=unit,
    sampling=config.sampling,
    reported_to=progress.accountants[unit] if reported else None,
  )


def _noise_multiplier(unit: str, mechanism: engine.Mechanism) -> float:
  if unit == 'client' and _level(mechanism) == 'split':
    return mechanism.server_noise_multiplier
  return mechanism.noise_multiplier


def _level(mechanism: engine.Mechanism) -> str:
  """Returns the level that a mechanism is for."""
  return getattr(mechanism, 'level', 'client')


def _mechanism_name(unit: str, mechanism: engine.Mechanism) -> str:
  if unit == 'example':
    return mechanism.clipping
  return 'joint' if _level(mechanism) == 'joint' else mechanism.kind


def _neighboring_relation(
  unit: str, mechanism: engine.Mechanism
) -> dp_accounting.NeighboringRelation:
  if unit == 'client' and _level(mechanism) == 'joint':
    return dp_accounting.NeighboringRelation.REPLACE_SPECIAL
  return dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


def _probability(rounds: list[dp_accounting.DpEvent]) -> float:
  """Returns the largest q of any unit."""
  parts = [entry for event in rounds for _, entry in ledger.rounds_of(event)]
  return max((entry.participation_probability for entry in parts), default=0.0)


def _worst_distances(
  unit: str, mechanism: engine.Mechanism, progress: training.Progress
) -> np.ndarray:
  """Returns how far clipping lets a unit move, in each round."""
  of_round = mechanism.worst_case_squared_distance
  if unit == 'client' and _level(mechanism) != 'client':
    of_round = mechanism.worst_case_client_squared_distance
  worst = [of_round(row['participants']) for row in progress.rows]
  return _noise_multiplier(unit, mechanism) * np.sqrt(worst)


def _distances(
  unit: str,
  mechanism: engine.Mechanism,
  progress: training.Progress,
  rounds: Mapping[str, list[dp_accounting.DpEvent]],
) -> Optional[np.ndarray]:
  """Returns the distances of every round and unit, [rounds, units], to show.

  Where rounds do not measure equally many, they are shown by their quantiles.
  """
  squared = [
    np.concatenate([group.squared_distances for group in event.groups])
    for part in rounds[unit]
    for event, _ in ledger.rounds_of(part)
    if isinstance(event, (events.BayesianGaussianEvent, events.ParallelEvent))
  ]
  if not squared:
    return None
  if len({part.size for part in squared}) > 1 or unit == 'example':
    grid = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    squared = [np.quantile(part, grid) for part in squared]
  return _noise_multiplier(unit, mechanism) * np.sqrt(squared)


def _outcome(progress: training.Progress) -> str:
  measured = [row for row in progress.rows if row['accuracy'] != '']
  text = f'{progress.round_number} rounds'
  if measured:
    text += f', test accuracy {measured[-1]["accuracy"]:.3f}'
  if progress.stopped:
    text += f'; stopped, because {progress.stopped}'
  if progress.dp_stop is not None:
    text += (
      f'; DP alone would have stopped after round {progress.dp_stop["round"]} '
      f'at accuracy {progress.dp_stop["accuracy"]:.3f}'
    )
  return text + '.'


def _notes(
  mechanism: engine.Mechanism,
  settings: Mapping[str, Any],
  progress: training.Progress,
) -> list[str]:
  notes = [_outcome(progress)]
  if _level(mechanism) != 'client':
    notes += _instance_notes(mechanism, settings)
  if settings['noise_seed'] is not None:
    notes.append(
      f'The noise was seeded (--noise_seed={settings["noise_seed"]}). Whoever '
      'knows the seed can take it away: this is an experiment, not protection.'
    )
  notes.append(
    'Participants were drawn with a seed. The gain by sampling holds against '
    'those who do not know it.'
  )
  if settings['engine'] == 'tff' and settings['noise_seed'] is None:
    notes.append(
      "TFF's noise comes from TensorFlow's generator, freshly seeded by the "
      'system. It is not a cryptographic source; that of the other engine is.'
    )
  used = {a.settings['estimator'] for a in progress.accountants.values()}
  notes.append(
    'The curves show what the run itself went by: integer orders, and the '
    f'estimator {" and ".join(sorted(used))}. The table adds tighter figures '
    'of DP.'
  )
  failed = sum(row['failed_clients'] for row in progress.rows)
  if failed:
    notes.append(
      f'{failed} client updates were NaN, infinite or zero and left out.'
    )
  return notes


_ACCOUNTINGS = {
  'sequential': (
    'Sequential accounting: costs of all clients are added up, with q = B / N '
    'of all examples, as if a person were drawn anew from all clients in every '
    'round. DP and BDP figures of examples are not proven for a person who '
    'stays with one client; aggregate accounting is the sound reading.'
  ),
  'parallel': (
    'Parallel accounting: every client counts its own examples with q = B / '
    'N_i, and the largest cost of any client is reported. It holds even if the '
    "server sees each client's noisy update."
  ),
  'aggregate': (
    'Aggregate accounting: the noise of all participants hides an example. It '
    'holds for the released mean only: the server, or whoever takes the mean, '
    'must be trusted or see nothing but sums, and clients that collude can '
    'take their own noise away.'
  ),
}


def _instance_notes(
  mechanism: instance_mechanism.InstanceMechanism, settings: Mapping[str, Any]
) -> list[str]:
  """Says what figures of examples rest on, and what the server saw."""
  accounting = mechanism.accounting
  if accounting == 'aggregate' and not mechanism.averages_noise:
    accounting = 'parallel'
  notes = [_ACCOUNTINGS[accounting]]
  if mechanism.accounting != accounting:
    notes.append(
      'With several local steps the noise of other clients cannot be counted, '
      'so aggregate accounting is that of parallel.'
    )
  if not settings.get('secure_aggregation') and (
    mechanism.averages_noise or mechanism.panel_examples
  ):
    notes.append(
      'The largest cost of any client is that of those measured: the panel of '
      'clients and, without a panel of examples, those who took part. Other '
      'clients can bound their own loss by parallel accounting.'
    )
  if settings.get('examples_per_client'):
    notes.append(
      'An example counts as one at each client that holds it. Where data are '
      'used again to fill more clients, a person who is at several of them is '
      'protected less.'
    )
  if mechanism.clipping == 'batch':
    notes.append(
      'Batch gradients were clipped as a whole, as in the paper: one example '
      'can move them by twice the clip norm, and the DP figures of examples '
      'say so. Clip per example for the DP of DP-SGD.'
    )
  if mechanism.level == 'joint':
    notes.append(
      'Client figures are for zero-out adjacency: an absent client contributes '
      'noise around '
      + ('the last mean.' if mechanism.reference_is_last_mean else 'zero.')
    )
  if mechanism.level == 'split':
    notes.append(
      'Client figures count the noise of the server alone, those of examples '
      'the noise of the clients alone.'
    )
  if settings.get('secure_aggregation'):
    notes.append(
      'The server saw sums of updates, and of costs sums or maxima on a public '
      'grid, rounded up; no value of a single client.'
    )
  else:
    notes.append(
      "The server saw each client's noisy update, and measured distances "
      'without noise: it is inside the trust boundary.'
    )
  return notes
