"""One run accounted for in every way, side by side."""

import collections
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional

import dp_accounting

from tf_bdp import validation
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import events, ledger, mean_bounds, mixtures

# A privacy loss distribution takes memory and time in proportion to ε over the
# steps of its grid. Coarser steps are used for larger ε, which errs on the safe
# side; beyond this the figure is of no use to anyone.
_LARGEST_EPSILON_FOR_PLD = 500.0
# Samples for which the betting bound takes seconds; with more of them, the
# distribution-free figure is by Bernstein's bound.
_MOST_SAMPLES_FOR_BETTING = 1000


class Row(NamedTuple):
  """One way to account for the run.

  Attributes:
    method: Its name.
    epsilon: ε; None where the method does not apply.
    delta: δ.
    order: The order λ at which ε was found, where there is one.
    assumption: What the figure rests on, or why there is none.
    details: How it was computed, as `BayesianAccountant.explain` tells.
  """

  method: str
  epsilon: Optional[float]
  delta: float
  order: Optional[int]
  assumption: str
  details: Optional[dict[str, Any]] = None


def compare(rounds: Sequence[dp_accounting.DpEvent], delta: float) -> list[Row]:
  """Accounts for the same rounds by DP and by BDP.

  Args:
    rounds: The events of all rounds, `BayesianGaussianEvent`s or such as
      `BayesianAccountant` takes.
    delta: δ for all methods.

  Returns:
    The rows, from differential privacy to the Bayesian methods.
  """
  validation.check_delta('delta', delta)
  parts = _parts(rounds)
  if any(isinstance(e, events.ReportedCostEvent) for e, _ in parts):
    raise ValueError(
      'Reported costs can be composed as they were bounded, not in other ways: '
      'use compare_reported.'
    )
  sampled = [(event, entry) for event, entry in parts if event is not None]
  total_rounds = sum(entry.repeats for _, entry in sampled)
  is_panel = bool(sampled) and all(event.panel for event, _ in sampled)
  is_clipped = all(not math.isinf(e.squared_distance) for _, e in parts)
  samples = sum(len(event.groups) for event, _ in sampled)
  free = 'betting' if samples <= _MOST_SAMPLES_FOR_BETTING else 'bernstein'

  accountant = accountant_lib.BayesianAccountant
  holder = functools.partial(
    accountant, 'holder', total_rounds=max(1, total_rounds)
  )

  def bayesian(
    name: str, method: accountant_lib.BayesianAccountant, assumption: str
  ) -> Row:
    for event in rounds:
      method.compose(event)
    details = method.explain(delta)
    return Row(
      name, details['epsilon'], delta, details['order'], assumption, details
    )

  dp_rows = _dp_rows([entry for _, entry in parts], delta, is_clipped)
  rows = [
    bayesian(
      'BDP, paper',
      accountant.paper(),
      'people are drawn anew each round; costs are as Eq. 5 assumes',
    ),
    bayesian(
      'BDP, paper, L part',
      accountant.paper('tight'),
      'as above, with the exact divergence',
    ),
    bayesian(
      'BDP, holder',
      holder(estimator='student_t'),
      f'a person stays all {total_rounds} rounds; costs are as Eq. 5 assumes',
    ),
  ]
  if is_panel:
    rows.append(
      bayesian(
        'BDP, panel',
        accountant(estimator='student_t'),
        'a person stays all rounds; costs are as Eq. 5 assumes',
      )
    )
  else:
    rows.append(
      Row('BDP, panel', None, delta, None, 'the units are not a panel')
    )
  if is_clipped:
    rows.append(
      bayesian(
        'BDP, distribution-free',
        accountant(estimator=free) if is_panel else holder(estimator=free),
        'a person stays all rounds; costs of any distribution',
      )
    )
  else:
    rows.append(
      Row('BDP, distribution-free', None, delta, None, 'there is no worst case')
    )
  return dp_rows + [_compared(row, dp_rows) for row in rows]


def compare_reported(
  rounds: Sequence[dp_accounting.DpEvent],
  delta: float,
  accountant: accountant_lib.BayesianAccountant,
) -> list[Row]:
  """Accounts for rounds by DP, beside the costs that were reported.

  Args:
    rounds: The events of all rounds, `ReportedCostEvent`s among them.
    delta: δ for all methods.
    accountant: That has composed them.
  """
  parts = _parts(rounds)
  details = accountant.explain(delta)
  row = Row(
    'BDP, reported',
    details['epsilon'],
    delta,
    details['order'],
    f'as the clients bounded it: {details["composition"]}, '
    f'{details["estimator"]}',
    details,
  )
  is_clipped = all(not math.isinf(e.squared_distance) for _, e in parts)
  dp_rows = _dp_rows([entry for _, entry in parts], delta, is_clipped)
  return [*dp_rows, _compared(row, dp_rows)]


def _parts(
  rounds: Sequence[dp_accounting.DpEvent],
) -> list[tuple[Any, ledger.Entry]]:
  try:
    return [part for event in rounds for part in ledger.rounds_of(event)]
  except ledger.UnsupportedPartError as error:
    raise dp_accounting.UnsupportedEventError(str(error)) from error


def _compared(row: Row, dp_rows: Sequence[Row]) -> Row:
  """Says where a row gains nothing over DP, which implies BDP.

  Its figure may be a little above DP's: a part of δ is kept for bounds that
  fail. The paper's rows stay as the paper has them.
  """
  known = [dp.epsilon for dp in dp_rows if dp.epsilon is not None]
  if row.epsilon is None or not known or 'paper' in row.method:
    return row
  if row.epsilon <= min(known):
    return row
  return row._replace(assumption='as DP, but for the delta kept for bounds')


def _grouped(entries: Iterable[ledger.Entry]) -> list[ledger.Entry]:
  """Merges rounds that are alike, wherever they stand: DP does not mind."""
  counts: collections.Counter[tuple[float, float]] = collections.Counter()
  labelled = []
  for entry in entries:
    if entry.groups:
      labelled.append(entry)
    else:
      worst = mixtures.largest(entry.worst_cases)
      counts[worst, entry.participation_probability] += entry.repeats
  merged = [ledger.Entry(*key, False, n) for key, n in sorted(counts.items())]
  return [*merged, *labelled]


def _dp_rows(
  entries: Sequence[ledger.Entry], delta: float, is_clipped: bool
) -> list[Row]:
  """Returns the rows of differential privacy."""
  if not is_clipped:
    return [
      Row(method, None, delta, None, 'there is no worst case')
      for method in ('DP, RDP', 'DP, PLD')
    ]
  if any(entry.inclusion_probability < 1 for entry in entries):
    return _dp_rows_with_inclusion(entries, delta)
  event = ledger.to_dp_event(_grouped(entries))
  accountant = dp_accounting.rdp.RdpAccountant().compose(event)
  epsilon, alpha = accountant.get_epsilon_and_optimal_order(delta)
  order = int(alpha) - 1 if epsilon > 0 and alpha == int(alpha) else None
  rows = [Row('DP, RDP', float(epsilon), delta, order, 'any person')]
  if epsilon > _LARGEST_EPSILON_FOR_PLD:
    reason = f'not computed: epsilon is above {_LARGEST_EPSILON_FOR_PLD:g}'
    return [*rows, Row('DP, PLD', None, delta, None, reason)]
  pld = dp_accounting.pld.PLDAccountant(
    value_discretization_interval=1e-4 * max(1.0, epsilon / 5)
  )
  pld.compose(event)
  epsilon = float(pld.get_epsilon(delta))
  return [*rows, Row('DP, PLD', epsilon, delta, None, 'any person')]


def _dp_rows_with_inclusion(
  entries: Sequence[ledger.Entry], delta: float
) -> list[Row]:
  """Returns DP's rows where dp_accounting has no event for the rounds."""
  accountant = accountant_lib.BayesianAccountant(
    'product', estimator='bernstein'
  )
  for entry in entries:
    # As the accountant composes them; their own costs do not matter here.
    event = events.BayesianGaussianEvent(
      [entry.squared_distance] * mean_bounds.FEWEST_UNITS,
      entry.participation_probability,
      entry.squared_distance,
      inclusion_probability=entry.inclusion_probability,
      worst_case_mixture=entry.mixture or None,
    )
    accountant.compose(event, entry.repeats)
  epsilon = accountant.get_worst_case_epsilon(delta)
  reason = 'not computed: whether clients take part is visible'
  return [
    Row('DP, RDP', epsilon, delta, None, 'any person; integer orders'),
    Row('DP, PLD', None, delta, None, reason),
  ]


def format_table(rows: Sequence[Row]) -> str:
  """Returns the rows as aligned text."""
  lines = [
    f'{"Method":<24}{"Epsilon":>10}{"Delta":>10}{"Order":>7}  Assumes that'
  ]
  for row in rows:
    epsilon = '-' if row.epsilon is None else f'{row.epsilon:.3f}'
    order = '-' if row.order is None else str(row.order)
    lines.append(
      f'{row.method:<24}{epsilon:>10}{row.delta:>10g}{order:>7}'
      f'  {row.assumption}'
    )
  return '\n'.join(lines)
