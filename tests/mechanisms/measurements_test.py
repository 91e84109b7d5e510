"""Tests of what a round measured, and of how it is kept."""

import io

import hypothesis
import numpy as np
from hypothesis import strategies as st

from tests.mechanisms import builders
from tf_bdp.mechanisms import measurements

_groups = builders.make_groups
_moves = st.lists(st.floats(0, 4, width=32), max_size=4)


def test_groups_know_their_moves():
  groups = _groups([(0, 0, 9, [1.0, 2.0]), (1, 0, 9, []), (1, 1, 9, [3.0])])
  assert [part.tolist() for part in groups.moves()] == [[1.0, 2.0], [], [3.0]]
  assert builders.no_groups().sizes.size == 0


def test_groups_of_none_are_empty_arrays_of_their_types():
  some = measurements.ExampleGroups.of([(3, 1, 9, np.array([0.5]), True)])
  none = measurements.ExampleGroups.of([])
  for one, other in zip(some, none):
    assert one.dtype == other.dtype
    assert other.size == 0
  assert some.squared_moves.dtype == np.float32


@st.composite
def _rounds(draw):
  """Rounds of every kind, in one run as they never are."""
  count = draw(st.integers(0, 5))
  measures = np.array(draw(_moves), np.float32)
  examples = reported = None
  if draw(st.booleans()):
    examples = measurements.ExampleGroups.of(
      [
        (client, step, 9, np.array(moves), client < 2)
        for client, step, moves in draw(
          st.lists(
            st.tuples(st.integers(0, 9), st.integers(0, 2), _moves), max_size=4
          )
        )
      ]
    )
    if draw(st.booleans()):
      absent = np.arange(examples.sizes.size) % 2 == 0
      examples = examples._replace(
        absent=absent, unmeasured_clients=np.array([4, 7])
      )
  if draw(st.booleans()):
    reported = {
      unit: measurements.ReportedCosts(np.array([0.5, 1e-300, np.inf]), 1e-9)
      for unit in draw(st.sampled_from([('client',), ('client', 'example')]))
    }
  return measurements.Measurements(
    count,
    draw(st.integers(0, 3)),
    draw(st.floats(0.1, 9)),
    measures,
    np.arange(measures.size) < count,
    draw(st.booleans()),
    examples,
    reported,
    draw(st.integers(0, 3)),
  )


def _assert_same(found, wanted):
  assert type(found) is type(wanted)
  if isinstance(wanted, tuple):
    for one, other in zip(found, wanted):
      _assert_same(one, other)
  elif isinstance(wanted, dict):
    assert found.keys() == wanted.keys()
    for name in wanted:
      _assert_same(found[name], wanted[name])
  else:
    np.testing.assert_array_equal(found, wanted, strict=True)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
  st.lists(_rounds(), max_size=4).filter(
    # A run is of one mechanism: its rounds have the same parts.
    lambda rounds: len({_parts(part) for part in rounds}) <= 1
  )
)
def test_rounds_come_back_from_a_file_bit_for_bit(rounds):
  file = io.BytesIO()
  np.savez(file, other=np.arange(3), **measurements.to_arrays(rounds))
  file.seek(0)
  with np.load(file, allow_pickle=False) as arrays:
    found = measurements.from_arrays(dict(arrays))
  assert len(found) == len(rounds)
  for one, other in zip(found, rounds):
    _assert_same(one, other)


def test_rounds_of_the_release_before_are_read_and_continued():
  # It recorded neither who was absent nor who was not measured.
  rounds = [
    builders.measured([], 2, groups=_groups([(0, 0, 9, [1.0, 2.0, 3.0])]))
  ]
  arrays = {
    name: values
    for name, values in measurements.to_arrays(rounds).items()
    if 'absent' not in name and 'unmeasured' not in name
  }
  (found,) = measurements.from_arrays(arrays)
  _assert_same(found, rounds[0])
  new = found._replace(
    examples=found.examples._replace(absent=np.array([True]))
  )
  for one, other in zip(
    measurements.from_arrays(measurements.to_arrays([found, new])), [found, new]
  ):
    _assert_same(one, other)


def _parts(part):
  return part.examples is not None, tuple(part.reported or ())
