"""Accuracy and loss, against numpy; what is saved can be loaded."""

import numpy as np
import pytest
import tensorflow as tf

from tests.training import runs
from tf_bdp.training import evaluation


def _weights(seed=0):
  generator = np.random.default_rng(seed)
  return [
    generator.normal(size=v.shape).astype(np.float32)
    for v in runs.model().trainable_variables
  ]


def test_accuracy_and_loss_are_those_of_the_weights(monkeypatch):
  data = runs.data()
  kernel, bias = _weights()
  logits = data.features.astype(np.float64) @ kernel + bias
  chances = np.exp(logits) / np.sum(np.exp(logits), axis=1, keepdims=True)
  right = chances[np.arange(len(data.labels)), data.labels]
  # The last batch is not full.
  monkeypatch.setattr(evaluation, '_BATCH_SIZE', 40)
  found = runs.evaluator().evaluate([kernel, bias])
  assert found['accuracy'] == np.mean(np.argmax(logits, 1) == data.labels)
  assert found['loss'] == pytest.approx(-np.mean(np.log(right)), rel=1e-5)


def test_the_saved_model_has_the_weights(tmp_path):
  weights = _weights(1)
  runs.evaluator().save(weights, tmp_path / 'model')
  loaded = tf.keras.models.load_model(tmp_path / 'model', compile=False)
  for found, wanted in zip(loaded.get_weights(), weights, strict=True):
    np.testing.assert_array_equal(found, wanted)
