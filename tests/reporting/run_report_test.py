"""The report of a run: one accounting for bar, metrics, table and page."""

import csv
import functools
import json

import pytest

from tests.training import runs
from tf_bdp.reporting import run_report
from tf_bdp.training import round_log

_NAMES = {
  'census': ['dp', 'each', 'census', 'sample', 'paper'],
  'sample': ['dp', 'sample', 'paper'],
}


@functools.cache
def _engine(level, **changes):
  return runs.plan(level, **changes).engine(runs.model, runs.data())


def _reported(directory, level='client', **changes):
  """Trains, reports, and returns the plan, the progress and what is printed."""
  plan = runs.plan(level, **changes)
  determining = {k: changes[k] for k in changes if k != 'bdp_epsilon_budget'}
  runner = _engine(level, **determining)
  progress = runs.train(level, directory, runner=runner, **changes)
  return plan, progress, run_report.write(directory, plan, progress)


def _claims(directory, unit='client'):
  """Returns the rows of claims that a report has for programs."""
  return json.loads((directory / 'privacy.json').read_text())[unit]['claims']


def _printed_claims(printed):
  """Returns ε and whether it is recommended, by claim, as they are printed."""
  found = {}
  secret, _, _ = printed.partition('Against whoever knows the seed')
  for line in secret.splitlines():
    name, _, rest = line.partition(' ')
    if name.rstrip('*') in _NAMES['census']:
      found[name.rstrip('*')] = rest.split()[0], name.endswith('*')
  return found


@pytest.mark.parametrize(
  ('changes', 'claim'),
  [({'panel_size': runs.CLIENTS}, 'census'), ({}, 'sample')],
)
def test_bar_metrics_table_page_and_json_have_the_same_figures(
  tmp_path, capfd, changes, claim
):
  plan, progress, printed = _reported(tmp_path, **changes)
  last = progress.rows[-1]
  names = _NAMES[claim]
  columns = [f'{name}_epsilon' for name in names]
  assert plan.epsilon_columns() == columns
  rows = _claims(tmp_path)
  assert [row['claim'] for row in rows] == names
  # Not nearly, but the very same numbers.
  for row in rows:
    assert row['epsilon'] == last[f'{row["claim"]}_epsilon']
  shown = _printed_claims(printed)
  assert {name: epsilon for name, (epsilon, _) in shown.items()} == {
    name: f'{last[f"{name}_epsilon"]:.3f}' for name in names
  }
  (recommended,) = (row for row in rows if row['recommended'])
  stars = [name for name, (_, star) in shown.items() if star]
  assert stars == [recommended['claim']]
  bar = capfd.readouterr().err.rsplit('\r', 1)[-1]
  for name in ('dp', claim):
    assert f'{name} ε={last[f"{name}_epsilon"]:.2f}' in bar
  page = (tmp_path / 'report.html').read_text()
  for column in columns:
    assert f'{last[column]:.3f}' in page
  statement = (tmp_path / 'statement.txt').read_text()
  assert f'{recommended["epsilon"]:.3f}' in statement


def test_a_run_by_holder_adds_the_papers_figure_and_keeps_its_own(tmp_path):
  _, progress, printed = _reported(tmp_path, 'split')
  for unit, prefix in (('client', ''), ('example', 'example_')):
    rows = _claims(tmp_path, unit)
    assert [row['claim'] for row in rows] == ['dp', 'sample', 'paper']
    for row in rows[:2]:
      column = f'{prefix}{row["claim"]}_epsilon'
      assert row['epsilon'] == progress.rows[-1][column]
    assert f'Privacy of {unit}s' in printed


def test_a_stop_at_a_bayesian_budget_is_told_and_labelled(tmp_path):
  changes = {'panel_size': runs.CLIENTS}
  whole = runs.train('client', tmp_path / 'whole', **changes)
  budget = whole.rows[3]['census_epsilon'] + 1e-7
  changes['bdp_epsilon_budget'] = budget
  _, progress, printed = _reported(tmp_path / 'cut', **changes)
  assert progress.round_number == 4
  assert 'would exceed the budget' in printed and 'claim census' in printed
  page = (tmp_path / 'cut' / 'report.html').read_text()
  assert 'epsilon that depends on the data' in page
  # The table is of the last round that was released.
  epsilons = {r['claim']: r['epsilon'] for r in _claims(tmp_path / 'cut')}
  assert epsilons['census'] == progress.rows[-1]['census_epsilon'] <= budget


def test_private_files_are_named_and_the_page_keeps_how_many_took_part(
  tmp_path,
):
  _, progress, printed = _reported(tmp_path)
  notice = (tmp_path / 'PRIVATE.txt').read_text()
  for name in ('metrics.csv', 'checkpoint.npz', 'distances.npz'):
    assert (tmp_path / name).exists() and name in notice
  assert 'PRIVATE.txt' in printed
  page = (tmp_path / 'report.html').read_text()
  assert '>Participants<' not in page and 'participants expected' in page
  assert 'epsilon that depends on the data' not in page
  with open(tmp_path / round_log.METRICS_FILE, newline='') as file:
    found = [int(row['participants']) for row in csv.DictReader(file)]
  assert found == [part.participants for part in progress.measurements]


def test_clients_keep_bounds_of_their_own_by_claim(tmp_path):
  plan, progress, _ = _reported(tmp_path, 'instance_parallel')
  local = run_report.local_epsilons(plan, progress)
  with open(tmp_path / 'local_epsilons.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  assert [int(row['client']) for row in rows] == list(local)
  for row in rows:
    epsilons = local[int(row['client'])]
    assert row.keys() == {'client', 'dp_epsilon', 'sample_epsilon'}
    assert float(row['dp_epsilon']) == epsilons['dp']
    assert 0 < float(row['sample_epsilon']) == epsilons['sample']


def test_without_noise_or_rounds_there_is_nothing_to_claim(tmp_path):
  _, _, printed = _reported(tmp_path, noise_multiplier=0.0, rounds=1)
  assert 'there is no privacy to report' in printed
  assert not (tmp_path / 'report.html').exists()
