"""Settings of runs: what fits together, and by what a run is known."""

import pathlib

import numpy as np
import pytest

from experiments import datasets, jobs, run, tables
from tf_bdp.learning import federated_data

_DATA = federated_data.FederatedData(
  np.zeros((24, 2), np.float32),
  np.zeros(24, np.int64),
  list(np.arange(24).reshape(12, 2)),
)


def _plan(**values):
  return run.Settings.of(clients=12, **values).plan(_DATA)


@pytest.mark.parametrize(
  ('level', 'name', 'value'),
  [
    ('client', 'server_noise_multiplier', 1.0),
    ('client', 'clipping', 'example'),
    ('client', 'example_accounting', 'parallel'),
    ('client', 'joint_reference', 'last_mean'),
    ('client', 'panel_examples', 5),
    ('client', 'example_delta', 1e-4),
    ('client', 'example_bdp_epsilon_budget', 1.0),
    ('instance_parallel', 'example_delta', 1e-4),
    ('instance_parallel', 'example_bdp_epsilon_budget', 1.0),
    ('instance_aggregate', 'joint_reference', 'last_mean'),
    ('split', 'joint_reference', 'last_mean'),
    ('split', 'mechanism', 'sum'),
    ('joint', 'mechanism', 'sum'),
    ('joint', 'clip_quantile', 0.5),
  ],
)
def test_a_setting_without_effect_at_a_level_is_refused(level, name, value):
  others = {'server_noise_multiplier': 1.0} if level == 'split' else {}
  _plan(level=level, **others)
  sentence = f'--{name} has no effect with --level={level}. Leave it out.'
  with pytest.raises(ValueError, match=sentence):
    _plan(level=level, **{**others, name: value})


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    ({'panel_size': 5}, 'Leave out --panel_size and --panel_examples'),
    ({'panel_examples': 5}, 'Leave out --panel_size and --panel_examples'),
    ({'estimator': 'betting'}, 'The betting estimator needs the single costs'),
    ({'engine': 'inprocess'}, 'Add --engine=tff'),
  ],
)
def test_what_secure_sums_do_not_allow_is_refused(changes, sentence):
  settings = {'level': 'joint', 'engine': 'tff', 'secure_aggregation': True}
  _plan(**settings)
  with pytest.raises(ValueError, match=sentence):
    _plan(**{**settings, **changes})


@pytest.mark.parametrize(
  ('changes', 'sentence'),
  [
    (
      {'level': 'joint', 'algorithm': 'fed_avg'},
      'Joint privacy is for FedSGD only',
    ),
    ({'level': 'split'}, 'needs both a noise_multiplier'),
    (
      {'level': 'instance_sequential', 'panel_examples': 5},
      'there is no panel of examples',
    ),
    (
      {'level': 'joint', 'panel_examples': 5, 'panel_size': 0},
      'A panel of examples needs a panel of clients',
    ),
    (
      {'level': 'instance_parallel', 'server_noise_multiplier': 1.0},
      'server_noise_multiplier must be 0',
    ),
    (
      {'level': 'instance_parallel', 'example_accounting': 'sequential'},
      '--example_accounting has no effect with --level=instance_parallel',
    ),
    (
      {
        **{'level': 'split', 'example_accounting': 'aggregate'},
        'server_noise_multiplier': 1.0,
      },
      'cannot be counted together',
    ),
    ({'level': 'joint', 'noise_multiplier': -1.0}, 'must be non-negative'),
    ({'level': 'joint', 'client_batch_size': 0}, 'must be a positive integer'),
    ({'level': 'joint', 'delta': 0.0}, 'delta must be above 0'),
    (
      {'level': 'joint', 'joint_reference': 'last_mean', 'engine': 'tff'},
      'not sent the last mean',
    ),
    ({'clipnorm': 1.0}, 'setting must be one of'),
    ({'dataset': 'none'}, 'dataset must be one of'),
  ],
)
def test_settings_that_do_not_fit_are_refused_before_any_round(
  changes, sentence, tmp_path
):
  with pytest.raises(ValueError, match=sentence):
    run.run(
      run.Settings.of(**{'clients': 12, 'filters': 2, **changes}), tmp_path
    )
  assert not list(tmp_path.iterdir())


def test_settings_by_name_come_back():
  values = {'clients': 7, 'algorithm': 'fed_avg', 'noise_seed': 3}
  settings = run.Settings.of(**values)
  assert values.items() <= settings.to_dict().items()
  assert run.Settings.of(**settings.to_dict()) == settings
  places = {'data_dir', 'resnet50_weights', 'cache_dir'}
  assert settings.to_dict().keys() - settings.determining().keys() == places


# By the scripts of November 2026, before settings were in groups.
_DIGESTS = {
  (1, '100', 'private'): '1da904f15b9b',
  (3, '1000', 'baseline'): 'deedbcefdc03',
  (4, 'mnist_iid', 'private'): '877a4707a4dd',
}


@pytest.mark.parametrize(('table', 'name', 'kind'), _DIGESTS)
def test_runs_of_earlier_releases_are_recalled(table, name, kind):
  places = jobs.Places('x', 'y', 'imagenet', 'c', pathlib.Path())
  (cell,) = (cell for cell in tables.cells_of(table) if cell.name == name)
  settings = jobs.make(tables.settings_of(table, cell, kind), 0, places)
  assert jobs.digest(settings) == _DIGESTS[table, name, kind]


def test_one_hot_labels_get_a_sentence(monkeypatch, tmp_path):
  digits = datasets.load('digits')
  one_hot = digits._replace(train_labels=np.eye(10)[digits.train_labels])
  monkeypatch.setattr(datasets, 'load', lambda *_: one_hot)
  with pytest.raises(ValueError, match=r'np.argmax\(labels, axis=-1\)'):
    run.run(run.Settings.of(), tmp_path)
