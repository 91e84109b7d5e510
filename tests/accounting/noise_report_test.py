import json

import dp_accounting
import numpy as np
import pytest

from tf_bdp.accounting import noise_report, privacy_report

_ROUNDS, _Q, _EPSILON, _DELTA = 4, 0.2, 1.5, 1e-4


def _distances():
  rng = np.random.default_rng(0)
  return np.minimum(0.3 * rng.lognormal(0.0, 0.4, (_ROUNDS, 30)), 1.0)


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
  expected = dp_accounting.calibrate_dp_mechanism(
    dp_accounting.pld.PLDAccountant,
    lambda noise: dp_accounting.SelfComposedDpEvent(
      dp_accounting.PoissonSampledDpEvent(
        _Q, dp_accounting.GaussianDpEvent(noise)
      ),
      _ROUNDS,
    ),
    _EPSILON,
    _DELTA,
  )
  assert report.noise_multipliers['dp'] == pytest.approx(expected, rel=5e-4)


def test_every_noise_keeps_the_budget_it_was_sought_for(report):
  for claim, noise in report.noise_multipliers.items():
    privacy = privacy_report.compute_bdp_privacy(
      _distances(),
      noise_multiplier=noise,
      participation_probability=_Q,
      delta=_DELTA,
      panel=True,
      population=True,
    )
    epsilons = {row.claim.name: row.epsilon for row in privacy.claims}
    assert 0.99 * _EPSILON < epsilons[claim] <= _EPSILON * (1 + 2e-6), claim


def test_a_panel_that_is_everybody_needs_less_noise_than_dp(report):
  noise = report.noise_multipliers
  assert list(noise) == ['dp', 'each', 'census', 'sample', 'paper']
  assert noise['census'] < noise['each'] < noise['dp']


def test_a_panel_that_is_a_sample_has_no_figure_of_everybody():
  report = _report(_distances()[:1], population=False)
  assert list(report.noise_multipliers) == ['dp', 'sample', 'paper']


def test_participants_may_be_any_number_in_each_round():
  first, second, *_ = _distances()
  report = _report([first, second[:5], []], panel=False, population=False)
  assert (report.rounds, report.units) == (3, 5)
  assert list(report.noise_multipliers) == ['dp', 'sample', 'paper']


def test_a_claim_that_no_noise_makes_has_none():
  # By Theorem 2 ε is at least log(1/δ) over the largest order, 512.
  report = _report(_distances()[:1], population=False, epsilon=0.01)
  assert report.noise_multipliers['paper'] is None
  assert report.noise_multipliers['dp'] > 1
  assert 'paper           -' in report.statement()


def test_statement_names_the_budget_the_run_and_the_caveat(report):
  text = ' '.join(report.statement().split())
  for part in (
    'keeps client-level epsilon = 1.5 at delta = 0.0001 over 4 rounds',
    'each client taking part with probability 0.2',
    'the recorded distances of 30 clients:',
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
