"""Tests of metrics of TFF processes, against the measurements of an engine."""

import functools

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.mechanisms import builders
from tf_bdp import aggregators, engines, learning
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import events, privacy_report, recorded_distances
from tf_bdp.aggregators import cost_reports, runtime
from tf_bdp.learning import instance_processes, losses
from tf_bdp.mechanisms import client

_HOLDINGS = (12, 9, 15, 6, 10)
_COHORT = (3, 0, 2, 4)
_DELTA = 1e-3
_ORDERS = (1, 2, 4, 8)
_SEED = 5
_SPEC = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None], tf.int64))
pytestmark = builders.ignore_best_order


def _keras_model():
  initializer = tf.keras.initializers.GlorotUniform(seed=3)
  layers = [
    tf.keras.layers.Input((3,)),
    tf.keras.layers.Dense(2, kernel_initializer=initializer),
  ]
  return tf.keras.Sequential(layers)


def _tff_model():
  return tff.learning.models.from_keras_model(
    _keras_model(), loss=losses.LOSS, input_spec=_SPEC
  )


@functools.cache
def _data():
  generator = np.random.default_rng(1)
  ends = np.cumsum(_HOLDINGS)
  features = generator.normal(size=(ends[-1], 3)).astype(np.float32)
  labels = generator.integers(0, 2, ends[-1])
  order = generator.permutation(ends[-1])
  return learning.FederatedData(features, labels, np.split(order, ends[:-1]))


@functools.cache
def _mechanism(level):
  if level in client.KINDS:
    return client.ClientMechanism(level, 3.0, 0.4, 0.8, 4.0)
  algorithm = 'fed_avg' if level == 'fed_avg' else 'fed_sgd'
  more = {'server_noise_multiplier': 3.0} if level == 'split' else {}
  return builders.make_mechanism(
    'instance_parallel' if level == 'fed_avg' else level,
    noise_multiplier=3.0,
    clip_norm=0.4,
    batch_size=6,
    participation_probability=0.8,
    clients_per_round=4.0,
    total_examples=sum(_HOLDINGS),
    smallest_holding=min(_HOLDINGS),
    local_steps=3 if algorithm == 'fed_avg' else 1,
    **more,
  )


def _algorithm(level):
  return learning.Algorithm('fed_avg' if level == 'fed_avg' else 'fed_sgd')


def _batches(level):
  sampler = learning.Sampler(len(_HOLDINGS), seed=2)
  return learning.ExampleBatches(
    _data(), _mechanism(level), _algorithm(level), sampler
  )


def _datasets(level):
  if level in client.KINDS:
    data = _data()
    rows = [data.indices(number) for number in _COHORT]
    return [
      tf.data.Dataset.from_tensors((data.features[row], data.labels[row]))
      for row in rows
    ]
  return [learning.part_dataset(_batches(level), 0, c) for c in _COHORT]


@functools.cache
def _metrics(level):
  """Of the first round of a TFF process."""
  if level in client.KINDS:
    process = learning.build_fed_sgd(
      _tff_model, aggregators.ClientPrivacyFactory(_mechanism(level))
    )
  else:
    process = learning.build_private_process(
      _keras_model, _batches(level), noise_seed=_SEED
    )
  return process.next(process.initialize(), _datasets(level)).metrics


@functools.cache
def _round(level):
  """The same round, in this process."""
  engine = engines.InProcessEngine(
    _keras_model,
    _data(),
    mechanism=_mechanism(level),
    algorithm=_algorithm(level),
    sampler=learning.Sampler(len(_HOLDINGS), seed=2),
    noise_seed=_SEED,
  )
  return engine.run_round(engine.initial_state(), 0, list(_COHORT), [])


def _accountant(estimator, power):
  return accountant_lib.BayesianAccountant(
    'holder', estimator=estimator, orders=_ORDERS, total_rounds=power
  )


def _epsilon(event, estimator='population', power=100):
  accountant = _accountant(estimator, power).compose(event)
  return accountant.get_epsilon(_DELTA), accountant.ledger


_LEVELS = ('mean', 'sum', *builders.LEVELS, 'fed_avg')


@pytest.mark.parametrize('level', _LEVELS)
def test_metrics_say_what_an_engine_measures(level):
  found = learning.measurements_from_metrics(_metrics(level), _mechanism(level))
  wanted = _round(level).measurements
  assert found.participants == wanted.participants == len(_COHORT)
  assert found.failed_clients == wanted.failed_clients == 0
  assert found.clip_norm == pytest.approx(wanted.clip_norm)
  assert not found.panel
  assert found.reported is None
  if 'client' in _mechanism(level).units:
    np.testing.assert_allclose(
      np.sort(found.squared_measures),
      np.sort(wanted.squared_measures),
      rtol=1e-4,
    )
    assert np.all(found.taking_part)
  if level in client.KINDS:
    assert found.examples is wanted.examples is None
    return
  one, other = (_sorted(part.examples) for part in (found, wanted))
  assert one.keys() == other.keys()
  for group, (*facts, moves) in one.items():
    *wanted_facts, wanted_moves = other[group]
    assert facts == wanted_facts
    np.testing.assert_allclose(
      np.sort(moves), np.sort(wanted_moves), rtol=1e-4, atol=1e-6
    )


def _sorted(groups):
  """Holding, size, whether always, and moves, by client and step."""
  return {
    (int(number), int(step)): (holding, size, always, moves)
    for number, step, holding, size, always, moves in zip(
      *groups[:4], groups.in_every_round, groups.moves()
    )
  }


@pytest.mark.parametrize('level', _LEVELS)
def test_events_of_metrics_are_those_of_an_engine(level):
  found = learning.events_from_metrics(_metrics(level), _mechanism(level))
  wanted = _round(level).events
  assert tuple(found) == tuple(wanted) == _mechanism(level).units
  for unit, event in found.items():
    assert type(event) is type(wanted[unit])
    epsilon, ledger = _epsilon(event)
    wanted_epsilon, wanted_ledger = _epsilon(wanted[unit])
    assert epsilon == pytest.approx(wanted_epsilon, rel=1e-4)
    assert ledger == wanted_ledger


def test_metrics_of_the_aggregator_alone_make_the_same_events():
  metrics, mechanism = _metrics('sum'), _mechanism('sum')
  assert learning.events_from_metrics(
    metrics, mechanism
  ) == learning.events_from_metrics(metrics['aggregator'], mechanism)


@pytest.mark.parametrize('level', ['joint', 'split', 'instance_sequential'])
def test_secure_metrics_cost_no_less_than_an_engine_measures(level):
  mechanism, batches = _mechanism(level), _batches(level)
  powers = {'client': 1, 'example': mechanism.cost_count('example', 1, 5)}
  reporting = {
    unit: _accountant('student_t', powers[unit]).reporting(_DELTA)
    for unit in mechanism.units
  }
  before = tff.framework.get_context_stack().current
  runtime.use_simulation_context()
  try:
    costs = cost_reports.ExampleCosts(mechanism, max(_HOLDINGS), reporting)
    clips = mechanism.aggregation.clips
    process = instance_processes.build_process(
      _keras_model,
      instance_processes.build_client_work(_keras_model, batches, costs, _SEED),
      learning.build_aggregator(
        mechanism,
        noise_seed=_SEED,
        summation=aggregators.SecureSummation(None if clips else 20.0),
        measurement=(
          aggregators.ClientCosts(reporting['client']) if clips else None
        ),
      ),
    )
    tff.test.assert_not_contains_unsecure_aggregation(process.next)
    output = process.next(process.initialize(), _datasets(level))
  finally:
    tff.framework.set_default_context(before)
  found = learning.events_from_metrics(output.metrics, mechanism, reporting)
  wanted = _round(level).events
  assert tuple(found) == mechanism.units
  for unit, event in found.items():
    epsilon, ledger = _epsilon(event, 'student_t', powers[unit])
    exact, wanted_ledger = _epsilon(wanted[unit], 'student_t', powers[unit])
    assert exact * (1 - 1e-4) <= epsilon <= exact * 1.01
    assert ledger == wanted_ledger
  measured = learning.measurements_from_metrics(
    output.metrics, mechanism, reporting
  )
  assert set(measured.reported) == set(mechanism.units)
  assert measured.examples is None
  assert measured.squared_measures.size == 0


def test_a_panel_of_examples_is_not_in_metrics():
  mechanism = builders.make_mechanism('instance_parallel', panel_examples=5)
  with pytest.raises(ValueError, match=r'train with tf_bdp\.engines'):
    learning.events_from_metrics(_metrics('instance_parallel'), mechanism)


def test_a_round_without_noise_is_a_non_private_event():
  mechanism = client.ClientMechanism('mean', 0.0, 0.4, 0.8, 4.0)
  event = learning.events_from_metrics(_metrics('mean'), mechanism)['client']
  assert isinstance(event, dp_accounting.NonPrivateDpEvent)


def test_events_of_metrics_are_of_participants_and_no_panel():
  metrics, mechanism = _metrics('mean'), _mechanism('mean')
  event = learning.events_from_metrics(metrics, mechanism)['client']
  assert isinstance(event, events.BayesianGaussianEvent)
  assert event.squared_distances.size == len(_COHORT)
  assert not event.panel


@pytest.mark.parametrize(
  'metrics',
  [
    {},
    {'aggregator': ()},
    {'aggregator': {'mean_value': (), 'mean_weight': ()}},
    {'client_work': {'train': {'loss': 1.0}}},
  ],
)
def test_metrics_of_other_aggregators_are_refused(metrics):
  sentence = 'no measurements of a ClientPrivacyFactory'
  with pytest.raises(ValueError, match=sentence):
    learning.events_from_metrics(metrics, _mechanism('mean'))


def test_metrics_of_tffs_own_private_aggregator_are_refused():
  factory = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
    noise_multiplier=0.7, clients_per_round=4.0, clip=1.0
  )
  process = factory.create(tff.TensorType(np.float32, [2]))
  output = process.next(process.initialize(), [np.ones(2, np.float32)])
  metrics = {'distributor': (), 'aggregator': output.measurements}
  with pytest.raises(ValueError, match='ClientPrivacyFactory'):
    learning.events_from_metrics(metrics, _mechanism('mean'))


def _ragged_metrics(kind):
  """Three rounds of a TFF aggregator: of five, of four and of two clients."""
  factory = aggregators.ClientPrivacyFactory(_mechanism(kind))
  process = factory.create(tff.TensorType(np.float32, [2]))
  generator = np.random.default_rng(0)
  state, rounds = process.initialize(), []
  for participants in (5, 4, 2):
    values = list(0.2 * generator.normal(size=(participants, 2)).astype('f4'))
    output = process.next(state, values)
    state = output.state
    rounds.append({'aggregator': output.measurements})
  return rounds


@pytest.mark.parametrize('kind', client.KINDS)
def test_saved_distances_give_the_figures_of_the_events(tmp_path, kind):
  mechanism, rounds = _mechanism(kind), _ragged_metrics(kind)
  path = tmp_path / 'distances.npz'
  learning.save_distances(path, rounds, mechanism)
  recorded = recorded_distances.load(path)
  assert [row.size for row in recorded.distances] == [5, 4, 0]
  assert not recorded.panel
  common = {
    'noise_multiplier': mechanism.noise_multiplier,
    'participation_probability': mechanism.participation_probability,
    'delta': _DELTA,
  }
  of_file = privacy_report.PrivacyReport.from_distances(
    recorded.distances,
    worst_case_distance=recorded.worst_case_distances,
    worst_case_mixture=recorded.worst_case_mixture,
    mechanism=kind,
    **common,
  )
  of_events = privacy_report.PrivacyReport.from_events(
    [learning.events_from_metrics(m, mechanism)['client'] for m in rounds],
    worst_case_distance=of_file.worst_case_distance,
    mechanism=kind,
    unit='client',
    sampling='poisson',
    **common,
  )
  for found, wanted in zip(of_file.claims, of_events.claims):
    assert found.epsilon == pytest.approx(wanted.epsilon, rel=1e-9)
    assert 0 < found.epsilon < np.inf


def test_distances_of_examples_are_not_saved(tmp_path):
  mechanism = _mechanism('instance_parallel')
  with pytest.raises(ValueError, match=r'protected by noise of the server'):
    learning.save_distances(tmp_path / 'distances.npz', [], mechanism)
