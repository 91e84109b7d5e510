"""When a run ends before its last round, and who leaves before it does.

The number of rounds is released with the model. Differential privacy's ε does
not depend on data, so to stop at it tells nothing; to stop at a Bayesian ε
tells what that ε was measured on.
"""

from collections.abc import Mapping, Sequence
from typing import Optional

import dp_accounting
import numpy as np

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import individual_filter
from tf_bdp.mechanisms import client
from tf_bdp.mechanisms import measurements as measurements_lib
from tf_bdp.training import plan as plan_lib

# What is said of a run that stopped at a Bayesian ε.
TELLS = ', so that the number of rounds tells something about the data'


def dp_rounds(plan: plan_lib.Plan) -> Optional[int]:
  """Returns how many rounds DP's budget allows, if that is known in advance.

  It is where the worst case of a round does not depend on how many take part.

  Returns:
    At most the number of planned rounds; None without a budget, or if rounds
    have to be looked at one by one.

  Raises:
    ValueError: Not even one round is allowed.
  """
  budget, event = plan.accounting.dp_epsilon_budget, _worst_case_round(plan)
  if budget is None or event is None:
    return None
  delta = plan.delta_of(plan.mechanism.units[0])

  def fits(rounds: int) -> bool:
    accountant = plan.accountant(plan.mechanism.units[0])
    return _fits(accountant.compose(event, rounds), budget, delta)

  if not fits(1):
    raise _not_even_one(plan)
  enough, too_many = 1, plan.schedule.rounds + 1
  while too_many - enough > 1:
    middle = (enough + too_many) // 2
    if fits(middle):
      enough = middle
    else:
      too_many = middle
  return enough


def _worst_case_round(plan: plan_lib.Plan) -> Optional[dp_accounting.DpEvent]:
  """Returns a round as DP sees it; None if that is not always the same."""
  mechanism = plan.mechanism
  if not isinstance(mechanism, client.ClientMechanism):
    return None
  nobody = np.zeros(0), np.zeros(0, bool)
  rounds = [
    mechanism.event(
      measurements_lib.Measurements(n, 0, mechanism.clip_norm, *nobody)
    )
    for n in (0, 1, 2, plan.client_count)
  ]
  return rounds[0] if all(event == rounds[0] for event in rounds) else None


def exceeds_dp(
  plan: plan_lib.Plan,
  accountants: Mapping[str, accountant_lib.BayesianAccountant],
  rounds_before: int,
) -> bool:
  """Whether DP's budget, if there is one, is exceeded by a round.

  Args:
    plan: The plan of the run.
    accountants: Of each unit, with the round composed.
    rounds_before: How many rounds came before it.

  Raises:
    ValueError: The very first round exceeds it.
  """
  budget, unit = plan.accounting.dp_epsilon_budget, plan.mechanism.units[0]
  if budget is None or _fits(accountants[unit], budget, plan.delta_of(unit)):
    return False
  if not rounds_before:
    raise _not_even_one(plan)
  return True


def _fits(
  accountant: accountant_lib.BayesianAccountant, budget: float, delta: float
) -> bool:
  """Whether DP's exact ε is within the budget."""
  # By moments it is larger, and takes no time.
  if accountant.get_worst_case_epsilon(delta) <= budget:
    return True
  return accountant.get_dp_epsilon(delta) <= budget


def dp_reason(plan: plan_lib.Plan) -> str:
  """Says why a run stopped at DP's budget."""
  return (
    'the next round would exceed the budget of epsilon = '
    f'{plan.accounting.dp_epsilon_budget:g} of differential privacy'
  )


def _not_even_one(plan: plan_lib.Plan) -> ValueError:
  return ValueError(
    f'dp_epsilon_budget = {plan.accounting.dp_epsilon_budget:g} does not allow '
    'a single round. Raise it or the noise multiplier, or let fewer clients '
    'take part in a round.'
  )


def charged(
  plan: plan_lib.Plan,
  budgets: Optional[individual_filter.IndividualFilter],
  clients: Sequence[int],
  measured: measurements_lib.Measurements,
) -> Optional[individual_filter.IndividualFilter]:
  """Returns the clients' own accounts after a round, if they are kept.

  Args:
    plan: The plan of the run.
    budgets: The accounts before the round.
    clients: The panel, which is all clients.
    measured: What was measured of them.
  """
  if budgets is None:
    return None
  mechanism = plan.mechanism
  assert isinstance(mechanism, client.ClientMechanism)
  squared = mechanism.squared_distances(
    measured.squared_measures,
    measured.taking_part,
    measured.participants,
    measured.clip_norm,
  )
  return budgets.charged(clients, squared, measured.dropped)
