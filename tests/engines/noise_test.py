"""Noise of the engines: its deviation, its independence, and its seeds."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from scipy import stats

from tests.engines import cases
from tf_bdp.aggregators import private_mean
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data

_WIDTH, _NOISE, _SERVER_NOISE, _CLIP = 6000, 0.7, 0.9, 1.2
# How unlikely a true hypothesis must be before a test of it fails.
_LEVEL = 1e-6
# Level, algorithm and more of the mechanism.
_CASES = {
  'client': ('mean', 'fed_sgd', {}),
  'example': (
    *('aggregate', 'fed_sgd'),
    {'clipping': 'example', 'server_noise_multiplier': _SERVER_NOISE},
  ),
  'steps': ('sequential', 'fed_avg', {}),
}
_RUNS = [(name, case) for case in _CASES for name in ('inprocess', 'tff')]


def _wide_model():
  # The model function seeds all of TensorFlow, and must not seed the noise.
  tf.keras.utils.set_random_seed(3)
  return tf.keras.Sequential(
    [tf.keras.layers.Input((1,)), tf.keras.layers.Dense(_WIDTH, use_bias=False)]
  )


@functools.cache
def _data(feature=0.0):
  # Features of zero have gradients of zero, so that all is noise.
  return federated_data.FederatedData(
    np.full((24, 1), feature, np.float32),
    np.zeros(24, np.int64),
    np.split(np.arange(24), 4),
  )


@functools.cache
def _engine(name, case, noise_seed=None, kind=None, noise=_NOISE, feature=0.0):
  level, algorithm, options = _CASES[case]
  algorithm = algorithm_lib.Algorithm(
    algorithm, learning_rate=1.0, momentum=0.0, client_learning_rate=0.5
  )
  mechanism = cases.mechanism_of(
    kind or level,
    algorithm,
    _data(feature),
    noise_multiplier=noise,
    **{'clip_norm': _CLIP, **options},
  )
  return cases.ENGINES[name](
    _wide_model,
    _data(feature),
    mechanism=mechanism,
    algorithm=algorithm,
    sampler=cases.sampler_of(_data()),
    noise_seed=noise_seed,
  )


def _released(runner, cohort, number=0):
  state = runner.initial_state()
  done = runner.run_round(state, number, list(cohort), [])
  assert done.measurements.participants in (0, len(cohort))
  assert done.state is not state
  return cases.flat(runner, state) - cases.flat(runner, done.state)


@functools.cache
def _rounds(name, case, noise_seed=None):
  """The noise of several rounds, by how many took part."""
  runner = _engine(name, case, noise_seed)
  cohorts = [(0,), (1,), (0,), (0, 1), (0, 1, 2, 3)]
  return [
    (len(cohort), _released(runner, cohort, number))
    for number, cohort in enumerate(cohorts)
  ]


def _deviation(case, participants):
  if case == 'client':
    return _NOISE * _CLIP / cases.CLIENTS_PER_ROUND
  own = _NOISE * _CLIP
  if case == 'example':
    own /= cases.SMALL.batch_size
  if case == 'steps':  # Two steps of six examples, three at a time.
    own *= 0.5 * 2**0.5
  variance = own**2 / participants
  if case == 'example':
    variance += (_SERVER_NOISE * _CLIP / cases.CLIENTS_PER_ROUND) ** 2
  return variance**0.5


def _check_independent(noises):
  for one, other in itertools.combinations(noises, 2):
    assert abs(np.corrcoef(one, other)[0, 1]) < 5.5 * _WIDTH**-0.5
    assert np.mean(one == other) < 0.01


@pytest.mark.parametrize(('name', 'case'), _RUNS)
def test_unseeded_noise_has_the_deviation_that_is_accounted_for(name, case):
  for participants, noise in _rounds(name, case):
    scaled = noise / _deviation(case, participants)
    assert stats.kstest(scaled, 'norm').pvalue > _LEVEL
    # d times the variance has a χ² distribution.
    tail = stats.chi2(_WIDTH).cdf(np.sum(scaled**2))
    assert _LEVEL < tail < 1 - _LEVEL


@pytest.mark.parametrize(('name', 'case'), _RUNS)
def test_unseeded_noise_of_clients_and_rounds_is_independent(name, case):
  _check_independent([noise for _, noise in _rounds(name, case)])


@pytest.mark.parametrize(('name', 'case'), _RUNS)
def test_without_a_noise_seed_rounds_cannot_be_repeated(name, case):
  again = _released(_engine(name, case), (0,))
  assert np.all(again != _rounds(name, case)[0][1])


@pytest.mark.parametrize('case', _CASES)
def test_seeded_noise_is_as_good_as_unseeded_but_can_be_repeated(case):
  rounds = _rounds('inprocess', case, 9)
  for participants, noise in rounds:
    scaled = noise / _deviation(case, participants)
    assert stats.kstest(scaled, 'norm').pvalue > _LEVEL
  alone = [noise for participants, noise in rounds if participants == 1]
  _check_independent(alone)
  runner = _engine('inprocess', case, 9)
  np.testing.assert_array_equal(_released(runner, (0,), 0), rounds[0][1])
  other = _released(_engine('inprocess', case, 10), (0,), 0)
  _check_independent([other, alone[0]])


@pytest.mark.parametrize('kind', ['mean', 'sum'])
def test_the_servers_noise_is_the_same_on_top_of_any_updates(kind):
  loud, quiet = (
    _engine('inprocess', 'client', kind=kind, noise=noise, feature=1.0)
    for noise in (_NOISE, 0.0)
  )
  noises = []
  for cohort in ((), (2,), (0, 1, 2, 3)):
    update = _released(quiet, cohort)
    assert bool(cohort) == np.any(update)
    noises.append(_released(loud, cohort) - update)
    scaled = noises[-1] / _deviation('client', len(cohort))
    assert stats.kstest(scaled, 'norm').pvalue > _LEVEL
    assert abs(np.var(scaled) - 1) < 5 * (2 / _WIDTH) ** 0.5
  _check_independent(noises)


@pytest.mark.parametrize('case', ['mean_steps', 'sum'])
@pytest.mark.parametrize('name', ['inprocess', 'tff'])
def test_rounds_without_anybody_still_release_noise(name, case):
  deviation = 3.0 * cases.SMALL.clip_norm / cases.CLIENTS_PER_ROUND
  noise = cases.released(name, case, 2) / deviation
  assert stats.kstest(noise, 'norm').pvalue > _LEVEL


def test_the_noise_of_a_client_does_not_depend_on_who_else_takes_part():
  # In one round together, as alone in the same round.
  runner = _engine('inprocess', 'steps', 9)
  alone = [_released(runner, (client,), 3) for client in (1, 2)]
  np.testing.assert_allclose(
    _released(runner, (1, 2), 3), np.mean(alone, axis=0), atol=1e-6
  )


@pytest.mark.parametrize('noise_seed', [None, 9])
@pytest.mark.parametrize('name', ['inprocess', 'tff'])
def test_what_is_released_is_on_the_grid_of_its_noise(name, noise_seed):
  # Whatever the updates; see tests/ops/noise_test.py for what that is good for.
  deviation = _NOISE * _CLIP / cases.CLIENTS_PER_ROUND
  step = 2.0 ** np.floor(np.log2(2.0**-20 * deviation / _WIDTH**0.5))
  for feature, cohort in ((0.0, ()), (0.0, (1,)), (1.0, (0, 1))):
    runner = _engine(name, 'client', noise_seed, feature=feature)
    if name == 'inprocess':
      done = runner.run_round(runner.initial_state(), 0, list(cohort), [])
      released = done.state.last_mean
    else:
      released = _tff_result(runner, cohort)
    steps = np.asarray(released, np.float64) / step
    np.testing.assert_array_equal(steps, np.round(steps))
    # In float32 there are finer ones.
    assert np.any(np.abs(released) < 2**22 * step)


def _tff_result(runner, cohort):
  """What TFF's aggregator releases, without the server's step."""
  process = private_mean.PrivateMeanFactory(
    runner.mechanism, noise_seed=runner._rounds._noise_seed
  ).create(tff.TensorType(np.float32, [_WIDTH]))
  updates = [np.full(_WIDTH, 0.01 * client, np.float32) for client in cohort]
  return process.next(process.initialize(), updates).result
