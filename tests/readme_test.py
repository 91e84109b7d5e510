"""The examples of README and docs, executed as they stand there."""

import pathlib
import re
from unittest import mock

import numpy as np
import pytest

_ROOT = pathlib.Path(__file__).parents[1]


def _block(containing, file='README.md'):
  text = (_ROOT / file).read_text()
  blocks = re.findall(r'```python\n(.*?)```', text, re.S)
  (block,) = (block for block in blocks if containing in block)
  return block


def _keras_model():
  import tensorflow as tf

  layers = [tf.keras.layers.Input((3,)), tf.keras.layers.Dense(2)]
  return tf.keras.Sequential(layers)


def _data(examples=120, clients=4):
  from tf_bdp import learning

  generator = np.random.default_rng(0)
  features = generator.normal(size=(examples, 3)).astype(np.float32)
  labels = generator.integers(0, 2, examples)
  parts = np.split(np.arange(examples), clients)
  return learning.FederatedData(features, labels, parts)


@pytest.fixture(autouse=True)
def bind_keras_again():
  """Makes a model after each test.

  Keras binds its classes to the kind of graph in which a model was made last,
  and TFF makes models in old ones.
  """
  yield
  _keras_model()


def test_the_example_of_the_accountant_runs():
  generator = np.random.default_rng(0)
  names = {'rounds': 0.01 * generator.random((5, 200))}
  exec(_block('BayesianGaussianEvent('), names)
  assert 0 < names['epsilon'] < np.inf


def test_the_example_of_a_tff_pipeline_runs():
  import tensorflow as tf
  import tensorflow_federated as tff

  generator = np.random.default_rng(0)

  def client():
    features = generator.normal(size=(8, 3)).astype(np.float32)
    labels = generator.integers(0, 2, 8)
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(4)

  def model_fn():
    return tff.learning.models.from_keras_model(
      _keras_model(),
      loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
      input_spec=client().element_spec,
    )

  names = {
    'tff': tff,
    'model_fn': model_fn,
    'rounds': [[client() for _ in range(n)] for n in (4, 5, 2)],
  }
  exec(_block('ClientPrivacyFactory'), names)
  assert 0 < names['epsilon'] < np.inf


def test_the_example_of_a_process_at_instance_level_runs():
  names = {'data': _data(), 'model_fn': _keras_model}
  exec(_block('build_private_process', 'docs/training.md'), names)
  assert 0 < names['epsilon'] < np.inf


def test_the_example_of_a_run_from_python_writes_its_report(
  tmp_path, monkeypatch
):
  data = _data()
  names = {
    'data': data,
    'model_fn': _keras_model,
    'test_features': data.features,
    'test_labels': data.labels,
  }
  monkeypatch.chdir(tmp_path)
  exec(_block('training.train(', 'docs/training.md'), names)
  assert 0 < names['epsilon'] < np.inf
  written = {path.name for path in names['directory'].iterdir()}
  assert {'report.html', 'statement.txt', 'distances.npz'} <= written


def test_the_formula_of_the_walk_is_the_mechanisms():
  from tf_bdp import mechanisms

  names = {}
  exec(_block('def inclusion_probability', 'docs/architecture.md'), names)
  mechanism = mechanisms.InstanceMechanism('parallel', 1.0, 1.0, 2, 0.5, 4, 80)
  for participants in (0, 3, 9):
    expected = mechanism.inclusion_probability(participants)
    assert names['inclusion_probability'](participants, 8) == expected


def test_the_mechanism_of_the_walk_runs_in_the_engine_of_the_walk(
  tmp_path, capsys
):
  from tf_bdp import mechanisms, training
  from tf_bdp.engines import base

  data = _data()
  with (
    mock.patch.dict(mechanisms.LEVELS),
    mock.patch.dict(base.ENGINES),
  ):
    exec(_block('class ShrinkingClip', 'docs/architecture.md'), {})
    exec(_block('class TimedEngine', 'docs/architecture.md'), {})
    facts = mechanisms.Facts(data.holdings)
    mechanism = mechanisms.LEVELS['shrinking_clip'](training.Privacy(), facts)
    plan = training.Plan(
      mechanism, data.client_count, schedule=training.Schedule(rounds=3)
    )
    engine = base.create(
      'timed',
      _keras_model,
      data,
      mechanism=mechanism,
      algorithm=plan.algorithm,
      sampler=plan.sampler,
    )
    progress = training.train(
      engine, plan, lambda _: {'accuracy': 1.0, 'loss': 0.0}, tmp_path
    )
  clip_norms = [measured.clip_norm for measured in progress.measurements]
  np.testing.assert_allclose(clip_norms, [1, 0.99, 0.99**2], rtol=1e-6)
  assert 'Round 3: ' in capsys.readouterr().out


def test_the_estimator_of_the_walk_is_hoeffdings_bound():
  from tf_bdp import accounting
  from tf_bdp.accounting import mean_bounds

  with mock.patch.dict(mean_bounds.ESTIMATORS):
    exec(_block('class Hoeffding', 'docs/architecture.md'), {})
    sample = mean_bounds.ESTIMATORS['hoeffding'].from_sample(
      np.log([[1.0], [2.0], [3.0], [2.0]]), np.log([5.0])
    )
    # The mean is 2, the values lie in [1, 5].
    expected = 2 + 4 * np.sqrt(np.log(1 / 0.9) / 8)
    np.testing.assert_allclose(sample.log_upper_bound(0.9), np.log(expected))
    accountant = accounting.BayesianAccountant(estimator='hoeffding')
    event = accounting.BayesianGaussianEvent([0.01] * 100, 0.1, 1.0, True)
    assert accountant.compose(event).get_epsilon(1e-5) > 0


def test_the_data_set_of_the_walk_can_be_split_and_learnt():
  from experiments import partition, tasks

  with mock.patch.dict(tasks.TASKS):
    exec(_block("register('two_clouds')", 'docs/architecture.md'), {})
    dataset, model_fn, _ = tasks.TASKS['two_clouds'](
      tasks.Data(), tasks.Model(), 0
    )
  data = partition.split(dataset, 'iid', 10, 0, 0)
  assert data.holdings == [50] * 10
  assert model_fn()(dataset.test_features).shape == (100, 2)
