import functools
import json

import dp_accounting
import numpy as np
import pytest

from tf_bdp.accounting import (
  BayesianAccountant,
  BayesianGaussianEvent,
  calibration,
  claims,
  privacy_report,
)

_ROUNDS, _UNITS, _Q, _NOISE, _DELTA = 20, 50, 0.2, 1.5, 1e-4


def _distances(seed=0):
  rng = np.random.default_rng(seed)
  return np.minimum(0.3 * rng.lognormal(0.0, 0.4, (_ROUNDS, _UNITS)), 1.0)


@functools.lru_cache
def _report(**changes):
  arguments = {
    'noise_multiplier': _NOISE,
    'participation_probability': _Q,
    'delta': _DELTA,
    'panel': True,
    **changes,
  }
  return privacy_report.compute_bdp_privacy(_distances(), **arguments)


def _epsilons(report):
  return {row.method: row.epsilon for row in report.rows}


def test_dp_lines_are_those_of_dp_accounting():
  event = dp_accounting.SelfComposedDpEvent(
    dp_accounting.PoissonSampledDpEvent(
      _Q, dp_accounting.GaussianDpEvent(_NOISE)
    ),
    _ROUNDS,
  )
  epsilons = _epsilons(_report())
  rdp = dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(_DELTA)
  pld = dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(_DELTA)
  assert epsilons['DP, RDP'] == pytest.approx(rdp, rel=1e-9)
  assert epsilons['DP, PLD'] == pytest.approx(pld, rel=1e-9)


def test_mean_mechanism_doubles_the_worst_case():
  epsilons = _epsilons(_report(mechanism='mean', worst_case_distance=2.0))
  event = dp_accounting.PoissonSampledDpEvent(
    _Q, dp_accounting.GaussianDpEvent(_NOISE / 2)
  )
  rdp = dp_accounting.rdp.RdpAccountant().compose(event, _ROUNDS)
  assert epsilons['DP, RDP'] == pytest.approx(rdp.get_epsilon(_DELTA))


def test_bdp_lines_are_those_of_the_accountant_fed_by_hand():
  accountants = {
    'BDP, paper': BayesianAccountant.paper(),
    'BDP, holder': BayesianAccountant(
      'holder', estimator='student_t', total_rounds=_ROUNDS
    ),
    'BDP, panel': BayesianAccountant(estimator='student_t'),
    'BDP, distribution-free': BayesianAccountant(estimator='betting'),
  }
  epsilons = _epsilons(_report())
  for method, accountant in accountants.items():
    for row in _distances():
      accountant.compose(
        BayesianGaussianEvent(
          (row / _NOISE) ** 2, _Q, 1 / _NOISE**2, panel=True
        )
      )
    expected = accountant.get_epsilon(_DELTA)
    # Costs of many units at once may be 1e-6 above the exact ones.
    ratio = epsilons[method] / expected
    assert 1 - 1e-9 < ratio < 1 + 2e-6, method


def test_without_a_panel_the_panel_line_is_left_out_with_the_reason():
  report = _report(panel=False)
  assert _epsilons(report)['BDP, panel'] is None
  assert 'the units are not a panel' in report.statement()


def test_statement_names_everything_that_a_number_rests_on():
  text = ' '.join(_report().statement().split())
  for part in (
    'Gaussian mechanism performed for 20 rounds on the sum of clipped client',
    'noise multiplier 1.5',
    'taking part with probability 0.2',
    'Distances of 50 clients, a fixed panel',
    'all model checkpoints',
    'Client-level privacy: epsilon = 2.430 at delta = 0.0001, claim',
    'a client drawn from the population that the measured ones were drawn from',
    '(add-or-remove-one adjacency)',
    claims.ATTACKER,
    'right with probability 0.9191 at most, guessing from even odds',
    'Rests on: the trajectory that was realised; a bound of the mean',
    'Why this one: asked for; dp cost more epsilon.',
    'DP, RDP',
    'DP, PLD',
    'BDP, paper',
    'BDP, paper, L part',
    'BDP, holder',
    'BDP, panel',
    'BDP, distribution-free',
    'student_t',
    'betting',
    'printed',
    'chernoff',
    'Order',
    'Poisson sampling, which the run is said to have done',
    'a release of its own',
    'tail:',
    'drift:',
    'exchangeability:',
  ):
    assert part in text, part


def test_replacing_a_unit_by_a_special_one_reads_zero_out():
  relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
  report = _report(neighboring_relation=relation)
  text = ' '.join(report.statement().split())
  assert '(zero-out adjacency)' in text
  assert report.to_dict()['adjacency'] == 'zero-out'


def test_report_of_distances_is_that_of_their_events():
  events = calibration.events_from_distances(
    _distances(), _NOISE, _Q, panel=True
  )
  report = privacy_report.PrivacyReport.from_events(
    events,
    noise_multiplier=_NOISE,
    participation_probability=_Q,
    delta=_DELTA,
    worst_case_distance=1.0,
    mechanism='sum',
    unit='client',
    sampling='poisson',
  )
  assert report == _report()


def test_attackers_bound_is_equation_1_with_delta():
  for row in _report().to_dict()['rows']:
    odds = np.exp(row['epsilon'])
    expected = (odds + row['delta']) / (1 + odds)
    assert row['attack_success_bound'] == pytest.approx(expected)


def test_statement_says_who_was_measured():
  text = ' '.join(_report(population=True).statement().split())
  assert 'Distances of 50 clients, everybody measured in every round' in text
  assert _report(population=True).to_dict()['population'] is True
  text = ' '.join(_report(panel=False).statement().split())
  assert 'Distances of the clients of each round; clipping' in text


def _claimed(report):
  return {row.claim.name: row.epsilon for row in report.claims}


def _fed(estimator):
  accountant = BayesianAccountant('panel', estimator=estimator)
  for event in calibration.events_from_distances(
    _distances(), _NOISE, _Q, panel=True
  ):
    accountant.compose(event)
  return accountant


def test_claims_of_a_panel_are_those_of_the_exact_accountant():
  wanted = {
    row.claim.name: row.epsilon for row in _fed('sample').report(_DELTA)
  }
  of_all, of_some = _report(population=True), _report()
  epsilons = _claimed(of_all)
  assert list(epsilons) == ['dp', 'each', 'census', 'sample', 'paper']
  for name in ('each', 'census', 'sample'):
    assert epsilons[name] == wanted[name]
  assert epsilons['paper'] == pytest.approx(wanted['paper'], rel=2e-6)
  assert of_all.recommended.claim.name == 'census'
  # A panel that is a sample says nothing of those who were not measured.
  del epsilons['each'], epsilons['census']
  assert _claimed(of_some) == epsilons
  assert of_some.recommended.claim.name == 'sample'


def test_claims_of_participants_are_by_moments_and_distribution_free():
  report = _report(panel=False, population=False)
  holder = BayesianAccountant('holder', total_rounds=_ROUNDS)
  for event in calibration.events_from_distances(_distances(), _NOISE, _Q):
    holder.compose(event)
  epsilons = _claimed(report)
  assert list(epsilons) == ['dp', 'sample', 'paper']
  assert epsilons['sample'] == pytest.approx(
    holder.get_epsilon(_DELTA), rel=2e-6
  )
  # What was measured here gains nothing over DP, which says more.
  assert report.recommended.claim.name == 'dp'


@pytest.mark.parametrize('changes', [{}, {'panel': False}])
def test_the_claim_of_dp_is_never_above_any_figure_of_dp(changes):
  report = _report(**changes)
  epsilons = _epsilons(report)
  dp = _claimed(report)['dp']
  assert dp <= min(epsilons['DP, RDP'], epsilons['DP, PLD'])
  assert dp == pytest.approx(epsilons['DP, PLD'], rel=1e-3)
  assert _claimed(report)['paper'] == epsilons['BDP, paper']


def test_what_cannot_be_claimed_gives_way_to_what_can():
  report = _report(asked_for='census')
  assert report.recommended.claim.name == 'sample'
  assert report.recommended.reason == (
    'census cannot be claimed from what was measured'
  )


def test_the_claim_asked_for_is_the_recommended_one():
  assert _report(asked_for='paper').recommended.claim.name == 'paper'
  report = _report(population=True, asked_for='each')
  assert report.recommended.claim.name == 'each'


def test_without_clipping_participants_have_no_claim_but_the_papers():
  report = privacy_report.PrivacyReport.from_events(
    calibration.events_from_distances(_distances(), _NOISE, _Q, None),
    noise_multiplier=_NOISE,
    participation_probability=_Q,
    delta=_DELTA,
    worst_case_distance=np.inf,
    mechanism='sum',
    unit='client',
    sampling='poisson',
  )
  assert list(_claimed(report)) == ['dp', 'paper']
  assert report.recommended.claim.name == 'dp'
  assert report.recommended.attack_success_bound == 1.0
  row, _ = report.to_dict()['claims']
  assert row['epsilon'] is None


def test_of_a_fixed_number_of_units_dp_alone_is_claimed():
  event = dp_accounting.SampledWithoutReplacementDpEvent(
    100, 10, dp_accounting.GaussianDpEvent(2.0)
  )
  report = privacy_report.PrivacyReport.from_events(
    [event] * 3,
    noise_multiplier=4.0,
    participation_probability=0.1,
    delta=_DELTA,
    worst_case_distance=2.0,
    mechanism='sum',
    unit='client',
    sampling='fixed_size',
    neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE,
  )
  (row,) = report.claims
  assert (row.claim.name, row.recommended) == ('dp', True)
  assert 0 < row.epsilon <= min(_epsilons(report).values())
  text = ' '.join(report.statement().split())
  for part in (
    'anyone (replace-one adjacency)',
    'draws of a fixed number of clients',
    'which of two clients it was',
    'BDP is not claimed',
  ):
    assert part in text, part
  assert "Student's t" not in text


def test_a_filter_adds_its_row():
  event = BayesianGaussianEvent([0.01] * 5, 0.5, 1.0)
  report = privacy_report.PrivacyReport.from_events(
    [event] * 3,
    noise_multiplier=1.0,
    participation_probability=0.5,
    delta=_DELTA,
    worst_case_distance=1.0,
    mechanism='sum',
    unit='client',
    sampling='poisson',
    asked_for='filter',
    filter_epsilon=1.25,
  )
  assert _claimed(report)['filter'] == 1.25
  assert report.recommended.claim.name == 'filter'


def test_report_for_programs_has_all_that_a_claim_says():
  for row in _report(population=True).to_dict()['claims']:
    claim = claims.CLAIMS[row['claim']]
    assert row['protects'] == claim.protects
    assert row['rests_on'] == claim.rests_on
    assert row['against'] == claims.ATTACKER
    odds = np.exp(row['epsilon'])
    expected = (odds + row['delta']) / (1 + odds)
    assert row['attack_success_bound'] == pytest.approx(expected)


def test_report_for_programs_survives_json():
  report = _report().to_dict()
  assert json.loads(json.dumps(report)) == report
  assert report['rounds'] == _ROUNDS
  assert report['verdict'] in ('ok', 'doubtful', 'not applicable')


def test_outliers_are_seen_as_a_tail_that_the_sample_does_not_determine():
  distances = np.full((300, 100), 0.05)
  distances[:, 0] = 1.0
  report = privacy_report.compute_bdp_privacy(
    distances,
    noise_multiplier=2.0,
    participation_probability=1.0,
    delta=1e-5,
    panel=True,
  )
  verdicts = {finding.check: finding.verdict for finding in report.findings}
  assert verdicts['tail'] == 'not applicable'
  assert 'rely on the DP figures' in report.statement()


def test_a_change_of_scale_common_to_all_is_no_drift():
  distances = _distances() * np.linspace(1.0, 0.1, _ROUNDS)[:, np.newaxis]
  report = privacy_report.compute_bdp_privacy(
    distances,
    noise_multiplier=_NOISE,
    participation_probability=_Q,
    delta=_DELTA,
    panel=True,
  )
  verdicts = {finding.check: finding.verdict for finding in report.findings}
  assert verdicts['drift'] == 'ok'


@pytest.mark.parametrize(
  'changes, sentence',
  [
    ({'noise_multiplier': 0.0}, 'noise_multiplier must be positive'),
    ({'participation_probability': 1.5}, 'must be between 0 and 1'),
    ({'delta': 0.0}, 'delta must be above 0 and below 1'),
    ({'worst_case_distance': 0.1}, 'exceed worst_case_squared_distance'),
    ({'mechanism': 'median'}, 'mechanism must be one of'),
    ({'sampling': 'none'}, 'sampling must be one of'),
    ({'asked_for': 'most'}, 'asked_for must be one of'),
    (
      {'neighboring_relation': dp_accounting.NeighboringRelation.REPLACE_ONE},
      'units are replaced then, not added or removed',
    ),
    (
      {'sampling': 'fixed_size'},
      'units are replaced then, not added or removed',
    ),
  ],
)
def test_bad_input_is_an_error(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    _report(**changes)
