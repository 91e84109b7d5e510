"""Tests of joint privacy: what clients lose by what all of them send."""

import dataclasses
import math

import dp_accounting
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.mechanisms import builders, oracles

_SIGMA, _CLIP, _SERVER = builders.SIGMA, builders.CLIP, builders.SERVER
_EXPECTED, _CLIENTS = builders.EXPECTED, builders.CLIENTS
_mechanism = builders.make_mechanism
_definition = builders.definition
_groups = builders.make_groups
_random_groups = builders.random_groups
_example_event = builders.example_event
_client_event = builders.client_event
_all_events = builders.all_events
_sampled = builders.sampled


@hypothesis.given(
  st.sampled_from(builders.CLIPPINGS),
  builders.SERVERS,
  st.booleans(),
  st.integers(1, 9),
)
def test_distances_of_clients_are_those_of_zeroing_one_out(
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
    oracles.clip(vector, _CLIP) for vector in generator.normal(size=(count, 3))
  ]
  reference = np.array([0.3, -0.2, 0.4]) if last_mean else np.zeros(3)
  # A panel of absent ones makes three of them; for them nothing is different.
  updates += [updates[0]] * 3
  found = _client_event(
    mechanism,
    [np.sum((u - reference) ** 2) for u in updates],
    count,
    np.arange(len(updates)) < count,
    panel=True,
  )
  # That it takes part is seen, so nothing is gained but by its inclusion.
  assert found.participation_probability == 1.0
  assert found.inclusion_probability == pytest.approx(count / _CLIENTS)
  assert found.panel
  variance = _definition(mechanism).mean_variance(count)
  for update, squared_distance in zip(updates, found.squared_distances):
    others = np.sum(updates[: count - 1], axis=0)
    move = (others + update) / count - (others + reference) / count
    assert squared_distance == pytest.approx(
      oracles.on_grid(float(move @ move) / variance, 2 if server else 1),
      rel=1e-12,
    )


def test_joint_without_more_noise_is_the_formula_of_section_5():
  # r = ‖u‖ / (√n σ C).
  event = _client_event(_mechanism('joint'), [0.0, 0.25, 1.0], 9)
  np.testing.assert_allclose(
    np.sqrt(event.squared_distances),
    np.array([0.0, 0.5, 1.0]) / (3 * _SIGMA * _CLIP),
    rtol=1e-5,
  )


@pytest.mark.parametrize('last_mean, move', [(False, 1.0), (True, 2.0)])
@pytest.mark.parametrize('count', [1, 2, 9])
def test_the_worst_case_of_a_client(last_mean, move, count):
  mechanism = _mechanism('joint', reference_is_last_mean=last_mean)
  assert mechanism.worst_case_squared_distance(
    'client', count
  ) == pytest.approx(
    oracles.on_grid((move / (math.sqrt(count) * _SIGMA)) ** 2), rel=1e-12
  )
  assert mechanism.worst_case_squared_distance('client', 0) == 0.0


def test_rounding_does_not_carry_a_client_beyond_the_worst_case():
  mechanism = _mechanism('joint')
  event = _client_event(mechanism, np.full(4, _CLIP**2 * 1.001), 4)
  worst = mechanism.worst_case_squared_distance('client', 4)
  np.testing.assert_array_equal(event.squared_distances, worst)


@pytest.mark.parametrize('units', [0, 1, 2])
def test_too_few_measured_clients_cost_the_worst_case(units):
  mechanism = _mechanism('joint')
  event = _client_event(mechanism, np.full(units, 0.01), 2)
  np.testing.assert_array_equal(
    event.squared_distances,
    [mechanism.worst_case_squared_distance('client', 2)] * 3,
  )


@pytest.mark.parametrize('server', [0.0, _SERVER])
@pytest.mark.parametrize('count', [1, 2, 9])
def test_who_did_not_come_is_not_charged_less_than_if_it_had(server, count):
  # With it there would have been one participant more, and its noise.
  mechanism = _mechanism('joint', server_noise_multiplier=server)
  joined = count + 1
  move = (0.6 * _CLIP / joined) ** 2 / _definition(mechanism).mean_variance(
    joined
  )
  client = _client_event(
    mechanism, np.full(3, (0.6 * _CLIP) ** 2), count, False, panel=True
  )
  assert np.all(client.squared_distances > move)
  groups = _groups([(0, 0, 20, [0.6**2] * 3)])
  (group,) = _sampled(_example_event(mechanism, groups, count))
  assert np.all(group.squared_distances > move)


def test_the_servers_noise_alone_protects_where_only_the_mean_is_released():
  mechanism = _mechanism(
    'joint', noise_multiplier=0.0, server_noise_multiplier=_SERVER
  )
  found = _all_events(mechanism, np.full(4, _CLIP**2), _random_groups(4), 4)
  # (C/n)² / (zC/n̄)²
  np.testing.assert_allclose(
    found['client'].squared_distances,
    (_EXPECTED / (4 * _SERVER)) ** 2,
    rtol=1e-5,
  )
  assert mechanism.worst_case_squared_distance('example', 4) == pytest.approx(
    (2 * _EXPECTED / (4 * _SERVER)) ** 2, rel=1e-5
  )
  seen = dataclasses.replace(mechanism, accounting='parallel')
  event = _example_event(seen, _random_groups(4), 4)
  assert isinstance(event, dp_accounting.NonPrivateDpEvent)


def test_reported_costs_of_clients_are_taken_as_they_are():
  mechanism = _mechanism('joint')
  event = builders.reported_event(mechanism, 'client', np.arange(5.0), 1e-9, 4)
  assert event.costs == (0.0, 1.0, 2.0, 3.0, 4.0)
  assert event.failure_probability == 1e-9
  assert event.participation_probability == 1.0
  assert event.inclusion_probability == pytest.approx(4 / _CLIENTS)
  assert event.worst_case_squared_distance == (
    mechanism.worst_case_squared_distance('client', 4)
  )


def test_a_client_is_replaced_by_one_that_sends_noise_alone():
  relation = _mechanism('joint').relation('client')
  assert relation is dp_accounting.NeighboringRelation.REPLACE_SPECIAL


@pytest.mark.parametrize(
  'last_mean, sentence',
  [(False, 'around zero'), (True, 'around the last mean')],
)
def test_the_caveat_names_what_stands_for_an_absent_client(last_mean, sentence):
  mechanism = _mechanism('joint', reference_is_last_mean=last_mean)
  assert sentence in mechanism.caveats()[-1]


def test_fed_avg_is_refused_with_the_papers_reason():
  sentence = (
    'FedSGD only: in FedAvg every noisy step changes the point at which the '
    'next gradient is taken'
  )
  with pytest.raises(ValueError, match=sentence):
    _mechanism('joint', local_steps=2)
  # Even of one step.
  with pytest.raises(ValueError, match=sentence):
    _mechanism('joint').check_fed_avg()
