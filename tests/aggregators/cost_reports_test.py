"""Tests of reported costs against those of distances that the server knows."""

import collections
import functools

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tree

from tests.accounting import oracles
from tests.aggregators import builders
from tests.mechanisms import builders as mechanism_builders
from tests.mechanisms import oracles as oracles_of_mechanisms
from tf_bdp import aggregators, learning
from tf_bdp.accounting import events, mean_bounds, sampled_gaussian
from tf_bdp.aggregators import cost_reports, runtime, secure_sums
from tf_bdp.mechanisms import measurements

_ORDERS = (1, 2, 8, 32)
_ESTIMATORS = ('student_t', 'bernstein')


@pytest.fixture(scope='module', autouse=True)
def _context():
  before = tff.framework.get_context_stack().current
  runtime.use_simulation_context()
  yield
  tff.framework.set_default_context(before)


def _reporting(estimator='student_t', power=3):
  return events.Reporting(_ORDERS, estimator, 1e-2, power)


def _bound(squared_distances, q, worst, reporting, inclusion=1.0):
  """(1/p) log E[exp p ℓ], from the distances themselves."""
  *costs, limit = reporting.power * oracles.included(
    sampled_gaussian.log_moments([*squared_distances, worst], q, _ORDERS),
    inclusion,
  )
  if len(costs) < mean_bounds.FEWEST_UNITS:
    return limit / reporting.power
  bound = getattr(mean_bounds, reporting.estimator)
  found = bound(np.array(costs), reporting.failure_probability, limit)
  return found / reporting.power


def _assert_never_less_and_hardly_more(found, exact, rtol=1e-6):
  assert np.all(found >= exact)
  np.testing.assert_allclose(found, exact, rtol=rtol)


# Of clients.


@functools.cache
def _client_process(kind, noise, quantile, reporting):
  mechanism = builders.mechanism(kind, noise, quantile=quantile)
  factory = aggregators.ClientPrivacyFactory(
    mechanism,
    noise_seed=1,
    summation=aggregators.SecureSummation(),
    measurement=aggregators.ClientCosts(reporting),
  )
  return mechanism, factory.create(builders.VALUE_TYPE)


@pytest.mark.parametrize('estimator', _ESTIMATORS)
@pytest.mark.parametrize(
  'kind, noise, quantile', [('mean', 4.0, None), ('sum', 1.5, 0.5)]
)
def test_reported_costs_of_clients_bound_those_of_their_distances(
  kind, noise, quantile, estimator
):
  reporting = _reporting(estimator)
  mechanism, process = _client_process(kind, noise, quantile, reporting)
  tff.test.assert_not_contains_unsecure_aggregation(process.next)
  plain = builders.process(kind, noise, quantile, seed=1)
  for count in (12, 2):
    vectors = [*builders.vectors(count), np.full(5, np.nan)]
    output = builders.run(process, vectors)
    found = cost_reports.read(
      output.measurements, mechanism, {'client': reporting}
    )
    assert list(found) == ['client']
    assert found['client'].failure_probability == 1e-2
    measured = learning.measurements_from_metrics(
      builders.run(plain, vectors).measurements, mechanism
    )
    # One that failed counts as zeros in a mean.
    came = count + 1 if kind == 'mean' else count
    assert measured.participants == came
    distances = mechanism.squared_distances(
      measured.squared_measures, measured.taking_part, came, builders.CLIP
    )
    worst = mechanism.worst_case_squared_distance('client', came)
    exact = _bound(distances, builders.PROBABILITY, worst, reporting)
    _assert_never_less_and_hardly_more(found['client'].costs, exact, 1e-5)
    # As an event, of a round like any other.
    event = learning.events_from_metrics(
      output.measurements, mechanism, {'client': reporting}
    )['client']
    assert event == events.ReportedCostEvent(
      found['client'].costs,
      1e-2,
      builders.PROBABILITY,
      worst,
      worst_case_mixture=mechanism.worst_case_mixture,
    )


def test_the_server_learns_as_many_numbers_however_many_clients_there_are():
  _, process = _client_process('mean', 4.0, None, _reporting())
  shapes = [
    {
      path: np.shape(leaf)
      for path, leaf in tree.flatten_with_path(
        builders.run(process, builders.vectors(count)).measurements
      )
    }
    for count in (0, 1, 12)
  ]
  assert shapes[0] == shapes[1] == shapes[2]
  assert shapes[0] == {
    ('participants',): (),
    ('failed_clients',): (),
    ('clip_norm',): (),
    ('client_costs', 'count'): (),
    ('client_costs', 'scale'): (len(_ORDERS),),
    ('client_costs', 'sums'): (2, len(_ORDERS)),
  }


def test_a_round_to_which_nobody_came_is_charged():
  for kind, event_type in (
    ('mean', events.MixedGaussianEvent),
    ('sum', events.ReportedCostEvent),
  ):
    mechanism, process = _client_process(kind, 4.0, None, _reporting())
    metrics = builders.run(process, []).measurements
    event = learning.events_from_metrics(
      metrics, mechanism, {'client': _reporting()}
    )['client']
    assert isinstance(event, event_type)


def test_without_noise_costs_are_infinite_and_the_round_is_not_private():
  mechanism, process = _client_process('mean', 0.0, None, _reporting())
  metrics = builders.run(process, builders.vectors(5)).measurements
  reporting = {'client': _reporting()}
  costs, _ = cost_reports.read(metrics, mechanism, reporting)['client']
  np.testing.assert_array_equal(costs, np.inf)
  event = learning.events_from_metrics(metrics, mechanism, reporting)['client']
  assert isinstance(event, dp_accounting.NonPrivateDpEvent)


# Of examples.

_LONGEST = 9


def _mechanism(level, **options):
  options = {'noise_multiplier': 2.0, 'smallest_holding': 4, **options}
  return mechanism_builders.make_mechanism(level, **options)


def _message(seed, steps, usable=True, holding=20, taken=None, measured=6):
  """What a client knows of its update, as `ExampleCosts.message` has it."""
  generator = np.random.default_rng(seed)
  moves = 4 * generator.beta(1, 6, (steps, _LONGEST)).astype(np.float32)
  return collections.OrderedDict(
    squared_moves=moves,
    measured=np.tile(np.arange(_LONGEST) < measured, (steps, 1)),
    taken=np.arange(steps) < (steps if taken is None else taken),
    squared_norm=np.float32(generator.uniform(0, mechanism_builders.CLIP**2)),
    usable=np.int32(usable),
    holding=np.int32(holding),
  )


def _messages(steps):
  return [
    *(
      _message(seed, steps, holding=holding)
      for seed, holding in ((0, 20), (1, 60))
    ),
    _message(2, steps, holding=9, taken=1),
    _message(3, steps, holding=4, measured=4),
    _message(4, steps, holding=0, measured=0),
  ]


def _aggregated(mechanism, reporting, messages):
  """What the server learns, as it stands in a process's metrics."""
  costs = cost_reports.ExampleCosts(mechanism, _LONGEST, reporting)
  message_type = tff.types.tensorflow_to_type(
    tf.nest.map_structure(
      lambda part: tf.TensorSpec(part.shape, part.dtype), messages[0]
    )
  )

  @tff.federated_computation(tff.FederatedType(message_type, tff.CLIENTS))
  def aggregate(messages):
    return costs.aggregate(messages)

  tff.test.assert_not_contains_unsecure_aggregation(aggregate)
  learnt = aggregate(messages)
  return {**learnt, 'participants': learnt['count']}


def _exact_example_costs(mechanism, message, count, reporting):
  """Of every step, by the accountant's own functions."""
  holding = int(message['holding'])
  worst = float(mechanism.worst_case_squared_distance('example', count))
  q = float(mechanism.example_probability(holding))
  rows = []
  for step in range(mechanism.local_steps):
    moves = message['squared_moves'][step][message['measured'][step]]
    distances = oracles_of_mechanisms.on_grid(
      moves.astype(float) / float(mechanism.example_variance(count))
    )
    if not message['usable']:
      distances = []  # The worst is assumed.
    row = _bound(np.minimum(distances, worst), q, worst, reporting)
    rows.append(row if message['taken'][step] and holding else 0.0 * row)
  return np.array(rows)


@pytest.mark.parametrize('estimator', _ESTIMATORS)
@pytest.mark.parametrize(
  'level, steps',
  [
    ('instance_sequential', 2),
    ('instance_parallel', 2),
    ('instance_aggregate', 1),
    ('joint', 1),
  ],
)
def test_reported_costs_of_examples_bound_those_of_their_moves(
  level, steps, estimator
):
  mechanism = _mechanism(level, local_steps=steps)
  reporting = dict.fromkeys(mechanism.units, _reporting(estimator))
  messages = [*_messages(steps), _message(5, steps, usable=False)]
  metrics = _aggregated(mechanism, reporting, messages)
  count = len(messages) - 1
  assert metrics['participants'] == count
  exact = [
    _exact_example_costs(mechanism, m, count, reporting['example'])
    for m in messages
  ]
  sequential = mechanism.accounting == 'sequential'
  exact = (np.sum if sequential else np.max)(exact, axis=0).sum(axis=0)
  found = cost_reports.read(metrics, mechanism, reporting)
  assert set(found) == set(mechanism.units)
  # A maximum is rounded up to a level; see `secure_maximum`.
  rtol = 1e-6 if sequential else 6e-3
  _assert_never_less_and_hardly_more(found['example'].costs, exact, rtol)
  if level != 'joint':
    return
  squared = [
    m['squared_norm'] / mechanism.clip_norm**2 for m in messages if m['usable']
  ]
  exact = _bound(
    mechanism.client_squared_distances(np.array(squared, float), count),
    1.0,
    float(mechanism.worst_case_squared_distance('client', count)),
    reporting['client'],
    float(mechanism.inclusion_probability(count)),
  )
  _assert_never_less_and_hardly_more(found['client'].costs, exact, 1e-5)


@pytest.mark.parametrize('level', ['instance_parallel', 'joint'])
def test_without_noise_a_round_of_examples_is_not_private(level):
  mechanism = _mechanism(level, noise_multiplier=0.0)
  reporting = dict.fromkeys(mechanism.units, _reporting())
  metrics = _aggregated(mechanism, reporting, _messages(1))
  reported = cost_reports.read(metrics, mechanism, reporting)
  none = np.zeros(0)
  found = mechanism.events(
    measurements.Measurements(
      int(metrics['count']), 0, 1.5, none, none, reported=reported
    )
  )
  for event in found.values():
    assert isinstance(event, dp_accounting.NonPrivateDpEvent)


def test_the_sums_of_clients_are_known_to_their_resolution():
  # A client's share is rounded up to this; see `bound_from_sums`.
  assert secure_sums.resolution() == 2.0**-42
