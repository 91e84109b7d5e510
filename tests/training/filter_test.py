"""Runs with an individual filter: who leaves when, and what is kept."""

import dataclasses

import numpy as np
import pytest

from tests.training import runs
from tf_bdp import engines
from tf_bdp.accounting import individual_filter
from tf_bdp.engines import base, in_process
from tf_bdp.reporting import notes, run_report
from tf_bdp.training import checkpoint, progress, stopping

_ROUNDS = 12
# Clients have updates between a half and the whole of the clip norm: they leave
# one after the other.
_CHANGES = {
  'mechanism': 'sum',
  'panel_size': None,
  'noise_multiplier': 2.0,
  'clip_norm': 1.5,
  'rounds': _ROUNDS,
  'participation_probability': 0.6,
  'filter': 1.5,
}
_CASES = {
  'sampled': {},
  'everybody': {'participation_probability': 1.0, 'filter': 2.0},
  'steps': {
    'algorithm': 'fed_avg',
    'client_epochs': 2,
    'clip_norm': 1.0,
    'filter': 3.0,
  },
}


def _changes(case):
  return {**_CHANGES, **_CASES[case]}


def _train(case, directory, **options):
  changes = {**_changes(case), **options}
  runner = changes.pop('runner', None)
  if runner is None:
    runner = runs.plan('client', **changes).engine(runs.model, runs.data())
  return runs.train('client', directory, runner=runner, **changes)


@pytest.fixture(name='done', params=_CASES)
def _done(request, tmp_path):
  return request.param, _train(request.param, tmp_path)


def test_clients_leave_one_after_the_other_and_the_run_goes_on(done, tmp_path):
  case, progress_ = done
  assert progress_.round_number == _ROUNDS and not progress_.stopped
  active = [row['active_clients'] for row in progress_.rows]
  assert active[0] == runs.CLIENTS
  assert len(set(active)) >= 3
  assert active == sorted(active, reverse=True)
  assert [int(row['active_clients']) for row in runs.rows(tmp_path)] == active
  assert progress_.budgets.active == active[-1]
  assert (progress_.budgets.order is None) == (case == 'everybody')


def test_accounts_are_those_kept_by_hand(done):
  case, progress_ = done
  plan = runs.plan('client', **_changes(case))
  deviation = 2.0 * plan.mechanism.clip_norm
  budgets, spent = plan.individual_filter(), np.zeros(runs.CLIENTS)
  gone = np.zeros(runs.CLIENTS, bool)
  for number, measured in enumerate(progress_.measurements):
    # Whoever left earlier stays away, and leaves nothing behind.
    assert np.all(measured.dropped[gone])
    gone = measured.dropped
    assert not np.any(measured.taking_part & gone)
    assert not np.any(measured.squared_measures[gone])
    assert np.all(measured.squared_measures[~gone] > 0)
    drawn = plan.sampler.participants(number)
    assert measured.participants == np.count_nonzero(~gone[drawn])
    assert measured.failed_clients == 0
    np.testing.assert_array_equal(
      np.flatnonzero(measured.taking_part), drawn[~gone[drawn]]
    )
    event = progress_.events[number]['client']
    np.testing.assert_allclose(
      event.squared_distances,
      measured.squared_measures / deviation**2,
      rtol=1e-4,
      atol=1e-9,
    )
    # Charged whether they came or not.
    spent += np.where(gone, 0, budgets.costs(event.squared_distances))
  np.testing.assert_allclose(progress_.budgets.spent, spent)
  np.testing.assert_array_equal(progress_.budgets.left, gone)
  assert np.all(spent <= budgets.budget)
  # They did use their budgets.
  assert np.all(spent[gone] > 0.3 * budgets.budget)


def test_who_has_left_moves_the_result_no_more(tmp_path):
  # The same run, but with other data of whoever leaves, from then on.
  case = 'everybody'
  plan = runs.plan('client', **_changes(case))
  runner = plan.engine(runs.model, runs.data())
  done = _train(case, tmp_path, runner=runner)
  number = next(i for i, m in enumerate(done.measurements) if np.any(m.dropped))
  state, budgets = runner.initial_state(), plan.individual_filter()
  everybody = list(range(runs.CLIENTS))
  for i in range(number):
    part = runner.run_round(state, i, everybody, everybody, budgets=budgets)
    budgets = stopping.charged(plan, budgets, everybody, part.measurements)
    state = part.state
  dropped = done.measurements[number].dropped
  stay = np.flatnonzero(~dropped).tolist()
  with_filter = runner.run_round(
    state, number, everybody, everybody, budgets=budgets
  )
  by_hand = runner.run_round(state, number, stay, everybody)
  np.testing.assert_allclose(
    with_filter.state.weights, by_hand.state.weights, atol=1e-7
  )
  unfiltered = runner.run_round(state, number, everybody, everybody)
  gap = with_filter.state.weights - unfiltered.state.weights
  assert np.max(np.abs(gap)) > 1e-3


def test_without_a_filter_nothing_changes(tmp_path):
  one = _train('sampled', tmp_path / 'one', filter=None)
  # One that nobody reaches.
  other = _train('sampled', tmp_path / 'other', filter=1e4)
  np.testing.assert_array_equal(one.state.weights, other.state.weights)
  assert one.events == other.events
  assert one.budgets is None and 'active_clients' not in one.rows[0]


# Checkpoints.


@pytest.mark.parametrize('rounds', [1, 5])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
  done, rounds, tmp_path
):
  case, wanted = done
  runner = runs.plan('client', **_changes(case)).engine(runs.model, runs.data())
  cut = tmp_path / 'cut'
  with (
    runs.interrupted(runner, rounds, middle=rounds == 5),
    pytest.raises(KeyboardInterrupt),
  ):
    _train(case, cut, runner=runner)
  resumed = _train(case, cut, runner=runner, resume=True)
  runs.check_same(resumed, wanted)
  assert runs.rows(cut) == runs.rows(tmp_path)


def test_an_extended_run_keeps_its_order(tmp_path):
  changes = {'participation_probability': 0.3, 'noise_multiplier': 1.0}
  short = _train('sampled', tmp_path, rounds=2, **changes)
  longer = _train('sampled', tmp_path, rounds=30, resume=True, **changes)
  changes = {**_changes('sampled'), **changes, 'rounds': 30}
  fresh = runs.plan('client', **changes).individual_filter()
  assert fresh.order != short.budgets.order
  assert longer.budgets.order == short.budgets.order
  assert longer.budgets.budget == short.budgets.budget
  assert longer.round_number == 30


def test_a_checkpoint_without_accounts_is_refused(tmp_path):
  _train('sampled', tmp_path, rounds=2)
  path = tmp_path / progress.CHECKPOINT_FILE
  arrays, contents = checkpoint.load(path)
  del arrays['budgets_left']
  checkpoint.save(path, arrays, contents)
  with pytest.raises(ValueError, match="does not hold the filter's accounts"):
    _train('sampled', tmp_path, rounds=2, resume=True)


def test_a_run_with_another_filter_is_not_resumed(tmp_path):
  _train('sampled', tmp_path, rounds=2)
  with pytest.raises(ValueError, match=r'filter: 1\.5 in the .*, 5\.0 here'):
    _train('sampled', tmp_path, rounds=2, filter=5.0, resume=True)


# Engines.


class _KnowsNoFilter(in_process.InProcessEngine):
  """An engine as it was before there were filters."""

  def release(self, state, round_number, participants, panel):
    return super().release(state, round_number, participants, panel)


class _Ignores(in_process.InProcessEngine):
  """An engine that takes a filter and lets everybody through."""

  def release(self, state, round_number, participants, panel, budgets=None):
    state, measured = super().release(state, round_number, participants, panel)
    nobody = np.zeros(len(panel), bool)
    return state, measured._replace(dropped=nobody)


def test_an_engine_that_does_not_keep_to_the_filter_is_caught(
  tmp_path, monkeypatch
):
  for kind in (_KnowsNoFilter, _Ignores):
    monkeypatch.setitem(engines.base.ENGINES, 'inprocess', kind)
    runner = runs.plan('client', **_CHANGES).engine(runs.model, runs.data())
    directory = tmp_path / kind.__name__
    if kind is _KnowsNoFilter:
      # Without a filter it works as before.
      _train('sampled', directory, runner=runner, filter=None, rounds=1)
      with pytest.raises(TypeError, match='release'):
        _train('sampled', tmp_path / 'with', runner=runner)
    else:
      with pytest.raises(RuntimeError, match='must not be released'):
        _train('sampled', directory, runner=runner)
      # What was within the budgets is kept; the round is not.
      assert 0 < len(runs.rows(directory)) < _ROUNDS


@pytest.mark.parametrize(
  'case', ['sampled', pytest.param('steps', marks=pytest.mark.slow)]
)
def test_tff_does_the_same(case, tmp_path):
  wanted = _train(case, tmp_path / 'here')
  changes = {'engine': 'tff'}
  plan = runs.plan('client', **_changes(case), **changes)
  runner = plan.engine(runs.model, runs.data())
  # Interrupted, and resumed after somebody has left.
  with runs.interrupted(runner, 10), pytest.raises(KeyboardInterrupt):
    _train(case, tmp_path / 'tff', runner=runner, **changes)
  found = _train(case, tmp_path / 'tff', runner=runner, resume=True, **changes)
  for one, other in zip(wanted.rows, found.rows, strict=True):
    for name in ('participants', 'failed_clients', 'active_clients'):
      assert one[name] == other[name]
  for one, other in zip(wanted.measurements, found.measurements, strict=True):
    np.testing.assert_array_equal(one.dropped, other.dropped)
    np.testing.assert_array_equal(one.taking_part, other.taking_part)
    np.testing.assert_allclose(
      one.squared_measures, other.squared_measures, rtol=1e-3, atol=1e-6
    )
  assert found.rows[-1]['active_clients'] < runs.CLIENTS
  np.testing.assert_allclose(
    found.budgets.spent, wanted.budgets.spent, rtol=1e-3
  )
  here = runs.plan('client', **_changes(case)).engine(runs.model, runs.data())
  for one, other in zip(wanted.weights(here), found.weights(runner)):
    np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.slow
def test_tff_counts_failed_clients_apart_from_those_that_left(tmp_path):
  changes = {'engine': 'tff', 'rounds': 9}
  plan = runs.plan('client', **{**_changes('everybody'), **changes})
  runner = plan.engine(runs.model, runs.broken_data(0))
  done = _train('everybody', tmp_path, runner=runner, **changes)
  last = done.measurements[-1]
  assert (last.failed_clients, last.dropped[0]) == (1, False)
  left = int(np.count_nonzero(last.dropped))
  assert left > 0 and last.participants == runs.CLIENTS - 1 - left


def test_a_filter_needs_all_clients_in_the_panel():
  plan = runs.plan('client', **_CHANGES)
  runner = plan.engine(runs.model, runs.data())
  with pytest.raises(ValueError, match='Found a panel of 5 of 8'):
    runner.run_round(
      *(runner.initial_state(), 0, [0, 1], list(range(5))),
      budgets=plan.individual_filter(),
    )


def test_failed_clients_are_not_those_that_left(tmp_path):
  plan = runs.plan('client', **_changes('everybody'))
  runner = plan.engine(runs.model, runs.broken_data(0))
  done = _train('everybody', tmp_path, runner=runner)
  for measured in done.measurements:
    assert measured.failed_clients == 1
    assert not measured.dropped[0]
    left = int(np.count_nonzero(measured.dropped))
    assert measured.participants == runs.CLIENTS - 1 - left
  assert left > 0
  assert done.budgets.spent[0] < 1e-6


# Options.


@pytest.mark.parametrize(
  ('level', 'changes', 'message'),
  [
    ('client', {'mechanism': 'mean'}, 'needs --mechanism=sum.* Found .*=mean'),
    ('joint', {}, 'is for --level=client. Found --level=joint'),
    ('instance_parallel', {}, 'is for --level=client'),
    ('client', {'clip_quantile': 0.5}, 'Leave out --clip_quantile'),
    ('client', {'noise_multiplier': 0.0}, 'needs noise'),
    ('client', {'sampling': 'fixed_size'}, 'Use --sampling=poisson'),
    ('client', {'examples_per_round': 3}, 'Leave out --examples_per_round'),
    ('client', {'panel_size': 7}, 'measures all 8 clients.* Found 7'),
    ('client', {'panel_size': 0}, 'measures all 8 clients.* Found 0'),
    ('client', {'bdp_epsilon_budget': 1.0}, 'Leave out --bdp_epsilon_budget'),
    ('client', {'filter': 0.0}, 'filter must be positive'),
    (
      *('client', {'secure_aggregation': True, 'engine': 'tff'}),
      'Leave out --secure_aggregation',
    ),
  ],
)
def test_what_a_filter_does_not_allow_is_refused(level, changes, message):
  common = {**_CHANGES, **changes}
  if level != 'client':
    for name in ('mechanism', 'panel_size', 'filter', *changes):
      common.pop(name, None)
    common['filter'] = 3.0
  with pytest.raises(ValueError, match=message):
    runs.plan(level, **common)


def test_all_clients_are_measured_by_default(monkeypatch):
  plan = runs.plan('client', **_CHANGES)
  assert plan.panel_size == runs.CLIENTS
  many = dataclasses.replace(plan, client_count=300)
  assert many.panel_size == 300
  assert many.individual_filter().spent.shape == (300,)


def test_the_filter_is_one_of_the_plan():
  plan = runs.plan('client', **_CHANGES, delta=1e-4)
  found = plan.individual_filter()
  wanted = individual_filter.IndividualFilter.create(
    1.5, 1e-4, 0.6, 1 / 2.0**2, _ROUNDS, runs.CLIENTS
  )
  assert found.order == wanted.order
  assert found.budget == pytest.approx(wanted.budget, rel=1e-12)
  assert runs.plan('client').individual_filter() is None


def test_the_report_says_what_the_filter_keeps_and_what_is_private(done):
  case, progress_ = done
  plan = runs.plan('client', **_changes(case))
  text = ' '.join(notes.of_run(plan, progress_))
  assert f'epsilon = {plan.accounting.filter:g} at delta = 0.001' in text
  assert 'private' in text


def test_the_page_does_not_say_how_many_are_left(tmp_path):
  done = _train('sampled', tmp_path)
  plan = runs.plan('client', **_changes('sampled'))
  run_report.write(tmp_path, plan, done)
  page = (tmp_path / 'report.html').read_text()
  assert 'own budget of epsilon = 1.5' in page
  assert 'active_clients' not in page and 'Active' not in page
  assert 'active_clients' in runs.rows(tmp_path)[0]


def test_rounds_are_admitted_by_the_mechanisms_own_distances():
  plan = runs.plan('client', **_changes('everybody'))
  budgets = plan.individual_filter()
  limit = budgets.budget / (1 + 1e-5)
  squared = np.array([0.999, 1.001]) * limit * (2.0 * 1.5) ** 2
  admitted = base.admitted(budgets, plan.mechanism, [0, 1], squared, 1.5)
  # Clipping comes first.
  worst = plan.mechanism.worst_case_squared_distance('client', 2)
  assert admitted.tolist() == [True, worst <= limit]
