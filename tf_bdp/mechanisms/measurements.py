"""What a round measured: the one container that engines fill.

Three scalings of "how far one unit moves the result" must not be mixed up:

  measure:  what an engine measures of a unit, in the units of the updates. For
            a client that is ‖u - ū‖, how far it is from the participants' mean,
            or ‖u‖, its own norm; `Aggregation.measure` decides which.
  move:     how far the unit moves what is released, in units of the clip norm
            C. A mechanism computes it from a measure and from the number of
            participants.
  distance: r, the move over the standard deviation of the noise. It is all that
            an accountant needs; events hold its square.

Of examples the moves are measured directly (`ExampleGroups`). Other words are
in the glossary of docs/architecture.md.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Optional

import numpy as np


class ExampleGroups(NamedTuple):
  """How far the examples of clients move what their clients send.

  A group is the examples measured at one client in one of its local steps.

  Attributes:
    clients: The client of each group.
    steps: The local step of each group, from 0.
    holdings: How many examples each group's client has.
    sizes: How many of them were measured.
    squared_moves: ‖f(B) - f(B∖x)‖² / C², f being what the noise is added to;
      all groups in a row.
    in_every_round: Whether each group's client is measured in every round,
      taking part or not. If not, it was measured because it took part.
    absent: Whether nothing of each group's client was released in that step;
      empty if that was not recorded.
    unmeasured_clients: The clients that took part with examples of which none
      was measured.
  """

  clients: np.ndarray
  steps: np.ndarray
  holdings: np.ndarray
  sizes: np.ndarray
  squared_moves: np.ndarray
  in_every_round: np.ndarray
  absent: np.ndarray = np.zeros(0, bool)
  unmeasured_clients: np.ndarray = np.zeros(0, np.int64)

  @classmethod
  def of(
    cls,
    groups: Sequence[tuple[int, int, int, np.ndarray, bool]],
    absent: Sequence[bool] = (),
    unmeasured_clients: Collection[int] = (),
  ) -> 'ExampleGroups':
    """Makes groups from (client, step, holding, squared moves, always)."""
    clients, steps, holdings, moves, always = (
      zip(*groups) if groups else [()] * 5
    )
    return cls(
      np.array(clients, np.int64),
      np.array(steps, np.int64),
      np.array(holdings, np.int64),
      np.array([part.size for part in moves], np.int64),
      np.concatenate([np.zeros(0), *moves]).astype(np.float32),
      np.array(always, bool),
      np.array(absent, bool),
      np.array(sorted(unmeasured_clients), np.int64),
    )

  def moves(self) -> list[np.ndarray]:
    """Returns the squared moves of each group."""
    return np.split(self.squared_moves, np.cumsum(self.sizes)[:-1])


class MeasuredClient(NamedTuple):
  """What is known about the examples of one client in a round.

  Attributes:
    holding: How many examples the client has.
    step_count: How many local steps it took; 0 if nothing of it was released.
    measured: Which examples are measured in each step, [steps, examples].
    squared_moves: The examples' squared moves, of the same shape or padded;
      None if the client's update could not be used: the worst case is assumed.
  """

  holding: int
  step_count: int
  measured: np.ndarray
  squared_moves: Optional[np.ndarray]


class ReportedCosts(NamedTuple):
  """Costs of a round that were bounded at the clients.

  Attributes:
    costs: The bound for every order.
    failure_probability: δ′, the chance that an order's bound fails.
  """

  costs: np.ndarray
  failure_probability: float


class Measurements(NamedTuple):
  """What was measured in a round. Private data, without any noise.

  Attributes:
    participants: n, without the clients whose updates were unusable.
    failed_clients: How many clients were left out for that reason.
    clip_norm: The clip norm of the round.
    squared_measures: The squared measures of the panel's clients, in the order
      of the panel; without a panel, of the participants.
    taking_part: Whether each of them took part.
    panel: Whether they are a panel, the same in every round.
    examples: Where examples are protected, their moves.
    reported: Where the server learns costs instead of distances, the costs of
      each protected unit. Nothing else is measured then.
    held_out: How many of the panel's clients, the last ones, never take part.
  """

  participants: int
  failed_clients: int
  clip_norm: float
  squared_measures: np.ndarray
  taking_part: np.ndarray
  panel: bool = False
  examples: Optional[ExampleGroups] = None
  reported: Optional[Mapping[str, ReportedCosts]] = None
  held_out: int = 0


def to_arrays(rounds: Sequence[Measurements]) -> dict[str, np.ndarray]:
  """Returns the measurements of all rounds as arrays, for a checkpoint."""
  columns: dict[str, list[np.ndarray]] = {}
  for part in rounds:
    for name, value in _to_columns(part).items():
      columns.setdefault(name, []).append(np.atleast_1d(value))
  result = {}
  for name, values in columns.items():
    result[name] = np.concatenate(values)
    result[f'{name}_sizes'] = np.array([v.size for v in values], np.int64)
  return result


def _to_columns(part: Measurements) -> dict[str, np.ndarray]:
  *simple, examples, reported, held_out = part
  columns = dict(zip(part._fields, map(np.asarray, simple)))
  columns['held_out'] = np.asarray(held_out)
  if examples is not None:
    columns |= {f'examples_{k}': v for k, v in examples._asdict().items()}
  for unit, (costs, failure_probability) in (reported or {}).items():
    columns[f'reported_{unit}'] = np.append(costs, failure_probability)
  return columns


def from_arrays(arrays: Mapping[str, np.ndarray]) -> list[Measurements]:
  """Restores what `to_arrays` returned; ignores other arrays."""
  columns = {
    name: np.split(arrays[name], np.cumsum(arrays[f'{name}_sizes'])[:-1])
    for name in arrays
    if f'{name}_sizes' in arrays
  }
  rounds = arrays.get('participants', ())
  return [
    _from_columns({name: values[i] for name, values in columns.items()})
    for i in range(len(rounds))
  ]


def _from_columns(columns: Mapping[str, np.ndarray]) -> Measurements:
  def parts_of(prefix: str) -> dict[str, np.ndarray]:
    return {
      name.removeprefix(prefix): value
      for name, value in columns.items()
      if name.startswith(prefix)
    }

  examples, reported = parts_of('examples_'), parts_of('reported_')
  return Measurements(
    int(columns['participants'][0]),
    int(columns['failed_clients'][0]),
    float(columns['clip_norm'][0]),
    columns['squared_measures'],
    columns['taking_part'],
    bool(columns['panel'][0]),
    ExampleGroups(**examples) if examples else None,
    {unit: ReportedCosts(v[:-1], float(v[-1])) for unit, v in reported.items()}
    or None,
    int(columns['held_out'][0]),
  )
