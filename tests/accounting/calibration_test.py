"""Tests of the noise that a budget would have needed."""

import functools
import math
import warnings

import dp_accounting
import numpy as np
import pytest

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import calibration
from tf_bdp.accounting import events as events_lib

_DISTANCES = np.random.default_rng(0).beta(1, 6, (5, 100))
_DELTA = 1e-5


def _make_events(noise_multiplier, panel=True):
  return calibration.events_from_distances(
    _DISTANCES, noise_multiplier, 0.2, panel=panel
  )


def _make_rdp_accountant():
  return dp_accounting.rdp.RdpAccountant(range(2, 65))


def _epsilon(noise_multiplier, make_accountant, make_events):
  accountant = make_accountant()
  for event in make_events(noise_multiplier):
    accountant.compose(event)
  return accountant.get_epsilon(_DELTA)


@pytest.mark.parametrize('epsilon', [0.5, 4.0])
@pytest.mark.parametrize(
  'make_accountant',
  [
    functools.partial(accountant_lib.BayesianAccountant, estimator='bernstein'),
    functools.partial(
      accountant_lib.BayesianAccountant,
      'holder',
      estimator='student_t',
      total_rounds=5,
    ),
    accountant_lib.BayesianAccountant.paper,
    _make_rdp_accountant,
  ],
  ids=['panel', 'holder', 'paper', 'rdp'],
)
@pytest.mark.filterwarnings('ignore:The best order')
def test_the_result_keeps_the_budget_and_one_percent_less_noise_does_not(
  make_accountant, epsilon
):
  make_events = _make_events
  if make_accountant is _make_rdp_accountant:

    def make_events(noise_multiplier):
      gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
      return [dp_accounting.PoissonSampledDpEvent(0.2, gaussian)] * 5

  noise = calibration.calibrate_noise_multiplier(
    make_events, epsilon, _DELTA, make_accountant, relative_tolerance=1e-3
  )
  assert _epsilon(noise, make_accountant, make_events) <= epsilon
  assert _epsilon(0.99 * noise, make_accountant, make_events) > epsilon


@pytest.mark.filterwarnings('ignore:The best order')
def test_the_result_agrees_with_the_calibration_of_dp_accounting():
  def make_event(noise_multiplier):
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    return dp_accounting.PoissonSampledDpEvent(0.2, gaussian)

  expected = dp_accounting.calibrate_dp_mechanism(
    _make_rdp_accountant, make_event, 1.0, _DELTA, tol=1e-7
  )
  actual = calibration.calibrate_noise_multiplier(
    lambda noise: [make_event(noise)],
    1.0,
    _DELTA,
    _make_rdp_accountant,
  )
  assert actual == pytest.approx(expected, rel=2e-4)


@pytest.mark.filterwarnings('ignore:The best order')
def test_distances_near_zero_need_less_noise_than_the_worst_case():
  def make_accountant():
    return accountant_lib.BayesianAccountant(estimator='population')

  bayesian = calibration.calibrate_noise_multiplier(
    _make_events, 1.0, _DELTA, make_accountant
  )
  worst = calibration.calibrate_noise_multiplier(
    lambda noise: calibration.events_from_distances(
      np.ones((5, 3)), noise, 0.2, panel=True
    ),
    1.0,
    _DELTA,
    make_accountant,
  )
  assert bayesian < 0.9 * worst


def test_a_budget_that_no_noise_keeps_is_refused():
  # By Theorem 2 ε is at least log(1/δ) / λ.
  def make_accountant():
    return accountant_lib.BayesianAccountant(
      estimator='population', conversion='chernoff', orders=range(1, 9)
    )

  with (
    pytest.raises(ValueError, match=r'No noise multiplier up to .* keeps'),
    warnings.catch_warnings(),
  ):
    warnings.simplefilter('ignore')
    calibration.calibrate_noise_multiplier(
      _make_events, 0.01, _DELTA, make_accountant
    )


def test_events_have_the_distances_over_the_noise():
  events = calibration.events_from_distances(
    [[0.1, 0.2, 0.4], [0.0, 1.0, 2.0]], 4.0, 0.3, 2.0, panel=True
  )
  assert len(events) == 2
  np.testing.assert_allclose(
    events[1].squared_distances, [0.0, 0.0625, 0.25], rtol=1e-15
  )
  assert events[0].worst_case_squared_distance == pytest.approx(0.25)
  assert events[0].participation_probability == 0.3
  assert events[0].panel


def test_without_clipping_there_is_no_worst_case():
  (event,) = calibration.events_from_distances([[1.0, 2.0, 9.0]], 1.0, 1, None)
  assert event.worst_case_squared_distance is None
  assert not event.panel


@pytest.mark.parametrize(
  'arguments, sentence',
  [
    ({'noise_multiplier': 0.0}, 'noise_multiplier must be positive'),
    ({'noise_multiplier': math.inf}, 'noise_multiplier must be positive'),
    ({'distances': [0.1, 0.2, 0.3]}, r'\[rounds, units\]. Found shape \(3,\)'),
    ({'distances': [[0.1, math.nan, 0.3]]}, '1 NaN of 3'),
    ({'distances': [[0.1, -0.2, 0.3]]}, '1 negative of 3'),
    ({'distances': [[0.1, 1.2, 0.3]]}, '1 of 3 squared_distances exceed'),
    ({'distances': [[0.1, 0.2]]}, 'at least 3 sampled units'),
    ({'participation_probability': 1.2}, 'between 0 and 1. Found 1.2'),
    (
      {'participation_probability': 0.0},
      'participation_probability must be ab',
    ),
    ({'distances': []}, r'\[rounds, units\]. Found shape \(0,\)'),
    (
      {'distances': [[0.1, 0.2, 0.3], [0.1] * 4], 'panel': True},
      'A panel is measured as a whole .* Found rounds of 3 to 4 units',
    ),
    ({'worst_case_distance': [1.0, 1.0]}, 'one a round. Found 2 for 1 rounds'),
    ({'worst_case_distance': 0.0}, 'worst_case_distance must be positive'),
  ],
)
def test_bad_arguments_are_named(arguments, sentence):
  good = {
    'distances': [[0.1, 0.2, 0.3]],
    'noise_multiplier': 1.0,
    'participation_probability': 0.5,
  }
  with pytest.raises(ValueError, match=sentence):
    calibration.events_from_distances(**{**good, **arguments})


def test_rounds_of_too_few_units_are_charged_their_worst_case():
  rounds = calibration.events_from_distances(
    [[0.1, 0.2, 0.4], [0.3], []], 2.0, 0.3, [1.0, 0.5, 0.0]
  )
  assert rounds[0].worst_case_squared_distance == 0.25
  assert rounds[1] == dp_accounting.PoissonSampledDpEvent(
    0.3, dp_accounting.GaussianDpEvent(4.0)
  )
  assert rounds[2] == dp_accounting.NoOpDpEvent()
  *_, last = calibration.events_from_distances(
    [[0.1, 0.2, 0.4], [0.3]], 2.0, 0.3, None
  )
  assert last == dp_accounting.NonPrivateDpEvent()


def test_a_worst_case_that_is_drawn_is_that_of_every_round():
  one, other = calibration.events_from_distances(
    [[0.1, 0.2, 0.4], []], 2.0, 0.3, 1.0, False, [(0.5, 1.0), (0.5, 4.0)]
  )
  assert one.worst_case_mixture == ((0.5, 0.25), (0.5, 4.0))
  assert one.worst_case_squared_distance == 0.25
  assert other == events_lib.MixedGaussianEvent(one.worst_case_mixture, 0.3)


def test_rounds_that_are_alike_are_one_object():
  row = [0.1, 0.2, 0.4]
  rounds = calibration.events_from_distances(
    [row, [0.3] * 3, row, row], 2.0, 0.3, [1.0, 1.0, 1.0, 2.0]
  )
  assert rounds[0] is rounds[2]
  assert len({id(event) for event in rounds}) == 3


@pytest.mark.parametrize(
  'epsilon, delta, sentence',
  [
    (0.0, 1e-5, 'target_epsilon must be positive'),
    (math.nan, 1e-5, 'target_epsilon must be positive'),
    (1.0, 0.0, 'target_delta must be above 0'),
    (1.0, 1.0, 'target_delta must be above 0'),
  ],
)
def test_a_bad_budget_is_named(epsilon, delta, sentence):
  with pytest.raises(ValueError, match=sentence):
    calibration.calibrate_noise_multiplier(_make_events, epsilon, delta)
