"""Tests of TFF processes with private aggregators, against steps by hand."""

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp import aggregators, learning
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import events
from tf_bdp.learning import processes

_SPEC = (
  tf.TensorSpec([None, 3], tf.float32),
  tf.TensorSpec([None], tf.int32),
)
_CLIP = 0.3
_EXPECTED = 4.0
_PROBABILITY = 0.25
_DELTA = 1e-5


def _model_fn():
  keras_model = tf.keras.Sequential(
    [
      tf.keras.layers.Input((3,)),
      tf.keras.layers.Dense(2, kernel_initializer='zeros'),
    ]
  )
  return tff.learning.models.from_keras_model(
    keras_model,
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    input_spec=_SPEC,
  )


def _examples(client):
  generator = np.random.default_rng(client)
  size = 2 + client % 3
  features = generator.normal(size=(size, 3)).astype(np.float32)
  return features, generator.integers(0, 2, size).astype(np.int32)


def _dataset(client, batch=100):
  return tf.data.Dataset.from_tensor_slices(_examples(client)).batch(batch)


def _gradient(weights, features, labels):
  """The mean cross-entropy's gradient of softmax regression, by hand."""
  kernel, bias = weights
  logits = features @ kernel + bias
  logits -= logits.max(axis=1, keepdims=True)
  shares = np.exp(logits)
  shares /= shares.sum(axis=1, keepdims=True)
  error = (shares - np.eye(2)[labels]) / len(labels)
  return [features.T @ error, error.sum(axis=0)]


def _clipped(update):
  norm = np.sqrt(sum(np.sum(part**2) for part in update))
  return [part * min(1, _CLIP / norm) for part in update]


def _mean(updates):
  return [np.mean(parts, axis=0) for parts in zip(*updates)]


def _factory(kind, noise=0.0, seed=None):
  constructor = getattr(aggregators.ClientPrivacyFactory, kind)
  return constructor(
    noise,
    _EXPECTED,
    _CLIP,
    participation_probability=_PROBABILITY,
    noise_seed=seed,
  )


def _event(metrics, kind, noise=0.9):
  mechanism = _factory(kind, noise).mechanism
  return learning.events_from_metrics(metrics, mechanism)['client']


@pytest.fixture(scope='module')
def private_sum():
  return processes.build_fed_sgd(_model_fn, _factory('sum', 0.9, seed=1))


@pytest.fixture(scope='module')
def private_mean():
  return processes.build_fed_sgd(_model_fn, _factory('mean', 0.9, seed=1))


def _metrics_of_rounds(process, cohorts):
  state, found = process.initialize(), []
  for cohort in cohorts:
    output = process.next(state, [_dataset(client) for client in cohort])
    found.append(output.metrics)
    state = output.state
  return found


def test_fed_sgd_takes_the_steps_of_clipped_gradients():
  process = processes.build_fed_sgd(_model_fn, _factory('mean'))
  assert isinstance(process, tff.learning.templates.LearningProcess)
  state = process.initialize()
  weights = [np.zeros((3, 2)), np.zeros(2)]
  for cohort in ((0, 1, 2, 3), (4, 5)):
    output = process.next(state, [_dataset(client) for client in cohort])
    state = output.state
    updates = [
      _clipped(_gradient(weights, *_examples(client))) for client in cohort
    ]
    # The default is plain SGD with learning rate 0.1.
    weights = [w - 0.1 * g for w, g in zip(weights, _mean(updates))]
    found = process.get_model_weights(state).trainable
    for part, wanted in zip(found, weights):
      np.testing.assert_allclose(part, wanted, atol=1e-6)


def test_the_factory_works_inside_tffs_own_unweighted_fed_avg():
  process = tff.learning.algorithms.build_unweighted_fed_avg(
    _model_fn,
    client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.5),
    server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0),
    model_aggregator=_factory('sum'),
  )
  state = process.initialize()
  output = process.next(state, [_dataset(c, batch=2) for c in range(3)])
  zero = [np.zeros((3, 2)), np.zeros(2)]
  total = zero
  for client in range(3):
    weights = zero
    features, labels = _examples(client)
    for start in range(0, len(labels), 2):
      batch = features[start : start + 2], labels[start : start + 2]
      weights = [
        w - 0.5 * g for w, g in zip(weights, _gradient(weights, *batch))
      ]
    change = _clipped([-w for w in weights])
    total = [t + c for t, c in zip(total, change)]
  found = process.get_model_weights(output.state).trainable
  for part, wanted in zip(found, total):
    np.testing.assert_allclose(part, -wanted / _EXPECTED, atol=1e-6)
  assert output.metrics['aggregator']['participants'] == 3


def test_fed_avg_trains_and_its_metrics_make_events():
  process = processes.build_fed_avg(
    _model_fn,
    _factory('mean', 0.9, seed=3),
    tff.learning.optimizers.build_sgdm(0.5),
  )
  metrics = _metrics_of_rounds(process, [(0, 1, 2, 3), (2, 3)])
  several, two = (_event(m, 'mean') for m in metrics)
  assert isinstance(several, events.BayesianGaussianEvent)
  assert several.squared_distances.size == 4
  assert not several.panel
  assert isinstance(two, events.MixedGaussianEvent)


@pytest.mark.parametrize(
  'aggregator',
  [
    tff.aggregators.MeanFactory(),
    tff.learning.robust_aggregator(),
    tff.aggregators.as_weighted_aggregator(_factory('sum', 1.0)),
    None,
  ],
  ids=['mean', 'robust', 'wrapped', 'none'],
)
def test_weighted_aggregation_is_refused_with_the_reason(aggregator):
  reason = 'moves the result by its weight times the clip norm'
  with pytest.raises(TypeError, match=reason):
    processes.build_fed_sgd(_model_fn, aggregator)
  with pytest.raises(TypeError, match='weights is private data itself'):
    processes.build_fed_avg(
      _model_fn, aggregator, tff.learning.optimizers.build_sgdm(0.1)
    )


def test_tffs_own_processes_say_how_to_wrap_the_factory():
  with pytest.raises(TypeError, match='as_weighted_aggregator'):
    tff.learning.algorithms.build_fed_sgd(
      _model_fn, model_aggregator=_factory('sum')
    )
  with pytest.raises(TypeError):
    tff.learning.algorithms.build_weighted_fed_avg(
      _model_fn,
      client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
      model_aggregator=_factory('sum'),
    )


def test_the_ledger_of_a_sum_is_dp_accountings_own_figure(private_sum):
  cohorts = [(0, 1, 2, 3, 4), (), (1, 2), (5,), (0, 2, 4, 6)]
  accountant = accountant_lib.BayesianAccountant('holder', total_rounds=5)
  for metrics in _metrics_of_rounds(private_sum, cohorts):
    accountant.compose(_event(metrics, 'sum'))
  one_round = dp_accounting.PoissonSampledDpEvent(
    _PROBABILITY, dp_accounting.GaussianDpEvent(1 / (1 / 0.9 + 2.0**-20))
  )
  wanted = dp_accounting.rdp.RdpAccountant().compose(one_round, 5)
  found = dp_accounting.rdp.RdpAccountant().compose(accountant.ledger)
  assert found.get_epsilon(_DELTA) == pytest.approx(
    wanted.get_epsilon(_DELTA), rel=1e-9
  )
  assert accountant.get_epsilon(_DELTA) <= accountant.get_worst_case_epsilon(
    _DELTA
  )


def test_differential_privacy_of_a_mean_is_that_of_any_cohorts(private_mean):
  cohorts = [(0, 1, 2, 3, 4), (), (1, 2), (5,), (0, 2, 4, 6)]
  accountant, other = (
    accountant_lib.BayesianAccountant('holder', total_rounds=5)
    for _ in range(2)
  )
  for metrics in _metrics_of_rounds(private_mean, cohorts):
    accountant.compose(_event(metrics, 'mean'))
  mechanism = _factory('mean', 0.9).mechanism
  other.compose(
    events.MixedGaussianEvent(mechanism.worst_case_mixture, _PROBABILITY), 5
  )
  found = accountant.get_dp_epsilon(_DELTA)
  assert found == pytest.approx(other.get_dp_epsilon(_DELTA), rel=1e-12)
  assert accountant.get_epsilon(_DELTA) <= accountant.get_worst_case_epsilon(
    _DELTA
  )


def test_distances_of_gradients_are_those_of_leaving_one_out(private_mean):
  (metrics,) = _metrics_of_rounds(private_mean, [range(5)])
  event = _event(metrics, 'mean')
  zero = [np.zeros((3, 2)), np.zeros(2)]
  updates = [_clipped(_gradient(zero, *_examples(c))) for c in range(5)]
  wanted = []
  for client in range(5):
    others = _mean(updates[:client] + updates[client + 1 :])
    moved = [m - o for m, o in zip(_mean(updates), others)]
    wanted.append(sum(np.sum(part**2) for part in moved))
  wanted = np.array(wanted) / (0.9 * _CLIP / _EXPECTED) ** 2
  np.testing.assert_allclose(
    np.sort(event.squared_distances), np.sort(wanted), rtol=1e-4
  )


def test_a_panel_is_measured_against_the_aggregate():
  def client_update(model, weights, dataset):
    # The sum of the client's features, in the shape of the model's weights.
    del model
    first = dataset.reduce(
      tf.zeros([3]), lambda total, batch: total + tf.reduce_sum(batch[0], 0)
    )
    kernel, bias = weights.trainable
    return [tf.stack([first, first], axis=1) + kernel, bias]

  aggregate = [np.full((3, 2), 0.1, np.float32), np.full(2, 0.2, np.float32)]
  weights = tff.learning.models.ModelWeights(
    [np.full((3, 2), 0.5, np.float32), np.full(2, 0.25, np.float32)], []
  )
  measure = processes.build_panel_measurement(_model_fn, client_update)
  rows = measure(
    {
      'weights': weights,
      'aggregate': aggregate,
      'clip_norm': np.float32(_CLIP),
    },
    [_dataset(client) for client in range(4)],
    [np.int32(10 + client) for client in range(4)],
  )
  rows = rows[np.argsort(rows[:, 0])]
  np.testing.assert_array_equal(rows[:, 0], np.arange(10, 14))
  for client, row in enumerate(rows):
    features = _examples(client)[0].sum(axis=0)
    update = _clipped(
      [np.stack([features, features], axis=1) + 0.5, np.full(2, 0.25)]
    )
    norm = sum(np.sum(part**2) for part in update)
    moved = [u - a for u, a in zip(update, aggregate)]
    deviation = sum(np.sum(part**2) for part in moved)
    assert row[1] == pytest.approx(norm, rel=1e-5)
    assert row[2] == pytest.approx(deviation, rel=1e-5)
