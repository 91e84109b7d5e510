"""A data set of one's own: one function, registered, and the script has it."""

import numpy as np
import pytest

from experiments import datasets, tasks
from tests.experiments import scripts


def _model():
  import tensorflow as tf

  layers = [tf.keras.layers.Input((2,)), tf.keras.layers.Dense(2)]
  return tf.keras.Sequential(layers)


@pytest.fixture(name='clouds', autouse=True)
def _clouds():
  """Registers two clouds of points, which a line tells apart."""

  def make(data, model, seed):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, 600)
    signs = 2 * labels[:, np.newaxis] - 1
    features = (0.3 * generator.normal(size=(600, 2)) + signs).astype('f4')
    return tasks.Task(
      datasets.Dataset(
        features[100:], labels[100:], features[:100], labels[:100]
      ),
      _model,
    )

  yield tasks.register('clouds')(make)
  del tasks.TASKS['clouds']


def test_a_registered_data_set_is_learnt_by_the_script(tmp_path):
  result = scripts.run(
    'train',
    *('--dataset=clouds', '--clients=50', '--rounds=30', '--seed=1'),
    *(
      '--noise_multiplier=0.1',
      '--noise_seed=1',
      '--sampling_seed=1',
      '--learning_rate=0.3',
      '--evaluate_every=30',
    ),
    f'--report_dir={tmp_path}',
  )
  assert result.code == 0, result.errors
  last = scripts.rows(tmp_path)[-1]
  assert float(last['accuracy']) > 0.95
  assert (
    'federated learning on clouds' in (tmp_path / 'report.html').read_text()
  )


def test_a_data_set_that_is_not_registered_is_refused_with_all_there_are():
  result = scripts.run('train', '--dataset=none')
  assert result.code == 1
  for name in ('digits', 'mnist', 'aptos', 'clouds'):
    assert name in result.errors


def test_a_function_can_be_registered_under_several_names(clouds):
  assert tasks.TASKS['digits'] is tasks.TASKS['mnist']
  assert tasks.TASKS['clouds'] is clouds
