r"""Trains a small federated model on handwritten digits and accounts for it.

Softmax regression by FedSGD on scikit-learn's 1,797 digits: each client's
gradient is clipped, the sum is noised, and every client's distance is recorded
in every round, taking part or not (a panel). Prints the privacy statement and
writes the distances to a file for `compute_bdp_privacy`.

Example:
  python -m experiments.account_digits --clients=100 --rounds=100 --delta=1e-3
"""

import os

import numpy as np
import tqdm
from absl import app, flags
from sklearn import datasets

from tf_bdp.accounting import recorded_distances
from tf_bdp.analysis import compute_bdp_privacy_lib

_CLIENTS = flags.DEFINE_integer('clients', 100, 'Number of clients.')
_ROUNDS = flags.DEFINE_integer('rounds', 100, 'Number of rounds.')
_PARTICIPATION_PROBABILITY = flags.DEFINE_float(
  'participation_probability', 0.2, 'Probability that a client takes part.'
)
_NOISE_MULTIPLIER = flags.DEFINE_float(
  'noise_multiplier', 2.0, "The noise's deviation in units of the clip norm."
)
_CLIP_NORM = flags.DEFINE_float('clip_norm', 1.0, 'Clip norm of an update.')
_LEARNING_RATE = flags.DEFINE_float('learning_rate', 2.0, 'Learning rate.')
_DELTA = flags.DEFINE_float('delta', 1e-3, 'Target delta.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of split, sampling and noise.')
_OUTPUT = flags.DEFINE_string(
  'output', 'reports/digits_distances.npz', 'Where the distances go.'
)


def _client_gradients(
  weights: np.ndarray, images: np.ndarray, labels: np.ndarray
) -> np.ndarray:
  """Returns the cross-entropy's mean gradient of each client, flattened."""
  logits = images @ weights
  likelihoods = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
  likelihoods /= np.sum(likelihoods, axis=-1, keepdims=True)
  errors = likelihoods - labels
  gradients = np.einsum('cei,cek->cik', images, errors) / images.shape[1]
  return gradients.reshape(len(images), -1)


def main(argv: list[str]) -> None:
  """Trains, prints the statement and saves the distances."""
  del argv
  rng = np.random.default_rng(_SEED.value)
  images, digits = datasets.load_digits(return_X_y=True)
  images = np.column_stack([images / 16.0, np.ones(len(images))])
  labels = np.eye(10)[digits]
  order = rng.permutation(len(images))
  test, train = order[:297], order[297:]
  per_client = len(train) // _CLIENTS.value
  if per_client < 1:
    raise app.UsageError(f'--clients must be at most {len(train)}.')
  split = train[: per_client * _CLIENTS.value].reshape(_CLIENTS.value, -1)

  weights = np.zeros((images.shape[1], 10))
  expected = _PARTICIPATION_PROBABILITY.value * _CLIENTS.value
  distances = []
  for _ in tqdm.trange(_ROUNDS.value, unit='round'):
    updates = _client_gradients(weights, images[split], labels[split])
    norms = np.linalg.norm(updates, axis=1)
    updates *= np.minimum(1.0, _CLIP_NORM.value / norms)[:, np.newaxis]
    distances.append(np.minimum(norms / _CLIP_NORM.value, 1.0))
    taking_part = rng.random(_CLIENTS.value) < _PARTICIPATION_PROBABILITY.value
    noise = rng.normal(size=updates.shape[1])
    noise *= _NOISE_MULTIPLIER.value * _CLIP_NORM.value
    total = np.sum(updates[taking_part], axis=0) + noise
    weights -= _LEARNING_RATE.value * (total / expected).reshape(weights.shape)

  report = compute_bdp_privacy_lib.compute_bdp_privacy(
    np.array(distances),
    noise_multiplier=_NOISE_MULTIPLIER.value,
    participation_probability=_PARTICIPATION_PROBABILITY.value,
    delta=_DELTA.value,
    panel=True,
  )
  os.makedirs(os.path.dirname(_OUTPUT.value) or '.', exist_ok=True)
  recorded_distances.save(_OUTPUT.value, distances, panel=True)
  accuracy = np.mean(np.argmax(images[test] @ weights, axis=1) == digits[test])
  print(report.statement())
  print(f'\nTest accuracy {accuracy:.3f}. Distances are in {_OUTPUT.value}.')


if __name__ == '__main__':
  app.run(main)
