import functools
import io
import itertools
import pathlib
import subprocess
import sys
import textwrap

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import events
from tf_bdp.engines import in_process as inprocess_engine
from tf_bdp.engines import tff_instance as tff_instance_engine
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data
from tf_bdp.mechanisms import instance as instance_mechanism
from tf_bdp.ops import noise as noise_lib
from tf_bdp.ops import private_steps

_ENGINES = {
  'inprocess': inprocess_engine.InProcessEngine,
  'tff': tff_instance_engine.TffInstanceEngine,
}
_CLIP, _BATCH_SIZE, _EXPECTED, _RATE = 1.2, 3, 4.0, 0.5
_SIZES = (5, 3, 7, 4, 3, 9, 5, 6, 3, 4, 4, 0)
# Their forward pass overflows; the squares of their gradients do; no examples.
_OVERFLOWING, _HUGE, _EMPTY = 9, 10, 11
_PANEL = (1, 4, 6, 2, _OVERFLOWING)
# Several, one, nobody, one of them failing, extreme ones, nobody left.
_COHORTS = (
  *((0, 1, 2, 3, 5), (4,), (), (2, _OVERFLOWING, 6)),
  *((1, _HUGE, 5, _EMPTY), (_OVERFLOWING,)),
)
# Level, algorithm, clipping and what else there is to set.
_CASES = {
  'sequential': ('instance_sequential', 'fed_sgd', 'batch', {}),
  'parallel_panel': (
    *('instance_parallel', 'fed_avg', 'batch'),
    {'panel_examples': 3},
  ),
  'aggregate': (
    *('instance_aggregate', 'fed_sgd', 'example'),
    {'server_noise_multiplier': 1.0},
  ),
  'joint': ('joint', 'fed_sgd', 'batch', {'panel_examples': 4}),
  'split': ('split', 'fed_sgd', 'batch', {'server_noise_multiplier': 1.0}),
  'split_steps': (
    *('split', 'fed_avg', 'example'),
    {'server_noise_multiplier': 1.0, 'panel_examples': 3},
  ),
}
# How unlikely a true hypothesis must be before a test of it fails.
_LEVEL = 1e-6


@pytest.fixture(scope='module', autouse=True)
def _with_an_empty_client():
  # Engines can do with clients that hold nothing, of which accounting is told
  # nothing; the check of the mechanism refuses them.
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(instance_mechanism, 'check_holdings', lambda *_: None)
    yield


def _relu(inputs):
  """Overflows early, for all of the overflowing client's examples."""
  return tf.where(tf.abs(inputs) > 1e30, np.inf, tf.nn.relu(inputs))


def _model():
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


@functools.cache
def _data():
  generator = np.random.default_rng(1)
  ends = np.cumsum(_SIZES)
  features = generator.normal(size=(ends[-1], 4, 4, 1)).astype(np.float32)
  labels = generator.integers(0, 3, ends[-1])
  clients = [
    np.arange(end - size, end) for end, size in zip(ends.tolist(), _SIZES)
  ]
  features[clients[_OVERFLOWING]] *= 3e37
  features[clients[_HUGE]] *= 1e24
  return federated_data.FederatedData(features, labels, clients)


def _mechanism(
  level, algorithm, data, noise=0.4, batch_size=_BATCH_SIZE, **options
):
  sizes = [len(data.indices(client)) for client in range(data.client_count)]
  return instance_mechanism.InstanceMechanism(
    level=level,
    noise_multiplier=noise,
    clip_norm=_CLIP,
    batch_size=batch_size,
    participation_probability=0.4,
    expected_clients=_EXPECTED,
    total_examples=sum(sizes),
    local_steps=algorithm.local_steps(max(sizes), batch_size),
    **options,
  )


@functools.cache
def _engine(name, case, noise_seed=5):
  level, algorithm, clipping, options = _CASES[case]
  algorithm = algorithm_lib.Algorithm(
    algorithm,
    learning_rate=_RATE,
    momentum=0.6 if case.startswith('joint') else 0.0,
    client_learning_rate=0.3,
  )
  mechanism = _mechanism(
    level, algorithm, _data(), clipping=clipping, **options
  )
  return _ENGINES[name](
    _model, _data(), mechanism, algorithm, noise_seed=noise_seed, seed=7
  )


def _run(runner, cohorts=_COHORTS, panel=_PANEL, state=None, first=0):
  state = runner.initial_state() if state is None else state
  outputs = []
  for number, cohort in enumerate(cohorts, first):
    outputs.append(runner.run_round(state, number, list(cohort), list(panel)))
    state = outputs[-1].state
  return outputs


@functools.cache
def _outputs(name, case):
  return _run(_engine(name, case))


def _flat(runner, state):
  weights = runner.model_weights(state)
  return np.concatenate([np.ravel(w) for w in weights]).astype(np.float64)


def _check_same(runners, outputs):
  for one, other in zip(*outputs, strict=True):
    assert one.participants == other.participants
    assert one.failed_clients == other.failed_clients
    assert one.clip_norm == pytest.approx(_CLIP, rel=1e-7)
    assert other.clip_norm == pytest.approx(_CLIP, rel=1e-7)
    np.testing.assert_allclose(
      _flat(runners[0], one.state),
      _flat(runners[1], other.state),
      rtol=1e-4,
      atol=3e-6,
    )
    np.testing.assert_allclose(
      np.sort(one.squared_measures),
      np.sort(other.squared_measures),
      rtol=1e-4,
      atol=1e-6,
    )
    for field in {*instance_mechanism.ExampleGroups._fields} - {
      'squared_moves'
    }:
      np.testing.assert_array_equal(
        getattr(one.examples, field), getattr(other.examples, field)
      )
    np.testing.assert_allclose(
      one.examples.squared_moves,
      other.examples.squared_moves,
      rtol=2e-3,
      atol=1e-6,
    )
    assert (one.panel_squared_measures is None) == (
      other.panel_squared_measures is None
    )
    if one.panel_squared_measures is not None:
      np.testing.assert_allclose(
        one.panel_squared_measures,
        other.panel_squared_measures,
        rtol=1e-4,
        atol=1e-6,
      )
      np.testing.assert_array_equal(
        one.panel_taking_part, other.panel_taking_part
      )


def _epsilons(mechanism, outputs, delta=1e-3):
  """ε of BDP and of DP, of every unit."""
  result = {}
  for unit in mechanism.units:
    panel = mechanism.panel_examples if unit == 'example' else True
    settings = {'composition': 'panel'}
    if not panel:
      steps = instance_mechanism.total_steps(
        mechanism, len(outputs), len(_SIZES)
      )
      settings = {'composition': 'holder', 'total_rounds': steps}
    accountant = accountant_lib.BayesianAccountant(
      estimator='bernstein', **settings
    )
    for output in outputs:
      rounds = mechanism.events(
        output.panel_squared_measures,
        output.panel_taking_part,
        output.examples,
        output.participants,
        output.clip_norm,
        panel=True,
      )
      accountant.compose(rounds[unit])
    result[unit] = (
      accountant.get_epsilon(delta),
      accountant.get_worst_case_epsilon(delta),
    )
  return result


# The two engines.


@pytest.mark.parametrize('case', _CASES)
def test_both_engines_do_the_same_rounds(case):
  runners = [_engine(name, case) for name in _ENGINES]
  outputs = [_outputs(name, case) for name in _ENGINES]
  _check_same(runners, outputs)
  counts = [(o.participants, o.failed_clients) for o in outputs[0]]
  # A gradient of zero from huge features is not a number, or it is.
  assert counts.pop(4) in [(4, 0), (3, 1)]
  assert counts == [(5, 0), (1, 0), (0, 0), (2, 1), (0, 1)]
  one, other = (_epsilons(runners[0].mechanism, part) for part in outputs)
  for unit in runners[0].mechanism.units:
    assert one[unit] == pytest.approx(other[unit], rel=1e-4)
    assert 0 < one[unit][0] <= one[unit][1] < np.inf


@pytest.mark.parametrize('case', _CASES)
@pytest.mark.parametrize('name', _ENGINES)
def test_whatever_clients_hold_weights_and_measures_stay_finite(name, case):
  runner, outputs = _engine(name, case), _outputs(name, case)
  worst = runner.mechanism.worst_case_move**2
  for cohort, output in zip(_COHORTS, outputs):
    assert np.all(np.isfinite(_flat(runner, output.state)))
    groups = output.examples
    for client, step, moves in zip(
      groups.clients, groups.steps, groups.moves()
    ):
      assert np.all((moves >= 0) & (moves <= worst * (1 + 1e-5)))
      assert client != _EMPTY
      # Of one that cannot be computed with, the worst is assumed.
      taking_part = client in cohort or runner.mechanism.averages_noise
      if client == _OVERFLOWING and taking_part and not step:
        np.testing.assert_allclose(moves, worst, rtol=1e-5)
    if output.panel_squared_measures is not None:
      assert np.all(np.isfinite(output.panel_squared_measures))
      # One whose update cannot be computed moves nothing.
      assert output.panel_squared_measures[-1] == 0
      assert not output.panel_taking_part[-1]


@pytest.mark.parametrize('name', _ENGINES)
def test_rounds_without_usable_clients_leave_the_model_alone(name):
  for case in ('sequential', 'aggregate'):
    runner, outputs = _engine(name, case), _outputs(name, case)
    weights = [_flat(runner, output.state) for output in outputs]
    np.testing.assert_array_equal(weights[1], weights[2])
    np.testing.assert_array_equal(weights[4], weights[5])
    assert not np.any(weights[0] == weights[1])


# What a round releases and measures, against its definition.


def _client_update(runner, weights, number, client, noise_seed=5):
  """What a client sends, and before noise."""
  model = _model()
  model.set_weights(weights)
  draw = runner._batches.draw(number, client)
  size = sum(np.size(part) for part in weights)
  update = private_steps.client_update(
    model,
    tf.constant(_data().features[draw.indices]),
    tf.constant(_data().labels[draw.indices]),
    tf.constant(draw.drawn),
    tf.constant(draw.step_count),
    runner.mechanism,
    runner._algorithm,
    lambda step: noise_lib.client_normal(
      size, noise_seed, tf.constant(number), tf.constant(client), step
    ),
  )
  return update.sent.numpy(), update.clipped.numpy()


def _clipped(vector):
  return vector * min(1.0, _CLIP / np.linalg.norm(vector))


@pytest.mark.parametrize('case', ['aggregate', 'split', 'split_steps'])
def test_the_mean_of_what_clients_send_is_released_with_the_servers_noise(case):
  runner, outputs = _engine('inprocess', case), _outputs('inprocess', case)
  before = runner.initial_state()
  cohort = _COHORTS[0]
  weights = runner.model_weights(before)
  sent = [_client_update(runner, weights, 0, c)[0] for c in cohort]
  if case.startswith('split'):
    assert (case == 'split') == any(np.linalg.norm(u) > _CLIP for u in sent)
    sent = [_clipped(update) for update in sent]
  (noised,) = noise_lib.add_noise(
    [tf.constant(np.mean(sent, axis=0))],
    runner.mechanism.server_noise_multiplier * _CLIP / _EXPECTED,
    5,
    tf.constant(0),
  )
  released = _flat(runner, before) - _flat(runner, outputs[0].state)
  np.testing.assert_allclose(released, _RATE * noised.numpy(), atol=3e-6)
  if case.startswith('split'):
    away = np.sum((sent - np.mean(sent, axis=0)) ** 2, axis=1)
    np.testing.assert_allclose(outputs[0].squared_measures, away, rtol=1e-4)


@pytest.mark.parametrize('last_mean', [False, True])
def test_joint_measures_clients_before_noise_from_zero_or_the_last_mean(
  last_mean,
):
  algorithm = algorithm_lib.Algorithm(learning_rate=_RATE)
  mechanism = _mechanism(
    'joint', algorithm, _data(), reference_is_last_mean=last_mean
  )
  runner = inprocess_engine.InProcessEngine(
    _model, _data(), mechanism, algorithm, noise_seed=5, seed=7
  )
  first, second = _run(runner, [(0, 1, 2, 5), (2, 3)], [4, 2])
  reference = 0.0
  if last_mean:
    # Momentum is zero: the step tells what was released.
    states = (runner.initial_state(), first.state)
    weights = [_flat(runner, state) for state in states]
    reference = _clipped((weights[0] - weights[1]) / _RATE)
  weights = runner.model_weights(first.state)

  def measure(client):
    own = _client_update(runner, weights, 1, client)[1]
    assert np.linalg.norm(own) <= _CLIP * (1 + 1e-6)
    return np.sum((own - reference) ** 2)

  np.testing.assert_allclose(
    second.squared_measures, [measure(2), measure(3)], rtol=1e-4
  )
  np.testing.assert_allclose(
    second.panel_squared_measures, [measure(4), measure(2)], rtol=1e-4
  )
  assert second.panel_taking_part.tolist() == [False, True]


def test_tff_refuses_what_its_clients_cannot_know():
  algorithm = algorithm_lib.Algorithm()
  mechanism = _mechanism(
    'joint', algorithm, _data(), reference_is_last_mean=True
  )
  with pytest.raises(ValueError, match='not sent the last mean'):
    tff_instance_engine.TffInstanceEngine(_model, _data(), mechanism, algorithm)
  runner = _engine('tff', 'split', None)
  state = runner.initial_state()
  with pytest.raises(ValueError, match='cannot compute a second time'):
    runner.run_round(state, 0, [0], [1, 2])


# Noise.

_WIDTH, _NOISE, _SERVER_NOISE = 6000, 0.7, 0.9


def _wide_model():
  # The model function seeds all of TensorFlow, and must not seed the noise.
  tf.keras.utils.set_random_seed(3)
  return tf.keras.Sequential(
    [
      tf.keras.layers.Input((1,)),
      tf.keras.layers.Dense(_WIDTH, use_bias=False),
    ]
  )


_WIDE_CASES = {
  'example': ('instance_aggregate', 'fed_sgd', 'example', _SERVER_NOISE),
  'steps': ('instance_sequential', 'fed_avg', 'batch', 0.0),
}


@functools.cache
def _wide_engine(name, case, noise_seed=None):
  # Features of zero have gradients of zero, so that all is noise.
  data = federated_data.FederatedData(
    np.zeros((24, 1), np.float32),
    np.zeros(24, np.int64),
    np.split(np.arange(24), 4),
  )
  level, algorithm, clipping, server_noise = _WIDE_CASES[case]
  algorithm = algorithm_lib.Algorithm(
    algorithm, learning_rate=1.0, client_learning_rate=0.5
  )
  mechanism = _mechanism(
    level,
    algorithm,
    data,
    _NOISE,
    clipping=clipping,
    server_noise_multiplier=server_noise,
  )
  return _ENGINES[name](
    _wide_model, data, mechanism, algorithm, noise_seed=noise_seed
  )


def _released(runner, cohort, number=0):
  state = runner.initial_state()
  output = runner.run_round(state, number, list(cohort), [])
  assert output.participants == len(cohort)
  return _flat(runner, state) - _flat(runner, output.state)


@functools.cache
def _wide_rounds(name, case, noise_seed=None):
  """The noise of several rounds, by who took part."""
  runner = _wide_engine(name, case, noise_seed)
  cohorts = [(0,), (1,), (0,), (0, 1), (0, 1, 2, 3)]
  return [
    (len(cohort), _released(runner, cohort, number))
    for number, cohort in enumerate(cohorts)
  ]


def _deviation(case, participants):
  own = _NOISE * _CLIP
  if case == 'example':
    own /= _BATCH_SIZE
  if case == 'steps':  # Two steps of six examples, three at a time.
    own *= 0.5 * 2**0.5
  variance = own**2 / participants
  if case == 'example':
    variance += (_SERVER_NOISE * _CLIP / _EXPECTED) ** 2
  return variance**0.5


@pytest.mark.parametrize('case', _WIDE_CASES)
@pytest.mark.parametrize('name', _ENGINES)
def test_unseeded_noise_is_sigma_clip_over_the_root_of_the_participants(
  name, case
):
  for participants, noise in _wide_rounds(name, case):
    scaled = noise / _deviation(case, participants)
    assert stats.kstest(scaled, 'norm').pvalue > _LEVEL
    # (d - 1) times the variance has a χ² distribution.
    tail = stats.chi2(_WIDTH).cdf(np.sum(scaled**2))
    assert _LEVEL < tail < 1 - _LEVEL


@pytest.mark.parametrize('case', _WIDE_CASES)
@pytest.mark.parametrize('name', _ENGINES)
def test_unseeded_noise_of_clients_and_rounds_is_independent(name, case):
  noises = [noise for _, noise in _wide_rounds(name, case)]
  for one, other in itertools.combinations(noises, 2):
    assert abs(np.corrcoef(one, other)[0, 1]) < 5.5 * _WIDTH**-0.5
    assert np.mean(one == other) < 0.01


def test_seeded_noise_is_as_good_as_unseeded_but_can_be_repeated():
  for case in _WIDE_CASES:
    rounds = _wide_rounds('inprocess', case, 9)
    for participants, noise in rounds:
      scaled = noise / _deviation(case, participants)
      assert stats.kstest(scaled, 'norm').pvalue > _LEVEL
    alone = [noise for participants, noise in rounds if participants == 1]
    for one, other in itertools.combinations(alone, 2):
      assert abs(np.corrcoef(one, other)[0, 1]) < 5.5 * _WIDTH**-0.5
    runner = _wide_engine('inprocess', case, 9)
    np.testing.assert_array_equal(_released(runner, (0,), 0), rounds[0][1])
    other = _released(_wide_engine('inprocess', case, 10), (0,), 0)
    assert abs(np.corrcoef(other, alone[0])[0, 1]) < 5.5 * _WIDTH**-0.5


def test_the_noise_of_a_client_does_not_depend_on_who_else_takes_part():
  # In one round together, as alone in the same round.
  runner = _wide_engine('inprocess', 'steps', 9)
  alone = [_released(runner, (client,), 3) for client in (1, 2)]
  np.testing.assert_allclose(
    _released(runner, (1, 2), 3), np.mean(alone, axis=0), atol=1e-6
  )


# States.


def _through_a_file(arrays):
  buffer = io.BytesIO()
  np.savez(buffer, **arrays)
  buffer.seek(0)
  with np.load(buffer, allow_pickle=False) as loaded:
    return {name: loaded[name] for name in loaded.files}


@pytest.mark.parametrize('case', ['aggregate', 'joint', 'split_steps'])
@pytest.mark.parametrize('name', _ENGINES)
def test_a_restored_state_goes_on_bit_for_bit(name, case):
  runner, outputs = _engine(name, case), _outputs(name, case)
  arrays = runner.to_arrays(outputs[2].state)
  restored = runner.from_arrays(_through_a_file(arrays))
  (found,) = _run(runner, _COHORTS[3:4], state=restored, first=3)
  wanted, again = (runner.to_arrays(o.state) for o in (outputs[3], found))
  assert wanted.keys() == again.keys() == arrays.keys()
  for key, array in wanted.items():
    np.testing.assert_array_equal(again[key], array)
  for one, other in zip(found.examples, outputs[3].examples):
    np.testing.assert_array_equal(one, other)


# Chunks and devices.


@pytest.mark.parametrize('case', ['joint', 'split', 'parallel_panel'])
def test_chunks_do_not_change_the_round(monkeypatch, case):
  monkeypatch.setattr(inprocess_engine, '_CHUNK_EXAMPLES', 9 * 64)
  monkeypatch.setattr(inprocess_engine, '_CHUNK_UPDATES', 3 * 4 * 47)
  monkeypatch.setattr(inprocess_engine, '_MOST_KEPT_UPDATES', 0)
  runner, sizes = _engine('inprocess', case), []
  drawn = runner._drawn
  monkeypatch.setattr(
    runner, '_drawn', lambda c: sizes.append(len(c)) or drawn(c)
  )
  found = _run(runner)
  _check_same([runner] * 2, [_outputs('inprocess', case), found])
  assert 1 <= max(sizes) <= 3


_TWO_DEVICES = """
  import tensorflow as tf
  cpu = tf.config.list_physical_devices('CPU')[0]
  tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2
  )
  from tests.learning import instance_engines_test as t
  from tf_bdp import instance_mechanism
  from tf_bdp.learning import engine, inprocess_engine

  instance_mechanism.check_holdings = lambda *_: None
  data, algorithm = t._data(), algorithm_lib.Algorithm(learning_rate=0.5, momentum=0.5)

  def runner(strategy, level, **options):
    mechanism = t._mechanism(level, algorithm, data, **options)
    return inprocess_engine.InProcessEngine(
      t._model, data, mechanism, algorithm, 5, strategy, seed=7
    )

  two = tf.distribute.MirroredStrategy(['/cpu:0', '/cpu:1'])
  assert two.num_replicas_in_sync == 2
  for level, options in (
    ('joint', {'panel_examples': 4}),
    ('split', {'server_noise_multiplier': 1.0, 'clipping': 'example'}),
  ):
    runners = [runner(strategy, level, **options) for strategy in (None, two)]
    # A single client leaves one device without any.
    cohorts = (*t._COHORTS[:4], (3,))
    t._check_same(runners, [t._run(r, cohorts) for r in runners])
    t._check_same(runners, [t._run(r, [(), (3, 4)], []) for r in runners])
  print('ALL THE SAME')
"""


@pytest.mark.slow
def test_two_devices_do_the_same_rounds_as_one():
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(_TWO_DEVICES)],
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert 'ALL THE SAME' in done.stdout


# Accounting.


def _small_data(sizes, seed=2):
  generator = np.random.default_rng(seed)
  ends = np.cumsum(sizes)
  features = generator.normal(size=(ends[-1], 4, 4, 1)).astype(np.float32)
  labels = generator.integers(0, 3, ends[-1])
  return federated_data.FederatedData(
    features, labels, np.split(np.arange(ends[-1]), ends[:-1])
  )


def _runner(level, data, **options):
  algorithm = algorithm_lib.Algorithm(learning_rate=_RATE)
  mechanism = _mechanism(level, algorithm, data, **options)
  return inprocess_engine.InProcessEngine(
    _model, data, mechanism, algorithm, noise_seed=5, seed=7
  )


def test_sequential_with_one_client_is_central_training_by_hand():
  data = _small_data([40])
  runner = _runner('instance_sequential', data, batch_size=10)
  outputs = _run(runner, [(0,)] * 4, [])
  model, draws = _model(), runner._batches
  accountant = accountant_lib.BayesianAccountant(
    'holder', estimator='student_t', total_rounds=4
  )
  by_engine = accountant_lib.BayesianAccountant(
    'holder', estimator='student_t', total_rounds=4
  )
  for number, output in enumerate(outputs):
    draw = draws.draw(number, 0)
    features, labels = data.features[draw.indices], data.labels[draw.indices]
    assert draw.drawn.all()
    with tf.GradientTape() as tape:
      loss = algorithm_lib.LOSS(labels, model(features))
    gradient = tape.gradient(loss, model.trainable_variables)
    flat = _clipped(np.concatenate([np.ravel(g) for g in gradient]))
    noise = noise_lib.client_normal(flat.size, 5, number, 0, 0).numpy()
    step = private_steps.parts(
      tf.constant(_RATE * (flat + 0.4 * _CLIP * noise), tf.float32),
      model.trainable_variables,
    )
    for variable, part in zip(model.trainable_variables, step):
      variable.assign_sub(part)
    for found, wanted in zip(
      runner.model_weights(output.state), model.get_weights()
    ):
      np.testing.assert_allclose(found, wanted, atol=3e-6)
    # Sampled with q = B / N, noise 0.4 C, and moves of at most 2 C.
    accountant.compose(
      events.BayesianGaussianEvent(
        output.examples.squared_moves.astype(np.float64) / 0.4**2,
        10 / 40,
        (2 / 0.4) ** 2,
      )
    )
    by_engine.compose(runner.mechanism.example_event(output.examples, 1))
  assert by_engine.get_epsilon(1e-3) == accountant.get_epsilon(1e-3)
  orders = np.array(accountant.settings['orders'])
  central = dp_accounting.rdp.RdpAccountant((orders + 1.0).tolist()).compose(
    dp_accounting.PoissonSampledDpEvent(
      10 / 40, dp_accounting.GaussianDpEvent(0.4 / 2)
    ),
    4,
  )
  assert by_engine.get_worst_case_epsilon(1e-3) == pytest.approx(
    central.get_epsilon(1e-3), rel=1e-9
  )


def test_sequential_adds_up_the_clients_costs_with_q_of_all_examples():
  sizes = (12, 8, 20)
  data = _small_data(sizes)
  runner = _runner('instance_sequential', data, batch_size=6)
  (output,) = _run(runner, [(0, 1, 2)], [])
  by_engine, by_hand = (
    accountant_lib.BayesianAccountant(
      'holder', estimator='student_t', total_rounds=3
    )
    for _ in range(2)
  )
  by_engine.compose(runner.mechanism.example_event(output.examples, 3))
  for moves in output.examples.moves():
    assert moves.size >= 3
    by_hand.compose(
      events.BayesianGaussianEvent(
        moves.astype(np.float64) / 0.4**2, 6 / 40, (2 / 0.4) ** 2
      )
    )
  assert by_engine.get_epsilon(1e-3) == by_hand.get_epsilon(1e-3)


@pytest.mark.parametrize('level', ['instance_parallel', 'instance_aggregate'])
def test_parallel_is_the_largest_of_the_clients_own_accounts(level):
  sizes = (12, 8, 20)
  data = _small_data(sizes)
  runner = _runner(level, data, batch_size=6)
  (output,) = _run(runner, [(0, 1, 2)], [0, 1])
  variance, inclusions = 0.4**2, (1.0, 1.0, 1.0)
  if level == 'instance_aggregate':
    # The noise of all three, which are three of 4 / 0.4 clients. Of the last
    # nothing would be known if it had not come.
    variance, inclusions = 3 * 0.4**2, (0.3, 0.3, 1.0)

  def account(event):
    accountant = accountant_lib.BayesianAccountant(
      'holder', estimator='bernstein', total_rounds=1
    )
    return accountant.compose(event)

  whole = account(runner.mechanism.example_event(output.examples, 3))
  own = [
    account(
      events.BayesianGaussianEvent(
        moves.astype(np.float64) / variance,
        6 / size,
        4 / variance,
        inclusion_probability=inclusion,
      )
    )
    for size, moves, inclusion in zip(
      sizes, output.examples.moves(), inclusions
    )
  ]
  # Of every order, with a tenth of δ for bounds that fail.
  costs = np.array([accountant._costs(1e-4) for accountant in own])
  np.testing.assert_allclose(
    whole._costs(1e-4), np.max(costs, axis=0), rtol=1e-12
  )
  # No client's own ε is more.
  assert whole.get_epsilon(1e-3) >= max(a.get_epsilon(1e-3) for a in own)
  assert np.all(np.ptp(costs, axis=0) > 0)
