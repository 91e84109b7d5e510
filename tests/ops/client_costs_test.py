"""Tests of the clients' costs against the accountant's own, on TFF's runtime."""

import functools
import math

import hypothesis
import mpmath
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
from hypothesis import strategies as st

from tests.accounting import oracles
from tf_bdp.accounting import accountant, mean_bounds, sampled_gaussian
from tf_bdp.ops import client_costs

_ORDERS = (1, 2, 3, 7, 32, 128, 512)
_PROBABILITIES = (0, 1e-6, 1e-4, 0.00427, 0.1, 0.5, 0.9, 0.999999, 1)
_SQUARED_DISTANCES = (0, 1e-12, 1e-6, 1e-3, 0.04, 1, 7.3, 150, 1e4, 1e6)
_ESTIMATORS = client_costs.ESTIMATORS
_BOUNDS = {
  'student_t': mean_bounds.student_t,
  'bernstein': mean_bounds.bernstein,
}


@functools.cache
def _log_moments_computation(orders):
  @tff.tensorflow.computation(tff.TensorType(np.float64, [None]), np.float64)
  def compute(squared_distances, q):
    return client_costs.log_moments(squared_distances, q, orders)

  return compute


def _log_moments(squared_distances, q, orders=_ORDERS):
  compute = _log_moments_computation(tuple(orders))
  return compute(np.asarray(squared_distances, np.float64), np.float64(q))


@functools.cache
def _bound_computation(units, orders, failure_probability, estimator, power):
  @tff.tensorflow.computation(
    tff.TensorType(np.float64, [units, orders]),
    tff.TensorType(np.bool_, [units]),
    tff.TensorType(np.float64, [orders]),
  )
  def compute(log_values, usable, log_worst_case):
    return client_costs.bound_of_mean(
      log_values, usable, failure_probability, estimator, log_worst_case, power
    )

  return compute


def _bound(log_values, usable, delta, estimator, worst, power=1):
  compute = _bound_computation(*log_values.shape, delta, estimator, power)
  return compute(log_values, np.asarray(usable), np.asarray(worst))


@tff.tensorflow.computation(
  tff.TensorType(np.float64, [None]), tff.TensorType(np.float64, [None])
)
def _scaled_moments(log_values, log_scale):
  return client_costs.scaled_moments(log_values, log_scale)


def _sums(log_values, scale):
  """The sums of all clients' scaled moments, [orders] each."""
  scale = np.broadcast_to(np.asarray(scale, np.float64), log_values.shape)
  first, second = _scaled_moments(log_values.ravel(), scale.ravel())
  shape = log_values.shape
  return first.reshape(shape).sum(axis=0), second.reshape(shape).sum(axis=0)


def _sample(units, largest, seed=0):
  """ℓ of units at orders whose costs are of very different size."""
  generator = np.random.default_rng(seed)
  return generator.uniform(0, 1, (units, len(largest))) * np.array(largest)


# Log-moments.


def _assert_the_accountants(distances, q, orders):
  actual = _log_moments(distances, q, orders)
  expected = sampled_gaussian.log_moments(distances, q, orders)
  # The accountant's own error is up to 1e-12 of the excess.
  np.testing.assert_allclose(actual, expected, rtol=2e-12, atol=0)


def test_log_moments_are_the_accountants():
  for q in _PROBABILITIES:
    _assert_the_accountants(_SQUARED_DISTANCES, q, _ORDERS)


@pytest.mark.parametrize('q', _PROBABILITIES)
def test_log_moments_equal_the_sum_in_sixty_digits(q):
  distances, orders = (1e-12, 1e-3, 0.04, 7.3, 1e6), (1, 2, 32, 512)
  actual = _log_moments(distances, q, orders)
  expected = oracles.log_moments(distances, q, orders)
  np.testing.assert_allclose(actual, expected, rtol=1e-13, atol=0)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
  log_distances=st.lists(st.floats(-14, 6), min_size=1, max_size=20),
  log_q=st.floats(-8, 0),
)
def test_log_moments_are_the_accountants_at_random_places(log_distances, log_q):
  _assert_the_accountants(
    10 ** np.array(log_distances), 10**log_q, accountant.DEFAULT_ORDERS
  )


def test_who_moves_nothing_or_never_takes_part_costs_exactly_nothing():
  for q in _PROBABILITIES:
    assert not np.any(_log_moments([0.0, 0.0], q))
  assert not np.any(_log_moments(_SQUARED_DISTANCES, 0))


def test_everybody_taking_part_costs_what_the_plain_gaussian_does():
  actual = _log_moments(_SQUARED_DISTANCES, 1)
  expected = oracles.gaussian_costs(_SQUARED_DISTANCES, _ORDERS)
  np.testing.assert_allclose(actual, expected, rtol=2e-14, atol=0)


def test_distances_that_are_no_numbers_have_no_small_cost():
  costs = _log_moments([np.nan, np.inf, 1.0], 0.1)
  assert np.all(np.isnan(costs[0]))
  assert np.all(np.isinf(costs[1]))
  assert np.all(np.isfinite(costs[2]))
  assert np.all(np.isnan(_log_moments([1.0], 1.5)))
  assert np.all(np.isnan(_log_moments([1.0], np.nan)))


def test_pythons_numbers_keep_their_bits():
  # TensorFlow takes them for float32 by itself.
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    found = session.run(client_costs.log_moments([0.04, 7.3], 0.00427, _ORDERS))
  np.testing.assert_array_equal(found, _log_moments([0.04, 7.3], 0.00427))


def test_a_thousand_units_at_all_orders_take_less_than_200_megabytes():
  @tf.function(
    input_signature=[
      tf.TensorSpec([1000], tf.float64),
      tf.TensorSpec([], tf.float64),
    ]
  )
  def compute(squared_distances, q):
    orders = accountant.DEFAULT_ORDERS
    return client_costs.log_moments(squared_distances, q, orders)

  # As if nothing were freed before the end.
  total = 0
  for operation in compute.get_concrete_function().graph.get_operations():
    for tensor in operation.outputs:
      assert tensor.shape.num_elements() is not None
      total += tensor.shape.num_elements() * tensor.dtype.size
  assert 1000 * 512 * 8 < total < 200e6


@pytest.mark.parametrize('orders', [(), (0, 1), (2, 1), (1.5,)])
def test_orders_that_are_none_are_refused(orders):
  with pytest.raises(ValueError, match='orders must be'):
    client_costs.log_moments(tf.zeros([2], tf.float64), 0.1, orders)


def test_a_probability_that_is_none_is_refused():
  with pytest.raises(ValueError, match='participation_probability must be'):
    client_costs.log_moments(tf.zeros([2], tf.float64), 1.1, (1, 2))


# Bounds of a client's mean.

# From costs that are lost beside one to costs whose exponentials overflow.
_LARGEST = (1e-12, 1e-4, 1.0, 30.0, 299.0, 2000.0, 1e5, 1e9)
_WORST = (1e-11, 1.0, 1.5, 35.0, 700.0, 2500.0, 1.3e5, 1e9)


# Each pair of these is a computation of its own, which takes its time.
@pytest.mark.parametrize(
  'failure_probability, power', [(0.05, 1), (1e-10, 3), (1e-6, 100)]
)
@pytest.mark.parametrize('estimator', _ESTIMATORS)
@hypothesis.settings(max_examples=12)
@hypothesis.given(count=st.integers(3, 40), seed=st.integers(0, 2**32 - 1))
def test_a_bound_is_the_accountants_of_the_usable_units(
  estimator, failure_probability, power, count, seed
):
  log_values = _sample(40, _LARGEST, seed)
  usable = np.zeros(40, bool)
  usable[np.random.default_rng(seed).choice(40, count, replace=False)] = True
  actual = _bound(
    log_values, usable, failure_probability, estimator, _WORST, power
  )
  worst = power * np.array(_WORST)
  expected = _BOUNDS[estimator](
    power * log_values[usable], failure_probability, worst
  )
  np.testing.assert_allclose(actual, expected / power, rtol=1e-12, atol=0)


@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_the_costs_of_units_that_are_not_usable_do_not_matter(estimator):
  log_values = _sample(8, _LARGEST)
  usable = np.arange(8) < 5
  expected = _bound(log_values, usable, 1e-3, estimator, _WORST)
  for other in (0.0, np.nan, np.inf, 1e300):
    log_values[5:] = other
    actual = _bound(log_values, usable, 1e-3, estimator, _WORST)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_fewer_than_three_usable_units_cost_the_worst_case(estimator):
  log_values = _sample(8, _LARGEST)
  for count in (0, 1, 2):
    found = _bound(log_values, np.arange(8) < count, 0.1, estimator, _WORST)
    np.testing.assert_array_equal(found, _WORST)


@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_a_cost_that_is_no_number_counts_as_the_worst_case(estimator):
  log_values = _sample(40, _LARGEST)
  usable = np.ones(40, bool)
  log_values[7] = _WORST
  expected = _bound(log_values, usable, 0.3, estimator, _WORST)
  others = usable & (np.arange(40) != 7)
  without = _bound(log_values, others, 0.3, estimator, _WORST)
  assert np.all(expected > without)
  for other in (np.nan, np.inf, 2e9):
    log_values[7] = other
    actual = _bound(log_values, usable, 0.3, estimator, _WORST)
    np.testing.assert_array_equal(actual, expected)


def test_a_bound_is_never_above_the_worst_case():
  log_values = _sample(3, _LARGEST)
  worst = log_values.max(axis=0)
  worst = worst + np.minimum(1e-3, worst / 100)
  # With two degrees of freedom the quantile is above 70 000.
  found = _bound(log_values, [True] * 3, 1e-10, 'student_t', worst)
  np.testing.assert_array_equal(found, worst)


def test_students_bound_of_equal_costs_is_their_cost():
  # Many, for the mean of equal numbers is mostly exact; with eight degrees of
  # freedom, the quantile is above 1000.
  costs = 10 ** np.random.default_rng(0).uniform(-9, 5, 300)
  log_values = np.tile(costs, (9, 1))
  found = _bound(log_values, [True] * 9, 1e-25, 'student_t', costs + 1)
  np.testing.assert_allclose(found, costs, rtol=1e-14)
  zero = _bound(0 * log_values, [True] * 9, 1e-25, 'student_t', costs + 1)
  assert not np.any(zero)


@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_a_worst_case_of_zero_costs_nothing(estimator):
  found = _bound(np.zeros((4, 2)), [True] * 4, 0.1, estimator, np.zeros(2))
  np.testing.assert_array_equal(found, [0.0, 0.0])


def test_a_number_of_units_that_is_not_static_is_refused():
  @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float64)])
  def compute(log_values):
    return client_costs.bound_of_mean(
      log_values, tf.constant([True] * 3), 0.1, 'student_t', [1.0, 1.0]
    )

  with pytest.raises(ValueError, match='static number of units'):
    compute.get_concrete_function()


@pytest.mark.parametrize(
  'change, sentence',
  [
    ({'failure_probability': 0.0}, 'failure_probability must be above 0'),
    ({'estimator': 'betting'}, "estimator must be one of .* Found 'betting'"),
    ({'power': 0}, 'power must be a positive integer'),
  ],
)
def test_settings_of_bounds_that_make_no_sense_are_refused(change, sentence):
  settings = {'failure_probability': 0.1, 'estimator': 'student_t', **change}
  with pytest.raises(ValueError, match=sentence):
    client_costs.bound_of_mean(
      np.zeros((3, 2)), [True] * 3, log_worst_case=[1.0, 1.0], **settings
    )


# Scaled moments and what the server makes of their sums.


def _exact_share(log_value, log_scale):
  with mpmath.workdps(40):
    log_value, log_scale = mpmath.mpf(log_value), mpmath.mpf(log_scale)
    return mpmath.expm1(log_value) / mpmath.expm1(log_scale)


@hypothesis.example(log_scale=math.log10(709.0))
@hypothesis.given(log_scale=st.floats(-15, 9))
def test_scaled_moments_are_the_shares_in_forty_digits_rounded_up(log_scale):
  scale = 10**log_scale
  shares = np.array([1.0, 1 - 1e-15, 1 - 1e-9, 0.999, 0.9, 0.5, 1e-3, 1e-12])
  log_values = scale * shares
  first, second = _scaled_moments(log_values, np.full(8, scale))
  tiny = np.finfo(float).tiny
  assert np.all((first > 0) & (first <= 1) & (second > 0) & (second <= 1))
  for log_value, share, square in zip(log_values, first, second):
    exact = _exact_share(log_value, scale)
    assert exact <= share <= max(exact * (1 + 2e-12), tiny)
    assert exact**2 <= square <= max(exact**2 * (1 + 4e-12), tiny)


def test_scaled_moments_end_at_exactly_zero_and_one():
  scale = np.array([1e-9, 2.0, 1e5, 0.0])
  for log_values, expected in (
    (0 * scale, [0.0, 0.0, 0.0, 0.0]),
    (scale, [1.0, 1.0, 1.0, 0.0]),
    (scale + 1, [1.0, 1.0, 1.0, 0.0]),
    (np.nan * scale, [1.0, 1.0, 1.0, 0.0]),
  ):
    for moment in _scaled_moments(log_values, scale):
      np.testing.assert_array_equal(moment, expected)


def test_costs_that_have_no_finite_scale_are_all_of_it():
  costs = np.array([0.0, 1e-9, 1.0, 1e5, np.nan])
  for moment in _scaled_moments(costs, np.full(5, np.inf)):
    np.testing.assert_array_equal(moment, [0.0, 1.0, 1.0, 1.0, 1.0])


# Of a sample with a deviation, the variance keeps most of its digits.
@pytest.mark.parametrize('estimator', _ESTIMATORS)
@hypothesis.settings(max_examples=20)
@hypothesis.given(
  failure_probability=st.sampled_from([0.05, 1e-6]),
  count=st.integers(3, 200),
  own_scale=st.booleans(),
)
def test_a_bound_from_sums_is_the_accountants_of_the_clients_values(
  estimator, failure_probability, count, own_scale
):
  log_values = _sample(count, _LARGEST, seed=count)
  scale = log_values.max(axis=0) * 1.02 if own_scale else np.array(_WORST)
  actual = client_costs.bound_from_sums(
    count,
    *_sums(log_values, scale),
    _WORST,
    failure_probability,
    estimator,
    log_scale=scale if own_scale else None,
  )
  expected = _BOUNDS[estimator](
    log_values, failure_probability, np.array(_WORST)
  )
  assert np.all(actual >= expected)
  # Shares of exp(-600) have squares below the smallest float64, and samples as
  # far below their scale have no deviation that their sums could tell.
  known = np.array(_LARGEST) < 100 if own_scale else np.array(_LARGEST) < 20
  np.testing.assert_allclose(actual[known], expected[known], rtol=1e-8)


@pytest.mark.parametrize('count', [1, 2, 7])
def test_clients_need_only_plain_sums_and_maxima_of_tff(count):
  vector = tff.TensorType(np.float64, [len(_ORDERS)])

  @tff.tensorflow.computation(np.float64)
  def costs_of(squared_distance):
    distances = squared_distance[tf.newaxis]
    return client_costs.log_moments(distances, 0.1, _ORDERS)[0]

  moments = tff.tensorflow.computation(
    client_costs.scaled_moments, [vector, vector]
  )

  @tff.federated_computation(tff.FederatedType(np.float64, tff.CLIENTS))
  def compute(squared_distances):
    costs = tff.federated_map(costs_of, squared_distances)
    scale = tff.federated_max(costs)
    shares = tff.federated_map(moments, (costs, tff.federated_broadcast(scale)))
    return scale, tff.federated_sum(shares)

  distances = np.random.default_rng(count).uniform(0.01, 0.02, count)
  scale, (first, second) = compute(list(distances))
  costs = sampled_gaussian.log_moments(distances, 0.1, _ORDERS)
  worst = sampled_gaussian.log_moments([0.04], 0.1, _ORDERS)[0]
  np.testing.assert_allclose(scale, costs.max(axis=0), rtol=2e-12)
  found = client_costs.bound_from_sums(
    count, first, second, worst, 0.1, 'student_t', scale
  )
  if count < 3:
    np.testing.assert_array_equal(found, worst)
  else:
    # A little more, for the accountant's own log-moments are rounded.
    exact = mean_bounds.student_t(costs, 0.1, worst)
    assert np.all((found >= exact * (1 - 1e-12)) & (exact < worst))
    np.testing.assert_allclose(found, exact, rtol=1e-8)


@pytest.mark.parametrize('count', [3, 10, 1000])
def test_equal_clients_cost_little_more_than_one_of_them(count):
  log_values = np.tile(np.array(_LARGEST), (count, 1))
  scale = np.array(_LARGEST) + np.minimum(0.5, np.array(_LARGEST) / 20)
  found = client_costs.bound_from_sums(
    count, *_sums(log_values, scale), _WORST, 0.01, 'student_t', scale
  )
  exact = mean_bounds.student_t(log_values, 0.01)
  assert np.all(found >= exact)
  # The deviation that rounding admits is about the root of 4e-12.
  np.testing.assert_allclose(found, exact, rtol=2e-5)


@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_no_rounding_of_the_largest_costs_lowers_the_bound(estimator):
  generator = np.random.default_rng(8)
  worst = 10 ** generator.uniform(-3, 9, 2000)
  log_values = worst - generator.uniform(0, np.minimum(worst, 9), (60, 2000))
  found = client_costs.bound_from_sums(
    60, *_sums(log_values, worst), worst, 0.1, estimator
  )
  exact = _BOUNDS[estimator](log_values, 0.1, worst)
  assert np.all(found >= exact)
  assert np.count_nonzero(exact < worst) > 1000


def test_a_mean_that_was_rounded_up_does_not_hide_a_deviation():
  # Shares as far above the truth as `scaled_moments` may be, squares at it.
  shares = 0.5 + np.array([[-1.0], [0.0], [1.0]]) * np.logspace(-9, -5, 50)
  worst = np.full(50, 3.0)
  found = client_costs.bound_from_sums(
    3,
    np.sum(shares, axis=0) * (1 + 1e-12),
    np.sum(shares**2, axis=0),
    worst,
    0.01,
    'student_t',
  )
  log_values = np.log1p(shares * np.expm1(3.0))
  assert np.all(found >= mean_bounds.student_t(log_values, 0.01))


@pytest.mark.parametrize('resolution', [2.0**-42, 1e-6, 1e-2])
@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_shares_that_were_rounded_up_never_lower_the_bound(
  estimator, resolution
):
  generator = np.random.default_rng(5)
  worst = np.full(400, 3.0)
  for count in (3, 7, 50):
    # From far apart to almost equal, which is where variances cancel.
    spread = 10 ** generator.uniform(-9, 0, 400)
    middle = generator.uniform(0, 2, 400)
    log_values = middle + spread * generator.uniform(0, 1, (count, 400))
    wide = np.tile(worst, (count, 1))
    moments = _scaled_moments(log_values.ravel(), wide.ravel())
    sums = [
      (np.ceil(part / resolution) * resolution).reshape(count, -1).sum(axis=0)
      for part in moments
    ]
    found = client_costs.bound_from_sums(
      count, *sums, worst, 1e-6, estimator, resolution=resolution
    )
    exact = _BOUNDS[estimator](log_values, 1e-6, worst)
    assert np.all(found >= exact)
    assert np.all(found <= worst)


@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_clients_without_cost_cost_what_the_accountant_says(estimator):
  zero = np.zeros((20, len(_WORST)))
  found = client_costs.bound_from_sums(
    20, *_sums(zero, _WORST), _WORST, 0.01, estimator
  )
  expected = _BOUNDS[estimator](zero, 0.01, np.array(_WORST))
  np.testing.assert_allclose(found, expected, rtol=1e-12)
  assert np.any(found) == (estimator == 'bernstein')


@pytest.mark.parametrize('estimator', _ESTIMATORS)
def test_sums_that_say_nothing_cost_the_worst_case(estimator):
  worst = np.array([1.0, 1e5])
  fine = np.array([0.5, 0.5])
  for count, first, second in (
    (0, 0 * fine, 0 * fine),
    (2, fine, fine),
    (5, np.inf * fine, fine),
    (5, fine, np.nan * fine),
    (5, np.inf * fine, np.inf * fine),
  ):
    found = client_costs.bound_from_sums(
      count, first, second, worst, 0.4, estimator
    )
    np.testing.assert_array_equal(found, worst)


def test_a_sum_of_one_order_that_says_nothing_leaves_the_others_alone():
  log_values = _sample(10, (1.0, 1.0))
  first, second = _sums(log_values, (2.0, 2.0))
  expected = client_costs.bound_from_sums(
    10, first, second, (2.0, 2.0), 0.05, 'student_t'
  )
  first[0] = np.inf
  found = client_costs.bound_from_sums(
    10, first, second, (2.0, 2.0), 0.05, 'student_t'
  )
  assert found[0] == 2.0 > expected[0]
  assert found[1] == expected[1]


def test_settings_of_bounds_from_sums_that_make_no_sense_are_refused():
  with pytest.raises(ValueError, match='failure_probability must be above 0'):
    client_costs.bound_from_sums(5, [0.1], [0.1], [1.0], 1.0, 'student_t')
  with pytest.raises(ValueError, match='estimator must be one of'):
    client_costs.bound_from_sums(5, [0.1], [0.1], [1.0], 0.1, 'population')


def test_a_bound_from_sums_holds_the_quantile_of_equation_5():
  # Shares 0 and 1 in equal parts have mean and deviation 1/2.
  worst = math.log(3.0)
  found = client_costs.bound_from_sums(
    100, [50.0], [50.0], [worst], 1e-3, 'student_t'
  )
  # Student's t with 99 degrees of freedom: F⁻¹(0.999) = 3.1746.
  share = 0.5 + 3.1746 * 0.5 / math.sqrt(99)
  assert found[0] == pytest.approx(math.log(1 + 2 * share), rel=1e-5)
