"""The training loop: rounds, accounting, checkpoints, and when to stop."""

import csv
import dataclasses
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional

import dp_accounting
import numpy as np
import tensorflow as tf
import tqdm

from tf_bdp import validation
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import events as events_lib
from tf_bdp.engines import base as engine_lib
from tf_bdp.learning import sampling
from tf_bdp.mechanisms import instance as instance_mechanism
from tf_bdp.training import checkpoint

METRICS_FILE = 'metrics.csv'
CHECKPOINT_FILE = 'checkpoint.npz'
_COLUMNS = (
  *('round', 'participants', 'failed_clients', 'clip_norm', 'accuracy'),
  *('loss', 'dp_epsilon', 'bdp_epsilon', 'seconds'),
)
# Where both clients and examples are protected.
_EXAMPLE_COLUMNS = ('example_dp_epsilon', 'example_bdp_epsilon')
_Evaluate = Callable[[list[np.ndarray]], Mapping[str, float]]


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
  """How long to train, and what to account for.

  Attributes:
    rounds: The most rounds.
    client_count: N.
    delta: δ.
    example_delta: δ of examples where both clients and examples are protected;
      by default the same.
    seed: Of sampling and of the panel.
    sampling: 'poisson' or 'fixed_size'.
    panel_size: How many clients are measured in every round; with 0 only the
      round's participants are, and composition is by Hölder's inequality.
    estimator: Of the clients' accountant; see `BayesianAccountant`.
    example_estimator: Of the examples'.
    bdp_epsilon_budget: Training stops before the round that would exceed it.
    example_bdp_epsilon_budget: The same for examples where both clients and
      examples are protected.
    dp_epsilon_budget: The round in which it is spent is recorded, and training
      goes on: what DP alone would have had to be content with.
    average_iterates: β of an exponential average of the weights, which costs
      no privacy and takes noise out of them; it is what is evaluated and saved.
      0 for the last weights.
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
  example_estimator: str = 'bernstein'
  bdp_epsilon_budget: Optional[float] = None
  dp_epsilon_budget: Optional[float] = None
  example_delta: Optional[float] = None
  example_bdp_epsilon_budget: Optional[float] = None
  average_iterates: float = 0.0
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
    if self.example_delta is not None:
      validation.check_delta('example_delta', self.example_delta)
    validation.check_choice('sampling', self.sampling, sampling.KINDS)
    if not 0 <= self.average_iterates < 1:
      raise ValueError(
        f'average_iterates must be in [0, 1). Found {self.average_iterates}.'
      )
    if self.panel_size:
      sampling.panel(self.seed, self.client_count, self.panel_size)
      if self.panel_size < 3:
        raise ValueError(
          'panel_size must be at least 3, or 0 for none. Found '
          f'{self.panel_size}.'
        )
    for name in (
      'bdp_epsilon_budget',
      'dp_epsilon_budget',
      'example_bdp_epsilon_budget',
    ):
      if getattr(self, name) is not None:
        validation.check_positive(name, getattr(self, name))

  def accountants(
    self, mechanism: engine_lib.Mechanism
  ) -> dict[str, accountant_lib.BayesianAccountant]:
    """Returns a fresh accountant for each unit that a mechanism protects."""
    return {unit: self._accountant(mechanism, unit) for unit in mechanism.units}

  def _accountant(
    self, mechanism: engine_lib.Mechanism, unit: str
  ) -> accountant_lib.BayesianAccountant:
    panel, steps, estimator = self.panel_size, self.rounds, self.estimator
    if isinstance(mechanism, instance_mechanism.InstanceMechanism) and (
      unit == 'example'
    ):
      panel, estimator = mechanism.panel_examples, self.example_estimator
      steps = instance_mechanism.total_steps(
        mechanism, self.rounds, self.client_count
      )
    if panel:
      return accountant_lib.BayesianAccountant(estimator=estimator)
    return accountant_lib.BayesianAccountant(
      'holder', estimator=estimator, total_rounds=steps
    )

  def reporting(
    self, mechanism: engine_lib.Mechanism
  ) -> dict[str, events_lib.Reporting]:
    """Returns how each unit's costs are bounded where they are reported."""
    result = {}
    for unit, accountant in self.accountants(mechanism).items():
      settings = accountant.settings
      result[unit] = events_lib.Reporting(
        orders=tuple(settings['orders']),
        estimator=settings['estimator'],
        failure_probability=accountant.failure_probability(
          self.delta_of(unit, mechanism)
        ),
        power=settings['total_rounds'],
      )
    return result

  def delta_of(self, unit: str, mechanism: engine_lib.Mechanism) -> float:
    """Returns δ of a unit."""
    if unit == mechanism.units[0] or self.example_delta is None:
      return self.delta
    return self.example_delta

  def budget_of(
    self, unit: str, mechanism: engine_lib.Mechanism
  ) -> Optional[float]:
    """Returns the Bayesian ε at which to stop, if there is one."""
    if unit == mechanism.units[0]:
      return self.bdp_epsilon_budget
    return self.example_bdp_epsilon_budget


class Measured(NamedTuple):
  """What was measured in a round, as the mechanism's `events` takes it."""

  squared_measures: np.ndarray
  taking_part: np.ndarray
  examples: Optional[instance_mechanism.ExampleGroups] = None
  # Of each unit, where the server learns costs and no distances.
  reported: Optional[Mapping[str, np.ndarray]] = None


@dataclasses.dataclass
class Progress:
  """All that a run has done so far.

  Attributes:
    round_number: How many rounds are done.
    state: The engine's.
    accountants: With all those rounds, by what they protect: 'client',
      'example' or both.
    rows: The metrics of every round.
    measured: What was measured in every round.
    dp_stop: Number and metrics of the last round within DP's budget, once it
      is spent.
    stopped: Why training ended before its last round, if it did.
    averaged: The averaged weights, if they are.
  """

  round_number: int
  state: Any
  accountants: dict[str, accountant_lib.BayesianAccountant]
  rows: list[dict[str, Any]]
  measured: list[Measured]
  dp_stop: Optional[dict[str, Any]] = None
  stopped: str = ''
  averaged: Optional[list[np.ndarray]] = None

  def weights(self, engine: engine_lib.Engine) -> list[np.ndarray]:
    """Returns the weights to be used, averaged if they are."""
    if self.averaged is not None:
      return self.averaged
    return engine.model_weights(self.state)


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
  _check(engine.mechanism, config)
  accountants = config.accountants(engine.mechanism)
  progress = Progress(0, engine.initial_state(), accountants, [], [])
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
  columns: tuple[str, ...] = _COLUMNS
  if len(engine.mechanism.units) > 1:
    columns += _EXAMPLE_COLUMNS
  metrics = _MetricsFile(directory, columns, progress.rows)
  with bar, board.as_default(), metrics as table:
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
      events = _events(
        engine.mechanism,
        config,
        measured,
        output.participants,
        output.clip_norm,
      )
      progress.stopped = _exceeded(engine.mechanism, config, progress, events)
      if progress.stopped:
        break  # The round's result is dropped unseen: nothing is released.
      row = _row(engine, config, evaluate, progress, output, events)
      row['seconds'] = round(time.perf_counter() - start, 4)
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


def _check(mechanism: engine_lib.Mechanism, config: TrainingConfig) -> None:
  """Raises ValueError for settings that do not fit each other."""
  if len(mechanism.units) == 1 and (
    config.example_delta or config.example_bdp_epsilon_budget
  ):
    raise ValueError(
      'example_delta and example_bdp_epsilon_budget are for levels that '
      'protect clients as well. Use delta and bdp_epsilon_budget.'
    )
  panel_examples = getattr(mechanism, 'panel_examples', 0)
  if panel_examples and not config.panel_size:
    raise ValueError(
      'A panel of examples needs a panel of clients. Found panel_size = 0 '
      f'with panel_examples = {panel_examples}.'
    )


def _measured(output: engine_lib.RoundOutput, panel: bool) -> Measured:
  if panel and output.panel_squared_measures is not None:
    return Measured(
      np.asarray(output.panel_squared_measures),
      np.asarray(output.panel_taking_part),
      output.examples,
    )
  squared = output.squared_measures
  return Measured(
    squared, np.ones(squared.shape, bool), output.examples, output.reported
  )


def _events(
  mechanism: engine_lib.Mechanism,
  config: TrainingConfig,
  measured: Measured,
  participants: int,
  clip_norm: float,
) -> dict[str, dp_accounting.DpEvent]:
  """Returns a round's event for each unit."""
  if measured.reported is None:
    return mechanism.events(
      *measured[:3], participants, clip_norm, bool(config.panel_size)
    )
  reporting = config.reporting(mechanism)
  return {
    unit: mechanism.reported_event(
      unit,
      measured.reported[unit],
      reporting[unit].failure_probability,
      participants,
    )
    for unit in mechanism.units
  }


def _exceeded(
  mechanism: engine_lib.Mechanism,
  config: TrainingConfig,
  progress: Progress,
  events: Mapping[str, dp_accounting.DpEvent],
) -> str:
  """Says which budget a round would exceed, if any."""
  for unit, event in events.items():
    budget = config.budget_of(unit, mechanism)
    delta = config.delta_of(unit, mechanism)
    accountant = progress.accountants[unit]
    if budget is not None and accountant.would_exceed(event, budget, delta):
      whose = f" {unit}s'" if len(events) > 1 else ''
      return (
        f'the next round would exceed the{whose} budget of epsilon = {budget:g}'
      )
  return ''


def _row(
  engine: engine_lib.Engine,
  config: TrainingConfig,
  evaluate: _Evaluate,
  progress: Progress,
  output: engine_lib.RoundOutput,
  events: Mapping[str, dp_accounting.DpEvent],
) -> dict[str, Any]:
  """Accounts for a round, takes its state and returns its metrics."""
  number = progress.round_number + 1
  row: dict[str, Any] = {
    'round': number,
    'participants': output.participants,
    'failed_clients': output.failed_clients,
    'clip_norm': output.clip_norm,
    'accuracy': '',
    'loss': '',
  }
  for unit, event in events.items():
    accountant = progress.accountants[unit].compose(event)
    delta = config.delta_of(unit, engine.mechanism)
    prefix = '' if unit == engine.mechanism.units[0] else f'{unit}_'
    row[f'{prefix}dp_epsilon'] = accountant.get_worst_case_epsilon(delta)
    row[f'{prefix}bdp_epsilon'] = accountant.get_epsilon(delta)
  budget = config.dp_epsilon_budget
  spent = budget is not None and row['dp_epsilon'] > budget
  if spent and progress.dp_stop is None:
    before = evaluate(progress.weights(engine))
    progress.dp_stop = {'round': progress.round_number, **before}
  progress.state = output.state
  _average(engine, config, progress)
  if number == config.rounds or number % config.evaluate_every == 0:
    row.update(evaluate(progress.weights(engine)))
  return row


def _average(
  engine: engine_lib.Engine, config: TrainingConfig, progress: Progress
) -> None:
  """Adds the newest weights to their exponential average."""
  factor = config.average_iterates
  if not factor:
    return
  weights = engine.model_weights(progress.state)
  before = progress.averaged or weights
  # The first weights count as much as any; see Kingma and Ba's correction.
  share = np.float32((1 - factor) / (1 - factor ** (progress.round_number + 1)))
  progress.averaged = [b + share * (w - b) for b, w in zip(before, weights)]


def _show(bar: tqdm.tqdm, row: Mapping[str, Any]) -> None:
  shown = {'DP ε': f'{row["dp_epsilon"]:.2f}'}
  shown['BDP ε'] = f'{row["bdp_epsilon"]:.2f}'
  if row['accuracy'] != '':
    shown['accuracy'] = f'{row["accuracy"]:.3f}'
  bar.set_postfix(shown)
  bar.update()


class _MetricsFile:
  """metrics.csv, written anew with the known rows and then row by row."""

  def __init__(
    self,
    directory: pathlib.Path,
    columns: Sequence[str],
    rows: list[dict[str, Any]],
  ):
    self._path = directory / METRICS_FILE
    self._columns = columns
    self._rows = rows

  def __enter__(self) -> '_MetricsFile':
    temporary = self._path.with_name(METRICS_FILE + '.part')
    with open(temporary, 'w', newline='', encoding='utf-8') as file:
      writer = csv.DictWriter(file, self._columns)
      writer.writeheader()
      writer.writerows(self._rows)
    os.replace(temporary, self._path)
    self._file = open(self._path, 'a', newline='', encoding='utf-8')
    return self

  def append(self, row: Mapping[str, Any]) -> None:
    csv.DictWriter(self._file, self._columns).writerow(row)
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
  arrays.update(_measured_to_arrays(progress.measured))
  for number, part in enumerate(progress.averaged or ()):
    arrays[f'averaged_{number}'] = part
  contents = {
    'settings': dict(settings),
    'round_number': progress.round_number,
    'accountants': {
      unit: accountant.state_dict()
      for unit, accountant in progress.accountants.items()
    },
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
  accountants = config.accountants(engine.mechanism)
  for unit, accountant in accountants.items():
    accountant.load_state_dict(contents['accountants'][unit])
  state = {
    name.removeprefix('engine_'): array
    for name, array in arrays.items()
    if name.startswith('engine_')
  }
  return Progress(
    round_number=contents['round_number'],
    state=engine.from_arrays(state),
    accountants=accountants,
    rows=contents['rows'],
    measured=_measured_from_arrays(arrays),
    dp_stop=contents['dp_stop'],
    stopped=contents['stopped'],
    averaged=_averaged_from_arrays(arrays),
  )


def _averaged_from_arrays(
  arrays: Mapping[str, np.ndarray],
) -> Optional[list[np.ndarray]]:
  count = sum(name.startswith('averaged_') for name in arrays)
  return [arrays[f'averaged_{number}'] for number in range(count)] or None


def _measured_to_arrays(measured: Sequence[Measured]) -> dict[str, np.ndarray]:
  """Returns what was measured in all rounds, each part in a row."""
  arrays: dict[str, list[Any]] = {
    'squared_measures': [part.squared_measures for part in measured],
    'taking_part': [part.taking_part for part in measured],
  }
  examples = [part.examples for part in measured if part.examples is not None]
  for name in instance_mechanism.ExampleGroups._fields if examples else ():
    arrays[f'examples_{name}'] = [getattr(part, name) for part in examples]
  reported = [part.reported for part in measured if part.reported is not None]
  for unit in reported[0] if reported else ():
    arrays[f'reported_{unit}'] = [[part[unit]] for part in reported]
  result = {
    name: np.concatenate(parts) for name, parts in arrays.items() if parts
  }
  for name in ('squared_measures', 'examples_clients'):
    sizes = [len(part) for part in arrays.get(name, ())]
    result[f'{name}_sizes'] = np.array(sizes, np.int64)
  return result


def _measured_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[Measured]:
  sizes = arrays['squared_measures_sizes']
  if not sizes.size:
    return []
  squared, taking_part = (
    _split(arrays[name], sizes) for name in ('squared_measures', 'taking_part')
  )
  reported = {
    name.removeprefix('reported_'): array
    for name, array in arrays.items()
    if name.startswith('reported_')
  }
  if reported:
    return [
      Measured(*parts, None, {u: array[i] for u, array in reported.items()})
      for i, parts in enumerate(zip(squared, taking_part))
    ]
  rounds = arrays['examples_clients_sizes']
  if not rounds.size:
    return [Measured(*parts) for parts in zip(squared, taking_part)]
  group_sizes = _split(arrays['examples_sizes'], rounds)
  units = np.array([np.sum(part) for part in group_sizes], np.int64)
  fields = [
    _split(
      arrays[f'examples_{name}'], units if name == 'squared_moves' else rounds
    )
    for name in instance_mechanism.ExampleGroups._fields
  ]
  examples = [
    instance_mechanism.ExampleGroups(*parts) for parts in zip(*fields)
  ]
  return [Measured(*parts) for parts in zip(squared, taking_part, examples)]


def _split(array: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
  return np.split(array, np.cumsum(sizes)[:-1])


def events_of(
  mechanism: engine_lib.Mechanism, config: TrainingConfig, progress: Progress
) -> dict[str, list[dp_accounting.DpEvent]]:
  """Returns what each unit's accountant was told, one event a round."""
  rounds = [
    _events(mechanism, config, measured, row['participants'], row['clip_norm'])
    for measured, row in zip(progress.measured, progress.rows)
  ]
  return {unit: [events[unit] for events in rounds] for unit in mechanism.units}


def local_epsilons(
  mechanism: instance_mechanism.InstanceMechanism,
  config: TrainingConfig,
  progress: Progress,
) -> dict[int, tuple[float, float]]:
  """Returns what each client's examples lost by all that it sent.

  The bound that a client keeps for itself if it does not trust the server.

  Returns:
    By client, ε of DP and of BDP.
  """
  delta = config.delta_of('example', mechanism)
  accountants: dict[int, accountant_lib.BayesianAccountant] = {}
  for measured, row in zip(progress.measured, progress.rows):
    assert measured.examples is not None
    events = mechanism.local_events(measured.examples, row['participants'])
    for client, event in events.items():
      if client not in accountants:
        accountants[client] = config.accountants(mechanism)['example']
      accountants[client].compose(event)
  return {
    client: (a.get_worst_case_epsilon(delta), a.get_epsilon(delta))
    for client, a in sorted(accountants.items())
  }
