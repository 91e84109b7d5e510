"""What a `BayesianAccountant` has seen, as data that JSON can hold."""

import dataclasses
from typing import Any, Optional

import numpy as np

from tf_bdp import validation
from tf_bdp.accounting import ledger, mean_bounds, round_bounds, unit_ledger

FORMAT = 'tf_bdp.BayesianAccountant'
# A state of version 4 is one of version 5 without mixtures and labels.
VERSION = 5
READABLE_VERSIONS = (4, 5)


@dataclasses.dataclass(frozen=True)
class Seen:
  """All rounds that an accountant has seen.

  Attributes:
    entries: The ledger.
    panels: For 'panel' by moments, Σ_t ℓ_t of every unit, [units, orders], for
      each group.
    rounds: For 'holder' and 'product', what every round's bound needs.
    units: For exact figures, the rounds of the units of all groups, one after
      the other.
    group_sizes: How many units each of these groups has.
  """

  entries: tuple[ledger.Entry, ...]
  panels: tuple[np.ndarray, ...]
  rounds: tuple[round_bounds.RoundBounds, ...]
  units: Optional[unit_ledger.UnitLedger]
  group_sizes: tuple[int, ...]

  def to_state(self, settings: dict[str, Any], paper: Any) -> dict[str, Any]:
    """Returns plain data.

    Args:
      settings: The accountant's.
      paper: The state of the paper's account, if there is one.
    """
    return {
      'format': FORMAT,
      'version': VERSION,
      'settings': settings,
      'ledger': ledger.to_state(self.entries),
      'panels': [panel.tolist() for panel in self.panels],
      'units': None if self.units is None else self.units.to_state(),
      'group_sizes': list(self.group_sizes),
      'paper': paper,
      'rounds': [part.to_state() for part in self.rounds],
    }

  @classmethod
  def from_state(
    cls, state: dict[str, Any], settings: dict[str, Any], is_exact: bool
  ) -> 'Seen':
    """Restores what `to_state` returned; `check` comes first.

    Args:
      state: The plain data.
      settings: The accountant's.
      is_exact: Whether figures are by divergences of single units.

    Raises:
      KeyError, TypeError, ValueError, OverflowError: The state is damaged.
    """
    orders = len(settings['orders'])
    entries = ledger.from_state(state['ledger'])
    panels = tuple(_panel_from_state(p, orders) for p in state['panels'])
    rounds = tuple(
      round_bounds.RoundBounds.from_state(r, settings['estimator'], orders)
      for r in state['rounds']
    )
    sizes = tuple(
      validation.check_positive_integer('group_sizes', size)
      for size in state['group_sizes']
    )
    units = None
    if state['units'] is not None:
      units = unit_ledger.UnitLedger.from_state(state['units'])
    if sum(sizes) != (0 if units is None else units.units):
      raise ValueError('its units are not those of its groups')
    seen = cls(entries, panels, rounds, units, sizes)
    seen._check_rounds(
      settings['composition'], is_exact, settings['total_rounds']
    )
    return seen

  def _check_rounds(
    self, composition: str, is_exact: bool, total_rounds: Optional[int]
  ) -> None:
    """Raises ValueError if estimates and ledger are not of the same rounds."""
    estimated = sum(entry.repeats for entry in self.entries if entry.estimated)
    if is_exact:
      fits = (self.units is None) == (estimated == 0)
      fits = fits and not (self.panels or self.rounds)
    elif composition == 'panel':
      fits = (not self.panels) == (estimated == 0) and not self.rounds
    else:
      fits = not self.panels and estimated == sum(
        part.repeats for part in self.rounds
      )
      in_ledger = {label for entry in self.entries for label, _ in entry.groups}
      fits = fits and in_ledger == {
        label for part in self.rounds for label in part.labels or ()
      }
    if not fits or estimated > (total_rounds or estimated):
      raise ValueError('its rounds are not those of its ledger')


def check(state: Any, settings: dict[str, Any]) -> None:
  """Raises ValueError if a state is of something else, or of other settings."""
  if not isinstance(state, dict) or state.get('format') != FORMAT:
    raise ValueError('The state is not one of a BayesianAccountant.')
  if state.get('version') not in READABLE_VERSIONS:
    raise ValueError(
      f'The state has version {state.get("version")}; this release reads '
      f'versions {" and ".join(map(str, READABLE_VERSIONS))}.'
    )
  found = state.get('settings')
  found = found if isinstance(found, dict) else {}
  different = [
    f'{key} = {found.get(key)!r} (here {value!r})'
    for key, value in settings.items()
    if found.get(key) != value
  ]
  if different:
    raise ValueError(
      f'The state was saved with other settings: {", ".join(different)}.'
    )


def _panel_from_state(state: Any, orders: int) -> np.ndarray:
  panel = np.array(state, dtype=np.float64)
  if panel.ndim != 2 or panel.shape[1] != orders:
    raise ValueError('panel is not an array [units, orders]')
  if len(panel) < mean_bounds.FEWEST_UNITS:
    raise ValueError(f'panel has {len(panel)} units')
  if not (np.min(panel) >= 0 and np.max(panel) < np.inf):
    raise ValueError('panel has costs that are negative or not finite')
  return panel
