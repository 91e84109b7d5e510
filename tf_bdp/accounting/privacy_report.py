"""What can be claimed of a run, as a statement or as plain data."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional, Union

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
from tf_bdp.accounting import claims as claims_lib
from tf_bdp.accounting.statement_text import hanging, paragraph

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
  'Of a fixed number of units, drawn without replacement, as the run did: '
  'how many took part is known. Of two units in the same place one cannot tell '
  'which it was. BDP is not claimed: how far two units are from each other was '
  'not measured.'
)
SEEDED_DRAWS = (
  'An experiment: draws were seeded (--sampling_seed), and whoever knows the '
  'seed knows who took part. Against them nothing is gained by sampling, and '
  'this is what can be claimed:'
)
_SAMPLINGS = {
  'poisson': 'Poisson sampling, which the run is said to have done',
  'fixed_size': (
    'draws of a fixed number of clients, and of a Poisson sample of the '
    'examples of each, as the run did'
  ),
}
_NOTES = (
  "Student's t, as in the paper's Eq. 5, can fail far more often than stated "
  "if a few {unit}s are far from the others. The paper's figures compose as if "
  'another {unit} were drawn in every round (Theorem 1), which under-reports '
  'for {one} that stays.',
  'All figures but those of DP were computed from private data: publishing '
  'them, or the distances, is a release of its own.',
)


@dataclasses.dataclass(frozen=True)
class PrivacyReport:
  """What can be claimed of a run, and what the figures rest on.

  Attributes:
    claims: All that can be claimed, one claim recommended.
    rows: The run by other methods, DP first.
    findings: Whether the data fit the assumptions of BDP.
    rounds: How many rounds there were.
    units: How many units were measured in every round; 0 if not always the same
      ones were, as the number of participants is secret.
    noise_multiplier: z, the noise's deviation in units of the clip norm.
    participation_probability: q, the probability that a unit is in a round.
    delta: δ of all claims and rows.
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
    known_draws: What can be claimed against whoever knows who took part, where
      somebody may: the draws were seeded. It counts no gain by sampling.
    population: Whether the panel is everybody.
  """

  claims: Sequence[claims_lib.ClaimedEpsilon]
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
  known_draws: Sequence[claims_lib.ClaimedEpsilon] = ()
  population: bool = False

  @classmethod
  def from_distances(
    cls,
    distances: Union[npt.ArrayLike, Sequence[npt.ArrayLike]],
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
    population: bool = False,
    asked_for: Optional[str] = None,
    worst_case_mixture: Optional[npt.ArrayLike] = None,
  ) -> 'PrivacyReport':
    """Accounts for recorded distances.

    Args:
      distances: ‖Δ‖ of every round and sampled unit, in units of the clip norm:
        an array [rounds, units], or a list of arrays, one a round, that may
        differ in length.
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
      population: Whether the panel is everybody.
      asked_for: The claim that is wanted; see `comparison.compare`.
      worst_case_mixture: Where the worst case of a round is drawn, pairs of a
        probability and a distance in units of the clip norm.

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
      worst_case_mixture,
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
      population=population,
      asked_for=asked_for,
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
    population: bool = False,
    asked_for: Optional[str] = None,
    filter_epsilon: Optional[float] = None,
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
      population: Whether the panel is everybody. Only then are 'each' and
        'census' claimed.
      asked_for: The claim that is wanted, one of `claims.CLAIMS`: it is the
        recommended one unless a stronger one costs hardly more, or what was
        measured does not allow it. By default 'census' of everybody, else
        'sample'.
      filter_epsilon: ε that a filter kept every unit to, if there was one.

    Returns:
      The report.
    """
    validation.check_choice('mechanism', mechanism, tuple(_MECHANISMS))
    validation.check_choice('unit', unit, ('client', 'example'))
    validation.check_choice('sampling', sampling, tuple(_SAMPLINGS))
    if neighboring_relation not in _ADJACENCIES:
      raise ValueError(
        'neighboring_relation must be ADD_OR_REMOVE_ONE, REPLACE_SPECIAL or, '
        'for a fixed number of units, REPLACE_ONE: the figures hold for no '
        f'other. Found {neighboring_relation}.'
      )
    if neighboring_relation is replace_one.REPLACE_ONE:
      compared = comparison.compare_replace_one(rounds, delta)
      return cls(
        claims=compared.claims,
        rows=compared.rows,
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
      compared = comparison.compare_reported(
        rounds,
        delta,
        reported_to,
        asked_for=asked_for,
        filter_epsilon=filter_epsilon,
      )
    else:
      compared = comparison.compare(
        rounds,
        delta,
        population=population,
        asked_for=asked_for,
        filter_epsilon=filter_epsilon,
      )
    rows = compared.rows
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
    is_panel = bool(sampled) and all(event.panel for event in sampled)
    best = min(
      (row for row in rows if row.details and row.epsilon is not None),
      key=lambda row: row.epsilon or 0.0,
    )
    order = best.order or accountant.DEFAULT_ORDERS[-1]
    return cls(
      claims=compared.claims,
      rows=rows,
      findings=applicability.check_rounds(
        sampled,
        order,
        # Clients are in several groups only where some are held out.
        held_out=unit == 'client'
        and all(isinstance(e, events.ParallelEvent) for e in sampled),
      ),
      rounds=len(rounds),
      units=min(units, default=0) if is_panel else 0,
      noise_multiplier=noise_multiplier,
      participation_probability=participation_probability,
      delta=delta,
      worst_case_distance=worst_case_distance,
      panel=is_panel,
      mechanism=mechanism,
      unit=unit,
      sampling=sampling,
      neighboring_relation=neighboring_relation,
      population=population and is_panel,
    )

  @property
  def one_unit(self) -> str:
    """The unit with its article."""
    return f'{"an" if self.unit[0] in "aeiou" else "a"} {self.unit}'

  @property
  def adjacency(self) -> str:
    """The neighbouring relation, in the words of the statement."""
    return _ADJACENCIES[self.neighboring_relation]

  @property
  def recommended(self) -> claims_lib.ClaimedEpsilon:
    """The claim to give."""
    return next(row for row in self.claims if row.recommended)

  def statement(self) -> str:
    """Returns the report as text, for people."""
    notes = (_FIXED_SIZE,) if self._only_dp else _NOTES
    return '\n\n'.join(
      [
        *([self._known_draws()] if self.known_draws else []),
        self._recommended(),
        self._claims(),
        self._mechanism(),
        self._methods(),
        *([self._applicability()] if self.findings else []),
        *(
          paragraph(note.format(unit=self.unit, one=self.one_unit))
          for note in notes
        ),
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
    for name in ('claims', 'known_draws'):
      result[name] = [row.to_dict() for row in getattr(self, name)]
    result['rows'] = [
      {**row._asdict(), 'attack_success_bound': _attack(row)}
      for row in self.rows
    ]
    result['findings'] = [finding._asdict() for finding in self.findings]
    result['verdict'] = applicability.worst_verdict(self.findings)
    return result

  def _known_draws(self) -> str:
    """Returns what holds for those who know the draws, which were seeded."""
    return '\n'.join(
      [
        paragraph(SEEDED_DRAWS),
        claims_lib.format_table(self.known_draws, self.unit),
        paragraph('What follows holds against those who do not know the seed.'),
      ]
    )

  def _recommended(self) -> str:
    """Returns the claim to give, in words."""
    row = self.recommended
    protected = claims_lib.in_words(row.claim.protects, self.unit)
    guess = f'whether this {self.unit} took part'
    if self._only_dp:
      guess = f'which of two {self.unit}s it was'
    return '\n'.join(
      [
        f'{self.unit.capitalize()}-level privacy: epsilon = {row.epsilon:.3f} '
        f"at delta = {row.delta:g}, claim '{row.claim.name}'.",
        *(
          hanging(label, text)
          for label, text in (
            ('Protected', f'{protected} ({self.adjacency} adjacency).'),
            ('Against', f'{claims_lib.ATTACKER}.'),
            (
              'Attacker',
              f'right with probability {row.attack_success_bound:.4f} at most, '
              f'guessing from even odds {guess}.',
            ),
            ('Rests on', f'{row.claim.rests_on}; {_SAMPLINGS[self.sampling]}.'),
            ('Released', 'all model checkpoints and the final model.'),
            ('Why this one', f'{row.reason}.'),
          )
        ),
      ]
    )

  def _claims(self) -> str:
    heading = paragraph(
      'All that can be claimed (* recommended; Attack is how often the '
      'attacker is right, at most):'
    )
    return f'{heading}\n{claims_lib.format_table(self.claims, self.unit)}'

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
    if self.panel:
      which = 'everybody' if self.population else 'a fixed panel'
      measured = (
        f'Distances of {self.units} {self.unit}s, {which} measured in every '
        'round'
      )
    elif self.findings:
      # How many took part is secret.
      measured = f'Distances of the {self.unit}s of each round'
    else:
      measured = 'No distances were seen'
    return paragraph(
      f'Gaussian mechanism performed for {self.rounds} rounds on {released}, '
      f'noise multiplier {self.noise_multiplier:g}, each {self.unit} taking '
      f'part with probability {self.participation_probability:g}. {measured}; '
      f'clipping allows {self.worst_case_distance:g} times the clip norm.'
    )

  def _methods(self) -> str:
    """Returns the rows, with how each of them was computed."""
    lines = [
      'Other ways to account for the same rounds:',
      f'{"Method":<23}{"Epsilon":>9}  {"Composed":<9}{"Estimator":<10}'
      f'{"Failure":>8} {"Direction":<10}{"Conversion":<11}{"Order":>5}',
    ]
    for row in self.rows:
      epsilon = '-' if row.epsilon is None else f'{row.epsilon:.3f}'
      line = f'{row.method:<23}{epsilon:>9}  '
      if row.details is None:
        lines.append(f'{line}{row.assumption}')
        continue
      details = row.details
      lines.append(
        f'{line}{details["composition"]:<9}{details["estimator"]:<10}'
        f'{details["failure_probability"]:8.1e} {details["direction"]:<10}'
        f'{details["conversion"]:<11}{details["order"]:5d}'
      )
    if any(row.details for row in self.rows) and self.findings:
      lines.append(
        paragraph(
          'Failure is the probability that one bound of the mean cost fails; '
          'all of them together take a tenth of delta.'
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
      lines.append(
        paragraph(
          "Where a verdict is not ok, what 'sample' and 'paper' say of a "
          'population may be empty: rely on the DP figures.'
        )
      )
    return '\n'.join(lines)


# By the name of the command that prints it.
compute_bdp_privacy = PrivacyReport.from_distances


def _attack(row: comparison.Row) -> float:
  if row.epsilon is None:
    return 1.0
  return conversion.attack_success_bound(row.epsilon, row.delta)
