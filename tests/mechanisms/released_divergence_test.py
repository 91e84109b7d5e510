"""Tests that costs cover the truth: divergences of what is really released.

By quadrature, from samples of what clients do, and by the Fourier transform of
the whole privacy loss; see oracles.py.
"""

import functools
import itertools
import math

import dp_accounting
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from tests.mechanisms import builders, oracles
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import sampled_gaussian

_CLIP = builders.CLIP
_DELTA = builders.DELTA
_SERVER = builders.SERVER
_clippings = st.sampled_from(builders.CLIPPINGS)
_servers = st.sampled_from([0.0, _SERVER])
pytestmark = pytest.mark.filterwarnings('ignore:The best order')


def _accounted(event, orders):
  """The cost at every order, from ε of an accountant of that order alone."""
  costs = []
  for order in orders:
    accountant = builders.make_accountant(
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
    # But for the grid, which adds 2^-20 to r.
    np.testing.assert_allclose(costs, truth[0], rtol=1e-4, atol=1e-12)
  return costs, truth


def _benign(clients, size):
  """What clients of all kinds send."""
  generator = np.random.default_rng([clients, size])
  vectors = generator.normal(size=(clients, size))
  return np.array([oracles.clip(vector, _CLIP) for vector in vectors])


def _adversarial(clients, size):
  """What clients send that all go one way as far as they can."""
  return np.repeat(-_CLIP * np.eye(size)[:1], clients, axis=0)


def _sampling(alpha, count):
  """The settings, and N, with which n is the expected number."""
  clients = round(count / alpha)
  return clients, {
    'participation_probability': alpha,
    'clients_per_round': float(count),
  }


def _client_case(mechanism, others, update, count, reference=None):
  """Worlds and event of a client's update."""
  reference = np.zeros_like(update) if reference is None else reference
  worlds = builders.definition(mechanism).client_worlds(
    others, update, reference, count
  )
  squared = np.full(3, np.sum((update - reference) ** 2))
  return worlds, builders.client_event(mechanism, squared, count)


def _example_case(mechanism, others, held, example, count):
  """Worlds and event of an example beside others of its client."""
  definition = builders.definition(mechanism)
  worlds = definition.example_worlds(others, held, example, count)
  move = definition.farthest_move(held, example)
  event = builders.single_example_event(mechanism, len(held) + 1, move, count)
  return worlds, event


# --- Quadrature.

# Dimensions, orders and steps of the grid.
_spaces = pytest.mark.parametrize(
  'size, orders, width',
  [(1, tuple(range(1, 17)), 0.05), (2, (1, 2, 5, 16), 0.25)],
  ids=['line', 'plane'],
)
# How the others are, and n for each α, with few choices of n out of N.
_crowds = st.sampled_from(
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


@_spaces
@hypothesis.given(
  crowd=_crowds,
  noise_multiplier=st.floats(0.5, 3),
  server=_servers,
  clipping=_clippings,
  last_mean=st.booleans(),
)
def test_a_client_in_joint_costs_at_least_the_divergence_of_releases(
  size, orders, width, crowd, noise_multiplier, server, clipping, last_mean
):
  crowd, alpha, count = crowd
  clients, sampling = _sampling(alpha, count)
  if clipping == 'example':
    noise_multiplier *= builders.BATCH  # So that as much noise is sent.
  mechanism = builders.make_mechanism(
    'joint',
    noise_multiplier=noise_multiplier,
    server_noise_multiplier=server,
    clipping=clipping,
    reference_is_last_mean=last_mean,
    **sampling,
  )
  update = -_adversarial(1, size)[0]
  reference = update * np.array([-0.7, 0.2])[:size] if last_mean else None
  worlds, event = _client_case(
    mechanism, crowd(clients - 1, size), update, count, reference
  )
  _assert_covered(worlds, event, orders, width, exact=alpha == 1)


@_spaces
@hypothesis.settings(max_examples=40)
@hypothesis.given(
  crowd=_crowds,
  clipping=_clippings,
  server=_servers,
  batch=st.sampled_from([1, 2, 3]),
  turn=st.floats(-1, 1),
)
def test_an_example_in_aggregate_costs_at_least_the_divergence_of_releases(
  size, orders, width, crowd, clipping, server, batch, turn
):
  crowd, alpha, count = crowd
  clients, sampling = _sampling(alpha, count)
  mechanism = builders.make_mechanism(
    clipping=clipping,
    batch_size=batch,
    server_noise_multiplier=server,
    **sampling,
  )
  example = -3 * _adversarial(1, size)[0]
  held = [turn * example, example[::-1] / 4]  # So that N_i = 3.
  worlds, event = _example_case(
    mechanism, crowd(clients - 1, size), held, example, count
  )
  assert event.participation_probability == pytest.approx(batch / 3)
  _assert_covered(worlds, event, orders, width)


@_spaces
@hypothesis.settings(max_examples=12)
@hypothesis.given(
  count=st.sampled_from([1, 2, 6]),
  server=_servers,
  kind=st.sampled_from([('example', 1), ('batch', 3)]),
)
def test_where_everybody_comes_the_cost_of_an_example_is_the_divergence(
  size, orders, width, count, server, kind
):
  clipping, batch = kind
  _, sampling = _sampling(1.0, count)
  mechanism = builders.make_mechanism(
    clipping=clipping,
    batch_size=batch,
    server_noise_multiplier=server,
    **sampling,
  )
  definition = builders.definition(mechanism)
  example = np.full(size, -2.0)
  # Moving nothing, they hide nothing.
  held = np.zeros((2, size))
  worlds = definition.example_worlds(
    _benign(count - 1, size), held, example, count
  )
  move = definition.squared_moves(np.concatenate([held, [example]]))[-1]
  event = builders.single_example_event(mechanism, 3, move, count)
  _assert_covered(worlds, event, orders, width, exact=True)


def test_where_everybody_comes_an_example_that_is_drawn_less_costs_less():
  # So that what is exact above is of q < 1, too.
  mechanism = builders.make_mechanism(
    batch_size=1,
    clipping='example',
    participation_probability=1.0,
    clients_per_round=2.0,
  )
  costs = [
    _accounted(builders.single_example_event(mechanism, n, 1.0, 2), [2])
    for n in (1, 3, 9)
  ]
  assert costs[0] > 2 * costs[1] > 4 * costs[2] > 0


def test_with_little_noise_the_cost_of_inclusion_is_reached():
  # Whether the client is there is plain to see: nothing better can be said.
  clients, sampling = _sampling(0.05, 1)
  mechanism = builders.make_mechanism(
    'joint', noise_multiplier=0.15, **sampling
  )
  worlds, event = _client_case(
    mechanism, _adversarial(clients - 1, 1), np.array([_CLIP]), 1
  )
  costs, truth = _assert_covered(worlds, event, builders.ORDERS, 0.02)
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
  mechanism = builders.make_mechanism(
    'joint', server_noise_multiplier=server, **sampling
  )
  worlds, event = _client_case(
    mechanism, _adversarial(clients - 1, 1), np.array([_CLIP]), count
  )
  costs, truth = _assert_covered(worlds, event, (1, 2, 4, 8), 0.05)
  former = _unseen(event, alpha, (1, 2, 4, 8))
  assert np.all(former < 0.95 * np.max(truth, axis=0))
  assert np.all(former < costs)


@pytest.mark.parametrize('alpha', [0.05, 0.5])
@pytest.mark.parametrize('clipping', builders.CLIPPINGS)
@pytest.mark.parametrize('server', [0.0, _SERVER])
def test_examples_in_aggregate_lose_more_than_if_they_were_sampled_unseen(
  alpha, clipping, server
):
  clients, sampling = _sampling(alpha, 1)
  mechanism = builders.make_mechanism(
    clipping=clipping,
    batch_size=1,
    server_noise_multiplier=server,
    **sampling,
  )
  held, example = np.zeros((1, 1)), np.array([9.0])  # q = 1/2
  worlds, event = _example_case(
    mechanism, _adversarial(clients - 1, 1), held, example, 1
  )
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
  mechanism = builders.make_mechanism(
    'joint',
    batch_size=1,
    participation_probability=alpha,
    clients_per_round=alpha * clients,
  )
  others = _benign(clients - 1, 1)
  case = functools.partial(_client_case, mechanism, others, np.array([_CLIP]))
  if unit == 'example':
    held, example = [np.array([-4.0])], np.array([9.0])
    case = functools.partial(_example_case, mechanism, others, held, example)
  chances = stats.binom.pmf(range(clients + 1), clients, alpha)
  truth = accounted = chances[0]  # Nobody came, and nothing is seen.
  for count in range(1, clients + 1):
    costs, found = _assert_covered(*case(count), (order,), 0.05)
    truth += chances[count] * np.exp(np.max(found))
    accounted += chances[count] * np.exp(costs[0])
  assert 1 < truth < accounted


# --- The truth once more, from samples of what clients do.

_SAMPLES = 40_000
# Of this many standard errors, less than one run in 1e6 is off.
_ERRORS = 5.0


def _assert_sampled(worlds, with_unit, without_unit, event, orders):
  """Samples are of the worlds, and no order costs more than accounted for."""
  for samples, is_there in ((with_unit, True), (without_unit, False)):
    for axis in range(samples.shape[1]):
      below = functools.partial(
        worlds.distribution, axis=axis, with_unit=is_there
      )
      assert stats.kstest(samples[:, axis], below).pvalue > 1e-6

  def ratios(samples):
    return np.exp(
      worlds.log_density(samples, True) - worlds.log_density(samples, False)
    )

  costs, truth = _assert_covered(worlds, event, orders, 0.2)
  ratios_with, ratios_without = ratios(with_unit), ratios(without_unit)
  for order, cost, exact in zip(orders, costs, truth[0]):
    # E_P[(P/Q)^λ] = E_Q[(P/Q)^(λ+1)].
    for values in (ratios_with**order, ratios_without ** (order + 1)):
      error = np.std(values) / math.sqrt(_SAMPLES)
      assert abs(np.mean(values) - math.exp(exact)) < _ERRORS * error
      assert np.mean(values) < math.exp(cost) + _ERRORS * error
      # Sharp enough to tell another distance or probability.
      assert _ERRORS * error < 0.4 * math.expm1(exact)


@pytest.mark.parametrize(
  'size, server, last_mean',
  [(1, 0.0, True), (1, _SERVER, False), (2, 0.0, False), (2, _SERVER, True)],
)
def test_samples_of_joint_show_the_cost_of_a_client(size, server, last_mean):
  mechanism = builders.make_mechanism(
    'joint',
    noise_multiplier=1.2,
    participation_probability=0.6,
    clients_per_round=3.0,
    server_noise_multiplier=server,
    reference_is_last_mean=last_mean,
  )
  generator = np.random.default_rng([size, last_mean])
  others = _benign(4, size)
  update = oracles.clip(np.full(size, 3.0), _CLIP)
  reference = np.full(size, -0.3 if last_mean else 0.0)
  worlds, event = _client_case(mechanism, others, update, 3, reference)
  definition = builders.definition(mechanism)
  samples = [
    definition.released(generator, others, np.tile(mine, (_SAMPLES, 1)), 3)
    for mine in (update, reference)
  ]
  _assert_sampled(worlds, *samples, event, (1, 2))


@pytest.mark.parametrize('clipping', builders.CLIPPINGS)
@pytest.mark.parametrize('server', [0.0, 0.2])
def test_samples_of_the_mean_show_the_cost_of_an_example(clipping, server):
  mechanism = builders.make_mechanism(
    clipping=clipping,
    batch_size=2,
    noise_multiplier=1.6 if clipping == 'batch' else 0.9,
    participation_probability=0.75,
    clients_per_round=3.0,
    server_noise_multiplier=server,
  )
  definition = builders.definition(mechanism)
  generator = np.random.default_rng(1)
  others = _benign(3, 2)
  held = np.array([[1.0, -0.4], [0.3, 2.0]])
  example = np.array([-9.0, 4.0])
  # What is sent for every draw of the three, by its binary number.
  sent = np.array(
    [
      definition.sent(np.array([*held, example])[list(drawn)])
      for drawn in itertools.product((False, True), repeat=3)
    ]
  )
  drawn = (generator.random((_SAMPLES, 3)) < 2 / 3) @ [4, 2, 1]
  without = drawn - drawn % 2
  worlds, event = _example_case(mechanism, others, held, example, 3)
  samples = [
    definition.released(generator, others, sent[number], 3)
    for number in (drawn, without)
  ]
  _assert_sampled(worlds, *samples, event, (1, 2))


# --- The truth of δ: the whole privacy loss, composed.


def _joint_case(clients, count, sigma):
  """Of a client at +C, where others are at -C."""
  mechanism = builders.make_mechanism(
    'joint',
    noise_multiplier=sigma,
    participation_probability=count / clients,
    clients_per_round=float(count),
  )
  worlds, _ = _client_case(
    mechanism, _adversarial(clients - 1, 1), np.array([_CLIP]), count
  )
  event = builders.client_event(
    mechanism, np.full(5, _CLIP**2), count, panel=True
  )
  return worlds, event


@pytest.mark.parametrize('rounds', [1, 20])
def test_the_delta_of_composed_rounds_is_that_of_the_gaussian_mechanism(rounds):
  # Balle and Wang (2018), Theorem 8: the test's own numbers, where a = 1.
  worlds, _ = _joint_case(10, 10, 1.0)
  mu = math.sqrt(rounds / 10)
  for epsilon in (0.1, 0.5, 2.0):
    exact = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(
      epsilon
    ) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    above, below = (
      worlds.delta(epsilon, rounds, rounded) for rounded in (np.ceil, np.floor)
    )
    assert below < exact < above < 1.1 * below


@pytest.mark.parametrize('rounds', [1, 20])
@pytest.mark.parametrize(
  'clients, count, sigma', [(100, 10, 1.0), (20, 2, 0.6), (10, 1, 0.5)]
)
def test_delta_is_no_more_than_that_at_which_epsilon_was_told(
  clients, count, sigma, rounds
):
  worlds, event = _joint_case(clients, count, sigma)
  accountants = [
    accountant_lib.BayesianAccountant(estimator=estimator)
    for estimator in ('population', 'betting')
  ]
  epsilon = min(
    accountant.compose(event, rounds).get_epsilon(_DELTA)
    for accountant in accountants
  )
  assert worlds.delta(epsilon, rounds) <= _DELTA


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
  worlds, _ = _joint_case(clients, count, sigma)
  epsilon = pld.get_epsilon(_DELTA)
  assert worlds.delta(epsilon, rounds, np.floor) > 2 * _DELTA


@pytest.mark.parametrize('rounds', [1, 20])
@pytest.mark.parametrize('clients, sigma', [(10, 1.0), (50, 0.7)])
def test_delta_of_an_example_measured_in_every_round_is_no_more_than_told(
  clients, sigma, rounds
):
  # Also where its client does not come: its chance to come is counted then.
  _, sampling = _sampling(1 / clients, 1)
  mechanism = builders.make_mechanism(
    clipping='example', batch_size=1, noise_multiplier=sigma, **sampling
  )
  worlds, event = _example_case(
    mechanism,
    _adversarial(clients - 1, 1),
    *(np.zeros((0, 1)), np.array([9.0]), 1),
  )
  accountant = accountant_lib.BayesianAccountant(
    'holder', estimator='population', total_rounds=rounds
  )
  epsilon = accountant.compose(event, rounds).get_epsilon(_DELTA)
  assert worlds.delta(epsilon, rounds) <= _DELTA
