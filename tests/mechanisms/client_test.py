"""Tests of `GaussianMechanism`: section 5 of ACCOUNTING.md, by definition."""

import dataclasses
import itertools
import math

import dp_accounting
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import events, mean_bounds
from tf_bdp.mechanisms import client as mechanism_lib

_SIZE = 5
_kinds = st.sampled_from(mechanism_lib.KINDS)
_quantiles = st.sampled_from([None, 0.4])


def _mechanism(kind='mean', noise=0.7, clip=1.5, **more):
  return mechanism_lib.GaussianMechanism(
    kind, noise, clip, 0.25, more.pop('expected_clients', 6.0), **more
  )


def _released(mechanism, updates):
  """What a round releases before noise: the definition, f(U)."""
  updates = np.reshape(updates, (-1, _SIZE))
  if mechanism.kind == 'sum':
    return updates.sum(axis=0) / mechanism.expected_clients
  if not len(updates):
    return np.zeros(_SIZE)
  return updates.mean(axis=0)


def _brute_force(mechanism, updates, extra=None, leaves_out=None):
  """r² of the unit that joins, or of the one that leaves, by its definition."""
  deviation = (
    mechanism.update_noise_multiplier
    * mechanism.clip_norm
    / mechanism.expected_clients
  )
  if leaves_out is None:
    other = np.concatenate([np.reshape(updates, (-1, _SIZE)), [extra]])
  else:
    other = np.delete(updates, leaves_out, axis=0)
  move = _released(mechanism, updates) - _released(mechanism, other)
  squared = float(move @ move) / deviation**2
  if mechanism.clip_quantile is not None:
    # The count of ±1/2 that is released with deviation σ_b.
    squared += (0.5 / mechanism.count_deviation) ** 2
  return squared


def _measures(mechanism, updates, of):
  """What the aggregators measure, in the words of `squared_distances`."""
  of = np.reshape(of, (-1, _SIZE))
  if mechanism.kind == 'sum':
    return np.sum(of**2, axis=1)
  return np.sum((of - _released(mechanism, updates)) ** 2, axis=1)


def _in_ball(generator, count, clip):
  directions = generator.normal(size=(count, _SIZE))
  directions /= np.linalg.norm(directions, axis=1, keepdims=True)
  return directions * clip * generator.random((count, 1)) ** 0.3


def _round(mechanism, count, absent):
  """Updates of participants and of some who are absent."""
  generator = np.random.default_rng(count)
  updates = _in_ball(generator, count, mechanism.clip_norm)
  return updates, _in_ball(generator, absent, mechanism.clip_norm)


@hypothesis.settings(max_examples=20)
@hypothesis.example(kind='mean', count=1, quantile=None)
@hypothesis.given(kind=_kinds, count=st.integers(1, 17), quantile=_quantiles)
def test_distances_of_participants_are_those_of_leaving_one_out(
  kind, count, quantile
):
  mechanism = _mechanism(kind, clip_quantile=quantile)
  updates, _ = _round(mechanism, count, 0)
  measures = _measures(mechanism, updates, updates)
  if kind == 'mean' and count == 1:
    measures = np.sum(updates**2, axis=1)
  found = mechanism.squared_distances(
    measures, np.ones(count, bool), count, mechanism.clip_norm
  )
  wanted = [
    _brute_force(mechanism, updates, leaves_out=i) for i in range(count)
  ]
  np.testing.assert_allclose(found, wanted, rtol=1e-12)


@hypothesis.settings(max_examples=20)
@hypothesis.given(kind=_kinds, count=st.integers(1, 17))
def test_distances_of_absent_panel_members_are_those_of_adding_one(kind, count):
  mechanism = _mechanism(kind)
  updates, absent = _round(mechanism, count, 8)
  found = mechanism.squared_distances(
    _measures(mechanism, updates, absent),
    np.zeros(8, bool),
    count,
    mechanism.clip_norm,
  )
  wanted = [_brute_force(mechanism, updates, extra=u) for u in absent]
  np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_panel_mixes_present_and_absent_members():
  mechanism = _mechanism('mean')
  updates, absent = _round(mechanism, 4, 2)
  panel = np.concatenate([absent[:1], updates[1:3], absent[1:]])
  found = mechanism.squared_distances(
    _measures(mechanism, updates, panel),
    np.array([False, True, True, False]),
    4,
    mechanism.clip_norm,
  )
  wanted = [
    _brute_force(mechanism, updates, extra=absent[0]),
    _brute_force(mechanism, updates, leaves_out=1),
    _brute_force(mechanism, updates, leaves_out=2),
    _brute_force(mechanism, updates, extra=absent[1]),
  ]
  np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_an_empty_round_of_a_sum_costs_what_a_client_would_have_added():
  mechanism = _mechanism('sum')
  absent = _in_ball(np.random.default_rng(3), 4, mechanism.clip_norm)
  found = mechanism.squared_distances(
    np.sum(absent**2, axis=1), np.zeros(4, bool), 0, mechanism.clip_norm
  )
  none = np.zeros((0, _SIZE))
  wanted = [_brute_force(mechanism, none, extra=u) for u in absent]
  np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_an_empty_round_of_a_mean_costs_nothing_by_section_5():
  mechanism = _mechanism('mean')
  found = mechanism.squared_distances(
    np.array([2.25, 1.0]), np.zeros(2, bool), 0, mechanism.clip_norm
  )
  np.testing.assert_array_equal(found, 0.0)
  assert mechanism.worst_case_squared_distance(0) == 0


@pytest.mark.parametrize('adaptive', [False, True])
@pytest.mark.parametrize('kind', mechanism_lib.KINDS)
@pytest.mark.parametrize('count', [1, 2, 3, 9])
def test_no_vectors_in_the_ball_exceed_the_worst_case(kind, count, adaptive):
  mechanism = _mechanism(kind, clip_quantile=0.5 if adaptive else None)
  clip = mechanism.clip_norm
  generator = np.random.default_rng(count)
  axis = np.eye(_SIZE)[0] * clip
  adversarial = [
    np.concatenate([[axis], -np.repeat([axis], count - 1, axis=0)]),
    np.repeat([axis], count, axis=0),
    np.array([axis * (-1) ** i for i in range(count)]),
  ]
  random = [_in_ball(generator, count, clip) for _ in range(50)]
  on_sphere = [
    u / np.linalg.norm(u, axis=1, keepdims=True) * clip for u in random
  ]
  worst = mechanism.worst_case_squared_distance(count)
  seen = 0.0
  for updates in itertools.chain(adversarial, random, on_sphere):
    for i in range(count):
      seen = max(seen, _brute_force(mechanism, updates, leaves_out=i))
    for extra in (axis, -axis, _in_ball(generator, 1, clip)[0]):
      seen = max(seen, _brute_force(mechanism, updates, extra=extra))
  assert seen <= worst * (1 + 1e-12)
  # And it is no more than needed: some vectors reach it.
  assert seen == pytest.approx(worst, rel=1e-12)


@pytest.mark.parametrize('count', [2, 5, 100])
def test_worst_case_of_a_mean_is_that_of_section_5(count):
  mechanism = _mechanism('mean', noise=0.8, expected_clients=7.0)
  wanted = (2 * 7.0 / (0.8 * count)) ** 2
  assert mechanism.worst_case_squared_distance(count) == pytest.approx(wanted)


def test_worst_case_of_one_participant_is_the_clip_norm_over_the_noise():
  mechanism = _mechanism('mean', noise=0.8, expected_clients=7.0)
  wanted = (7.0 / 0.8) ** 2
  assert mechanism.worst_case_squared_distance(1) == pytest.approx(wanted)


@hypothesis.given(
  count=st.integers(0, 50),
  quantile=_quantiles,
  noise=st.floats(0.3, 5),
  expected=st.floats(4, 100),
)
def test_worst_case_of_a_sum_is_one_over_z_squared(
  count, quantile, noise, expected
):
  mechanism = _mechanism(
    'sum', noise, expected_clients=expected, clip_quantile=quantile
  )
  worst = mechanism.worst_case_squared_distance(count)
  assert worst == pytest.approx(noise**-2, rel=1e-12)


@pytest.mark.parametrize('deviation', [None, 0.6, 3.0])
def test_adaptive_clipping_splits_the_noise_as_andrew_et_al_do(deviation):
  mechanism = _mechanism(
    noise=1.1, clip_quantile=0.5, clipped_count_deviation=deviation
  )
  sigma = mechanism.count_deviation
  whole = mechanism.update_noise_multiplier**-2 + (2 * sigma) ** -2
  assert whole == pytest.approx(1.1**-2, rel=1e-12)
  assert mechanism.update_noise_multiplier > 1.1
  assert mechanism.noise_per_clip_norm == pytest.approx(
    mechanism.update_noise_multiplier / 6.0
  )
  if deviation is not None:
    assert sigma == deviation


def test_without_adaptive_clipping_all_noise_is_the_updates():
  mechanism = _mechanism(noise=0.9)
  assert mechanism.update_noise_multiplier == 0.9
  quiet = _mechanism(noise=0.0, clip_quantile=0.5)
  assert quiet.update_noise_multiplier == 0.0


def test_the_round_clip_norm_scales_the_measures():
  mechanism = _mechanism('sum', noise=2.0, clip=1.0)
  found = mechanism.squared_distances(
    np.array([9.0, 2.25]), np.ones(2, bool), 2, 3.0
  )
  np.testing.assert_allclose(found, [1 / 4, 1 / 16])


def test_rounding_does_not_carry_a_distance_above_the_worst_case():
  mechanism = _mechanism('sum')
  above = mechanism.clip_norm**2 * (1 + 1e-6)
  found = mechanism.squared_distances(
    np.full(3, above), np.ones(3, bool), 3, mechanism.clip_norm
  )
  assert np.all(found <= mechanism.worst_case_squared_distance(3))


@pytest.mark.parametrize('kind', mechanism_lib.KINDS)
def test_an_event_holds_distances_probability_and_worst_case(kind):
  mechanism = _mechanism(kind)
  updates = _in_ball(np.random.default_rng(5), 6, mechanism.clip_norm)
  measures = _measures(mechanism, updates, updates)
  part = np.ones(6, bool)
  event = mechanism.event(measures, part, 6, mechanism.clip_norm, panel=True)
  assert isinstance(event, events.BayesianGaussianEvent)
  assert event.panel
  assert event.participation_probability == 0.25
  assert event.worst_case_squared_distance == pytest.approx(
    mechanism.worst_case_squared_distance(6)
  )
  np.testing.assert_array_equal(
    event.squared_distances,
    mechanism.squared_distances(measures, part, 6, mechanism.clip_norm),
  )


@pytest.mark.parametrize('kind', mechanism_lib.KINDS)
@pytest.mark.parametrize('units', range(1, mean_bounds.FEWEST_UNITS))
def test_too_few_units_are_accounted_for_by_the_worst_case(kind, units):
  mechanism = _mechanism(kind)
  event = mechanism.event(
    np.full(units, 1e-3), np.ones(units, bool), units, 1.5, panel=False
  )
  z = 0.7 if kind == 'sum' else 0.7 * units / 2 / 6.0 * (2 if units < 2 else 1)
  assert isinstance(event, dp_accounting.PoissonSampledDpEvent)
  assert event.sampling_probability == 0.25
  assert event.event.noise_multiplier == pytest.approx(z)


def test_few_measured_of_many_participants_are_the_worst_case_of_those():
  mechanism = _mechanism('mean')
  event = mechanism.event(
    np.full(2, 1e-3), np.ones(2, bool), 12, 1.5, panel=False
  )
  assert event.event.noise_multiplier == pytest.approx(0.7 * 12 / (2 * 6.0))


def test_an_empty_round_is_free_for_a_mean_and_counted_for_a_sum():
  none, part = np.zeros(0), np.zeros(0, bool)
  free = _mechanism('mean').event(none, part, 0, 1.5, panel=False)
  assert isinstance(free, dp_accounting.NoOpDpEvent)
  counted = _mechanism('sum').event(none, part, 0, 1.5, panel=False)
  assert counted.event.noise_multiplier == pytest.approx(0.7)


def test_an_empty_round_with_adaptive_clipping_still_counts_the_bit():
  mechanism = _mechanism('mean', clip_quantile=0.5)
  event = mechanism.event(np.zeros(0), np.zeros(0, bool), 0, 1.5, panel=False)
  # Half a count over σ_b.
  z = 2 * mechanism.count_deviation
  assert event.event.noise_multiplier == pytest.approx(z)


@pytest.mark.parametrize('kind', mechanism_lib.KINDS)
def test_without_noise_a_round_is_not_private(kind):
  mechanism = _mechanism(kind, noise=0.0)
  for units in (0, 1, 5):
    event = mechanism.event(
      np.ones(units), np.ones(units, bool), units, 1.5, panel=False
    )
    assert isinstance(event, dp_accounting.NonPrivateDpEvent)
    assert mechanism.worst_case_squared_distance(units) == math.inf


@pytest.mark.parametrize('kind', mechanism_lib.KINDS)
def test_the_accountant_takes_a_panel_in_rounds_of_every_size(kind):
  mechanism = _mechanism(kind)
  accountant = accountant_lib.BayesianAccountant('panel')
  last = 0.0
  for count in (0, 1, 2, 3, 20):
    measures = _measures(mechanism, *_round(mechanism, count, 10))
    event = mechanism.event(
      measures, np.zeros(10, bool), count, mechanism.clip_norm, panel=True
    )
    epsilon = accountant.compose(event).get_epsilon(1e-5)
    assert last <= epsilon < math.inf
    last = epsilon


@pytest.mark.parametrize('share', [0.0, 0.3, 1.0])
def test_the_clip_norm_grows_by_the_geometric_update(share):
  mechanism = _mechanism(clip_quantile=0.3, clip_learning_rate=0.5)
  assert mechanism.clip_norm_growth(share) == pytest.approx(
    -0.5 * (share - 0.3)
  )


@pytest.mark.parametrize('quantile', [None, 0.0, 0.6])
@pytest.mark.parametrize('kind', mechanism_lib.KINDS)
def test_scalars_restore_what_the_accounting_needs(kind, quantile):
  mechanism = _mechanism(
    kind, clip_quantile=quantile, clipped_count_deviation=4.0
  )
  scalars = {k: np.float64(v) for k, v in mechanism.to_scalars().items()}
  restored = mechanism_lib.GaussianMechanism.from_scalars(scalars)
  for name in (
    *('kind', 'noise_multiplier', 'participation_probability'),
    *('expected_clients', 'clip_quantile', 'count_deviation'),
    *('update_noise_multiplier', 'noise_per_clip_norm'),
  ):
    assert getattr(restored, name) == getattr(mechanism, name)
  measures, part = np.array([0.1, 0.5, 1.0]), np.array([True, False, True])
  assert restored.event(measures, part, 7, 1.3, True) == mechanism.event(
    measures, part, 7, 1.3, True
  )


@pytest.mark.parametrize(
  ('name', 'value', 'sentence'),
  [
    ('kind', 'median', r"kind must be one of \('mean', 'sum'\)."),
    ('noise_multiplier', -0.1, 'noise_multiplier must be non-negative'),
    ('noise_multiplier', math.nan, 'noise_multiplier must be non-negative'),
    ('noise_multiplier', math.inf, 'noise_multiplier must be non-negative'),
    ('clip_norm', 0.0, 'clip_norm must be positive and finite. Found 0.0.'),
    ('clip_norm', math.nan, 'clip_norm must be positive'),
    ('participation_probability', 1.1, 'must be between 0 and 1. Found 1.1.'),
    ('participation_probability', math.nan, 'must be between 0 and 1'),
    ('expected_clients', 0.0, 'expected_clients must be positive'),
    ('clip_quantile', 1.5, 'clip_quantile must be between 0 and 1'),
    ('clip_learning_rate', 0.0, 'clip_learning_rate must be positive'),
    ('clipped_count_deviation', 0.35, 'must be above half the noise'),
    ('clipped_count_deviation', math.nan, 'clipped_count_deviation must be'),
    ('clipped_count_deviation', 0.0, 'clipped_count_deviation must be'),
    ('clipped_count_deviation', -5.0, 'clipped_count_deviation must be'),
  ],
)
def test_bad_settings_are_refused_with_a_sentence(name, value, sentence):
  good = _mechanism(clip_quantile=0.5)
  with pytest.raises(ValueError, match=sentence):
    dataclasses.replace(good, **{name: value})
