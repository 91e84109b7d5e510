"""The claims that a figure can make: who is protected, and on what it rests.

Statements, tables, curves and files take the names from here. A figure without
its claim is not a result.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tf_bdp.accounting import conversion

# Against whom; the same for all claims.
ATTACKER = (
  'someone who sees everything released and knows all about the others, even '
  'which of them took part, but not whether this one did'
)
# A stronger claim is recommended if it costs at most this much more.
_WORTH = 1.05


@dataclasses.dataclass(frozen=True)
class Claim:
  """What a figure says.

  Attributes:
    name: By which it is known everywhere.
    protects: Who is protected.
    needs: What must have been measured or done.
    rests_on: What must be true.
    implied_by: Claims that are stronger: they say the same and more.
  """

  name: str
  protects: str
  needs: str
  rests_on: str
  implied_by: tuple[str, ...] = ()


_REALISED = 'the trajectory that was realised'
_FOR_ANYONE = ('dp', 'filter')

# The strongest come first.
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
      ('dp',),
    ),
    Claim(
      'each',
      'each of the units that were measured',
      'all units measured in every round',
      _REALISED,
      _FOR_ANYONE,
    ),
    Claim(
      'census',
      'a unit drawn uniformly from the N that were measured; for one of them '
      'delta may be up to N times as large',
      'all units measured in every round',
      _REALISED,
      (*_FOR_ANYONE, 'each'),
    ),
    Claim(
      'sample',
      'a unit drawn from the population that the measured ones were drawn from',
      'units drawn at random: a panel measured in every round, or the '
      'participants of each',
      f'{_REALISED}; a bound of the mean that fails with a part of delta',
      _FOR_ANYONE,
    ),
    Claim(
      'paper',
      'a unit drawn anew in every round',
      'any units of every round',
      'Equation 5 and Theorem 1 of the paper; it under-reports for a unit that '
      'stays',
      _FOR_ANYONE,
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

  @property
  def attack_success_bound(self) -> float:
    """How often an attacker who guesses from even odds is right, at most."""
    return conversion.attack_success_bound(self.epsilon, self.delta)

  def to_dict(self) -> dict[str, Any]:
    """Returns the row as plain data, with all that the claim says.

    An infinite ε, which JSON cannot hold, is None: there is no guarantee.
    """
    return {
      **self._asdict(),
      'claim': self.claim.name,
      'epsilon': None if math.isinf(self.epsilon) else self.epsilon,
      'attack_success_bound': self.attack_success_bound,
      'protects': self.claim.protects,
      'against': ATTACKER,
      'needs': self.claim.needs,
      'rests_on': self.claim.rests_on,
    }


def report(
  epsilons: dict[str, float], delta: float, asked_for: str
) -> list[ClaimedEpsilon]:
  """Returns the figures as rows, one of them recommended.

  That is the claim asked for, unless a stronger one costs hardly more. Where
  it cannot be made, 'sample' takes its place, or else 'dp'.

  Args:
    epsilons: ε by the name of the claim, 'dp' among them.
    delta: δ.
    asked_for: The claim that the accountant was made for.
  """
  if asked_for not in epsilons:
    rows = report(epsilons, delta, 'sample' if 'sample' in epsilons else 'dp')
    missing = f'{asked_for} cannot be claimed from what was measured'
    return [
      row._replace(reason=missing) if row.recommended else row for row in rows
    ]
  names = [name for name in CLAIMS if name in epsilons]
  limit = _WORTH * epsilons[asked_for]
  stronger = [n for n in names if n in CLAIMS[asked_for].implied_by]
  chosen = next((n for n in stronger if epsilons[n] <= limit), asked_for)
  if chosen != asked_for:
    reason = f'stronger than {asked_for}, at hardly more epsilon'
  elif stronger:
    reason = f'asked for; {" and ".join(stronger)} cost more epsilon'
  else:
    reason = 'asked for'
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


def in_words(text: str, unit: str) -> str:
  """Returns what a claim says, of clients or of examples.

  >>> in_words('a unit like other units', 'example')
  'an example like other examples'

  Args:
    text: Such as `Claim.protects`.
    unit: 'client' or 'example'.
  """
  article = 'an' if unit[0] in 'aeiou' else 'a'
  return text.replace('a unit', f'{article} {unit}').replace('unit', unit)


def in_plain_words(rows: Sequence[ClaimedEpsilon], unit: str) -> str:
  """Returns what the recommended claim means, and DP beside it, for people.

  Args:
    rows: What `report` returned.
    unit: 'client' or 'example'.
  """
  best = next(row for row in rows if row.recommended)
  dp = next(row for row in rows if row.claim.name == 'dp')
  whom, _, _ = in_words(best.claim.protects, unit).partition(';')
  text = (
    'Someone who sees every released model, and guesses from even odds '
    f'whether {whom} took part, is right at most {_percent(best)} of the time '
    '(a coin: 50 %).'
  )
  if best is not dp:
    text += f' For anyone, whatever their data, it is {_percent(dp)}.'
  return text


def _percent(row: ClaimedEpsilon) -> str:
  """Returns how often an attacker is right, rounded up."""
  return f'{math.ceil(1000 * row.attack_success_bound) / 10:g} %'


def format_table(rows: Sequence[ClaimedEpsilon], unit: str = 'unit') -> str:
  """Returns the rows as aligned text; a star marks the recommended one."""
  lines = [f'{"Claim":<8}{"Epsilon":>9}{"Delta":>9}{"Attack":>8}  Protects']
  for row in rows:
    name = row.claim.name + ('*' if row.recommended else '')
    protected, _, _ = in_words(row.claim.protects, unit).partition(';')
    lines.append(
      f'{name:<8}{row.epsilon:>9.3f}{row.delta:>9g}'
      f'{row.attack_success_bound:>8.4f}  {protected}'
    )
  return '\n'.join(lines)
