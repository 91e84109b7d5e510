"""Tests of `BayesianAccountant`: its state, saved, restored and damaged."""

import copy
import functools
import json
import math

import dp_accounting
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.accounting import builders
from tf_bdp.accounting import events

_DELTA = builders.DELTA
_ORDERS = builders.FEW_ORDERS
_SIZE = len(_ORDERS)
_event = builders.make_event
pytestmark = builders.ignore_best_order
moments_alone = builders.moments_alone


def _accountant(composition='panel', **settings):
  return builders.make_accountant(
    composition, 20, **{'orders': _ORDERS, **settings}
  )


def _takes_reports(composition, estimator):
  return composition != 'panel' and estimator != 'population'


def _used(composition, estimator):
  """Has seen rounds of all kinds that it takes; the last are reported."""
  accountant = _accountant(composition, estimator=estimator)
  accountant.compose(dp_accounting.GaussianDpEvent(3.0))
  accountant.compose(events.ParallelEvent(builders.make_groups()), 2)
  accountant.compose(events.ParallelEvent(builders.make_groups()))
  if _takes_reports(composition, estimator):
    costs = [0.01, 0.02, 0.1, 0.3, 1.0]
    accountant.compose(builders.reported(costs, 1e-9), 2)
  return accountant


@functools.cache
def _state_text(composition, estimator):
  return json.dumps(_used(composition, estimator).state_dict(), allow_nan=False)


# --- What is saved is restored.


def _assert_restored(original, further=None):
  restored = builders.restored(original)
  for _ in range(2):
    assert json.dumps(restored.state_dict()) == json.dumps(
      original.state_dict(), allow_nan=False
    )
    assert restored.ledger == original.ledger
    assert restored.explain(_DELTA) == original.explain(_DELTA)
    worst = original.get_worst_case_epsilon(1e-4)
    assert restored.get_worst_case_epsilon(1e-4) == worst
    if further is None:
      return
    for accountant in (original, restored):
      accountant.compose(further)


@builders.every_kind
@hypothesis.settings(max_examples=5)
@hypothesis.given(
  # Also of what costs nothing.
  rounds=builders.rounds(chances=(1.0, 1 / 3, 0.0)),
  noise=st.floats(1, 10),
)
def test_a_state_that_went_through_json_is_the_same_state(
  composition, estimator, rounds, noise
):
  original = _accountant(composition, estimator=estimator)
  for event, count in rounds:
    original.compose(event, count)
  original.compose(dp_accounting.GaussianDpEvent(noise))
  if _takes_reports(composition, estimator):
    report = builders.reported([0.1] * _SIZE)
    original.compose(builders.with_inclusion(report, 0.7))
  _assert_restored(original, rounds[-1][0])


@builders.every_kind
def test_the_state_of_a_long_run_round_trips(composition, estimator):
  original = _used(composition, estimator)
  restored = builders.restored(original)
  assert restored.get_delta(1.0) == original.get_delta(1.0)
  _assert_restored(original, events.ParallelEvent(builders.make_groups()))


@pytest.mark.parametrize('composition', builders.COMPOSITIONS)
@pytest.mark.parametrize(
  'estimator, event',
  [
    # Betting moves so many units to fixed points.
    pytest.param('betting', builders.random_event(units=5000), id='many units'),
    pytest.param('student_t', _event(worst=None), id='no worst case'),
    pytest.param('betting', _event([0.0] * 4, 0.3, 0.0), id='nothing moves'),
  ],
)
def test_the_state_of_extremes_round_trips(composition, estimator, event):
  _assert_restored(
    _accountant(composition, estimator=estimator).compose(event, 2)
  )


@pytest.mark.parametrize(
  'event, count, settings',
  [
    (_event(q=np.float32(0.3)), 1, {}),
    (_event(worst=np.float32(0.25)), 1, {}),
    (_event(), np.int64(2), {}),
    (dp_accounting.GaussianDpEvent(np.float32(2.0)), 1, {}),
    (builders.sampled_gaussian(np.float32(0.5), 2.0), 1, {}),
    (_event(), 1, {'total_rounds': np.int64(10)}),
    (_event(), 1, {'estimator_delta': np.float32(1e-6)}),
  ],
)
def test_numbers_of_numpy_do_not_spoil_the_state(event, count, settings):
  accountant = builders.make_accountant('holder', **settings)
  _assert_restored(accountant.compose(event, count))


@pytest.mark.parametrize('composition', ['holder', 'product'])
def test_a_restored_report_still_asks_for_its_delta(composition):
  restored = builders.restored(_used(composition, 'betting'))
  with pytest.raises(ValueError, match='bounded for a larger delta'):
    restored.get_epsilon(1e-8)


def test_a_restored_panel_still_has_its_groups():
  restored = builders.restored(_used('panel', 'betting'))
  with pytest.raises(ValueError, match=r'The panels have \[20, 12, 30\] units'):
    restored.compose(_event())


# --- What was saved with other settings is refused.


@pytest.mark.parametrize('state', [None, 7, 'state', [], {}, {'a': 1}])
def test_a_foreign_state_is_refused(state):
  with pytest.raises(ValueError, match='not one of a BayesianAccountant'):
    _accountant().load_state_dict(state)


@pytest.mark.parametrize(
  'settings, sentence',
  [
    ({'composition': 'product'}, "composition = 'product' .here 'panel'."),
    ({'estimator': 'student_t'}, "estimator = 'student_t'"),
    ({'direction': 'printed'}, "direction = 'printed'"),
    ({'conversion': 'chernoff'}, "conversion = 'chernoff'"),
    ({'orders': (1, 2)}, r'orders = \[1, 2\]'),
    ({'estimator_delta': 1e-9}, 'estimator_delta = 1e-09'),
    ({'count_orders': False}, 'count_orders = False'),
  ],
)
def test_a_state_of_other_settings_is_refused(settings, sentence):
  foreign = _accountant(**settings).compose(_event())
  accountant = _accountant().compose(_event(), 2)
  with (
    builders.unchanged(accountant),
    pytest.raises(ValueError, match=f'other settings: {sentence}'),
  ):
    accountant.load_state_dict(foreign.state_dict())


def test_a_state_of_other_total_rounds_is_refused():
  foreign = builders.make_accountant('holder', total_rounds=9)
  with pytest.raises(ValueError, match=r'total_rounds = 9 \(here 10\)'):
    builders.make_accountant('holder').load_state_dict(foreign.state_dict())


# --- What is damaged is refused.

_MISSING = object()


def _damaged(state, path, value):
  """The state with another value at a place, or without it."""
  state = part = copy.deepcopy(state)
  for key in path[:-1]:
    part = part[key]
  if value is _MISSING:
    del part[path[-1]]
  else:
    part[path[-1]] = value
  return state


def _assert_refused(composition, estimator, path, value, sentence='damaged'):
  state = json.loads(_state_text(composition, estimator))
  accountant = _accountant(composition, estimator=estimator)
  accountant.load_state_dict(state)  # It is the damage that is refused.
  damaged = _damaged(state, path, value)
  with (
    builders.unchanged(accountant),
    pytest.raises(ValueError, match=sentence),
  ):
    accountant.load_state_dict(damaged)


@pytest.mark.parametrize(
  'path, value, sentence',
  [
    (('format',), _MISSING, 'not one of a BayesianAccountant'),
    (('format',), 'opacus', 'not one of a BayesianAccountant'),
    (
      ('version',),
      _MISSING,
      'version None; this release reads versions 4 and 5',
    ),
    (('version',), 1, 'version 1; this release reads versions 4 and 5'),
    (('settings',), _MISSING, 'other settings: composition = None'),
    (('settings',), 7, 'other settings: composition = None'),
    (('ledger',), [], 'damaged: its rounds are not those of its ledger'),
    (('panels',), [], 'damaged: its rounds are not those of its ledger'),
  ],
)
def test_what_is_wrong_with_a_state_is_named(path, value, sentence):
  _assert_refused('panel', 'betting', path, value, sentence)


# Of each field of a ledger's entry what it cannot be: r², q, whether it is
# estimated, how often, and the chance of inclusion.
_BAD_ENTRIES = [
  *((0, value) for value in (-1.0, math.nan, 'near', 1e250)),
  *((1, value) for value in (1.5, None)),
  *((2, value) for value in (None, 1)),
  *((3, value) for value in (0, 1.5, math.inf)),
  *((4, value) for value in (1.5, -0.1, math.nan, None, _MISSING)),
]
_BAD_PANELS = [
  ((), None),
  *(((1,), value) for value in (None, [], [[0.1] * 5] * 2, [[0.1] * 4] * 3)),
  ((2, 0), [0.1]),
  *(((2, 0, 0), value) for value in (math.nan, math.inf, -0.1, 'x')),
]


@hypothesis.settings(max_examples=50)
@hypothesis.given(
  st.sampled_from(
    [
      *((('ledger', 0, *place), value) for *place, value in _BAD_ENTRIES),
      *((('panels', *place), value) for place, value in _BAD_PANELS),
      (('ledger',), None),
      (('ledger', 0), [1.0, 0.5]),
      (('rounds',), [[[{}], 1]]),
      (('rounds',), None),
      *(((key,), _MISSING) for key in ('ledger', 'panels', 'rounds')),
    ]
  )
)
def test_a_damaged_panel_or_ledger_is_refused_and_changes_nothing(damage):
  _assert_refused('panel', 'betting', *damage)


_FIELDS = {
  'betting': ('points', 'weights'),
  'bernstein': ('mean', 'variance'),
  'student_t': ('log_scale', 'mean', 'deviation'),
  'population': ('log_scale', 'mean'),
}
_NO_FIELDS = [
  *(None, 0.1, 'x', [], [0.1], {'x': 1}),
  *([math.nan] * _SIZE, [[[0.1] * _SIZE]] * 2),
]
# None of these can come from a sample; some lower ε, or lead to NaN.
_IMPOSSIBLE = {
  ('betting', 'points'): [
    *([[value] * _SIZE] * 20 for value in (-1.0, 2.0)),
    *([[0.1] * _SIZE] * 7, [0.1] * _SIZE),
  ],
  ('betting', 'weights'): [
    *([[value] * _SIZE] for value in (-1.0, 0.0)),
    [1.0] * _SIZE,
  ],
  ('betting', 'log_worst_case'): [[-1.0] * _SIZE, [None] * _SIZE],
  ('betting', 'count'): [10**6, 2],
  ('bernstein', 'mean'): [[-1.0] * _SIZE, [2.0] * _SIZE],
  ('bernstein', 'variance'): [[-1.0] * _SIZE, [[0.1] * _SIZE] * 2],
  ('bernstein', 'log_worst_case'): [[-1.0] * _SIZE, [None] * _SIZE],
  ('bernstein', 'count'): [1],
  ('student_t', 'mean'): [[-1.0] * _SIZE, [math.inf] * _SIZE],
  ('student_t', 'deviation'): [[-1.0] * _SIZE],
  ('student_t', 'log_scale'): [[-1.0] * _SIZE],
  ('student_t', 'log_worst_case'): [[-1.0] * _SIZE],
  ('student_t', 'count'): [1],
  ('population', 'log_scale'): [[-1.0] * _SIZE, [math.inf] * _SIZE],
  ('population', 'mean'): [[-1.0] * _SIZE, [math.inf] * _SIZE],
  ('population', 'log_worst_case'): [[-1.0] * _SIZE],
  ('population', 'count'): [0],
}


@hypothesis.settings(max_examples=150)
@hypothesis.given(
  composition=st.sampled_from(['holder', 'product']),
  group=st.integers(0, 2),
  damage=st.sampled_from(
    [
      (estimator, field, value)
      for estimator, fields in _FIELDS.items()
      for field in fields
      for value in [*_NO_FIELDS, _MISSING]
    ]
    + [
      (estimator, field, value)
      for (estimator, field), values in _IMPOSSIBLE.items()
      for value in values
    ]
  ),
)
def test_a_sample_that_cannot_be_one_is_refused(composition, group, damage):
  estimator, field, value = damage
  path = ('rounds', 0, 0, group, field)
  _assert_refused(composition, estimator, path, value)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
  composition=st.sampled_from(['holder', 'product']),
  damage=st.sampled_from(
    [
      *(
        ((0, 0, field), value)
        for field, values in {
          'log_bound': [
            *(0.1, None, 'costs', _MISSING, [0.1] * 4, [[0.1] * 5]),
            *([-0.1] * 5, [math.nan] * 5),
          ],
          'failure_probability': [
            *(0.0, 1.0, -1e-9, math.nan, None, 'never', _MISSING)
          ],
        }.items()
        for value in values
      ),
      *(((0, 0), value) for value in ({}, None, 7, 'failure_probability', [])),
      # It would cost nothing, or break ε.
      *(((0,), value) for value in ([], None, {})),
      # Other repeats than those of the ledger.
      *(((1,), value) for value in (0, -1, 1.5, None, math.inf, 5)),
    ]
  ),
)
def test_a_damaged_report_or_round_is_refused(composition, damage):
  path, value = damage
  _assert_refused(composition, 'betting', ('rounds', 2, *path), value)


@pytest.mark.parametrize('composition', ['holder', 'product'])
@pytest.mark.parametrize('estimator', builders.ESTIMATORS)
def test_a_round_without_samples_is_refused(composition, estimator):
  for place in (0, -1):
    _assert_refused(composition, estimator, ('rounds', place, 0), [])


def test_a_ledger_without_inclusion_is_refused():
  # As states had it before: what was amplified then was so unduly.
  ledger = _used('product', 'betting').state_dict()['ledger']
  without = [entry[:4] for entry in ledger]
  _assert_refused('product', 'betting', ('ledger',), without)


def test_more_rounds_than_total_rounds_in_a_state_are_refused():
  state = _used('holder', 'betting').state_dict()
  for entry in state['ledger']:
    entry[3] *= 100
  for sample_and_repeats in state['rounds']:
    sample_and_repeats[1] *= 100
  with pytest.raises(ValueError, match='damaged'):
    _accountant('holder').load_state_dict(state)


_junk = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-2, 10**6)
  | st.floats()
  | st.text(max_size=3),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=2)
  ),
  max_leaves=6,
)


@builders.every_kind
@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data())
def test_whatever_is_damaged_no_state_breaks_the_accountant(
  composition, estimator, data
):
  state = json.loads(_state_text(composition, estimator))
  path, part = [], state
  while not path or data.draw(st.booleans()):
    if not isinstance(part, (dict, list)) or not part:
      break
    keys = sorted(part) if isinstance(part, dict) else range(len(part))
    path.append(data.draw(st.sampled_from(keys)))
    part = part[path[-1]]
  value = data.draw(_junk | st.just(_MISSING))
  damaged = _damaged(state, path, value)
  accountant = _accountant(composition, estimator=estimator)
  before = accountant.state_dict()
  try:
    accountant.load_state_dict(damaged)
  except ValueError:
    assert accountant.state_dict() == before
    return
  # What is taken for a state can be accounted for, and saved again.
  assert accountant.get_epsilon(_DELTA) >= 0
  json.dumps(accountant.state_dict(), allow_nan=False)


@pytest.mark.parametrize('value', [[], [0.1]])
def test_a_distance_in_the_ledger_that_is_a_list_is_refused(value):
  _assert_refused('panel', 'betting', ('ledger', 0, 0), value)
