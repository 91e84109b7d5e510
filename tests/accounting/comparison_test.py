"""Tests of the table of methods."""

import dp_accounting
import numpy as np
import pytest

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import comparison, events

_DELTA = 1e-5
_METHODS = [
  'DP, RDP',
  'DP, PLD',
  'BDP, paper',
  'BDP, paper, L part',
  'BDP, holder',
  'BDP, panel',
  'BDP, distribution-free',
]
pytestmark = pytest.mark.filterwarnings('ignore:The best order')


def _rounds(worst=0.25, panel=True, units=50):
  generator = np.random.default_rng(0)
  return [
    events.BayesianGaussianEvent(
      0.25 * generator.beta(0.5, 5, units), 0.1, worst, panel
    )
    for _ in range(4)
  ]


def _rows(rounds):
  rows = comparison.compare(rounds, _DELTA)
  assert [row.method for row in rows] == _METHODS
  assert all(row.delta == _DELTA for row in rows)
  return {row.method: row for row in rows}


def test_the_dp_rows_are_what_dp_accounting_computes():
  event = dp_accounting.SelfComposedDpEvent(
    dp_accounting.PoissonSampledDpEvent(
      0.1, dp_accounting.GaussianDpEvent(2.0)
    ),
    4,
  )
  rows = _rows(_rounds())
  rdp = dp_accounting.rdp.RdpAccountant().compose(event)
  pld = dp_accounting.pld.PLDAccountant().compose(event)
  assert rows['DP, RDP'].epsilon == pytest.approx(
    rdp.get_epsilon(_DELTA), rel=1e-9
  )
  assert rows['DP, PLD'].epsilon == pytest.approx(
    pld.get_epsilon(_DELTA), rel=1e-6
  )


@pytest.mark.parametrize('panel', [True, False])
def test_the_bayesian_rows_are_what_the_accountants_compute(panel):
  rounds = _rounds(panel=panel)
  make = accountant_lib.BayesianAccountant
  accountants = {
    'BDP, paper': make.paper('printed'),
    'BDP, paper, L part': make.paper('tight'),
    'BDP, holder': make('holder', estimator='student_t', total_rounds=4),
    'BDP, distribution-free': make('holder', total_rounds=4),
  }
  if panel:
    accountants['BDP, panel'] = make(estimator='student_t')
    accountants['BDP, distribution-free'] = make(estimator='betting')
  rows = _rows(rounds)
  for method, accountant in accountants.items():
    for event in rounds:
      accountant.compose(event)
    epsilon, order = accountant.get_epsilon_and_optimal_order(_DELTA)
    expected = epsilon
    if 'paper' not in method:  # DP implies BDP.
      dp = min(rows['DP, RDP'].epsilon, rows['DP, PLD'].epsilon)
      expected = min(epsilon, dp)
      assert (expected < epsilon) == ('as DP' in rows[method].assumption)
    assert rows[method].epsilon == expected
    assert rows[method].order == order
    assert rows[method].details['epsilon'] == accountant.get_epsilon(_DELTA)


def test_without_a_worst_case_the_rows_that_need_one_are_none():
  rows = _rows(_rounds(worst=None))
  for method in ('DP, RDP', 'DP, PLD', 'BDP, distribution-free'):
    assert rows[method].epsilon is None
    assert rows[method].assumption == 'there is no worst case'
  assert rows['BDP, panel'].epsilon > 0


def test_without_a_panel_its_row_is_none():
  row = _rows(_rounds(panel=False))['BDP, panel']
  assert row.epsilon is None
  assert row.assumption == 'the units are not a panel'


def test_no_bayesian_row_but_the_printed_one_is_above_rdp_on_its_orders():
  rounds = _rounds()
  rows = _rows(rounds)
  orders = [order + 1 for order in accountant_lib.DEFAULT_ORDERS]
  worst = dp_accounting.rdp.RdpAccountant(orders)
  event = dp_accounting.PoissonSampledDpEvent(
    0.1, dp_accounting.GaussianDpEvent(2.0)
  )
  limit = worst.compose(event, 4).get_epsilon(_DELTA)
  for method in ('BDP, holder', 'BDP, panel', 'BDP, distribution-free'):
    assert rows[method].epsilon <= limit * (1 + 1e-9)


def test_composed_rounds_are_counted_one_by_one():
  rounds = _rounds()
  composed = [
    dp_accounting.ComposedDpEvent(rounds[:2]),
    dp_accounting.ComposedDpEvent(rounds[2:]),
  ]
  flat, nested = _rows(rounds), _rows(composed)
  for method in _METHODS:
    assert nested[method].epsilon == pytest.approx(
      flat[method].epsilon, rel=1e-12
    )


def test_an_epsilon_beyond_use_is_not_computed_as_a_distribution():
  rounds = [events.BayesianGaussianEvent([900.0] * 5, 1.0, 1e4)]
  row = _rows(rounds)['DP, PLD']
  assert row.epsilon is None
  assert row.assumption.startswith('not computed')


def test_an_unsupported_event_is_refused_as_the_accountant_refuses_it():
  with pytest.raises(dp_accounting.UnsupportedEventError):
    comparison.compare([dp_accounting.LaplaceDpEvent(1.0)], _DELTA)


@pytest.mark.parametrize('delta', [0.0, 1.0, -1.0])
def test_a_delta_that_is_none_is_refused(delta):
  with pytest.raises(ValueError, match=r'(?i)delta .*Found'):
    comparison.compare(_rounds(), delta)


def test_the_table_has_a_line_for_each_row_and_a_dash_where_there_is_none():
  rows = comparison.compare(_rounds(worst=None), _DELTA)
  lines = comparison.format_table(rows).splitlines()
  assert len(lines) == 1 + len(rows)
  assert lines[0].split()[:4] == ['Method', 'Epsilon', 'Delta', 'Order']
  assert lines[1].split()[:5] == ['DP,', 'RDP', '-', '1e-05', '-']
  column = lines[0].index('Assumes')
  for line, row in zip(lines[1:], rows):
    assert line[column:] == row.assumption
