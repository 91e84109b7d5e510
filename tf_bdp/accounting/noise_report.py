"""The noise that a privacy budget needs, by each way of accounting."""

import dataclasses
import functools
from typing import Any, Callable

import dp_accounting
import numpy as np
import numpy.typing as npt
import tqdm

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import calibration, ledger, statement_text


@dataclasses.dataclass(frozen=True)
class NoiseReport:
  """The noise multipliers that keep a budget, by way of accounting."""

  noise_multipliers: dict[str, float]
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
    lines = [
      statement_text.figure(method, f'{noise:.4f}')
      for method, noise in self.noise_multipliers.items()
    ]
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
  distances: np.ndarray,
  *,
  participation_probability: float,
  epsilon: float,
  delta: float,
  worst_case_distance: npt.ArrayLike = 1.0,
  panel: bool = False,
  unit: str = 'client',
) -> NoiseReport:
  """Calibrates the noise to a budget with each way of accounting.

  Args:
    distances: ‖Δ‖ of every round and sampled unit, in units of the clip norm:
      an array [rounds, units].
    participation_probability: The probability that a unit is in a round.
    epsilon: The target ε.
    delta: The target δ.
    worst_case_distance: The largest distance that clipping allows.
    panel: Whether column i is the same unit in every round.
    unit: What is protected, 'client' or 'example'.

  Returns:
    The report.
  """

  def bayesian_events(noise_multiplier: float) -> list[dp_accounting.DpEvent]:
    return calibration.events_from_distances(
      distances,
      noise_multiplier,
      participation_probability,
      worst_case_distance,
      panel,
    )

  def dp_events(noise_multiplier: float) -> list[dp_accounting.DpEvent]:
    worst = np.broadcast_to(worst_case_distance, len(distances))
    entries = [
      ledger.Entry(float(r) ** 2, participation_probability, False, 1)
      for r in worst / noise_multiplier
    ]
    return [ledger.to_dp_event(entries)]

  bayesian_events(1.0)  # Bad input is an error before the search.
  rounds, units = np.shape(distances)
  noise_multipliers: dict[str, float] = {}
  progress = tqdm.tqdm(
    _accountants(rounds, panel).items(), unit='method', leave=False
  )
  for method, make_accountant in progress:
    progress.set_description(method)
    noise_multipliers[method] = calibration.calibrate_noise_multiplier(
      dp_events if method.startswith('DP') else bayesian_events,
      epsilon,
      delta,
      make_accountant,
    )
  return NoiseReport(
    noise_multipliers=noise_multipliers,
    epsilon=epsilon,
    delta=delta,
    rounds=rounds,
    units=units,
    participation_probability=participation_probability,
    unit=unit,
  )


def _accountants(
  rounds: int, panel: bool
) -> dict[str, Callable[[], dp_accounting.PrivacyAccountant]]:
  """Returns what makes the accountant of each method, DP first."""
  accountant = accountant_lib.BayesianAccountant
  panels = functools.partial(accountant, 'panel')
  holder = functools.partial(accountant, 'holder', total_rounds=rounds)
  methods: dict[str, Callable[..., dp_accounting.PrivacyAccountant]] = {
    'DP, RDP': dp_accounting.rdp.RdpAccountant,
    'BDP, paper': accountant.paper,
    'BDP, holder': functools.partial(holder, estimator='student_t'),
  }
  if panel:
    methods['BDP, panel'] = functools.partial(panels, estimator='student_t')
  methods['BDP, distribution-free'] = functools.partial(
    panels if panel else holder, estimator='betting'
  )
  return methods
