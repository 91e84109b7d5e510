import collections
import functools
import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from scipy import stats
from tensorflow_federated.python.aggregators import differential_privacy

from tf_bdp import aggregators
from tf_bdp.learning import processes
from tf_bdp.mechanisms import client as mechanism_lib

_CLIP = 1.5
_EXPECTED = 4.0
_PROBABILITY = 0.25
_KINDS = mechanism_lib.KINDS
# How unlikely a true hypothesis must be before a test of it fails.
_LEVEL = 1e-6
_VALUE_TYPE = tff.to_type(
  collections.OrderedDict(a=(np.float32, [2]), b=(np.float32, [3]))
)
_LONG = 20_000


def _mechanism(kind, noise=0.0, clip=_CLIP, **more):
  return mechanism_lib.GaussianMechanism(
    kind, noise, clip, _PROBABILITY, more.pop('expected', _EXPECTED), **more
  )


@functools.cache
def _process(kind, noise=0.0, quantile=None, seed=None, most=1024, long=False):
  mechanism = _mechanism(
    kind,
    noise,
    clip_quantile=quantile,
    clipped_count_deviation=None if quantile is None else 0.8,
  )
  factory = aggregators.ClientPrivacyFactory(
    mechanism,
    max_distances=most,
    noise_seed=seed,
    release_aggregate=True,
  )
  value_type = tff.TensorType(np.float32, [_LONG]) if long else _VALUE_TYPE
  return factory.create(value_type)


def _value(vector):
  vector = np.asarray(vector, np.float32)
  return collections.OrderedDict(a=vector[:2], b=vector[2:])


def _run(process, vectors, state=None):
  state = process.initialize() if state is None else state
  return process.next(state, [_value(vector) for vector in vectors])


def _flat(structure):
  leaves = tf.nest.flatten(structure)
  return np.concatenate([np.ravel(leaf) for leaf in leaves]).astype(np.float64)


def _clipped(vectors, clip=_CLIP):
  vectors = np.reshape(np.asarray(vectors, np.float64), (-1, 5))
  norms = np.linalg.norm(vectors, axis=1, keepdims=True)
  return vectors * np.minimum(1, clip / norms)


def _released(kind, clipped, expected=_EXPECTED):
  if kind == 'sum':
    return clipped.sum(axis=0) / expected
  return clipped.mean(axis=0) if len(clipped) else np.zeros(5)


def _leave_one_out(kind, clipped):
  """‖f(U) − f(U∖u)‖ of every client, by the definition."""
  whole = _released(kind, clipped)
  return np.array(
    [
      np.linalg.norm(whole - _released(kind, np.delete(clipped, i, axis=0)))
      for i in range(len(clipped))
    ]
  )


def _vectors(count, seed=0):
  generator = np.random.default_rng(seed)
  # Norms from well below to well above the clip norm.
  return generator.normal(size=(count, 5)) * generator.uniform(
    0.2, 2, (count, 1)
  )


def _distances(metrics, kind, noise=1.0):
  """Moves of the released mean, from the measurements."""
  mechanism = _mechanism(kind, noise)
  measures = np.asarray(metrics['squared_measures'])
  squared = mechanism.squared_distances(
    measures,
    np.ones(measures.size, bool),
    int(metrics['participants']),
    float(metrics['clip_norm']),
  )
  return np.sqrt(squared) * noise * _CLIP / _EXPECTED


# Type signatures.


@pytest.mark.parametrize('kind', _KINDS)
def test_the_process_has_the_types_of_an_unweighted_aggregation(kind):
  process = _process(kind)
  assert isinstance(process, tff.templates.AggregationProcess)
  assert not process.is_weighted
  signature = process.next.type_signature
  state_type = process.initialize.type_signature.result
  assert state_type.placement is tff.SERVER
  assert {'clip_norm', 'round_number', 'dp_event', 'is_init_state'} == set(
    dir(state_type.member)
  )
  assert state_type.member.clip_norm == tff.TensorType(np.float32)
  assert state_type.member.round_number == tff.TensorType(np.int32)
  assert signature.parameter[0] == state_type
  assert signature.parameter[1] == tff.FederatedType(_VALUE_TYPE, tff.CLIENTS)
  assert signature.result.state.is_equivalent_to(state_type)
  assert signature.result.result.placement is tff.SERVER
  assert signature.result.result.member.is_equivalent_to(_VALUE_TYPE)
  measured = signature.result.measurements
  assert measured.placement is tff.SERVER
  assert measured.member.squared_measures == tff.TensorType(np.float32, [None])
  assert measured.member.participants == tff.TensorType(np.int32)
  assert measured.member.failed_clients == tff.TensorType(np.int32)
  assert measured.member.clip_norm == tff.TensorType(np.float32)
  assert measured.member.aggregate.is_equivalent_to(_VALUE_TYPE)


@pytest.mark.parametrize('name', _KINDS)
def test_named_constructors_make_the_mechanism_and_hide_the_aggregate(name):
  constructor = getattr(aggregators.ClientPrivacyFactory, name)
  factory = constructor(
    noise_multiplier=1.0,
    clip_norm=2.0,
    participation_probability=0.1,
    expected_clients=10.0,
    max_distances=5,
  )
  assert isinstance(factory, tff.aggregators.UnweightedAggregationFactory)
  process = factory.create(tff.TensorType(np.float32, [3]))
  measured = process.next.type_signature.result.measurements.member
  assert 'aggregate' not in dir(measured)
  assert 'squared_measures' in dir(measured)
  output = process.next(process.initialize(), [np.ones(3, np.float32)])
  assert output.measurements['is_mean'] == (name == 'mean')
  assert output.measurements['clip_norm'] == 2.0


def test_measurements_name_the_mechanism_to_float64_accuracy():
  output = _run(_process('mean', 0.7, seed=1), _vectors(3))
  for name, value in _mechanism('mean', 0.7).to_scalars().items():
    assert float(output.measurements[name]) == value


@pytest.mark.parametrize('most', [0, -1, 1.5, True])
def test_max_distances_must_be_a_positive_integer(most):
  with pytest.raises(ValueError, match='max_distances must be a positive int'):
    aggregators.ClientPrivacyFactory(_mechanism('mean'), max_distances=most)


def test_bad_settings_are_refused_by_the_named_constructors():
  with pytest.raises(ValueError, match='clip_norm must be positive'):
    aggregators.ClientPrivacyFactory.mean(1.0, -1.0, 0.1, 10.0)
  with pytest.raises(ValueError, match='noise_multiplier must be non-neg'):
    aggregators.ClientPrivacyFactory.sum(-1.0, 1.0, 0.1, 10.0)


# Execution without noise.


@pytest.mark.parametrize('count', [1, 2, 3, 12])
@pytest.mark.parametrize('kind', _KINDS)
def test_without_noise_the_result_is_that_of_clipped_updates(kind, count):
  vectors = _vectors(count, count)
  output = _run(_process(kind), vectors)
  clipped = _clipped(vectors)
  np.testing.assert_allclose(
    _flat(output.result), _released(kind, clipped), rtol=1e-5, atol=1e-7
  )
  np.testing.assert_array_equal(
    _flat(output.result), _flat(output.measurements['aggregate'])
  )
  assert output.measurements['participants'] == count
  assert output.measurements['failed_clients'] == 0
  assert output.measurements['clip_norm'] == _CLIP


@pytest.mark.parametrize('count', [1, 2, 3, 12])
@pytest.mark.parametrize('kind', _KINDS)
def test_distances_are_those_of_leaving_one_out(kind, count):
  vectors = _vectors(count, 10 + count)
  output = _run(_process(kind), vectors)
  found = _distances(output.measurements, kind)
  wanted = _leave_one_out(kind, _clipped(vectors))
  # They come in the order of the random sample.
  np.testing.assert_allclose(np.sort(found), np.sort(wanted), rtol=1e-5)


@pytest.mark.parametrize('kind', _KINDS)
def test_opposite_clients_reach_the_worst_case_and_no_more(kind):
  axis = np.array([0, 0, 0, 7.0, 0])
  output = _run(_process(kind), [axis, -axis])
  found = _distances(output.measurements, kind, noise=0.5)
  worst = _mechanism(kind, 0.5).worst_case_squared_distance(2)
  limit = math.sqrt(worst) * 0.5 * _CLIP / _EXPECTED
  np.testing.assert_allclose(found, limit, rtol=1e-6)


@pytest.mark.parametrize('kind', _KINDS)
def test_clients_that_agree_cost_nothing_under_mean_alone(kind):
  output = _run(_process(kind), [np.ones(5) * 0.3] * 4)
  found = _distances(output.measurements, kind)
  wanted = 0.0 if kind == 'mean' else np.sqrt(5) * 0.3 / _EXPECTED
  np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize('kind', _KINDS)
def test_clients_that_fail_are_counted_and_left_out(kind):
  good = _vectors(4, 3)
  bad = np.repeat(_vectors(1, 4), 4, axis=0)
  bad[0, 0], bad[1, 4], bad[2, 2] = np.nan, np.inf, -np.inf
  bad[3] = 0.0
  output = _run(_process(kind), [bad[0], *good, *bad[1:]])
  without = _run(_process(kind), good)
  np.testing.assert_allclose(
    _flat(output.result), _flat(without.result), rtol=1e-6
  )
  assert output.measurements['participants'] == 4
  assert output.measurements['failed_clients'] == 4
  np.testing.assert_allclose(
    np.sort(output.measurements['squared_measures']),
    np.sort(without.measurements['squared_measures']),
    rtol=1e-5,
  )


@pytest.mark.parametrize('kind', _KINDS)
def test_a_client_with_a_huge_update_never_makes_the_result_nan(kind):
  good = _vectors(3, 5)
  huge = np.full(5, 1e25)
  output = _run(_process(kind), [*good, huge])
  assert np.all(np.isfinite(_flat(output.result)))
  assert np.all(np.isfinite(output.measurements['squared_measures']))
  counts = output.measurements
  assert counts['participants'] + counts['failed_clients'] == 4


@pytest.mark.parametrize('kind', _KINDS)
def test_one_that_is_left_alone_by_failures_is_measured_from_zero(kind):
  good = _vectors(1, 6)
  output = _run(_process(kind), [np.full(5, np.nan), good[0]])
  np.testing.assert_allclose(
    _distances(output.measurements, kind),
    _leave_one_out(kind, _clipped(good)),
    rtol=1e-5,
  )


@pytest.mark.parametrize('kind', _KINDS)
def test_a_round_of_failures_only_releases_zero(kind):
  output = _run(_process(kind), [np.full(5, np.nan)] * 2)
  np.testing.assert_array_equal(_flat(output.result), 0.0)
  assert output.measurements['participants'] == 0
  assert output.measurements['failed_clients'] == 2
  assert output.measurements['squared_measures'].shape == (0,)


def test_a_bounded_sample_holds_some_of_the_distances():
  vectors = _vectors(10, 7)
  everyone = np.asarray(
    _run(_process('mean'), vectors).measurements['squared_measures']
  )
  assert everyone.size == 10
  process = _process('mean', most=4)
  samples = []
  for _ in range(6):
    output = _run(process, vectors)
    sample = np.sort(output.measurements['squared_measures'])
    assert sample.size == 4
    nearest = np.argmin(np.abs(sample[:, None] - everyone), axis=1)
    np.testing.assert_allclose(sample, everyone[nearest], rtol=1e-5)
    assert len(set(nearest)) == 4
    assert output.measurements['participants'] == 10
    samples.append(tuple(nearest))
  # The same sample six times has a chance of 210^-5.
  assert len(set(samples)) > 1


def test_a_bounded_sample_of_two_is_accounted_for_with_all_participants():
  vectors = _vectors(8, 9)
  process = _process('mean', 0.7, seed=2, most=2)
  metrics = _run(process, vectors).measurements
  (event,) = processes.events_from_metrics(metrics)
  z = 0.7 * 8 / (2 * _EXPECTED)
  assert event == dp_accounting.PoissonSampledDpEvent(
    _PROBABILITY, dp_accounting.GaussianDpEvent(pytest.approx(z))
  )


# Noise.


def _noise(process, count, state=None):
  """The noise of one round with `count` participants; and the next state."""
  updates = np.zeros((count, _LONG), np.float32)
  updates[:, 0] = 1e-3
  state = process.initialize() if state is None else state
  output = process.next(state, list(updates))
  noise = np.asarray(output.result) - np.asarray(
    output.measurements['aggregate']
  )
  return noise.astype(np.float64), output.state


def _check_deviation(noise, wanted):
  assert np.all(np.isfinite(noise))
  assert stats.kstest(noise / wanted, 'norm').pvalue > _LEVEL
  # 5 deviations of the variance of a normal sample.
  assert abs(np.var(noise) / wanted**2 - 1) < 5 * (2 / noise.size) ** 0.5
  assert abs(np.mean(noise)) < 5 * wanted / noise.size**0.5


def _check_independent(one, other):
  assert abs(np.corrcoef(one, other)[0, 1]) < 5 * one.size**-0.5


@pytest.mark.parametrize('kind', _KINDS)
def test_noise_is_z_clip_over_expected_clients_whoever_takes_part(kind):
  process = _process(kind, 0.7, long=True)
  state, noises = process.initialize(), []
  for count in (0, 1, 2, 30, 2):
    noise, state = _noise(process, count, state)
    # One noise a round: it does not grow with the participants.
    _check_deviation(noise, 0.7 * _CLIP / _EXPECTED)
    noises.append(noise)
  again, _ = _noise(process, 2)
  noises.append(again)
  for i, one in enumerate(noises):
    for other in noises[:i]:
      _check_independent(one, other)
    _check_independent(one[: _LONG // 2], one[_LONG // 2 :])


def test_unseeded_noise_cannot_be_had_again_by_seeding_tensorflow():
  noises = []
  for _ in range(2):
    tf.keras.utils.set_random_seed(1)
    factory = aggregators.ClientPrivacyFactory(
      _mechanism('sum', 1.0), release_aggregate=True
    )
    process = factory.create(tff.TensorType(np.float32, [_LONG]))
    for _ in range(2):
      noise, _ = _noise(process, 1)
      noises.append(noise)
  for i, one in enumerate(noises):
    for other in noises[:i]:
      _check_independent(one, other)


def test_parts_of_an_update_get_noises_of_their_own():
  factory = aggregators.ClientPrivacyFactory(
    _mechanism('sum', 1.0), release_aggregate=True
  )
  part = tff.TensorType(np.float32, [_LONG])
  process = factory.create(tff.to_type([part, part]))
  output = process.next(process.initialize(), [])
  one, other = (np.asarray(half, np.float64) for half in output.result)
  _check_deviation(one, _CLIP / _EXPECTED)
  _check_deviation(other, _CLIP / _EXPECTED)
  _check_independent(one, other)


@pytest.mark.parametrize('kind', _KINDS)
def test_an_empty_round_releases_noise_alone(kind):
  process = _process(kind, 0.7, seed=4)
  output = _run(process, [])
  assert np.all(_flat(output.result) != 0)
  np.testing.assert_array_equal(_flat(output.measurements['aggregate']), 0.0)
  assert output.measurements['participants'] == 0
  assert output.measurements['failed_clients'] == 0
  assert output.measurements['squared_measures'].shape == (0,)


def test_seeded_noise_repeats_by_round():
  process = _process('mean', 0.7, seed=4)
  first = _run(process, _vectors(2))
  again = _run(process, _vectors(2))
  np.testing.assert_array_equal(_flat(first.result), _flat(again.result))
  second = _run(process, _vectors(2), first.state)
  assert np.all(_flat(first.result) != _flat(second.result))


# Adaptive clipping.


def test_the_split_of_the_noise_is_that_of_tff():
  # Theorem 1 of Andrew et al. (2021), as TFF computes it.
  mechanism = _mechanism('sum', 1.0, expected=100.0, clip_quantile=0.5)
  wanted = differential_privacy.adaptive_clip_noise_params(1.0, 100.0, None)
  assert mechanism.update_noise_multiplier == pytest.approx(wanted[0])
  assert mechanism.count_deviation == pytest.approx(wanted[1])


@pytest.mark.parametrize('kind', _KINDS)
def test_the_clip_norm_moves_as_andrew_et_al_say(kind):
  process = _process(kind, quantile=0.7)
  state, clip = process.initialize(), _CLIP
  for seed, count in ((0, 4), (1, 7), (2, 0), (3, 1), (4, 6)):
    vectors = _vectors(count, seed)
    output = _run(process, vectors, state)
    assert float(output.measurements['clip_norm']) == pytest.approx(clip)
    # The round is clipped with the norm from before it.
    np.testing.assert_allclose(
      _flat(output.result),
      _released(kind, _clipped(vectors, clip)),
      rtol=1e-5,
      atol=1e-7,
    )
    norms = np.linalg.norm(vectors, axis=1)
    # Section 2.1, with their fixed denominator n̄ and bits of ±1/2.
    share = np.sum((norms <= clip) - 0.5) / _EXPECTED + 0.5
    clip *= math.exp(-0.2 * (share - 0.7))
    state = output.state
    assert float(state.clip_norm) == pytest.approx(clip, rel=1e-5)


def test_the_clip_norm_settles_at_the_quantile():
  mechanism = _mechanism('mean', expected=20.0, clip_quantile=0.25)
  process = aggregators.ClientPrivacyFactory(mechanism).create(_VALUE_TYPE)
  scales = np.linspace(0.1, 2.0, 20)
  vectors = np.zeros((20, 5))
  vectors[:, 1] = scales
  state = process.initialize()
  for _ in range(40):
    state = _run(process, vectors, state).state
  assert np.mean(scales <= state.clip_norm) == pytest.approx(0.25, abs=0.06)


def test_failed_clients_have_no_say_in_the_clip_norm():
  process = _process('mean', quantile=0.7)
  vectors = _vectors(3)
  output = _run(process, [*vectors, np.full(5, np.nan), np.zeros(5)])
  without = _run(process, vectors)
  assert output.state.clip_norm == without.state.clip_norm


def test_noise_of_the_clip_norm_has_the_deviation_of_the_count():
  # log(C'/C) = -η (b̄ - γ), so its deviation is η σ_b / n̄.
  mechanism = _mechanism(
    'sum', 1.0, clip_quantile=0.5, clipped_count_deviation=0.8
  )
  process = aggregators.ClientPrivacyFactory(mechanism).create(
    tff.TensorType(np.float32, [1])
  )
  growths = [
    math.log(process.next(process.initialize(), []).state.clip_norm / _CLIP)
    for _ in range(60)
  ]
  wanted = 0.2 * 0.8 / _EXPECTED
  assert stats.kstest(np.array(growths) / wanted, 'norm').pvalue > _LEVEL
  ratio = np.var(growths) / wanted**2
  low, high = stats.chi2.ppf([_LEVEL, 1 - _LEVEL], 60) / 60
  assert low < ratio < high


@pytest.mark.parametrize('kind', _KINDS)
def test_noise_of_the_update_is_larger_beside_a_noised_count(kind):
  process = _process(kind, 0.7, quantile=0.5, long=True)
  noise, state = _noise(process, 3)
  larger = (0.7**-2 - (2 * 0.8) ** -2) ** -0.5
  _check_deviation(noise, larger * _CLIP / _EXPECTED)
  clip = float(state.clip_norm)
  assert clip != pytest.approx(_CLIP, rel=1e-4)
  # The next round's noise goes by the next clip norm.
  noise, _ = _noise(process, 3, state)
  _check_deviation(noise, larger * clip / _EXPECTED)


# The event of differential privacy.


@pytest.mark.parametrize('count', [1, 2, 5])
@pytest.mark.parametrize('quantile', [None, 0.5])
def test_the_state_holds_the_event_of_dp_for_a_sum(count, quantile):
  process = _process('sum', 0.7, quantile=quantile, seed=5)
  state = _run(process, _vectors(count)).state
  event = differential_privacy.extract_dp_event_from_state(state)
  assert isinstance(event, dp_accounting.GaussianDpEvent)
  assert float(event.noise_multiplier) == pytest.approx(0.7, rel=1e-6)


@pytest.mark.parametrize('count', [2, 3, 9])
def test_the_state_holds_the_event_of_dp_for_a_mean(count):
  process = _process('mean', 0.7, seed=5)
  state = _run(process, _vectors(count)).state
  event = differential_privacy.extract_dp_event_from_state(state)
  wanted = 0.7 * count / (2 * _EXPECTED)
  assert float(event.noise_multiplier) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize('count', [0, 1, 2, 3, 9])
@pytest.mark.parametrize('quantile', [None, 0.5])
@pytest.mark.parametrize('kind', _KINDS)
def test_the_state_and_the_mechanism_agree_on_the_worst_case(
  kind, quantile, count
):
  process = _process(kind, 0.7, quantile=quantile, seed=5)
  state = _run(process, _vectors(count)).state
  event = differential_privacy.extract_dp_event_from_state(state)
  worst = _mechanism(
    kind,
    0.7,
    clip_quantile=quantile,
    clipped_count_deviation=0.8,
  ).worst_case_squared_distance(count)
  found = float(event.noise_multiplier) ** -2
  assert found == pytest.approx(worst, rel=1e-5)


def test_failed_clients_do_not_make_the_event_smaller():
  process = _process('mean', 0.7, seed=5)
  state = _run(process, [*_vectors(3), np.full(5, np.nan)]).state
  event = differential_privacy.extract_dp_event_from_state(state)
  wanted = 0.7 * 3 / (2 * _EXPECTED)
  assert float(event.noise_multiplier) == pytest.approx(wanted, rel=1e-6)


def test_the_initial_state_holds_no_event():
  state = _process('sum', 0.7, seed=5).initialize()
  with pytest.raises(
    differential_privacy.ExtractingDpEventFromInitialStateError
  ):
    differential_privacy.extract_dp_event_from_state(state)


def test_a_sum_is_accounted_for_as_tffs_own_aggregator_is():
  theirs = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
    noise_multiplier=0.7, clients_per_round=_EXPECTED, clip=_CLIP
  ).create(_VALUE_TYPE)
  output = _run(theirs, _vectors(3))
  wanted = differential_privacy.extract_dp_event_from_state(output.state)
  ours = _run(_process('sum', 0.7, seed=5), _vectors(3))
  found = differential_privacy.extract_dp_event_from_state(ours.state)
  assert float(found.noise_multiplier) == pytest.approx(
    float(wanted.noise_multiplier), rel=1e-6
  )
