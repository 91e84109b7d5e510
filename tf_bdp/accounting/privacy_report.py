"""A run accounted for by DP and BDP, as a statement or as plain data."""

import dataclasses
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
  replace_one,
)
from tf_bdp.accounting.statement_text import figure, paragraph

_MECHANISMS = {
  'sum': 'the sum of clipped {unit} updates',
  'mean': 'the mean of clipped {unit} updates',
  'batch': 'the clipped gradient of a batch, on each client',
  'example': 'the sum of clipped gradients of examples, on each client',
  'joint': 'the mean of client updates that carry noise of their own',
}
_ADD_OR_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
_ADJACENCIES = {
  _ADD_OR_REMOVE: 'add-or-remove-one',
  dp_accounting.NeighboringRelation.REPLACE_SPECIAL: 'zero-out',
  dp_accounting.NeighboringRelation.REPLACE_ONE: 'replace-one',
}
_FIXED_SIZE = (
  '(*) Of a fixed number of units, drawn without replacement, as the run did: '
  'how many took part is known. Of two units in the same place one cannot tell '
  'which it was. BDP is not claimed: how far two units are from each other was '
  'not measured.'
)
_SAMPLINGS = {
  'poisson': 'The run is said to have done it.',
  'fixed_size': (
    'The run drew a fixed number of clients, and a Poisson sample of the '
    'examples of each.'
  ),
}
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
  """A run accounted for by DP and BDP, and what the figures rest on.

  Attributes:
    rows: The run by each method, DP first.
    findings: Whether the data fit the assumptions of BDP.
    rounds: How many rounds there were.
    units: How many units were measured, in the round that had the fewest.
    noise_multiplier: z, the noise's deviation in units of the clip norm.
    participation_probability: q, the probability that a unit is in a round.
    delta: δ of all rows.
    worst_case_distance: The largest distance that clipping allows in any
      round, in units of the clip norm.
    panel: Whether the same units were measured in every round.
    mechanism: What the noise is added to: 'sum', 'mean', 'batch', 'example' or
      'joint'.
    unit: What is protected, 'client' or 'example'.
    sampling: How the run drew its units, 'poisson' or 'fixed_size'.
    neighboring_relation: Which data sets the guarantee holds for: those that
      differ by one unit added or removed, or by one replaced by a special one
      that contributes nothing (REPLACE_SPECIAL, called zero-out).
  """

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
  neighboring_relation: dp_accounting.NeighboringRelation = _ADD_OR_REMOVE

  @classmethod
  def from_distances(
    cls,
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
    neighboring_relation: dp_accounting.NeighboringRelation = _ADD_OR_REMOVE,
  ) -> 'PrivacyReport':
    """Accounts for recorded distances.

    Args:
      distances: ‖Δ‖ of every round and sampled unit, in units of the clip norm:
        an array [rounds, units].
      noise_multiplier: As the attribute, like what is not described here.
      participation_probability: q.
      delta: δ.
      worst_case_distance: The largest distance that clipping allows; one
        number, or one a round.
      panel: Whether column i is the same unit in every round.
      mechanism: 'sum' or 'mean'.
      unit: 'client' or 'example'.
      sampling: 'poisson'.
      neighboring_relation: ADD_OR_REMOVE_ONE or REPLACE_SPECIAL.

    Returns:
      The report.
    """
    replaced = neighboring_relation is replace_one.REPLACE_ONE
    if sampling == 'fixed_size' or replaced:
      raise ValueError(
        'A fixed number of units, drawn without replacement, is known to '
        'everybody, and distances from the others say nothing about it: units '
        'are replaced then, not added or removed. Account for it by '
        'replace_one.ReplaceOneAccountant, with a worst case of twice the clip '
        'norm.'
      )
    rounds = calibration.events_from_distances(
      distances,
      noise_multiplier,
      participation_probability,
      worst_case_distance,
      panel,
    )
    return cls.from_events(
      rounds,
      noise_multiplier=noise_multiplier,
      participation_probability=participation_probability,
      delta=delta,
      worst_case_distance=float(np.max(worst_case_distance)),
      mechanism=mechanism,
      unit=unit,
      sampling=sampling,
      neighboring_relation=neighboring_relation,
    )

  @classmethod
  def from_events(
    cls,
    rounds: Sequence[dp_accounting.DpEvent],
    *,
    noise_multiplier: float,
    participation_probability: float,
    delta: float,
    worst_case_distance: float,
    mechanism: str,
    unit: str,
    sampling: str,
    neighboring_relation: dp_accounting.NeighboringRelation = _ADD_OR_REMOVE,
    reported_to: Optional[accountant.BayesianAccountant] = None,
  ) -> 'PrivacyReport':
    """Accounts for events as they were composed.

    Args:
      rounds: One event a round: `BayesianGaussianEvent`s, and the worst case of
        rounds with too few units.
      noise_multiplier: As the attribute, like what is not described here.
      participation_probability: q.
      delta: δ.
      worst_case_distance: The largest one of all rounds.
      mechanism: 'sum', 'mean', 'batch', 'example' or 'joint'.
      unit: 'client' or 'example'.
      sampling: 'poisson' or 'fixed_size'.
      neighboring_relation: ADD_OR_REMOVE_ONE, REPLACE_SPECIAL, or REPLACE_ONE
        for rounds of a fixed number of units.
      reported_to: The accountant of reported costs, if the rounds have such.

    Returns:
      The report.
    """
    validation.check_choice('mechanism', mechanism, tuple(_MECHANISMS))
    validation.check_choice('sampling', sampling, tuple(_SAMPLINGS))
    if neighboring_relation not in _ADJACENCIES:
      raise ValueError(
        'neighboring_relation must be ADD_OR_REMOVE_ONE, REPLACE_SPECIAL or, '
        'for a fixed number of units, REPLACE_ONE: the figures hold for no '
        f'other. Found {neighboring_relation}.'
      )
    if neighboring_relation is replace_one.REPLACE_ONE:
      return cls(
        rows=comparison.compare_replace_one(rounds, delta),
        findings=(),
        rounds=len(rounds),
        units=0,
        noise_multiplier=noise_multiplier,
        participation_probability=participation_probability,
        delta=delta,
        worst_case_distance=worst_case_distance,
        panel=False,
        mechanism=mechanism,
        unit=unit,
        sampling=sampling,
        neighboring_relation=neighboring_relation,
      )
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
    units = [
      group.squared_distances.size
      for event in sampled
      for group in event.groups
    ]
    best = min(
      (row for row in rows if row.details and row.epsilon is not None),
      key=lambda row: row.epsilon or 0.0,
    )
    order = best.order or accountant.DEFAULT_ORDERS[-1]
    return cls(
      rows=rows,
      findings=applicability.check_rounds(
        sampled,
        order,
        # Clients are in several groups only where some are held out.
        held_out=unit == 'client'
        and all(isinstance(e, events.ParallelEvent) for e in sampled),
      ),
      rounds=len(rounds),
      units=min(units, default=0),
      noise_multiplier=noise_multiplier,
      participation_probability=participation_probability,
      delta=delta,
      worst_case_distance=worst_case_distance,
      panel=bool(sampled) and all(event.panel for event in sampled),
      mechanism=mechanism,
      unit=unit,
      sampling=sampling,
      neighboring_relation=neighboring_relation,
    )

  @property
  def one_unit(self) -> str:
    """The unit with its article."""
    return f'{"an" if self.unit[0] in "aeiou" else "a"} {self.unit}'

  @property
  def adjacency(self) -> str:
    """The neighbouring relation, in the words of the statement."""
    return _ADJACENCIES[self.neighboring_relation]

  def statement(self) -> str:
    """Returns the report as text, for people."""
    first = [
      self._mechanism(),
      paragraph(
        'This privacy guarantee protects the release of all model '
        'checkpoints in addition to the final model.'
      ),
      self._epsilons('DP', f'for any {self.unit}'),
    ]
    if self._only_dp:
      return '\n\n'.join([*first, self._attacker(), paragraph(_FIXED_SIZE)])
    return '\n\n'.join(
      [
        *first,
        self._epsilons(
          'BDP',
          f'for {self.one_unit} drawn from the same population as the others',
        ),
        self._attacker(),
        self._how(),
        self._applicability(),
        *self._footnotes(),
      ]
    )

  @property
  def _only_dp(self) -> bool:
    return self.neighboring_relation is replace_one.REPLACE_ONE

  def to_dict(self) -> dict[str, Any]:
    """Returns the report as plain data, for programs."""
    result = dataclasses.asdict(self)
    del result['neighboring_relation']
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
    if self._only_dp:
      return paragraph(
        f'Gaussian mechanism performed for {self.rounds} rounds on {released}, '
        f'noise multiplier {self.noise_multiplier:g}, a share of '
        f'{self.participation_probability:g} of all {self.unit}s taking part, '
        'always the same number. Clipping allows two of them to be '
        f'{self.worst_case_distance:g} times the clip norm apart.'
      )
    measured = (
      'a fixed panel measured in every round'
      if self.panel
      else 'any units of each round'
    )
    return paragraph(
      f'Gaussian mechanism performed for {self.rounds} rounds on {released}, '
      f'noise multiplier {self.noise_multiplier:g}, each {self.unit} taking '
      f'part with probability {self.participation_probability:g}. Distances of '
      f'{self.units} {self.unit}s, {measured}; clipping allows '
      f'{self.worst_case_distance:g} times the clip norm.'
    )

  def _epsilons(self, kind: str, whom: str) -> str:
    """Returns the figures of DP or of BDP, and for whom they hold."""
    lines = [
      paragraph(
        f'{self.unit.capitalize()}-level {kind} with {self.adjacency} '
        f'adjacency at delta = {self.delta:g}, {whom}:'
      )
    ]
    for row in self.rows:
      family, _, method = row.method.partition(', ')
      if family == kind:
        label = f'Epsilon, {method} {_STARS.get(row.method, "(*)")}'
        if row.epsilon is None:
          lines.append(figure(label, '-', row.assumption))
        else:
          lines.append(figure(label, f'{row.epsilon:.3f}'))
    return '\n'.join(lines)

  def _attacker(self) -> str:
    lines = [
      paragraph(
        'Probability that an attacker who guesses the presence of '
        f'{self.one_unit} from even odds is right, at most:'
      )
    ]
    lines += [
      figure(row.method, f'{_attack(row):.4f}')
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
        lines.append(
          f'    {row.method:<23}{details["composition"]:<12}'
          f'{details["estimator"]:<10}'
          f'{details["failure_probability"]:9.1e} {details["direction"]:<10}'
          f'{details["conversion"]:<11}{details["order"]:5d}'
        )
    lines.append(
      paragraph(
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
      lines.append('Where a verdict is not ok, rely on the DP figures.')
    return '\n'.join(lines)

  def _footnotes(self) -> list[str]:
    sampling = _SAMPLINGS[self.sampling]
    return [
      paragraph(
        note.format(unit=self.unit, one=self.one_unit, sampling=sampling)
      )
      for note in _FOOTNOTES
    ]


# By the name of the command that prints it.
compute_bdp_privacy = PrivacyReport.from_distances


def _attack(row: comparison.Row) -> float:
  if row.epsilon is None:
    return 1.0
  return conversion.attack_success_bound(row.epsilon, row.delta)
