"""Tests of the split baseline: two noises, each counted on its own."""

import dp_accounting
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.mechanisms import builders
from tf_bdp.mechanisms import client as client_mechanism

_CLIP, _SERVER = builders.CLIP, builders.SERVER
_ALPHA, _EXPECTED, _CLIENTS = (
  builders.ALPHA,
  builders.EXPECTED,
  builders.CLIENTS,
)
_mechanism = builders.make_mechanism
_client_event = builders.client_event


@hypothesis.given(
  count=st.integers(0, 8), units=st.integers(0, 5), panel=st.booleans()
)
def test_split_hides_clients_as_the_mean_of_clipped_updates_does(
  count, units, panel
):
  mechanism = _mechanism('split')
  aggregation = client_mechanism.ClientMechanism(
    'mean', _SERVER, _CLIP, _ALPHA, _EXPECTED
  )
  generator = np.random.default_rng(units)
  squared = _CLIP**2 * generator.random(units)
  took_part = generator.random(units) < 0.5
  found = _client_event(mechanism, squared, count, took_part, panel)
  assert found == aggregation.event(
    builders.measured(squared, count, took_part, panel)
  )
  assert mechanism.worst_case_squared_distance(
    'client', count
  ) == aggregation.worst_case_squared_distance('client', count)
  assert mechanism.aggregation == aggregation
  assert mechanism.least_participants == aggregation.least_participants
  assert mechanism.noise_per_clip_norm == aggregation.noise_per_clip_norm
  assert mechanism.description('client') == aggregation.description('client')


def test_only_split_clips_what_clients_send():
  assert _mechanism('split').aggregation.clips
  for level in (*builders.INSTANCE_LEVELS, 'joint'):
    assert not _mechanism(level).aggregation.clips


def test_reported_costs_of_clients_are_taken_as_they_are():
  mechanism = _mechanism('split')
  event = builders.reported_event(mechanism, 'client', np.arange(5.0), 1e-9, 4)
  assert event.costs == (0.0, 1.0, 2.0, 3.0, 4.0)
  assert event.failure_probability == 1e-9
  assert event.participation_probability == _ALPHA
  assert event.inclusion_probability == 1.0
  assert event.worst_case_squared_distance == (
    mechanism.worst_case_squared_distance('client', 4)
  )
  assert event.worst_case_mixture == mechanism.aggregation.worst_case_mixture


def test_a_client_is_added_or_removed():
  relation = _mechanism('split').relation('client')
  assert relation is dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


@pytest.mark.parametrize(
  'settings, sentence',
  [
    ({'accounting': 'aggregate'}, 'the noise in the mean is not Gaussian'),
    ({'server_noise_multiplier': 0.0}, r'needs both .* Found 0\.8 and 0\.0'),
    ({'noise_multiplier': 0.0}, r'needs both .* Found 0\.0 and 0\.7'),
    ({'least_participants': 25}, 'at most the number of clients, 24. Found 25'),
  ],
)
def test_settings_that_contradict_each_other_are_refused(settings, sentence):
  with pytest.raises(ValueError, match=sentence):
    _mechanism('split', **settings)
