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
    **changes,
  }
  distances = _distances() if distances is None else distances
  return noise_report.compute_noise(distances, **arguments)


@pytest.fixture(name='report', scope='module')
def _report_of_a_panel():
  return _report()


def test_noise_of_dp_is_that_of_dp_accounting(report):
  expected = dp_accounting.calibrate_dp_mechanism(
    dp_accounting.rdp.RdpAccountant,
    lambda noise: dp_accounting.SelfComposedDpEvent(
      dp_accounting.PoissonSampledDpEvent(
        _Q, dp_accounting.GaussianDpEvent(noise)
      ),
      _ROUNDS,
    ),
    _EPSILON,
    _DELTA,
  )
  assert report.noise_multipliers['DP, RDP'] == pytest.approx(
    expected, rel=2e-4
  )


def test_every_noise_keeps_the_budget_it_was_sought_for(report):
  for method, noise in report.noise_multipliers.items():
    privacy = privacy_report.compute_bdp_privacy(
      _distances(),
      noise_multiplier=noise,
      participation_probability=_Q,
      delta=_DELTA,
      panel=True,
    )
    epsilons = {row.method: row.epsilon for row in privacy.rows}
    # Less where the report has a tighter figure of DP than the search.
    assert 0.8 * _EPSILON < epsilons[method] <= _EPSILON, method


def test_bdp_never_needs_more_noise_than_dp(report):
  noise = dict(report.noise_multipliers)
  del noise['BDP, paper']
  assert max(noise.values()) == noise['DP, RDP']


def test_units_that_are_no_panel_have_no_figure_of_one():
  report = _report(_distances()[:1], panel=False)
  assert 'BDP, panel' not in report.noise_multipliers


def test_statement_names_the_budget_the_run_and_the_caveat(report):
  text = ' '.join(report.statement().split())
  for part in (
    'keeps client-level epsilon = 1.5 at delta = 0.0001 over 4 rounds',
    'each client taking part with probability 0.2',
    'the recorded distances of 30 clients:',
    f'DP, RDP: {report.noise_multipliers["DP, RDP"]:.4f}',
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
