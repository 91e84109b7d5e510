"""The figures of a run whose draws are known: without amplification.

Amplification by sampling rests on nobody knowing who took part. With a
`sampling_seed` somebody does: whoever has the seed, or tries all likely ones on
the numbers of participants. Against them a unit loses what it loses at q = 1 in
the rounds that it was in, and nothing in the others.
"""

from collections.abc import Sequence
from typing import Optional

import attr
import dp_accounting
import numpy as np

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import claims, events
from tf_bdp.mechanisms import measurements as measurements_lib
from tf_bdp.training import plan as plan_lib
from tf_bdp.training import progress as progress_lib


def report(
  unit: str, plan: plan_lib.Plan, progress: progress_lib.Progress
) -> list[claims.ClaimedEpsilon]:
  """Returns ε of a unit against those who know all draws.

  The rows are as of `BayesianAccountant.report`. `dp` is always there: the
  client that took part in most, at its worst case in every round that it was
  in. `sample` is there where a panel was measured, `each` and `census` where it
  was all clients. Whether an example was in a batch is not recorded: it is
  charged at q = 1 whenever its client took part. Held-out clients were in no
  round, and lose nothing here.

  Args:
    unit: 'client' or 'example'.
    plan: The plan of the run, with a `sampling_seed`.
    progress: The run's progress.

  Raises:
    ValueError: The draws are not known, as there is no seed.
  """
  if plan.seeds.sampling_seed is None:
    raise ValueError(
      'Without a sampling_seed draws are secret, and amplification holds: '
      'there are no known draws to account for.'
    )
  delta = plan.delta_of(unit)
  worst = _worst_case(unit, plan, progress)
  epsilons = {'dp': worst.get_dp_epsilon(delta)}
  asked_for = 'dp'
  if progress.measurements and _has_panel(unit, plan):
    names = ['sample']
    if plan.measures_everybody(unit):
      names = ['each', 'census', 'sample']
    asked_for = plan.accountant(unit).settings['estimator']
    if asked_for not in names:
      asked_for = 'census' if 'census' in names else 'sample'
    rows = accountant(unit, plan, progress).report(delta)
    # That accountant takes the worst client to be in every round. DP implies
    # the others; a part of δ is kept for the bound of a sample.
    rest = worst.get_dp_epsilon((1 - accountant_lib.ESTIMATOR_SHARE) * delta)
    for row in rows:
      if row.claim.name in names:
        limit = rest if row.claim.name == 'sample' else epsilons['dp']
        epsilons[row.claim.name] = min(row.epsilon, limit)
  return claims.report(epsilons, delta, asked_for)


def accountant(
  unit: str, plan: plan_lib.Plan, progress: progress_lib.Progress
) -> accountant_lib.BayesianAccountant:
  """Accounts for the units of a panel at q = 1 in the rounds they were in.

  Arguments as for `report`.
  """
  result = accountant_lib.BayesianAccountant(
    neighboring_relation=plan.mechanism.relation(unit)
  )
  took_part = _took_part(plan, progress.round_number)
  for measured, cohort in zip(progress.measurements, took_part):
    result.compose(_event(unit, plan, measured, cohort))
  return result


def _took_part(plan: plan_lib.Plan, rounds: int) -> list[np.ndarray]:
  """Returns whether each client took part, for every round."""
  clients = np.arange(plan.client_count)
  return [
    np.isin(clients, plan.sampler.participants(number))
    for number in range(rounds)
  ]


def _worst_case(
  unit: str, plan: plan_lib.Plan, progress: progress_lib.Progress
) -> accountant_lib.BayesianAccountant:
  """Accounts for the client that could lose most, or its examples."""
  mechanism, steps = plan.mechanism, 1
  if unit == 'example' and mechanism.local is not None:
    steps = mechanism.local.local_steps
  lost = np.zeros(plan.client_count)
  took_part = _took_part(plan, progress.round_number)
  for measured, cohort in zip(progress.measurements, took_part):
    worst = float(
      mechanism.worst_case_squared_distance(unit, measured.participants)
    )
    # Not by a product: without noise it is infinite.
    lost[cohort] += steps * worst
  # Rounds at q = 1 are one Gaussian mechanism, whose r² add up.
  largest = float(np.max(lost))
  event: dp_accounting.DpEvent = dp_accounting.NoOpDpEvent()
  if np.isinf(largest):
    event = dp_accounting.NonPrivateDpEvent()
  elif largest:
    event = dp_accounting.GaussianDpEvent(largest**-0.5)
  return accountant_lib.BayesianAccountant().compose(event)


def _has_panel(unit: str, plan: plan_lib.Plan) -> bool:
  """Whether single units of a run were measured in every round."""
  mechanism = plan.mechanism
  if not mechanism.noise_multiplier or plan.secure_aggregation:
    return False
  return plan.is_panel(unit)


def _event(
  unit: str,
  plan: plan_lib.Plan,
  measured: measurements_lib.Measurements,
  cohort: np.ndarray,
) -> dp_accounting.DpEvent:
  """Returns a round in which those who took part did so for sure.

  Args:
    unit: 'client' or 'example'.
    plan: The plan of the run.
    measured: What was measured in the round.
    cohort: Whether each client took part.
  """
  groups = measured.examples
  if unit == 'example' and groups is not None:
    absent = ~cohort[groups.clients]
    moves = np.where(np.repeat(absent, groups.sizes), 0, groups.squared_moves)
    measured = measured._replace(examples=groups._replace(squared_moves=moves))
  event = plan.mechanism.events(measured)[unit]
  present = measured.taking_part if unit == 'client' else None
  return _surely(event, present)


def _surely(
  event: dp_accounting.DpEvent, present: Optional[np.ndarray]
) -> dp_accounting.DpEvent:
  """Returns an event with q = 1 and a = 1 for those present, r = 0 for others.

  Args:
    event: The event of a round.
    present: Whether each unit is, group after group; None for all.
  """
  if isinstance(event, dp_accounting.ComposedDpEvent):
    return dp_accounting.ComposedDpEvent(
      [_surely(part, present) for part in event.events]
    )
  if isinstance(event, dp_accounting.PoissonSampledDpEvent):
    return event.event
  if isinstance(event, events.MixedGaussianEvent):
    # How many took part is known, but not here: as if it were the worst.
    largest = max(squared for _, squared in event.mixture)
    return dp_accounting.GaussianDpEvent(largest**-0.5)
  if isinstance(event, events.BayesianGaussianEvent):
    distances = event.squared_distances
    if present is not None:
      distances = np.where(present, distances, 0.0)
    return attr.evolve(
      event,
      squared_distances=distances,
      participation_probability=1.0,
      inclusion_probability=1.0,
      # Who took part is known, and with it how many did.
      worst_case_mixture=None,
    )
  if isinstance(event, events.ParallelEvent):
    ends = np.cumsum([g.squared_distances.size for g in event.groups])[:-1]
    parts: Sequence[Optional[np.ndarray]] = [None] * len(event.groups)
    if present is not None:
      parts = np.split(present, ends)
    groups = [_surely(g, part) for g, part in zip(event.groups, parts)]
    return attr.evolve(event, groups=groups)
  return event
