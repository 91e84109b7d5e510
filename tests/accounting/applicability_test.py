"""Tests of the checks whether Bayesian privacy applies."""

import warnings

import numpy as np
import pytest
from scipy import stats

from tf_bdp.accounting import applicability, events


def _average_shape(sampler, seeds=60):
  return np.mean(
    [
      applicability.pareto_shape(sampler(np.random.default_rng(seed)))
      for seed in range(seeds)
    ]
  )


@pytest.mark.parametrize('shape', [0.0, 0.3, 0.7, 1.2])
def test_the_shape_of_generalised_pareto_samples_is_recovered(shape):
  # The excess over any threshold of a generalised Pareto variable is one of the
  # same shape; the weak prior draws k̂ a little towards 1/2.
  average = _average_shape(
    lambda generator: stats.genpareto.rvs(
      shape, size=4000, random_state=generator
    )
  )
  length = 3 * np.sqrt(4000)
  expected = (length * shape + 10 * 0.5) / (length + 10)
  assert average == pytest.approx(expected, abs=0.04)


def test_a_bounded_tail_has_a_negative_shape():
  # The uniform distribution is generalised Pareto of shape -1.
  average = _average_shape(lambda generator: generator.random(4000))
  assert average < -0.6


def test_the_shape_does_not_depend_on_the_scale_or_the_order():
  values = stats.genpareto.rvs(0.4, size=500, random_state=1)
  shape = applicability.pareto_shape(values)
  shuffled = np.random.default_rng(0).permutation(values)
  assert applicability.pareto_shape(1e6 * shuffled) == pytest.approx(shape)
  assert applicability.pareto_shape(1e-6 * values) == pytest.approx(shape)


def test_equal_values_have_no_tail():
  assert applicability.pareto_shape(np.full(100, 3.0)) == 0


@pytest.mark.parametrize(
  'values',
  [
    np.r_[np.zeros(99), 1.0],
    np.r_[np.ones(90), np.full(10, 2.0)],
    np.r_[np.full(50, 1e-300), np.ones(50)],
    np.exp(-np.arange(100.0) * 7),
    np.r_[np.ones(99), 1e12],
  ],
)
def test_odd_samples_have_a_finite_shape_without_a_warning(values):
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    assert np.isfinite(applicability.pareto_shape(values))


def _verdicts(sampler, seeds=20):
  return [
    applicability.tail(sampler(np.random.default_rng(seed))).verdict
    for seed in range(seeds)
  ]


def test_costs_that_are_all_alike_have_an_ok_tail():
  verdicts = _verdicts(lambda g: g.uniform(0.1, 0.2, 1000))
  assert set(verdicts) == {'ok'}


def test_costs_whose_exponential_has_no_mean_are_not_applicable():
  # exp of an exponential variable of mean 2 is Pareto of shape 2.
  verdicts = _verdicts(lambda g: g.exponential(2.0, 1000))
  assert set(verdicts) == {'not applicable'}


def test_costs_whose_exponential_has_no_variance_are_not_ok():
  verdicts = _verdicts(lambda g: g.exponential(0.75, 2000))
  assert 'ok' not in verdicts


def test_a_mean_that_is_owed_to_one_sample_is_not_applicable():
  costs = np.r_[np.full(199, 0.1), 50.0]
  finding = applicability.tail(costs)
  assert finding.verdict == 'not applicable'
  # 1 / (1 + 199 exp(-49.9)).
  assert finding.figures['share_of_largest'] == pytest.approx(1.0)


def test_huge_costs_do_not_overflow():
  finding = applicability.tail(1e6 + np.random.default_rng(0).random(100))
  assert np.isfinite(finding.figures['pareto_shape'])


@pytest.mark.parametrize('units', [50, 100, 1000])
@pytest.mark.parametrize('share', [0.02, 0.05, 0.1, 0.15])
def test_ties_are_not_taken_for_a_heavy_tail(units, share):
  # y is 1.105 or 1.116 for everybody: any sample determines the mean.
  far = int(share * units)
  costs = np.r_[np.full(units - far, 0.1), np.full(far, 0.11)]
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    finding = applicability.tail(costs)
  assert finding.verdict == 'ok'


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_costs_that_are_no_numbers_are_never_ok(value):
  costs = np.r_[np.linspace(0.1, 0.2, 50), value]
  try:
    finding = applicability.tail(costs)
  except ValueError:
    return
  assert finding.verdict != 'ok'


def test_distances_that_are_no_numbers_never_pass_for_no_drift():
  distances = np.linspace(0.1, 0.2, 50)
  try:
    finding = applicability.drift(distances, np.r_[distances, np.nan])
  except ValueError:
    return
  assert finding.verdict != 'ok'


def test_few_units_say_nothing_about_the_tail():
  finding = applicability.tail(np.full(19, 0.1))
  assert finding.verdict == 'doubtful'
  assert 'fewer than 20 units' in finding.meaning


def _drift_verdicts(shift, seeds=30):
  verdicts = []
  for seed in range(seeds):
    generator = np.random.default_rng(seed)
    first = generator.normal(0, 1, 500)
    second = generator.normal(shift, 1, 500)
    verdicts.append(applicability.drift(first, second).verdict)
  return verdicts


def test_one_distribution_does_not_drift():
  assert _drift_verdicts(0.0).count('ok') >= 29


def test_distributions_far_apart_have_drifted():
  # The Kolmogorov-Smirnov distance of N(0,1) and N(2,1) is 2Φ(1) - 1 = 0.68.
  assert set(_drift_verdicts(2.0)) == {'not applicable'}
  finding = applicability.drift(
    *np.random.default_rng(0).normal([[0.0], [2.0]], 1, (2, 20_000))
  )
  assert finding.figures['ks_distance'] == pytest.approx(0.683, abs=0.02)


def test_distributions_somewhat_apart_are_doubtful():
  # 2Φ(0.25) - 1 = 0.197, between 0.1 and 0.3.
  assert _drift_verdicts(0.5).count('doubtful') >= 28


def test_drift_has_the_name_given_and_takes_any_shape():
  finding = applicability.drift(np.ones((6, 4)), np.ones(20), 'held-out units')
  assert finding.check == 'held-out units'
  assert finding.verdict == 'ok'


def _halves(factor, units=(40, 10), rounds=5, seed=0):
  generator = np.random.default_rng(seed)
  # A unit's rounds are alike.
  own = [generator.lognormal(0, 0.3, count) for count in units]
  trained, held_out = (np.tile(part, (rounds, 1)) for part in own)
  return trained, factor**2 * held_out


@pytest.mark.parametrize(
  'factor, verdict',
  [
    *((1.0, 'ok'), (1.1, 'ok')),
    *((1.6, 'doubtful'), (1 / 1.6, 'doubtful')),
    *((3.0, 'not applicable'), (1 / 3, 'not applicable')),
  ],
)
def test_the_gap_of_held_out_units_is_judged_by_how_many_times(factor, verdict):
  found = [
    applicability.held_out_gap(*_halves(factor, seed=seed))
    for seed in range(20)
  ]
  assert [f.verdict for f in found].count(verdict) >= 19
  ratios = [f.figures['ratio'] for f in found]
  assert np.median(ratios) == pytest.approx(factor, rel=0.1)


def test_three_held_out_units_are_enough_for_a_large_gap():
  finding = applicability.held_out_gap(*_halves(5.0, (20, 3)))
  assert finding.verdict == 'not applicable'
  finding = applicability.held_out_gap(*_halves(5.0, (3, 3)))
  assert finding.verdict == 'doubtful'
  assert finding.figures == {'units': 3.0}


def test_units_that_move_nothing_have_a_gap_to_those_that_do():
  with warnings.catch_warnings():
    warnings.simplefilter('error', RuntimeWarning)
    for trained, held_out, verdict in (
      (np.zeros((2, 20)), np.zeros((2, 20)), 'ok'),
      (np.zeros((2, 20)), np.ones((2, 20)), 'not applicable'),
      (np.ones((2, 20)), np.zeros((2, 20)), 'not applicable'),
    ):
      finding = applicability.held_out_gap(trained, held_out)
      assert finding.verdict == verdict


def test_held_out_units_are_compared_and_not_counted_with_the_others():
  trained, held_out = _halves(3.0, (60, 20))
  rounds = [
    events.ParallelEvent(
      [
        events.BayesianGaussianEvent(half, 0.5, 100.0, True)
        for half in (one, other)
      ]
    )
    for one, other in zip(trained, held_out)
  ]
  findings = applicability.check_rounds(rounds, 4, held_out=True)
  alone = applicability.check_rounds([e.groups[0] for e in rounds], 4)
  assert findings[:-1] == alone
  assert findings[-1].check == 'held-out gap'
  assert findings[-1].verdict == 'not applicable'


def test_groups_that_differ_explain_the_distances():
  generator = np.random.default_rng(0)
  groups = ['a', 'b'] * 200
  distances = generator.normal(0, 0.1, 400) + np.tile([1.0, 2.0], 200)
  finding = applicability.exchangeability(distances, groups)
  assert finding.verdict == 'not applicable'
  # Complete separation into two halves: the ranks' variance between groups is
  # three quarters of all.
  assert finding.figures['explained_share'] == pytest.approx(0.75, abs=0.01)


def test_groups_that_do_not_differ_explain_nothing():
  verdicts = []
  for seed in range(30):
    generator = np.random.default_rng(seed)
    groups = generator.integers(0, 10, 500)
    finding = applicability.exchangeability(generator.random(500), groups)
    verdicts.append(finding.verdict)
  assert verdicts.count('ok') >= 29


def test_without_groups_the_order_of_arrival_is_checked():
  rising = np.arange(500.0)
  assert applicability.exchangeability(rising).verdict == 'not applicable'
  shuffled = np.random.default_rng(0).permutation(rising)
  assert applicability.exchangeability(shuffled).verdict == 'ok'


@pytest.mark.parametrize(
  'distances, groups',
  [
    (np.ones(40), ['a', 'b'] * 20),
    (np.arange(40.0), ['a'] * 40),
    (np.arange(40.0), range(40)),
  ],
  ids=['equal distances', 'one group', 'groups of one'],
)
def test_groups_that_can_tell_nothing_explain_nothing(distances, groups):
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    finding = applicability.exchangeability(distances, groups)
  assert finding.figures == {'explained_share': 0.0, 'p_value': 1.0}


@pytest.mark.parametrize('units', [0, 1, 2, 4])
def test_few_units_never_pass_for_exchangeable(units):
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    finding = applicability.exchangeability(np.arange(float(units)))
  assert finding.verdict == 'doubtful'


def test_groups_of_another_length_are_refused():
  with pytest.raises(ValueError, match='lists of the same length'):
    applicability.exchangeability([1.0, 2.0, 3.0], ['a', 'b'])


def test_the_worst_verdict_is_the_least_favourable():
  def finding(verdict):
    return applicability.Finding('check', verdict, {}, '')

  assert applicability.worst_verdict([]) == 'ok'
  assert applicability.worst_verdict([finding('ok')]) == 'ok'
  assert (
    applicability.worst_verdict(
      [finding('ok'), finding('not applicable'), finding('doubtful')]
    )
    == 'not applicable'
  )
