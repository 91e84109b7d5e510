"""The training loop: rounds, accounting, checkpoints, and when to stop."""

import dataclasses
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Callable, Optional

import numpy as np
import tqdm

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.engines import base as engines
from tf_bdp.training import plan as plan_lib
from tf_bdp.training import progress as progress_lib
from tf_bdp.training import round_log

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
  """Trains until the rounds or the budget are used up.

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
    ValueError: The directory holds another run, or one that is not resumed.
    RuntimeError: No update of a round could be used.
    KeyboardInterrupt: The run was interrupted, and can be resumed.
  """
  plan.check_data(engine.client_count)
  _check_sampler(engine, plan)
  settings = plan.settings() if settings is None else settings
  directory.mkdir(parents=True, exist_ok=True)
  if not (directory / progress_lib.CHECKPOINT_FILE).exists():
    progress = progress_lib.Progress(engine.initial_state(), plan.accountants())
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
  units = plan.mechanism.units
  with bar, round_log.open_log(directory, units, progress.rows) as log:
    try:
      for latest in _rounds(engine, plan, evaluate, progress):
        progress = latest
        if progress.stopped:
          break
        log(progress.rows[-1])
        _show(bar, progress.rows[-1])
        if progress.round_number % plan.schedule.checkpoint_every == 0:
          progress_lib.save(directory, engine, plan, settings, progress)
    finally:
      # Also after an interruption: no released round is run a second time.
      if progress.rows or progress.stopped:
        progress_lib.save(directory, engine, plan, settings, progress)
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
) -> Iterator[progress_lib.Progress]:
  """Runs the rounds that are left; yields the progress after each."""
  sampler = plan.sampler
  panel = sampler.panel(plan.panel_size).tolist()
  held_out = sampler.held_out_clients().tolist()
  while progress.round_number < plan.schedule.rounds:
    start = time.perf_counter()
    number = progress.round_number
    participants = sampler.participants(number).tolist()
    done = engine.run_round(
      progress.state, number, participants, panel, held_out
    )
    _check_usable(done, number)
    accountants = {
      unit: accountant.copy().compose(done.events[unit])
      for unit, accountant in progress.accountants.items()
    }
    stopped = _exceeded(plan, accountants)
    if stopped:
      # The round's result is dropped unseen: nothing is released.
      yield dataclasses.replace(progress, stopped=stopped)
      return
    progress = _advanced(
      engine, plan, evaluate, progress, done, accountants, start
    )
    yield progress


def _check_usable(done: engines.Round, number: int) -> None:
  failed = done.measurements.failed_clients
  if failed and not done.measurements.participants:
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
    if _epsilon(accountant, plan.delta_of(unit)) > budget:
      whose = f" {unit}s'" if len(accountants) > 1 else ''
      return (
        f'the next round would exceed the{whose} budget of epsilon = {budget:g}'
      )
  return ''


def _epsilon(
  accountant: accountant_lib.BayesianAccountant, delta: float
) -> float:
  """Returns ε by moments, quickly; `get_epsilon` also tries exact DP."""
  if accountant.settings['estimator'] == 'dp':
    return accountant.get_epsilon(delta)
  return accountant.get_epsilon_and_optimal_order(delta)[0]


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
  }
  for unit, accountant in accountants.items():
    delta = plan.delta_of(unit)
    prefix = '' if unit == plan.mechanism.units[0] else f'{unit}_'
    row[f'{prefix}dp_epsilon'] = accountant.get_worst_case_epsilon(delta)
    row[f'{prefix}bdp_epsilon'] = _epsilon(accountant, delta)
  budget, dp_stop = plan.accounting.dp_epsilon_budget, progress.dp_stop
  if budget is not None and row['dp_epsilon'] > budget and dp_stop is None:
    before = evaluate(progress.weights(engine))
    dp_stop = {'round': progress.round_number, **before}
  progress = dataclasses.replace(
    progress,
    state=done.state,
    accountants=accountants,
    rows=[*progress.rows, row],
    measurements=[*progress.measurements, measured],
    events=[*progress.events, done.events],
    dp_stop=dp_stop,
    averaged=_averaged(
      engine.model_weights(done.state),
      progress,
      plan.schedule.average_iterates,
    ),
  )
  last = number == plan.schedule.rounds
  if last or number % plan.schedule.evaluate_every == 0:
    row.update(evaluate(progress.weights(engine)))
  row['seconds'] = round(time.perf_counter() - start, 4)
  return progress


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


def _show(bar: tqdm.tqdm, row: Mapping[str, Any]) -> None:
  shown = {'DP ε': f'{row["dp_epsilon"]:.2f}'}
  shown['BDP ε'] = f'{row["bdp_epsilon"]:.2f}'
  if row['accuracy'] != '':
    shown['accuracy'] = f'{row["accuracy"]:.3f}'
  bar.set_postfix(shown)
  bar.update()
