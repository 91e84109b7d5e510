import json

import dp_accounting
import numpy as np
import pytest

from tf_bdp.accounting import (
  BayesianAccountant,
  BayesianGaussianEvent,
  noise_report,
)

_ROUNDS, _UNITS, _Q, _EPSILON, _DELTA = 3, 12, 0.2, 1.5, 1e-4


def _distances():
  rng = np.random.default_rng(0)
  return np.minimum(0.3 * rng.lognormal(0.0, 0.4, (_ROUNDS, _UNITS)), 1.0)


def _report(distances=None, **changes):
  arguments = {
    'participation_probability': _Q,
    'epsilon': _EPSILON,
    'delta': _DELTA,
    'panel': True,
    'population': True,
    **changes,
  }
  distances = _distances() if distances is None else distances
  return noise_report.compute_noise(distances, **arguments)


@pytest.fixture(name='report', scope='module')
def _report_of_a_panel():
  return _report()


def test_noise_of_dp_is_that_of_dp_accounting(report):
  def epsilon_at(noise):
    event = dp_accounting.PoissonSampledDpEvent(
      _Q, dp_accounting.GaussianDpEvent(noise)
    )
    accountant = dp_accounting.pld.PLDAccountant().compose(event, _ROUNDS)
    return accountant.get_epsilon(_DELTA)

  # It falls with the noise: that which it would find is between the two.
  found = report.noise_multipliers['dp']
  assert epsilon_at(found * (1 + 5e-4)) < _EPSILON
  assert epsilon_at(found * (1 - 5e-4)) > _EPSILON


def test_every_noise_keeps_the_budget_it_was_sought_for(report):
  for claim, noise in report.noise_multipliers.items():
    accountant = BayesianAccountant()
    for row in _distances():
      accountant.compose(
        BayesianGaussianEvent((row / noise) ** 2, _Q, noise**-2, panel=True)
      )
    # A report of privacy has these; see its own tests.
    epsilons = {
      row.claim.name: row.epsilon for row in accountant.report(_DELTA)
    }
    assert 0.99 * _EPSILON < epsilons[claim] <= _EPSILON * (1 + 2e-6), claim


def test_a_panel_that_is_everybody_needs_less_noise_than_dp(report):
  noise = report.noise_multipliers
  assert list(noise) == ['dp', 'each', 'census', 'sample', 'paper']
  assert noise['census'] < noise['each'] < noise['dp']


def test_a_panel_that_is_a_sample_has_no_figure_of_everybody():
  report = _report(
    _distances()[:1], population=False, participation_probability=1.0
  )
  assert list(report.noise_multipliers) == ['dp', 'sample', 'paper']


def test_participants_may_be_any_number_in_each_round():
  first, second, *_ = _distances()
  report = _report([first, second[:5], []], panel=False, population=False)
  assert (report.rounds, report.units) == (3, 5)
  assert list(report.noise_multipliers) == ['dp', 'sample', 'paper']


def test_a_claim_that_no_noise_makes_has_none():
  # By Theorem 2 ε is at least log(1/δ) over the largest order, 512.
  report = _report(
    _distances()[:1],
    population=False,
    epsilon=0.01,
    participation_probability=1.0,
  )
  assert report.noise_multipliers['paper'] is None
  assert report.noise_multipliers['dp'] > 1
  assert 'paper           -' in report.statement()


def test_statement_names_the_budget_the_run_and_the_caveat(report):
  text = ' '.join(report.statement().split())
  for part in (
    'keeps client-level epsilon = 1.5 at delta = 0.0001 over 3 rounds',
    'each client taking part with probability 0.2',
    'the recorded distances of 12 clients:',
    f'dp {report.noise_multipliers["dp"]:.4f} anyone',
    'These figures are retrospective.',
  ):
    assert part in text, part


def test_report_for_programs_survives_json(report):
  data = report.to_dict()
  assert json.loads(json.dumps(data)) == data
  assert data['retrospective'] is True


@pytest.mark.parametrize(
  'changes, sentence',
  [
    ({'distances': np.ones(5)}, r'an array \[rounds, units\]. Found shape'),
    ({'worst_case_distance': 0.1}, 'exceed worst_case_squared_distance'),
    ({'participation_probability': 1.5}, 'must be between 0 and 1'),
    ({'epsilon': 0.0}, 'target_epsilon must be positive'),
  ],
)
def test_bad_input_is_an_error(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    _report(**changes)
