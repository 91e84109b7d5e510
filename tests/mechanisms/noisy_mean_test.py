"""Tests of the mean of updates that carry their clients' own noise."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.mechanisms import builders
from tf_bdp.mechanisms import base, noisy_mean


def _release(mean, updates):
  """What is released, and the noise that was asked for."""
  asked = []

  def add_noise(values, deviation, purpose):
    asked.append((deviation, purpose))
    return [value + 7.0 for value in values]

  sums = base.Sums([np.sum(updates, axis=0)], np.float64(len(updates)), 0.0)
  return mean.release(mean.initial_state(), sums, add_noise), asked


@hypothesis.given(count=st.integers(0, 5), noise=st.sampled_from([0.0, 0.4]))
def test_the_mean_is_released_with_the_servers_noise_unless_nobody_came(
  count, noise
):
  mean = noisy_mean.NoisyMean(noise, 1.5)
  updates = np.random.default_rng(count).normal(size=(count, 3))
  released, asked = _release(mean, updates)
  wanted = updates.mean(axis=0) if count else np.zeros(3)
  np.testing.assert_allclose(released.aggregate[0], wanted, atol=1e-15)
  shift = 7.0 if noise and count else 0.0
  np.testing.assert_allclose(released.result[0], wanted + shift, atol=1e-14)
  if noise:
    assert asked == [(pytest.approx(noise * 1.5), base.UPDATE_NOISE)]
  else:
    assert not asked


def test_the_clip_norm_stays():
  mean = noisy_mean.NoisyMean(0.1, 1.5)
  released, _ = _release(mean, np.ones((2, 3)))
  assert released.state == mean.initial_state()
  assert released.state.clip_norm == np.float32(1.5)


def test_nothing_is_clipped_and_clients_are_measured_by_their_norms():
  mean = noisy_mean.NoisyMean(0.1, 1.5)
  assert not mean.clips
  assert not mean.compares
  assert mean.measure(2.0, 3.0, True, 1) == 2.0
  assert mean.measure(2.0, 3.0, False, 9) == 2.0


@pytest.mark.parametrize('level', [*builders.INSTANCE_LEVELS, 'joint'])
def test_it_is_what_the_server_does_where_clients_add_the_noise(level):
  mechanism = builders.make_mechanism(level)
  assert mechanism.aggregation == noisy_mean.NoisyMean(0.0, builders.CLIP)
  if mechanism.accounting == 'aggregate':
    louder = builders.make_mechanism(
      level, server_noise_multiplier=builders.SERVER
    )
    assert louder.aggregation == noisy_mean.NoisyMean(
      builders.SERVER / builders.EXPECTED, builders.CLIP
    )
