"""Tests of `InstanceMechanism`: section 5 of ACCOUNTING.md, by definition."""

import dataclasses
import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from scipy import fft, special, stats

from tests.accounting import oracles
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import events, ledger, mean_bounds, sampled_gaussian
from tf_bdp.mechanisms import client as mechanism_lib
from tf_bdp.mechanisms import instance as instance_mechanism

_DELTA = 1e-5
_ORDERS = (1, 2, 4, 8, 16)
# σ, C, B, α, n̄, N and z, of which no two are alike.
_SIGMA, _CLIP, _BATCH, _ALPHA, _EXPECTED, _TOTAL = 0.8, 1.5, 4, 0.25, 6.0, 400
_SERVER = 0.7
_CLIENTS = 24  # n̄ / α
_LEVELS = instance_mechanism.LEVELS
_INSTANCE_LEVELS = instance_mechanism.INSTANCE_LEVELS
_CLIPPINGS = instance_mechanism.CLIPPINGS
pytestmark = pytest.mark.filterwarnings('ignore:The best order')


def _mechanism(level='instance_aggregate', **more):
  settings = {
    'noise_multiplier': _SIGMA,
    'clip_norm': _CLIP,
    'batch_size': _BATCH,
    'participation_probability': _ALPHA,
    'expected_clients': _EXPECTED,
    'total_examples': _TOTAL,
  }
  if level == 'split':
    settings['server_noise_multiplier'] = _SERVER
  return instance_mechanism.InstanceMechanism(level, **{**settings, **more})


def _groups(parts, in_every_round=True):
  """Groups from tuples of client, step, holding and squared moves over C²."""
  clients, steps, holdings, moves = zip(*parts)
  return instance_mechanism.ExampleGroups(
    np.array(clients),
    np.array(steps),
    np.array(holdings),
    np.array([len(part) for part in moves]),
    np.concatenate([np.zeros(0), *moves]),
    np.full(len(parts), in_every_round),
  )


def _random_groups(clients, holding=20, steps=1, units=5, most=1.0, seed=0):
  generator = np.random.default_rng(seed)
  return _groups(
    [
      (client, step, holding, most * generator.random(units))
      for client in range(clients)
      for step in range(steps)
    ]
  )


def _accountant(composition='product', **settings):
  settings.setdefault('orders', _ORDERS)
  return accountant_lib.BayesianAccountant(composition, **settings)


# --- What clients send, by definition.


def _clip(vector, norm):
  length = np.linalg.norm(vector)
  return vector if length <= norm else vector * (norm / length)


def _sent(mechanism, gradients):
  """What the noise is added to, for the gradients of a batch, [b, size]."""
  clip_norm = mechanism.clip_norm
  if not len(gradients):
    return np.zeros(np.shape(gradients)[1])
  if mechanism.clipping == 'batch':
    return _clip(np.mean(gradients, axis=0), clip_norm)
  clipped = [_clip(gradient, clip_norm) for gradient in gradients]
  return np.sum(clipped, axis=0) / mechanism.batch_size


def _client_deviation(mechanism):
  """Of the noise in what a client sends."""
  deviation = mechanism.noise_multiplier * mechanism.clip_norm
  if mechanism.clipping == 'example':
    deviation /= mechanism.batch_size
  return deviation


def _mean_variance(mechanism, count):
  """Of the noise in the mean of what so many clients send, the server's too."""
  server = mechanism.server_noise_multiplier * mechanism.clip_norm
  own = count * _client_deviation(mechanism) ** 2 / count**2
  return own + (server / mechanism.expected_clients) ** 2


def _batches(clients, seed=0, size=3):
  """Gradients of a few examples for every client, some longer than C."""
  generator = np.random.default_rng(seed)
  return [
    generator.normal(size=(4, size)) * generator.uniform(0.3, 3, (4, 1))
    for _ in range(clients)
  ]


def _squared_moves(mechanism, batch):
  """‖f(B) - f(B∖x)‖² / C² of all examples of a batch."""
  whole = _sent(mechanism, batch)
  rest = [
    _sent(mechanism, np.delete(batch, i, axis=0)) for i in range(len(batch))
  ]
  return np.sum((whole - rest) ** 2, axis=1) / mechanism.clip_norm**2


def _sampled(event):
  """The groups of all rounds of an event."""
  return [group for part, _ in ledger.rounds_of(event) for group in part.groups]


_kinds = pytest.mark.parametrize(
  'level, clipping, server',
  [
    (level, clipping, server)
    for level in _LEVELS
    for clipping in _CLIPPINGS
    for server in (0.0, _SERVER)
    if (server and level in ('instance_aggregate', 'joint'))
    or bool(server) == (level == 'split')
  ],
)


@_kinds
@pytest.mark.parametrize('count', [1, 2, 7])
def test_distances_of_examples_are_those_of_leaving_one_out(
  level, clipping, server, count
):
  mechanism = _mechanism(
    level, clipping=clipping, server_noise_multiplier=server
  )
  batches = _batches(count)
  groups = _groups(
    [(i, 0, 20, _squared_moves(mechanism, b)) for i, b in enumerate(batches)]
  )
  found = _sampled(mechanism.example_event(groups, count))
  assert len(found) == count
  sent = [_sent(mechanism, batch) for batch in batches]
  for i, group in enumerate(found):
    for x, squared_distance in enumerate(group.squared_distances):
      moved = _sent(mechanism, np.delete(batches[i], x, axis=0))
      if mechanism.accounting == 'aggregate':
        # Only the mean is released.
        others = [*sent[:i], moved, *sent[i + 1 :]]
        move = np.mean(sent, axis=0) - np.mean(others, axis=0)
        variance = _mean_variance(mechanism, count)
      else:
        # The server sees what each client sends.
        move = sent[i] - moved
        variance = _client_deviation(mechanism) ** 2
      assert squared_distance == pytest.approx(
        float(move @ move) / variance, rel=1e-12
      )


@pytest.mark.parametrize('clipping', _CLIPPINGS)
@pytest.mark.parametrize('server', [0.0, _SERVER])
@pytest.mark.parametrize('last_mean', [False, True])
@pytest.mark.parametrize('count', [1, 2, 7])
def test_distances_of_clients_in_joint_are_those_of_zeroing_one_out(
  clipping, server, last_mean, count
):
  mechanism = _mechanism(
    'joint',
    clipping=clipping,
    server_noise_multiplier=server,
    reference_is_last_mean=last_mean,
  )
  generator = np.random.default_rng(count)
  updates = [
    _clip(vector, _CLIP) for vector in generator.normal(size=(count, 3))
  ]
  reference = np.array([0.3, -0.2, 0.4]) if last_mean else np.zeros(3)
  # A panel of absent ones makes three of them; for them nothing is different.
  updates += [updates[0]] * 3
  found = mechanism.client_event(
    np.array([np.sum((u - reference) ** 2) for u in updates]),
    np.arange(len(updates)) < count,
    count,
    _CLIP,
    panel=True,
  )
  # That it takes part is seen, so nothing is gained but by its inclusion.
  assert found.participation_probability == 1.0
  assert found.inclusion_probability == pytest.approx(count / _CLIENTS)
  assert found.panel
  for update, squared_distance in zip(updates, found.squared_distances):
    others = np.sum(updates[: count - 1], axis=0)
    move = (others + update) / count - (others + reference) / count
    assert squared_distance == pytest.approx(
      float(move @ move) / _mean_variance(mechanism, count), rel=1e-12
    )


def test_joint_without_more_noise_is_the_formula_of_section_5():
  # r = ‖u‖ / (√n σ C).
  event = _mechanism('joint').client_event(
    np.array([0.0, 0.5, 1.0]) ** 2, np.ones(3, bool), 9, _CLIP, False
  )
  np.testing.assert_allclose(
    np.sqrt(event.squared_distances),
    np.array([0.0, 0.5, 1.0]) / (3 * _SIGMA * _CLIP),
    rtol=1e-12,
  )


# --- How often an example is drawn.


@pytest.mark.parametrize(
  'level, holding, expected',
  [
    # B / N, whoever holds the example.
    ('instance_sequential', 20, 4 / 400),
    ('instance_sequential', 4, 4 / 400),
    ('instance_sequential', 3, 3 / 400),  # All of them are drawn.
    # B / N_i.
    ('instance_parallel', 20, 4 / 20),
    ('instance_parallel', 4, 1.0),
    ('instance_parallel', 3, 1.0),
    # B / N_i, too: α counts as an inclusion.
    ('instance_aggregate', 20, 4 / 20),
    ('instance_aggregate', 4, 1.0),
    ('instance_aggregate', 3, 1.0),
    ('joint', 20, 4 / 20),
    ('split', 20, 4 / 20),
  ],
)
def test_the_probability_of_an_example(level, holding, expected):
  mechanism = _mechanism(level)
  assert mechanism.example_probability(holding) == pytest.approx(expected)
  groups = _groups([(0, 0, holding, [0.1] * 3)])
  for group in _sampled(mechanism.example_event(groups, 2)):
    assert group.participation_probability == pytest.approx(expected)


@pytest.mark.parametrize(
  'level, accounting, expected',
  [
    ('joint', 'sequential', 4 / 400),
    ('joint', 'parallel', 4 / 20),
    ('joint', 'aggregate', 4 / 20),
    ('split', 'sequential', 4 / 400),
    ('split', 'parallel', 4 / 20),
  ],
)
def test_joint_and_split_count_examples_as_they_are_told(
  level, accounting, expected
):
  mechanism = _mechanism(level, accounting=accounting)
  assert mechanism.example_probability(20) == pytest.approx(expected)
  instance = _mechanism(f'instance_{accounting}')
  groups = _random_groups(3)
  assert mechanism.example_event(groups, 3) == instance.example_event(groups, 3)


@pytest.mark.parametrize('level', _LEVELS)
@pytest.mark.parametrize('steps', [1, 2])
@pytest.mark.parametrize('count', [1, 6, 24, 30])
def test_examples_are_included_as_n_of_all_clients_only_in_aggregate(
  level, steps, count
):
  if level == 'joint' and steps > 1:
    return  # Refused; see below.
  mechanism = _mechanism(level, local_steps=steps)
  # Of several steps others' noise does not count: each is seen by itself.
  amplified = level in ('instance_aggregate', 'joint') and steps == 1
  expected = min(1.0, count / _CLIENTS) if amplified else 1.0
  groups = _random_groups(2, steps=steps)
  for group in _sampled(mechanism.example_event(groups, count)):
    assert group.inclusion_probability == pytest.approx(expected, rel=1e-12)
  reported = mechanism.reported_event('example', np.ones(5), 1e-9, count)
  # Clients report when they take part.
  for part, entry in ledger.rounds_of(reported):
    assert part.inclusion_probability == entry.inclusion_probability == 1.0


def test_given_n_a_client_is_one_of_them_with_n_of_all():
  # Poisson sampling, by enumeration: Pr[i takes part | n took part].
  alpha, clients = 0.3, 6
  mechanism = _mechanism(
    participation_probability=alpha, expected_clients=alpha * clients
  )
  for count in range(clients + 1):
    rounds = [
      comers
      for comers in itertools.product((False, True), repeat=clients)
      if sum(comers) == count
    ]
    weights = [
      math.prod(alpha if came else 1 - alpha for came in comers)
      for comers in rounds
    ]
    mine = sum(w for w, comers in zip(weights, rounds) if comers[0])
    assert mechanism.inclusion_probability(count) == pytest.approx(
      mine / sum(weights), rel=1e-12
    )


@pytest.mark.parametrize('level', _LEVELS)
@pytest.mark.parametrize('smallest', [1, 3, 4, 30])
@pytest.mark.parametrize('batch', [1, 4, 1000])
def test_no_example_is_more_likely_than_the_likeliest(level, smallest, batch):
  mechanism = _mechanism(level, smallest_holding=smallest, batch_size=batch)
  largest = mechanism.largest_example_probability
  holdings = [smallest, smallest + 1, 100, _TOTAL]
  found = [mechanism.example_probability(holding) for holding in holdings]
  assert max(found) <= largest <= 1
  if mechanism.accounting != 'sequential':
    assert largest == found[0]


# --- Worst cases.


@pytest.mark.parametrize(
  'level, clipping, count, expected',
  [
    ('instance_sequential', 'batch', 9, 2 / _SIGMA),
    ('instance_sequential', 'example', 9, 1 / _SIGMA),
    ('instance_parallel', 'batch', 9, 2 / _SIGMA),
    ('instance_parallel', 'example', 9, 1 / _SIGMA),
    ('instance_aggregate', 'batch', 1, 2 / _SIGMA),
    ('instance_aggregate', 'batch', 9, 2 / (3 * _SIGMA)),
    ('instance_aggregate', 'example', 1, 1 / _SIGMA),
    ('instance_aggregate', 'example', 9, 1 / (3 * _SIGMA)),
    ('joint', 'batch', 9, 2 / (3 * _SIGMA)),
    ('joint', 'example', 9, 1 / (3 * _SIGMA)),
    ('split', 'batch', 9, 2 / _SIGMA),
    ('split', 'example', 9, 1 / _SIGMA),
  ],
)
def test_the_worst_case_of_an_example(level, clipping, count, expected):
  mechanism = _mechanism(level, clipping=clipping)
  assert mechanism.worst_case_squared_distance(count) == pytest.approx(
    expected**2, rel=1e-12
  )


@pytest.mark.parametrize('level', ['instance_aggregate', 'joint'])
@pytest.mark.parametrize('clipping, move', [('batch', 2.0), ('example', 0.25)])
@pytest.mark.parametrize('count', [1, 9])
def test_noise_of_the_server_adds_its_variance(level, clipping, move, count):
  mechanism = _mechanism(
    level, clipping=clipping, server_noise_multiplier=_SERVER
  )
  own = _SIGMA * _CLIP / (1 if clipping == 'batch' else _BATCH)
  # s² = (σC)²/n + (zC/n̄)²
  variance = own**2 / count + (_SERVER * _CLIP / _EXPECTED) ** 2
  assert mechanism.worst_case_squared_distance(count) == pytest.approx(
    (move * _CLIP / count) ** 2 / variance, rel=1e-12
  )
  assert mechanism.mean_variance(count) * _CLIP**2 == pytest.approx(variance)


@pytest.mark.parametrize('last_mean, move', [(False, 1.0), (True, 2.0)])
@pytest.mark.parametrize('count', [1, 2, 9])
def test_the_worst_case_of_a_client_in_joint(last_mean, move, count):
  mechanism = _mechanism('joint', reference_is_last_mean=last_mean)
  assert mechanism.worst_case_client_squared_distance(count) == pytest.approx(
    (move / (math.sqrt(count) * _SIGMA)) ** 2, rel=1e-12
  )
  assert mechanism.worst_case_client_squared_distance(0) == 0.0


@_kinds
def test_no_examples_move_further_than_the_worst_case_which_is_reached(
  level, clipping, server
):
  mechanism = _mechanism(
    level, clipping=clipping, server_noise_multiplier=server
  )
  axis = np.eye(3)[0] * _CLIP
  adversarial = [
    np.array([9 * axis, -2 * axis]),  # From one end of the ball to the other.
    np.array([-3 * axis]),
    np.array([2 * axis, 2 * axis]),
  ]
  random = [batch for seed in range(60) for batch in _batches(1, seed)]
  largest = max(
    float(np.max(_squared_moves(mechanism, batch)))
    for batch in itertools.chain(adversarial, random)
  )
  assert largest == pytest.approx(mechanism.worst_case_move**2, rel=1e-12)
  groups = _groups([(0, 0, 20, [largest] * 3)])
  for count in (1, 5):
    (group,) = _sampled(mechanism.example_event(groups, count))
    worst = mechanism.worst_case_squared_distance(count)
    np.testing.assert_allclose(group.squared_distances, worst, rtol=1e-12)
    assert group.worst_case_squared_distance == worst


@pytest.mark.parametrize('level', _LEVELS)
def test_rounding_does_not_carry_a_move_beyond_the_worst_case(level):
  mechanism = _mechanism(level)
  above = np.float32(4.0) * np.float32(1 + 1e-3)
  groups = _groups([(0, 0, 20, np.full(4, above))])
  (group,) = _sampled(mechanism.example_event(groups, 3))
  worst = mechanism.worst_case_squared_distance(3)
  np.testing.assert_array_equal(group.squared_distances, worst)
  assert group.worst_case_squared_distance == worst


def test_rounding_does_not_carry_a_client_beyond_the_worst_case():
  mechanism = _mechanism('joint')
  event = mechanism.client_event(
    np.full(4, _CLIP**2 * 1.001), np.ones(4, bool), 4, _CLIP, False
  )
  worst = mechanism.worst_case_client_squared_distance(4)
  np.testing.assert_array_equal(event.squared_distances, worst)


@pytest.mark.parametrize('level', _LEVELS)
@pytest.mark.parametrize('units', [0, 1, 2])
def test_too_few_measured_examples_cost_the_worst_case(level, units):
  mechanism = _mechanism(level)
  groups = _groups([(0, 0, 20, [0.01] * 4), (1, 0, 30, [0.01] * units)])
  enough, few = _sampled(mechanism.example_event(groups, 2))
  worst = mechanism.worst_case_squared_distance(2)
  assert np.all(enough.squared_distances < worst)
  np.testing.assert_array_equal(
    few.squared_distances, [worst] * mean_bounds.FEWEST_UNITS
  )
  assert few.participation_probability == mechanism.example_probability(30)


@pytest.mark.parametrize('units', [0, 1, 2])
def test_too_few_measured_clients_cost_the_worst_case_in_joint(units):
  mechanism = _mechanism('joint')
  event = mechanism.client_event(
    np.full(units, 0.01), np.ones(units, bool), 2, _CLIP, False
  )
  np.testing.assert_array_equal(
    event.squared_distances,
    [mechanism.worst_case_client_squared_distance(2)] * 3,
  )


@pytest.mark.parametrize('level', _LEVELS)
@pytest.mark.parametrize('clipping', _CLIPPINGS)
def test_the_ledger_of_examples_is_that_of_dp_accounting(level, clipping):
  mechanism = _mechanism(level, clipping=clipping)
  groups = _random_groups(4, most=mechanism.worst_case_move**2)
  accountant = _accountant()
  accountant.compose(mechanism.example_event(groups, 4), 10)
  count = 10
  z = _SIGMA / (2.0 if clipping == 'batch' else 1.0)
  q = _BATCH / 20
  if mechanism.accounting == 'sequential':
    q, count = _BATCH / _TOTAL, 4 * 10
  elif mechanism.accounting == 'aggregate':
    z *= 2.0  # The root of n; what n of all clients gains is left out.
  event = dp_accounting.PoissonSampledDpEvent(
    q, dp_accounting.GaussianDpEvent(z)
  )
  found, wanted = (
    dp_accounting.rdp.RdpAccountant([2, 3, 5, 9, 17]) for _ in range(2)
  )
  epsilon = wanted.compose(event, count).get_epsilon(_DELTA)
  found.compose(accountant.ledger)
  assert found.get_epsilon(_DELTA) == pytest.approx(epsilon, rel=1e-9)
  assert accountant.get_epsilon(_DELTA) <= epsilon * (1 + 1e-9)


# --- Over clients and steps.


def _log_costs(squared_distances, q, orders=_ORDERS):
  """ℓ of every unit, in 60 digits."""
  return np.array(
    [
      [oracles.log_moment(r2, q, order) for order in orders]
      for r2 in squared_distances
    ]
  )


def _included(log_costs, probability):
  """log(1 - a + a exp ℓ), in 60 digits."""

  def included(cost):
    with mpmath.workdps(60):
      excess = mpmath.mpf(probability) * mpmath.expm1(mpmath.mpf(cost))
      return float(mpmath.log1p(excess))

  return np.vectorize(included, otypes=[float])(log_costs)


def _population_epsilon(event, count=1):
  accountant = _accountant(estimator='population').compose(event, count)
  return accountant.get_epsilon(_DELTA)


def _parts():
  """Three clients that differ in what they hold and how far it moves."""
  generator = np.random.default_rng(4)
  return [
    (7, 0, 20, generator.random(5)),
    (2, 0, 100, 4 * generator.random(9)),
    (5, 0, 3, 0.2 * generator.random(3)),
  ]


def test_sequential_costs_are_the_sum_over_clients():
  mechanism = _mechanism('instance_sequential')
  event = mechanism.example_event(_groups(_parts()), 3)
  costs = sum(
    oracles.log_mean_exp(
      _log_costs(np.array(moves) / _SIGMA**2, min(_BATCH, holding) / _TOTAL)
    )
    for _, _, holding, moves in _parts()
  )
  assert _population_epsilon(event) == pytest.approx(
    oracles.epsilon(_ORDERS, costs, _DELTA, 'tight'), rel=1e-9
  )


@pytest.mark.parametrize('level', ['instance_parallel', 'instance_aggregate'])
def test_the_other_costs_are_the_maximum_over_clients(level):
  mechanism = _mechanism(level)
  event = mechanism.example_event(_groups(_parts()), 3)
  variance, inclusion = _SIGMA**2, 1.0
  if level == 'instance_aggregate':
    variance, inclusion = 3 * _SIGMA**2, 3 / _CLIENTS
  by_client = [
    oracles.log_mean_exp(
      _included(
        _log_costs(np.array(moves) / variance, min(1, _BATCH / holding)),
        inclusion,
      )
    )
    for _, _, holding, moves in _parts()
  ]
  # Neither of them is the costliest at all orders.
  assert len(set(np.argmax(by_client, axis=0))) > 1
  costs = np.max(by_client, axis=0)
  assert _population_epsilon(event) == pytest.approx(
    oracles.epsilon(_ORDERS, costs, _DELTA, 'tight'), rel=1e-9
  )


@pytest.mark.parametrize('level', ['instance_sequential', 'instance_parallel'])
def test_steps_add_up_and_clients_may_take_fewer(level):
  mechanism = _mechanism(level, local_steps=3)
  parts = [
    *((0, step, 20, [0.3 + step] * 4) for step in range(3)),
    *((1, step, 20, [0.9 - step / 5] * 4) for step in range(2)),
  ]
  event = mechanism.example_event(_groups(parts), 2)
  q = mechanism.example_probability(20)
  if level == 'instance_sequential':
    farthest = [part[3][0] for part in parts]
  else:
    farthest = [0.9, 1.3, 2.3]
  costs = sum(_log_costs([squared / _SIGMA**2], q)[0] for squared in farthest)
  assert _population_epsilon(event) == pytest.approx(
    oracles.epsilon(_ORDERS, costs, _DELTA, 'tight'), rel=1e-9
  )


def test_in_a_panel_every_step_has_the_groups_of_all_clients_in_their_order():
  mechanism = _mechanism('instance_parallel', local_steps=2, panel_examples=4)
  # A client that is not there, or takes no second step, moves nothing in it.
  parts = [
    (3, 0, 20, [0.1] * 4),
    (3, 1, 20, [0.2] * 4),
    (1, 0, 40, [0.3] * 4),
    (1, 1, 40, [0.0] * 4),
  ]
  event = mechanism.example_event(_groups(parts), 1)
  rounds = [part for part, _ in ledger.rounds_of(event)]
  assert [
    [group.squared_distances[0] * _SIGMA**2 for group in part.groups]
    for part in rounds
  ] == [pytest.approx([0.1, 0.3]), pytest.approx([0.2, 0.0])]
  assert all(
    [g.participation_probability for g in part.groups] == [0.2, 0.1]
    for part in rounds
  )
  assert all(part.panel for part in rounds)
  panel = _accountant('panel', estimator='population').compose(event, 5)
  by_client = [
    5 * (_log_costs([first], q)[0] + _log_costs([second], q)[0])
    for first, second, q in (
      (0.1 / _SIGMA**2, 0.2 / _SIGMA**2, 0.2),
      (0.3 / _SIGMA**2, 0.0, 0.1),
    )
  ]
  assert panel.get_epsilon(_DELTA) == pytest.approx(
    oracles.epsilon(_ORDERS, np.max(by_client, axis=0), _DELTA, 'tight'),
    rel=1e-9,
  )


@pytest.mark.parametrize('estimator', sorted(mean_bounds.ESTIMATORS))
@pytest.mark.parametrize('composition', ['holder', 'product'])
@pytest.mark.parametrize('clipping', _CLIPPINGS)
def test_one_client_with_all_data_is_centralised_training(
  composition, estimator, clipping
):
  mechanism = _mechanism(
    'instance_sequential',
    clipping=clipping,
    participation_probability=1.0,
    expected_clients=1.0,
  )
  total = {'total_rounds': 3} if composition == 'holder' else {}
  federated, central = (
    _accountant(composition, estimator=estimator, **total) for _ in range(2)
  )
  for seed in range(3):
    (batch,) = _batches(1, seed)
    moves = _squared_moves(mechanism, batch)
    groups = _groups([(0, 0, _TOTAL, moves)])
    federated.compose(mechanism.example_event(groups, 1))
    central.compose(
      events.BayesianGaussianEvent(
        moves * _CLIP**2 / _client_deviation(mechanism) ** 2,
        _BATCH / _TOTAL,
        (2.0 if clipping == 'batch' else 1.0) ** 2 / _SIGMA**2,
      )
    )
  assert federated.get_epsilon(_DELTA) == pytest.approx(
    central.get_epsilon(_DELTA), rel=1e-12
  )
  # So it is by the other two, which then have the same q and noise.
  for level in ('instance_parallel', 'instance_aggregate'):
    other = dataclasses.replace(mechanism, level=level, accounting='')
    (found,) = _sampled(other.example_event(groups, 1))
    (wanted,) = _sampled(mechanism.example_event(groups, 1))
    np.testing.assert_allclose(
      found.squared_distances, wanted.squared_distances, rtol=1e-12
    )
    assert found.participation_probability == wanted.participation_probability


@pytest.mark.parametrize('count', [2, 10, 100])
@pytest.mark.parametrize('order', [1, 2, 5])
def test_sequential_and_aggregate_agree_to_first_order(count, order):
  # All n clients with N_i examples each, always there: N = n N_i, and
  # n (B/N)² r² = (B/N_i)² r²/n.
  holding, batch = 1000, 5
  settings = {
    'noise_multiplier': 100.0,
    'batch_size': batch,
    'participation_probability': 1.0,
    'expected_clients': float(count),
    'total_examples': count * holding,
  }
  parts = [(client, 0, holding, [1.0] * 3) for client in range(count)]
  costs = {}
  for level in ('instance_sequential', 'instance_aggregate'):
    groups = _sampled(
      _mechanism(level, **settings).example_event(_groups(parts), count)
    )
    by_client = [
      sampled_gaussian.log_moments(
        group.squared_distances, group.participation_probability, [order]
      )[0, 0]
      for group in groups
    ]
    sequential = level == 'instance_sequential'
    costs[level] = sum(by_client) if sequential else max(by_client)
  # λ(λ+1)/2 times that, but for terms of the next order.
  first = order * (order + 1) / 2 * (batch / holding) ** 2 / 100**2 / count
  assert costs['instance_sequential'] == pytest.approx(first, rel=1e-3)
  assert costs['instance_aggregate'] == pytest.approx(first, rel=1e-3)


def test_several_steps_with_aggregate_accounting_count_as_in_parallel():
  aggregate = _mechanism('instance_aggregate', local_steps=2)
  parallel = _mechanism('instance_parallel', local_steps=2)
  assert not aggregate.averages_noise
  assert aggregate.example_probability(20) == _BATCH / 20
  assert aggregate.largest_example_probability == 1.0
  assert aggregate.example_variance(9) == pytest.approx(_SIGMA**2)
  assert aggregate.worst_case_squared_distance(9) == 4 / _SIGMA**2
  groups = _random_groups(3, steps=2)
  assert aggregate.example_event(groups, 3) == parallel.example_event(groups, 3)
  # Nor does the noise count that the server adds to what follows.
  more = dataclasses.replace(aggregate, server_noise_multiplier=_SERVER)
  assert more.example_event(groups, 3) == parallel.example_event(groups, 3)


def test_with_one_step_aggregate_accounting_averages_noise():
  assert _mechanism('instance_aggregate').averages_noise
  assert _mechanism('joint').averages_noise
  for level in ('instance_sequential', 'instance_parallel', 'split'):
    assert not _mechanism(level).averages_noise
  assert not _mechanism('joint', accounting='parallel').averages_noise


def test_parallel_costs_do_not_depend_on_how_many_others_came():
  mechanism = _mechanism('instance_parallel')
  groups = _random_groups(2)
  assert mechanism.example_event(groups, 2) == mechanism.example_event(
    groups, 200
  )


def test_more_participants_hide_an_example_better_in_aggregate():
  mechanism = _mechanism(server_noise_multiplier=_SERVER)
  groups = _random_groups(1)
  found = [
    _sampled(mechanism.example_event(groups, count))[0].squared_distances
    for count in (1, 2, 5, 50)
  ]
  assert np.all(np.diff(found, axis=0) < 0)


@pytest.mark.parametrize('server', [0.0, _SERVER])
@pytest.mark.parametrize('count', [1, 2, 9])
def test_who_did_not_come_is_not_charged_less_than_if_it_had(server, count):
  # With it there would have been one participant more, and its noise.
  mechanism = _mechanism('joint', server_noise_multiplier=server)
  joined = count + 1
  move = (0.6 * _CLIP / joined) ** 2 / _mean_variance(mechanism, joined)
  client = mechanism.client_event(
    np.full(3, (0.6 * _CLIP) ** 2), np.zeros(3, bool), count, _CLIP, True
  )
  assert np.all(client.squared_distances > move)
  groups = _groups([(0, 0, 20, [0.6**2] * 3)])
  (group,) = _sampled(mechanism.example_event(groups, count))
  assert np.all(group.squared_distances > move)


# --- What each client can tell for itself.


@pytest.mark.parametrize('level', ['instance_parallel', 'split', 'joint'])
def test_a_client_by_itself_loses_what_its_own_groups_cost(level):
  steps = 1 if level == 'joint' else 2
  mechanism = _mechanism(level, accounting='parallel', local_steps=steps)
  groups = _random_groups(3, steps=steps)
  found = mechanism.local_events(groups, 3)
  assert sorted(found) == [0, 1, 2]
  for client, event in found.items():
    mine = groups.clients == client
    alone = _groups(
      [part[1:] for part in zip(mine, *groups[:3], groups.moves()) if part[0]]
    )
    assert _sampled(event) == _sampled(mechanism.example_event(alone, 1))
    epsilon = _population_epsilon(event)
    assert epsilon <= _population_epsilon(mechanism.example_event(groups, 3))


@pytest.mark.parametrize(
  'level', ['instance_sequential', 'instance_aggregate', 'joint']
)
def test_by_itself_a_client_cannot_count_on_others(level):
  with pytest.raises(ValueError, match='Clients bound their own loss'):
    _mechanism(level).local_events(_random_groups(2), 2)


# --- The client part of the split baseline.


@pytest.mark.parametrize('count', [0, 1, 2, 8])
@pytest.mark.parametrize('units', [0, 2, 5])
@pytest.mark.parametrize('panel', [False, True])
def test_split_hides_clients_as_the_mean_of_clipped_updates_does(
  count, units, panel
):
  mechanism = _mechanism('split')
  server = mechanism_lib.GaussianMechanism(
    'mean', _SERVER, _CLIP, _ALPHA, _EXPECTED
  )
  generator = np.random.default_rng(units)
  measured = (
    _CLIP**2 * generator.random(units),
    generator.random(units) < 0.5,
    *(count, _CLIP, panel),
  )
  assert mechanism.client_event(*measured) == server.event(*measured)
  assert mechanism.worst_case_client_squared_distance(
    count
  ) == server.worst_case_squared_distance(count)
  assert mechanism.clips_updates
  assert mechanism.noise_per_clip_norm == server.noise_per_clip_norm
  assert mechanism.server == server


def test_only_split_clips_what_clients_send():
  for level in (*_INSTANCE_LEVELS, 'joint'):
    assert not _mechanism(level).clips_updates


# --- Rounds with nobody, and without noise.


@pytest.mark.parametrize('level', _LEVELS)
def test_a_round_to_which_nobody_came_costs_nothing(level):
  mechanism = _mechanism(level)
  found = mechanism.events(
    np.zeros(0),
    np.zeros(0, bool),
    instance_mechanism.ExampleGroups.empty(),
    *(0, _CLIP, False),
  )
  assert set(found) == set(mechanism.units)
  for event in found.values():
    assert isinstance(event, dp_accounting.NoOpDpEvent)
  for unit in mechanism.units:
    event = mechanism.reported_event(unit, np.ones(5), 1e-9, 0)
    assert isinstance(event, dp_accounting.NoOpDpEvent)


@pytest.mark.parametrize('level', ['instance_aggregate', 'joint'])
def test_where_only_the_mean_is_released_an_empty_one_tells_of_nobody(level):
  # A panel was measured; but there is nothing to see.
  mechanism = _mechanism(level, panel_examples=5)
  found = mechanism.events(
    np.ones(5), np.zeros(5, bool), _random_groups(4), 0, _CLIP, True
  )
  for event in found.values():
    assert isinstance(event, dp_accounting.NoOpDpEvent)


@pytest.mark.parametrize('level', _LEVELS)
@pytest.mark.parametrize('count', [1, 4])
def test_without_noise_a_round_is_not_private(level, count):
  mechanism = _mechanism(
    level, noise_multiplier=0.0, server_noise_multiplier=0.0
  )
  found = mechanism.events(
    np.ones(4), np.ones(4, bool), _random_groups(4), count, _CLIP, False
  )
  assert len(found) == len(mechanism.units)
  for event in found.values():
    assert isinstance(event, dp_accounting.NonPrivateDpEvent)
  assert mechanism.worst_case_squared_distance(count) == math.inf


@pytest.mark.parametrize('level', _LEVELS)
def test_without_noise_reported_rounds_are_not_private(level):
  mechanism = _mechanism(
    level, noise_multiplier=0.0, server_noise_multiplier=0.0
  )
  for unit in mechanism.units:
    event = mechanism.reported_event(unit, np.zeros(5), 1e-9, 4)
    assert isinstance(event, dp_accounting.NonPrivateDpEvent)
  # Not for want of examples, either.
  (*_, event) = mechanism.events(
    np.zeros(0),
    np.zeros(0, bool),
    instance_mechanism.ExampleGroups.empty(),
    *(4, _CLIP, False),
  ).values()
  assert isinstance(event, dp_accounting.NonPrivateDpEvent)


@pytest.mark.parametrize('level', ['instance_parallel', 'split', 'joint'])
def test_without_noise_no_client_has_a_bound_of_its_own(level):
  mechanism = _mechanism(
    level,
    accounting='parallel',
    noise_multiplier=0.0,
    server_noise_multiplier=0.0,
  )
  found = mechanism.local_events(_random_groups(3), 3)
  assert sorted(found) == [0, 1, 2]
  for event in found.values():
    assert isinstance(event, dp_accounting.NonPrivateDpEvent)


def test_the_servers_noise_alone_protects_where_only_the_mean_is_released():
  mechanism = _mechanism(
    'joint', noise_multiplier=0.0, server_noise_multiplier=_SERVER
  )
  found = mechanism.events(
    np.full(4, _CLIP**2), np.ones(4, bool), _random_groups(4), 4, _CLIP, False
  )
  # (C/n)² / (zC/n̄)²
  np.testing.assert_allclose(
    found['client'].squared_distances, (_EXPECTED / (4 * _SERVER)) ** 2
  )
  assert mechanism.worst_case_squared_distance(4) == pytest.approx(
    (2 * _EXPECTED / (4 * _SERVER)) ** 2
  )
  seen = dataclasses.replace(mechanism, accounting='parallel')
  event = seen.example_event(_random_groups(4), 4)
  assert isinstance(event, dp_accounting.NonPrivateDpEvent)


# --- Events of all units.


@pytest.mark.parametrize('level', _LEVELS)
@pytest.mark.parametrize('panel', [False, True])
def test_there_is_an_event_for_each_unit(level, panel):
  mechanism = _mechanism(level)
  units = ('example',) if level in _INSTANCE_LEVELS else ('client', 'example')
  assert mechanism.units == units
  measured = (np.full(4, 0.5), np.ones(4, bool))
  groups = _random_groups(4)
  found = mechanism.events(*measured, groups, 4, _CLIP, panel)
  assert tuple(found) == units
  assert found['example'] == mechanism.example_event(groups, 4)
  if 'client' in units:
    assert found['client'] == mechanism.client_event(*measured, 4, _CLIP, panel)
    assert found['client'].panel == panel


@pytest.mark.parametrize('level', _LEVELS)
@pytest.mark.parametrize('panel_examples', [0, 3])
def test_examples_are_a_panel_if_the_same_are_measured(level, panel_examples):
  if panel_examples and level == 'instance_sequential':
    return  # Refused; see below.
  mechanism = _mechanism(level, panel_examples=panel_examples)
  for group in _sampled(mechanism.example_event(_random_groups(2), 2)):
    assert group.panel == bool(panel_examples)


@pytest.mark.parametrize('level', _LEVELS)
def test_without_measured_examples_there_are_no_events(level):
  with pytest.raises(ValueError, match='needs measured examples'):
    _mechanism(level).events(
      np.ones(4), np.ones(4, bool), None, 4, _CLIP, False
    )


def test_groups_know_their_moves():
  groups = _groups([(0, 0, 9, [1.0, 2.0]), (1, 0, 9, []), (1, 1, 9, [3.0])])
  assert [part.tolist() for part in groups.moves()] == [[1.0, 2.0], [], [3.0]]
  assert instance_mechanism.ExampleGroups.empty().sizes.size == 0


# --- Costs that clients bounded themselves.


def _ledger_of(mechanism, event, rounds=1):
  total = instance_mechanism.total_steps(mechanism, rounds, client_count=10)
  accountant = _accountant('holder', total_rounds=total)
  return accountant.compose(event).ledger


@pytest.mark.parametrize('level', _LEVELS)
@pytest.mark.parametrize('clipping', _CLIPPINGS)
@pytest.mark.parametrize('steps', [1, 3])
@pytest.mark.parametrize('count', [1, 2, 7])
def test_reported_rounds_are_in_the_ledger_as_measured_ones(
  level, clipping, steps, count
):
  if level == 'joint' and steps > 1:
    return  # Refused; see below.
  mechanism = _mechanism(
    level, clipping=clipping, local_steps=steps, smallest_holding=20
  )
  measured = mechanism.events(
    np.full(4, 0.5),
    np.ones(4, bool),
    _random_groups(
      count, holding=20, steps=steps, most=mechanism.worst_case_move**2
    ),
    *(count, _CLIP, False),
  )
  for unit in mechanism.units:
    reported = mechanism.reported_event(unit, np.ones(5), 1e-9, count)
    assert _ledger_of(mechanism, reported) == _ledger_of(
      mechanism, measured[unit]
    )


@pytest.mark.parametrize('steps', [1, 2])
@pytest.mark.parametrize('level', _INSTANCE_LEVELS)
def test_bounds_that_clients_report_give_the_epsilon_of_their_distances(
  level, steps
):
  mechanism = _mechanism(
    level,
    local_steps=steps,
    smallest_holding=20,
    total_examples=60,
    batch_size=10,
    noise_multiplier=2.0,
  )
  rounds, clients = 2, 3
  total = instance_mechanism.total_steps(mechanism, rounds, clients)
  measured, reported = (
    _accountant('holder', total_rounds=total, estimator='student_t')
    for _ in range(2)
  )
  failure = measured.failure_probability(_DELTA)
  for seed in range(rounds):
    groups = _random_groups(clients, steps=steps, units=40, most=0.5, seed=seed)
    event = mechanism.example_event(groups, clients)
    measured.compose(event)
    costs = 0.0
    for part, _ in ledger.rounds_of(event):
      # What the clients would compute, and its maximum or sum.
      bounds = []
      for group in part.groups:
        squared = np.append(
          group.squared_distances, group.worst_case_squared_distance
        )
        all_costs = total * _included(
          sampled_gaussian.log_moments(
            squared, group.participation_probability, _ORDERS
          ),
          clients / _CLIENTS if mechanism.averages_noise else 1.0,
        )
        bound = mean_bounds.student_t(all_costs[:-1], failure, all_costs[-1])
        bounds.append(bound / total)
      costs = costs + np.max(bounds, axis=0)
    reported.compose(
      mechanism.reported_event('example', costs, failure, clients)
    )
  epsilon = measured.get_epsilon(_DELTA)
  assert epsilon < measured.get_worst_case_epsilon(_DELTA)
  assert reported.get_epsilon(_DELTA) == pytest.approx(epsilon, rel=1e-9)
  assert reported.ledger == measured.ledger


@pytest.mark.parametrize(
  'level, q, inclusion', [('joint', 1.0, 4 / _CLIENTS), ('split', _ALPHA, 1.0)]
)
def test_reported_costs_of_clients_are_taken_as_they_are(level, q, inclusion):
  mechanism = _mechanism(level)
  event = mechanism.reported_event('client', np.arange(5.0), 1e-9, 4)
  assert event.costs == (0.0, 1.0, 2.0, 3.0, 4.0)
  assert event.failure_probability == 1e-9
  assert event.participation_probability == q
  assert event.inclusion_probability == pytest.approx(inclusion)
  assert event.worst_case_squared_distance == (
    mechanism.worst_case_client_squared_distance(4)
  )


@pytest.mark.parametrize(
  'level, steps, expected',
  [
    ('instance_sequential', 1, 50 * 10),
    ('instance_sequential', 3, 50 * 10 * 3),
    ('instance_parallel', 3, 50 * 3),
    ('instance_aggregate', 1, 50),
    ('instance_aggregate', 3, 50 * 3),
    ('joint', 1, 50),
    ('split', 3, 50 * 3),
  ],
)
def test_holder_is_told_how_many_costs_can_be_added_up(level, steps, expected):
  mechanism = _mechanism(level, local_steps=steps)
  assert instance_mechanism.total_steps(mechanism, 50, 10) == expected
  # That many there are if everybody always comes, and no more.
  groups = _random_groups(10, steps=steps)
  total = instance_mechanism.total_steps(mechanism, 2, 10)
  accountant = _accountant('holder', total_rounds=total, estimator='population')
  event = mechanism.example_event(groups, 10)
  accountant.compose(event, 2)
  with pytest.raises(ValueError, match='total_rounds'):
    accountant.compose(event)


# --- Refusals.


@pytest.mark.parametrize(
  'level, settings, sentence',
  [
    # The paper's reason why joint privacy is not for FedAvg.
    (
      'joint',
      {'local_steps': 2},
      'FedSGD only: in FedAvg every noisy step changes the point at which '
      'the next gradient is taken',
    ),
    (
      'split',
      {'accounting': 'aggregate'},
      'the noise in the mean is not Gaussian',
    ),
    (
      'split',
      {'server_noise_multiplier': 0.0},
      r'needs both .* Found 0\.8 and 0\.0',
    ),
    (
      'split',
      {'noise_multiplier': 0.0},
      r'needs both .* Found 0\.0 and 0\.7',
    ),
    (
      'instance_sequential',
      {'panel_examples': 10},
      'there is no panel of examples',
    ),
    (
      'joint',
      {'accounting': 'sequential', 'panel_examples': 10},
      'there is no panel of examples',
    ),
    (
      'instance_sequential',
      {'server_noise_multiplier': 0.5},
      r"At level 'instance_sequential' .* must be 0. Found 0\.5",
    ),
    (
      'instance_parallel',
      {'server_noise_multiplier': 0.5},
      r"At level 'instance_parallel' .* must be 0. Found 0\.5",
    ),
    (
      'instance_aggregate',
      {'reference_is_last_mean': True},
      "is for level 'joint'. Found 'instance_aggregate'",
    ),
    (
      'split',
      {'reference_is_last_mean': True},
      "is for level 'joint'. Found 'split'",
    ),
    ('joint', {'panel_examples': 2}, 'panel_examples must be at least 3'),
    (
      'joint',
      {'panel_examples': -1},
      'panel_examples must be a positive integer. Found -1',
    ),
    (
      'joint',
      {'panel_examples': 3.5},
      r'panel_examples must be a positive integer. Found 3\.5',
    ),
    (
      'joint',
      {'panel_examples': math.nan},
      'panel_examples must be a positive integer. Found nan',
    ),
    (
      'instance_parallel',
      {'accounting': 'aggregate'},
      "accounted for as 'parallel'. Found accounting = 'aggregate'",
    ),
    (
      'instance_aggregate',
      {'accounting': 'parallel'},
      "accounted for as 'aggregate'. Found accounting = 'parallel'",
    ),
    ('joint', {'accounting': 'serial'}, 'accounting must be one of'),
  ],
)
def test_settings_that_contradict_each_other_are_refused(
  level, settings, sentence
):
  good = _mechanism(level)
  assert isinstance(good, instance_mechanism.InstanceMechanism)
  with pytest.raises(ValueError, match=sentence):
    _mechanism(level, **settings)


@pytest.mark.parametrize('level', ['instance_aggregate', 'joint', 'split'])
def test_noise_of_the_server_is_taken_where_it_counts(level):
  mechanism = _mechanism(level, server_noise_multiplier=0.5)
  assert mechanism.noise_per_clip_norm == pytest.approx(0.5 / _EXPECTED)


@pytest.mark.parametrize(
  'name, value, sentence',
  [
    ('level', 'instance', 'level must be one of'),
    ('clipping', 'layer', "clipping must be one of .* Found 'layer'"),
    ('noise_multiplier', -0.1, r'noise_multiplier must be non.* Found -0\.1'),
    ('noise_multiplier', math.nan, 'noise_multiplier must be non-negative'),
    ('noise_multiplier', math.inf, 'noise_multiplier must be non-negative'),
    ('server_noise_multiplier', -0.1, 'server_noise_multiplier must be non-'),
    ('server_noise_multiplier', math.nan, 'server_noise_multiplier must be'),
    ('server_noise_multiplier', math.inf, 'server_noise_multiplier must be'),
    ('clip_norm', 0.0, 'clip_norm must be positive and finite'),
    ('clip_norm', math.nan, 'clip_norm must be positive and finite'),
    ('clip_norm', math.inf, 'clip_norm must be positive and finite'),
    ('batch_size', 0, 'batch_size must be a positive integer'),
    ('batch_size', 1.5, 'batch_size must be a positive integer'),
    ('total_examples', 0, 'total_examples must be a positive integer'),
    ('smallest_holding', 0, 'smallest_holding must be a positive integer'),
    ('local_steps', 0, 'local_steps must be a positive integer'),
    ('local_steps', math.nan, 'local_steps must be a positive integer'),
    ('participation_probability', 1.1, 'must be between 0 and 1. Found 1.1'),
    ('participation_probability', -0.1, 'must be between 0 and 1'),
    ('participation_probability', math.nan, 'must be between 0 and 1'),
    ('expected_clients', 0.0, 'expected_clients must be positive'),
    ('expected_clients', math.nan, 'expected_clients must be positive'),
  ],
)
def test_bad_numbers_are_refused_with_a_sentence(name, value, sentence):
  with pytest.raises(ValueError, match=sentence):
    dataclasses.replace(_mechanism('instance_aggregate'), **{name: value})


@pytest.mark.parametrize(
  'settings, holdings, sentence',
  [
    ({'smallest_holding': 5}, [9, 4, 7], 'is 5, but a client has 4'),
    ({}, [0, 0], 'is 1, but a client has 0'),
    ({'panel_examples': 10}, [9, 2], 'at least 3 examples. Found one with 2'),
  ],
)
def test_clients_that_hold_too_little_are_refused(settings, holdings, sentence):
  with pytest.raises(ValueError, match=sentence):
    instance_mechanism.check_holdings(_mechanism(**settings), holdings)


def test_clients_that_hold_enough_are_not():
  instance_mechanism.check_holdings(_mechanism(smallest_holding=4), [9, 4])
  instance_mechanism.check_holdings(_mechanism(panel_examples=10), [9, 3])
  instance_mechanism.check_holdings(_mechanism(), [1])
  # One without examples has nobody to protect.
  instance_mechanism.check_holdings(_mechanism(), [9, 0])


# --- The truth: divergences of what is released, integrated numerically.
#
# What is released is the mean of n noisy vectors. With probability a = n/N the
# unit's client is one of them, and that shows: it brings its place in the mean.
# So the two worlds are
#
#   P = (1 - a) A + a B1 with the unit,    Q = (1 - a) A + a B0 without it,
#
# where A is the release of n others; B0 that of n - 1 others and of the client
# without the unit, and B1 with it. All are mixtures of Gaussians, over who
# takes part and what is drawn.


@dataclasses.dataclass(frozen=True)
class _Worlds:
  """Mixtures of Gaussians with and without a unit, of the same variance.

  Attributes:
    weights: Of the parts.
    present: Their means with the unit, [parts, dimensions].
    absent: Their means without it.
    variance: Of all parts.
  """

  weights: np.ndarray
  present: np.ndarray
  absent: np.ndarray
  variance: float

  def log_density(self, points, with_unit):
    """Of points [..., dimensions]."""
    means = self.present if with_unit else self.absent
    squared = np.stack([np.sum((points - m) ** 2, axis=-1) for m in means], -1)
    constant = means.shape[1] / 2 * math.log(2 * math.pi * self.variance)
    return special.logsumexp(
      -squared / (2 * self.variance) - constant, axis=-1, b=self.weights
    )

  def axes(self, order, width):
    """A grid that holds the mass of all integrands up to an order.

    Point by point P^(λ+1) Q^(-λ) is at most the mean of that of the parts, for
    it is jointly convex; that of a part is around (λ+1) p - λ q.
    """
    shift = self.present - self.absent
    centres = [self.absent - order * shift, self.present + order * shift]
    margin, step = 12 * self.deviation, width * self.deviation
    return [
      np.arange(low - margin, high + margin, step)
      for low, high in zip(np.min(centres, (0, 1)), np.max(centres, (0, 1)))
    ]

  @property
  def deviation(self):
    return math.sqrt(self.variance)

  def log_moments(self, orders, width):
    """λ D_{λ+1}(P‖Q) and λ D_{λ+1}(Q‖P), by the trapezoidal rule.

    Of analytic functions that vanish at both ends it is exact up to
    exp(-const / width).

    Args:
      orders: All λ.
      width: Of the grid's steps, in deviations.
    """
    axes = self.axes(max(orders), width)
    points = np.stack(np.meshgrid(*axes, indexing='ij'), axis=-1)
    volume = math.log(width * self.deviation) * len(axes)
    p, q = (self.log_density(points, with_unit) for with_unit in (True, False))
    return np.array(
      [
        [special.logsumexp(top + order * (top - bottom)) for order in orders]
        for top, bottom in ((p, q), (q, p))
      ]
    ) + np.float64(volume)


def _choices(others, count):
  """All choices of so many others; one, if they are all alike."""
  if all(np.array_equal(other, others[0]) for other in others):
    return [tuple(others[:count])]
  return list(itertools.combinations(others, count))


def _client_worlds(mechanism, others, update, reference, count):
  """Of a client that may be one of the n, beside all choices of others."""
  inclusion = count / (len(others) + 1)
  rounds = []
  with_client = _choices(others, count - 1)
  for chosen in with_client:
    present, absent = ([*chosen, mine] for mine in (update, reference))
    rounds.append((inclusion / len(with_client), present, absent))
  if inclusion < 1:
    without = _choices(others, count)
    rounds += [((1 - inclusion) / len(without), c, c) for c in without]
  weights, present, absent = zip(*rounds)
  return _Worlds(
    np.array(weights),
    np.mean(present, axis=1),
    np.mean(absent, axis=1),
    _mean_variance(mechanism, count),
  )


def _example_worlds(mechanism, others, held, example, count):
  """Of an example that may be in the batch of a client that may be there.

  Args:
    mechanism: Whose batches.
    others: What the other clients send, without noise.
    held: The other examples of its client.
    example: Its gradient.
    count: n.
  """
  chance = min(1.0, mechanism.batch_size / (len(held) + 1))
  parts = []
  for drawn in itertools.product((False, True), repeat=len(held)):
    weight = math.prod(chance if d else 1 - chance for d in drawn)
    if not weight:
      continue
    rest = np.array(held)[list(drawn)]
    without = _sent(mechanism, rest)
    joined = _sent(mechanism, np.concatenate([rest, [example]]))
    for probability, mine in ((chance, joined), (1 - chance, without)):
      if probability:
        worlds = _client_worlds(mechanism, others, mine, without, count)
        parts.append((weight * probability * worlds.weights, worlds))
  means, which = np.unique(
    [
      np.concatenate([present, absent])
      for _, worlds in parts
      for present, absent in zip(worlds.present, worlds.absent)
    ],
    axis=0,
    return_inverse=True,
  )
  weights = np.concatenate([weights for weights, _ in parts])
  return _Worlds(
    np.bincount(which.ravel(), weights),
    *np.split(means, 2, axis=1),
    _mean_variance(mechanism, count),
  )


def _farthest_move(mechanism, held, example):
  """The largest squared move over C² of an example, by what else is drawn."""
  return max(
    _squared_moves(mechanism, np.concatenate([rest, [example]]))[-1]
    for drawn in itertools.product((False, True), repeat=len(held))
    for rest in [np.array(held)[list(drawn)]]
  )


def _accounted(event, orders):
  """The cost at every order, from ε of an accountant of that order alone."""
  costs = []
  for order in orders:
    accountant = _accountant(
      orders=(order,), estimator='population', conversion='chernoff'
    )
    epsilon = accountant.compose(event).get_epsilon(0.5)
    costs.append(order * epsilon + math.log(0.5))
  return np.array(costs)


def _assert_covered(worlds, event, orders, width, exact=False):
  """The accounted cost is at least both true ones, or the larger of them."""
  costs = _accounted(event, orders)
  truth = worlds.log_moments(orders, width)
  assert np.all(truth <= costs * (1 + 1e-9) + 1e-12)
  if exact:
    np.testing.assert_allclose(costs, truth[0], rtol=1e-7, atol=1e-12)
  return costs, truth


_spaces = pytest.mark.parametrize(
  'size, orders, width',
  [(1, tuple(range(1, 17)), 0.05), (2, (1, 2, 5, 16), 0.25)],
  ids=['line', 'plane'],
)
_alphas = pytest.mark.parametrize('alpha', [0.05, 0.5, 1.0])


def _benign(clients, size):
  """What clients of all kinds send."""
  generator = np.random.default_rng([clients, size])
  vectors = generator.normal(size=(clients, size))
  return np.array([_clip(vector, _CLIP) for vector in vectors])


def _adversarial(clients, size):
  """What clients send that all go one way as far as they can."""
  return np.repeat(-_CLIP * np.eye(size)[:1], clients, axis=0)


# How the others are, and n for each α, with few choices of n out of N.
_crowds = pytest.mark.parametrize(
  'crowd, alpha, count',
  [
    *((_benign, *pair) for pair in ((0.05, 1), (0.5, 1), (0.5, 2))),
    *((_benign, 1.0, count) for count in (1, 2, 6)),
    *(
      (_adversarial, alpha, count)
      for alpha in (0.05, 0.5, 1.0)
      for count in (1, 10)
    ),
  ],
)


def _sampling(alpha, count):
  """The settings, and N, with which n is the expected number."""
  clients = round(count / alpha)
  return clients, {
    'participation_probability': alpha,
    'expected_clients': float(count),
  }


@_spaces
@_crowds
@pytest.mark.parametrize(
  'settings',
  [
    {},
    {'noise_multiplier': 2.0},
    {'server_noise_multiplier': _SERVER},
    {'reference_is_last_mean': True},
    {'clipping': 'example', 'noise_multiplier': 3.0},
  ],
  ids=['plain', 'noise', 'server', 'last mean', 'example'],
)
def test_a_client_in_joint_costs_at_least_the_divergence_of_releases(
  size, orders, width, crowd, alpha, count, settings
):
  clients, sampling = _sampling(alpha, count)
  mechanism = _mechanism('joint', **sampling, **settings)
  others = crowd(clients - 1, size)
  update = -_adversarial(1, size)[0]
  reference = np.zeros(size)
  if mechanism.reference_is_last_mean:
    reference = update * np.array([-0.7, 0.2])[:size]
  event = mechanism.client_event(
    np.full(3, np.sum((update - reference) ** 2)),
    np.ones(3, bool),
    *(count, _CLIP, False),
  )
  worlds = _client_worlds(mechanism, others, update, reference, count)
  _assert_covered(worlds, event, orders, width, exact=alpha == 1)


@_spaces
@_crowds
@pytest.mark.parametrize('clipping', _CLIPPINGS)
@pytest.mark.parametrize('server', [0.0, _SERVER])
@pytest.mark.parametrize('batch', [1, 3])
def test_an_example_in_aggregate_costs_at_least_the_divergence_of_releases(
  size, orders, width, crowd, alpha, count, clipping, server, batch
):
  clients, sampling = _sampling(alpha, count)
  mechanism = _mechanism(
    clipping=clipping,
    batch_size=batch,
    server_noise_multiplier=server,
    **sampling,
  )
  others = crowd(clients - 1, size)
  example = -3 * _adversarial(1, size)[0]
  held = [-0.5 * example, example[::-1] / 4]  # So that N_i = 3.
  worlds = _example_worlds(mechanism, others, held, example, count)
  move = _farthest_move(mechanism, held, example)
  event = mechanism.example_event(_groups([(0, 0, 3, [move] * 3)]), count)
  assert event.participation_probability == pytest.approx(batch / 3)
  _assert_covered(worlds, event, orders, width)


@_spaces
@pytest.mark.parametrize('count', [1, 2, 6])
@pytest.mark.parametrize('server', [0.0, _SERVER])
@pytest.mark.parametrize('clipping, batch', [('example', 1), ('batch', 3)])
def test_where_everybody_comes_the_cost_of_an_example_is_the_divergence(
  size, orders, width, count, server, clipping, batch
):
  _, sampling = _sampling(1.0, count)
  mechanism = _mechanism(
    clipping=clipping,
    batch_size=batch,
    server_noise_multiplier=server,
    **sampling,
  )
  example = np.full(size, -2.0)
  # Moving nothing, they hide nothing.
  held = np.zeros((2, size))
  worlds = _example_worlds(
    mechanism, _benign(count - 1, size), held, example, count
  )
  whole = np.concatenate([held, [example]])
  move = _squared_moves(mechanism, whole)[-1]
  event = mechanism.example_event(_groups([(0, 0, 3, [move] * 3)]), count)
  _assert_covered(worlds, event, orders, width, exact=True)


def test_where_everybody_comes_an_example_that_is_drawn_less_costs_less():
  # So that what is exact above is of q < 1, too.
  mechanism = _mechanism(
    batch_size=1,
    clipping='example',
    participation_probability=1.0,
    expected_clients=2.0,
  )
  costs = [
    _accounted(mechanism.example_event(_groups([(0, 0, n, [1.0] * 3)]), 2), [2])
    for n in (1, 3, 9)
  ]
  assert costs[0] > 2 * costs[1] > 4 * costs[2] > 0


def test_with_little_noise_the_cost_of_inclusion_is_reached():
  # Whether the client is there is plain to see: nothing better can be said.
  clients, sampling = _sampling(0.05, 1)
  mechanism = _mechanism('joint', noise_multiplier=0.15, **sampling)
  update = np.array([_CLIP])
  worlds = _client_worlds(
    mechanism, _adversarial(clients - 1, 1), update, np.zeros(1), 1
  )
  event = mechanism.client_event(
    np.full(3, _CLIP**2), np.ones(3, bool), 1, _CLIP, False
  )
  costs, truth = _assert_covered(worlds, event, _ORDERS, 0.02)
  np.testing.assert_allclose(truth[0], costs, rtol=1e-3)


# What the cost would be if α were the chance of being sampled unseen, as it was
# before: these are cases where the tests above would have failed.


def _unseen(event, alpha, orders):
  group = event.groups[0]
  q = alpha * group.participation_probability
  return sampled_gaussian.log_moments(group.squared_distances[:1], q, orders)[0]


@pytest.mark.parametrize('alpha', [0.05, 0.5])
@pytest.mark.parametrize('count', [1, 10])
@pytest.mark.parametrize('server', [0.0, _SERVER])
def test_clients_in_joint_lose_more_than_if_they_were_sampled_unseen(
  alpha, count, server
):
  clients, sampling = _sampling(alpha, count)
  mechanism = _mechanism('joint', server_noise_multiplier=server, **sampling)
  event = mechanism.client_event(
    np.full(3, _CLIP**2), np.ones(3, bool), count, _CLIP, False
  )
  worlds = _client_worlds(
    mechanism,
    _adversarial(clients - 1, 1),
    *(np.array([_CLIP]), np.zeros(1), count),
  )
  costs, truth = _assert_covered(worlds, event, (1, 2, 4, 8), 0.05)
  former = _unseen(event, alpha, (1, 2, 4, 8))
  assert np.all(former < 0.95 * np.max(truth, axis=0))
  assert np.all(former < costs)


@pytest.mark.parametrize('alpha', [0.05, 0.5])
@pytest.mark.parametrize('clipping', _CLIPPINGS)
@pytest.mark.parametrize('server', [0.0, _SERVER])
def test_examples_in_aggregate_lose_more_than_if_they_were_sampled_unseen(
  alpha, clipping, server
):
  clients, sampling = _sampling(alpha, 1)
  mechanism = _mechanism(
    clipping=clipping,
    batch_size=1,
    server_noise_multiplier=server,
    **sampling,
  )
  held, example = np.zeros((1, 1)), np.array([9.0])  # q = 1/2
  worlds = _example_worlds(
    mechanism, _adversarial(clients - 1, 1), held, example, 1
  )
  move = _squared_moves(mechanism, np.array([example]))[0]
  event = mechanism.example_event(_groups([(0, 0, 2, [move] * 3)]), 1)
  costs, truth = _assert_covered(worlds, event, (1, 2, 4, 8), 0.05)
  former = _unseen(event, alpha, (1, 2, 4, 8))
  assert np.any(former < 0.9 * np.max(truth, axis=0))
  assert np.all(former < costs)


@pytest.mark.parametrize('alpha', [0.2, 0.7])
@pytest.mark.parametrize('unit', ['client', 'example'])
def test_where_n_is_random_and_seen_the_costs_of_each_n_cover_the_moment(
  alpha, unit
):
  # Poisson sampling of N = 5 clients: E over n of each n's moment.
  clients, order = 5, 3
  mechanism = _mechanism(
    'joint',
    batch_size=1,
    participation_probability=alpha,
    expected_clients=alpha * clients,
  )
  others, update = _benign(clients - 1, 1), np.array([_CLIP])
  held, example = [np.array([-4.0])], np.array([9.0])
  chances = stats.binom.pmf(range(clients + 1), clients, alpha)
  truth = accounted = chances[0]  # Nobody came, and nothing is seen.
  for count in range(1, clients + 1):
    if unit == 'client':
      worlds = _client_worlds(mechanism, others, update, np.zeros(1), count)
      event = mechanism.client_event(
        np.full(3, _CLIP**2), np.ones(3, bool), count, _CLIP, False
      )
    else:
      worlds = _example_worlds(mechanism, others, held, example, count)
      move = _farthest_move(mechanism, held, example)
      event = mechanism.example_event(_groups([(0, 0, 2, [move] * 3)]), count)
    costs, found = _assert_covered(worlds, event, (order,), 0.05)
    truth += chances[count] * np.exp(np.max(found))
    accounted += chances[count] * np.exp(costs[0])
  assert 1 < truth < accounted


# --- The truth once more, from samples of what clients do.

_SAMPLES = 40_000
# Of this many standard errors, less than one run in 1e6 is off.
_ERRORS = 5.0


def _released(mechanism, generator, others, mine, count):
  """Draws n of all clients, and their noise; takes the mean; adds the server's.

  Args:
    mechanism: Whose noise.
    generator: Of random numbers.
    others: What each of the others sends, [clients, dimensions].
    mine: What the client sends, [samples, dimensions].
    count: n.
  """
  sent = np.repeat(others[np.newaxis], _SAMPLES, axis=0)
  sent = np.concatenate([mine[:, np.newaxis], sent], axis=1)
  ranks = np.argsort(generator.random(sent.shape[:2]), axis=1)
  sent = np.take_along_axis(sent, ranks[:, :count, np.newaxis], axis=1)
  sent = sent + _client_deviation(mechanism) * generator.normal(size=sent.shape)
  server = mechanism.server_noise_multiplier * mechanism.clip_norm
  noise = generator.normal(size=mine.shape)
  return sent.mean(axis=1) + server / mechanism.expected_clients * noise


def _assert_sampled(worlds, with_unit, without_unit, event, orders):
  """Samples are of the worlds, and no order costs more than accounted for."""
  for samples, means in (
    (with_unit, worlds.present),
    (without_unit, worlds.absent),
  ):
    for axis, centres in enumerate(means.T):

      def distribution(x, centres=centres):
        parts = stats.norm.cdf(x[:, np.newaxis], centres, worlds.deviation)
        return parts @ worlds.weights

      assert stats.kstest(samples[:, axis], distribution).pvalue > 1e-6

  def ratios(samples):
    return np.exp(
      worlds.log_density(samples, True) - worlds.log_density(samples, False)
    )

  costs, truth = _assert_covered(worlds, event, orders, 0.2)
  for order, cost, exact in zip(orders, costs, truth[0]):
    # E_P[(P/Q)^λ] = E_Q[(P/Q)^(λ+1)].
    for values in (
      ratios(with_unit) ** order,
      ratios(without_unit) ** (order + 1),
    ):
      error = np.std(values) / math.sqrt(_SAMPLES)
      assert abs(np.mean(values) - math.exp(exact)) < _ERRORS * error
      assert np.mean(values) < math.exp(cost) + _ERRORS * error
      # Sharp enough to tell another distance or probability.
      assert _ERRORS * error < 0.4 * math.expm1(exact)


@pytest.mark.parametrize('size', [1, 2])
@pytest.mark.parametrize('server', [0.0, _SERVER])
@pytest.mark.parametrize('last_mean', [False, True])
def test_samples_of_joint_show_the_cost_of_a_client(size, server, last_mean):
  mechanism = _mechanism(
    'joint',
    noise_multiplier=1.2,
    participation_probability=0.6,
    expected_clients=3.0,
    server_noise_multiplier=server,
    reference_is_last_mean=last_mean,
  )
  generator = np.random.default_rng([size, last_mean])
  others = _benign(4, size)
  update = _clip(np.full(size, 3.0), _CLIP)
  reference = np.full(size, -0.3 if last_mean else 0.0)
  event = mechanism.client_event(
    np.full(3, np.sum((update - reference) ** 2)),
    np.ones(3, bool),
    *(3, _CLIP, False),
  )
  _assert_sampled(
    _client_worlds(mechanism, others, update, reference, 3),
    *(
      _released(mechanism, generator, others, np.tile(mine, (_SAMPLES, 1)), 3)
      for mine in (update, reference)
    ),
    event,
    (1, 2),
  )


@pytest.mark.parametrize('clipping', _CLIPPINGS)
@pytest.mark.parametrize('server', [0.0, 0.2])
def test_samples_of_the_mean_show_the_cost_of_an_example(clipping, server):
  mechanism = _mechanism(
    clipping=clipping,
    batch_size=2,
    noise_multiplier=1.6 if clipping == 'batch' else 0.9,
    participation_probability=0.75,
    expected_clients=3.0,
    server_noise_multiplier=server,
  )
  generator = np.random.default_rng(1)
  others = _benign(3, 2)
  held = np.array([[1.0, -0.4], [0.3, 2.0]])
  example = np.array([-9.0, 4.0])
  drawn = generator.random((_SAMPLES, 3)) < 2 / 3
  sent = {
    key: _sent(mechanism, np.array([*held, example])[list(key)])
    for key in itertools.product((False, True), repeat=3)
  }
  mine = np.array([sent[tuple(row)] for row in drawn.tolist()])
  without = np.array([sent[(*row[:2], False)] for row in drawn.tolist()])
  move = _farthest_move(mechanism, held, example)
  event = mechanism.example_event(_groups([(0, 0, 3, [move] * 3)]), 3)
  _assert_sampled(
    _example_worlds(mechanism, others, held, example, 3),
    _released(mechanism, generator, others, mine, 3),
    _released(mechanism, generator, others, without, 3),
    event,
    (1, 2),
  )


# --- The truth of δ: the whole privacy loss, composed.


def _true_delta(worlds, epsilon, rounds, rounded=np.ceil, step=2e-4):
  """δ at ε of so many rounds on a line, the larger of both directions.

  The privacy loss is rounded up to multiples of the step, so that δ is not too
  small (or down, not too large), and convolved with itself by Fourier
  transforms, which hold all losses; δ = E_P[(1 - exp(ε - L))+].
  """
  (points,) = worlds.axes(0, 5e-4)
  p, q = (worlds.log_density(points[:, None], w) for w in (True, False))
  result = 0.0
  for top, bottom in ((p, q), (q, p)):
    mass = np.exp(top) * 5e-4 * worlds.deviation
    assert np.sum(mass) == pytest.approx(1, rel=1e-9)
    losses = rounded((top - bottom) / step).astype(int)
    lowest = int(losses.min())
    size = fft.next_fast_len(rounds * (int(losses.max()) - lowest) + 1)
    single = np.bincount(losses - lowest, mass, size)
    composed = fft.irfft(fft.rfft(single) ** rounds, size)
    totals = step * (np.arange(size) + rounds * lowest)
    gains = -np.expm1(np.minimum(epsilon - totals, 0.0))
    result = max(result, float(np.sum(composed * gains)))
  return result


def _joint_case(clients, count, sigma, rounds):
  """Worlds and accountant of a client at +C, where others are at -C."""
  mechanism = _mechanism(
    'joint',
    noise_multiplier=sigma,
    participation_probability=count / clients,
    expected_clients=float(count),
  )
  worlds = _client_worlds(
    mechanism,
    _adversarial(clients - 1, 1),
    *(np.array([_CLIP]), np.zeros(1), count),
  )
  event = mechanism.client_event(
    np.full(5, _CLIP**2), np.ones(5, bool), count, _CLIP, True
  )
  accountants = [
    accountant_lib.BayesianAccountant(estimator=estimator).compose(
      event, rounds
    )
    for estimator in ('population', 'betting')
  ]
  return worlds, accountants


@pytest.mark.parametrize('rounds', [1, 20])
def test_the_delta_of_composed_rounds_is_that_of_the_gaussian_mechanism(rounds):
  # Balle and Wang (2018), Theorem 8: the test's own numbers, where a = 1.
  worlds, _ = _joint_case(10, 10, 1.0, rounds)
  mu = math.sqrt(rounds / 10)
  for epsilon in (0.1, 0.5, 2.0):
    exact = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(
      epsilon
    ) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    above, below = (
      _true_delta(worlds, epsilon, rounds, rounded)
      for rounded in (np.ceil, np.floor)
    )
    assert below < exact < above < 1.1 * below


@pytest.mark.parametrize('rounds', [1, 20])
@pytest.mark.parametrize(
  'clients, count, sigma', [(100, 10, 1.0), (20, 2, 0.6), (10, 1, 0.5)]
)
def test_delta_is_no_more_than_that_at_which_epsilon_was_told(
  clients, count, sigma, rounds
):
  worlds, accountants = _joint_case(clients, count, sigma, rounds)
  epsilon = min(accountant.get_epsilon(_DELTA) for accountant in accountants)
  assert _true_delta(worlds, epsilon, rounds) <= _DELTA


@pytest.mark.parametrize('rounds', [1, 20])
@pytest.mark.parametrize(
  'clients, count, sigma', [(100, 10, 1.0), (20, 2, 0.6)]
)
def test_delta_is_more_than_that_of_clients_who_are_sampled_unseen(
  clients, count, sigma, rounds
):
  # Of the same rounds, if α were earned: even PLD, which is never too small.
  sampled = dp_accounting.PoissonSampledDpEvent(
    count / clients, dp_accounting.GaussianDpEvent(math.sqrt(count) * sigma)
  )
  pld = dp_accounting.pld.PLDAccountant().compose(sampled, rounds)
  worlds, _ = _joint_case(clients, count, sigma, rounds)
  epsilon = pld.get_epsilon(_DELTA)
  assert _true_delta(worlds, epsilon, rounds, np.floor) > 2 * _DELTA


@pytest.mark.parametrize('rounds', [1, 20])
@pytest.mark.parametrize('clients, sigma', [(10, 1.0), (50, 0.7)])
def test_delta_of_an_example_measured_in_every_round_is_no_more_than_told(
  clients, sigma, rounds
):
  # Also where its client does not come: its chance to come is counted then.
  _, sampling = _sampling(1 / clients, 1)
  mechanism = _mechanism(
    clipping='example', batch_size=1, noise_multiplier=sigma, **sampling
  )
  worlds = _example_worlds(
    mechanism,
    _adversarial(clients - 1, 1),
    *(np.zeros((0, 1)), np.array([9.0]), 1),
  )
  event = mechanism.example_event(_groups([(0, 0, 1, [1.0] * 3)]), 1)
  accountant = accountant_lib.BayesianAccountant(
    'holder', estimator='population', total_rounds=rounds
  )
  epsilon = accountant.compose(event, rounds).get_epsilon(_DELTA)
  assert _true_delta(worlds, epsilon, rounds) <= _DELTA


def test_a_client_charged_when_it_came_is_not_charged_for_its_chance_to():
  # The chance would count twice: in the cost, and in how often there is one.
  mechanism = _mechanism('instance_aggregate')
  parts = [(0, 0, 20, [0.1, 0.2, 0.3])]
  (came,) = mechanism.example_event(_groups(parts, False), 3).groups
  (always,) = mechanism.example_event(_groups(parts, True), 3).groups
  assert came.inclusion_probability == 1.0
  assert always.inclusion_probability == 3 / (_EXPECTED / _ALPHA)
  np.testing.assert_array_equal(
    came.squared_distances, always.squared_distances
  )
