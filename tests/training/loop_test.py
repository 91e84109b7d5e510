"""The training loop at every level of privacy."""

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

from tests.training import runs
from tf_bdp import accounting
from tf_bdp.training import loop, progress, stopping

_BOTH = ('joint', 'split')


def test_a_run_learns(tmp_path):
  runner = runs.plan('client', noise_multiplier=0.3).engine(
    runs.model, runs.data()
  )
  done = runs.train(
    'client', tmp_path, runner=runner, rounds=20, noise_multiplier=0.3
  )
  assert done.round_number == 20
  assert done.rows[-1]['accuracy'] > 0.75
  assert done.rows[-1]['loss'] < done.rows[1]['loss']


@pytest.mark.parametrize('level', runs.LEVELS)
def test_a_run_leaves_a_row_a_round_with_all_that_is_protected(whole, level):
  _, done = whole(level)
  assert [row['round'] for row in done.rows] == list(range(1, runs.ROUNDS + 1))
  evaluated = [row['accuracy'] != '' for row in done.rows]
  assert evaluated == [False, True] * 3
  names = set(runs.plan(level).epsilon_columns())
  assert {name for name in done.rows[0] if 'epsilon' in name} == names
  assert tuple(done.accountants) == runs.UNITS[level]
  for unit, accountant in done.accountants.items():
    relation = runs.plan(level).mechanism.relation(unit)
    assert accountant.neighboring_relation == relation
  for row, is_evaluated in zip(done.rows, evaluated):
    for name in names:
      # As the accuracy: figures are of rounds that were evaluated.
      assert 0 < row[name] < np.inf if is_evaluated else row[name] == ''


@pytest.mark.parametrize(('level', 'unit', 'prefix'), runs.LEVELS_AND_UNITS)
def test_epsilons_are_those_of_accountants_fed_by_hand(
  whole, level, unit, prefix
):
  _, done = whole(level)
  accountant = runs.plan(level).accountant(unit)
  delta = 1e-2 if prefix else 1e-3
  for event, row in zip(done.events_of(unit), done.rows, strict=True):
    accountant.compose(event)
    if row['accuracy'] != '':
      bdp = accountant.get_epsilon(delta)
      assert row[f'{prefix}{accountant.claim}_epsilon'] == bdp
      dp = accountant.get_dp_epsilon(delta)
      assert row[f'{prefix}dp_epsilon'] == dp
      # A tenth of δ is kept for bounds that fail.
      assert 0 <= bdp <= accountant.get_dp_epsilon(0.9 * delta)


@pytest.mark.parametrize('level', runs.LEVELS)
def test_the_table_ends_with_the_figures_of_the_last_row(whole, level):
  _, done = whole(level)
  plan = runs.plan(level)
  for unit, accountant in done.accountants.items():
    for claimed in plan.report(unit, accountant):
      column = plan.epsilon_column(unit, claimed.claim.name)
      assert done.rows[-1][column] == claimed.epsilon


@pytest.mark.parametrize('level', ['client', 'split'])
def test_the_bar_ends_with_the_figures_of_the_table(level, tmp_path, capfd):
  done = runs.train(level, tmp_path, rounds=3)
  last = capfd.readouterr().err.rsplit('\r', 1)[-1]
  plan = runs.plan(level)
  unit = plan.mechanism.units[0]
  rows = {r.claim.name: r for r in plan.report(unit, done.accountants[unit])}
  for name in ('dp', plan.claim_of(unit)):
    assert f'{name} ε={rows[name].epsilon:.2f}' in last
  assert 'round=3,' in last


@pytest.mark.parametrize('level', runs.LEVELS)
def test_rounds_are_those_of_the_engine_run_by_hand(whole, level):
  _, done = whole(level)
  runner, sampler = runs.engine(level), runs.plan(level).sampler
  panel = sampler.panel(runs.plan(level).panel_size).tolist()
  assert len(panel) == runs.LEVELS[level]['panel_size']
  state = runner.initial_state()
  for number in range(runs.ROUNDS):
    cohort = sampler.participants(number).tolist()
    part = runner.run_round(state, number, cohort, panel)
    state = part.state
    assert done.events[number] == part.events
    assert done.rows[number]['participants'] == len(cohort)
  for left, right in zip(tf.nest.flatten(done.state), tf.nest.flatten(state)):
    np.testing.assert_array_equal(left, right)


# Budgets.


@pytest.mark.parametrize(('level', 'unit', 'prefix'), runs.LEVELS_AND_UNITS)
def test_training_stops_before_the_round_that_would_exceed_a_budget(
  whole, level, unit, prefix, tmp_path
):
  _, done = whole(level)
  accountant, spent = runs.plan(level).accountant(unit), []
  delta = 1e-2 if prefix else 1e-3
  for event in done.events_of(unit):
    accountant.compose(event)
    spent.append(accountant.get_epsilon(delta))
  # A round that costs something, after one that is not evaluated if possible.
  stop = next(i for i in (3, 5, 2, 4) if spent[i] > spent[i - 1] + 1e-6)
  budget = {f'{prefix}bdp_epsilon_budget': spent[stop - 1] + 1e-7}
  stopped = runs.train(level, tmp_path, **budget)
  assert stopped.round_number == stop
  whose = f" {unit}s'" if level in _BOTH else ''
  assert stopped.stopped.startswith(
    f'the next round would exceed the{whose} budget of epsilon = '
  )
  # The round that would have exceeded it is dropped: no accountant has it.
  for name, accountant in stopped.accountants.items():
    fresh = runs.plan(level).accountant(name)
    for event in done.events_of(name)[:stop]:
      fresh.compose(event)
    runs.check_same_accountants(accountant, fresh)
  assert f'by the claim {accountant.claim}, so that' in stopped.stopped
  # The last row has its figures, also in the file, evaluated or not.
  column = f'{prefix}{accountant.claim}_epsilon'
  assert stopped.rows[-1][column] == spent[stop - 1]
  assert float(runs.rows(tmp_path)[-1][column]) == spent[stop - 1]
  assert stopped.rows[-1]['accuracy'] != ''
  again = runs.train(level, tmp_path, resume=True, **budget)
  runs.check_same(again, stopped)


def _exact_dp(level, done):
  """Returns DP's exact ε after each round, of the first unit."""
  unit = runs.UNITS[level][0]
  accountant, spent = runs.plan(level).accountant(unit), []
  for event in done.events_of(unit):
    spent.append(accountant.compose(event).get_dp_epsilon(1e-3))
  return spent


@pytest.mark.parametrize('level', runs.LEVELS)
def test_training_stops_before_the_round_that_would_exceed_the_budget_of_dp(
  whole, level, tmp_path
):
  _, done = whole(level)
  spent = _exact_dp(level, done)
  assert spent[3] < spent[4]
  # Above the exact figure of four rounds; by moments it would be three.
  budget = spent[3] * (1 + 1e-6)
  found = runs.train(level, tmp_path, dp_epsilon_budget=budget)
  assert found.round_number == 4
  assert found.stopped == (
    f'the next round would exceed the budget of epsilon = {budget:g} of '
    'differential privacy'
  )
  assert found.events == done.events[:4]
  again = runs.train(level, tmp_path, resume=True, dp_epsilon_budget=budget)
  runs.check_same(again, found)


def test_where_dp_depends_on_no_draw_the_last_round_is_not_even_run(tmp_path):
  changes = {'mechanism': 'sum', 'participation_probability': 0.5}
  plan = runs.plan('client', **changes)
  event = dp_accounting.PoissonSampledDpEvent(
    0.5, dp_accounting.GaussianDpEvent(1.5)
  )
  three = plan.accountant('client').compose(event, 3).get_dp_epsilon(1e-3)
  runner = plan.engine(runs.model, runs.data())
  with runs.interrupted(runner, 3) as done:
    found = runs.train(
      *('client', tmp_path),
      runner=runner,
      dp_epsilon_budget=three * (1 + 1e-4),
      **changes,
    )
  assert len(done) == found.round_number == 3
  # Extended in vain: the budget stays what it is.
  again = runs.train(
    *('client', tmp_path),
    runner=runner,
    resume=True,
    rounds=9,
    dp_epsilon_budget=three * (1 + 1e-4),
    **changes,
  )
  runs.check_same(again, found)


@pytest.mark.parametrize(
  ('level', 'changes'),
  [
    ('client', {'mechanism': 'sum'}),
    ('client', {'mechanism': 'mean'}),
    ('instance_aggregate', {}),
    ('joint', {}),
  ],
)
def test_a_budget_of_dp_below_one_round_is_an_error(level, changes, tmp_path):
  runner = runs.plan(level, **changes).engine(runs.model, runs.data())
  with pytest.raises(
    ValueError, match=r'budget = 0\.01 does not allow a singl'
  ):
    runs.train(
      level, tmp_path, runner=runner, dp_epsilon_budget=0.01, **changes
    )
  assert not (tmp_path / progress.CHECKPOINT_FILE).exists()


def test_the_rounds_that_dp_allows_are_found_by_bisection():
  changes = {
    'mechanism': 'sum',
    'participation_probability': 0.1,
    'noise_multiplier': 1.0,
    'dp_epsilon_budget': 5.0,
  }
  event = dp_accounting.PoissonSampledDpEvent(
    0.1, dp_accounting.GaussianDpEvent(1.0)
  )

  def epsilon(rounds):
    accountant = accounting.BayesianAccountant().compose(event, rounds)
    return accountant.get_dp_epsilon(1e-3)

  allowed = stopping.dp_rounds(runs.plan('client', rounds=5000, **changes))
  assert epsilon(allowed) <= 5.0 < epsilon(allowed + 1)
  few = stopping.dp_rounds(runs.plan('client', rounds=allowed - 1, **changes))
  assert few == allowed - 1
  # Nothing is known in advance without a budget, or where n matters.
  assert stopping.dp_rounds(runs.plan('client', mechanism='sum')) is None
  assert stopping.dp_rounds(runs.plan('joint', dp_epsilon_budget=5.0)) is None


# Noise, failures, averages.


@pytest.mark.parametrize('level', ['client', 'instance_parallel', *_BOTH])
def test_without_noise_every_epsilon_is_infinite(level, tmp_path):
  changes = {'noise_multiplier': 0.0, 'rounds': 2}
  if level == 'split':
    changes['server_noise_multiplier'] = 0.0
  runner = runs.plan(level, **changes).engine(runs.model, runs.data())
  last = runs.train(level, tmp_path, runner=runner, **changes).rows[-1]
  found = [value for name, value in last.items() if 'epsilon' in name]
  assert found == [np.inf] * len(runs.plan(level).epsilon_columns())
  assert last['accuracy'] > 0.4


@pytest.mark.parametrize('level', ['client', 'joint', 'instance_sequential'])
def test_failing_clients_are_counted_and_left_out(level, tmp_path):
  runner = runs.plan(level).engine(runs.model, runs.broken_data(0))
  done = runs.train(level, tmp_path, runner=runner)
  assert 0 < sum(row['failed_clients'] for row in done.rows) <= runs.ROUNDS
  assert np.all(np.isfinite(done.state.weights))


def test_a_round_in_which_all_fail_stops_with_an_error(tmp_path):
  broken = runs.broken_data(*range(runs.CLIENTS))
  runner = runs.plan('client').engine(runs.model, broken)
  with pytest.raises(RuntimeError, match='No update of round 1 could be used'):
    runs.train('client', tmp_path, runner=runner)
  assert not (tmp_path / progress.CHECKPOINT_FILE).exists()


def test_averaged_weights_are_evaluated_and_kept(tmp_path):
  seen, states = [], []
  runner, plan = (
    runs.engine('client'),
    runs.plan('client', average_iterates=0.8, evaluate_every=1),
  )

  def evaluate(weights):
    seen.append(np.concatenate([np.ravel(part) for part in weights]))
    return {'accuracy': 0.0, 'loss': 0.0}

  done = loop.train(runner, plan, evaluate, tmp_path)
  sampler = plan.sampler
  panel, state = sampler.panel(5).tolist(), runner.initial_state()
  for number in range(runs.ROUNDS):
    cohort = sampler.participants(number).tolist()
    state = runner.run_round(state, number, cohort, panel).state
    states.append(state.weights)
    # Weights 0.8^k of the last but k, over their sum.
    factors = 0.8 ** np.arange(number + 1)[::-1]
    wanted = np.average(states, axis=0, weights=factors)
    np.testing.assert_allclose(seen[number], wanted, atol=1e-6)
  kept = np.concatenate([np.ravel(part) for part in done.weights(runner)])
  np.testing.assert_array_equal(kept, seen[-1])


# What is refused before anything is released.


def test_an_engine_of_other_data_is_refused_before_any_round(tmp_path):
  runner = runs.engine('client')
  plan = runs.plan('client')
  other = type(plan)(plan.mechanism, 9, accounting=plan.accounting)
  with pytest.raises(ValueError, match=r'plan is for 9 clients.* of 8'):
    loop.train(runner, other, runs.evaluator().evaluate, tmp_path)
  assert not list(tmp_path.iterdir())


def test_a_directory_with_a_run_is_not_overwritten(whole):
  directory, _ = whole('client')
  before = runs.rows(directory)
  with pytest.raises(ValueError, match='holds a run already'):
    runs.train('client', directory)
  assert runs.rows(directory) == before
