"""The noise that a privacy budget needs, by each claim."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Callable, Optional, Union

import dp_accounting
import numpy as np
import numpy.typing as npt

from tf_bdp import validation
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import (
  calibration,
  claims,
  comparison,
  events,
  long_runs,
  progress,
  statement_text,
)


@dataclasses.dataclass(frozen=True)
class NoiseReport:
  """The noise multipliers that keep a budget, by the name of the claim.

  None where no noise does, as by the paper's Theorem 2 for a tiny ε.
  """

  noise_multipliers: dict[str, Optional[float]]
  epsilon: float
  delta: float
  rounds: int
  units: int
  participation_probability: float
  unit: str

  def statement(self) -> str:
    """Returns the report as text, for people."""
    heading = statement_text.paragraph(
      f'Smallest noise multiplier that keeps {self.unit}-level epsilon = '
      f'{self.epsilon:g} at delta = {self.delta:g} over {self.rounds} rounds, '
      f'each {self.unit} taking part with probability '
      f'{self.participation_probability:g} (Poisson sampling assumed), for the '
      f'recorded distances of {self.units} {self.unit}s:'
    )
    lines = [f'{"Claim":<8}{"Noise":>9}  Protects']
    for name, noise in self.noise_multipliers.items():
      protected = claims.in_words(claims.CLAIMS[name].protects, self.unit)
      found = '-' if noise is None else f'{noise:.4f}'
      lines.append(f'{name:<8}{found:>9}  {protected.partition(";")[0]}')
    caveat = statement_text.paragraph(
      'These figures are retrospective. At another noise the distances would '
      'have been others: use them to plan a run, and account for that run with '
      'its own distances.'
    )
    return '\n'.join([heading, *lines, '', caveat])

  def to_dict(self) -> dict[str, Any]:
    """Returns the report as plain data, for programs."""
    return {**dataclasses.asdict(self), 'retrospective': True}


def compute_noise(
  distances: Union[npt.ArrayLike, Sequence[npt.ArrayLike]],
  *,
  participation_probability: float,
  epsilon: float,
  delta: float,
  worst_case_distance: npt.ArrayLike = 1.0,
  panel: bool = False,
  unit: str = 'client',
  population: bool = False,
  worst_case_mixture: Optional[npt.ArrayLike] = None,
) -> NoiseReport:
  """Calibrates the noise to a budget, by each claim that can be made.

  Args:
    distances: ‖Δ‖ of every round and sampled unit, in units of the clip norm:
      an array [rounds, units], or a list of arrays, one a round.
    participation_probability: The probability that a unit is in a round.
    epsilon: The target ε.
    delta: The target δ.
    worst_case_distance: The largest distance that clipping allows.
    panel: Whether column i is the same unit in every round.
    unit: What is protected, 'client' or 'example'.
    population: Whether the panel is everybody.
    worst_case_mixture: As of `calibration.events_from_distances`.

  Returns:
    The report.
  """

  def events_at(
    noise_multiplier: float, worst_case: bool = False
  ) -> list[dp_accounting.DpEvent]:
    return calibration.events_from_distances(
      np.zeros((len(rounds), 3)) if worst_case else distances,
      noise_multiplier,
      participation_probability,
      worst_case_distance,
      panel,
      worst_case_mixture,
    )

  # Bad input is an error before the search.
  validation.check_positive('target_epsilon', epsilon)
  validation.check_delta('target_delta', delta)
  validation.check_choice('unit', unit, ('client', 'example'))
  rounds = events_at(1.0)
  sizes = [
    event.squared_distances.size
    for event in rounds
    if isinstance(event, events.BayesianGaussianEvent)
  ]
  epsilons_at = _epsilons_at(events_at, delta, len(sizes), panel, population)
  noise_multipliers: dict[str, Optional[float]] = {}
  with progress.bar('Searching', len(epsilons_at), 'claim') as bar:
    for claim, epsilon_at in epsilons_at.items():
      try:
        noise_multipliers[claim] = calibration.smallest_noise_multiplier(
          epsilon_at, epsilon
        )
      except calibration.NoNoiseError:
        noise_multipliers[claim] = None
      bar.update()
  return NoiseReport(
    noise_multipliers=noise_multipliers,
    epsilon=epsilon,
    delta=delta,
    rounds=len(rounds),
    units=min(sizes),
    participation_probability=participation_probability,
    unit=unit,
  )


def _epsilons_at(
  events_at: Callable[..., Sequence[dp_accounting.DpEvent]],
  delta: float,
  rounds: int,
  panel: bool,
  population: bool,
) -> dict[str, Callable[[float], float]]:
  """Returns ε as a function of the noise multiplier, for each claim.

  Args:
    events_at: Gives the events at a noise multiplier; with worst_case=True the
      same rounds of nobody, which is all that DP looks at.
    delta: δ.
    rounds: How many have units that were measured.
    panel: Whether the units are a panel.
    population: Whether the panel is everybody.
  """
  accountant = accountant_lib.BayesianAccountant

  def dp(noise_multiplier: float) -> float:
    method = accountant('product', estimator='bernstein')
    long_runs.compose(events_at(noise_multiplier, worst_case=True), [method])
    return method.get_dp_epsilon(delta)

  @functools.lru_cache
  def of_panel(noise_multiplier: float) -> dict[str, float]:
    exact = accountant('panel')
    long_runs.compose(events_at(noise_multiplier), [exact])
    return {row.claim.name: row.epsilon for row in exact.report(delta)}

  def claimed(name: str, noise_multiplier: float) -> float:
    return of_panel(noise_multiplier)[name]

  def by_moments(
    make: Callable[[], accountant_lib.BayesianAccountant],
    noise_multiplier: float,
  ) -> float:
    method = make()
    long_runs.compose(events_at(noise_multiplier), [method])
    return method.get_epsilon(delta)

  result: dict[str, Callable[[float], float]] = {'dp': dp}
  if panel:
    names = ('each', 'census', 'sample') if population else ('sample',)
    result |= {name: functools.partial(claimed, name) for name in names}
  else:
    holder = functools.partial(
      accountant,
      'holder',
      estimator=comparison.distribution_free_estimator(rounds),
      total_rounds=rounds,
    )
    result['sample'] = functools.partial(by_moments, holder)
  result['paper'] = functools.partial(by_moments, accountant.paper)
  return result
