"""The cases that all engines must do alike; each is built and run once.

A task is a model with data and rounds of who takes part. A case is a task with
a mechanism and an algorithm. Everything is cached: TFF's processes take seconds
to build, so tests look at the same few runs.
"""

import dataclasses
import functools
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import pytest
import tensorflow as tf

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.engines import in_process, tff
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data, sampling
from tf_bdp.mechanisms import (
  AdaptiveClipping,
  ClientMechanism,
  InstanceMechanism,
  JointMechanism,
  SplitMechanism,
)
from tf_bdp.mechanisms import measurements as measurements_lib

NOISE_SEED = 5
PARTICIPATION, CLIENTS_PER_ROUND = 0.4, 4.0
# Few, because graphs of reported costs grow with them.
ORDERS = (1, 2, 8)
DELTA = 1e-2
ENGINES = {
  'inprocess': in_process.InProcessEngine,
  'tff': tff.TffEngine,
  'secure': tff.TffEngine,
}
_SIZES = (5, 3, 7, 4, 3, 9, 5, 6, 3, 4, 4, 0)
# Their forward pass overflows; the squares of their gradients do; no examples.
OVERFLOWING, HUGE, EMPTY = 9, 10, 11


class Task(NamedTuple):
  """What is learnt, from whom, and who takes part in the rounds."""

  model: Callable[[], tf.keras.Model]
  data: Callable[[], federated_data.FederatedData]
  cohorts: tuple[tuple[int, ...], ...]
  panel: tuple[int, ...]
  batch_size: int
  clip_norm: float


def _relu(inputs):
  """Overflows early, for all of the overflowing client's examples."""
  return tf.where(tf.abs(inputs) > 1e30, np.inf, tf.nn.relu(inputs))


def conv_model():
  tf.keras.utils.set_random_seed(3)
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      layers.Input((4, 4, 1)),
      layers.Conv2D(2, 3, activation=_relu, bias_initializer='ones'),
      layers.Flatten(),
      layers.Dense(3),
    ]
  )


def _linear_model():
  tf.keras.utils.set_random_seed(3)
  layers = [tf.keras.layers.Input((4,)), tf.keras.layers.Dense(3)]
  return tf.keras.Sequential(layers)


@functools.cache
def images(sizes=_SIZES, seed=1):
  """Returns small images; some clients are extreme if there are so many."""
  generator = np.random.default_rng(seed)
  ends = np.cumsum(sizes)
  features = generator.normal(size=(ends[-1], 4, 4, 1)).astype(np.float32)
  labels = generator.integers(0, 3, ends[-1])
  clients = np.split(np.arange(ends[-1]), ends[:-1])
  if sizes == _SIZES:
    features[clients[OVERFLOWING]] *= 3e37
    features[clients[HUGE]] *= 1e24
  return federated_data.FederatedData(features, labels, clients)


@functools.cache
def _vectors():
  generator = np.random.default_rng(1)
  features = generator.normal(size=(9 * 60, 4)).astype(np.float32)
  labels = generator.integers(0, 3, 9 * 60)
  clients = np.split(np.arange(9 * 60), 9)
  features[clients[8]] *= 1e38
  return federated_data.FederatedData(features, labels, clients)


# A few examples each. Several clients, one, nobody, one of them failing,
# extreme ones, nobody left, one left.
SMALL = Task(
  conv_model,
  images,
  (
    *((0, 1, 2, 3, 5), (4,), (), (2, OVERFLOWING, 6)),
    *((1, HUGE, 5, EMPTY), (OVERFLOWING,), (OVERFLOWING, 6)),
  ),
  panel=(1, 4, 6, 2, OVERFLOWING),
  batch_size=3,
  clip_norm=1.22,
)
# Enough examples for a client to bound the mean of their costs. The last client
# fails.
LARGE = Task(
  _linear_model,
  _vectors,
  ((0, 1, 2, 3, 4, 5, 6), (), (0, 2, 3, 4, 5, 7), (1, 2, 5, 6, 8)),
  panel=(),
  batch_size=50,
  clip_norm=3.0,
)

LEVELS = {
  'mean': functools.partial(ClientMechanism, 'mean'),
  'sum': functools.partial(ClientMechanism, 'sum'),
  'sequential': functools.partial(InstanceMechanism, 'sequential'),
  'parallel': functools.partial(InstanceMechanism, 'parallel'),
  'aggregate': functools.partial(InstanceMechanism, 'aggregate'),
  'joint': functools.partial(JointMechanism, 'aggregate'),
  'split': functools.partial(SplitMechanism, 'parallel'),
}
CLIENT_LEVELS = ('mean', 'sum')
# Where clients with unusable updates take part with updates of zero.
COUNTING_LEVELS = ('mean', 'split')


@dataclasses.dataclass(frozen=True)
class Case:
  """A task with a mechanism and an algorithm.

  Attributes:
    level: One of `LEVELS`.
    algorithm: How clients learn.
    options: More of the mechanism.
    engines: Which of the engines can do it.
    task: What they learn.
    estimator: Of the accountants.
  """

  level: str
  algorithm: algorithm_lib.Algorithm
  options: dict[str, Any]
  engines: tuple[str, ...] = ('inprocess', 'tff')
  task: Task = SMALL
  estimator: str = 'bernstein'

  @property
  def by_clients(self) -> bool:
    """Whether clients add noise."""
    return self.level not in CLIENT_LEVELS

  @property
  def panel_examples(self) -> int:
    """How many examples of a client are measured in every round."""
    return self.options.get('panel_examples', 0)


def _sgd(**options):
  return algorithm_lib.Algorithm(
    'fed_sgd', **{'learning_rate': 0.5, 'momentum': 0.0, **options}
  )


def _avg(**options):
  return algorithm_lib.Algorithm(
    'fed_avg',
    **{
      'learning_rate': 0.5,
      'momentum': 0.0,
      'client_learning_rate': 0.3,
      'client_batch_size': 3,
      **options,
    },
  )


_NOISE = {'noise_multiplier': 3.0}
_ADAPTIVE = {**_NOISE, 'adaptive': AdaptiveClipping(0.6)}
_OWN = {'noise_multiplier': 0.4}
_BOTH = {**_OWN, 'server_noise_multiplier': 1.0}
_INPROCESS, _SECURE = ('inprocess',), ('inprocess', 'secure')

CASES = {
  'mean_quiet': Case('mean', _sgd(), {'noise_multiplier': 0.0}),
  'mean': Case(
    'mean',
    _sgd(
      momentum=0.6,
      learning_rate_decay=0.9,
      client_loss='balanced',
      examples_per_round=4,
    ),
    _ADAPTIVE,
  ),
  'mean_steps': Case(
    'mean',
    _avg(momentum=0.6, client_epochs=2),
    {**_NOISE, 'least_participants': 3},
  ),
  'sum': Case('sum', _sgd(momentum=0.6, client_loss='calibrated'), _NOISE),
  'sum_steps': Case('sum', _avg(client_epochs=2), _ADAPTIVE),
  'sequential': Case('sequential', _sgd(), _OWN),
  'parallel_panel': Case('parallel', _avg(), {**_OWN, 'panel_examples': 3}),
  'aggregate': Case('aggregate', _sgd(), {**_BOTH, 'clipping': 'example'}),
  'joint_panel': Case(
    'joint', _sgd(momentum=0.6), {**_OWN, 'panel_examples': 4}
  ),
  'joint_last_mean': Case(
    'joint', _sgd(), {**_OWN, 'reference_is_last_mean': True}, _INPROCESS
  ),
  'split': Case('split', _sgd(), _BOTH),
  'split_steps': Case(
    'split', _avg(), {**_BOTH, 'clipping': 'example', 'panel_examples': 3}
  ),
}
_LOUD = {'noise_multiplier': 4.0}
SECURE_CASES = {
  # One more than the least number, nobody, as many, and one less.
  'secure_mean_steps': Case(
    'mean',
    _avg(client_batch_size=50),
    {**_LOUD, 'least_participants': 6},
    _SECURE,
    LARGE,
    'student_t',
  ),
  'secure_sequential': Case(
    'sequential', _sgd(), _LOUD, _SECURE, LARGE, 'student_t'
  ),
  'secure_parallel_steps': Case('parallel', _avg(), _LOUD, _SECURE, LARGE),
  'secure_aggregate': Case('aggregate', _sgd(), _LOUD, _SECURE, LARGE),
  'secure_joint': Case('joint', _sgd(), _LOUD, _SECURE, LARGE, 'student_t'),
  'secure_split': Case(
    'split', _sgd(), {**_LOUD, 'server_noise_multiplier': 3.0}, _SECURE, LARGE
  ),
}
ALL_CASES = {**CASES, **SECURE_CASES}
# Of engines other than the one in process, only the slow suite runs these:
# others have the same parts.
SLOW_CASES = (
  *('mean_quiet', 'sum_steps', 'parallel_panel', 'aggregate', 'split_steps'),
  *('secure_sequential', 'secure_parallel_steps', 'secure_aggregate'),
  'secure_split',
)


def cases_of(*levels, engines=tuple(ENGINES)):
  """Returns (engine, case) for all engines that can do a case of the levels."""
  return [
    (name, case)
    for case, parts in ALL_CASES.items()
    for name in parts.engines
    if name in engines and (not levels or parts.level in levels)
  ]


def mechanism_of(level, algorithm, data, task=SMALL, **options):
  """Makes a mechanism for the data."""
  settings = {
    'clip_norm': task.clip_norm,
    'participation_probability': PARTICIPATION,
    'clients_per_round': CLIENTS_PER_ROUND,
  }
  if level not in CLIENT_LEVELS:
    batch_size = options.get('batch_size', task.batch_size)
    settings |= {
      'batch_size': batch_size,
      'total_examples': sum(data.holdings),
      'smallest_holding': min(filter(None, data.holdings)),
      'local_steps': algorithm.local_steps(max(data.holdings), batch_size),
    }
  return LEVELS[level](**{**settings, **options})


def sampler_of(data, seed=7):
  return sampling.Sampler(data.client_count, PARTICIPATION, seed=seed)


class Spy:
  """A process that keeps its metrics, which are all that the server learns."""

  def __init__(self, process):
    self.process = process
    self.metrics = []

  def __getattr__(self, name):
    return getattr(self.process, name)

  def next(self, *arguments):
    output = self.process.next(*arguments)
    self.metrics.append(output.metrics)
    return output


def make_engine(name, case, noise_seed: Optional[int] = NOISE_SEED, **options):
  """Builds an engine anew; `engine` keeps them."""
  parts = ALL_CASES[case]
  data = parts.task.data()
  mechanism = mechanism_of(
    parts.level, parts.algorithm, data, parts.task, **parts.options
  )
  if name == 'secure':
    options['reporting'] = {
      unit: accountant.reporting(DELTA)
      for unit, accountant in accountants(case, mechanism, panel=()).items()
    }
  runner = ENGINES[name](
    parts.task.model,
    data,
    mechanism=mechanism,
    algorithm=parts.algorithm,
    sampler=sampler_of(data),
    noise_seed=noise_seed,
    **options,
  )
  if name == 'secure':
    runner._process = Spy(runner._process)
  return runner


engine = functools.cache(make_engine)


def accountants(case, mechanism, panel):
  """Returns fresh accountants for all rounds of a case."""
  parts = ALL_CASES[case]
  rounds, clients = len(parts.task.cohorts), parts.task.data().client_count
  result = {}
  for unit in mechanism.units:
    settings = {'composition': 'panel'}
    if not mechanism.is_panel(unit, len(panel)):
      total = mechanism.cost_count(unit, rounds, clients)
      settings = {'composition': 'holder', 'total_rounds': total}
    result[unit] = accountant_lib.BayesianAccountant(
      estimator=parts.estimator,
      neighboring_relation=mechanism.relation(unit),
      orders=ORDERS,
      **settings,
    )
  return result


def run(runner, cohorts, panel=(), state=None, first=0):
  """Runs rounds one after the other."""
  state = runner.initial_state() if state is None else state
  done = []
  for number, cohort in enumerate(cohorts, first):
    done.append(runner.run_round(state, number, list(cohort), list(panel)))
    state = done[-1].state
  return done


@functools.cache
def rounds(name, case):
  """Runs all rounds of a case, with its panel."""
  task = ALL_CASES[case].task
  return run(engine(name, case), task.cohorts, task.panel)


@functools.cache
def rounds_without_panel(name, case):
  """Runs two rounds of a case without a panel: of several, and of one."""
  return run(engine(name, case), ALL_CASES[case].task.cohorts[:2])


def flat(runner, state):
  """Returns the weights as one vector."""
  weights = runner.model_weights(state)
  return np.concatenate([np.ravel(w) for w in weights]).astype(np.float64)


def released(name, case, number):
  """Returns what a round released, from the steps that the server took."""
  runner, algorithm = engine(name, case), ALL_CASES[case].algorithm
  states = [runner.initial_state(), *(r.state for r in rounds(name, case))]
  weights = [flat(runner, state) for state in states[: number + 2]]
  before, velocity = 0.0, 0.0
  for i in range(number + 1):
    step = weights[i] - weights[i + 1]
    before, velocity = velocity, step / algorithm.learning_rate_at(i)
  return velocity - algorithm.momentum * before


def check_same_measurements(one, other):
  """Compares what two engines measured in a round."""
  assert one.participants == other.participants
  assert one.failed_clients == other.failed_clients
  assert one.clip_norm == pytest.approx(other.clip_norm, rel=1e-5)
  assert one.panel == other.panel
  np.testing.assert_array_equal(one.taking_part, other.taking_part)
  # Without a panel TFF does not say whose they are.
  order = (lambda values: values) if one.panel else np.sort
  np.testing.assert_allclose(
    order(one.squared_measures),
    order(other.squared_measures),
    rtol=1e-4,
    atol=1e-6,
  )
  assert (one.examples is None) == (other.examples is None)
  if one.examples is None:
    return
  one, other = _sorted(one.examples), _sorted(other.examples)
  for field in {*one._fields} - {'squared_moves'}:
    np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
  np.testing.assert_allclose(
    one.squared_moves, other.squared_moves, rtol=2e-3, atol=1e-6
  )


def _sorted(groups):
  """TFF's clients answer in any order."""
  rows = zip(
    *(groups.clients, groups.steps, groups.holdings),
    *(groups.moves(), groups.in_every_round),
  )
  return measurements_lib.ExampleGroups.of(
    sorted(rows, key=lambda row: (row[0], row[1]))
  )
