"""Tests of the ledger: events as differential privacy sees them."""

import json
import math

import dp_accounting
import pytest

from tests.accounting import builders
from tf_bdp.accounting import events, ledger

_GAUSSIAN = dp_accounting.GaussianDpEvent(2.0)
_BAYESIAN = events.BayesianGaussianEvent([0.1, 0.2, 0.3], 0.4, 0.5)
_UNCLIPPED = events.BayesianGaussianEvent([0.1, 0.2, 0.3], 0.4)


def _entries(event, count=1):
  return [entry for _, entry in ledger.rounds_of(event, count)]


@pytest.mark.parametrize(
  'event, expected',
  [
    (_GAUSSIAN, [(0.25, 1.0, False, 3)]),
    (
      dp_accounting.PoissonSampledDpEvent(0.1, _GAUSSIAN),
      [(0.25, 0.1, False, 3)],
    ),
    (_BAYESIAN, [(0.5, 0.4, True, 3)]),
    (_UNCLIPPED, [(math.inf, 0.4, True, 3)]),
    # The largest of all groups.
    (events.ParallelEvent(builders.make_groups()), [(0.4, 0.6, True, 3)]),
    (
      events.ParallelEvent(
        builders.with_inclusion(group, chance)
        for group, chance in zip(builders.make_groups(), (0.3, 0.1, 0.2))
      ),
      [(0.4, 0.6, True, 3, 0.3)],
    ),
    (
      builders.with_inclusion(builders.reported([0.1] * 5), 0.7),
      [(0.25, 0.3, True, 3, 0.7)],
    ),
    (dp_accounting.NonPrivateDpEvent(), [(math.inf, 1.0, False, 3)]),
    (dp_accounting.NoOpDpEvent(), []),
    (dp_accounting.ComposedDpEvent([]), []),
    (
      dp_accounting.SelfComposedDpEvent(
        dp_accounting.ComposedDpEvent(
          [_BAYESIAN, dp_accounting.SelfComposedDpEvent(_GAUSSIAN, 5)]
        ),
        2,
      ),
      [(0.5, 0.4, True, 6), (0.25, 1.0, False, 30)],
    ),
  ],
)
def test_events_are_taken_apart_into_rounds(event, expected):
  assert _entries(event, 3) == [ledger.Entry(*entry) for entry in expected]


def test_the_event_itself_is_given_back_with_its_entry():
  parallel = events.ParallelEvent(builders.make_groups())
  for event in (_BAYESIAN, parallel, builders.reported([0.1] * 5)):
    ((found, _),) = ledger.rounds_of(event, 3)
    assert found is event
  ((found, _),) = ledger.rounds_of(_GAUSSIAN)
  assert found is None


def test_the_ledger_of_a_parallel_event_dominates_that_of_each_group():
  def epsilon(event):
    return builders.rdp_epsilon(ledger.to_dp_event(_entries(event, 3)))

  groups = builders.make_groups()
  alone = [epsilon(group) for group in groups]
  assert epsilon(events.ParallelEvent(groups)) >= max(alone) > min(alone)


def test_gaussians_that_see_one_sample_add_their_squared_distances():
  # Two Gaussians together are one whose squared distance is the sum.
  both = dp_accounting.ComposedDpEvent(
    [_GAUSSIAN, dp_accounting.SelfComposedDpEvent(_GAUSSIAN, 3)]
  )
  sampled = dp_accounting.PoissonSampledDpEvent(0.1, both)
  assert _entries(sampled) == [ledger.Entry(1.0, 0.1, False, 1)]


@pytest.mark.parametrize(
  'event',
  [
    dp_accounting.UnsupportedDpEvent(),
    dp_accounting.LaplaceDpEvent(1.0),
    dp_accounting.PoissonSampledDpEvent(0.1, _BAYESIAN),
    dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.LaplaceDpEvent(1.0)),
    dp_accounting.PoissonSampledDpEvent(
      0.1, dp_accounting.PoissonSampledDpEvent(0.1, _GAUSSIAN)
    ),
    dp_accounting.SampledWithoutReplacementDpEvent(10, 2, _GAUSSIAN),
  ],
)
def test_other_events_are_refused(event):
  with pytest.raises(ledger.UnsupportedPartError, match='Only Gaussian'):
    _entries(dp_accounting.ComposedDpEvent([_GAUSSIAN, event]))


@pytest.mark.parametrize(
  'event, sentence',
  [
    (dp_accounting.GaussianDpEvent(-1.0), 'noise_multiplier must be positive'),
    (dp_accounting.GaussianDpEvent(math.nan), 'must be positive'),
    (
      dp_accounting.PoissonSampledDpEvent(1.5, _GAUSSIAN),
      'sampling_probability must be between 0 and 1. Found 1.5',
    ),
    (
      dp_accounting.SelfComposedDpEvent(_GAUSSIAN, -2),
      'count must be a positive integer. Found -2',
    ),
  ],
)
def test_parameters_out_of_range_are_named(event, sentence):
  with pytest.raises(ValueError, match=sentence):
    _entries(event)


@pytest.mark.parametrize('noise_multiplier', [1e-120, 1e-170, 1e-200])
def test_a_noise_too_small_to_account_for_is_refused_or_no_privacy(
  noise_multiplier,
):
  # r² above 1e200 is refused as a distance and must not get stuck in a ledger.
  event = dp_accounting.GaussianDpEvent(noise_multiplier)
  try:
    entries = _entries(event)
  except ValueError:
    return
  assert entries[0].squared_distance == math.inf


def test_the_ledger_as_an_event_is_what_took_place_at_the_worst_case():
  entries = [
    ledger.Entry(0.25, 1.0, False, 2),
    ledger.Entry(0.25, 0.1, True, 3),
    ledger.Entry(0.0, 0.5, True, 7),
    ledger.Entry(4.0, 0.0, True, 7),
  ]
  epsilon = (
    dp_accounting.rdp.RdpAccountant()
    .compose(ledger.to_dp_event(entries))
    .get_epsilon(1e-5)
  )
  expected = (
    dp_accounting.rdp.RdpAccountant()
    .compose(_GAUSSIAN, 2)
    .compose(dp_accounting.PoissonSampledDpEvent(0.1, _GAUSSIAN), 3)
    .get_epsilon(1e-5)
  )
  assert epsilon == pytest.approx(expected, rel=1e-12)


def test_a_round_without_a_worst_case_is_not_private():
  event = ledger.to_dp_event([ledger.Entry(math.inf, 0.1, True, 1)])
  assert event == dp_accounting.NonPrivateDpEvent()


def test_like_rounds_in_a_row_are_one_entry():
  entries = ()
  for repeats, q in [(1, 0.1), (2, 0.1), (1, 0.2), (4, 0.1)]:
    entries = ledger.appended(entries, ledger.Entry(1.0, q, True, repeats))
  assert [(e.participation_probability, e.repeats) for e in entries] == [
    (0.1, 3),
    (0.2, 1),
    (0.1, 4),
  ]


def test_sampled_and_known_rounds_are_kept_apart():
  entries = ledger.appended((), ledger.Entry(1.0, 0.1, True, 1))
  entries = ledger.appended(entries, ledger.Entry(1.0, 0.1, False, 1))
  assert len(entries) == 2


def test_the_state_is_json_and_restores_equal_entries():
  entries = (
    ledger.Entry(0.1 + 0.2, 1 / 3, True, 7),
    ledger.Entry(math.inf, 1.0, False, 1),
  )
  state = json.loads(json.dumps(ledger.to_state(entries), allow_nan=False))
  assert ledger.from_state(state) == entries


@pytest.mark.parametrize(
  'field, value',
  [
    *((0, value) for value in (-1.0, math.nan, math.inf, 1e250)),
    *((1, value) for value in (1.5, math.nan)),
    *((2, value) for value in (1, None)),
    *((3, value) for value in (0, 1.5, math.inf)),
    *((4, value) for value in (1.5, -0.1, math.nan)),
  ],
)
def test_entries_that_are_none_are_refused(field, value):
  entry = [1.0, 0.5, True, 1, 0.3]
  assert ledger.from_state([entry]) == (ledger.Entry(*entry),)
  with pytest.raises(ValueError):
    ledger.from_state([entry[:-1]])
  entry[field] = value
  with pytest.raises(ValueError):
    ledger.from_state([entry])
