"""Tests of all levels at which clients add noise, for examples.

By the definitions in docs/training.md; what is for clients is in
joint_test.py and split_test.py.

That the costs cover what is really released is in released_divergence_test.py.
"""

import dataclasses
import itertools
import math

import attr
import dp_accounting
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.accounting import oracles as accounting_oracles
from tests.mechanisms import builders, oracles
from tf_bdp import mechanisms
from tf_bdp.accounting import events, ledger, mean_bounds, sampled_gaussian
from tf_bdp.mechanisms import instance, measurements

_DELTA = builders.DELTA
_ORDERS = builders.ORDERS
_SIGMA, _CLIP, _BATCH = builders.SIGMA, builders.CLIP, builders.BATCH
_ALPHA, _EXPECTED, _TOTAL = builders.ALPHA, builders.EXPECTED, builders.TOTAL
_SERVER, _CLIENTS = builders.SERVER, builders.CLIENTS
_INSTANCE_LEVELS = builders.INSTANCE_LEVELS
_CLIPPINGS = builders.CLIPPINGS
_mechanism = builders.make_mechanism
_definition = builders.definition
_groups = builders.make_groups
_random_groups = builders.random_groups
_example_event = builders.example_event
_client_event = builders.client_event
_reported_event = builders.reported_event
_all_events = builders.all_events
_sampled = builders.sampled
_accountant = builders.make_accountant
_population_epsilon = builders.population_epsilon
pytestmark = builders.ignore_best_order


def _without_labels(event):
  """The event as if nobody knew which client a group is of."""
  return dp_accounting.ComposedDpEvent(
    attr.evolve(part, labels=None)
    if isinstance(part, events.ParallelEvent)
    else part
    for part, _ in ledger.rounds_of(event)
  )


# --- What clients send, by definition.


_clippings = st.sampled_from(_CLIPPINGS)


def _log_costs(squared_distances, q):
  """ℓ of every unit after rounding to the grid, in 60 digits."""
  return accounting_oracles.log_moments(
    oracles.on_grid(squared_distances), q, _ORDERS
  )


def _batches(clients, seed=0, size=3):
  """Gradients of a few examples for every client, some longer than C."""
  generator = np.random.default_rng(seed)
  return [
    generator.normal(size=(4, size)) * generator.uniform(0.3, 3, (4, 1))
    for _ in range(clients)
  ]


@builders.every_kind
def test_distances_of_examples_are_those_of_leaving_one_out(
  level, clipping, server
):
  mechanism = _mechanism(
    level, clipping=clipping, server_noise_multiplier=server
  )
  definition = _definition(mechanism)
  for count in (1, 2, 7):
    batches = _batches(count)
    sent = [definition.sent(batch) for batch in batches]
    parts = [
      (i, 0, 20, definition.squared_moves(b)) for i, b in enumerate(batches)
    ]
    found = _sampled(_example_event(mechanism, parts, count))
    assert len(found) == count
    for i, group in enumerate(found):
      for x, squared_distance in enumerate(group.squared_distances):
        moved = definition.sent(np.delete(batches[i], x, axis=0))
        if mechanism.accounting == 'aggregate':
          # Only the mean is released.
          others = [*sent[:i], moved, *sent[i + 1 :]]
          move = np.mean(sent, axis=0) - np.mean(others, axis=0)
          variance = definition.mean_variance(count)
        else:
          # The server sees what each client sends.
          move = sent[i] - moved
          variance = definition.client_deviation**2
        noises = 2 if server and mechanism.accounting == 'aggregate' else 1
        assert squared_distance == pytest.approx(
          oracles.on_grid(float(move @ move) / variance, noises), rel=1e-12
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
  for group in _sampled(_example_event(mechanism, groups, 2)):
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
  alone = _mechanism(f'instance_{accounting}')
  groups = _random_groups(3)
  assert _example_event(mechanism, groups, 3) == _example_event(
    alone, groups, 3
  )


@builders.every_level
@hypothesis.settings(max_examples=10)
@hypothesis.given(steps=st.integers(1, 2), count=st.integers(1, 30))
def test_examples_are_included_as_n_of_all_clients_only_in_aggregate(
  level, steps, count
):
  if level == 'joint':
    steps = 1  # More are refused; see below.
  mechanism = _mechanism(level, local_steps=steps)
  # Of several steps others' noise does not count: each is seen by itself.
  amplified = level in ('instance_aggregate', 'joint') and steps == 1
  expected = min(1.0, count / _CLIENTS) if amplified else 1.0
  groups = _random_groups(2, steps=steps)
  for group in _sampled(_example_event(mechanism, groups, count)):
    assert group.inclusion_probability == pytest.approx(expected, rel=1e-12)
  reported = _reported_event(mechanism, 'example', np.ones(5), 1e-9, count)
  # Clients report when they take part.
  for part, entry in ledger.rounds_of(reported):
    assert part.inclusion_probability == entry.inclusion_probability == 1.0


def test_given_n_a_client_is_one_of_them_with_n_of_all():
  # Poisson sampling, by enumeration: Pr[i takes part | n took part].
  alpha, clients = 0.3, 6
  mechanism = _mechanism(
    participation_probability=alpha, clients_per_round=alpha * clients
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


@builders.every_level
@hypothesis.settings(max_examples=10)
@hypothesis.given(
  smallest=st.integers(1, 40), batch=st.sampled_from([1, 4, 1000])
)
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
  assert mechanism.worst_case_squared_distance(
    'example', count
  ) == pytest.approx(oracles.on_grid(expected**2), rel=1e-12)


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
  wanted = oracles.on_grid((move * _CLIP / count) ** 2 / variance, noises=2)
  assert mechanism.worst_case_squared_distance(
    'example', count
  ) == pytest.approx(wanted, rel=1e-12)
  assert mechanism.mean_variance(count) * _CLIP**2 == pytest.approx(variance)


@builders.every_kind
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
    float(np.max(_definition(mechanism).squared_moves(batch)))
    for batch in itertools.chain(adversarial, random)
  )
  assert largest == pytest.approx(mechanism.worst_case_move**2, rel=1e-12)
  groups = _groups([(0, 0, 20, [largest] * 3)])
  for count in (1, 5):
    (group,) = _sampled(_example_event(mechanism, groups, count))
    worst = mechanism.worst_case_squared_distance('example', count)
    np.testing.assert_allclose(group.squared_distances, worst, rtol=1e-12)
    assert group.worst_case_squared_distance == worst


@builders.every_level
def test_rounding_does_not_carry_a_move_beyond_the_worst_case(level):
  mechanism = _mechanism(level)
  above = np.float32(4.0) * np.float32(1 + 1e-3)
  groups = _groups([(0, 0, 20, np.full(4, above))])
  (group,) = _sampled(_example_event(mechanism, groups, 3))
  worst = mechanism.worst_case_squared_distance('example', 3)
  np.testing.assert_array_equal(group.squared_distances, worst)
  assert group.worst_case_squared_distance == worst


@builders.every_level
def test_too_few_measured_examples_cost_the_worst_case(level):
  mechanism = _mechanism(level)
  worst = mechanism.worst_case_squared_distance('example', 2)
  for units in (0, 1, 2):
    parts = [(0, 0, 20, [0.01] * 4), (1, 0, 30, [0.01] * units)]
    enough, few = _sampled(_example_event(mechanism, parts, 2))
    assert np.all(enough.squared_distances < worst)
    np.testing.assert_array_equal(
      few.squared_distances, [worst] * mean_bounds.FEWEST_UNITS
    )
    assert few.participation_probability == mechanism.example_probability(30)


@builders.every_level
@pytest.mark.parametrize('clipping', _CLIPPINGS)
def test_the_ledger_of_examples_is_that_of_dp_accounting(level, clipping):
  mechanism = _mechanism(level, clipping=clipping)
  groups = _random_groups(4, most=mechanism.worst_case_move**2)
  accountant = _accountant()
  accountant.compose(_example_event(mechanism, groups, 4), 10)
  count = 10
  z = _SIGMA / (2.0 if clipping == 'batch' else 1.0)
  q = _BATCH / 20
  if mechanism.accounting == 'sequential':
    q, count = _BATCH / _TOTAL, 4 * 10
  elif mechanism.accounting == 'aggregate':
    z *= 2.0  # The root of n; what n of all clients gains is left out.
  event = dp_accounting.PoissonSampledDpEvent(
    q, dp_accounting.GaussianDpEvent(oracles.on_grid(z**-2) ** -0.5)
  )
  found, wanted = (
    dp_accounting.rdp.RdpAccountant([2, 3, 5, 9, 17]) for _ in range(2)
  )
  epsilon = wanted.compose(event, count).get_epsilon(_DELTA)
  found.compose(accountant.ledger)
  assert found.get_epsilon(_DELTA) == pytest.approx(epsilon, rel=1e-9)
  assert accountant.get_epsilon(_DELTA) <= epsilon * (1 + 1e-9)


# --- Over clients and steps.


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
  event = _example_event(mechanism, _groups(_parts()), 3)
  costs = sum(
    accounting_oracles.log_mean_exp(
      _log_costs(np.array(moves) / _SIGMA**2, min(_BATCH, holding) / _TOTAL)
    )
    for _, _, holding, moves in _parts()
  )
  assert _population_epsilon(event) == pytest.approx(
    accounting_oracles.epsilon(_ORDERS, costs, _DELTA, 'tight'), rel=1e-9
  )


@pytest.mark.parametrize('level', ['instance_parallel', 'instance_aggregate'])
def test_the_other_costs_are_the_maximum_over_clients(level):
  mechanism = _mechanism(level)
  event = _example_event(mechanism, _groups(_parts()), 3)
  variance, inclusion = _SIGMA**2, 1.0
  if level == 'instance_aggregate':
    variance, inclusion = 3 * _SIGMA**2, 3 / _CLIENTS
  by_client = [
    accounting_oracles.log_mean_exp(
      accounting_oracles.included(
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
    accounting_oracles.epsilon(_ORDERS, costs, _DELTA, 'tight'), rel=1e-9
  )


@pytest.mark.parametrize('level', ['instance_sequential', 'instance_parallel'])
def test_steps_add_up_and_clients_may_take_fewer(level):
  mechanism = _mechanism(level, local_steps=3)
  parts = [
    *((0, step, 20, [0.3 + step] * 4) for step in range(3)),
    *((1, step, 20, [0.9 - step / 5] * 4) for step in range(2)),
  ]
  event = _example_event(mechanism, _groups(parts), 2)
  q = mechanism.example_probability(20)
  by_client = [
    sum(
      _log_costs([part[3][0] / _SIGMA**2], q)[0]
      for part in parts
      if part[0] == client
    )
    for client in (0, 1)
  ]
  # The second client, which starts farther away, stops before the first.
  combine = np.sum if level == 'instance_sequential' else np.max
  costs = combine(by_client, axis=0)
  assert _population_epsilon(event) == pytest.approx(
    accounting_oracles.epsilon(_ORDERS, costs, _DELTA, 'tight'), rel=1e-9
  )


def _history(mechanism, seed=0, rounds=12, clients=5):
  """Rounds of different clients: {client: [moves of each step]} for each."""
  generator = np.random.default_rng(seed)
  most = mechanism.worst_case_move**2
  return [
    {
      client: most * generator.beta(1, 3, (mechanism.local_steps, 5))
      for client in np.flatnonzero(generator.random(clients) < 0.4).tolist()
    }
    for _ in range(rounds)
  ]


def _parts_of(history_round):
  return [
    (client, step, 20 + 10 * client, moves.tolist())
    for client, steps in history_round.items()
    for step, moves in enumerate(steps)
  ]


@pytest.mark.parametrize(
  'level, steps',
  [
    ('instance_parallel', 1),
    ('instance_parallel', 2),
    ('instance_aggregate', 2),
    ('split', 1),
    ('joint', 1),
  ],
)
def test_an_example_loses_in_the_rounds_of_its_own_client_alone(level, steps):
  accounting = 'aggregate' if level == 'instance_aggregate' else 'parallel'
  mechanism = _mechanism(level, accounting=accounting, local_steps=steps)
  history = _history(mechanism)
  found = _accountant(estimator='population')
  for part in history:
    found.compose(
      _example_event(mechanism, _groups(_parts_of(part)), len(part))
    )

  # Client by client, every one of its steps on its own.
  costs, dp = [], []
  for client in range(5):
    q = _BATCH / (20 + 10 * client)
    own = [step for part in history for step in part.get(client, ())]
    costs.append(
      sum(
        accounting_oracles.log_mean_exp(_log_costs(step / _SIGMA**2, q))
        for step in own
      )
    )
    alone = _accountant(estimator='population')
    noise = _SIGMA / mechanism.worst_case_move
    sampled = dp_accounting.PoissonSampledDpEvent(
      q, dp_accounting.GaussianDpEvent(noise)
    )
    dp.append(alone.compose(sampled, len(own)).get_dp_epsilon(_DELTA))
  assert found._costs(0.0) == pytest.approx(np.max(costs, axis=0), rel=1e-9)
  assert found.get_dp_epsilon(_DELTA) == pytest.approx(max(dp), rel=1e-3)

  # As if somebody had been in all rounds, where the largest were.
  before = _accountant(estimator='population')
  for part in history:
    event = _example_event(mechanism, _groups(_parts_of(part)), len(part))
    before.compose(_without_labels(event))
  assert np.all(before._costs(0.0) > 1.2 * found._costs(0.0))
  assert before.get_dp_epsilon(_DELTA) > 1.2 * found.get_dp_epsilon(_DELTA)


def _panel_round(history_round, mechanism, panel, unmeasured=()):
  """Groups of all clients of the panel, of which some took part."""
  came = {
    client: measurements.MeasuredClient(
      20 + 10 * client,
      mechanism.local_steps if client in history_round else 0,
      np.ones((mechanism.local_steps, 5), bool),
      history_round.get(client),
    )
    for client in panel
  }
  return mechanism.groups(came, panel, unmeasured)


@pytest.mark.parametrize('level', ['instance_parallel', 'split', 'joint'])
def test_a_panel_of_all_clients_is_charged_for_the_rounds_of_each(level):
  mechanism = _mechanism(level, accounting='parallel', panel_examples=5)
  history = _history(mechanism)
  found, of_participants = (
    _accountant(composition, estimator='population')
    for composition in ('panel', 'product')
  )
  for part in history:
    groups = _panel_round(part, mechanism, range(5))
    found.compose(_example_event(mechanism, groups, len(part)))
    without_panel = dataclasses.replace(mechanism, panel_examples=0)
    of_participants.compose(
      _example_event(without_panel, _groups(_parts_of(part)), len(part))
    )
  # Of the same clients, in DP's figures the same.
  assert found.get_dp_epsilon(_DELTA) == pytest.approx(
    of_participants.get_dp_epsilon(_DELTA), rel=1e-9
  )
  costs = [
    accounting_oracles.log_mean_exp(
      sum(
        (
          _log_costs(part[client][0] / _SIGMA**2, _BATCH / (20 + 10 * client))
          for part in history
          if client in part
        ),
        np.zeros((5, len(_ORDERS))),
      )
    )
    for client in range(5)
  ]
  # Moves are float32 on their way.
  assert found._costs(0.0) == pytest.approx(np.max(costs, axis=0), rel=1e-5)


@pytest.mark.parametrize('level', ['instance_parallel', 'instance_aggregate'])
def test_dp_covers_clients_outside_of_the_panel_that_have_fewer_examples(level):
  mechanism = _mechanism(level, panel_examples=5, smallest_holding=8)
  part = {0: np.zeros((1, 5)), 7: np.zeros((1, 5))}
  groups = _panel_round(part, mechanism, range(3), {7})
  ((_, entry),) = ledger.rounds_of(_example_event(mechanism, groups, 2))
  assert entry.participation_probability == _BATCH / 8  # And not of 20.


def test_where_others_than_the_panel_took_part_the_round_is_everybodys():
  mechanism = _mechanism(
    'instance_parallel', panel_examples=5, smallest_holding=20
  )
  history = _history(mechanism)
  accountant = _accountant('panel', estimator='population')
  expected = 0
  for part in history:
    others = set(part) - {0, 1, 2}
    groups = _panel_round(part, mechanism, range(3), others)
    event = _example_event(mechanism, groups, len(part))
    assert (event.labels is None) == bool(others)
    accountant.compose(event)
    expected += bool(others)
  # Nobody of the panel was in more rounds than these.
  alone = [
    sum(client in part or bool(set(part) - {0, 1, 2}) for part in history)
    for client in range(3)
  ]
  assert 0 < expected < len(history)
  # At the largest q of the panel where it is everybody's.
  by_hand = _accountant(estimator='population')
  z = 1 / (2 / _SIGMA + 2.0**-20)  # On the grid of the noise.
  sampled = dp_accounting.PoissonSampledDpEvent(
    _BATCH / 20, dp_accounting.GaussianDpEvent(z)
  )
  most = by_hand.compose(sampled, max(alone)).get_dp_epsilon(_DELTA)
  least = _accountant(estimator='population').compose(sampled, expected)
  found = accountant.get_dp_epsilon(_DELTA)
  assert least.get_dp_epsilon(_DELTA) < found <= most * (1 + 1e-9)


@pytest.mark.parametrize('level', ['instance_sequential', 'instance_aggregate'])
def test_where_the_noise_of_others_is_counted_groups_have_no_labels(level):
  event = _example_event(_mechanism(level), _groups(_parts()), 3)
  parts = [part for part, _ in ledger.rounds_of(event)]
  assert all(getattr(part, 'labels', None) is None for part in parts)


def test_in_a_panel_every_step_has_the_groups_of_all_clients_in_their_order():
  mechanism = _mechanism('instance_parallel', local_steps=2, panel_examples=4)
  # A client that is not there, or takes no second step, moves nothing in it.
  parts = [
    (3, 0, 20, [0.1] * 4),
    (3, 1, 20, [0.2] * 4),
    (1, 0, 40, [0.3] * 4),
    (1, 1, 40, [0.0] * 4),
  ]
  event = _example_event(mechanism, _groups(parts), 1)
  rounds = [part for part, _ in ledger.rounds_of(event)]
  assert [
    [group.squared_distances[0] * _SIGMA**2 for group in part.groups]
    for part in rounds
  ] == [
    pytest.approx([0.1, 0.3], rel=1e-5),
    pytest.approx([0.2, 0.0], rel=1e-5, abs=0),
  ]
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
    accounting_oracles.epsilon(
      _ORDERS, np.max(by_client, axis=0), _DELTA, 'tight'
    ),
    rel=1e-9,
  )


@hypothesis.settings(max_examples=16)
@hypothesis.given(
  composition=st.sampled_from(['holder', 'product']),
  estimator=st.sampled_from(sorted(mean_bounds.ESTIMATORS)),
  clipping=_clippings,
)
def test_one_client_with_all_data_is_centralised_training(
  composition, estimator, clipping
):
  mechanism = _mechanism(
    'instance_sequential',
    clipping=clipping,
    participation_probability=1.0,
    clients_per_round=1.0,
  )
  total = {'total_rounds': 3} if composition == 'holder' else {}
  federated, central = (
    _accountant(composition, estimator=estimator, **total) for _ in range(2)
  )
  for seed in range(3):
    (batch,) = _batches(1, seed)
    moves = _definition(mechanism).squared_moves(batch)
    groups = _groups([(0, 0, _TOTAL, moves)])
    federated.compose(_example_event(mechanism, groups, 1))
    central.compose(
      events.BayesianGaussianEvent(
        oracles.on_grid(
          moves * _CLIP**2 / _definition(mechanism).client_deviation ** 2
        ),
        _BATCH / _TOTAL,
        oracles.on_grid((2.0 if clipping == 'batch' else 1.0) ** 2 / _SIGMA**2),
      )
    )
  assert federated.get_epsilon(_DELTA) == pytest.approx(
    central.get_epsilon(_DELTA), rel=1e-12
  )
  # So it is by the other two, which then have the same q and noise.
  for accounting in ('parallel', 'aggregate'):
    other = dataclasses.replace(mechanism, accounting=accounting)
    (found,) = _sampled(_example_event(other, groups, 1))
    (wanted,) = _sampled(_example_event(mechanism, groups, 1))
    np.testing.assert_allclose(
      found.squared_distances, wanted.squared_distances, rtol=1e-12
    )
    assert found.participation_probability == wanted.participation_probability


@hypothesis.settings(max_examples=10)
@hypothesis.given(count=st.integers(2, 100), order=st.integers(1, 5))
def test_sequential_and_aggregate_agree_to_first_order(count, order):
  # All n clients with N_i examples each, always there: N = n N_i, and
  # n (B/N)² r² = (B/N_i)² r²/n.
  holding, batch = 1000, 5
  settings = {
    'noise_multiplier': 30.0,
    'batch_size': batch,
    'participation_probability': 1.0,
    'clients_per_round': float(count),
    'total_examples': count * holding,
  }
  parts = [(client, 0, holding, [1.0] * 3) for client in range(count)]
  costs = {}
  for level in ('instance_sequential', 'instance_aggregate'):
    groups = _sampled(
      _example_event(_mechanism(level, **settings), _groups(parts), count)
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
  first = order * (order + 1) / 2 * (batch / holding) ** 2 / 30**2 / count
  assert costs['instance_sequential'] == pytest.approx(first, rel=2e-3)
  assert costs['instance_aggregate'] == pytest.approx(first, rel=2e-3)


def test_several_steps_with_aggregate_accounting_count_as_in_parallel():
  aggregate = _mechanism('instance_aggregate', local_steps=2)
  parallel = _mechanism('instance_parallel', local_steps=2)
  assert not aggregate.averages_noise
  assert aggregate.example_probability(20) == _BATCH / 20
  assert aggregate.largest_example_probability == 1.0
  assert aggregate.example_variance(9) == pytest.approx(_SIGMA**2)
  assert aggregate.worst_case_squared_distance(
    'example', 9
  ) == parallel.worst_case_squared_distance('example', 9)
  groups = _random_groups(3, steps=2)
  assert _example_event(aggregate, groups, 3) == _example_event(
    parallel, groups, 3
  )
  # Nor does the noise count that the server adds to what follows.
  more = dataclasses.replace(aggregate, server_noise_multiplier=_SERVER)
  assert _example_event(more, groups, 3) == _example_event(parallel, groups, 3)


def test_with_one_step_aggregate_accounting_averages_noise():
  assert _mechanism('instance_aggregate').averages_noise
  assert _mechanism('joint').averages_noise
  for level in ('instance_sequential', 'instance_parallel', 'split'):
    assert not _mechanism(level).averages_noise
  assert not _mechanism('joint', accounting='parallel').averages_noise


def test_parallel_costs_do_not_depend_on_how_many_others_came():
  mechanism = _mechanism('instance_parallel')
  groups = _random_groups(2)
  assert _example_event(mechanism, groups, 2) == _example_event(
    mechanism, groups, 200
  )


def test_more_participants_hide_an_example_better_in_aggregate():
  mechanism = _mechanism(server_noise_multiplier=_SERVER)
  groups = _random_groups(1)
  found = [
    _sampled(_example_event(mechanism, groups, count))[0].squared_distances
    for count in (1, 2, 5, 50)
  ]
  assert np.all(np.diff(found, axis=0) < 0)


# --- What each client can tell for itself.


@pytest.mark.parametrize('level', ['instance_parallel', 'split', 'joint'])
def test_a_client_by_itself_loses_what_its_own_groups_cost(level):
  steps = 1 if level == 'joint' else 2
  mechanism = _mechanism(level, accounting='parallel', local_steps=steps)
  groups = _random_groups(3, steps=steps)
  found = builders.local_events(mechanism, groups, 3)
  assert sorted(found) == [0, 1, 2]
  for client, event in found.items():
    mine = groups.clients == client
    alone = _groups(
      [part[1:] for part in zip(mine, *groups[:3], groups.moves()) if part[0]]
    )
    assert _sampled(event) == _sampled(_example_event(mechanism, alone, 1))
    epsilon = _population_epsilon(event)
    assert epsilon <= _population_epsilon(_example_event(mechanism, groups, 3))


@pytest.mark.parametrize(
  'level', ['instance_sequential', 'instance_aggregate', 'joint']
)
def test_by_itself_a_client_cannot_count_on_others(level):
  with pytest.raises(ValueError, match='Clients bound their own loss'):
    builders.local_events(_mechanism(level), _random_groups(2), 2)


# --- Rounds with nobody, and without noise.


@builders.every_level
def test_a_round_to_which_nobody_came_costs_examples_nothing(level):
  mechanism = _mechanism(level)
  found = _all_events(mechanism, [], builders.no_groups(), 0)
  assert set(found) == set(mechanism.units)
  for unit in mechanism.units:
    reported = _reported_event(mechanism, unit, np.ones(5), 1e-9, 0)
    for event in (found[unit], reported):
      if (level, unit) == ('split', 'client'):
        # A client could have come, and added its update to the server's noise.
        assert isinstance(event, events.MixedGaussianEvent)
      else:
        assert isinstance(event, dp_accounting.NoOpDpEvent)


@pytest.mark.parametrize('level', ['instance_aggregate', 'joint'])
def test_where_only_the_mean_is_released_an_empty_one_tells_of_nobody(level):
  # A panel was measured; but there is nothing to see.
  mechanism = _mechanism(level, panel_examples=5)
  found = _all_events(
    mechanism, np.ones(5), _random_groups(4), 0, panel=True, took_part=False
  )
  for event in found.values():
    assert isinstance(event, dp_accounting.NoOpDpEvent)


@builders.every_level
def test_without_noise_a_round_is_not_private(level):
  mechanism = _mechanism(
    level, noise_multiplier=0.0, server_noise_multiplier=0.0
  )
  for count in (1, 4):
    found = _all_events(mechanism, np.ones(4), _random_groups(4), count)
    assert len(found) == len(mechanism.units)
    for event in found.values():
      assert isinstance(event, dp_accounting.NonPrivateDpEvent)
    assert mechanism.worst_case_squared_distance('example', count) == math.inf


@builders.every_level
def test_without_noise_reported_rounds_are_not_private(level):
  mechanism = _mechanism(
    level, noise_multiplier=0.0, server_noise_multiplier=0.0
  )
  for unit in mechanism.units:
    event = _reported_event(mechanism, unit, np.zeros(5), 1e-9, 4)
    assert isinstance(event, dp_accounting.NonPrivateDpEvent)
  # Not for want of examples, either.
  (*_, event) = _all_events(mechanism, [], builders.no_groups(), 4).values()
  assert isinstance(event, dp_accounting.NonPrivateDpEvent)


@pytest.mark.parametrize('level', ['instance_parallel', 'split', 'joint'])
def test_without_noise_no_client_has_a_bound_of_its_own(level):
  mechanism = _mechanism(
    level,
    accounting='parallel',
    noise_multiplier=0.0,
    server_noise_multiplier=0.0,
  )
  found = builders.local_events(mechanism, _random_groups(3), 3)
  assert sorted(found) == [0, 1, 2]
  for event in found.values():
    assert isinstance(event, dp_accounting.NonPrivateDpEvent)


# --- Events of all units.


@builders.every_level
@pytest.mark.parametrize('panel', [False, True])
def test_there_is_an_event_for_each_unit(level, panel):
  mechanism = _mechanism(level)
  units = ('example',) if level in _INSTANCE_LEVELS else ('client', 'example')
  assert mechanism.units == units
  squared, groups = np.full(4, 0.5), _random_groups(4)
  found = _all_events(mechanism, squared, groups, 4, panel)
  assert tuple(found) == units
  assert found['example'] == _example_event(mechanism, groups, 4)
  if 'client' in units:
    assert found['client'] == _client_event(mechanism, squared, 4, panel=panel)
    assert found['client'].panel == panel


@builders.every_level
@pytest.mark.parametrize('panel_examples', [0, 3])
def test_examples_are_a_panel_if_the_same_are_measured(level, panel_examples):
  if panel_examples and level == 'instance_sequential':
    return  # Refused; see below.
  mechanism = _mechanism(level, panel_examples=panel_examples)
  for group in _sampled(_example_event(mechanism, _random_groups(2), 2)):
    assert group.panel == bool(panel_examples)


@builders.every_level
def test_without_measured_examples_there_are_no_events(level):
  with pytest.raises(ValueError, match='needs measured examples'):
    _all_events(_mechanism(level), np.ones(4), None, 4)


# --- Costs that clients bounded themselves.


def _ledger_of(mechanism, event, rounds=1):
  total = mechanism.cost_count('example', rounds, 10)
  accountant = _accountant('holder', total_rounds=total)
  return accountant.compose(event).ledger


@builders.every_level
@hypothesis.settings(max_examples=12)
@hypothesis.given(
  clipping=_clippings, steps=st.integers(1, 3), count=st.integers(1, 7)
)
def test_reported_rounds_are_in_the_ledger_as_measured_ones(
  level, clipping, steps, count
):
  if level == 'joint':
    steps = 1  # More are refused; see below.
  mechanism = _mechanism(
    level, clipping=clipping, local_steps=steps, smallest_holding=20
  )
  groups = _random_groups(
    count, holding=20, steps=steps, most=mechanism.worst_case_move**2
  )
  measured = _all_events(mechanism, np.full(4, 0.5), groups, count)
  for unit in mechanism.units:
    reported = _reported_event(mechanism, unit, np.ones(5), 1e-9, count)
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
  total = mechanism.cost_count('example', rounds, clients)
  measured, reported = (
    _accountant('holder', total_rounds=total, estimator='student_t')
    for _ in range(2)
  )
  failure = measured.reporting(_DELTA).failure_probability
  for seed in range(rounds):
    groups = _random_groups(clients, steps=steps, units=40, most=0.5, seed=seed)
    event = _example_event(mechanism, groups, clients)
    # The server learns the largest cost of each step and not whose it is.
    measured.compose(_without_labels(event))
    costs = 0.0
    for part, _ in ledger.rounds_of(event):
      # What the clients would compute, and its maximum or sum.
      bounds = []
      for group in part.groups:
        squared = np.append(
          group.squared_distances, group.worst_case_squared_distance
        )
        all_costs = total * accounting_oracles.included(
          sampled_gaussian.log_moments(
            squared, group.participation_probability, _ORDERS
          ),
          clients / _CLIENTS if mechanism.averages_noise else 1.0,
        )
        bound = mean_bounds.student_t(all_costs[:-1], failure, all_costs[-1])
        bounds.append(bound / total)
      costs = costs + np.max(bounds, axis=0)
    reported.compose(
      _reported_event(mechanism, 'example', costs, failure, clients)
    )
  epsilon = measured.get_epsilon(_DELTA)
  assert epsilon < measured.get_worst_case_epsilon(_DELTA)
  assert reported.get_epsilon(_DELTA) == pytest.approx(epsilon, rel=1e-9)
  assert reported.ledger == measured.ledger


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
  assert mechanism.cost_count('example', 50, 10) == expected
  # That many there are if everybody always comes, and no more.
  groups = _random_groups(10, steps=steps)
  total = mechanism.cost_count('example', 2, 10)
  accountant = _accountant('holder', total_rounds=total, estimator='population')
  event = _example_event(mechanism, groups, 10)
  accountant.compose(event, 2)
  with pytest.raises(ValueError, match='total_rounds'):
    accountant.compose(event)


# --- Refusals.


@pytest.mark.parametrize(
  'level, settings, sentence',
  [
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
    ('joint', {'accounting': 'serial'}, 'accounting must be one of'),
  ],
)
def test_settings_that_contradict_each_other_are_refused(
  level, settings, sentence
):
  assert isinstance(_mechanism(level), instance.InstanceMechanism)
  with pytest.raises(ValueError, match=sentence):
    _mechanism(level, **settings)


@pytest.mark.parametrize('level', ['instance_aggregate', 'split'])
def test_only_joint_has_a_reference_for_absent_clients(level):
  with pytest.raises(TypeError, match='reference_is_last_mean'):
    _mechanism(level, reference_is_last_mean=True)
  assert not _mechanism(level).reference_is_last_mean


@pytest.mark.parametrize('level', ['instance_aggregate', 'joint', 'split'])
def test_noise_of_the_server_is_taken_where_it_counts(level):
  mechanism = _mechanism(level, server_noise_multiplier=0.5)
  assert mechanism.noise_per_clip_norm == pytest.approx(0.5 / _EXPECTED)


@pytest.mark.parametrize(
  'name, value, sentence',
  [
    ('accounting', 'serial', "accounting must be one of .* Found 'serial'"),
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
    ('clients_per_round', 0.0, 'clients_per_round must be positive'),
    ('clients_per_round', math.nan, 'clients_per_round must be positive'),
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
    _mechanism(**settings).check_holdings(holdings)


def test_clients_that_hold_enough_are_not():
  _mechanism(smallest_holding=4).check_holdings([9, 4])
  _mechanism(panel_examples=10).check_holdings([9, 3])
  _mechanism().check_holdings([1])
  # One without examples has nobody to protect.
  _mechanism().check_holdings([9, 0])


def test_a_client_charged_when_it_came_is_not_charged_for_its_chance_to():
  # The chance would count twice: in the cost, and in how often there is one.
  mechanism = _mechanism('instance_aggregate')
  parts = [(0, 0, 20, [0.1, 0.2, 0.3])]
  (came,) = _example_event(mechanism, _groups(parts, False), 3).groups
  (always,) = _example_event(mechanism, _groups(parts, True), 3).groups
  assert came.inclusion_probability == 1.0
  assert always.inclusion_probability == 3 / (_EXPECTED / _ALPHA)
  np.testing.assert_array_equal(
    came.squared_distances, always.squared_distances
  )


# --- What else a mechanism is asked.


@builders.every_level
def test_the_level_is_the_name_by_which_it_is_registered(level):
  mechanism = _mechanism(level)
  assert mechanism.level == level
  assert level in mechanisms.LEVELS
  assert mechanism.local is mechanism
  assert mechanism.paper_dp_event() is None


@builders.every_level
def test_examples_are_added_or_removed(level):
  relation = _mechanism(level).relation('example')
  assert relation is dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


@builders.every_level
def test_a_panel_is_of_the_unit_that_is_measured_in_every_round(level):
  mechanism = _mechanism(level)
  assert not mechanism.is_panel('example', 10)
  if 'client' in mechanism.units:
    assert mechanism.is_panel('client', 10)
    assert not mechanism.is_panel('client', 0)
  if mechanism.accounting != 'sequential':
    panel = dataclasses.replace(mechanism, panel_examples=5)
    assert panel.is_panel('example', 0)


@builders.every_level
def test_what_was_measured_can_be_counted_as_the_paper_does(level):
  mechanism = _mechanism(level)
  found = mechanism.counted_otherwise()
  own = f'example_{mechanism.accounting}'
  ways = ['example_sequential', own]
  if mechanism.units[0] == 'client':
    ways.insert(0, 'client')
  assert list(found) == list(dict.fromkeys(ways))
  assert found[own] == mechanism
  sequential = found['example_sequential']
  assert type(sequential) is type(mechanism)
  groups = _random_groups(3)
  assert _example_event(sequential, groups, 3) == _example_event(
    _mechanism('instance_sequential'), groups, 3
  )


@builders.every_level
def test_the_caveat_is_that_of_how_examples_are_counted(level):
  mechanism = _mechanism(level)
  assert mechanism.caveats()[0].startswith(mechanism.accounting.capitalize())
  if level == 'instance_aggregate':
    parallel, why = _mechanism(level, local_steps=2).caveats()
    assert parallel.startswith('Parallel')
    assert 'the noise of other clients cannot be counted' in why
