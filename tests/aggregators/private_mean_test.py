"""Tests of the aggregator of every level: what is released, and its state."""

import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from scipy import stats
from tensorflow_federated.python.aggregators import differential_privacy

from tests.aggregators import builders
from tf_bdp.aggregators import distance_samples, private_mean
from tf_bdp.mechanisms import noisy_mean

_CLIP, _EXPECTED = builders.CLIP, builders.EXPECTED
_KINDS = builders.KINDS
_LEVEL, _LONG = builders.LEVEL, builders.LONG
_VALUE_TYPE = builders.VALUE_TYPE
_mechanism = builders.mechanism
_process = builders.process
_run = builders.run
_flat = builders.flat
_clipped = builders.clipped
_released = builders.released
_vectors = builders.vectors


def _with_aggregate(mechanism):
  """Of which the noise can be told."""
  return private_mean.PrivateMeanFactory(
    mechanism,
    measurement=distance_samples.DistanceSample(with_aggregate=True),
  )


# Type signatures.


@pytest.mark.parametrize('kind', _KINDS)
def test_the_process_has_the_types_of_an_unweighted_aggregation(kind):
  process = _process(kind)
  assert isinstance(process, tff.templates.AggregationProcess)
  assert not process.is_weighted
  signature = process.next.type_signature
  state_type = process.initialize.type_signature.result
  assert state_type.placement is tff.SERVER
  assert {'aggregation', 'round_number', 'dp_event', 'is_init_state'} == set(
    dir(state_type.member)
  )
  clip_norm = state_type.member.aggregation.clip_norm
  assert clip_norm == tff.TensorType(np.float32)
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


@pytest.mark.parametrize('kind', _KINDS)
def test_by_default_the_server_learns_the_number_of_clients_alone(kind):
  process = private_mean.PrivateMeanFactory(_mechanism(kind)).create(
    _VALUE_TYPE
  )
  output = _run(process, _vectors(3))
  assert set(output.measurements) == {
    *('participants', 'failed_clients', 'clip_norm'),
  }
  np.testing.assert_allclose(
    _flat(output.result),
    _released(kind, _clipped(_vectors(3))),
    rtol=1e-5,
    atol=1e-7,
  )


def test_weights_are_refused_with_a_way_out():
  factory = private_mean.PrivateMeanFactory(_mechanism('mean'))
  sentence = r'takes no weights.*tff\.aggregators\.as_weighted_aggregator'
  with pytest.raises(TypeError, match=sentence):
    factory.create(_VALUE_TYPE, tff.TensorType(np.float32))
  wrapped = tff.aggregators.as_weighted_aggregator(factory)
  process = wrapped.create(_VALUE_TYPE, tff.TensorType(np.float32))
  assert process.is_weighted


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


@pytest.mark.parametrize('kind', _KINDS)
def test_clients_that_fail_are_counted_and_add_nothing(kind):
  good = _vectors(4, 3)
  bad = np.repeat(_vectors(1, 4), 4, axis=0)
  bad[0, 0], bad[1, 4], bad[2, 2] = np.nan, np.inf, -np.inf
  bad[3] = 0.0
  output = _run(_process(kind), [bad[0], *good, *bad[1:]])
  wanted = _clipped(good)
  if kind == 'mean':
    # They take part with zeros, so that their data do not change n.
    wanted = np.concatenate([wanted, np.zeros((4, 5))])
  result = _released(kind, wanted)
  np.testing.assert_allclose(_flat(output.result), result, rtol=1e-6)
  assert output.measurements['participants'] == len(wanted)
  assert output.measurements['failed_clients'] == 4
  measures = wanted - result if kind == 'mean' else wanted
  np.testing.assert_allclose(
    np.sort(output.measurements['squared_measures']),
    np.sort(np.sum(measures**2, axis=1)),
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
  usable = counts['participants']
  if kind == 'mean':
    usable -= counts['failed_clients']
  assert usable + counts['failed_clients'] == 4


@pytest.mark.parametrize('kind', _KINDS)
def test_a_round_of_failures_only_releases_zero(kind):
  output = _run(_process(kind), [np.full(5, np.nan)] * 2)
  np.testing.assert_array_equal(_flat(output.result), 0.0)
  count = 2 if kind == 'mean' else 0
  assert output.measurements['participants'] == count
  assert output.measurements['failed_clients'] == 2
  assert output.measurements['squared_measures'].tolist() == [0.0] * count


def test_where_clients_clip_and_add_noise_themselves_the_mean_is_theirs():
  mean = noisy_mean.NoisyMean(0.0, _CLIP)
  process = private_mean.PrivateMeanFactory(mean).create(_VALUE_TYPE)
  vectors = 10 * _vectors(3)
  output = _run(process, [*vectors, np.full(5, np.nan), np.zeros(5)])
  np.testing.assert_allclose(
    _flat(output.result), np.mean(vectors, axis=0), rtol=1e-5
  )
  assert output.measurements['participants'] == 3
  assert output.measurements['failed_clients'] == 2
  # What clients add is not the aggregation's to account for.
  event = differential_privacy.extract_dp_event_from_state(output.state)
  assert float(event.noise_multiplier) == 0.0


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
    factory = _with_aggregate(_mechanism('sum', 1.0))
    process = factory.create(tff.TensorType(np.float32, [_LONG]))
    for _ in range(2):
      noise, _ = _noise(process, 1)
      noises.append(noise)
  for i, one in enumerate(noises):
    for other in noises[:i]:
      _check_independent(one, other)


def test_parts_of_an_update_get_noises_of_their_own():
  factory = _with_aggregate(_mechanism('sum', 1.0))
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
    assert float(state.aggregation.clip_norm) == pytest.approx(clip, rel=1e-5)


def test_the_clip_norm_settles_at_the_quantile():
  mechanism = _mechanism('mean', expected=20.0, quantile=0.25)
  process = private_mean.PrivateMeanFactory(mechanism).create(_VALUE_TYPE)
  scales = np.linspace(0.1, 2.0, 20)
  vectors = np.zeros((20, 5))
  vectors[:, 1] = scales
  state = process.initialize()
  for _ in range(40):
    state = _run(process, vectors, state).state
  assert np.mean(scales <= state.aggregation.clip_norm) == pytest.approx(
    0.25, abs=0.06
  )


def test_failed_clients_have_no_say_in_the_clip_norm():
  process = _process('mean', quantile=0.7)
  vectors = _vectors(3)
  output = _run(process, [*vectors, np.full(5, np.nan), np.zeros(5)])
  without = _run(process, vectors)
  assert (
    output.state.aggregation.clip_norm == without.state.aggregation.clip_norm
  )


def test_noise_of_the_clip_norm_has_the_deviation_of_the_count():
  # log(C'/C) = -η (b̄ - γ), so its deviation is η σ_b / n̄.
  mechanism = _mechanism('sum', 1.0, quantile=0.5, deviation=0.8)
  process = private_mean.PrivateMeanFactory(mechanism).create(
    tff.TensorType(np.float32, [1])
  )
  growths = [
    math.log(
      process.next(process.initialize(), []).state.aggregation.clip_norm / _CLIP
    )
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
  clip = float(state.aggregation.clip_norm)
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


@pytest.mark.parametrize('count', [0, 2, 9])
def test_the_state_holds_the_worst_event_of_dp_for_a_mean(count):
  # The number of participants is secret, and must not be read from it.
  process = _process('mean', 0.7, seed=5)
  state = _run(process, _vectors(count)).state
  event = differential_privacy.extract_dp_event_from_state(state)
  # Beside one other: n_min is one.
  wanted = 0.7 * 2 / (2 * _EXPECTED)
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
  mechanism = _mechanism(kind, 0.7, quantile=quantile, deviation=0.8)
  worst = max(
    mechanism.worst_case_squared_distance('client', n) for n in range(16)
  )
  found = float(event.noise_multiplier) ** -2
  assert found == pytest.approx(worst, rel=1e-5)
  assert found >= (1 - 1e-6) * mechanism.worst_case_squared_distance(
    'client', count
  )


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
