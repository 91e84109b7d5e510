"""Tests of the ledger of a panel's units."""

import json
import math

import numpy as np
import pytest

from tf_bdp.accounting import unit_ledger

UnitLedger = unit_ledger.UnitLedger


def _counts(ledger):
  """{(unit, r, q, a): count} of all that was counted."""
  ledger = ledger.counted()
  entries = ledger.counts.tocoo()
  return {
    (int(unit), *ledger.kinds[kind].tolist()): count
    for unit, kind, count in zip(entries.row, entries.col, entries.data)
  }


def test_rounds_of_sure_participation_add_up_their_squared_distances():
  ledger = UnitLedger.empty(2).added([0.1, 0.4], 1.0, 1.0, 3)
  ledger = ledger.added([0.2, 0.0], 1.0, 1.0, 1)
  np.testing.assert_allclose(ledger.squared_mu, [0.5, 1.2])
  assert not _counts(ledger)


def test_other_rounds_are_counted_by_kind():
  ledger = UnitLedger.empty(3).added([0.25, 0.25, 0.0], 0.5, 1.0, 2)
  ledger = ledger.added([0.25, 1.0, 1.0], 0.5, [1.0, 1.0, 0.5], 1)
  ledger = ledger.added(1.0, [0.0, 1.0, 1.0], [1.0, 1.0, 0.0], 1)
  assert _counts(ledger) == {
    (0, 0.5, 0.5, 1.0): 3,
    (1, 0.5, 0.5, 1.0): 2,
    (1, 1.0, 0.5, 1.0): 1,
    (2, 1.0, 0.5, 0.5): 1,
  }
  np.testing.assert_array_equal(ledger.squared_mu, [0, 1, 0])
  assert ledger.counted().exact


def _many(rounds=100, units=20, seed=0):
  generator = np.random.default_rng(seed)
  return generator.lognormal(-2, 1, (rounds, units)) ** 2


def test_many_kinds_are_rounded_up_by_at_most_the_ratio():
  squared = _many()
  ledger = UnitLedger.empty(20)
  for row in squared:
    ledger = ledger.added(row, 0.1, 1.0, 1)
  ledger = ledger.counted()
  assert not ledger.exact
  assert np.all(ledger.counts.sum(axis=1) == 100)
  for unit in range(20):
    row = ledger.counts[unit].toarray()[0].astype(int)
    found = np.repeat(ledger.kinds[:, 0], row)  # Ascending, as kinds are.
    true = np.sqrt(np.sort(squared[:, unit]))
    assert np.all(found >= true)
    assert np.all(found <= true * unit_ledger.LEVEL_RATIO * (1 + 1e-12))


def test_the_number_of_kinds_does_not_grow_with_rounds():
  ledger = UnitLedger.empty(20)
  for row in _many(rounds=3000):
    ledger = ledger.added(row, 0.1, 1.0, 1)
  ledger = ledger.counted()
  width = np.ptp(np.log(ledger.kinds[:, 0])) / math.log(unit_ledger.LEVEL_RATIO)
  assert len(ledger.kinds) <= round(width) + 1


def test_the_order_of_rounds_does_not_matter():
  squared = _many()
  ledgers = []
  for rows in (squared, squared[::-1]):
    ledger = UnitLedger.empty(20)
    for row in rows:
      ledger = ledger.added(row, 0.1, 1.0, 1)
    ledgers.append(_counts(ledger))
  assert ledgers[0] == ledgers[1]


def test_adding_rounds_leaves_the_old_ledger_as_it_was():
  ledger = UnitLedger.empty(20)
  for row in _many(rounds=70):
    ledger = ledger.added(row, 0.1, 1.0, 1)
  before = json.dumps(ledger.to_state())
  ledger.added(1.0, 0.1, 1.0, 1).added(1.0, 1.0, 1.0, 1).counted()
  assert json.dumps(ledger.to_state()) == before


def _ledger():
  ledger = UnitLedger.empty(3).added([0.25, 0.5, 0.0], 0.5, 1.0, 2)
  return ledger.added([0.1, 0.2, 0.3], 1.0, 1.0, 1)


@pytest.mark.parametrize('rounds', [0, 3, 100])
def test_a_state_that_went_through_json_is_the_same_ledger(rounds):
  ledger = UnitLedger.empty(20)
  for row in _many(rounds):
    ledger = ledger.added(row, 0.1, 1.0, 1)
  text = json.dumps(ledger.to_state(), allow_nan=False)
  restored = UnitLedger.from_state(json.loads(text))
  assert json.dumps(restored.to_state()) == text
  more = [x.added(0.3, 0.1, 1.0, 1).to_state() for x in (ledger, restored)]
  assert more[0] == more[1]


@pytest.mark.parametrize(
  'key, value',
  [
    ('squared_mu', [0.1, -0.2, 0.3]),
    ('squared_mu', [0.1, math.nan, 0.3]),
    ('squared_mu', [[0.1, 0.2, 0.3]]),
    ('squared_mu', [0.1, 0.2]),
    ('squared_mu', 'x'),
    ('kinds', [[0.5, 0.5]]),
    ('kinds', [[0.5, 1.5, 1.0], [0.7, 0.5, 1.0]]),
    ('kinds', [[0.0, 0.5, 1.0], [0.7, 0.5, 1.0]]),
    ('kinds', [[0.5, 0.5, 1.0]]),
    ('counts', [2.0]),
    ('counts', [2.0, -1.0]),
    ('counts', [2.0, 0.5]),
    ('counts', [2.0, math.inf]),
    ('columns', [0, 2]),
    ('columns', [0.0, 1.0]),
    ('row_ends', [1, 2]),
    ('row_ends', [2, 1, 2]),
    ('row_ends', [1, 1, 1]),
    ('exact', None),
  ],
)
def test_a_damaged_state_is_refused(key, value):
  state = {**_ledger().to_state(), key: value}
  with pytest.raises((ValueError, TypeError)):
    UnitLedger.from_state(state)
