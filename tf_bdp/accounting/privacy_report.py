"""Library for computing privacy statements from recorded distances."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any, Optional

import dp_accounting
import numpy as np
import numpy.typing as npt

from tf_bdp import validation
from tf_bdp.accounting import (
  accountant,
  applicability,
  calibration,
  comparison,
  conversion,
  events,
  ledger,
  sampled_gaussian,
)

_WIDTH = 80
_MECHANISMS = {
  'sum': 'the sum of clipped {unit} updates',
  'mean': 'the mean of clipped {unit} updates',
  'batch': 'the clipped gradient of a batch, on each client',
  'example': 'the sum of clipped gradients of examples, on each client',
  'joint': 'the mean of client updates that carry noise of their own',
}
# Of what differs from adding or removing one.
_ADJACENCIES = {'joint': 'zero-out'}
# The starred assumptions of each method.
_STARS = {
  'BDP, paper': '(*)(**)(***)',
  'BDP, paper, L part': '(*)(**)(***)',
  'BDP, holder': '(*)(***)',
  'BDP, panel': '(*)(***)',
}
_FOOTNOTES = (
  '(*) Assumes Poisson sampling. {sampling}',
  '(**) Composes as if another {unit} were drawn in every round (the '
  "paper's Theorem 1). For {one} that stays it under-reports; given to "
  "compare with the paper's figures.",
  "(***) The bound of the mean cost is Student's t, as in the paper's Eq. 5. "
  'It can fail far more often than stated if a few units are far from the '
  'others. The distribution-free figure does not rest on it.',
  'BDP holds for {one} drawn from the population that the sampled units '
  'show, not for any conceivable one. Its epsilon was computed from private '
  'data: publishing it, or the distances, is a release of its own.',
)


@dataclasses.dataclass(frozen=True)
class PrivacyReport:
  """A run accounted for by DP and BDP, and what the figures rest on."""

  rows: Sequence[comparison.Row]
  findings: Sequence[applicability.Finding]
  rounds: int
  units: int
  noise_multiplier: float
  participation_probability: float
  delta: float
  worst_case_distance: float
  panel: bool
  mechanism: str
  unit: str
  sampling: str

  @property
  def one_unit(self) -> str:
    """The unit with its article."""
    return f'{"an" if self.unit[0] in "aeiou" else "a"} {self.unit}'

  @property
  def adjacency(self) -> str:
    """Which pairs of data sets the guarantee is about."""
    return _ADJACENCIES.get(self.mechanism, 'add-or-remove-one')

  def statement(self) -> str:
    """Returns the report as text, for people."""
    return '\n\n'.join(
      [
        self._mechanism(),
        _fill(
          'This privacy guarantee protects the release of all model '
          'checkpoints in addition to the final model.'
        ),
        self._lines('DP', f'DP with {{}}, for any {self.unit}'),
        self._lines(
          'BDP',
          f'BDP with {{}}, for {self.one_unit} drawn from the same population '
          'as the others',
        ),
        self._attacker(),
        self._how(),
        self._applicability(),
        *(self._footnote(note) for note in _FOOTNOTES),
      ]
    )

  def to_dict(self) -> dict[str, Any]:
    """Returns the report as plain data, for programs."""
    result = dataclasses.asdict(self)
    result['adjacency'] = self.adjacency
    result['rows'] = [
      {**row._asdict(), 'attack_success_bound': _attack(row)}
      for row in self.rows
    ]
    result['findings'] = [finding._asdict() for finding in self.findings]
    result['verdict'] = applicability.worst_verdict(self.findings)
    return result

  def _mechanism(self) -> str:
    released = _MECHANISMS[self.mechanism].format(unit=self.unit)
    measured = (
      'a fixed panel measured in every round'
      if self.panel
      else 'any units of each round'
    )
    return _fill(
      f'Gaussian mechanism performed for {self.rounds} rounds on {released}, '
      f'noise multiplier {self.noise_multiplier:g}, each {self.unit} taking '
      f'part with probability {self.participation_probability:g}. Distances of '
      f'{self.units} {self.unit}s, {measured}; clipping allows '
      f'{self.worst_case_distance:g} times the clip norm.'
    )

  def _lines(self, kind: str, heading: str) -> str:
    guarantee = f'{self.adjacency} adjacency at delta = {self.delta:g}'
    lines = [
      _fill(f'{self.unit.capitalize()}-level {heading.format(guarantee)}:')
    ]
    for row in self.rows:
      family, _, method = row.method.partition(', ')
      if family != kind:
        continue
      stars = _STARS.get(row.method, '(*)')
      value = '           -' if row.epsilon is None else f'{row.epsilon:12.3f}'
      reason = f'  {row.assumption}' if row.epsilon is None else ''
      label = f'Epsilon, {method} {stars}:'
      lines.append(f'    {label:<52}{value}{reason}')
    return '\n'.join(lines)

  def _attacker(self) -> str:
    lines = [
      _fill(
        'Probability that an attacker who guesses the presence of '
        f'{self.one_unit} from even odds is right, at most:'
      )
    ]
    lines += [
      f'    {row.method + ":":<52}{_attack(row):12.4f}'
      for row in self.rows
      if row.epsilon is not None
    ]
    return '\n'.join(lines)

  def _how(self) -> str:
    lines = [
      f'How the BDP figures were computed ({self.rounds} rounds):',
      '    Method                 Composition Estimator   Failure Direction '
      'Conversion Order',
    ]
    for row in self.rows:
      if row.details is not None:
        details = row.details
        estimator = f'{details["estimator"]}'
        lines.append(
          f'    {row.method:<23}{details["composition"]:<12}{estimator:<10}'
          f'{details["failure_probability"]:9.1e} {details["direction"]:<10}'
          f'{details["conversion"]:<11}{details["order"]:5d}'
        )
    lines.append(
      _fill(
        f'Failure is the probability that one bound from {self.units} units '
        'fails; all of them together take a tenth of delta.'
      )
    )
    return '\n'.join(lines)

  def _applicability(self) -> str:
    lines = ['Do the data fit the assumptions of BDP?']
    for finding in self.findings:
      figures = ', '.join(
        f'{name} {value:.3g}' for name, value in finding.figures.items()
      )
      lines.append(
        f'    {finding.check + ":":<18}{finding.verdict} ({figures})'
      )
    if applicability.worst_verdict(self.findings) != 'ok':
      lines.append(_fill('Where a verdict is not ok, rely on the DP figures.'))
    return '\n'.join(lines)

  def _footnote(self, note: str) -> str:
    sampling = {
      'poisson': 'The run is said to have done it.',
      'fixed_size': (
        'The run drew a fixed number of units, for which these figures are '
        'not proven.'
      ),
    }[self.sampling]
    return _fill(
      note.format(unit=self.unit, one=self.one_unit, sampling=sampling)
    )


def compute_bdp_privacy(
  distances: np.ndarray,
  *,
  noise_multiplier: float,
  participation_probability: float,
  delta: float,
  worst_case_distance: npt.ArrayLike = 1.0,
  panel: bool = False,
  mechanism: str = 'sum',
  unit: str = 'client',
  sampling: str = 'poisson',
) -> PrivacyReport:
  """Accounts for a run by DP and BDP.

  Args:
    distances: ‖Δ‖ of every round and sampled unit, in units of the clip norm:
      an array [rounds, units].
    noise_multiplier: The noise's deviation in units of the clip norm.
    participation_probability: The probability that a unit is in a round.
    delta: The target δ.
    worst_case_distance: The largest distance that clipping allows; one number,
      or one a round.
    panel: Whether column i is the same unit in every round.
    mechanism: 'sum' or 'mean': what the noise is added to.
    unit: What is protected, 'client' or 'example'.
    sampling: 'poisson' or 'fixed_size': how the run drew its units.

  Returns:
    The report.
  """
  rounds = calibration.events_from_distances(
    distances,
    noise_multiplier,
    participation_probability,
    worst_case_distance,
    panel,
  )
  return report_of_rounds(
    rounds,
    noise_multiplier=noise_multiplier,
    participation_probability=participation_probability,
    delta=delta,
    worst_case_distance=float(np.max(worst_case_distance)),
    mechanism=mechanism,
    unit=unit,
    sampling=sampling,
  )


def report_of_rounds(
  rounds: Sequence[dp_accounting.DpEvent],
  *,
  noise_multiplier: float,
  participation_probability: float,
  delta: float,
  worst_case_distance: float,
  mechanism: str,
  unit: str,
  sampling: str,
  reported_to: Optional[accountant.BayesianAccountant] = None,
) -> PrivacyReport:
  """Accounts for events as they were composed.

  Args:
    rounds: One event a round: `BayesianGaussianEvent`s, and the worst case of
      rounds with too few units.
    noise_multiplier: As for `compute_bdp_privacy`, like the others below.
    participation_probability: q.
    delta: δ.
    worst_case_distance: The largest one of all rounds.
    mechanism: 'sum', 'mean', 'batch', 'example' or 'joint'.
    unit: 'client' or 'example'.
    sampling: 'poisson' or 'fixed_size'.
    reported_to: The accountant of reported costs, if the rounds have such.

  Returns:
    The report.
  """
  validation.check_choice('mechanism', mechanism, tuple(_MECHANISMS))
  validation.check_choice('sampling', sampling, ('poisson', 'fixed_size'))
  if reported_to is not None:
    rows = comparison.compare_reported(rounds, delta, reported_to)
  else:
    rows = comparison.compare(rounds, delta)
  sampled = [
    event
    for part in rounds
    for event, _ in ledger.rounds_of(part)
    if isinstance(event, (events.BayesianGaussianEvent, events.ParallelEvent))
  ]
  panel = bool(sampled) and all(event.panel for event in sampled)
  units = [g.squared_distances.size for event in sampled for g in event.groups]
  best = min(
    (row for row in rows if row.details and row.epsilon is not None),
    key=lambda row: row.epsilon or 0.0,
  )
  order = best.order or accountant.DEFAULT_ORDERS[-1]
  return PrivacyReport(
    rows=rows,
    findings=_findings(sampled, order, panel),
    rounds=len(rounds),
    units=min(units, default=0),
    noise_multiplier=noise_multiplier,
    participation_probability=participation_probability,
    delta=delta,
    worst_case_distance=worst_case_distance,
    panel=panel,
    mechanism=mechanism,
    unit=unit,
    sampling=sampling,
  )


def _findings(
  rounds: Sequence[Any], order: int, panel: bool
) -> list[applicability.Finding]:
  """Checks the tail of the costs, drift over rounds, and order of arrival."""
  if not rounds:
    return []
  costs = [
    np.concatenate(
      [
        sampled_gaussian.log_moments(
          group.squared_distances, group.participation_probability, [order]
        )[:, 0]
        for group in event.groups
      ]
    )
    for event in rounds
  ]
  distances = [
    np.sqrt(np.concatenate([g.squared_distances for g in event.groups]))
    for event in rounds
  ]
  # Without a panel, a person is as likely to be any unit of a round.
  per_person = (
    np.sum(costs, axis=0) if panel else len(rounds) * np.concatenate(costs)
  )
  findings = [applicability.tail(per_person)]
  half = len(rounds) // 2
  if half:
    # Every round is measured, so a change of scale common to all is no drift.
    scales = [np.median(part) for part in distances]
    distances = [d / (s or 1.0) for d, s in zip(distances, scales)]
    # Rounds of the same unit are not independent: one value each.
    early, late = (
      np.mean(part, axis=0) if panel else np.concatenate(part)
      for part in (distances[:half], distances[-half:])
    )
    findings.append(applicability.drift(early, late))
  if panel:
    findings.append(applicability.exchangeability(np.mean(distances, axis=0)))
  return findings


def _attack(row: comparison.Row) -> float:
  if row.epsilon is None:
    return 1.0
  return conversion.attack_success_bound(row.epsilon)


def _fill(text: str) -> str:
  return textwrap.fill(text, width=_WIDTH)
