"""Makes measurements and events from the metrics of a TFF process."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import dp_accounting
import numpy as np

from tf_bdp.accounting import events, ledger, recorded_distances
from tf_bdp.aggregators import cost_reports
from tf_bdp.learning import instance_processes
from tf_bdp.mechanisms import base, measurements


def events_from_metrics(
  metrics: Mapping[str, Any],
  mechanism: base.Mechanism,
  reporting: Optional[Mapping[str, cost_reports.Reporting]] = None,
) -> dict[str, dp_accounting.DpEvent]:
  """Returns a round's event for the accountant of each protected unit.

  Args:
    metrics: The metrics of the round, `process.next(...).metrics`.
    mechanism: The mechanism of the process: `aggregator.mechanism` of a
      `ClientPrivacyFactory`, or `batches.mechanism`.
    reporting: Under secure aggregation, how each unit's costs were bounded.

  Returns:
    For each of `mechanism.units` an event, measured on the participants of the
    round; the worst case, if they are too few to estimate from.
  """
  if mechanism.local is not None and mechanism.local.panel_examples:
    raise ValueError(
      'A panel is measured in rounds in which it takes no part, too: train '
      'with tf_bdp.engines, or use panel_examples = 0.'
    )
  return mechanism.events(
    measurements_from_metrics(metrics, mechanism, reporting)
  )


def save_distances(
  path: Union[str, 'os.PathLike[str]'],
  rounds: Sequence[Mapping[str, Any]],
  mechanism: base.Mechanism,
) -> None:
  """Saves how far the participants of all rounds move what is released.

  The file is for `compute_bdp_privacy` and `compute_noise_from_bdp_budget`.
  Distances are private data: keep it where the metrics are.

  Args:
    path: A file name that ends in .npz.
    rounds: The metrics of every round, in order.
    mechanism: The mechanism of the process, which protects clients by noise of
      the server.
  """
  noise = mechanism.noise_multiplier
  if mechanism.units != ('client',) or mechanism.local is not None or not noise:
    raise ValueError(
      'Distances are saved of clients that are protected by noise of the '
      f'server. Found units {mechanism.units} and noise_multiplier {noise}.'
    )
  distances, worst, mixtures = [], [], set()
  for metrics in rounds:
    event = events_from_metrics(metrics, mechanism)['client']
    squared = np.zeros(0)  # Too few participants: the worst case counts.
    mixture = getattr(event, 'mixture', None)
    if isinstance(event, events.BayesianGaussianEvent):
      squared, mixture = event.squared_distances, event.worst_case_mixture
    limits = [e.squared_distance for _, e in ledger.rounds_of(event)]
    distances.append(noise * np.sqrt(squared))
    worst.append(noise * math.sqrt(max(limits, default=0.0)))
    if limits:  # Else nothing was released.
      mixtures.add(mixture)
  if len(mixtures) > 1:
    raise ValueError('The worst case must be drawn alike in every round.')
  mixture = mixtures.pop() if mixtures else None
  recorded_distances.save(
    path,
    distances,
    panel=False,
    worst_case_distances=worst,
    worst_case_mixture=mixture
    and [(p, noise * math.sqrt(r)) for p, r in mixture],
  )


def measurements_from_metrics(
  metrics: Mapping[str, Any],
  mechanism: base.Mechanism,
  reporting: Optional[Mapping[str, cost_reports.Reporting]] = None,
) -> measurements.Measurements:
  """Returns what was measured of a round's participants.

  Arguments as for `events_from_metrics`.
  """
  learnt = metrics.get('aggregator', metrics)
  if 'participants' not in learnt:
    raise ValueError(
      'The metrics hold no measurements of a ClientPrivacyFactory. Found '
      f'{sorted(learnt)}.'
    )
  squared = learnt.get('squared_measures')
  examples = reported = None
  local = mechanism.local
  if reporting is not None:
    work = metrics['client_work'] if local is not None else {}
    reported = cost_reports.read({**work, **learnt}, mechanism, reporting)
  elif local is not None:
    answers = instance_processes.MovesByExample.read(
      metrics['client_work'], local.local_steps
    )
    examples = local.groups({c: a.examples for c, a in answers.items()}, ())
    if squared is None:
      squared = [a.squared_norm for a in answers.values() if a.usable]
  squared = np.asarray([] if squared is None else squared)
  return measurements.Measurements(
    int(learnt['participants']),
    int(learnt['failed_clients']),
    float(learnt['clip_norm']),
    squared,
    np.ones(squared.shape, bool),
    examples=examples,
    reported=reported,
  )
