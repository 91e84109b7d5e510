"""Tests of secure sums and maxima, on TFF's runtime with plain sums inside."""

import collections
import fractions
import functools
import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.aggregators import builders
from tf_bdp.aggregators import private_mean, runtime, secure_sums

# From what is almost nothing to the worst cases of the highest orders.
_UPPER = (1e-280, 1e-9, 0.3, 1.0, 1.0 + 2**-52, 1024.0, 1e5, 1e11)
_COUNTS = (1, 2, 7)


@pytest.fixture(scope='module', autouse=True)
def context_before():
  """Sets the simulation's context; gives the one that was set before."""
  before = tff.framework.get_context_stack().current
  runtime.use_simulation_context()
  yield before
  tff.framework.set_default_context(before)


def _at_clients(shape, dtype=np.float64):
  return tff.FederatedType(tff.TensorType(dtype, shape), tff.CLIENTS)


def _at_server(shape):
  return tff.FederatedType(tff.TensorType(np.float64, shape), tff.SERVER)


@functools.cache
def _sum_computation(upper, max_clients=secure_sums.MOST_CLIENTS):
  @tff.federated_computation(_at_clients([len(upper)]))
  def compute(values):
    return secure_sums.secure_sum(values, upper, max_clients)

  return compute


@functools.cache
def _maximum_computation(upper, levels, smallest_share, passes=1):
  @tff.federated_computation(_at_clients([len(upper)]))
  def compute(values):
    return secure_sums.secure_maximum(
      values, upper, levels, smallest_share, passes
    )

  return compute


def _values(count, upper, seed):
  """Rows of values of every size up to the largest, and the ends."""
  generator = np.random.default_rng(seed)
  shape = (count, len(upper))
  shares = 10 ** generator.uniform(-25, 0, shape)
  shares[generator.random(shape) < 0.1] = 0.0
  shares[generator.random(shape) < 0.1] = 1.0
  return shares * np.array(upper)


# Sums.


# Seven have so fine steps that float64 does not hold all sums.
@pytest.mark.parametrize('max_clients', [2**20, 7])
@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('count', _COUNTS)
def test_a_sum_is_never_less_and_within_a_step_for_each_client(
  count, seed, max_clients
):
  values = _values(count, _UPPER, seed)
  found = _sum_computation(_UPPER, max_clients)(list(values))
  steps = secure_sums.resolution(_UPPER, max_clients)
  for column, total, step in zip(values.T, found, steps):
    exact = sum(map(fractions.Fraction, column.tolist()))
    assert total >= exact
    largest = exact + count * fractions.Fraction(step)
    assert total <= largest * (1 + fractions.Fraction(1, 2**50))


def test_the_step_is_2_to_the_minus_62_times_powers_of_two_above_the_bounds():
  resolution = secure_sums.resolution
  assert resolution() == 2.0**-42
  assert resolution(1.0, 1) == 2.0**-62
  assert resolution(1.0, 2**10) == resolution(1.0, 2**9 + 1) == 2.0**-52
  np.testing.assert_array_equal(
    resolution([0.75, 1.0, 1.0 + 2**-52, 1.5, 2.0, 1e5], 4),
    2.0**-60 * np.array([1, 1, 2, 2, 2, 2**17]),
  )
  # Below the smallest float64 there is nothing to gain.
  assert resolution(0.0) == resolution(1e-307) == np.finfo(float).tiny


def test_multiples_of_the_step_are_summed_exactly():
  values = [np.array([0.25, 3 * 2.0**-42]), np.array([0.75, 2.0**-42])]
  found = _sum_computation((1.0, 1.0))(values)
  np.testing.assert_array_equal(found, [1.0, 2.0**-40])


def test_values_below_a_step_do_not_vanish():
  found = _sum_computation((1.0,))([np.array([1e-200])] * 7)
  assert found[0] == 7 * 2.0**-42


def test_no_cost_and_no_client_make_no_sum():
  compute = _sum_computation(_UPPER)
  zero = np.zeros(len(_UPPER))
  assert not np.any(compute([zero] * 7))
  assert not np.any(compute([-0.0 * zero]))
  assert not np.any(compute([]))


def test_a_bound_of_zero_sums_zeros():
  compute = _sum_computation((0.0, 1.0))
  found = compute([np.array([0.0, 0.5])] * 2)
  np.testing.assert_array_equal(found, [0.0, 1.0])


@pytest.mark.parametrize('bad', [np.nan, np.inf, math.nextafter(1.0, 2.0)])
def test_a_value_above_the_bound_makes_the_sum_infinite_and_only_that(bad):
  values = [np.array([0.25, 0.25]), np.array([bad, 0.25])]
  found = _sum_computation((1.0, 1.0))(values)
  np.testing.assert_array_equal(found, [np.inf, 0.5])


def test_a_negative_value_counts_as_zero():
  values = [np.array([-3.0]), np.array([-np.inf]), np.array([0.5])]
  assert _sum_computation((1.0,))(values) == [0.5]


@pytest.mark.parametrize('max_clients', [1, 4, 7])
def test_as_many_clients_as_promised_do_not_overflow(max_clients):
  compute = _sum_computation((1.0, 3e10), max_clients)
  found = compute([np.array([1.0, 3e10])] * max_clients)
  exact = max_clients * np.array([1.0, 3e10])
  np.testing.assert_allclose(found, exact, rtol=1e-15)
  assert np.all(found >= exact)


def test_more_clients_than_promised_are_an_error():
  with pytest.raises(Exception, match='made for max_clients = 4'):
    _sum_computation((1.0, 3e10), 4)([np.zeros(2)] * 5)


@pytest.mark.parametrize('max_clients', [0, -1, 2.5])
def test_max_clients_must_be_a_positive_integer(max_clients):
  with pytest.raises(ValueError, match='max_clients must be a positive int'):
    secure_sums.resolution(1.0, max_clients)


def test_more_clients_than_there_are_bits_for_are_refused():
  with pytest.raises(ValueError, match=r'max_clients must be at most 2\*\*61'):
    secure_sums.resolution(1.0, 2**61 + 1)


@pytest.mark.parametrize('upper', [-1.0, np.inf, np.nan])
def test_bounds_must_be_finite_and_non_negative(upper):
  with pytest.raises(ValueError, match='must be finite and non-negative'):
    _sum_computation((1.0, upper))


def test_bounds_may_come_from_the_server():
  @tff.federated_computation(_at_clients([2]), _at_server([2]))
  def compute(values, upper):
    return (
      secure_sums.secure_sum(values, upper),
      secure_sums.secure_maximum(values, upper, 3, 1e-2, 1),
    )

  values = [np.array([0.3, 80.0]), np.array([0.001, 100.0])]
  total, largest = compute(values, np.array([2.0, 100.0]))
  np.testing.assert_allclose(total, [0.301, 180.0], rtol=1e-10)
  np.testing.assert_allclose(largest, [2.0, 100.0], rtol=1e-14)
  total, largest = compute(values, np.array([0.3, 99.0]))
  np.testing.assert_array_equal(total == np.inf, [False, True])
  np.testing.assert_array_equal(largest, [0.3, np.inf])
  total, largest = compute(values, np.array([0.3, np.inf]))
  np.testing.assert_array_equal(total == np.inf, [False, True])


def test_one_bound_serves_values_of_any_shape_and_float_type():
  @tff.federated_computation(_at_clients([2, 3], np.float32), _at_clients([]))
  def compute(matrix, scalar):
    return (
      secure_sums.secure_sum(matrix, 1.0),
      secure_sums.secure_maximum(matrix, 1.0, 2, 0.5, 1),
      secure_sums.secure_sum(scalar, 2.0),
      secure_sums.secure_maximum(scalar, 2.0),
    )

  matrix = np.array([[0.0, 0.25, 0.5], [0.75, 1.0, 0.0]], np.float32)
  sums, largest, total, scalar = compute([matrix] * 2, [0.5, 2.0])
  np.testing.assert_array_equal(sums, 2 * matrix.astype(np.float64))
  np.testing.assert_array_equal(largest, [[0, 0.5, 0.5], [1, 1, 0]])
  assert total == 2.5
  assert scalar == 2.0
  assert sums.dtype == largest.dtype == np.float64


# Maxima.


@pytest.mark.parametrize(
  'levels, smallest_share, passes',
  [(2, 0.1, 1), (64, 1e-12, 1), (64, 1e-12, 2), (5, 1e-20, 3)],
)
@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('count', _COUNTS)
def test_a_maximum_is_never_less_and_within_one_level(
  count, seed, levels, smallest_share, passes
):
  upper = _UPPER[1:]
  values = _values(count, upper, seed)
  compute = _maximum_computation(upper, levels, smallest_share, passes)
  found, exact = compute(list(values)), values.max(axis=0)
  assert np.all(found >= exact)
  assert np.all(found <= np.array(upper))
  factor = smallest_share ** (-1 / (levels - 1) ** passes)
  smallest = smallest_share * np.array(upper)
  limit = np.where(exact > 0, np.maximum(exact, smallest) * factor, 0.0)
  assert np.all(found <= limit * (1 + 1e-12))


def test_levels_themselves_are_not_rounded_up_further():
  compute = _maximum_computation((4.0,), 3, 1 / 16)
  for value in (0.0, 0.25, 1.0, 4.0):
    assert compute([np.array([value]), np.array([0.0])]) == [value]
  for value, level in ((1e-300, 0.25), (0.2501, 1.0), (1.0001, 4.0)):
    assert compute([np.array([value])]) == [level]


@pytest.mark.parametrize('passes', [1, 2])
def test_no_cost_and_no_client_have_the_maximum_zero(passes):
  compute = _maximum_computation((1.0, 1e5), 8, 1e-3, passes)
  assert not np.any(compute([np.zeros(2)] * 7))
  assert not np.any(compute([]))


@pytest.mark.parametrize('bad', [np.nan, np.inf, math.nextafter(1.0, 2.0)])
@pytest.mark.parametrize('passes', [1, 2])
def test_a_value_above_the_bound_makes_the_maximum_infinite(passes, bad):
  compute = _maximum_computation((1.0, 1.0), 8, 1e-3, passes)
  found = compute([np.array([0.1, 0.1]), np.array([bad, 1.0])])
  np.testing.assert_array_equal(found, [np.inf, 1.0])


@pytest.mark.parametrize('levels', [0, 1, 2.5])
def test_there_must_be_two_levels(levels):
  with pytest.raises(ValueError, match='levels must be'):
    _maximum_computation((1.0,), levels, 1e-3)


@pytest.mark.parametrize('share', [0.0, 1.0, -1.0])
def test_the_smallest_share_must_be_above_0_and_below_1(share):
  with pytest.raises(ValueError, match='smallest_share must be above 0'):
    _maximum_computation((1.0,), 4, share)


def test_there_must_be_a_pass():
  with pytest.raises(ValueError, match='passes must be a positive integer'):
    _maximum_computation((1.0,), 4, 0.1, 0)


# Updates.

_UPDATE_TYPE = tff.to_type(
  collections.OrderedDict(
    b=(np.float32, [3]), a=[(np.float32, [2, 2]), (np.float64, [])]
  )
)
_BOUND = 0.75
_STEP = 2.0**-31


def _update(seed, bound=_BOUND):
  generator = np.random.default_rng(seed)

  def part(*shape):
    return generator.uniform(-bound, bound, shape)

  return collections.OrderedDict(
    b=part(3).astype(np.float32),
    a=[part(2, 2).astype(np.float32), part()],
  )


def _flat(structure):
  leaves = tf.nest.flatten(structure)
  return np.concatenate([np.ravel(np.float64(leaf)) for leaf in leaves])


@functools.cache
def _sum_of(update_type, bound=_BOUND):
  @tff.federated_computation(tff.FederatedType(update_type, tff.CLIENTS))
  def compute(updates):
    return secure_sums.secure_update_sum(updates, bound)

  return compute


def _update_sum(updates):
  return _sum_of(_UPDATE_TYPE)(updates)


def test_the_sum_of_updates_has_their_type():
  compute = _sum_of(_UPDATE_TYPE)
  assert compute.type_signature.result == tff.FederatedType(
    _UPDATE_TYPE, tff.SERVER
  )
  tff.test.assert_not_contains_unsecure_aggregation(compute)
  assert list(compute([_update(0)])) == ['b', 'a']


@pytest.mark.parametrize('count', _COUNTS)
def test_updates_are_summed_to_within_a_step_for_each_client(count):
  updates = [_update(seed) for seed in range(count)]
  exact = sum(_flat(update) for update in updates)
  # The result's own type rounds once more.
  np.testing.assert_allclose(
    _flat(_update_sum(updates)), exact, rtol=1e-7, atol=count * _STEP
  )


@pytest.mark.parametrize('scale', [1.0, 1e-3, 1e-8, 1e-12])
def test_no_coordinate_of_a_lone_client_grows(scale):
  for seed in range(5):
    update = _update(seed, _BOUND * scale)
    before, after = _flat(update), _flat(_update_sum([update]))
    assert np.all(np.abs(after) <= np.abs(before))
    assert np.all(before * after >= 0)
    np.testing.assert_allclose(after, before, rtol=0, atol=_STEP)


def test_tffs_own_secure_sum_lets_a_norm_grow():
  # The reason not to use it: it rounds to the nearest.
  value_type = tff.TensorType(np.float32, [4])
  value = np.full(4, 0.9 * 2 * _BOUND / 2**32, np.float32)
  theirs = tff.aggregators.SecureSumFactory(_BOUND).create(value_type)
  norm = np.linalg.norm(value)
  output = theirs.next(theirs.initialize(), [value])
  assert np.linalg.norm(output.result) > 1.1 * norm
  assert np.linalg.norm(_sum_of(value_type)([value])) <= norm


def test_coordinates_beyond_the_bound_are_cut_and_others_zeroed():
  update = collections.OrderedDict(
    b=np.array([_BOUND, 2.0, -1e30], np.float32),
    a=[np.array([[np.nan, np.inf], [-np.inf, 0.5]], np.float32), -0.25],
  )
  found = _update_sum([update, update])
  np.testing.assert_array_equal(found['b'], [1.5, 1.5, -1.5])
  np.testing.assert_array_equal(found['a'][0], [[0, 0], [0, 1.0]])
  assert found['a'][1] == -0.5


def test_no_client_makes_a_sum_of_zeros():
  assert not np.any(_flat(_update_sum([])))


def test_the_bound_of_updates_may_come_from_the_server():
  @tff.federated_computation(
    _at_clients([2], np.float32), tff.FederatedType(np.float32, tff.SERVER)
  )
  def compute(updates, clip_norm):
    return secure_sums.secure_update_sum(updates, clip_norm)

  updates = [np.array([0.5, -3.0], np.float32)] * 3
  np.testing.assert_array_equal(compute(updates, 4.0), [1.5, -9.0])
  np.testing.assert_array_equal(compute(updates, 1.0), [1.5, -3.0])


def test_updates_of_integers_are_refused():
  with pytest.raises(TypeError, match='must be structures of floating-point'):
    _sum_of(tff.TensorType(np.int32, [2]))


@pytest.mark.parametrize('bound', [0.0, -1.0, np.inf, np.nan])
def test_the_bound_of_updates_must_be_positive(bound):
  with pytest.raises(ValueError, match='bound must be positive and finite'):
    secure_sums.SecureSummation(bound)


# In aggregators.


@pytest.mark.parametrize('kind', builders.KINDS)
@pytest.mark.parametrize('bound', [None, 10.0])
def test_a_private_mean_of_secure_sums_is_that_of_plain_ones(kind, bound):
  mechanism = builders.mechanism(kind, 0.7, quantile=0.5)
  plain, secure = (
    private_mean.PrivateMeanFactory(
      mechanism, noise_seed=3, summation=summation
    ).create(builders.VALUE_TYPE)
    for summation in (None, secure_sums.SecureSummation(bound))
  )
  tff.test.assert_not_contains_unsecure_aggregation(secure.next)
  states = [process.initialize() for process in (plain, secure)]
  for count in (4, 0, 1):
    vectors = [*builders.vectors(count, count), np.full(5, np.nan)]
    outputs = [
      builders.run(process, vectors, state)
      for process, state in zip((plain, secure), states)
    ]
    one, other = (builders.flat(output.result) for output in outputs)
    np.testing.assert_allclose(one, other, rtol=0, atol=2e-7)
    # Counts are exact.
    one, other = (output.measurements for output in outputs)
    assert one == other
    # A failed client takes part in a mean, with an update of zero.
    assert one['participants'] == count + (kind == 'mean')
    assert one['failed_clients'] == 1
    states = [output.state for output in outputs]


# Contexts.


def test_secure_sums_run_in_the_simulation_context():
  secure_sums.check_context()


def test_tffs_own_context_is_told_to_be_unable_to(context_before):
  with tff.framework.get_context_stack().install(context_before):
    sentence = r'cannot run secure sums.*use_simulation_context\(\)'
    with pytest.raises(RuntimeError, match=sentence):
      secure_sums.check_context()
