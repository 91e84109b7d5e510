"""Tests of the events: of distances, of groups, of reported costs."""

import math

import attr
import dp_accounting
import numpy as np
import pytest

from tests.accounting import builders
from tf_bdp.accounting import events


def _event(distances=(0.1, 0.2, 0.3), q=0.5, worst=1.0, panel=False):
  return events.BayesianGaussianEvent(distances, q, worst, panel)


def test_it_is_an_event_of_dp_accounting():
  assert isinstance(_event(), dp_accounting.DpEvent)


def test_it_cannot_be_changed():
  event = _event()
  with pytest.raises(attr.exceptions.FrozenInstanceError):
    event.participation_probability = 0.1
  with pytest.raises(ValueError, match='read-only'):
    event.squared_distances[0] = 9.0


def test_later_changes_to_the_array_given_do_not_reach_it():
  distances = np.array([0.1, 0.2, 0.3])
  event = _event(distances)
  distances[0] = 0.9
  assert event.squared_distances[0] == 0.1


def test_without_the_rest_there_is_no_worst_case_and_no_panel():
  event = events.BayesianGaussianEvent([1, 2, 3], 0.5)
  assert event.worst_case_squared_distance is None
  assert event.panel is False
  assert event.squared_distances.dtype == np.float64


def test_events_of_equal_contents_are_equal():
  assert _event() == _event(np.array([0.1, 0.2, 0.3]))
  assert _event() != _event([0.1, 0.2, 0.4])
  assert _event() != _event(q=0.4)
  assert _event() != _event([0.1, 0.2, 0.3, 0.3])
  assert hash(_event()) == hash(_event())


def test_its_text_does_not_tell_the_distances():
  assert '0.2' not in repr(_event())
  assert '3 units' in repr(_event())


def test_rounding_above_the_worst_case_is_let_through():
  # A norm clipped in float32 exceeds the clip norm by some 1e-7.
  assert _event([0.1, 0.2, 1.0 + 1e-6]).squared_distances.max() > 1.0


@pytest.mark.parametrize('q', [0, 1e-9, 1])
def test_every_probability_is_one(q):
  assert _event(q=q).participation_probability == q


@pytest.mark.parametrize(
  'arguments, sentence',
  [
    ({'distances': [0.1, 0.2, np.nan]}, '1 NaN of 3, the first at index 2'),
    ({'distances': [0.1, np.inf, np.inf]}, '2 infinite of 3, .* index 1'),
    ({'distances': [-0.1, 0.2, 0.3]}, '1 negative of 3, .* index 0'),
    ({'distances': []}, r'at least 3 sampled units. Found shape \(0,\)'),
    ({'distances': [0.1, 0.2]}, r'at least 3 sampled units. Found shape \(2,'),
    ({'distances': 0.1}, r'at least 3 sampled units. Found shape \(\)'),
    ({'distances': [[0.1, 0.2, 0.3]]}, r'Found shape \(1, 3\)'),
    ({'q': -0.01}, 'participation_probability must be between 0 and 1'),
    ({'q': 1.01}, 'between 0 and 1. Found 1.01'),
    ({'q': np.nan}, 'between 0 and 1. Found nan'),
    ({'worst': -1.0}, 'non-negative and finite. Found -1.0'),
    ({'worst': np.nan}, 'non-negative and finite. Found nan'),
    ({'worst': np.inf}, 'non-negative and finite. Found inf'),
    ({'worst': 0.25}, '1 of 3 squared_distances exceed .* = 0.25'),
  ],
)
def test_bad_arguments_are_named(arguments, sentence):
  with pytest.raises(ValueError, match=sentence):
    _event(**arguments)


def test_a_worst_case_too_large_to_account_for_is_refused():
  # Distances themselves are refused from 1e200 on.
  with pytest.raises(ValueError, match='worst_case_squared_distance'):
    _event(worst=1e250)


# --- Events of several groups.


def test_an_event_is_the_only_group_of_itself():
  event = _event()
  assert event.groups == (event,)
  assert events.ParallelEvent([event]).groups == event.groups


def test_an_event_of_groups_has_the_largest_of_their_numbers():
  groups = builders.make_groups()
  parallel = events.ParallelEvent(
    builders.with_inclusion(group, chance)
    for group, chance in zip(groups, (0.3, 0.1, 0.2))
  )
  assert parallel.participation_probability == 0.6
  assert parallel.worst_case_squared_distance == 0.4
  assert parallel.inclusion_probability == 0.3
  assert parallel.panel


def test_an_event_of_groups_cannot_be_changed_and_compares_by_contents():
  groups = builders.make_groups()
  event = events.ParallelEvent(iter(groups))
  assert event == events.ParallelEvent(builders.make_groups())
  assert event != events.ParallelEvent(groups[:2])
  with pytest.raises(attr.exceptions.FrozenInstanceError):
    event.groups = ()
  assert repr(event).count('units>') == 3


@pytest.mark.parametrize(
  'group',
  [
    events.ParallelEvent([_event()]),
    dp_accounting.GaussianDpEvent(1.0),
    dp_accounting.NoOpDpEvent(),
    builders.reported([0.1] * 5),
    None,
    0.25,
  ],
  ids=lambda group: type(group).__name__,
)
def test_groups_that_are_no_events_of_distances_are_refused(group):
  for groups in ([group], [_event(), group], [group, _event()]):
    with pytest.raises(TypeError, match='BayesianGaussianEvent'):
      events.ParallelEvent(groups)


def test_no_groups_are_refused():
  with pytest.raises(ValueError, match='groups must be at least one event'):
    events.ParallelEvent([])


@pytest.mark.parametrize('flags', [(True, False), (False, False, True)])
def test_groups_are_panels_all_or_none(flags):
  with pytest.raises(ValueError, match='All groups must be panels, or none'):
    events.ParallelEvent([_event(panel=flag) for flag in flags])


# --- Reported costs.


@pytest.mark.parametrize(
  'arguments, sentence',
  [
    *(
      ({'costs': costs}, 'costs must be finite and non-neg')
      for bad in (math.nan, math.inf, -1e-12)
      for costs in ([bad, 0.1, 0.1], [0.1, 0.1, bad])
    ),
    ({'failure_probability': 0.0}, 'failure_probability must be above 0'),
    ({'failure_probability': 1.0}, 'failure_probability must be above 0'),
    ({'failure_probability': math.nan}, 'failure_probability must be above 0'),
    ({'q': 1.1}, 'participation_probability must be between 0 and 1'),
    ({'q': -0.1}, 'participation_probability must be between 0 and 1'),
    ({'worst': -1.0}, 'worst_case_squared_distance must be finite'),
    ({'worst': math.inf}, 'worst_case_squared_distance must be finite'),
    ({'worst': math.nan}, 'worst_case_squared_distance must be finite'),
  ],
)
def test_bad_numbers_in_a_report_are_refused(arguments, sentence):
  with pytest.raises(ValueError, match=sentence):
    builders.reported(**{'costs': [0.1], **arguments})


def test_the_text_of_a_report_does_not_tell_its_costs():
  event = builders.reported([0.125, 0.375])
  assert '<2 orders>' in repr(event)
  assert '0.125' not in repr(event) and '0.375' not in repr(event)
  with pytest.raises(attr.exceptions.FrozenInstanceError):
    event.costs = (0.0, 0.0)


@pytest.mark.parametrize('bad', [-0.1, 1.1, math.nan, math.inf])
@pytest.mark.parametrize(
  'event',
  [_event(), builders.reported([0.1] * 5)],
  ids=['measured', 'reported'],
)
def test_chances_of_inclusion_that_are_none_are_refused(event, bad):
  with pytest.raises(
    ValueError, match='inclusion_probability must be between 0 and 1'
  ):
    builders.with_inclusion(event, bad)
