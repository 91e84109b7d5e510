"""The report of a training run: statement, files, page, and a summary."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tf_bdp import mechanism as mechanism_lib
from tf_bdp.accounting import comparison, events, recorded_distances
from tf_bdp.analysis import compute_bdp_privacy_lib
from tf_bdp.learning import report, training

DISTANCES_FILE = 'distances.npz'


def write(
  directory: pathlib.Path,
  mechanism: mechanism_lib.GaussianMechanism,
  config: training.TrainingConfig,
  settings: Mapping[str, Any],
  progress: training.Progress,
) -> str:
  """Writes the report and returns what to print."""
  lines = [_outcome(progress)]
  if not mechanism.noise_multiplier:
    lines.append('Trained without noise: there is no privacy to report.')
    return '\n'.join(lines)
  if not progress.rows:
    lines.append('No round was released: there is nothing to report.')
    return '\n'.join(lines)
  panel = bool(config.panel_size)
  rounds = training.events_of(mechanism, progress, panel)
  worst = [
    mechanism.worst_case_squared_distance(row['participants'])
    for row in progress.rows
  ]
  worst = mechanism.noise_multiplier * np.sqrt(worst)
  privacy = compute_bdp_privacy_lib.report_of_rounds(
    rounds,
    noise_multiplier=mechanism.noise_multiplier,
    participation_probability=mechanism.participation_probability,
    delta=config.delta,
    worst_case_distance=float(np.max(worst)),
    mechanism=mechanism.kind,
    unit='client',
    sampling=config.sampling,
  )
  distances = None
  if panel:
    distances = mechanism.noise_multiplier * np.sqrt(
      [
        event.squared_distances
        for event in rounds
        if isinstance(event, events.BayesianGaussianEvent)
      ]
    )
    recorded_distances.save(directory / DISTANCES_FILE, distances, panel, worst)
  page = report.write(
    directory,
    title=f'Private federated learning on {settings["dataset"]}',
    settings=settings,
    privacy=privacy,
    distances=distances,
    notes=_notes(settings, progress),
  )
  lines += [comparison.format_table(privacy.rows), f'Report: {page}']
  return '\n\n'.join(lines)


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
  settings: Mapping[str, Any], progress: training.Progress
) -> list[str]:
  notes = [_outcome(progress)]
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
  notes.append(
    'The curves show what the run itself went by: integer orders, and the '
    f'{settings["estimator"]} estimator. The table adds tighter figures of DP.'
  )
  failed = sum(row['failed_clients'] for row in progress.rows)
  if failed:
    notes.append(
      f'{failed} client updates were NaN, infinite or zero and left out.'
    )
  return notes
