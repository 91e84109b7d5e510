"""Tests of the losses of clients, by their definitions."""

import numpy as np
import pytest
import tensorflow as tf
from scipy import special

from tf_bdp.learning import losses


def _plain(labels, logits):
  chosen = special.log_softmax(logits, axis=1)[np.arange(len(labels)), labels]
  return -np.mean(chosen)


def _balanced(labels, logits):
  # The mean over the client's classes of the mean over a class's examples.
  return np.mean(
    [_plain(labels[labels == k], logits[labels == k]) for k in set(labels)]
  )


def _calibrated(labels, logits):
  # -log of exp(z_y) π_y / sum over k of exp(z_k) π_k.
  shares = np.bincount(labels, minlength=logits.shape[1]) / len(labels)
  return _plain(labels, logits + np.log(shares + 0.02))


_LOSSES = {'plain': _plain, 'balanced': _balanced, 'calibrated': _calibrated}
_CLIENTS = {
  'all classes': [0, 1, 1, 2, 2, 2, 2],
  'two classes': [0, 0, 2],
  'one class': [1, 1],
  'one example': [2],
}


@pytest.mark.parametrize('labels', _CLIENTS.values(), ids=_CLIENTS)
@pytest.mark.parametrize('kind', _LOSSES)
def test_a_loss_is_its_definition_everywhere(kind, labels):
  labels = np.array(labels)
  logits = np.random.default_rng(0).normal(size=(labels.size, 3))
  logits = (3 * logits).astype(np.float32)
  wanted = _LOSSES[kind](labels, logits.astype(float))
  mean = losses.mean_loss(labels, tf.constant(logits), kind)
  assert float(mean) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
  # As TFF calls it, also with labels in a column.
  keras = losses.of(kind)
  assert isinstance(keras, tf.keras.losses.Loss)
  for shape in ([-1], [-1, 1]):
    found = keras(tf.reshape(labels, shape), tf.constant(logits))
    assert float(found) == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_the_plain_loss_is_the_one_that_all_engines_share():
  assert losses.of('plain') is losses.LOSS
