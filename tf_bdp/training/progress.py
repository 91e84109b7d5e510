"""Everything that a run has done so far, in memory and in its checkpoint."""

import dataclasses
import pathlib
import textwrap
from collections.abc import Mapping
from typing import Any, Optional

import dp_accounting
import numpy as np

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import individual_filter
from tf_bdp.engines import base as engines
from tf_bdp.mechanisms import measurements as measurements_lib
from tf_bdp.training import checkpoint
from tf_bdp.training import plan as plan_lib

CHECKPOINT_FILE = 'checkpoint.npz'
PRIVATE_FILE = 'PRIVATE.txt'
# Said beside the files of a run, and on its page.
PRIVATE = (
  'metrics.csv, tensorboard, checkpoint.npz, distances.npz and '
  'local_epsilons.csv are private: they tell how many clients took part in '
  'each round, and how far single ones moved the model. They stay inside the '
  'trust boundary, with the server.'
)
# 2: draws came from `seed`, which is no seed of draws any more.
_VERSION = 3
_ENGINE, _MEASURED, _AVERAGED = 'engine_', 'measured_', 'averaged_'
_BUDGETS = 'budgets_'


@dataclasses.dataclass(frozen=True)
class Progress:
  """What a run has done.

  Attributes:
    state: The state of the engine.
    accountants: The accountant of each unit, with all rounds composed.
    rows: The metrics of every round.
    measurements: What was measured in every round.
    events: The events of every round, by unit.
    stopped: Why training ended before its last round, if it did.
    averaged: The average of the weights of all rounds, if the plan wants it.
    budgets: The clients' own accounts, if the plan has an individual filter.
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
  stopped: str = ''
  averaged: Optional[list[np.ndarray]] = None
  budgets: Optional[individual_filter.IndividualFilter] = None

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


def write_private_notice(directory: pathlib.Path) -> None:
  """Writes beside the files of a run which of them are private."""
  released = (
    'The model may be published. So may epsilons by the claims dp and filter. '
    'Every other epsilon, the page and the statement depend on the data: '
    'publishing them is a release of its own.'
  )
  text = '\n\n'.join(textwrap.fill(part, 80) for part in (PRIVATE, released))
  (directory / PRIVATE_FILE).write_text(f'{text}\n', encoding='utf-8')


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
    _BUDGETS: progress.budgets.to_arrays() if progress.budgets else {},
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
  budgets = plan.individual_filter()
  if budgets is not None:
    budgets = budgets.restored(_with_prefix(arrays, _BUDGETS))
  return Progress(
    state=engine.from_arrays(_with_prefix(arrays, _ENGINE)),
    accountants=accountants,
    rows=contents['rows'],
    measurements=measured,
    events=[plan.mechanism.events(part) for part in measured],
    stopped=contents['stopped'],
    averaged=[averaged[str(i)] for i in range(len(averaged))] or None,
    budgets=budgets,
  )


def _with_prefix(
  arrays: Mapping[str, np.ndarray], prefix: str
) -> dict[str, np.ndarray]:
  return {
    name.removeprefix(prefix): array
    for name, array in arrays.items()
    if name.startswith(prefix)
  }
