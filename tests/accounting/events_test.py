"""Tests of `BayesianGaussianEvent`."""

import attr
import dp_accounting
import numpy as np
import pytest

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
