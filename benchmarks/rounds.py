"""Speed and memory of private rounds against named alternatives.

The MNIST CNN of TF Privacy's tutorial (26,010 weights), 100 clients with 60
examples each. Alternatives: the bare gradient of the same 6,000 examples taken
as one batch, and TFF's own `build_fed_sgd` with `gaussian_fixed`. All in this
process, in turn; the fastest of several runs counts.
"""

import resource
import subprocess
import sys
import time
from typing import Callable

import numpy as np
import tensorflow as tf
from absl import app, flags

from benchmarks import timing
from experiments import models
from tf_bdp import accounting, mechanisms, training
from tf_bdp.engines import base as engines
from tf_bdp.engines import client_updates, in_process
from tf_bdp.learning import algorithm, federated_data, losses
from tf_bdp.mechanisms import base as mechanism_base

_TFF = flags.DEFINE_bool('tff', True, 'Whether to time TFF as well.')
_BARE_ONLY = flags.DEFINE_bool(
  'bare_only',
  False,
  "Only time the bare gradient, with TensorFlow's own choice of threads.",
)
_REPEATS = flags.DEFINE_integer('repeats', 7, 'Runs of each.')
_CLIENTS, _EXAMPLES = 100, 60


def _data(
  clients: int, examples: int = _EXAMPLES
) -> federated_data.FederatedData:
  generator = np.random.default_rng(0)
  size = _CLIENTS * _EXAMPLES
  features = generator.random((size, 28, 28, 1), dtype=np.float32)
  labels = generator.integers(0, 10, size)
  indices = [
    generator.choice(size, examples, replace=False) for _ in range(clients)
  ]
  return federated_data.FederatedData(features, labels, indices)


def _engine(
  data: federated_data.FederatedData,
  mechanism: mechanisms.Mechanism,
  model_fn: Callable[[], tf.keras.Model] = lambda: models.mnist_cnn(0),
) -> in_process.InProcessEngine:
  plan = training.Plan(
    mechanism,
    data.client_count,
    algorithm.Algorithm(learning_rate=0.1, momentum=0.0),
  )
  engine = plan.engine(model_fn, data)
  assert isinstance(engine, in_process.InProcessEngine)
  return engine


def _client_level(kind: str = 'mean') -> mechanisms.ClientMechanism:
  return mechanisms.ClientMechanism(kind, 1.0, 1.0, 1.0, _CLIENTS)


def _instance_level(clipping: str) -> mechanisms.InstanceMechanism:
  return mechanisms.InstanceMechanism(
    'parallel',
    noise_multiplier=1.0,
    clip_norm=1.0,
    batch_size=_EXAMPLES,  # All of a client's.
    participation_probability=1.0,
    clients_per_round=_CLIENTS,
    total_examples=_CLIENTS * _EXAMPLES,
    clipping=clipping,
  )


def _account(done: engines.Round) -> float:
  """Returns epsilon of a round, of clients in a panel or of examples."""
  ((unit, event),) = done.events.items()
  accountant = accounting.BayesianAccountant()
  if unit == 'example':
    accountant = accounting.BayesianAccountant(
      'holder', estimator='bernstein', total_rounds=100
    )
  return accountant.compose(event).get_epsilon(1e-3)


def _private_round(engine: in_process.InProcessEngine) -> Callable[[], object]:
  """A round with all distances, accounted for."""
  state, everybody = engine.initial_state(), list(range(_CLIENTS))
  panel = everybody if 'client' in engine.mechanism.units else []
  return lambda: _account(engine.run_round(state, 0, everybody, panel))


def _bare_gradient(data: federated_data.FederatedData) -> Callable[[], object]:
  model = models.mnist_cnn(0)
  held = np.concatenate([data.indices(c) for c in range(_CLIENTS)])
  features = tf.constant(data.features[held])
  labels = tf.constant(data.labels[held])

  @tf.function
  def gradient() -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
      loss = losses.LOSS(labels, model(features, training=True))
    return tape.gradient(loss, model.trainable_variables)

  return lambda: [part.numpy() for part in gradient()]


def _tff_round(data: federated_data.FederatedData) -> Callable[[], object]:
  import tensorflow_federated as tff

  from tf_bdp.aggregators import runtime

  runtime.reap_on_exit()
  datasets = [
    tf.data.Dataset.from_tensor_slices(
      (data.features[data.indices(c)], data.labels[data.indices(c)])
    ).batch(_EXAMPLES)
    for c in range(_CLIENTS)
  ]
  process = tff.learning.algorithms.build_fed_sgd(
    lambda: tff.learning.models.from_keras_model(
      models.mnist_cnn(0),
      loss=losses.LOSS,
      input_spec=datasets[0].element_spec,
    ),
    server_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
    model_aggregator=tff.aggregators.as_weighted_aggregator(
      tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
        1.0, _CLIENTS, 1.0
      )
    ),
  )
  state = process.initialize()
  return lambda: process.next(state, datasets)


def _compare() -> None:
  data = _data(_CLIENTS)
  rounds = {
    'bare gradient, one batch': _bare_gradient(data),
    **{
      name: _private_round(_engine(data, mechanism))
      for name, mechanism in {
        'private round, mean': _client_level('mean'),
        'private round, sum': _client_level('sum'),
        'instance level, by batch': _instance_level('batch'),
        'instance level, by example': _instance_level('example'),
      }.items()
    },
  }
  if _TFF.value:
    rounds['TFF, gaussian_fixed'] = _tff_round(data)
    models.mnist_cnn(0)  # Keras binds its classes to the last graph mode.
  seconds = timing.fastest_in_turn(rounds, _REPEATS.value)
  # With one thread an operation the bare gradient is at a disadvantage here.
  output = subprocess.check_output(
    [sys.executable, '-m', 'benchmarks.rounds', '--bare_only'],
    stderr=subprocess.DEVNULL,
  )
  seconds['bare gradient, own process'] = float(output)
  bare = seconds['bare gradient, one batch']
  print('100 clients x 60 examples, 26,010 weights: seconds, ratio to bare')
  for name, value in seconds.items():
    print(f'  {name:<28}{value:8.3f}{value / bare:8.2f}x')


def _where_time_goes() -> None:
  data = _data(_CLIENTS)
  engine = _engine(data, _client_level())
  state, everybody = engine.initial_state(), list(range(_CLIENTS))
  done = engine.run_round(state, 0, everybody, everybody)
  inputs = client_updates.RoundInputs(
    0, state.aggregation.clip_norm, state.last_mean
  )

  def compute() -> list[client_updates.Chunk]:
    return [chunk for _, chunk in engine._updates.chunks(inputs, everybody)]

  updates = [chunk.updates for chunk in compute()]
  total = np.sum(np.concatenate(updates), 0)
  sums = mechanism_base.Sums([total], np.float32(_CLIENTS), np.float32(0))

  def step() -> object:
    released = engine._aggregation.release(
      state.aggregation, sums, lambda *noised: engine._noised(0, *noised)
    )
    return engine._next_state(state, 0, released)

  parts: dict[str, Callable[[], object]] = {
    'whole round': lambda: engine.run_round(state, 0, everybody, everybody),
    'gradients and clipping': compute,
    'distances from the mean': lambda: engine._deviations(
      everybody, inputs, total / _CLIENTS, updates
    ),
    'noise and step': step,
    'accounting, with epsilon': lambda: _account(done),
  }
  print('\nWhere the time of a round goes (seconds):')
  for name, value in timing.fastest_in_turn(parts, _REPEATS.value).items():
    print(f'  {name:<28}{value:8.4f}')


def _many_clients() -> None:
  print('\n100 participants of N clients (seconds a participant, memory):')
  for clients in (100, 1000, 10_000):
    engine = _engine(_data(clients), _client_level())
    state = engine.initial_state()
    chosen = list(range(0, clients, clients // 100))
    run = {'': lambda e=engine, s=state, c=chosen: e.run_round(s, 0, c, [])}
    seconds = timing.fastest_in_turn(run, _REPEATS.value)['']
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f'  N = {clients:>6}{seconds / 100:10.5f} s{peak:8.2f} GiB peak')


def large_model() -> tf.keras.Model:
  """A CNN as that of TensorFlow's old tutorial: 1,663,370 weights."""
  tf.keras.utils.set_random_seed(0)
  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      layers.Input((28, 28, 1)),
      layers.Conv2D(32, 5, padding='same', activation='relu'),
      layers.MaxPool2D(2),
      layers.Conv2D(64, 5, padding='same', activation='relu'),
      layers.MaxPool2D(2),
      layers.Flatten(),
      layers.Dense(512, activation='relu'),
      layers.Dense(10),
    ]
  )


def _memory() -> None:
  data = _data(_CLIENTS, 10)
  engine = _engine(data, _client_level(), large_model)
  state, everybody = engine.initial_state(), list(range(_CLIENTS))
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  start = time.perf_counter()
  engine.run_round(state, 0, everybody, everybody)
  seconds = time.perf_counter() - start
  after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  print(
    f'\n100 clients x {state.weights.size:,} weights, all distances: '
    f'+{(after - before) / 2**20:.2f} GiB, {seconds:.1f} s'
  )


def main(argv: list[str]) -> None:
  """Prints all tables."""
  del argv
  if _BARE_ONLY.value:
    bare = {'': _bare_gradient(_data(_CLIENTS))}
    print(timing.fastest_in_turn(bare, _REPEATS.value)[''])
    return
  in_process.compute_clients_in_parallel()
  _memory()  # First: peaks only rise.
  _many_clients()
  _where_time_goes()
  _compare()


if __name__ == '__main__':
  app.run(main)
