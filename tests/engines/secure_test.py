"""Every level under secure aggregation, against the same run without it.

That both train the same model is in `contract_test`; here is what reaches the
server, and what costs are reported.
"""

import dataclasses
import functools

import attr
import dp_accounting
import numpy as np
import pytest
import tensorflow_federated as tff
import tree

from tests.engines import cases
from tf_bdp.accounting import events
from tf_bdp.aggregators import cost_reports, secure_sums
from tf_bdp.mechanisms import measurements as measurements_lib

_CASES = cases.SECURE_CASES


def _without_labels(event):
  """The event as if nobody knew which client a cost was of."""
  if isinstance(event, dp_accounting.ComposedDpEvent):
    return dp_accounting.ComposedDpEvent(map(_without_labels, event.events))
  if isinstance(event, events.ParallelEvent):
    return attr.evolve(event, labels=None)
  return event


@functools.cache
def _accountants(name, case, count=None, labelled=False):
  """Accountants after all rounds, or the first ones."""
  result = cases.accountants(case, cases.engine(name, case).mechanism, ())
  for unit, accountant in result.items():
    for part in cases.rounds(name, case)[:count]:
      event = part.events[unit]
      accountant.compose(event if labelled else _without_labels(event))
  return result


@pytest.mark.parametrize('case', ['secure_parallel_steps', 'secure_split'])
def test_who_learns_only_the_largest_cost_reports_no_less_than_who_learns_all(
  case,
):
  # In the clear, a client is charged for the rounds that it took part in.
  known = _accountants('inprocess', case, labelled=True)
  for unit, accountant in _accountants('secure', case).items():
    reported = accountant._costs(0.1 * cases.DELTA)
    plain = known[unit]._costs(0.1 * cases.DELTA)
    assert np.all(reported >= plain * (1 - 1e-6))
    assert np.any(reported > plain * 1.05) == (unit == 'example')
    worst, of_client = (
      a._worst_case_costs() for a in (accountant, known[unit])
    )
    assert np.all(worst >= of_client * (1 - 1e-9))


@pytest.mark.parametrize('case', _CASES)
def test_reported_costs_are_never_less_and_hardly_more(case):
  wanted, found = (_accountants(name, case) for name in ('inprocess', 'secure'))
  for unit, accountant in found.items():
    # Of every order, with a tenth of δ for bounds that fail.
    plain = wanted[unit]._costs(0.1 * cases.DELTA)
    reported = accountant._costs(0.1 * cases.DELTA)
    # Less by no more than float32, in which the two engines measure distances.
    assert np.all(reported >= plain * (1 - 1e-6))
    # Maxima are rounded up by half a percent at most.
    assert np.all(reported <= plain * 1.006)


@pytest.mark.parametrize('case', _CASES)
def test_it_is_the_estimate_that_is_compared_and_not_the_worst_case(case):
  # This many clients are too few for Bernstein's bound.
  for unit, accountant in _accountants('secure', case, 1).items():
    if (unit, _CASES[case].estimator) != ('client', 'bernstein'):
      reported = accountant._costs(0.1 * cases.DELTA)
      worst = accountant._worst_case_costs()
      assert np.all(reported[:2] < 0.96 * worst[:2])


@pytest.mark.parametrize('case', _CASES)
def test_epsilon_is_never_less_and_hardly_more(case):
  spent = []
  for count in range(1, 4):
    wanted, found = (
      _accountants(name, case, count) for name in ('inprocess', 'secure')
    )
    row = {}
    for unit, accountant in found.items():
      plain = wanted[unit].get_epsilon(cases.DELTA)
      epsilon = accountant.get_epsilon(cases.DELTA)
      assert plain * (1 - 1e-6) <= epsilon <= plain * 1.02
      dp = accountant.get_worst_case_epsilon(cases.DELTA)
      assert dp == pytest.approx(
        wanted[unit].get_worst_case_epsilon(cases.DELTA), rel=1e-9
      )
      row[unit] = (epsilon, dp)
    spent.append(row)
  first, second, third = spent
  # Nobody came to the second round.
  assert first == second
  for unit, (epsilon, dp) in third.items():
    assert second[unit][0] <= epsilon and second[unit][1] < dp


@pytest.mark.parametrize('case', _CASES)
def test_the_server_learns_no_value_of_a_single_client(case):
  spy = cases.engine('secure', case)._process
  rounds = len(cases.rounds('secure', case))
  learnt = [
    {path: np.shape(leaf) for path, leaf in tree.flatten_with_path(metrics)}
    for metrics in spy.metrics[:rounds]
  ]
  # However many take part, it learns as many numbers: those of orders, of two
  # moments, and of local steps.
  assert len(learnt) == rounds
  assert all(part == learnt[0] for part in learnt)
  orders = len(cases.ORDERS)
  steps = 2 if _CASES[case].algorithm.name == 'fed_avg' else 1
  assert set(learnt[0].values()) <= {
    *((), (orders,), (2, orders), (steps, orders))
  }
  names = {path[-1] for path in learnt[0]}
  assert not names & {'squared_measures', 'aggregate'}


@pytest.mark.parametrize('case', _CASES)
def test_all_aggregations_are_secure(case):
  process = cases.engine('secure', case)._process.process
  tff.test.assert_not_contains_unsecure_aggregation(process.next)


@pytest.mark.parametrize('case', _CASES)
def test_nothing_is_measured_but_costs(case):
  units = cases.engine('secure', case).mechanism.units
  for part in cases.rounds('secure', case):
    assert part.measurements.squared_measures.size == 0
    assert part.measurements.examples is None
    assert set(part.measurements.reported) == set(units)
    for reported in part.measurements.reported.values():
      assert reported.costs.shape == (len(cases.ORDERS),)


@pytest.mark.parametrize('level', ['mean', 'joint', 'split'])
def test_without_noise_reported_costs_are_infinite_and_the_round_not_private(
  level,
):
  case = cases.SECURE_CASES['secure_sequential']
  options = {'noise_multiplier': 0.0}
  quiet = cases.mechanism_of(
    level, case.algorithm, case.task.data(), case.task, **options
  )
  loud = dataclasses.replace(
    quiet,
    noise_multiplier=1.0,
    **({'server_noise_multiplier': 1.0} if level == 'split' else {}),
  )
  accountant = cases.accountants('secure_joint', loud, ())['client']
  reporting = accountant.reporting(cases.DELTA)
  reported = cost_reports.bound_of_client_costs({}, np.inf, 0.5, reporting)
  np.testing.assert_array_equal(reported.costs, [np.inf] * len(cases.ORDERS))
  event = quiet.events(
    measurements_lib.Measurements(
      *(3, 0, 1.0, np.zeros(0), np.zeros(0, bool)),
      reported={'client': reported, 'example': reported},
    )
  )['client']
  assert isinstance(event, dp_accounting.NonPrivateDpEvent)


def test_costs_of_clients_and_steps_are_reported_together_and_counted_so():
  for case, participants, repeats in (
    ('secure_sequential', 3, 3),
    ('secure_parallel_steps', 3, 2),
  ):
    mechanism = cases.engine('inprocess', case).mechanism
    reported = measurements_lib.ReportedCosts(np.full(4, 6.0), 1e-6)
    event = mechanism.events(
      measurements_lib.Measurements(
        *(participants, 0, 1.0, np.zeros(0), np.zeros(0, bool)),
        reported={'example': reported},
      )
    )['example']
    assert event.count == repeats
    assert isinstance(event.event, events.ReportedCostEvent)
    assert event.event.costs == (6.0 / repeats,) * 4


def test_a_panel_is_refused_where_costs_are_reported():
  runner = cases.engine('secure', 'secure_sequential')
  with pytest.raises(ValueError, match='there is no panel: use panel_size = 0'):
    runner.run_round(runner.initial_state(), 0, [0, 1], [2, 3, 4])


def test_the_simulation_runs_secure_sums():
  cases.engine('secure', 'secure_sequential')
  secure_sums.check_context()
