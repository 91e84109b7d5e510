"""The training loop: rounds, accounting, checkpoints, and when to stop."""

import dataclasses
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, Optional

import numpy as np
import tqdm

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.engines import base as engines
from tf_bdp.training import plan as plan_lib
from tf_bdp.training import progress as progress_lib
from tf_bdp.training import round_log, stopping

_Evaluate = Callable[[list[np.ndarray]], Mapping[str, float]]


def train(
  engine: engines.Engine,
  plan: plan_lib.Plan,
  evaluate: _Evaluate,
  directory: pathlib.Path,
  *,
  settings: Optional[Mapping[str, Any]] = None,
  resume: bool = False,
) -> progress_lib.Progress:
  """Trains until the rounds or a budget are used up.

  With an individual filter clients leave one by one, and the run goes on: that
  nobody is left is private, and its end would tell.

  Args:
    engine: Runs the rounds; made by `plan.engine(...)`.
    plan: The plan of the run.
    evaluate: Returns 'accuracy' and 'loss' of trainable weights.
    directory: Gets metrics.csv, TensorBoard's events and the checkpoint.
    settings: Everything that determines the run, by name; a checkpoint is
      resumed only with equal settings. By default those of the plan.
    resume: Whether to go on from the directory's checkpoint, if there is one.

  Returns:
    The run's progress when it ended.

  Raises:
    ValueError: The directory holds another run, or one that is not resumed,
      or a budget does not allow a single round.
    RuntimeError: No update of a round could be used.
    KeyboardInterrupt: The run was interrupted, and can be resumed.
  """
  plan.check_data(engine.client_count)
  _check_sampler(engine, plan)
  settings = plan.settings() if settings is None else settings
  limit = stopping.dp_rounds(plan)
  directory.mkdir(parents=True, exist_ok=True)
  if not (directory / progress_lib.CHECKPOINT_FILE).exists():
    progress = progress_lib.Progress(
      engine.initial_state(),
      plan.accountants(),
      budgets=plan.individual_filter(),
    )
  elif resume:
    progress = progress_lib.restore(directory, engine, plan, settings)
  else:
    raise ValueError(
      f'{directory} holds a run already. Resume it, or name another directory.'
    )
  if progress.stopped:
    return progress
  bar = tqdm.tqdm(
    total=plan.schedule.rounds, initial=progress.round_number, unit='round'
  )
  progress_lib.write_private_notice(directory)
  columns = plan.epsilon_columns()
  if progress.budgets is not None:
    columns.append('active_clients')
  shown = _shown_columns(plan)
  with bar, round_log.open_log(directory, columns, progress.rows) as log:
    try:
      for latest in _rounds(engine, plan, evaluate, progress, limit):
        progress = latest
        _show(bar, shown, progress.rows)
        if progress.stopped:
          break
        bar.update()
        log(progress.rows[-1])
        if progress.round_number % plan.schedule.checkpoint_every == 0:
          progress_lib.save(directory, engine, plan, settings, progress)
    finally:
      # Also after an interruption: no released round is run a second time.
      if progress.rows or progress.stopped:
        progress_lib.save(directory, engine, plan, settings, progress)
  if progress.stopped:
    # The figures of the last round came after it had been logged.
    with round_log.open_log(directory, columns, progress.rows):
      pass
  return progress


def _check_sampler(engine: engines.Engine, plan: plan_lib.Plan) -> None:
  """Raises ValueError if the engine's draws are not those of the plan."""
  sampler = getattr(engine, 'sampler', None)
  if sampler is not None and not sampler.draws_as(plan.sampler):
    raise ValueError(
      'The engine has another sampler than the plan: its panel of examples '
      'would be lost when the run is resumed. Make it by plan.engine(...).'
    )


def _rounds(
  engine: engines.Engine,
  plan: plan_lib.Plan,
  evaluate: _Evaluate,
  progress: progress_lib.Progress,
  limit: Optional[int],
) -> Iterator[progress_lib.Progress]:
  """Runs the rounds that are left; yields the progress after each.

  Args:
    engine: As of `train`.
    plan: As of `train`.
    evaluate: As of `train`.
    progress: Where to go on.
    limit: How many rounds DP's budget allows, if that is known in advance.
  """
  sampler = plan.sampler
  panel = sampler.panel(plan.panel_size).tolist()
  held_out = sampler.held_out_clients().tolist()
  while progress.round_number < plan.schedule.rounds:
    start = time.perf_counter()
    number = progress.round_number
    if limit is not None and number >= limit:
      progress = _evaluated(engine, plan, evaluate, progress)
      yield dataclasses.replace(progress, stopped=stopping.dp_reason(plan))
      return
    participants = sampler.participants(number).tolist()
    done = engine.run_round(
      progress.state, number, participants, panel, held_out, progress.budgets
    )
    _check_usable(done, number, plan.mechanism.aggregation.counts_failed)
    budgets = stopping.charged(plan, progress.budgets, panel, done.measurements)
    accountants = {
      unit: accountant.copy().compose(done.events[unit])
      for unit, accountant in progress.accountants.items()
    }
    stopped = _exceeded(plan, accountants)
    if limit is None and stopping.exceeds_dp(plan, accountants, number):
      stopped = stopping.dp_reason(plan)
    if stopped:
      # The round's result is dropped unseen: nothing is released.
      progress = _evaluated(engine, plan, evaluate, progress)
      yield dataclasses.replace(progress, stopped=stopped)
      return
    progress = dataclasses.replace(progress, budgets=budgets)
    progress = _advanced(
      engine, plan, evaluate, progress, done, accountants, start
    )
    yield progress


def _check_usable(
  done: engines.Round, number: int, counts_failed: bool
) -> None:
  measured = done.measurements
  if measured.dropped is not None and np.any(measured.dropped):
    return  # The others have left, and that must not show.
  failed = measured.failed_clients
  usable = measured.participants - (failed if counts_failed else 0)
  if failed and not usable:
    raise RuntimeError(
      f'No update of round {number + 1} could be used: all {failed} were NaN, '
      'infinite or zero. Lower the learning rate.'
    )


def _exceeded(
  plan: plan_lib.Plan,
  accountants: Mapping[str, accountant_lib.BayesianAccountant],
) -> str:
  """Says which budget is exceeded, if any."""
  for unit, accountant in accountants.items():
    budget = plan.budget_of(unit)
    if budget is None:
      continue
    if accountant.exceeds(budget, plan.delta_of(unit)):
      whose = f" {unit}s'" if len(accountants) > 1 else ''
      return (
        f'the next round would exceed the{whose} budget of epsilon = '
        f'{budget:g} by the claim {accountant.claim}{stopping.TELLS}'
      )
  return ''


def _advanced(
  engine: engines.Engine,
  plan: plan_lib.Plan,
  evaluate: _Evaluate,
  progress: progress_lib.Progress,
  done: engines.Round,
  accountants: dict[str, accountant_lib.BayesianAccountant],
  start: float,
) -> progress_lib.Progress:
  """Returns the progress with one more round, which began at `start`."""
  number = progress.round_number + 1
  measured = done.measurements
  row: dict[str, Any] = {
    'round': number,
    'participants': measured.participants,
    'failed_clients': measured.failed_clients,
    'clip_norm': measured.clip_norm,
    'accuracy': '',
    'loss': '',
    **dict.fromkeys(plan.epsilon_columns(), ''),
  }
  if progress.budgets is not None:
    row['active_clients'] = progress.budgets.active
  progress = dataclasses.replace(
    progress,
    state=done.state,
    accountants=accountants,
    rows=[*progress.rows, row],
    measurements=[*progress.measurements, measured],
    events=[*progress.events, done.events],
    averaged=_averaged(
      engine.model_weights(done.state),
      progress,
      plan.schedule.average_iterates,
    ),
  )
  last = number == plan.schedule.rounds
  if last or number % plan.schedule.evaluate_every == 0:
    progress = _evaluated(engine, plan, evaluate, progress)
  progress.rows[-1]['seconds'] = round(time.perf_counter() - start, 4)
  return progress


def _evaluated(
  engine: engines.Engine,
  plan: plan_lib.Plan,
  evaluate: _Evaluate,
  progress: progress_lib.Progress,
) -> progress_lib.Progress:
  """Returns the progress with all figures of its last round.

  Exact figures take tenths of seconds: not every round has them.
  """
  if not progress.rows or progress.rows[-1]['accuracy'] != '':
    return progress
  row = {
    **progress.rows[-1],
    **evaluate(progress.weights(engine)),
    **{
      plan.epsilon_column(unit, claimed.claim.name): claimed.epsilon
      for unit, accountant in progress.accountants.items()
      for claimed in plan.report(unit, accountant)
    },
  }
  return dataclasses.replace(progress, rows=[*progress.rows[:-1], row])


def _averaged(
  weights: list[np.ndarray], progress: progress_lib.Progress, factor: float
) -> Optional[list[np.ndarray]]:
  """Returns the exponential average of all weights so far, if asked for."""
  if not factor:
    return None
  before = progress.averaged or weights
  # Kingma and Ba's correction: the first weights get no extra weight.
  share = np.float32((1 - factor) / (1 - factor ** (progress.round_number + 1)))
  return [b + share * (w - b) for b, w in zip(before, weights)]


def _shown_columns(plan: plan_lib.Plan) -> dict[str, str]:
  """Returns the columns that the bar shows, by what it calls them."""
  unit = plan.mechanism.units[0]
  return {
    f'{claim} ε': plan.epsilon_column(unit, claim)
    for claim in ('dp', plan.claim_of(unit))
  }


def _show(
  bar: tqdm.tqdm, columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]
) -> None:
  """Shows the figures of the last round, if it was evaluated."""
  if rows and rows[-1]['accuracy'] != '':
    row = rows[-1]
    shown = {name: f'{row[column]:.2f}' for name, column in columns.items()}
    accuracy = f'{row["accuracy"]:.3f}'
    bar.set_postfix({'round': row['round'], **shown, 'accuracy': accuracy})
