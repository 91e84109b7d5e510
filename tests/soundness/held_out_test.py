"""That a client did not take part is told by clients that do not train."""

import numpy as np
import pytest
import tensorflow as tf

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import applicability
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data
from tf_bdp.reporting import run_report
from tf_bdp.training import loop
from tf_bdp.training import plan as plan_lib

_CLIENTS, _HELD_OUT, _ROUNDS, _DELTA = 30, 8, 24, 1e-3


def _data():
  """Every client has an example that touches a weight of its own."""
  features = np.eye(_CLIENTS, dtype=np.float32)
  labels = np.arange(_CLIENTS) % 2
  return federated_data.FederatedData(
    features, labels, np.arange(_CLIENTS)[:, np.newaxis]
  )


def _model():
  layers = [
    tf.keras.layers.Input((_CLIENTS,)),
    tf.keras.layers.Dense(2, use_bias=False, kernel_initializer='zeros'),
  ]
  return tf.keras.Sequential(layers)


def _plan(held_out=_HELD_OUT):
  return plan_lib.Plan.of(
    _data(),
    plan_lib.Privacy(
      mechanism='sum', noise_multiplier=0.3, participation_probability=0.8
    ),
    algorithm_lib.Algorithm(learning_rate=20.0, momentum=0.0),
    accounting=plan_lib.Accounting(delta=_DELTA, held_out_clients=held_out),
    schedule=plan_lib.Schedule(rounds=_ROUNDS),
    seeds=plan_lib.Seeds(noise_seed=1, sampling_seed=1),
  )


@pytest.fixture(name='run', scope='module')
def _run(tmp_path_factory):
  plan, directory = _plan(), tmp_path_factory.mktemp('held_out')
  done = loop.train(
    plan.engine(_model, _data()),
    plan,
    lambda _: {'accuracy': 0.0, 'loss': 0.0},
    directory,
  )
  return plan, done, directory


def _census(events):
  accountant = accountant_lib.BayesianAccountant(estimator='census')
  for event in events:
    accountant.compose(event)
  return accountant.get_epsilon(_DELTA)


def test_clients_that_train_are_close_because_the_model_has_fitted_them(run):
  _, done, _ = run
  trained, held_out = (
    np.array([e['client'].groups[half].squared_distances for e in done.events])
    for half in (0, 1)
  )
  assert trained.shape == (_ROUNDS, _CLIENTS - _HELD_OUT)
  assert held_out.shape == (_ROUNDS, _HELD_OUT)
  # All are equally far at first; late in the run the ones are fitted.
  np.testing.assert_allclose(trained[0], held_out[0][0], rtol=1e-4)
  assert np.mean(held_out[-10:]) > 10 * np.mean(trained[-10:])


def test_the_larger_figure_of_the_two_halves_is_given(run):
  plan, done, _ = run
  events = done.events_of('client')
  halves = [_census([e.groups[half] for e in events]) for half in (0, 1)]
  # The reverse direction shows with held-out clients only.
  assert halves[1] > 1.2 * halves[0]
  assert _census(events) == pytest.approx(max(halves), rel=3e-3)
  # That of the run itself is not below either half.
  own = done.accountants['client'].get_epsilon(_DELTA)
  for half in (0, 1):
    accountant = plan.accountant('client')
    for event in events:
      accountant.compose(event.groups[half])
    assert own >= accountant.get_epsilon(_DELTA) * (1 - 1e-3)


def test_the_gap_between_the_halves_is_a_finding(run):
  plan, done, directory = run
  privacy = run_report.privacy_of('client', plan, done)
  (gap,) = (f for f in privacy.findings if f.check == 'held-out gap')
  assert gap.verdict != 'ok'
  assert gap.figures['held_out'] > gap.figures['trained']
  assert applicability.worst_verdict(privacy.findings) != 'ok'
  run_report.write(directory, plan, done)
  page = (directory / 'report.html').read_text('utf-8')
  assert f'{_HELD_OUT} clients, drawn at random, never trained' in page
  assert 'held-out gap' in page
  for name, size in (
    ('distances.npz', _CLIENTS - _HELD_OUT),
    ('held_out_distances.npz', _HELD_OUT),
  ):
    with np.load(directory / name) as file:
      assert file['distances'].shape == (_ROUNDS, size)


def test_without_held_out_clients_the_page_says_that_half_is_measured(
  tmp_path,
):
  plan = _plan(held_out=0)
  done = loop.train(
    plan.engine(_model, _data()),
    plan,
    lambda _: {'accuracy': 0.0, 'loss': 0.0},
    tmp_path,
  )
  # All that is left to see: everybody trains, and is fitted.
  squared = np.array([e['client'].squared_distances for e in done.events])
  assert np.mean(squared[-10:]) < 0.2 * np.mean(squared[0])
  run_report.write(tmp_path, plan, done)
  page = (tmp_path / 'report.html').read_text('utf-8')
  assert 'Only the first half is measured' in page
