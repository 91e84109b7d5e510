"""A tiny pass through the tables and figures of the paper."""

import csv
import functools

import numpy as np
import pytest

from experiments import (
  datasets,
  epsilon_curves,
  features,
  figures,
  jobs,
  paper,
  results_page,
  run,
  tables,
  tuning,
)
from tests.experiments import scripts
from tf_bdp.training import evaluation

_load_once = functools.cache(datasets.load)


@pytest.fixture(name='kept_runs', scope='module')
def _kept_runs(tmp_path_factory):
  """Where all tests keep their runs: what two of them share is trained once."""
  return tmp_path_factory.mktemp('runs')


@pytest.fixture(name='places')
def _places(kept_runs, monkeypatch):
  # Features as of a network; the network itself has tests of its own.
  def stand_in(data_dir, weights, versions=4, seed=0, cache_dir='', **options):
    generator = np.random.default_rng(0)
    train = generator.normal(size=(60 * versions, 2048)).astype(np.float32)
    test = generator.normal(size=(30, 2048)).astype(np.float32)
    labels = np.arange(60) % 5
    return datasets.Dataset(
      train, np.tile(labels, versions), test, np.arange(30) % 5, versions
    )

  monkeypatch.setattr(features, 'aptos_features', stand_in)
  monkeypatch.setattr(datasets, 'load', _load_once)
  monkeypatch.setattr(evaluation.Evaluator, 'save', lambda *_: None)
  # Without MNIST, tiny runs are of digits.
  return jobs.Places(None, 'aptos', 'weights', 'cache', kept_runs)


@pytest.fixture(name='new_places')
def _new_places(places, tmp_path):
  return places._replace(work_dir=tmp_path / 'runs')


def test_a_tiny_pass_is_apart_from_the_results_and_resumed_for_free(tmp_path):
  flags = (
    *('--table=2', '--table=3', '--figure=1', '--task=aptos', '--tiny'),
    *('--clients=100', '--seeds=2'),
  )
  first, second = (
    scripts.run_apart('reproduce', *flags, cwd=tmp_path) for _ in range(2)
  )
  assert first.code == second.code == 0, first.errors
  assert 'Cell 1 of 1: Table II, 100 clients' in first.printed
  assert (
    'Left out, as APTOS 2019 is not given (--aptos_dir): Table III, 100 '
    'clients; Figure 1, APTOS 2019.'
  ) in first.printed
  assert first.printed.count('Training') == 4
  assert second.printed.count('Training') == 0
  assert [path.name for path in tmp_path.iterdir()] == ['reports']
  results = tmp_path / 'reports/tiny/results'
  rows = tables.read(results / 'table_2.csv')
  assert [(row['cell'], row['seed']) for row in rows] == [
    ('100', '0'),
    ('100', '1'),
  ]
  page = (results / results_page.PAGE).read_text()
  accuracies = [float(row['baseline']) for row in rows]
  deviation = np.std(accuracies, ddof=1)
  assert f'{np.mean(accuracies):.1%} ± {deviation:.1%}' in page


@pytest.mark.parametrize(
  'flags, sentence',
  [
    ([], 'Give --table=N'),
    (['--table=4', '--task=aptos', '--tiny'], 'Give --aptos_dir=DIR'),
    (['--all'], 'Give --aptos_dir=DIR'),
    (['--all', '--tiny', '--aptos_dir=/none'], 'Found /none.'),
  ],
)
def test_a_script_that_cannot_start_says_what_to_give(
  tmp_path, flags, sentence
):
  result = scripts.run_apart('reproduce', *flags, cwd=tmp_path)
  assert result.code == 1
  assert result.errors.startswith('Error: ')
  assert sentence in result.errors
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('table', [1, 3])
def test_the_page_shows_what_the_file_of_a_table_says(places, tmp_path, table):
  path = tables.write(
    table, tables.cells_of(table, [100]), places, tmp_path, 1, tiny=True
  )
  (row,) = tables.read(path)
  cell = paper.CLIENT_TABLES[table][0]
  assert row['setting_clients'] == '12'
  assert float(row['setting_delta']) == cell.delta
  for method in ('dp_paper', 'dp_mechanism'):
    assert float(row[f'{method}_budget']) == cell.dp_epsilon
  assert float(row['dp_budget']) == cell.dp_epsilon
  claimed = ('sample', 'census', 'each')
  for method in ('bdp_paper', 'bdp_panel', 'bdp_distribution_free', *claimed):
    assert float(row[f'{method}_budget']) == cell.bdp_epsilon
  # Exact figures are never above those by moments.
  final = {
    name: float(row[f'{name}_final_epsilon']) for name in ('dp', *claimed)
  }
  assert final['census'] <= final['each'] <= final['dp']
  assert final['dp'] <= float(row['dp_mechanism_final_epsilon'])
  page = results_page.write(tmp_path).read_text()
  lines = [line for line in page.splitlines() if line.startswith('| 100 |')]
  for method, title in epsilon_curves.METHODS.items():
    if f'{method}_final_epsilon' in row:
      (line,) = (line for line in lines if f'| {title} |' in line)
      assert f'{float(row[f"{method}_final_epsilon"]):.2f} |' in line


def test_more_cells_join_those_that_are_there(places, tmp_path):
  for clients in (1000, 100):
    cells = tables.cells_of(3, [clients])
    path = tables.write(3, cells, places, tmp_path, 1, tiny=True)
  assert [row['cell'] for row in tables.read(path)] == ['100', '1000']


@pytest.mark.slow
def test_joint_privacy_stays_within_both_budgets(places, tmp_path):
  cells = tables.cells_of(4, [1000], ['aptos', 'mnist_iid'])
  path = tables.write(4, cells, places, tmp_path, 1, tiny=True)
  rows = {row['cell']: row for row in tables.read(path)}
  assert list(rows) == ['aptos', 'mnist_iid']
  for cell in cells:
    row = rows[cell.name]
    assert row['setting_level'] == 'joint'
    assert float(row['setting_example_delta']) == cell.example_delta
    for method in ('bdp_paper', 'bdp_panel', 'bdp_distribution_free'):
      if int(row[f'{method}_rounds']):
        assert float(row[f'{method}_epsilon']) <= cell.client_epsilon
        example = float(row[f'{method}_example_epsilon'])
        assert example <= cell.example_epsilon
  page = results_page.write(tmp_path).read_text()
  assert page.count('| aptos |') == 6


@pytest.mark.parametrize('figure', [1, 2])
def test_a_figure_has_all_its_curves(places, tmp_path, figure):
  panel = {1: 'mnist_iid', 2: 'aptos'}[figure]
  path = figures.write(figure, places, tmp_path, [panel], tiny=True)
  assert path.read_bytes().startswith(b'\x89PNG')
  with open(tmp_path / f'figure_{figure}.csv', encoding='utf-8') as file:
    rows = list(csv.DictReader(file))
  curves = {(row['panel'], row['curve']) for row in rows}
  assert len(curves) == 4
  assert {int(row['round']) for row in rows} == {2, 4}
  if figure == 1:
    epsilons = {
      row['curve']: float(row['value'])
      for row in rows
      if (row['panel'], row['method'], row['round'])
      == ('mnist_iid', 'bdp_paper_l_part', '4')
    }
    # As in the paper: parallel accounting grows faster.
    assert (
      epsilons['parallel, 100 clients'] > (epsilons['sequential, 100 clients'])
    )


def test_a_figure_keeps_the_panels_that_it_has(places, tmp_path, monkeypatch):
  for value, panel in (0.5, 'mnist_shards'), (0.25, 'aptos'), (0.75, 'aptos'):
    curve = [
      {
        **{'panel': panel, 'curve': 'joint', 'method': 'accuracy'},
        **{'round': number, 'value': value, 'client_epsilon': ''},
      }
      for number in (1, 2)
    ]
    monkeypatch.setattr(figures, '_rows_of_2', lambda *_, curve=curve: curve)
    figures.write(2, places, tmp_path, [panel])
  rows = tables.read(tmp_path / 'figure_2.csv')
  assert [(row['panel'], row['round'], row['value']) for row in rows] == [
    ('aptos', '1', '0.75'),
    ('aptos', '2', '0.75'),
    ('mnist_shards', '1', '0.5'),
    ('mnist_shards', '2', '0.5'),
  ]


def test_a_stop_is_the_last_evaluated_round_within_all_budgets():
  accuracies = {5: 0.1, 10: 0.2, 15: 0.3}
  rising = [1.0, 2.0, 3.0]
  at = [5, 10, 15]
  stop = epsilon_curves.stop_at([(rising, 2.0)], at, accuracies)
  assert stop == (10, 2.0, 0.2)
  both = [(rising, 3.0), ([0.1, 0.3, 0.2], 0.25)]
  assert epsilon_curves.stop_at(both, at, accuracies) == (5, 1.0, 0.1)
  none = epsilon_curves.stop_at([(rising, 0.5)], at, accuracies)
  assert none == (0, 0.0, None)


@pytest.mark.parametrize(
  'file', sorted(path.stem for path in jobs.HYPERPARAMETERS.glob('*.toml'))
)
def test_every_hyper_parameter_is_a_setting(file):
  import tomllib

  fields = run.Settings.of().to_dict()

  def check(table):
    for key, value in table.items():
      if isinstance(value, dict):
        check(value)
      else:
        assert key in fields

  with open(jobs.HYPERPARAMETERS / f'{file}.toml', 'rb') as handle:
    check(tomllib.load(handle))


def test_inner_settings_override_outer_ones(tmp_path, monkeypatch):
  (tmp_path / 'x.toml').write_text(
    'rounds = 1\nseed = 2\n[a]\nrounds = 3\n[a.b]\nclients = 4\n'
  )
  monkeypatch.setattr(jobs, 'HYPERPARAMETERS', tmp_path)
  assert jobs.load_settings('x', 'a', 'b') == {
    'rounds': 3,
    'seed': 2,
    'clients': 4,
  }


def test_other_settings_are_another_run(new_places):
  values = jobs.load_settings('table_3', '100', 'private')
  values |= {'clients': 12, 'delta': 1e-3}
  for rate in (0.1, 0.2):
    settings = jobs.make({**values, 'learning_rate': rate}, 0, new_places, True)
    jobs.summary_of(settings, new_places, 'run')
  assert len(list(new_places.work_dir.iterdir())) == 2


def test_the_same_settings_are_the_same_run_whatever_it_is_for(new_places):
  values = jobs.load_settings('table_3', '100', 'private')
  values |= {'clients': 12, 'delta': 1e-3}
  settings = jobs.make(values, 0, new_places, True)
  first, second = (
    jobs.summary_of(settings, new_places, name) for name in ('table', 'figure')
  )
  assert first == second
  assert [path.name[:6] for path in new_places.work_dir.iterdir()] == ['table-']


def test_distances_are_shares_of_the_worst_case(places):
  values = tables.settings_of(3, paper.CLIENT_TABLES[3][0], 'private')
  summary = jobs.summary_of(jobs.make(values, 0, places, True), places, 'run')
  assert summary.model_size == 2048 * 5 + 5
  assert 0 < summary.distances['client'] < 1


def test_tuning_changes_one_setting_at_a_time(places, tmp_path, monkeypatch):
  made = []
  make = jobs.make

  def remember(values, seed, *args):
    made.append({**values, 'seed': seed})
    return make(values, seed, *args)

  monkeypatch.setattr(jobs, 'make', remember)
  monkeypatch.setattr(
    jobs,
    'load_tried',
    lambda *path: [('learning_rate', 0.1), ('momentum', 0.0)],
  )
  cells = tables.cells_of(3, [100])
  path = tuning.write(3, cells, places, tmp_path, tiny=True)
  rows = tables.read(path)
  assert [(row['setting'], row['value']) for row in rows] == [
    ('', ''),
    ('learning_rate', '0.1'),
    ('momentum', '0.0'),
  ]
  used = made[0]
  assert used['evaluate_on'] == 'validation'
  assert used['seed'] not in range(10)
  assert made[1] == {**used, 'learning_rate': 0.1}
  assert made[2] == {**used, 'momentum': 0.0}
  tables.write(3, cells, places, tmp_path, 1, tiny=True)
  page = results_page.write(tmp_path).read_text()
  for row in rows[1:]:
    (line,) = (
      line
      for line in page.splitlines()
      if f'| {row["setting"]} = {row["value"]} |' in line
    )
    assert f'{float(row["final_accuracy"]):.1%}' in line


def test_what_was_tried_is_read_from_the_file(tmp_path, monkeypatch):
  (tmp_path / 'x.toml').write_text(
    '[a]\nrounds = 1\n[a.tried]\nrounds = [2, 3]'
  )
  monkeypatch.setattr(jobs, 'HYPERPARAMETERS', tmp_path)
  assert jobs.load_settings('x', 'a') == {'rounds': 1}
  assert jobs.load_tried('x', 'a') == [('rounds', 2), ('rounds', 3)]
  assert not jobs.load_tried('x', 'b')


def _client_row(**changes):
  row = {
    **{'cell': '100', 'seed': '0', 'baseline': '0.99', 'distance': '0.25'},
    **{'model_size': '10000', 'setting_noise_multiplier': '5.0'},
    **{'setting_clients': '100', 'setting_participation_probability': '0.5'},
    **{'setting_level': 'client', 'setting_delta': '0.001'},
    'setting_rounds': '9',
  }
  for method, accuracy in (('dp_paper', '0.9'), ('bdp_paper', '0.85')):
    row |= {f'{method}_accuracy': accuracy, f'{method}_rounds': '7'}
    row |= {f'{method}_budget': '2.0', f'{method}_final_epsilon': '3.0'}
  return row | changes


def test_the_page_says_which_cells_are_behind_and_why(tmp_path):
  tables.update(tmp_path / 'table_2.csv', [_client_row()], 2, ('cell', 'seed'))
  page = results_page.write(tmp_path).read_text()
  # The paper has 97 %, 86 % and 92 %.
  (line,) = (line for line in page.splitlines() if line.startswith('- Table'))
  assert '100 clients' in line
  assert "the paper's accounting: 7.0 points" in line
  assert 'noise 10.0, distance 25%' in line
  assert '| II, 100 clients | 97% → 99.0% | 86% → 90.0% | 92% → 85.0% |' in page
  assert 'would have been within it' not in line


def test_the_page_says_where_a_budget_was_not_what_ended_a_run(tmp_path):
  row = _client_row(setting_rounds='7')
  tables.update(tmp_path / 'table_2.csv', [row], 2, ('cell', 'seed'))
  page = results_page.write(tmp_path).read_text()
  (line,) = (line for line in page.splitlines() if line.startswith('- Table'))
  assert 'Not the budget but the 7 rounds ended it' in line


def test_a_cell_without_a_round_in_its_budget_is_behind(tmp_path):
  row = _client_row(bdp_paper_accuracy='', setting_level='joint')
  tables.update(tmp_path / 'table_2.csv', [row], 2, ('cell', 'seed'))
  page = results_page.write(tmp_path).read_text()
  (line,) = (line for line in page.splitlines() if line.startswith('- Table'))
  assert 'no round within the budget; noise 70.7' in line


_RESULTS = scripts.ROOT / 'results'


def test_the_page_that_is_kept_is_that_of_the_files_that_are_kept(tmp_path):
  for path in _RESULTS.iterdir():
    (tmp_path / path.name).write_bytes(path.read_bytes())
  kept = (_RESULTS / results_page.PAGE).read_text()
  assert results_page.write(tmp_path).read_text() == kept


@pytest.mark.parametrize('table', [1, 2, 3, 4])
def test_results_are_of_the_hyper_parameters_that_are_kept(table):
  rows = tables.read(_RESULTS / f'table_{table}.csv')
  for cell in tables.cells_of(table):
    mine = [row for row in rows if row['cell'] == cell.name]
    assert len(mine) == (3 if cell.clients == 100 else 1)
    for name, value in tables.settings_of(table, cell, 'private').items():
      for row in mine:
        assert row[f'setting_{name}'] == str(value)
        assert row['setting_evaluate_on'] == 'test'


def test_the_readme_has_the_lines_of_the_page():
  page = (_RESULTS / results_page.PAGE).read_text().splitlines()
  readme = (scripts.ROOT / 'README.md').read_text().splitlines()
  lines = [line for line in readme if '→' in line and line.startswith('|')]
  assert len(lines) == 12
  for line in lines:
    assert line in page
