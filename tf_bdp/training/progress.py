"""Everything that a run has done so far, in memory and in its checkpoint."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, Optional

import dp_accounting
import numpy as np

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.engines import base as engines
from tf_bdp.mechanisms import measurements as measurements_lib
from tf_bdp.training import checkpoint
from tf_bdp.training import plan as plan_lib

CHECKPOINT_FILE = 'checkpoint.npz'
# 2: draws came from `seed`, which is no seed of draws any more.
_VERSION = 3
_ENGINE, _MEASURED, _AVERAGED = 'engine_', 'measured_', 'averaged_'


@dataclasses.dataclass(frozen=True)
class Progress:
  """What a run has done.

  Attributes:
    state: The state of the engine.
    accountants: The accountant of each unit, with all rounds composed.
    rows: The metrics of every round.
    measurements: What was measured in every round.
    events: The events of every round, by unit.
    dp_stop: Number and metrics of the last round within DP's budget, once it
      is spent.
    stopped: Why training ended before its last round, if it did.
    averaged: The average of the weights of all rounds, if the plan wants it.
  """

  state: Any
  accountants: dict[str, accountant_lib.BayesianAccountant]
  rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  measurements: list[measurements_lib.Measurements] = dataclasses.field(
    default_factory=list
  )
  events: list[dict[str, dp_accounting.DpEvent]] = dataclasses.field(
    default_factory=list
  )
  dp_stop: Optional[dict[str, Any]] = None
  stopped: str = ''
  averaged: Optional[list[np.ndarray]] = None

  @property
  def round_number(self) -> int:
    """How many rounds are done."""
    return len(self.rows)

  def weights(self, engine: engines.Engine) -> list[np.ndarray]:
    """Returns the weights to evaluate and save: the average, if there is."""
    if self.averaged is not None:
      return self.averaged
    return engine.model_weights(self.state)

  def events_of(self, unit: str) -> list[dp_accounting.DpEvent]:
    """Returns the events of a unit's accountant, one for each round."""
    return [events[unit] for events in self.events]


def save(
  directory: pathlib.Path,
  engine: engines.Engine,
  plan: plan_lib.Plan,
  settings: Mapping[str, Any],
  progress: Progress,
) -> None:
  """Writes the checkpoint, in one step.

  Of the sampler it holds the key of the panel, and not the one of the draws.
  """
  parts = {
    _ENGINE: engine.to_arrays(progress.state),
    _MEASURED: measurements_lib.to_arrays(progress.measurements),
    _AVERAGED: {str(i): part for i, part in enumerate(progress.averaged or ())},
  }
  arrays = {
    prefix + name: array
    for prefix, part in parts.items()
    for name, array in part.items()
  }
  contents = {
    'version': _VERSION,
    'settings': dict(settings),
    'accountants': {
      unit: accountant.state_dict()
      for unit, accountant in progress.accountants.items()
    },
    'rows': progress.rows,
    'dp_stop': progress.dp_stop,
    'stopped': progress.stopped,
    'private_panel_key': plan.sampler.panel_key.hex(),
  }
  checkpoint.save(directory / CHECKPOINT_FILE, arrays, contents)


def restore(
  directory: pathlib.Path,
  engine: engines.Engine,
  plan: plan_lib.Plan,
  settings: Mapping[str, Any],
) -> Progress:
  """Reads the checkpoint.

  The plan may have another number of rounds than the checkpoint, if no
  accountant had to know that number in advance. Its sampler takes the panel of
  the checkpoint.

  Raises:
    ValueError: It is damaged, or of other settings.
  """
  arrays, contents = checkpoint.load(directory / CHECKPOINT_FILE)
  if contents.get('version') != _VERSION:
    raise ValueError(
      f'{directory} holds a run of another release of tf_bdp, which cannot be '
      'resumed by this one.'
    )
  saved = dict(contents['settings'])
  if saved.get('rounds') != settings.get('rounds'):
    if any(a.settings['total_rounds'] for a in plan.accountants().values()):
      raise ValueError(
        f'The run was planned for {saved.get("rounds")} rounds, and its '
        'composition by Hoelder had to know that in advance: --rounds cannot '
        'be changed. With a panel it can.'
      )
    saved['rounds'] = settings.get('rounds')
  checkpoint.check_settings(saved, settings)
  plan.sampler.resume_panel(bytes.fromhex(contents['private_panel_key']))
  accountants = plan.accountants()
  for unit, accountant in accountants.items():
    accountant.load_state_dict(contents['accountants'][unit])
  measured = measurements_lib.from_arrays(_with_prefix(arrays, _MEASURED))
  averaged = _with_prefix(arrays, _AVERAGED)
  return Progress(
    state=engine.from_arrays(_with_prefix(arrays, _ENGINE)),
    accountants=accountants,
    rows=contents['rows'],
    measurements=measured,
    events=[plan.mechanism.events(part) for part in measured],
    dp_stop=contents['dp_stop'],
    stopped=contents['stopped'],
    averaged=[averaged[str(i)] for i in range(len(averaged))] or None,
  )


def _with_prefix(
  arrays: Mapping[str, np.ndarray], prefix: str
) -> dict[str, np.ndarray]:
  return {
    name.removeprefix(prefix): array
    for name, array in arrays.items()
    if name.startswith(prefix)
  }
