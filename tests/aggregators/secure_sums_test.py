"""Tests of secure sums and maxima, on TFF's runtime with plain sums inside."""

import collections
import fractions
import functools
import math

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp.accounting import mean_bounds
from tf_bdp.aggregators import secure_sums
from tf_bdp.learning import processes
from tf_bdp.ops import client_costs

# From what is almost nothing to the worst cases of the highest orders.
_UPPER = (1e-280, 1e-9, 0.3, 1.0, 1.0 + 2**-52, 1024.0, 1e5, 1e11)
_COUNTS = (1, 2, 7)


@pytest.fixture(scope='module', autouse=True)
def context_before():
  """Sets the simulation's context; gives the one that was set before."""
  before = tff.framework.get_context_stack().current
  secure_sums.set_simulation_context()
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
def _update_process():
  factory = secure_sums.SecureUpdateSumFactory(_BOUND)
  assert isinstance(factory, tff.aggregators.UnweightedAggregationFactory)
  return factory.create(_UPDATE_TYPE)


def _update_sum(updates):
  return _update_process().next((), updates).result


def test_the_sum_of_updates_has_the_types_of_an_unweighted_aggregation():
  process = _update_process()
  assert isinstance(process, tff.templates.AggregationProcess)
  assert not process.is_weighted
  signature = process.next.type_signature
  assert signature.parameter[1] == tff.FederatedType(_UPDATE_TYPE, tff.CLIENTS)
  assert signature.result.result == tff.FederatedType(_UPDATE_TYPE, tff.SERVER)
  assert signature.result.measurements == tff.FederatedType((), tff.SERVER)
  output = process.next(process.initialize(), [_update(0)])
  assert list(output.result) == ['b', 'a']
  assert output.measurements == ()


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
  ours = secure_sums.SecureUpdateSumFactory(_BOUND).create(value_type)
  norm = np.linalg.norm(value)
  output = theirs.next(theirs.initialize(), [value])
  assert np.linalg.norm(output.result) > 1.1 * norm
  output = ours.next(ours.initialize(), [value])
  assert np.linalg.norm(output.result) <= norm


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
  factory = secure_sums.SecureUpdateSumFactory(1.0)
  with pytest.raises(TypeError, match='must be structures of floating-point'):
    factory.create(tff.TensorType(np.int32, [2]))


@pytest.mark.parametrize('bound', [0.0, -1.0, np.inf, np.nan])
def test_the_bound_of_updates_must_be_positive(bound):
  with pytest.raises(ValueError, match='bound must be positive and finite'):
    secure_sums.SecureUpdateSumFactory(bound)


# Whole learning processes.

_SPEC = (
  tf.TensorSpec([None, 3], tf.float32),
  tf.TensorSpec([None], tf.int32),
)
_ORDERS = (1, 2, 8, 32)
_PROBABILITY = 0.3
_WORST_SQUARED_DISTANCE = 4.0
_MOST_CLIENTS = 64


def _model_fn():
  keras_model = tf.keras.Sequential(
    [
      tf.keras.layers.Input((3,)),
      tf.keras.layers.Dense(2, kernel_initializer='zeros'),
    ]
  )
  return tff.learning.models.from_keras_model(
    keras_model,
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    input_spec=_SPEC,
  )


def _dataset(client):
  generator = np.random.default_rng(client)
  features = generator.normal(size=(4, 3)).astype(np.float32)
  labels = generator.integers(0, 2, 4).astype(np.int32)
  return tf.data.Dataset.from_tensor_slices((features, labels)).batch(4)


def _costs_of(update):
  """ℓ of the client at the distance of its norm, and its worst case."""
  parts = [tf.reduce_sum(tf.square(part)) for part in tf.nest.flatten(update)]
  distance = tf.minimum(tf.add_n(parts), _WORST_SQUARED_DISTANCE)
  costs = client_costs.log_moments(
    tf.stack([tf.cast(distance, tf.float64), _WORST_SQUARED_DISTANCE]),
    _PROBABILITY,
    _ORDERS,
  )
  return costs[0], costs[1]


class _SumWithCosts(tff.aggregators.UnweightedAggregationFactory):
  """Sums updates, and costs that the clients compute.

  It measures the costs themselves as well, to compare with.
  """

  def create(self, value_type):
    inner = secure_sums.SecureUpdateSumFactory(10.0).create(value_type)
    vector = tff.TensorType(np.float64, [len(_ORDERS)])

    @tff.tensorflow.computation(value_type)
    def costs_of(update):
      return _costs_of(update)[0]

    @tff.tensorflow.computation()
    def worst_case():
      return _costs_of([tf.zeros([1])])[1]

    @tff.tensorflow.computation(vector, vector)
    def moments(costs, scale):
      return tf.concat(client_costs.scaled_moments(costs, scale), axis=0)

    @tff.federated_computation(
      inner.initialize.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
    )
    def next_fn(state, value):
      output = inner.next(state, value)
      costs = tff.federated_map(costs_of, value)
      worst = tff.federated_eval(worst_case, tff.SERVER)
      scale = secure_sums.secure_maximum(costs, worst)
      shares = tff.federated_map(
        moments, (costs, tff.federated_broadcast(scale))
      )
      measured = collections.OrderedDict(
        clients=tff.federated_secure_sum(
          tff.federated_value(1, tff.CLIENTS), 1
        ),
        scale=scale,
        sums=secure_sums.secure_sum(shares, 1.0, _MOST_CLIENTS),
        worst=worst,
        costs=tff.aggregators.federated_sample(costs, 100),
      )
      return tff.templates.MeasuredProcessOutput(
        output.state, output.result, tff.federated_zip(measured)
      )

    return tff.templates.AggregationProcess(inner.initialize, next_fn)


def test_a_learning_process_learns_as_with_plain_sums():
  secure, plain = (
    processes.build_fed_sgd(_model_fn, factory)
    for factory in (
      secure_sums.SecureUpdateSumFactory(10.0),
      tff.aggregators.SumFactory(),
    )
  )
  weights = []
  for process in (secure, plain):
    state = process.initialize()
    for cohort in ((0, 1, 2), (3, 4)):
      state = process.next(state, [_dataset(client) for client in cohort]).state
    weights.append(_flat(process.get_model_weights(state).trainable))
  assert np.linalg.norm(weights[1]) > 0.01
  np.testing.assert_allclose(*weights, rtol=0, atol=1e-7)


def test_costs_of_a_learning_process_leave_as_sums_that_bound_their_mean():
  process = processes.build_fed_sgd(_model_fn, _SumWithCosts())
  output = process.next(
    process.initialize(), [_dataset(client) for client in range(7)]
  )
  measured = output.metrics['aggregator']
  costs = np.asarray(measured['costs'])
  assert costs.shape == (7, len(_ORDERS))
  assert np.all(np.asarray(measured['scale']) >= costs.max(axis=0))
  first, second = np.split(np.asarray(measured['sums']), 2)
  found = client_costs.bound_from_sums(
    int(measured['clients']),
    first,
    second,
    measured['worst'],
    1e-2,
    'student_t',
    measured['scale'],
    secure_sums.resolution(1.0, _MOST_CLIENTS),
  )
  exact = mean_bounds.student_t(costs, 1e-2, np.asarray(measured['worst']))
  assert np.all(exact < np.asarray(measured['worst']))
  assert np.all(found >= exact)
  np.testing.assert_allclose(found, exact, rtol=1e-6)


# Contexts.


def test_secure_sums_run_in_the_simulation_context():
  secure_sums.check_context()


def test_tffs_own_context_is_told_to_be_unable_to(context_before):
  with tff.framework.get_context_stack().install(context_before):
    sentence = r'cannot run secure sums.*set_simulation_context\(\)'
    with pytest.raises(RuntimeError, match=sentence):
      secure_sums.check_context()
