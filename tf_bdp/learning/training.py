"""The training loop: rounds, accounting, checkpoints, and when to stop."""

import csv
import dataclasses
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple, Optional

import dp_accounting
import numpy as np
import tensorflow as tf
import tqdm

from tf_bdp import mechanism as mechanism_lib
from tf_bdp import validation
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.learning import checkpoint, sampling
from tf_bdp.learning import engine as engine_lib

METRICS_FILE = 'metrics.csv'
CHECKPOINT_FILE = 'checkpoint.npz'
_COLUMNS = (
  *('round', 'participants', 'failed_clients', 'clip_norm', 'accuracy'),
  *('loss', 'dp_epsilon', 'bdp_epsilon', 'seconds'),
)
_Evaluate = Callable[[list[np.ndarray]], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
  """How long to train, and what to account for.

  Attributes:
    rounds: The most rounds.
    client_count: N.
    delta: δ.
    seed: Of sampling and of the panel.
    sampling: 'poisson' or 'fixed_size'.
    panel_size: How many clients are measured in every round; with 0 only the
      round's participants are, and composition is by Hölder's inequality.
    estimator: The accountant's; see `BayesianAccountant`.
    bdp_epsilon_budget: Training stops before the round that would exceed it.
    dp_epsilon_budget: The round in which it is spent is recorded, and training
      goes on: what DP alone would have had to be content with.
    evaluate_every: Rounds from one evaluation to the next.
    checkpoint_every: Rounds from one checkpoint to the next.
  """

  rounds: int
  client_count: int
  delta: float
  seed: int = 0
  sampling: str = 'poisson'
  panel_size: int = 100
  estimator: str = 'betting'
  bdp_epsilon_budget: Optional[float] = None
  dp_epsilon_budget: Optional[float] = None
  evaluate_every: int = 10
  checkpoint_every: int = 10

  def __post_init__(self) -> None:
    for name in (
      'rounds',
      'client_count',
      'evaluate_every',
      'checkpoint_every',
    ):
      validation.check_positive_integer(name, getattr(self, name))
    validation.check_delta('delta', self.delta)
    validation.check_choice('sampling', self.sampling, sampling.KINDS)
    if self.panel_size:
      sampling.panel(self.seed, self.client_count, self.panel_size)
      if self.panel_size < 3:
        raise ValueError(
          'panel_size must be at least 3, or 0 for none. Found '
          f'{self.panel_size}.'
        )
    for name in ('bdp_epsilon_budget', 'dp_epsilon_budget'):
      if getattr(self, name) is not None:
        validation.check_positive(name, getattr(self, name))

  def accountant(self) -> accountant_lib.BayesianAccountant:
    """Returns a fresh accountant for such a run."""
    if self.panel_size:
      return accountant_lib.BayesianAccountant(estimator=self.estimator)
    return accountant_lib.BayesianAccountant(
      'holder', estimator=self.estimator, total_rounds=self.rounds
    )


class Measured(NamedTuple):
  """The clients measured in a round; see `GaussianMechanism.event`."""

  squared_measures: np.ndarray
  taking_part: np.ndarray


@dataclasses.dataclass
class Progress:
  """All that a run has done so far.

  Attributes:
    round_number: How many rounds are done.
    state: The engine's.
    accountant: With all those rounds.
    rows: The metrics of every round.
    measured: The clients measured in every round.
    dp_stop: Number and metrics of the last round within DP's budget, once it
      is spent.
    stopped: Why training ended before its last round, if it did.
  """

  round_number: int
  state: Any
  accountant: accountant_lib.BayesianAccountant
  rows: list[dict[str, Any]]
  measured: list[Measured]
  dp_stop: Optional[dict[str, Any]] = None
  stopped: str = ''


def train(
  engine: engine_lib.Engine,
  config: TrainingConfig,
  evaluate: _Evaluate,
  directory: pathlib.Path,
  settings: Mapping[str, Any],
  resume: bool = False,
) -> Progress:
  """Trains until the rounds or the budget are used up.

  Args:
    engine: Runs the rounds.
    config: How long, and what to account for.
    evaluate: Returns 'accuracy' and 'loss' of trainable weights.
    directory: Gets metrics.csv, TensorBoard's events and the checkpoint.
    settings: All that determines the run; a checkpoint is resumed only with
      equal ones.
    resume: Whether to go on from the directory's checkpoint, if there is one.

  Returns:
    The run's progress when it ended.

  Raises:
    ValueError: The directory holds another run, or one that is not resumed.
    RuntimeError: No update of a round could be used.
  """
  directory.mkdir(parents=True, exist_ok=True)
  path = directory / CHECKPOINT_FILE
  if path.exists() and not resume:
    raise ValueError(
      f'{directory} holds a run already. Resume it, or name another directory.'
    )
  progress = Progress(0, engine.initial_state(), config.accountant(), [], [])
  if path.exists():
    progress = _restore(path, engine, config, settings)
  if not progress.stopped:
    _run(engine, config, evaluate, directory, settings, progress)
  return progress


def _run(
  engine: engine_lib.Engine,
  config: TrainingConfig,
  evaluate: _Evaluate,
  directory: pathlib.Path,
  settings: Mapping[str, Any],
  progress: Progress,
) -> None:
  """Runs the rounds that are left."""
  members: list[int] = []
  if config.panel_size:
    members = sampling.panel(
      config.seed, config.client_count, config.panel_size
    ).tolist()
  board = tf.summary.create_file_writer(str(directory / 'tensorboard'))
  bar = tqdm.tqdm(
    total=config.rounds, initial=progress.round_number, unit='round'
  )
  with bar, board.as_default(), _MetricsFile(directory, progress.rows) as table:
    while progress.round_number < config.rounds:
      start = time.perf_counter()
      output = engine.run_round(
        progress.state,
        progress.round_number,
        _participants(engine, config, progress.round_number),
        members,
      )
      if output.failed_clients and not output.participants:
        raise RuntimeError(
          f'No update of round {progress.round_number + 1} could be used: all '
          f'{output.failed_clients} were NaN, infinite or zero. Lower the '
          'learning rate.'
        )
      measured = _measured(output, bool(members))
      event = engine.mechanism.event(
        *measured, output.participants, output.clip_norm, bool(members)
      )
      budget = config.bdp_epsilon_budget
      if budget is not None and progress.accountant.would_exceed(
        event, budget, config.delta
      ):
        # The round's result is dropped unseen: nothing of it is released.
        progress.stopped = (
          f'the next round would exceed the budget of epsilon = {budget:g}'
        )
        break
      row = _row(engine, config, evaluate, progress, output, event)
      row['seconds'] = round(time.perf_counter() - start, 4)
      progress.state = output.state
      progress.round_number += 1
      progress.measured.append(measured)
      progress.rows.append(row)
      table.append(row)
      _show(bar, row)
      for name, value in row.items():
        if name != 'round' and value != '':
          tf.summary.scalar(name, value, step=row['round'])
      if progress.round_number % config.checkpoint_every == 0:
        _save(directory, engine, settings, progress)
  _save(directory, engine, settings, progress)


def _participants(
  engine: engine_lib.Engine, config: TrainingConfig, round_number: int
) -> list[int]:
  return sampling.participants(
    config.sampling,
    config.seed,
    round_number,
    config.client_count,
    engine.mechanism.participation_probability,
  ).tolist()


def _measured(output: engine_lib.RoundOutput, panel: bool) -> Measured:
  if panel:
    return Measured(
      np.asarray(output.panel_squared_measures),
      np.asarray(output.panel_taking_part),
    )
  squared = output.squared_measures
  return Measured(squared, np.ones(squared.shape, bool))


def _row(
  engine: engine_lib.Engine,
  config: TrainingConfig,
  evaluate: _Evaluate,
  progress: Progress,
  output: engine_lib.RoundOutput,
  event: dp_accounting.DpEvent,
) -> dict[str, Any]:
  """Accounts for a round and returns its metrics."""
  progress.accountant.compose(event)
  dp_epsilon = progress.accountant.get_worst_case_epsilon(config.delta)
  number = progress.round_number + 1
  row = {
    'round': number,
    'participants': output.participants,
    'failed_clients': output.failed_clients,
    'clip_norm': output.clip_norm,
    'accuracy': '',
    'loss': '',
    'dp_epsilon': dp_epsilon,
    'bdp_epsilon': progress.accountant.get_epsilon(config.delta),
  }
  if number == config.rounds or number % config.evaluate_every == 0:
    row.update(evaluate(engine.model_weights(output.state)))
  budget = config.dp_epsilon_budget
  if budget is not None and progress.dp_stop is None and dp_epsilon > budget:
    before = evaluate(engine.model_weights(progress.state))
    progress.dp_stop = {'round': progress.round_number, **before}
  return row


def _show(bar: tqdm.tqdm, row: Mapping[str, Any]) -> None:
  shown = {'DP ε': f'{row["dp_epsilon"]:.2f}'}
  shown['BDP ε'] = f'{row["bdp_epsilon"]:.2f}'
  if row['accuracy'] != '':
    shown['accuracy'] = f'{row["accuracy"]:.3f}'
  bar.set_postfix(shown)
  bar.update()


class _MetricsFile:
  """metrics.csv, written anew with the known rows and then row by row."""

  def __init__(self, directory: pathlib.Path, rows: list[dict[str, Any]]):
    self._path = directory / METRICS_FILE
    self._rows = rows

  def __enter__(self) -> '_MetricsFile':
    temporary = self._path.with_name(METRICS_FILE + '.part')
    with open(temporary, 'w', newline='', encoding='utf-8') as file:
      writer = csv.DictWriter(file, _COLUMNS)
      writer.writeheader()
      writer.writerows(self._rows)
    os.replace(temporary, self._path)
    self._file = open(self._path, 'a', newline='', encoding='utf-8')
    return self

  def append(self, row: Mapping[str, Any]) -> None:
    csv.DictWriter(self._file, _COLUMNS).writerow(row)
    self._file.flush()

  def __exit__(self, *exception: object) -> None:
    self._file.close()


def _save(
  directory: pathlib.Path,
  engine: engine_lib.Engine,
  settings: Mapping[str, Any],
  progress: Progress,
) -> None:
  arrays = {
    f'engine_{name}': array
    for name, array in engine.to_arrays(progress.state).items()
  }
  squared, taking_part = (
    np.concatenate([np.zeros(0), *parts])
    for parts in (zip(*progress.measured) if progress.measured else ([], []))
  )
  arrays['squared_measures'] = squared
  arrays['taking_part'] = taking_part.astype(bool)
  arrays['measured_sizes'] = np.array(
    [part.squared_measures.size for part in progress.measured], np.int64
  )
  contents = {
    'settings': dict(settings),
    'round_number': progress.round_number,
    'accountant': progress.accountant.state_dict(),
    'rows': progress.rows,
    'dp_stop': progress.dp_stop,
    'stopped': progress.stopped,
  }
  checkpoint.save(directory / CHECKPOINT_FILE, arrays, contents)


def _restore(
  path: pathlib.Path,
  engine: engine_lib.Engine,
  config: TrainingConfig,
  settings: Mapping[str, Any],
) -> Progress:
  arrays, contents = checkpoint.load(path)
  checkpoint.check_settings(contents['settings'], settings)
  accountant = config.accountant()
  accountant.load_state_dict(contents['accountant'])
  state = {
    name.removeprefix('engine_'): array
    for name, array in arrays.items()
    if name.startswith('engine_')
  }
  return Progress(
    round_number=contents['round_number'],
    state=engine.from_arrays(state),
    accountant=accountant,
    rows=contents['rows'],
    measured=_measured_from_arrays(arrays),
    dp_stop=contents['dp_stop'],
    stopped=contents['stopped'],
  )


def _measured_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[Measured]:
  ends = np.cumsum(arrays['measured_sizes'])[:-1]
  if not arrays['measured_sizes'].size:
    return []
  return [
    Measured(squared, taking_part)
    for squared, taking_part in zip(
      np.split(arrays['squared_measures'], ends),
      np.split(arrays['taking_part'], ends),
    )
  ]


def events_of(
  mechanism: mechanism_lib.GaussianMechanism, progress: Progress, panel: bool
) -> list[dp_accounting.DpEvent]:
  """Returns what the accountant was told, one event a round."""
  return [
    mechanism.event(*measured, row['participants'], row['clip_norm'], panel)
    for measured, row in zip(progress.measured, progress.rows)
  ]
