"""Tests of the bounds of a mean: formulas, extremes, and worlds of known truth.

In the Monte-Carlo worlds every column is one draw of a sample, so that one call
measures many draws.
"""

import json
import warnings

import hypothesis
import mpmath
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from tests.accounting import oracles
from tf_bdp.accounting import mean_bounds

_DISTRIBUTION_FREE = ('bernstein', 'betting')
_every_estimator = pytest.mark.parametrize(
  'estimator', list(mean_bounds.ESTIMATORS)
)


def _bound(estimator, log_values, failure_probability, log_worst_case=None):
  kind = mean_bounds.ESTIMATORS[estimator]
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    sample = kind.from_sample(log_values, log_worst_case)
    return sample.log_upper_bound(failure_probability)


def _sample(units, orders, largest=2.0, seed=0):
  return np.random.default_rng(seed).uniform(0, largest, (units, orders))


@pytest.mark.parametrize('units', [3, 10, 1000])
@pytest.mark.parametrize('failure_probability', [0.05, 1e-5, 1e-10])
def test_student_t_is_equation_5(units, failure_probability):
  log_values = _sample(units, 4)
  y = np.exp(log_values)
  quantile = stats.t.isf(failure_probability, units - 1)
  expected = np.mean(y, axis=0) + quantile * np.std(y, axis=0) / np.sqrt(
    units - 1
  )
  actual = mean_bounds.student_t(log_values, failure_probability)
  np.testing.assert_allclose(actual, np.log(expected), rtol=1e-10)


@hypothesis.example(freedom=9999, log_failure=-25.0)
@hypothesis.given(freedom=st.integers(2, 9999), log_failure=st.floats(-25, -1))
def test_student_t_uses_the_right_quantile_far_in_the_tail(
  freedom, log_failure
):
  failure_probability = 10**log_failure
  # Values 0 and 1 in equal parts have mean and deviation 1/2, so that the
  # quantile can be read off the bound.
  units = freedom + 1
  log_values = np.zeros((units, 1))
  log_values[: units // 2] = np.log(2.0)
  ones = (units // 2) / units
  deviation = np.sqrt(ones * (1 - ones))
  bound = mean_bounds.student_t(log_values, failure_probability)[0]
  quantile = (np.expm1(bound) - ones) / deviation * np.sqrt(freedom)
  with mpmath.workdps(40):
    argument = freedom / (freedom + mpmath.mpf(quantile) ** 2)
    tail = 0.5 * mpmath.betainc(
      mpmath.mpf(freedom) / 2, 0.5, 0, argument, regularized=True
    )
  assert float(tail) == pytest.approx(failure_probability, rel=1e-5)


@pytest.mark.parametrize('units', [3, 10, 1000])
@pytest.mark.parametrize('failure_probability', [0.05, 1e-10])
def test_bernstein_is_theorem_4_of_maurer_and_pontil(
  units, failure_probability
):
  log_values = _sample(units, 4)
  worst = np.array([2.0, 2.5, 3.0, 9.0])
  x = np.expm1(log_values) / np.expm1(worst)
  log_term = np.log(2 / failure_probability)
  shares = np.mean(x, axis=0) + np.sqrt(
    2 * np.var(x, axis=0, ddof=1) * log_term / units
  )
  shares += 7 * log_term / (3 * (units - 1))
  expected = np.log1p(np.minimum(shares, 1) * np.expm1(worst))
  actual = mean_bounds.bernstein(log_values, failure_probability, worst)
  np.testing.assert_allclose(actual, expected, rtol=1e-10)


@pytest.mark.parametrize('units', [3, 20, 60])
@pytest.mark.parametrize('failure_probability', [0.05, 1e-6])
def test_betting_is_what_a_slow_bisection_finds(units, failure_probability):
  log_values = _sample(units, 2)
  log_values[:, 1] = 0.01
  worst = np.array([2.0, 3.0])
  x = np.expm1(log_values) / np.expm1(worst)
  shares = [oracles.betting_bound(c, failure_probability) for c in x.T]
  expected = np.log1p(np.array(shares) * np.expm1(worst))
  actual = mean_bounds.betting(log_values, failure_probability, worst)
  np.testing.assert_allclose(actual, expected, rtol=1e-7)


@pytest.mark.parametrize('failure_probability', [0.05, 1e-6, 1e-15])
def test_bounds_that_saw_no_outlier_still_reckon_with_one(failure_probability):
  # None can be below p₀ y_max, p₀ = ln(1/δ′)/m, up
  # to the second order of p₀: an outlier of probability p stays unseen in m
  # draws with (1 - p)^m = δ′.
  units = 1000
  log_values = np.zeros((units, 1))
  worst = np.array([20.0])
  unseen = -np.expm1(np.log(failure_probability) / units)
  smallest = np.log1p(unseen * np.expm1(worst))
  for estimator in _DISTRIBUTION_FREE:
    assert _bound(estimator, log_values, failure_probability, worst) >= smallest


@_every_estimator
def test_huge_costs_stay_finite(estimator):
  log_values = 1e6 + _sample(50, 3, largest=100.0)
  worst = np.array([1e6 + 101, 2e6, 1e9])
  bound = _bound(estimator, log_values, 1e-8, worst)
  assert np.all(np.isfinite(bound))
  assert np.all(bound <= worst)
  assert np.all(bound >= oracles.log_mean_exp(log_values) - 1e-9)


@_every_estimator
def test_the_bound_is_the_same_function_on_both_sides_of_the_rescaling(
  estimator,
):
  # Far above 1, y - 1 = y: raising all costs by 100 raises the bound by 100.
  log_values = 260 + _sample(50, 1, largest=5.0)
  worst = np.array([266.0])
  low = _bound(estimator, log_values, 1e-8, worst)
  high = _bound(estimator, log_values + 100, 1e-8, worst + 100)
  np.testing.assert_allclose(high - low, 100, rtol=1e-12)


@_every_estimator
def test_small_costs_keep_their_relative_accuracy(estimator):
  # To first order all bounds are linear in ℓ: ℓ of 1e-15 are those of 1e-3 in
  # small, up to ℓ² ~ 1e-6.
  log_values = _sample(50, 2)
  small = _bound(estimator, 1e-15 * log_values, 1e-3, np.full(2, 3e-15))
  large = _bound(estimator, 1e-6 * log_values, 1e-3, np.full(2, 3e-6))
  np.testing.assert_allclose(small / 1e-15, large / 1e-6, rtol=1e-5)
  assert np.all(small > 0)


@_every_estimator
@hypothesis.example(worst=1e-15)
@hypothesis.given(worst=st.floats(0, 1e6, allow_subnormal=False))
def test_no_bound_exceeds_the_worst_case_and_all_at_it_give_it(
  estimator, worst
):
  at_worst = _bound(estimator, np.full((10, 1), worst), 1e-9, np.array([worst]))
  np.testing.assert_allclose(at_worst, worst, rtol=1e-12)
  some = worst * _sample(10, 1, largest=1.0)
  assert _bound(estimator, some, 1e-9, np.array([worst])) <= worst


@pytest.mark.parametrize('cost', [0.0, 1e-17, 0.1, 7.7, 299.9, 1e7])
def test_student_t_of_equal_samples_is_their_mean(cost):
  for units in (3, 10, 101):
    bound = mean_bounds.student_t(np.full((units, 1), cost), 1e-12)
    assert bound[0] == pytest.approx(cost, rel=1e-12, abs=0)


def test_population_is_the_mean_itself():
  log_values = _sample(30, 3)
  actual = _bound('population', log_values, 0.5)
  expected = np.log(np.mean(np.exp(log_values), axis=0))
  np.testing.assert_allclose(actual, expected, rtol=1e-12)


@_every_estimator
def test_bounds_do_not_depend_on_the_order_of_the_units(estimator):
  log_values = _sample(200, 3)
  shuffled = np.random.default_rng(1).permutation(log_values)
  worst = np.full(3, 2.5)
  np.testing.assert_allclose(
    _bound(estimator, shuffled, 1e-6, worst),
    _bound(estimator, log_values, 1e-6, worst),
    rtol=1e-8,
  )


@pytest.mark.parametrize('estimator', ['bernstein', 'betting', 'student_t'])
def test_bounds_fall_as_they_may_fail_more_often(estimator):
  log_values, worst = _sample(200, 3), np.full(3, 2.5)
  bounds = [
    _bound(estimator, log_values, failure_probability, worst)
    for failure_probability in (1e-30, 1e-12, 1e-6, 1e-2, 0.3)
  ]
  assert np.all(np.diff(bounds, axis=0) < 0)
  assert np.all(bounds[-1] >= oracles.log_mean_exp(log_values))


@hypothesis.given(
  log_values=st.lists(st.floats(0, 3), min_size=3, max_size=30),
  unit=st.integers(0, 29),
  rise=st.floats(0, 1),
  estimator=st.sampled_from(['betting', 'population']),
)
def test_a_unit_that_costs_more_never_lowers_the_bound(
  log_values, unit, rise, estimator
):
  # Not so for student_t and bernstein, in which the deviation may fall.
  before = np.array(log_values)[:, np.newaxis]
  after = before.copy()
  after[unit % len(log_values)] += rise
  worst = np.array([4.0])
  assert _bound(estimator, after, 1e-4, worst) >= _bound(
    estimator, before, 1e-4, worst
  ) * (1 - 1e-8)


def _many_units(kind, units, seed=0):
  generator = np.random.default_rng(seed)
  if kind == 'outliers':
    return np.where(generator.random(units) < 0.02, 1.0, 1e-3)
  if kind == 'tiny':
    return generator.exponential(1e-7, units)
  if kind == 'at the worst case':
    return np.where(generator.random(units) < 0.5, 2.0, 0.0)
  return generator.beta(0.3, 3.0, units)


def _exact_betting(log_values, failure_probability, worst, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(mean_bounds, '_MOST_POINTS', 10**9)
    return mean_bounds.betting(log_values, failure_probability, worst)


@pytest.mark.parametrize(
  'kind', ['outliers', 'tiny', 'beta', 'at the worst case']
)
@pytest.mark.parametrize(
  'units, failure_probability', [(4097, 1e-9), (50_000, 0.05)]
)
def test_betting_on_points_is_never_below_the_exact_bound_and_close_to_it(
  kind, units, failure_probability, monkeypatch
):
  log_values = _many_units(kind, units)[:, np.newaxis]
  worst = np.array([2.0])
  exact = _exact_betting(log_values, failure_probability, worst, monkeypatch)
  spread = mean_bounds.betting(log_values, failure_probability, worst)
  # The root is found to 1e-10 relative, and rounded up by at most 1e-9.
  assert spread[0] >= exact[0] * (1 - 2e-9)
  assert spread[0] <= exact[0] * (1 + 1e-3)


def test_the_exact_bound_of_many_units_is_the_one_by_bisection(monkeypatch):
  # What the test above calls exact is the definition.
  log_values = _many_units('beta', 120)[:, np.newaxis]
  exact = _exact_betting(log_values, 1e-4, np.array([2.0]), monkeypatch)
  share = oracles.betting_bound(
    np.expm1(log_values[:, 0]) / np.expm1(2.0), 1e-4
  )
  assert exact[0] == pytest.approx(np.log1p(share * np.expm1(2.0)), rel=1e-7)


# Worlds: a sampler of shares in [0, 1] of the worst case, and the true mean.
_WORLDS = {
  'uniform': (lambda g, size: g.random(size), 0.5),
  'outliers of 2 %': (
    lambda g, size: np.where(g.random(size) < 0.02, 1.0, 0.01),
    0.02 + 0.98 * 0.01,
  ),
  'outliers of 0.1 %': (
    lambda g, size: (g.random(size) < 0.001).astype(float),
    0.001,
  ),
  'fair coin': (lambda g, size: (g.random(size) < 0.5).astype(float), 0.5),
  'mostly at the worst case': (
    lambda g, size: (g.random(size) < 0.97).astype(float),
    0.97,
  ),
  'long tail': (lambda g, size: g.beta(0.1, 2.0, size), 0.1 / 2.1),
}


@pytest.mark.parametrize('world', list(_WORLDS))
@pytest.mark.parametrize('estimator', _DISTRIBUTION_FREE)
@pytest.mark.parametrize('units', [5, 100])
@pytest.mark.parametrize('failure_probability', [0.05, 0.3])
def test_distribution_free_bounds_fail_no_more_often_than_they_may(
  world, estimator, units, failure_probability
):
  sampler, mean = _WORLDS[world]
  draws, worst = 1000, 3.0
  shares = sampler(np.random.default_rng(7), (units, draws))
  log_values = np.log1p(shares * np.expm1(worst))
  # The order of units does not matter, so many draws are alike.
  log_values, times = np.unique(
    np.sort(log_values, axis=0), axis=1, return_counts=True
  )
  bounds = _bound(
    estimator, log_values, failure_probability, np.full(len(times), worst)
  )
  truth = np.log1p(mean * np.expm1(worst))
  misses = np.sum(times[bounds < truth * (1 - 1e-12)])
  assert misses <= oracles.most_misses(draws, failure_probability)


def test_betting_on_points_fails_no_more_often_than_it_may():
  draws, units, worst, failure_probability = 100, 5000, 3.0, 0.1
  outliers = np.random.default_rng(8).random((units, draws)) < 0.002
  bounds = mean_bounds.betting(
    np.where(outliers, worst, 0.0), failure_probability, np.full(draws, worst)
  )
  truth = np.log1p(0.002 * np.expm1(worst))
  misses = np.count_nonzero(bounds < truth)
  assert misses <= oracles.most_misses(draws, failure_probability)


def test_student_t_misses_outliers_in_13_percent_of_draws_at_nominal_1e_10():
  # 100 draws hold none of the 2 % with probability
  # 0.98^100 = 0.133, and then nothing tells of them. Costs are continuous, so
  # that the deviation is never zero.
  draws = 20_000
  generator = np.random.default_rng(9)
  is_outlier = generator.random((100, draws)) < 0.02
  usual = generator.uniform(0.0, 0.01, (100, draws))
  log_values = np.where(is_outlier, 5.0, usual)
  mean = 0.02 * np.exp(5.0) + 0.98 * np.expm1(0.01) / 0.01
  bounds = mean_bounds.student_t(log_values, 1e-10)
  share_of_misses = np.mean(bounds < np.log(mean))
  assert share_of_misses == pytest.approx(0.98**100, abs=0.01)


@_every_estimator
def test_two_units_are_too_few(estimator):
  for units in (0, 1, 2):
    with pytest.raises(ValueError, match=r'at least 3 units. Found .* shape'):
      _bound(estimator, np.zeros((units, 4)), 0.1, np.ones(4))


@_every_estimator
def test_costs_that_are_none_are_refused(estimator):
  for value in (-1e-9, np.nan, np.inf):
    log_values = np.array([[0.1], [0.2], [value]])
    with pytest.raises(ValueError, match='finite and non-negative'):
      _bound(estimator, log_values, 0.1, np.ones(1))


@pytest.mark.parametrize('estimator', _DISTRIBUTION_FREE)
def test_distribution_free_bounds_ask_for_the_worst_case(estimator):
  for worst in (None, np.array([np.inf])):
    with pytest.raises(ValueError, match='bound needs the worst case'):
      _bound(estimator, np.ones((5, 1)), 0.1, worst)


@_every_estimator
def test_a_failure_probability_that_is_none_is_refused(estimator):
  for value in (0.0, 1.0, -0.1, 2.0, np.nan):
    with pytest.raises(ValueError, match='failure_probability must be above 0'):
      _bound(estimator, np.ones((5, 1)), value, np.full(1, 2.0))


def test_student_t_is_never_below_the_mean_or_refuses():
  # Above δ′ = 1/2 the quantile is negative, which bounds nothing from above.
  log_values = np.log([[1.1], [2.0], [9.0]])
  try:
    bound = _bound('student_t', log_values, 0.9)
  except ValueError:
    return
  assert bound >= oracles.log_mean_exp(log_values)


@_every_estimator
@pytest.mark.parametrize('units', [3, 5000])
def test_the_state_is_json_and_restores_an_equal_bound(estimator, units):
  kind = mean_bounds.ESTIMATORS[estimator]
  log_values = _sample(units, 3)
  log_values[:, 2] = 0.0
  sample = kind.from_sample(log_values, np.array([2.0, 400.0, 1e5]))
  state = json.loads(json.dumps(sample.to_state(), allow_nan=False))
  restored = kind.from_state(state, 3)
  np.testing.assert_array_equal(
    restored.log_upper_bound(1e-4), sample.log_upper_bound(1e-4)
  )
  assert restored.to_state() == sample.to_state()


def test_an_unknown_worst_case_survives_the_state():
  sample = mean_bounds.StudentT.from_sample(_sample(5, 2))
  state = json.loads(json.dumps(sample.to_state(), allow_nan=False))
  restored = mean_bounds.StudentT.from_state(state, 2)
  assert np.all(np.isinf(restored.log_worst_case))
