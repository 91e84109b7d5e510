"""Tests of the table of methods."""

import collections
import functools

import attr
import dp_accounting
import numpy as np
import pytest

from tests.accounting import builders, oracles
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import chord_table, comparison, events

_DELTA = builders.DELTA
_METHODS = [
  'DP, RDP',
  'DP, PLD',
  'BDP, paper',
  'BDP, paper, L part',
  'BDP, holder',
  'BDP, panel',
  'BDP, distribution-free',
]
pytestmark = builders.ignore_best_order


def _rounds(worst=0.25, panel=True, units=50):
  generator = np.random.default_rng(0)
  return tuple(
    events.BayesianGaussianEvent(
      0.25 * generator.beta(0.5, 5, units), 0.1, worst, panel
    )
    for _ in range(4)
  )


def _parallel_rounds(panel=True):
  """The same beside a second group, which is sampled less often."""
  generator = np.random.default_rng(1)
  return tuple(
    events.ParallelEvent(
      [
        event,
        builders.make_event(
          0.25 * generator.beta(0.5, 5, 40), 0.05, 0.25, panel
        ),
      ]
    )
    for event in _rounds(panel=panel)
  )


def _dp_epsilons(q, z, count):
  event = dp_accounting.SelfComposedDpEvent(
    builders.sampled_gaussian(q, z), count
  )
  return [
    dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(_DELTA),
    dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(_DELTA),
  ]


@functools.cache
def _rows(rounds):
  rows = comparison.compare(rounds, _DELTA).rows
  assert [row.method for row in rows] == _METHODS
  assert all(row.delta == _DELTA for row in rows)
  return {row.method: row for row in rows}


@pytest.mark.parametrize('make_rounds', [_rounds, _parallel_rounds])
def test_the_dp_rows_are_what_dp_accounting_computes(make_rounds):
  rows = _rows(make_rounds())
  rdp, pld = _dp_epsilons(0.1, 2.0, 4)
  assert rows['DP, RDP'].epsilon == pytest.approx(rdp, rel=1e-9)
  assert rows['DP, PLD'].epsilon == pytest.approx(pld, rel=1e-6)


@pytest.mark.parametrize('make_rounds', [_rounds, _parallel_rounds])
@pytest.mark.parametrize('panel', [True, False])
def test_the_bayesian_rows_are_what_the_accountants_compute(make_rounds, panel):
  rounds = make_rounds(panel=panel)
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
    details = accountant.explain(_DELTA)
    if 'paper' not in method:
      dp = min(rows['DP, RDP'].epsilon, rows['DP, PLD'].epsilon)
      gains = details['epsilon'] <= dp
      assert gains != ('as DP' in rows[method].assumption)
      # DP implies BDP; a tenth of δ is kept for bounds.
      assert details['epsilon'] < 1.02 * dp
    assert rows[method].epsilon == details['epsilon']
    assert rows[method].order == details['order']
    assert rows[method].details == details


def test_without_a_worst_case_the_rows_that_need_one_are_none():
  rows = _rows(_rounds(worst=None))
  for method in ('DP, RDP', 'DP, PLD', 'BDP, distribution-free'):
    assert rows[method].epsilon is None
    assert rows[method].assumption == 'there is no worst case'
  assert rows['BDP, panel'].epsilon > 0


@pytest.mark.parametrize('make_rounds', [_rounds, _parallel_rounds])
def test_without_a_panel_its_row_is_none(make_rounds):
  row = _rows(make_rounds(panel=False))['BDP, panel']
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
  composed = (
    dp_accounting.ComposedDpEvent(rounds[:2]),
    dp_accounting.ComposedDpEvent(rounds[2:]),
  )
  flat, nested = _rows(rounds), _rows(composed)
  for method in _METHODS:
    assert nested[method].epsilon == pytest.approx(
      flat[method].epsilon, rel=1e-12
    )


def test_an_epsilon_beyond_use_is_not_computed_as_a_distribution():
  rounds = events.BayesianGaussianEvent([900.0] * 5, 1.0, 1e4)
  row = _rows((rounds,))['DP, PLD']
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
  rows = comparison.compare(_rounds(worst=None), _DELTA).rows
  lines = comparison.format_table(rows).splitlines()
  assert len(lines) == 1 + len(rows)
  assert lines[0].split()[:4] == ['Method', 'Epsilon', 'Delta', 'Order']
  assert lines[1].split()[:5] == ['DP,', 'RDP', '-', '1e-05', '-']
  column = lines[0].index('Assumes')
  for line, row in zip(lines[1:], rows):
    assert line[column:] == row.assumption


# --- Rounds in which groups take part with a chance.


def _included_rounds(chances=(0.1, 0.3)):
  """Measured rounds of two chances, and one of plain noise between them."""
  included = builders.with_inclusion
  groups = [
    included(attr.evolve(group, panel=False), chances[0])
    for group in builders.make_groups()
  ]
  last = included(
    builders.make_event([0.01] * 20, 0.5, panel=False), chances[1]
  )
  noise = dp_accounting.GaussianDpEvent(9.0)
  return (*[events.ParallelEvent(groups)] * 2, noise, *[last] * 3)


def _worst_costs(worst, q, inclusion):
  orders = accountant_lib.DEFAULT_ORDERS
  (costs,) = oracles.log_moments([worst], q, orders)
  return oracles.included(costs, inclusion)


def test_of_included_rounds_dp_is_the_accountants_own():
  rows = _rows(_included_rounds())
  rdp, pld = rows['DP, RDP'], rows['DP, PLD']
  orders = accountant_lib.DEFAULT_ORDERS
  costs = (
    2 * _worst_costs(0.4, 0.6, 0.1)
    + oracles.gaussian_costs([1 / 81], orders)[0]
    + 3 * _worst_costs(0.25, 0.5, 0.3)
  )
  assert rdp.epsilon == pytest.approx(
    oracles.epsilon(orders, costs, _DELTA, 'tight'), rel=1e-9
  )
  assert 'integer orders' in rdp.assumption
  accountant = builders.make_accountant('product')
  accountant.compose(dp_accounting.ComposedDpEvent(_included_rounds()))
  assert pld.epsilon == accountant.get_dp_epsilon(_DELTA) < rdp.epsilon
  for name in ('BDP, holder', 'BDP, distribution-free'):
    assert 0 < rows[name].epsilon <= rdp.epsilon
  # The gain is in all rows.
  for method, row in _rows(_included_rounds((1.0, 1.0))).items():
    found = rows[method].epsilon
    assert found is None or found < row.epsilon


def test_included_rounds_that_move_nothing_can_be_compared():
  event = builders.make_event([0.0] * 5, 1.0, 0.0)
  rounds = [builders.with_inclusion(event, 0.5)]
  rdp, *_ = comparison.compare(rounds, _DELTA).rows
  assert rdp.epsilon == 0.0


# --- Rounds of which only the costs were reported.


def _reported_to(events_, **settings):
  accountant = builders.make_accountant(
    'holder', orders=builders.FEW_ORDERS, **settings
  )
  for event in events_:
    accountant.compose(event)
  return accountant


def test_reported_rounds_are_not_composed_in_other_ways_than_bounded():
  with pytest.raises(ValueError, match='use compare_reported'):
    comparison.compare([*_rounds(), builders.reported([0.1] * 5)], _DELTA)


def test_the_rows_of_reported_rounds_are_dp_and_what_was_reported():
  rounds = [builders.reported([0.001, 0.002, 0.005, 0.02, 0.07])] * 4
  accountant = _reported_to(rounds, estimator='student_t')
  rows = comparison.compare_reported(rounds, _DELTA, accountant).rows
  assert [row.method for row in rows] == ['DP, RDP', 'DP, PLD', 'BDP, reported']
  rdp, pld = _dp_epsilons(0.3, 2.0, 4)
  assert rows[0].epsilon == pytest.approx(rdp, rel=1e-9)
  assert rows[1].epsilon == pytest.approx(pld, rel=1e-6)
  assert rows[2].epsilon == accountant.get_epsilon(_DELTA) < pld
  assert rows[2].details == accountant.explain(_DELTA)
  assert rows[2].order == rows[2].details['order']
  assert rows[2].assumption.endswith('holder, student_t')


def test_a_reported_figure_above_that_of_dp_gives_way_to_what_bounds_leave():
  rounds = [builders.reported([50.0] * 5, worst=0.04)] * 3
  accountant = _reported_to(rounds)
  *dp_rows, row = comparison.compare_reported(rounds, _DELTA, accountant).rows
  smallest = min(dp.epsilon for dp in dp_rows)
  rest = dp_accounting.pld.PLDAccountant().compose(accountant.ledger)
  assert smallest < row.epsilon
  assert row.epsilon == pytest.approx(rest.get_epsilon(0.9 * _DELTA), rel=1e-3)
  assert row.epsilon == row.details['epsilon'] == accountant.get_epsilon(_DELTA)
  assert row.assumption.startswith('as DP')


def test_of_reported_included_rounds_dp_is_at_the_accountants_orders():
  event = builders.with_inclusion(builders.reported([0.01] * 5), 0.2)
  accountant = _reported_to([event] * 3)
  rdp, pld, reported = comparison.compare_reported(
    [event] * 3, _DELTA, accountant
  ).rows
  orders = builders.FEW_ORDERS
  (costs,) = oracles.log_moments([0.25], 0.3, orders)
  costs = 3 * oracles.included(costs, 0.2)
  assert rdp.epsilon == pytest.approx(
    oracles.epsilon(orders, costs, _DELTA, 'tight'), rel=1e-9
  )
  assert pld.epsilon == accountant.get_dp_epsilon(_DELTA) < rdp.epsilon
  assert reported.epsilon == accountant.get_epsilon(_DELTA)


# --- Long runs, and rounds of many kinds.


def test_rounds_of_one_object_are_those_of_many_equal_ones():
  rounds = _rounds()[:2] * 3
  together = comparison.compare(rounds, _DELTA)
  one_by_one = comparison.compare(
    [attr.evolve(event) for event in rounds], _DELTA
  )
  for found, wanted in zip(together.rows, one_by_one.rows):
    assert found.epsilon == pytest.approx(wanted.epsilon, rel=3e-6)
  for found, wanted in zip(together.claims, one_by_one.claims):
    assert found.epsilon == pytest.approx(wanted.epsilon, rel=3e-6)


def test_the_time_for_equal_rounds_does_not_grow_with_their_number():
  event = events.BayesianGaussianEvent([1e-6] * 10, 0.1, 1e-5, True)
  calls = collections.Counter()

  def counted(*arguments):
    calls['log_moments'] += 1
    return log_moments(*arguments)

  log_moments = chord_table.log_moments_upper_bound
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(chord_table, 'log_moments_upper_bound', counted)
    comparison.compare([event] * 100_000, _DELTA)
  # Once for each method, where rounds one by one would make it 500,000.
  assert calls['log_moments'] <= 6


def test_of_many_kinds_of_rounds_dp_is_the_accountants_own():
  rounds = [
    builders.make_event([0.01] * 5, 0.3, 0.2 + 0.01 * t, panel=False)
    for t in range(20)
  ]
  rows = {row.method: row for row in comparison.compare(rounds, _DELTA).rows}
  worst = [
    builders.sampled_gaussian(0.3, (0.2 + 0.01 * t) ** -0.5) for t in range(20)
  ]
  event = dp_accounting.ComposedDpEvent(worst)
  orders = [order + 1 for order in accountant_lib.DEFAULT_ORDERS]
  rdp = dp_accounting.rdp.RdpAccountant(orders).compose(event)
  pld = dp_accounting.pld.PLDAccountant(
    value_discretization_interval=1e-3
  ).compose(event)
  assert rows['DP, RDP'].epsilon == pytest.approx(
    rdp.get_epsilon(_DELTA), rel=1e-6
  )
  assert rows['DP, PLD'].epsilon == pytest.approx(
    pld.get_epsilon(_DELTA), rel=2e-3
  )


def _labelled(event):
  return events.ParallelEvent([event], labels=[7])


@pytest.mark.parametrize(
  'change',
  [
    functools.partial(
      attr.evolve, worst_case_mixture=[(0.5, 0.25), (0.5, 0.01)]
    ),
    functools.partial(attr.evolve, inclusion_probability=0.5),
    _labelled,
  ],
  ids=['mixture', 'inclusion', 'labels'],
)
@pytest.mark.parametrize('nested', [False, True])
def test_dp_of_what_dp_accounting_has_no_event_for_is_the_accountants_own(
  change, nested
):
  rounds = [change(attr.evolve(event, panel=False)) for event in _rounds()]
  accountant = builders.make_accountant(
    'product', orders=accountant_lib.DEFAULT_ORDERS
  )
  accountant.compose(dp_accounting.ComposedDpEvent(rounds))
  if nested:
    rounds = [
      dp_accounting.ComposedDpEvent(rounds[:1]),
      dp_accounting.SelfComposedDpEvent(
        dp_accounting.ComposedDpEvent(rounds[1:]), 1
      ),
    ]
  compared = comparison.compare(rounds, _DELTA)
  rows = {row.method: row for row in compared.rows}
  rdp, pld = rows['DP, RDP'].epsilon, rows['DP, PLD'].epsilon
  assert rdp == pytest.approx(accountant.get_worst_case_epsilon(_DELTA))
  assert pld == pytest.approx(accountant.get_dp_epsilon(_DELTA))
  assert compared.claims[0].claim.name == 'dp'
  assert compared.claims[0].epsilon == min(rdp, pld)


def test_rounds_of_which_only_the_worst_case_is_known_are_dp_alone():
  rounds = [builders.sampled_gaussian(0.1, 2.0)] * 4
  (row,) = comparison.compare(rounds, _DELTA).claims
  assert row.claim.name == 'dp'
  assert row.epsilon == pytest.approx(min(_dp_epsilons(0.1, 2.0, 4)), rel=1e-3)
  assert row.recommended
  assert row.reason == 'sample cannot be claimed from what was measured'
