"""Small runs at every level, from options as scripts have them."""

import contextlib
import csv
import functools

import numpy as np
import tensorflow as tf

from tf_bdp import options
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data
from tf_bdp.training import evaluation, loop, round_log
from tf_bdp.training import plan as plan_lib

CLIENTS, EXAMPLES, ROUNDS = 8, 12, 6
_GROUPS = {
  'accounting': plan_lib.Accounting,
  'schedule': plan_lib.Schedule,
  'seeds': plan_lib.Seeds,
}
_COMMON = {
  'noise_multiplier': 1.5,
  'learning_rate': 0.5,
  'momentum': 0.5,
  'client_learning_rate': 0.5,
  'client_batch_size': 6,
  'delta': 1e-3,
  'estimator': 'student_t',
  'rounds': ROUNDS,
  'evaluate_every': 2,
  'checkpoint_every': 2,
  'seed': 2,
  'sampling_seed': 2,
  'noise_seed': 3,
}
LEVELS = {
  'client': {'panel_size': 5},
  'instance_sequential': {'panel_size': 0},
  'instance_parallel': {
    'algorithm': 'fed_avg',
    'panel_examples': 3,
    'clipping': 'example',
    'panel_size': 4,
  },
  'instance_aggregate': {'server_noise_multiplier': 1.0, 'panel_size': 0},
  'joint': {'panel_examples': 4, 'panel_size': 5, 'example_delta': 1e-2},
  'split': {
    'algorithm': 'fed_avg',
    'server_noise_multiplier': 2.0,
    'panel_size': 0,
    'example_delta': 1e-2,
  },
}
UNITS = {
  level: (
    *(('client',) if level in ('client', 'joint', 'split') else ()),
    *(('example',) if level != 'client' else ()),
  )
  for level in LEVELS
}
# Each unit with the prefix of its columns.
LEVELS_AND_UNITS = [
  (level, unit, f'{unit}_' if unit != units[0] else '')
  for level, units in UNITS.items()
  for unit in units
]


def model():
  tf.keras.utils.set_random_seed(0)
  layers = [tf.keras.layers.Input((4,)), tf.keras.layers.Dense(3)]
  return tf.keras.Sequential(layers)


@functools.cache
def data():
  generator = np.random.default_rng(0)
  count = CLIENTS * EXAMPLES
  labels = generator.integers(0, 3, count)
  features = generator.normal(size=(count, 4)).astype(np.float32)
  features[np.arange(count), labels] += 2
  return federated_data.FederatedData(
    features, labels, np.array_split(np.arange(count), CLIENTS)
  )


def broken_data(*clients):
  """Data of which some clients overflow in the forward pass."""
  features = data().features.copy()
  for client in clients:
    features[data().indices(client)] = 3e38
  indices = [data().indices(client) for client in range(CLIENTS)]
  return federated_data.FederatedData(features, data().labels, indices)


def plan(level, **changes):
  """Makes the plan of a level from flat options, of any group."""
  values = {'level': level, **_COMMON, **LEVELS.get(level, {}), **changes}
  return plan_lib.Plan.of(
    data(),
    options.from_flat(plan_lib.Privacy, values),
    options.from_flat(algorithm_lib.Algorithm, values),
    **{name: options.from_flat(kind, values) for name, kind in _GROUPS.items()},
  )


@functools.cache
def engine(level):
  """The engine of a level; it does not depend on budgets or rounds."""
  return plan(level).engine(model, data())


@functools.cache
def evaluator():
  return evaluation.Evaluator(model(), data().features, data().labels)


def train(
  level, directory, *, runner=None, resume=False, settings=None, **changes
):
  return loop.train(
    runner or engine(level),
    plan(level, **changes),
    evaluator().evaluate,
    directory,
    settings=settings,
    resume=resume,
  )


@contextlib.contextmanager
def interrupted(runner, rounds, middle=False):
  """Lets a user interrupt an engine after some rounds, or in the next one."""
  release, done = runner.release, []

  def releases(*arguments):
    if len(done) == rounds:
      if middle:
        release(*arguments)
      raise KeyboardInterrupt
    done.append(None)
    return release(*arguments)

  runner.release = releases
  try:
    yield done
  finally:
    del runner.release


def rows(directory):
  """Reads metrics.csv, but for the time that rounds took."""
  with open(directory / round_log.METRICS_FILE, newline='') as file:
    return [
      {name: value for name, value in row.items() if name != 'seconds'}
      for row in csv.DictReader(file)
    ]


def check_same(one, other):
  """Compares the progress of two runs in all but the time they took."""
  assert [{**row, 'seconds': 0} for row in one.rows] == [
    {**row, 'seconds': 0} for row in other.rows
  ]
  for left, right in zip(
    tf.nest.flatten(one.state), tf.nest.flatten(other.state), strict=True
  ):
    np.testing.assert_array_equal(left, right)
  assert one.accountants.keys() == other.accountants.keys()
  for unit, accountant in one.accountants.items():
    assert accountant.state_dict() == other.accountants[unit].state_dict()
  assert one.events == other.events
  for left, right in zip(one.measurements, other.measurements, strict=True):
    for part, same in zip(
      tf.nest.flatten(left), tf.nest.flatten(right), strict=True
    ):
      np.testing.assert_array_equal(part, same)
  assert (one.stopped, one.dp_stop) == (other.stopped, other.dp_stop)
  for left, right in zip(one.averaged or (), other.averaged or (), strict=True):
    np.testing.assert_array_equal(left, right)
