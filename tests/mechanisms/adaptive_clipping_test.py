"""Tests of adaptive clipping, against Andrew et al. (2021) and TFF."""

import dataclasses
import math

import hypothesis
import pytest
from hypothesis import strategies as st
from tensorflow_federated.python.aggregators import differential_privacy

from tf_bdp.mechanisms import adaptive_clipping, client


def _adaptive(quantile=0.5, **options):
  return adaptive_clipping.AdaptiveClipping(quantile, **options)


def _mechanism(noise=1.1, clients_per_round=6.0, **options):
  return client.ClientMechanism(
    'mean', noise, 1.5, 0.25, clients_per_round, _adaptive(**options)
  )


@pytest.mark.parametrize('deviation', [None, 0.6, 3.0])
def test_the_noise_is_split_as_andrew_et_al_do(deviation):
  mechanism = _mechanism(count_deviation=deviation)
  sigma = mechanism.adaptive.count_deviation
  update = mechanism.adaptive.update_noise_multiplier(1.1)
  assert update**-2 + (2 * sigma) ** -2 == pytest.approx(1.1**-2, rel=1e-12)
  assert update > 1.1
  assert mechanism.noise_per_clip_norm == pytest.approx(update / 6.0)
  # Half a count, over the noise, on its grid.
  found = mechanism.adaptive.count_squared_distance
  assert found == pytest.approx((0.5 / sigma + 2.0**-20) ** 2, rel=1e-12)
  if deviation is not None:
    assert sigma == deviation


@pytest.mark.parametrize('clients_per_round', [100.0, 1000.0])
@pytest.mark.parametrize('deviation', [None, 7.0])
def test_the_split_of_the_noise_is_that_of_tff(clients_per_round, deviation):
  # Theorem 1 of Andrew et al. (2021), as TFF computes it.
  mechanism = _mechanism(1.0, clients_per_round, count_deviation=deviation)
  update, count = differential_privacy.adaptive_clip_noise_params(
    1.0, clients_per_round, deviation
  )
  adaptive = mechanism.adaptive
  assert adaptive.update_noise_multiplier(1.0) == pytest.approx(update)
  assert adaptive.count_deviation == pytest.approx(count)


def test_of_few_clients_the_count_has_more_noise_than_tff_gives_it():
  # n̄ / 20 would be below half the noise multiplier, which TFF refuses.
  assert _mechanism(2.0, 10.0).adaptive.count_deviation == 4.0


def test_without_noise_there_is_none_to_split():
  adaptive = _mechanism(0.0).adaptive
  assert adaptive.update_noise_multiplier(0.0) == 0.0


@hypothesis.given(
  clip=st.floats(1e-3, 1e3),
  share=st.floats(-1, 2),
  quantile=st.floats(0, 1),
  rate=st.floats(0.01, 2),
)
def test_the_clip_norm_follows_by_the_geometric_update(
  clip, share, quantile, rate
):
  # Section 2.1.
  adaptive = _adaptive(quantile, learning_rate=rate)
  found = float(adaptive.next_clip_norm(clip, share))
  wanted = clip * math.exp(-rate * (share - quantile))
  assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
  ('name', 'value', 'sentence'),
  [
    ('quantile', 1.5, 'clip_quantile must be between 0 and 1'),
    ('quantile', math.nan, 'clip_quantile must be between 0 and 1'),
    ('learning_rate', 0.0, 'clip_learning_rate must be positive'),
    ('count_deviation', math.nan, 'clipped_count_deviation must be'),
    ('count_deviation', 0.0, 'clipped_count_deviation must be'),
    ('count_deviation', -5.0, 'clipped_count_deviation must be'),
  ],
)
def test_bad_settings_are_refused_with_a_sentence(name, value, sentence):
  with pytest.raises(ValueError, match=sentence):
    dataclasses.replace(_adaptive(), **{name: value})


def test_a_count_with_less_noise_than_the_whole_is_refused():
  with pytest.raises(ValueError, match=r'above half the noise .* Found 0\.35'):
    _mechanism(0.7, count_deviation=0.35)
