"""Every level under secure aggregation, against the same run without it.

The run without is that of the other engine, to which TFF's is known to be
equal; here only what reaches the server differs.
"""

import dataclasses
import functools

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tree

from tf_bdp.accounting import BayesianAccountant
from tf_bdp.aggregators import cost_reports, secure_sums
from tf_bdp.engines import in_process as inprocess_engine
from tf_bdp.engines import tff as tff_engine
from tf_bdp.engines import tff_instance as tff_instance_engine
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data
from tf_bdp.mechanisms import client as mechanism
from tf_bdp.mechanisms import instance as instance_mechanism
from tf_bdp.training import loop as training

_CLIENTS, _EXAMPLES, _BATCH_SIZE, _CLIP = 8, 60, 50, 3.0
_PARTICIPATION, _DELTA = 0.4, 1e-2
_ORDERS = (1, 2, 8)  # Few, because graphs grow with them.
# Who takes part in the rounds.
_COHORTS = ((0, 1, 2, 3, 4, 5, 6), (), (0, 2, 3, 4, 5, 7))
# Level, algorithm and estimator.
_CASES = {
  'client': ('client', 'fed_avg', 'student_t'),
  'sequential': ('instance_sequential', 'fed_sgd', 'student_t'),
  'parallel': ('instance_parallel', 'fed_avg', 'bernstein'),
  'aggregate': ('instance_aggregate', 'fed_sgd', 'bernstein'),
  'joint': ('joint', 'fed_sgd', 'student_t'),
  'split': ('split', 'fed_sgd', 'bernstein'),
}


class _Config(training.TrainingConfig):
  """With few orders."""

  def _accountant(self, mechanism, unit):
    settings = super()._accountant(mechanism, unit).settings
    return BayesianAccountant(**{**settings, 'orders': _ORDERS})


class _Spy:
  """A process that keeps its metrics, which are all that the server learns."""

  def __init__(self, process):
    self._process = process
    self.metrics = []

  def __getattr__(self, name):
    return getattr(self._process, name)

  def next(self, *arguments):
    output = self._process.next(*arguments)
    self.metrics.append(output.metrics)
    return output


@pytest.fixture(scope='module', autouse=True)
def _context_before():
  before = tff.framework.get_context_stack().current
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      training, '_participants', lambda *arguments: list(_COHORTS[arguments[2]])
    )
    yield
  tff.framework.set_default_context(before)


def _model():
  tf.keras.utils.set_random_seed(3)
  layers = [tf.keras.layers.Input((4,)), tf.keras.layers.Dense(3)]
  return tf.keras.Sequential(layers)


@functools.cache
def _data():
  generator = np.random.default_rng(1)
  count = _CLIENTS * _EXAMPLES
  features = generator.normal(size=(count, 4)).astype(np.float32)
  labels = generator.integers(0, 3, count)
  return federated_data.FederatedData(
    features, labels, np.split(np.arange(count), _CLIENTS)
  )


def _config(estimator):
  return _Config(
    rounds=len(_COHORTS),
    client_count=_CLIENTS,
    delta=_DELTA,
    panel_size=0,
    estimator=estimator,
    example_estimator=estimator,
    checkpoint_every=1,
  )


def _mechanism(level, algorithm, noise=4.0):
  if level == 'client':
    return mechanism.GaussianMechanism(
      'mean', noise, _CLIP, _PARTICIPATION, _PARTICIPATION * _CLIENTS
    )
  return instance_mechanism.InstanceMechanism(
    level,
    noise,
    _CLIP,
    _BATCH_SIZE,
    _PARTICIPATION,
    _PARTICIPATION * _CLIENTS,
    total_examples=_CLIENTS * _EXAMPLES,
    smallest_holding=_EXAMPLES,
    server_noise_multiplier=3.0 if level == 'split' else 0.0,
    local_steps=algorithm.local_steps(_EXAMPLES, _BATCH_SIZE),
  )


def _engine(case, secure):
  level, algorithm, estimator = _CASES[case]
  algorithm = algorithm_lib.Algorithm(
    algorithm,
    learning_rate=0.5,
    client_learning_rate=0.3,
    client_batch_size=_BATCH_SIZE,
  )
  config = _config(estimator)
  parts = (_model, _data(), _mechanism(level, algorithm), algorithm)
  seeds = (
    {'noise_seed': 5} if level == 'client' else {'noise_seed': 5, 'seed': 7}
  )
  if not secure:
    return inprocess_engine.InProcessEngine(*parts, **seeds)
  make = tff_instance_engine.TffInstanceEngine
  if level == 'client':
    make = tff_engine.TffEngine
  runner = make(*parts, **seeds, reporting=config.reporting(parts[2]))
  runner._process = _Spy(runner._process)
  return runner


@functools.cache
def _secure_engine(case):
  return _engine(case, secure=True)


@pytest.fixture(name='runs', scope='module')
def _runs(tmp_path_factory):
  """Runs a case without and with secure aggregation, once."""

  @functools.cache
  def run(case):
    results = []
    for runner in (_engine(case, secure=False), _secure_engine(case)):
      progress = training.train(
        runner,
        _config(_CASES[case][2]),
        lambda weights: {'accuracy': 0.0, 'loss': 0.0},
        tmp_path_factory.mktemp(case),
        {},
      )
      results.append((runner, progress))
    return results

  return run


def _columns(case):
  both = _CASES[case][0] in ('joint', 'split')
  return ('', 'example_') if both else ('',)


@pytest.mark.parametrize('case', _CASES)
def test_the_same_clients_train_the_same_model(runs, case):
  (plain, wanted), (secure, found) = runs(case)
  assert [row['participants'] for row in found.rows] == [7, 0, 6]
  for one, other in zip(wanted.rows, found.rows, strict=True):
    assert one['participants'] == other['participants']
    assert one['failed_clients'] == other['failed_clients'] == 0
    assert one['clip_norm'] == pytest.approx(other['clip_norm'], rel=1e-6)
  for one, other in zip(
    plain.model_weights(wanted.state), secure.model_weights(found.state)
  ):
    # Coordinates are rounded to 2^-31 of their bound.
    np.testing.assert_allclose(one, other, atol=1e-5)
  moved = np.abs(one - plain.model_weights(plain.initial_state())[-1])
  assert np.max(moved) > 0.1


@pytest.mark.parametrize('case', _CASES)
def test_reported_costs_are_never_less_and_hardly_more(runs, case):
  (_, wanted), (_, found) = runs(case)
  for unit, accountant in found.accountants.items():
    # Of every order, with a tenth of δ for bounds that fail.
    plain = wanted.accountants[unit]._costs(0.1 * _DELTA)
    reported = accountant._costs(0.1 * _DELTA)
    # Less by no more than float32, in which the two engines measure distances.
    assert np.all(reported >= plain * (1 - 1e-6))
    # Maxima are rounded up by half a percent at most.
    assert np.all(reported <= plain * 1.006)
    # It is the estimate that is compared, and not the worst case, except that
    # this many clients are too few for Bernstein's bound.
    if (unit, _CASES[case][2]) != ('client', 'bernstein'):
      worst = accountant._worst_case_costs()
      assert np.all(reported[:2] < 0.96 * worst[:2])


@pytest.mark.parametrize('case', _CASES)
def test_epsilon_is_never_less_and_hardly_more(runs, case):
  (_, wanted), (_, found) = runs(case)
  for prefix in _columns(case):
    bdp, dp = f'{prefix}bdp_epsilon', f'{prefix}dp_epsilon'
    for one, other in zip(wanted.rows, found.rows):
      assert one[bdp] * (1 - 1e-6) <= other[bdp] <= one[bdp] * 1.02
      assert one[dp] == pytest.approx(other[dp], rel=1e-9)
    # Nobody came to the second round.
    first, second, last = found.rows
    assert second[bdp] == first[bdp] <= last[bdp]
    assert second[dp] == first[dp] < last[dp]


@pytest.mark.parametrize('case', _CASES)
def test_the_server_learns_no_value_of_a_single_client(runs, case):
  spy = runs(case)[1][0]._process
  assert len(spy.metrics) == len(_COHORTS)
  shapes = [
    {path: np.shape(leaf) for path, leaf in tree.flatten_with_path(metrics)}
    for metrics in spy.metrics
  ]
  # However many take part, it learns as many numbers: those of orders, of two
  # moments, and of local steps.
  assert shapes[0] == shapes[1] == shapes[2]
  orders = len(_ORDERS)
  steps = 2 if _CASES[case][1] == 'fed_avg' else 1
  assert set(shapes[0].values()) <= {
    *((), (orders,), (2, orders), (steps, orders))
  }
  names = {path[-1] for path in shapes[0]}
  assert not names & {'squared_measures', 'aggregate'}


@pytest.mark.parametrize('case', _CASES)
def test_all_aggregations_are_secure(case):
  process = _secure_engine(case)._process._process
  tff.test.assert_not_contains_unsecure_aggregation(process.next)


@pytest.mark.parametrize('case', _CASES)
def test_nothing_is_measured_but_costs(runs, case):
  for measured in runs(case)[1][1].measured:
    assert measured.squared_measures.size == 0
    assert measured.examples is None
    assert all(
      cost.shape == (len(_ORDERS),) for cost in measured.reported.values()
    )


def test_a_run_with_reported_costs_is_resumed_as_it_was(runs, tmp_path):
  _, (secure, found) = runs('joint')
  path = tmp_path / 'run'
  whole, run_round, done = found, secure.run_round, []

  def interrupted(*arguments):
    if len(done) == 2:
      raise KeyboardInterrupt
    done.append(None)
    return run_round(*arguments)

  arguments = (_config('student_t'), lambda _: {'accuracy': 0.0, 'loss': 0.0})
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(secure, 'run_round', interrupted)
    with pytest.raises(KeyboardInterrupt):
      training.train(secure, *arguments, path, {})
  resumed = training.train(secure, *arguments, path, {}, resume=True)
  for one, other in zip(whole.rows, resumed.rows, strict=True):
    assert {**one, 'seconds': 0} == {**other, 'seconds': 0}
  for unit, accountant in whole.accountants.items():
    assert accountant.state_dict() == resumed.accountants[unit].state_dict()
  for one, other in zip(whole.measured, resumed.measured, strict=True):
    for unit in ('client', 'example'):
      np.testing.assert_array_equal(one.reported[unit], other.reported[unit])


@pytest.mark.parametrize('level', ['client', 'joint', 'split'])
def test_without_noise_reported_costs_are_infinite_and_the_round_not_private(
  level,
):
  quiet = _mechanism('client', algorithm_lib.Algorithm(), noise=0.0)
  if level != 'client':
    quiet = dataclasses.replace(
      _mechanism(level, algorithm_lib.Algorithm()),
      noise_multiplier=0.0,
      server_noise_multiplier=0.0,
    )
  reporting = _config('student_t').reporting(quiet)['client']
  costs = cost_reports.bound_of_client_costs({}, np.inf, 0.5, reporting)
  np.testing.assert_array_equal(costs, [np.inf] * len(_ORDERS))
  event = quiet.reported_event('client', costs, 1e-6, 3)
  assert isinstance(event, dp_accounting.NonPrivateDpEvent)


def test_a_panel_is_refused_where_costs_are_reported():
  mechanism_ = _mechanism('joint', algorithm_lib.Algorithm())
  config = training.TrainingConfig(
    rounds=2, client_count=_CLIENTS, delta=_DELTA, panel_size=4
  )
  with pytest.raises(ValueError, match="Only with composition='holder'"):
    config.reporting(mechanism_)


def test_the_simulation_runs_secure_sums():
  _secure_engine('client')
  secure_sums.check_context()
