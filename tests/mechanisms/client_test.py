"""Tests of `ClientMechanism`, by the definitions in docs/training.md."""

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
from tf_bdp.mechanisms import adaptive_clipping, base, client, measurements

_SIZE = 5
_kinds = st.sampled_from(client.KINDS)
_quantiles = st.sampled_from([None, 0.4])


def _mechanism(
  kind='mean', noise=0.7, clip=1.5, clients_per_round=6.0, quantile=None
):
  adaptive = None
  if quantile is not None:
    adaptive = adaptive_clipping.AdaptiveClipping(quantile)
  return client.ClientMechanism(
    kind, noise, clip, 0.25, clients_per_round, adaptive
  )


def _event(mechanism, measures, took_part, count, clip=1.5, panel=False):
  """Of clients, all of whom took part or not unless it is told of each."""
  measures = np.asarray(measures, np.float64)
  took_part = np.broadcast_to(took_part, measures.shape)
  found = mechanism.events(
    measurements.Measurements(count, 0, clip, measures, took_part, panel)
  )
  assert list(found) == ['client']
  return found['client']


def _worst_case(mechanism, count):
  return mechanism.worst_case_squared_distance('client', count)


def _released(mechanism, updates):
  """What a round releases before noise: the definition, f(U)."""
  updates = np.reshape(updates, (-1, _SIZE))
  if mechanism.kind == 'sum':
    return updates.sum(axis=0) / mechanism.clients_per_round
  if not len(updates):
    return np.zeros(_SIZE)
  return updates.mean(axis=0)


def _brute_force(mechanism, updates, extra=None, leaves_out=None):
  """r² of the unit that joins, or of the one that leaves, by its definition."""
  deviation = mechanism.noise_per_clip_norm * mechanism.clip_norm
  if leaves_out is None:
    other = np.concatenate([np.reshape(updates, (-1, _SIZE)), [extra]])
  else:
    other = np.delete(updates, leaves_out, axis=0)
  move = _released(mechanism, updates) - _released(mechanism, other)
  squared = float(move @ move) / deviation**2
  if mechanism.adaptive is not None:
    # The count of ±1/2 that is released with deviation σ_b.
    squared += (0.5 / mechanism.adaptive.count_deviation) ** 2
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
  mechanism = _mechanism(kind, quantile=quantile)
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
  assert _worst_case(mechanism, 0) == 0


@pytest.mark.parametrize('adaptive', [False, True])
@pytest.mark.parametrize('kind', client.KINDS)
@pytest.mark.parametrize('count', [1, 2, 3, 9])
def test_no_vectors_in_the_ball_exceed_the_worst_case(kind, count, adaptive):
  mechanism = _mechanism(kind, quantile=0.5 if adaptive else None)
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
  worst = _worst_case(mechanism, count)
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
  mechanism = _mechanism('mean', noise=0.8, clients_per_round=7.0)
  wanted = (2 * 7.0 / (0.8 * count)) ** 2
  assert _worst_case(mechanism, count) == pytest.approx(wanted)


def test_worst_case_of_one_participant_is_the_clip_norm_over_the_noise():
  mechanism = _mechanism('mean', noise=0.8, clients_per_round=7.0)
  wanted = (7.0 / 0.8) ** 2
  assert _worst_case(mechanism, 1) == pytest.approx(wanted)


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
    'sum', noise, clients_per_round=expected, quantile=quantile
  )
  worst = _worst_case(mechanism, count)
  assert worst == pytest.approx(noise**-2, rel=1e-12)


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
  assert np.all(found <= _worst_case(mechanism, 3))


@pytest.mark.parametrize('kind', client.KINDS)
def test_an_event_holds_distances_probability_and_worst_case(kind):
  mechanism = _mechanism(kind)
  updates = _in_ball(np.random.default_rng(5), 6, mechanism.clip_norm)
  measures = _measures(mechanism, updates, updates)
  part = np.ones(6, bool)
  event = _event(mechanism, measures, part, 6, mechanism.clip_norm, panel=True)
  assert isinstance(event, events.BayesianGaussianEvent)
  assert event.panel
  assert event.participation_probability == 0.25
  assert event.worst_case_squared_distance == pytest.approx(
    _worst_case(mechanism, 6)
  )
  np.testing.assert_array_equal(
    event.squared_distances,
    mechanism.squared_distances(measures, part, 6, mechanism.clip_norm),
  )


@pytest.mark.parametrize('kind', client.KINDS)
@pytest.mark.parametrize('units', range(1, mean_bounds.FEWEST_UNITS))
def test_too_few_units_are_accounted_for_by_the_worst_case(kind, units):
  mechanism = _mechanism(kind)
  event = _event(mechanism, np.full(units, 1e-3), True, units)
  z = 0.7 if kind == 'sum' else 0.7 * units / 2 / 6.0 * (2 if units < 2 else 1)
  assert isinstance(event, dp_accounting.PoissonSampledDpEvent)
  assert event.sampling_probability == 0.25
  assert event.event.noise_multiplier == pytest.approx(z)


def test_few_measured_of_many_participants_are_the_worst_case_of_those():
  mechanism = _mechanism('mean')
  event = _event(mechanism, np.full(2, 1e-3), True, 12)
  assert event.event.noise_multiplier == pytest.approx(0.7 * 12 / (2 * 6.0))


def test_an_empty_round_is_free_for_a_mean_and_counted_for_a_sum():
  free = _event(_mechanism('mean'), [], True, 0)
  assert isinstance(free, dp_accounting.NoOpDpEvent)
  counted = _event(_mechanism('sum'), [], True, 0)
  assert counted.event.noise_multiplier == pytest.approx(0.7)


def test_an_empty_round_with_adaptive_clipping_still_counts_the_bit():
  mechanism = _mechanism('mean', quantile=0.5)
  event = _event(mechanism, [], True, 0)
  # Half a count over σ_b.
  z = 2 * mechanism.adaptive.count_deviation
  assert event.event.noise_multiplier == pytest.approx(z)


@pytest.mark.parametrize('kind', client.KINDS)
def test_without_noise_a_round_is_not_private(kind):
  mechanism = _mechanism(kind, noise=0.0)
  for units in (0, 1, 5):
    event = _event(mechanism, np.ones(units), True, units)
    assert isinstance(event, dp_accounting.NonPrivateDpEvent)
    assert _worst_case(mechanism, units) == math.inf


@pytest.mark.parametrize('kind', client.KINDS)
def test_the_accountant_takes_a_panel_in_rounds_of_every_size(kind):
  mechanism = _mechanism(kind)
  accountant = accountant_lib.BayesianAccountant('panel')
  last = 0.0
  for count in (0, 1, 2, 3, 20):
    measures = _measures(mechanism, *_round(mechanism, count, 10))
    event = _event(
      mechanism, measures, False, count, mechanism.clip_norm, panel=True
    )
    epsilon = accountant.compose(event).get_epsilon(1e-5)
    assert last <= epsilon < math.inf
    last = epsilon


def test_reported_costs_are_taken_as_they_are_with_the_worst_case():
  mechanism = _mechanism('mean')
  costs = measurements.ReportedCosts(np.arange(5.0), 1e-9)

  def event(mechanism, count):
    none = np.zeros(0)
    return mechanism.event(
      measurements.Measurements(
        count, 0, 1.5, none, none, reported={'client': costs}
      )
    )

  found = event(mechanism, 4)
  assert found == events.ReportedCostEvent(
    np.arange(5.0), 1e-9, 0.25, _worst_case(mechanism, 4)
  )
  # Nobody came; and there is no noise.
  assert isinstance(event(mechanism, 0), dp_accounting.NoOpDpEvent)
  loud = _mechanism('mean', noise=0.0)
  assert isinstance(event(loud, 4), dp_accounting.NonPrivateDpEvent)


# --- What is released, in numpy; the aggregators' tests are in TensorFlow.


def _release(mechanism, updates, clip, add_noise=None):
  norms = np.linalg.norm(updates, axis=1)
  sums = base.Sums(
    [np.sum(updates, axis=0)], len(updates), np.sum(norms <= clip)
  )

  def none(values, deviation, purpose):
    del deviation, purpose
    return values

  return mechanism.release(client.ClippingState(clip), sums, add_noise or none)


@hypothesis.given(_kinds, st.integers(0, 9))
def test_the_release_is_the_mean_or_the_sum_over_the_expected_number(
  kind, count
):
  mechanism = _mechanism(kind)
  updates, _ = _round(mechanism, count, 0)
  released = _release(mechanism, updates, 1.5)
  wanted = _released(mechanism, updates)
  np.testing.assert_allclose(released.result[0], wanted, atol=1e-15)
  np.testing.assert_allclose(released.aggregate[0], wanted, atol=1e-15)
  assert released.state == client.ClippingState(1.5)


@hypothesis.given(_kinds, _quantiles, st.floats(0.1, 9))
def test_the_noise_of_a_release_goes_by_the_rounds_clip_norm(
  kind, quantile, clip
):
  mechanism = _mechanism(kind, quantile=quantile)
  asked = []

  def add_noise(values, deviation, purpose):
    asked.append((float(deviation), purpose))
    return [value + 1 for value in values]

  released = _release(mechanism, np.zeros((3, _SIZE)), clip, add_noise)
  np.testing.assert_array_equal(released.result[0], 1.0)
  np.testing.assert_array_equal(released.aggregate[0], 0.0)
  deviation = mechanism.noise_per_clip_norm * clip
  wanted = [(pytest.approx(deviation), base.UPDATE_NOISE)]
  if quantile is not None:
    count_deviation = mechanism.adaptive.count_deviation
    wanted.append((count_deviation, base.COUNT_NOISE))
    # Three are below; half a count each way, the noise, over n̄, and half.
    share = (3 / 2 + 1) / 6.0 + 0.5
    clip = mechanism.adaptive.next_clip_norm(clip, share)
  assert asked == wanted
  assert released.state.clip_norm == pytest.approx(clip)


def test_without_noise_none_is_drawn():
  def refuse(*_):
    raise AssertionError

  for quantile in (None, 0.5):
    mechanism = _mechanism(noise=0.0, quantile=quantile)
    _release(mechanism, np.ones((2, _SIZE)), 1.5, refuse)


@hypothesis.given(
  _kinds,
  st.floats(0, 9),
  st.floats(0, 9),
  st.booleans(),
  st.integers(0, 3),
)
def test_a_client_is_measured_by_its_norm_or_from_the_mean_of_others(
  kind, squared_norm, squared_deviation, took_part, count
):
  found = _mechanism(kind).measure(
    squared_norm, squared_deviation, took_part, count
  )
  by_norm = kind == 'sum' or (took_part and count == 1)
  assert found == (squared_norm if by_norm else squared_deviation)


# --- What else a mechanism is asked.


@pytest.mark.parametrize('kind', client.KINDS)
def test_what_else_a_mechanism_of_clients_is_asked(kind):
  mechanism = _mechanism(kind)
  assert mechanism.level == 'client'
  assert mechanism.units == ('client',)
  assert mechanism.local is None
  assert mechanism.aggregation is mechanism
  assert mechanism.clips
  assert mechanism.compares == (kind == 'mean')
  relation = mechanism.relation('client')
  assert relation is dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
  assert mechanism.is_panel('client', 3)
  assert not mechanism.is_panel('client', 0)
  assert mechanism.cost_count('client', 50, 10) == 50
  assert mechanism.counted_otherwise() == {'client': mechanism}
  assert mechanism.description('client') == base.Description(kind, 0.7, 0.25)
  assert mechanism.caveats() == []
  # The paper takes C for the sensitivity, of the mean as well.
  assert mechanism.paper_dp_event() == dp_accounting.PoissonSampledDpEvent(
    0.25, dp_accounting.GaussianDpEvent(pytest.approx(0.7))
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
    ('clients_per_round', 0.0, 'clients_per_round must be positive'),
  ],
)
def test_bad_settings_are_refused_with_a_sentence(name, value, sentence):
  good = _mechanism()
  with pytest.raises(ValueError, match=sentence):
    dataclasses.replace(good, **{name: value})
