"""Tests of `ClientMechanism`, by the definitions in docs/training.md."""

import dataclasses
import itertools
import math

import dp_accounting
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from tests.mechanisms import oracles
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import events, mean_bounds
from tf_bdp.mechanisms import adaptive_clipping, base, client, measurements

_SIZE = 5
_kinds = st.sampled_from(client.KINDS)
_quantiles = st.sampled_from([None, 0.4])
# Of 24 clients, 6 are expected.
_floors = st.sampled_from([None, 1, 2, 3, 6, 24])


def _mechanism(
  kind='mean',
  noise=0.7,
  clip=1.5,
  clients_per_round=6.0,
  quantile=None,
  floor=None,
):
  adaptive = None
  if quantile is not None:
    adaptive = adaptive_clipping.AdaptiveClipping(quantile)
  if kind == 'sum':
    floor = None
  return client.ClientMechanism(
    kind, noise, clip, 0.25, clients_per_round, adaptive, floor
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
  divisor = max(len(updates), mechanism.least_participants)
  return updates.sum(axis=0) / divisor


def _brute_force(mechanism, updates, extra=None, leaves_out=None):
  """r² of the unit that joins, or of the one that leaves, by its definition."""
  deviation = mechanism.noise_per_clip_norm * mechanism.clip_norm
  if leaves_out is None:
    other = np.concatenate([np.reshape(updates, (-1, _SIZE)), [extra]])
  else:
    other = np.delete(updates, leaves_out, axis=0)
  move = _released(mechanism, updates) - _released(mechanism, other)
  squared = float(oracles.on_grid(float(move @ move) / deviation**2))
  if mechanism.adaptive is not None:
    # The count of ±1/2 that is released with deviation σ_b.
    squared += oracles.on_grid(0.25 / mechanism.adaptive.count_deviation**2)
  return squared


def _measures(mechanism, updates, of, took_part):
  """What engines measure, from what is released before noise."""
  of = np.reshape(of, (-1, _SIZE))
  away = of - _released(mechanism, updates)
  return mechanism.measure(
    np.sum(of**2, axis=1), np.sum(away**2, axis=1), took_part, len(updates)
  )


def _in_ball(generator, count, clip):
  directions = generator.normal(size=(count, _SIZE))
  directions /= np.linalg.norm(directions, axis=1, keepdims=True)
  return directions * clip * generator.random((count, 1)) ** 0.3


def _round(mechanism, count, absent):
  """Updates of participants and of some who are absent."""
  generator = np.random.default_rng(count)
  updates = _in_ball(generator, count, mechanism.clip_norm)
  return updates, _in_ball(generator, absent, mechanism.clip_norm)


# At the floor, and one below and above it.
@hypothesis.example(kind='mean', count=1, quantile=None, floor=1)
@hypothesis.example(kind='mean', count=2, quantile=None, floor=1)
@hypothesis.example(kind='mean', count=5, quantile=None, floor=6)
@hypothesis.example(kind='mean', count=6, quantile=None, floor=6)
@hypothesis.example(kind='mean', count=7, quantile=None, floor=6)
@hypothesis.given(
  kind=_kinds, count=st.integers(1, 17), quantile=_quantiles, floor=_floors
)
def test_distances_of_participants_are_those_of_leaving_one_out(
  kind, count, quantile, floor
):
  mechanism = _mechanism(kind, quantile=quantile, floor=floor)
  updates, _ = _round(mechanism, count, 0)
  present = np.ones(count, bool)
  found = mechanism.squared_distances(
    _measures(mechanism, updates, updates, present),
    present,
    count,
    mechanism.clip_norm,
  )
  wanted = [
    _brute_force(mechanism, updates, leaves_out=i) for i in range(count)
  ]
  np.testing.assert_allclose(found, wanted, rtol=1e-12)


@hypothesis.example(kind='mean', count=0, floor=1)
@hypothesis.example(kind='mean', count=0, floor=6)
@hypothesis.example(kind='mean', count=5, floor=6)
@hypothesis.example(kind='mean', count=6, floor=6)
@hypothesis.example(kind='mean', count=7, floor=6)
@hypothesis.given(kind=_kinds, count=st.integers(0, 17), floor=_floors)
def test_distances_of_absent_panel_members_are_those_of_adding_one(
  kind, count, floor
):
  mechanism = _mechanism(kind, floor=floor)
  updates, absent = _round(mechanism, count, 8)
  found = mechanism.squared_distances(
    _measures(mechanism, updates, absent, np.zeros(8, bool)),
    np.zeros(8, bool),
    count,
    mechanism.clip_norm,
  )
  wanted = [_brute_force(mechanism, updates, extra=u) for u in absent]
  np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_panel_mixes_present_and_absent_members():
  # Beside three others the floor binds, beside four it does not.
  mechanism = _mechanism('mean', floor=4)
  updates, absent = _round(mechanism, 4, 2)
  panel = np.concatenate([absent[:1], updates[1:3], absent[1:]])
  took_part = np.array([False, True, True, False])
  found = mechanism.squared_distances(
    _measures(mechanism, updates, panel, took_part),
    took_part,
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


@pytest.mark.parametrize('floor', [1, 4])
def test_an_empty_round_of_a_mean_costs_what_a_client_would_have_added(floor):
  mechanism = _mechanism('mean', noise=2.0, floor=floor)
  found = mechanism.squared_distances(
    np.array([2.25, 1.0]), np.zeros(2, bool), 0, mechanism.clip_norm
  )
  # ‖u‖ / n_min over z C / n̄.
  wanted = np.array([1.0, 1.0 / 1.5]) / floor * 6 / 2.0
  np.testing.assert_allclose(np.sqrt(found), wanted, rtol=1e-5)
  assert _worst_case(mechanism, 0) == pytest.approx(found[0], rel=1e-12)


@pytest.mark.parametrize('adaptive', [False, True])
@pytest.mark.parametrize('kind', client.KINDS)
@pytest.mark.parametrize(
  'count, floor',
  [(0, 1), (1, 1), (2, 1), (3, 1), (9, 1), (2, 3), (3, 3), (4, 3)],
)
def test_no_vectors_in_the_ball_exceed_the_worst_case(
  kind, count, floor, adaptive
):
  mechanism = _mechanism(kind, quantile=0.5 if adaptive else None, floor=floor)
  clip = mechanism.clip_norm
  generator = np.random.default_rng(count)
  axis = np.eye(_SIZE)[0] * clip
  adversarial = [
    np.concatenate([[axis], -np.repeat([axis], count, axis=0)])[:count],
    np.repeat([axis], count, axis=0),
    np.reshape([axis * (-1) ** i for i in range(count)], (-1, _SIZE)),
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
  mechanism = _mechanism('mean', noise=0.8, clients_per_round=7.0, floor=1)
  wanted = (2 * 7.0 / (0.8 * count)) ** 2
  assert _worst_case(mechanism, count) == pytest.approx(wanted, rel=2e-5)


@pytest.mark.parametrize('count', range(4))
def test_below_the_floor_the_worst_case_is_that_of_a_fixed_number(count):
  mechanism = _mechanism('mean', noise=0.8, clients_per_round=7.0, floor=4)
  wanted = (7.0 / (0.8 * 4)) ** 2
  assert _worst_case(mechanism, count) == pytest.approx(wanted, rel=1e-5)


# --- The floor, and the number of others, which is drawn.


@pytest.mark.parametrize(
  'alpha, clients, wanted',
  [
    (0.1, 100, 1),  # 10 - 4 · 3 is below one.
    (0.5, 100, 30),  # 50 - 4 · 5
    (0.9, 100, 78),  # 90 - 4 · 3
    (1.0, 100, 99),  # All the others: it does not bind.
    (1.0, 1, 1),
    (0.25, 24, 1),
  ],
)
def test_by_default_the_floor_is_four_deviations_below_the_expected_number(
  alpha, clients, wanted
):
  mechanism = client.ClientMechanism('mean', 1.0, 1.0, alpha, alpha * clients)
  assert mechanism.least_participants == wanted
  assert mechanism.client_count == clients


@hypothesis.settings(max_examples=60)
@hypothesis.given(
  clients=st.integers(1, 400),
  alpha=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
  floor=st.integers(1, 400),
  quantile=_quantiles,
)
def test_the_mixture_is_that_of_all_numbers_of_others(
  clients, alpha, floor, quantile
):
  floor = min(floor, clients)
  adaptive = None
  if quantile is not None:
    adaptive = adaptive_clipping.AdaptiveClipping(quantile)
  mechanism = client.ClientMechanism(
    'mean', 0.8, 1.5, alpha, alpha * clients, adaptive, floor
  )
  deviation = mechanism.noise_per_clip_norm
  # By the definition, one n at a time.
  number = np.arange(clients)
  chances = stats.binom.pmf(number, clients - 1, alpha)
  moves = np.where(number < floor, 1 / floor, 2 / (number + 1))
  squared = oracles.on_grid((moves / deviation) ** 2)
  if adaptive is not None:
    squared += oracles.on_grid(0.25 / mechanism.adaptive.count_deviation**2)
  mixture = np.array(mechanism.worst_case_mixture)
  assert np.sum(mixture[:, 0]) == pytest.approx(1.0, abs=1e-11)
  assert np.all(mixture[:, 0] > 0)
  # At every level no less probability lies above it, and hardly more.
  for level in np.unique(squared):
    wanted = np.sum(chances[squared >= level * (1 - 1e-12)])
    found = np.sum(mixture[mixture[:, 1] >= level * (1 - 1e-12), 0])
    # Parts that hardly ever occur are merged into larger ones.
    assert wanted - 1e-13 <= found <= wanted + 1e-9
  assert np.max(mixture[:, 1]) <= np.max(squared) * (1 + 1e-12)
  if alpha == 1:
    assert len(mixture) == 1
  # No n of a round has a worst case that the mixture does not know; an absent
  # client of a round to which all came is the only exception.
  for count in range(clients):
    worst = _worst_case(mechanism, count)
    assert worst <= np.max(squared) * (1 + 1e-12)


def test_of_very_many_clients_the_tails_are_lumped_upward():
  alpha, clients = 0.1, 10**6
  mechanism = client.ClientMechanism('mean', 1.0, 1.0, alpha, alpha * clients)
  mixture = mechanism.worst_case_mixture
  assert len(mixture) < 100
  assert math.fsum(p for p, _ in mixture) == pytest.approx(1.0, abs=1e-9)
  number = stats.binom(clients - 1, alpha)
  largest = max(mixture, key=lambda part: part[1])
  floor = mechanism.least_participants
  wanted = oracles.on_grid((2 * alpha * clients / (floor + 1)) ** 2)
  assert largest[1] == pytest.approx(float(wanted), rel=1e-12)
  assert largest[0] >= number.pmf(floor)
  # At every level no less probability lies above it.
  for others in range(floor + 1, int(number.ppf(0.999)), 97):
    level = oracles.on_grid((2 * alpha * clients / (others + 1)) ** 2)
    found = sum(p for p, squared in mixture if squared >= level * (1 - 1e-12))
    assert found >= number.cdf(others) - number.cdf(floor - 1) - 1e-12


@pytest.mark.parametrize('units', [0, 2, 5])
def test_what_dp_is_charged_does_not_depend_on_who_came(units):
  mechanism = _mechanism('mean', floor=3)
  mixtures = set()
  for count in (0, 1, 3, 4, 20):
    event = _event(mechanism, np.full(units, 0.1), False, count)
    if units < mean_bounds.FEWEST_UNITS:
      assert isinstance(event, events.MixedGaussianEvent)
      mixtures.add(event.mixture)
    else:
      mixtures.add(event.worst_case_mixture)
    assert event.participation_probability == 0.25
  assert mixtures == {mechanism.worst_case_mixture}


def test_the_worst_case_of_a_sum_is_not_drawn():
  assert _mechanism('sum').worst_case_mixture is None
  assert _mechanism('sum').least_participants is None
  assert _mechanism('mean', noise=0.0).worst_case_mixture is None


def test_failed_clients_count_in_a_mean_as_zeros():
  # So that the number of others is binomial whatever their data are.
  mechanism = _mechanism('mean', floor=2)
  updates, _ = _round(mechanism, 3, 0)
  for failed in (0, 2):
    sums = base.Sums([np.sum(updates, axis=0)], 3.0, 3.0, float(failed))
    released = mechanism.release(client.ClippingState(1.5), sums, _no_noise)
    zeros = np.zeros((failed, _SIZE))
    np.testing.assert_allclose(
      released.aggregate[0],
      _released(mechanism, np.concatenate([updates, zeros])),
      rtol=1e-12,
    )
  assert mechanism.counts_failed
  assert not _mechanism('sum').counts_failed


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
  assert worst == pytest.approx(noise**-2, rel=2e-5)
  if quantile is None:
    assert worst == pytest.approx(oracles.on_grid(noise**-2), rel=1e-12)


def test_the_round_clip_norm_scales_the_measures():
  mechanism = _mechanism('sum', noise=2.0, clip=1.0)
  found = mechanism.squared_distances(
    np.array([9.0, 2.25]), np.ones(2, bool), 2, 3.0
  )
  np.testing.assert_allclose(found, [1 / 4, 1 / 16], rtol=1e-5)


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
  part = np.ones(6, bool)
  measures = _measures(mechanism, updates, updates, part)
  event = _event(mechanism, measures, part, 6, mechanism.clip_norm, panel=True)
  assert isinstance(event, events.BayesianGaussianEvent)
  assert event.panel
  assert event.participation_probability == 0.25
  assert event.worst_case_squared_distance == pytest.approx(
    _worst_case(mechanism, 6)
  )
  assert event.worst_case_mixture == mechanism.worst_case_mixture
  np.testing.assert_array_equal(
    event.squared_distances,
    mechanism.squared_distances(measures, part, 6, mechanism.clip_norm),
  )


@pytest.mark.parametrize('units', range(mean_bounds.FEWEST_UNITS))
def test_too_few_units_are_accounted_for_by_the_worst_case(units):
  event = _event(_mechanism('sum'), np.full(units, 1e-3), True, units)
  assert isinstance(event, dp_accounting.PoissonSampledDpEvent)
  assert event.sampling_probability == 0.25
  assert event.event.noise_multiplier == pytest.approx(0.7, rel=1e-5)


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
    measures = _measures(mechanism, *_round(mechanism, count, 10), False)
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
  mixture = mechanism.worst_case_mixture
  assert found == events.ReportedCostEvent(
    np.arange(5.0),
    1e-9,
    0.25,
    _worst_case(mechanism, 4),
    worst_case_mixture=mixture,
  )
  # Too few came; and there is no noise.
  for count in range(3):
    assert event(mechanism, count) == events.MixedGaussianEvent(mixture, 0.25)
  loud = _mechanism('mean', noise=0.0)
  assert isinstance(event(loud, 4), dp_accounting.NonPrivateDpEvent)


# --- What is released, in numpy; the aggregators' tests are in TensorFlow.


def _release(mechanism, updates, clip, add_noise=None):
  norms = np.linalg.norm(updates, axis=1)
  sums = base.Sums(
    [np.sum(updates, axis=0)], len(updates), np.sum(norms <= clip)
  )

  return mechanism.release(
    client.ClippingState(clip), sums, add_noise or _no_noise
  )


def _no_noise(values, deviation, purpose):
  del deviation, purpose
  return values


@hypothesis.given(_kinds, st.integers(0, 9), _floors)
def test_the_release_is_the_mean_or_the_sum_over_the_expected_number(
  kind, count, floor
):
  mechanism = _mechanism(kind, floor=floor)
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
  st.integers(0, 5),
  st.integers(1, 3),
)
def test_a_client_is_measured_by_its_norm_or_from_the_mean_of_others(
  kind, squared_norm, squared_deviation, took_part, count, floor
):
  count = max(count, int(took_part))
  found = _mechanism(kind, floor=floor).measure(
    squared_norm, squared_deviation, took_part, count
  )
  by_norm = kind == 'sum' or count - took_part < floor
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
    (
      'clients_per_round',
      6.1,
      r'Found 6.1 / 0.25 = 24.4, which is not a whole',
    ),
    ('participation_probability', 0.0, 'Found 6.0 / 0.0 = inf, which is not'),
    ('least_participants', 0, 'least_participants must be a positive integer'),
    (
      'least_participants',
      2.5,
      'least_participants must be a positive integer',
    ),
    ('least_participants', 25, 'at most the number of clients, 24. Found 25.'),
  ],
)
def test_bad_settings_are_refused_with_a_sentence(name, value, sentence):
  good = _mechanism()
  with pytest.raises(ValueError, match=sentence):
    dataclasses.replace(good, **{name: value})


def test_a_floor_is_refused_for_a_sum():
  sentence = "least_participants is for the mechanism 'mean'.* Found 3."
  with pytest.raises(ValueError, match=sentence):
    dataclasses.replace(_mechanism('sum'), least_participants=3)
  # Which does not need the number of clients, either.
  client.ClientMechanism('sum', 1.0, 1.0, 0.3, 7.0)
