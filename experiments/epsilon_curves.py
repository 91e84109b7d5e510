"""ε of a run as it grows, by every accounting, and where each would stop.

A run is trained once. Each accounting then tells the last evaluated round at
which its budget was not yet spent, as the paper accounts for DP and BDP in
parallel.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import dp_accounting

from tf_bdp.accounting import accountant as accountant_lib

# In the order in which tables show them. Those that are claims have the claims'
# names; the others are ways to account by moments, as the paper does.
METHODS = {
  'dp_paper': 'DP, as the paper counts it (sensitivity C)',
  'dp_mechanism': 'DP, of the mechanism that ran',
  'dp': 'DP, of the mechanism that ran, exact (claim dp)',
  'bdp_paper': "BDP, the paper's accounting",
  'bdp_paper_l_part': "BDP, the paper's, exact divergence",
  'bdp_holder': "BDP, Hölder, Student's t (sound composition)",
  'bdp_panel': "BDP, panel, Student's t (sound composition)",
  'bdp_distribution_free': 'BDP, distribution-free (sound)',
  'sample': 'BDP, exact, for the population of the panel (claim sample)',
  'census': 'BDP, exact, for the clients of the run (claim census)',
  'each': 'BDP, exact, for each client of the run (claim each)',
}
_CLAIMS_OF_PANELS = ('dp', 'sample')
_CLAIMS_OF_EVERYBODY = ('census', 'each')


class Stop(NamedTuple):
  """The last evaluated round within a budget; round 0 if there is none."""

  round_number: int
  epsilon: float
  accuracy: Optional[float]


def compute(
  rounds: Sequence[dp_accounting.DpEvent],
  at: Sequence[int],
  delta: float,
  total_steps: int,
  dp_of_paper: Optional[dp_accounting.DpEvent] = None,
  panel: bool = True,
  everybody: bool = False,
) -> dict[str, list[float]]:
  """Returns ε after the rounds `at`, by method.

  Args:
    rounds: The events of all rounds.
    at: The numbers of rounds to stop at, ascending.
    delta: δ.
    total_steps: T of Hölder's composition.
    dp_of_paper: What a round is for DP as the paper counts it, if it does.
    panel: Whether the events are of a panel.
    everybody: Whether all units that there are are in the panel.
  """
  accountants: dict[str, Any] = {
    'bdp_paper': accountant_lib.BayesianAccountant.paper(),
    'bdp_paper_l_part': accountant_lib.BayesianAccountant.paper('tight'),
  }
  if panel:
    accountants['bdp_panel'] = accountant_lib.BayesianAccountant(
      estimator='student_t'
    )
    accountants['bdp_distribution_free'] = accountant_lib.BayesianAccountant(
      estimator='betting'
    )
  else:
    accountants['bdp_holder'] = accountant_lib.BayesianAccountant(
      'holder', estimator='student_t', total_rounds=total_steps
    )
  exact = accountant_lib.BayesianAccountant()
  claimed = _CLAIMS_OF_PANELS if panel else ()
  claimed += _CLAIMS_OF_EVERYBODY if panel and everybody else ()
  accountants['dp_mechanism'] = dp_accounting.rdp.RdpAccountant()
  if dp_of_paper is not None:
    accountants['dp_paper'] = dp_accounting.rdp.RdpAccountant()
  result: dict[str, list[float]] = {
    name: [] for name in METHODS if name in accountants or name in claimed
  }
  for number, event in enumerate(rounds, 1):
    worst_case = accountant_lib.BayesianAccountant.paper().compose(event).ledger
    composed = {'dp_mechanism': worst_case, 'dp_paper': dp_of_paper}
    for name, accountant in accountants.items():
      accountant.compose(composed.get(name, event))
    if claimed:
      exact.compose(event)
    if number in at:
      for name, accountant in accountants.items():
        epsilon, _ = accountant.get_epsilon_and_optimal_order(delta)
        result[name].append(float(epsilon))
      for row in exact.report(delta) if claimed else ():
        if row.claim.name in claimed:
          result[row.claim.name].append(row.epsilon)
  return result


def stop_at(
  budgets: Sequence[tuple[Sequence[float], float]],
  at: Sequence[int],
  accuracies: Mapping[int, float],
) -> Stop:
  """Returns where training stops: within all budgets.

  Args:
    budgets: Pairs of a curve, as `compute` returns, and its budget.
    at: The rounds of the curves.
    accuracies: By round.
  """
  stop = Stop(0, 0.0, None)
  for position, number in enumerate(at):
    if any(curve[position] > budget for curve, budget in budgets):
      break
    stop = Stop(number, budgets[0][0][position], accuracies[number])
  return stop
