"""The claims that a figure can make: who is protected, and on what it rests.

Statements, tables, curves and files take the names from here. A figure without
its claim is not a result.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

# Against whom; the same for all claims.
ATTACKER = (
  'someone who sees everything released and knows all about the others, even '
  'which of them took part, but not whether this one did'
)
# A claim that rests on less is recommended as long as it costs no more.
_WORTH = 1.05


@dataclasses.dataclass(frozen=True)
class Claim:
  """What a figure says.

  Attributes:
    name: By which it is known everywhere.
    protects: Who is protected.
    needs: What must have been measured or done.
    rests_on: What must be true.
  """

  name: str
  protects: str
  needs: str
  rests_on: str


_REALISED = 'the trajectory that was realised'

# The ones that rest on least come first.
CLAIMS: dict[str, Claim] = {
  claim.name: claim
  for claim in (
    Claim('dp', 'anyone', 'clipping', 'nothing about the data'),
    Claim(
      'filter',
      'anyone',
      'a sum of clipped updates, every client measured and dropped before it '
      'exceeds its own budget',
      'nothing about the data',
    ),
    Claim(
      'each',
      'each of the units that were measured',
      'all units measured in every round',
      _REALISED,
    ),
    Claim(
      'census',
      'a unit drawn uniformly from the N that were measured; for one of them '
      'delta may be up to N times as large',
      'all units measured in every round',
      _REALISED,
    ),
    Claim(
      'sample',
      'a unit drawn from the population that the measured ones were drawn from',
      'a panel, drawn at random and measured in every round',
      f'{_REALISED}; a bound of the mean that fails with a part of delta',
    ),
    Claim(
      'paper',
      'a unit drawn anew in every round',
      'any units of every round',
      "Equation 5 and Theorem 1 of the paper; it under-reports for a unit that "
      'stays',
    ),
  )
}


class ClaimedEpsilon(NamedTuple):
  """One row of a report.

  Attributes:
    claim: What the figure says.
    epsilon: ε.
    delta: δ.
    recommended: Whether this is the figure to give.
    reason: Why it is the one recommended; empty for the others.
  """

  claim: Claim
  epsilon: float
  delta: float
  recommended: bool = False
  reason: str = ''

  def to_dict(self) -> dict[str, Any]:
    """Returns the row as plain data, with all that the claim says."""
    return {
      **self._asdict(),
      'claim': self.claim.name,
      'protects': self.claim.protects,
      'against': ATTACKER,
      'rests_on': self.claim.rests_on,
    }


def report(
  epsilons: dict[str, float], delta: float, asked_for: str
) -> list[ClaimedEpsilon]:
  """Returns the figures as rows, one of them recommended.

  That is the claim asked for, unless a claim that rests on less gives a figure
  that is hardly larger.

  Args:
    epsilons: ε by the name of the claim.
    delta: δ.
    asked_for: The claim that the accountant was made for.
  """
  names = [name for name in CLAIMS if name in epsilons]
  limit = _WORTH * epsilons[asked_for]
  chosen = next(
    name for name in names if name == asked_for or epsilons[name] <= limit
  )
  if chosen == asked_for:
    reason = 'claims that rest on less give a larger epsilon'
    if names.index(chosen) == 0:
      reason = 'no claim rests on less'
  else:
    reason = f'rests on less than {asked_for}, at hardly more epsilon'
  return [
    ClaimedEpsilon(
      CLAIMS[name],
      epsilons[name],
      delta,
      name == chosen,
      reason if name == chosen else '',
    )
    for name in names
  ]


def format_table(rows: Sequence[ClaimedEpsilon]) -> str:
  """Returns the rows as aligned text; a star marks the recommended one."""
  lines = [f'{"Claim":<10}{"Epsilon":>10}{"Delta":>10}  Protects']
  for row in rows:
    star = '*' if row.recommended else ''
    lines.append(
      f'{row.claim.name + star:<10}{row.epsilon:>10.3f}{row.delta:>10g}'
      f'  {row.claim.protects}'
    )
  return '\n'.join(lines)
