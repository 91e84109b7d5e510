"""Tests of which examples clients draw, and which are measured."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from tests.mechanisms import builders
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import example_batches, federated_data, sampling

_HOLDINGS = (6, 4, 3, 9)
_BATCH_SIZE = 3
_PANEL = (1, 2, 3)
_PARTICIPANTS = (0, 2)
# How unlikely a true hypothesis must be before a test of it fails.
_LEVEL = 1e-6


def _data(holdings=_HOLDINGS):
  ends = np.cumsum(holdings)
  # Not in order, so that a client's example and its index are not the same.
  order = np.random.default_rng(0).permutation(ends[-1])
  clients = np.split(order, ends[:-1])
  features = np.zeros((ends[-1], 1), np.float32)
  return federated_data.FederatedData(
    features, np.zeros(len(order), int), clients
  )


def _batches(
  level='instance_parallel',
  algorithm='fed_sgd',
  seed=4,
  holdings=_HOLDINGS,
  **options,
):
  rule = algorithm_lib.Algorithm(algorithm)
  options = {
    'batch_size': _BATCH_SIZE,
    'local_steps': rule.local_steps(max(holdings), _BATCH_SIZE),
    **options,
  }
  mechanism = builders.make_mechanism(
    level,
    noise_multiplier=0.5,
    clip_norm=1.0,
    participation_probability=0.5,
    clients_per_round=2.0,
    total_examples=sum(holdings),
    **options,
  )
  sampler = sampling.Sampler(len(holdings), seed=seed)
  return example_batches.ExampleBatches(
    _data(holdings), mechanism, rule, sampler
  )


def _sets(draw):
  """The examples of each step's batch."""
  return [set(draw.indices[step].tolist()) for step in draw.drawn]


# Draws.


def test_every_example_is_drawn_by_itself_with_probability_batch_over_holding():
  rounds = 700
  for client, holding in enumerate(_HOLDINGS):
    counts, sizes = dict.fromkeys(range(sum(_HOLDINGS)), 0), []
    batches = _batches(algorithm='fed_avg')
    for number in range(rounds):
      for chosen in _sets(batches.draw(number, client)):
        sizes.append(len(chosen))
        for example in chosen:
          counts[example] += 1
    steps, probability = rounds * 3, min(1.0, _BATCH_SIZE / holding)
    own = batches.data.indices(client).tolist()
    for example, count in counts.items():
      wanted = probability if example in own else 0.0
      assert stats.binomtest(count, steps, wanted).pvalue > _LEVEL
    if probability == 1:
      assert set(sizes) == {holding}
      continue
    # By itself: the size of a batch is binomial, and not more or less even.
    observed = np.bincount(sizes, minlength=holding + 1)
    expected = steps * stats.binom.pmf(
      np.arange(holding + 1), holding, probability
    )
    # Those that are hardly expected together.
    rare = expected < 5
    pool = [np.append(x[~rare], x[rare].sum()) for x in (observed, expected)]
    filled = pool[1] > 0
    assert stats.chisquare(*(x[filled] for x in pool)).pvalue > _LEVEL


def test_draws_can_be_repeated_and_differ_by_round_client_step_and_seed():
  holdings = (40, 40)

  def draw(number, client, seed=4):
    return _batches(
      algorithm='fed_avg',
      seed=seed,
      holdings=holdings,
      batch_size=20,
      local_steps=2,
    ).draw(number, client)

  for one, other in zip(draw(5, 1), draw(5, 1)):
    np.testing.assert_array_equal(one, other)
  # As positions among the client's examples.
  data = _data(holdings)

  def positions(*arguments):
    found = draw(*arguments)
    own = data.indices(arguments[1])
    return [np.isin(own, list(chosen)).tolist() for chosen in _sets(found)]

  batches = [
    *(positions(5, 1), positions(6, 1)),
    *(positions(5, 0), positions(5, 1, 7)),
  ]
  flat = [tuple(chosen) for draws in batches for chosen in draws]
  assert len(set(flat)) == len(flat) == 8


def test_what_is_drawn_is_measured():
  for number in range(20):
    draw = _batches(algorithm='fed_avg').draw(number, 3)
    np.testing.assert_array_equal(draw.measured, draw.drawn)
    # No example is computed with that is in no batch.
    assert np.all(np.any(draw.drawn, axis=0))
    assert len(set(draw.indices.tolist())) == draw.indices.size


def test_a_panel_of_examples_is_measured_instead_the_same_in_every_round():
  batches = _batches(algorithm='fed_avg', panel_examples=4)
  plain = _batches(algorithm='fed_avg')
  for client, holding in enumerate(_HOLDINGS):
    panels = set()
    for number in range(20):
      draw = batches.draw(number, client)
      assert _sets(draw) == _sets(plain.draw(number, client))
      assert np.all(np.any(draw.drawn | draw.measured, axis=0))
      panels |= {
        frozenset(draw.indices[step].tolist()) for step in draw.measured
      }
    (panel,) = panels
    assert len(panel) == min(4, holding)
    assert panel <= set(batches.data.indices(client).tolist())
  other = _batches(panel_examples=4, seed=5).draw(0, 3)
  assert set(other.indices[other.measured[0]].tolist()) != panel


def test_clients_take_as_many_steps_as_their_examples_fill_batches():
  batches = _batches(algorithm='fed_avg')
  draws = [batches.draw(0, client) for client in range(4)]
  assert [draw.step_count for draw in draws] == [2, 2, 1, 3]
  assert {draw.drawn.shape[0] for draw in draws} == {3}
  assert [_batches().draw(0, c).step_count for c in range(4)] == [1] * 4


@pytest.mark.parametrize(
  ('algorithm', 'local_steps'), [('fed_sgd', 3), ('fed_avg', 2), ('fed_avg', 4)]
)
def test_other_local_steps_than_the_algorithms_are_refused(
  algorithm, local_steps
):
  steps = {'fed_sgd': 1, 'fed_avg': 3}[algorithm]
  sentence = f'{algorithm} takes up to {steps} local steps .* {local_steps}.'
  with pytest.raises(ValueError, match=sentence):
    _batches(algorithm=algorithm, local_steps=local_steps)


@pytest.mark.parametrize('level', ['instance_parallel', 'joint', 'split'])
@pytest.mark.parametrize('loss', ['balanced', 'calibrated'])
def test_losses_of_all_data_are_refused_where_examples_are_protected(
  level, loss
):
  rule = algorithm_lib.Algorithm(client_loss=loss)
  with pytest.raises(ValueError, match='Use it with client privacy only'):
    dataclasses.replace(_batches(level), algorithm=rule)


def test_examples_of_updates_are_refused_where_examples_are_protected():
  rule = algorithm_lib.Algorithm(examples_per_round=5)
  with pytest.raises(ValueError, match='examples_per_round is for client priv'):
    dataclasses.replace(_batches(), algorithm=rule)


def test_clients_with_fewer_examples_than_was_said_are_refused():
  with pytest.raises(
    ValueError, match='smallest_holding is 4, but a client has 3'
  ):
    _batches(smallest_holding=4)
  _batches(smallest_holding=3)


# Whose updates are computed.


@pytest.mark.parametrize(
  ('level', 'options', 'wanted'),
  [
    ('instance_sequential', {}, (0, 2)),
    ('instance_parallel', {}, (0, 2)),
    ('instance_parallel', {'panel_examples': 3}, (0, 2)),
    ('instance_aggregate', {}, (0, 2, 1, 3)),
    # With several steps the noise of others does not count.
    ('instance_aggregate', {'algorithm': 'fed_avg'}, (0, 2)),
    ('joint', {}, (0, 2, 1, 3)),
    ('joint', {'accounting': 'parallel'}, (0, 2, 1, 3)),
    ('split', {}, (0, 2, 1, 3)),
    ('split', {'algorithm': 'fed_avg'}, (0, 2, 1, 3)),
  ],
)
def test_absent_clients_compute_where_they_could_have_counted(
  level, options, wanted
):
  batches = _batches(level, **options)
  assert batches.clients(list(_PARTICIPANTS), list(_PANEL)) == list(wanted)
  assert batches.clients(list(_PARTICIPANTS), []) == list(_PARTICIPANTS)
  assert batches.clients([], []) == []


# Groups.


def _moves(batches, number, clients):
  """Moves that tell their client, step and example; padded."""
  result = {}
  for client in clients:
    draw = batches.draw(number, client)
    steps = np.arange(draw.drawn.shape[0])[:, np.newaxis]
    result[client] = np.pad(
      client + 0.1 * steps + 0.001 * draw.indices, [[0, 0], [0, 5]]
    )
  return result


def _groups(batches, number=1, unusable=(), participants=_PARTICIPANTS):
  clients = batches.clients(list(participants), list(_PANEL))
  draws = {client: batches.draw(number, client) for client in clients}
  moves = _moves(batches, number, set(clients) - set(unusable))
  return batches.groups(draws, moves, list(participants), list(_PANEL)), draws


def _wanted(draw, client, step):
  return client + 0.1 * step + 0.001 * draw.indices[draw.measured[step]]


@pytest.mark.parametrize(
  ('level', 'options', 'clients'),
  [
    ('instance_sequential', {}, (0, 2)),
    ('instance_parallel', {}, (0, 2)),
    ('instance_aggregate', {}, (0, 2, 1, 3)),
    ('instance_aggregate', {'panel_examples': 3}, _PANEL),
    ('joint', {}, (0, 2, 1, 3)),
    ('joint', {'accounting': 'sequential'}, (0, 2)),
    ('joint', {'accounting': 'parallel'}, (0, 2)),
    ('joint', {'panel_examples': 3}, _PANEL),
    ('split', {}, (0, 2)),
    ('split', {'accounting': 'sequential'}, (0, 2)),
  ],
)
def test_the_measured_clients_are_those_whose_examples_could_have_been_seen(
  level, options, clients
):
  batches = _batches(level, **options)
  groups, draws = _groups(batches)
  assert groups.clients.tolist() == list(clients)
  assert groups.steps.tolist() == [0] * len(clients)
  assert groups.holdings.tolist() == [_HOLDINGS[c] for c in clients]
  assert groups.in_every_round.tolist() == [c in _PANEL for c in clients]
  for client, size, moves in zip(clients, groups.sizes, groups.moves()):
    draw = draws[client]
    np.testing.assert_allclose(moves, _wanted(draw, client, 0), rtol=1e-6)
    assert size == moves.size == np.sum(draw.measured)


@pytest.mark.parametrize(
  ('level', 'options'),
  [
    ('instance_parallel', {}),
    ('joint', {'accounting': 'parallel'}),
    ('split', {}),
  ],
)
def test_the_examples_of_absent_panel_clients_move_nothing_in_parallel(
  level, options
):
  batches = _batches(level, panel_examples=4, **options)
  groups, draws = _groups(batches)
  assert groups.clients.tolist() == list(_PANEL)
  assert groups.sizes.tolist() == [4, 3, 4]
  absent, present, other = groups.moves()
  np.testing.assert_array_equal(absent, 0.0)
  np.testing.assert_array_equal(other, 0.0)
  np.testing.assert_allclose(present, _wanted(draws[2], 2, 0), rtol=1e-6)
  # That is recorded, as is who took part without being measured.
  assert groups.absent.tolist() == [True, False, True]
  assert groups.unmeasured_clients.tolist() == [0]


@pytest.mark.parametrize('level', ['instance_aggregate', 'joint', 'split'])
def test_the_groups_of_a_panel_are_the_same_whoever_takes_part(level):
  batches = _batches(level, panel_examples=4)
  kinds = set()
  for number, cohort in enumerate([(0, 2), (), (1,), (3, 2, 1), (0,)]):
    groups, _ = _groups(batches, number, participants=cohort)
    parts = (groups.clients, groups.steps, groups.holdings, groups.sizes)
    kinds.add(tuple(tuple(part.tolist()) for part in parts))
  assert kinds == {(_PANEL, (0, 0, 0), (4, 3, 9), (4, 3, 4))}


@pytest.mark.parametrize('clipping', builders.CLIPPINGS)
@pytest.mark.parametrize(
  ('level', 'options', 'clients'),
  [
    ('instance_sequential', {}, (0, 2)),
    ('instance_parallel', {}, (0, 2)),
    ('instance_aggregate', {}, (0, 2, 1, 3)),
    ('instance_aggregate', {'panel_examples': 3}, _PANEL),
    ('split', {'panel_examples': 3}, _PANEL),
  ],
)
def test_an_unusable_update_counts_as_the_worst_case(
  level, options, clients, clipping
):
  batches = _batches(level, clipping=clipping, **options)
  groups, draws = _groups(batches, unusable=[2, 3])
  worst = 4.0 if clipping == 'batch' else 1 / _BATCH_SIZE**2
  assert groups.clients.tolist() == list(clients)
  for client, moves in zip(clients, groups.moves()):
    if level == 'split' and client not in _PARTICIPANTS:
      np.testing.assert_array_equal(moves, 0.0)
    elif client in (2, 3):
      np.testing.assert_allclose(moves, worst, rtol=1e-6)
    else:
      np.testing.assert_allclose(
        moves, _wanted(draws[client], client, 0), rtol=1e-6
      )


def test_only_steps_that_were_taken_are_measured():
  batches = _batches(algorithm='fed_avg')
  groups, draws = _groups(batches)
  pairs = list(zip(groups.clients.tolist(), groups.steps.tolist()))
  assert pairs == [(0, 0), (0, 1), (2, 0)]
  for (client, step), moves in zip(pairs, groups.moves()):
    np.testing.assert_allclose(
      moves, _wanted(draws[client], client, step), rtol=1e-6
    )


@pytest.mark.parametrize('level', ['instance_parallel', 'instance_aggregate'])
def test_steps_that_panel_clients_do_not_take_move_nothing(level):
  batches = _batches(level, algorithm='fed_avg', panel_examples=3)
  groups, draws = _groups(batches)
  pairs = list(zip(groups.clients.tolist(), groups.steps.tolist()))
  assert pairs == [(c, step) for c in _PANEL for step in range(3)]
  assert groups.sizes.tolist() == [3] * 9
  for (client, step), moves in zip(pairs, groups.moves()):
    wanted = np.zeros(3)
    if (client, step) == (2, 0):
      wanted = _wanted(draws[2], 2, 0)
    np.testing.assert_allclose(moves, wanted, rtol=1e-6)


@pytest.mark.parametrize('level', ['instance_parallel', 'instance_sequential'])
def test_without_participants_there_are_no_groups(level):
  groups, _ = _groups(_batches(level), participants=())
  assert groups.sizes.size == groups.squared_moves.size == 0


def test_a_batch_without_examples_is_a_group_of_none():
  batches = _batches('instance_parallel', holdings=(60, 60), batch_size=1)
  empty = [n for n in range(50) if not np.any(batches.draw(n, 1).drawn)]
  assert empty
  draw = batches.draw(empty[0], 1)
  # An example of its own to compute with, neither in the batch nor measured.
  assert draw.drawn.shape == draw.measured.shape == (1, 1)
  assert not np.any(draw.measured)
  assert set(draw.indices.tolist()) < set(batches.data.indices(1).tolist())
  groups = batches.groups({1: draw}, {1: np.zeros((1, 7))}, [1], [])
  assert groups.sizes.tolist() == [0]
  assert groups.squared_moves.size == 0
  event = builders.example_event(batches.mechanism, groups, 1)
  # Nothing was measured, so the worst is assumed: (2 / 0.5)².
  (part,) = event.groups
  np.testing.assert_allclose(part.squared_distances, 16.0, rtol=1e-6)


def test_an_example_that_a_client_holds_twice_is_refused():
  data = _data()
  twice = [data.indices(0), np.array([3, 5, 3])]
  copies = federated_data.FederatedData(data.features, data.labels, twice)
  with pytest.raises(ValueError, match='Client 1 holds an example several tim'):
    dataclasses.replace(_batches(), data=copies)


def test_joint_refuses_fed_avg():
  with pytest.raises(ValueError, match='Joint privacy is for FedSGD only'):
    _batches('joint', 'fed_avg', local_steps=1)


def test_aggregate_refuses_noise_of_the_server_in_fed_avg():
  sentence = 'In fed_avg clients scale their noise by their learning rate'
  with pytest.raises(ValueError, match=sentence):
    _batches(
      'instance_aggregate',
      'fed_avg',
      local_steps=1,
      batch_size=9,
      server_noise_multiplier=0.5,
    )
