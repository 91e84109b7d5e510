"""One run accounted for in every way, and what can be claimed of it."""

import collections
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import dp_accounting

from tf_bdp import validation
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import claims as claims_lib
from tf_bdp.accounting import events, ledger, long_runs, replace_one

# A privacy loss distribution takes memory and time in proportion to ε over the
# steps of its grid. Coarser steps are used for larger ε, which errs on the safe
# side; beyond this the figure is of no use to anyone.
_LARGEST_EPSILON_FOR_PLD = 500.0
# Samples for which the betting bound takes seconds; with more of them, the
# distribution-free figure is by Bernstein's bound.
_MOST_SAMPLES_FOR_BETTING = 1000
# dp_accounting takes a second for each kind of round; with more of them, the
# figures of DP are the accountant's own.
_MOST_KINDS_FOR_DP_ACCOUNTING = 16


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


class Comparison(NamedTuple):
  """All figures of one run.

  Attributes:
    claims: What can be claimed, one claim recommended.
    rows: The same rounds by each method, DP first.
  """

  claims: list[claims_lib.ClaimedEpsilon]
  rows: list[Row]


def compare(
  rounds: Sequence[dp_accounting.DpEvent],
  delta: float,
  *,
  population: bool = False,
  asked_for: Optional[str] = None,
  filter_epsilon: Optional[float] = None,
) -> Comparison:
  """Accounts for the same rounds by DP and by BDP.

  Claims about a panel are made from the exact divergences of its units; those
  about other units by Hölder's inequality and a bound of moments that holds for
  every distribution.

  Args:
    rounds: The events of all rounds, `BayesianGaussianEvent`s or such as
      `BayesianAccountant` takes. Rounds of one and the same object are composed
      together, however many they are.
    delta: δ of all figures.
    population: Whether the panel is everybody. Only then are 'each' and
      'census' claimed: of a panel that is a sample they would say nothing about
      the others.
    asked_for: The claim that is wanted; by default 'census' of everybody, else
      'sample'.
    filter_epsilon: ε that a filter kept every unit to, if there was one.
  """
  validation.check_delta('delta', delta)
  if asked_for is None:
    asked_for = 'census' if population else 'sample'
  _check_claims(asked_for, filter_epsilon)
  parts = _parts(rounds)
  if any(isinstance(e, events.ReportedCostEvent) for e, _ in parts):
    raise ValueError(
      'Reported costs can be composed as they were bounded, not in other ways: '
      'use compare_reported.'
    )
  sampled = [(event, entry) for event, entry in parts if event is not None]
  is_panel = bool(sampled) and all(event.panel for event, _ in sampled)
  methods = _methods(sampled, is_panel, _is_clipped(parts))
  exact = accountant_lib.BayesianAccountant('panel') if is_panel else None
  if exact is not None:  # It keeps the paper's account as well.
    methods[0] = methods[0]._replace(accountant=exact)
  long_runs.compose(rounds, [method.accountant for method in methods])
  if exact is not None:
    methods[0] = methods[0]._replace(accountant=exact.as_in_the_paper())

  rows = {method.name: method.row(delta) for method in methods}
  holder = next(m.accountant for m in methods if m.name == 'BDP, holder')
  assert holder is not None
  dp_rows = _dp_rows(rounds, parts, delta, holder)
  epsilons = {'dp': holder.get_dp_epsilon(delta)}
  if exact is not None:
    epsilons = {row.claim.name: row.epsilon for row in exact.report(delta)}
    if not population:
      del epsilons['each'], epsilons['census']
  for claim, method in (
    ('sample', 'BDP, distribution-free'),
    ('paper', 'BDP, paper'),
  ):
    epsilon = rows[method].epsilon
    if sampled and epsilon is not None and (claim == 'paper' or not is_panel):
      epsilons[claim] = epsilon
  return Comparison(
    _claims(epsilons, dp_rows, delta, asked_for, filter_epsilon),
    dp_rows + [_compared(row, dp_rows) for row in rows.values()],
  )


def compare_replace_one(
  rounds: Sequence[dp_accounting.DpEvent], delta: float
) -> Comparison:
  """Accounts for rounds of a fixed number of units, by DP alone.

  Args:
    rounds: The events of all rounds, `SampledWithoutReplacementDpEvent`s.
    delta: δ for all methods.
  """
  validation.check_delta('delta', delta)
  event = dp_accounting.ComposedDpEvent(list(rounds))
  rdp = dp_accounting.rdp.RdpAccountant(
    neighboring_relation=replace_one.REPLACE_ONE
  ).compose(event)
  exact = replace_one.ReplaceOneAccountant().compose(event)
  whom = 'any person, in the place of another'
  rows = [
    Row('DP, RDP', float(rdp.get_epsilon(delta)), delta, None, whom),
    Row('DP, PLD', exact.get_epsilon(delta), delta, None, whom),
  ]
  epsilons = {row.claim.name: row.epsilon for row in exact.report(delta)}
  return Comparison(_claims(epsilons, rows, delta, 'dp', None), rows)


def compare_reported(
  rounds: Sequence[dp_accounting.DpEvent],
  delta: float,
  accountant: accountant_lib.BayesianAccountant,
  *,
  asked_for: Optional[str] = None,
  filter_epsilon: Optional[float] = None,
) -> Comparison:
  """Accounts for rounds by DP, beside the costs that were reported.

  Args:
    rounds: The events of all rounds, `ReportedCostEvent`s among them.
    delta: δ of all figures.
    accountant: That has composed them.
    asked_for: The claim that is wanted; by default what was reported.
    filter_epsilon: As of `compare`.
  """
  _check_claims(asked_for, filter_epsilon)
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
  dp_rows = _dp_rows(rounds, _parts(rounds), delta, accountant)
  # 'sample', or 'paper' where the bounds are the paper's.
  epsilons = {row.claim.name: row.epsilon for row in accountant.report(delta)}
  reported = next(name for name in epsilons if name != 'dp')
  return Comparison(
    _claims(epsilons, dp_rows, delta, asked_for or reported, filter_epsilon),
    [*dp_rows, _compared(row, dp_rows)],
  )


def _check_claims(
  asked_for: Optional[str], filter_epsilon: Optional[float]
) -> None:
  if asked_for is not None:
    validation.check_choice('asked_for', asked_for, tuple(claims_lib.CLAIMS))
  if filter_epsilon is not None:
    validation.check_positive('filter_epsilon', filter_epsilon)


def distribution_free_estimator(samples: int) -> str:
  """Returns which estimator bounds the costs of any distribution.

  Args:
    samples: Of how many samples a bound is taken.
  """
  return 'betting' if samples <= _MOST_SAMPLES_FOR_BETTING else 'bernstein'


class _Method(NamedTuple):
  """A row to be: its accountant, or the reason why there is none."""

  name: str
  accountant: Optional[accountant_lib.BayesianAccountant]
  assumption: str

  def row(self, delta: float) -> Row:
    if self.accountant is None:
      return Row(self.name, None, delta, None, self.assumption)
    details = self.accountant.explain(delta)
    return Row(
      self.name,
      details['epsilon'],
      delta,
      details['order'],
      self.assumption,
      details,
    )


def _methods(
  sampled: Sequence[tuple[Any, ledger.Entry]], is_panel: bool, is_clipped: bool
) -> list[_Method]:
  """Returns the ways to account for rounds by moments."""
  total_rounds = sum(entry.repeats for _, entry in sampled)
  samples = sum(len(event.groups) for event, _ in sampled)
  free = distribution_free_estimator(samples)
  accountant = accountant_lib.BayesianAccountant
  panel = functools.partial(accountant, 'panel')
  holder = functools.partial(
    accountant, 'holder', total_rounds=max(1, total_rounds)
  )
  methods = [
    _Method(
      'BDP, paper',
      accountant.paper(),
      'people are drawn anew each round; costs are as Eq. 5 assumes',
    ),
    _Method(
      'BDP, paper, L part',
      accountant.paper('tight'),
      'as above, with the exact divergence',
    ),
    _Method(
      'BDP, holder',
      holder(estimator='student_t'),
      f'a person stays all {total_rounds} rounds; costs are as Eq. 5 assumes',
    ),
    _Method('BDP, panel', None, 'the units are not a panel'),
    _Method('BDP, distribution-free', None, 'there is no worst case'),
  ]
  if is_panel:
    methods[3] = _Method(
      'BDP, panel',
      panel(estimator='student_t'),
      'a person stays all rounds; costs are as Eq. 5 assumes',
    )
  if is_clipped:
    methods[4] = _Method(
      'BDP, distribution-free',
      panel(estimator=free) if is_panel else holder(estimator=free),
      'a person stays all rounds; costs of any distribution',
    )
  return methods


def _claims(
  epsilons: dict[str, float],
  dp_rows: Sequence[Row],
  delta: float,
  asked_for: str,
  filter_epsilon: Optional[float],
) -> list[claims_lib.ClaimedEpsilon]:
  """Returns the claims; none of a fixed panel, and no row, is below DP."""
  known = [row.epsilon for row in dp_rows if row.epsilon is not None]
  # All of them are upper bounds of the same.
  own = epsilons['dp']
  dp = min([own, *known])
  epsilons = {**epsilons, 'dp': dp}
  for name in ('each', 'census'):
    # They follow from DP at the same δ, unless DP is about a worst case that
    # is drawn and they are about the one that was.
    if name in epsilons and epsilons[name] <= own:
      epsilons[name] = min(epsilons[name], dp)
  if filter_epsilon is not None:
    epsilons['filter'] = float(filter_epsilon)
  return claims_lib.report(epsilons, delta, asked_for)


def _parts(
  rounds: Sequence[dp_accounting.DpEvent],
) -> list[tuple[Any, ledger.Entry]]:
  """Returns the rounds as the ledger has them, alike ones together."""
  try:
    return [
      part
      for chunk in long_runs.chunks(rounds)
      for part in ledger.rounds_of(chunk)
    ]
  except ledger.UnsupportedPartError as error:
    raise dp_accounting.UnsupportedEventError(str(error)) from error


def _is_clipped(parts: Sequence[tuple[Any, ledger.Entry]]) -> bool:
  return all(not math.isinf(entry.squared_distance) for _, entry in parts)


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


def _is_ours_alone(event: dp_accounting.DpEvent) -> bool:
  """Returns whether dp_accounting has no event for the same.

  Such as for a worst case that is drawn, for groups that take part with a
  chance, and for groups that come and go.
  """
  if isinstance(event, dp_accounting.ComposedDpEvent):
    return any(map(_is_ours_alone, event.events))
  if isinstance(event, dp_accounting.SelfComposedDpEvent):
    return _is_ours_alone(event.event)
  if isinstance(event, events.ParallelEvent):
    return event.labels is not None or any(map(_is_ours_alone, event.groups))
  if isinstance(event, events.MixedGaussianEvent):
    return True
  return (
    getattr(event, 'worst_case_mixture', None) is not None
    or getattr(event, 'inclusion_probability', 1.0) < 1
  )


def _grouped(parts: Sequence[tuple[Any, ledger.Entry]]) -> list[ledger.Entry]:
  """Merges rounds that are alike, wherever they stand: DP does not mind."""
  counts: collections.Counter[tuple[float, float]] = collections.Counter()
  for _, entry in parts:
    counts[entry[:2]] += entry.repeats
  return [ledger.Entry(*key, False, n) for key, n in sorted(counts.items())]


def _dp_rows(
  rounds: Sequence[dp_accounting.DpEvent],
  parts: Sequence[tuple[Any, ledger.Entry]],
  delta: float,
  accountant: accountant_lib.BayesianAccountant,
) -> list[Row]:
  """Returns the rows of differential privacy.

  By dp_accounting where it has events for the rounds, else by an accountant
  that has composed them.
  """
  if not _is_clipped(parts):
    return [
      Row(method, None, delta, None, 'there is no worst case')
      for method in ('DP, RDP', 'DP, PLD')
    ]
  entries = _grouped(parts)
  if len(entries) > _MOST_KINDS_FOR_DP_ACCOUNTING or any(
    _is_ours_alone(e) for e in {id(e): e for e in rounds}.values()
  ):
    rdp = accountant.get_worst_case_epsilon(delta)
    pld = accountant.get_dp_epsilon(delta)
    return [
      Row('DP, RDP', rdp, delta, None, 'any person; integer orders'),
      Row('DP, PLD', pld, delta, None, 'any person'),
    ]
  event = ledger.to_dp_event(entries)
  rdp_accountant = dp_accounting.rdp.RdpAccountant().compose(event)
  epsilon, alpha = rdp_accountant.get_epsilon_and_optimal_order(delta)
  order = int(alpha) - 1 if epsilon > 0 and alpha == int(alpha) else None
  rows = [Row('DP, RDP', float(epsilon), delta, order, 'any person')]
  if epsilon > _LARGEST_EPSILON_FOR_PLD:
    reason = f'not computed: epsilon is above {_LARGEST_EPSILON_FOR_PLD:g}'
    return [*rows, Row('DP, PLD', None, delta, None, reason)]
  pld_accountant = dp_accounting.pld.PLDAccountant(
    value_discretization_interval=1e-4 * max(1.0, epsilon / 5)
  )
  pld_accountant.compose(event)
  epsilon = float(pld_accountant.get_epsilon(delta))
  return [*rows, Row('DP, PLD', epsilon, delta, None, 'any person')]


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
