"""Rounds computed by hand: gradients of Keras models, means, leaving one out.

Nothing is shared with the engines but the draws of examples and the standard
normals of a seed, which have tests of their own.
"""

import functools
import math
from typing import NamedTuple, Optional

import numpy as np
import tensorflow as tf

from tests.engines import cases
from tf_bdp.learning import example_batches
from tf_bdp.mechanisms import base
from tf_bdp.ops import noise as noise_lib

_LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def calibrated_loss(labels, logits):
  """-log of exp(z_y) π_y / sum over k of exp(z_k) π_k."""
  shares = np.bincount(labels, minlength=3) / len(labels)
  weighed = tf.exp(logits) * np.float32(shares + 0.02)
  right = tf.gather(weighed, labels, batch_dims=1)
  return -tf.reduce_mean(tf.math.log(right / tf.reduce_sum(weighed, 1)))


def balanced_loss(labels, logits):
  """The mean over the client's classes of the mean over a class's examples."""
  return tf.reduce_mean(
    [
      _LOSS(labels[labels == label], logits[labels == label])
      for label in np.unique(labels)
    ]
  )


LOSSES = {
  'plain': _LOSS,
  'calibrated': calibrated_loss,
  'balanced': balanced_loss,
}


def clipped(vector, clip_norm):
  norm = np.linalg.norm(vector)
  return vector * min(1.0, clip_norm / norm) if norm else vector


class Work:
  """A model of a case, at any weights."""

  def __init__(self, task):
    self._model = task.model()
    self._data = task.data()

  def gradient(self, weights, rows, loss=_LOSS):
    """The gradient of the mean loss of some examples; none if there are none."""
    variables = self._model.trainable_variables
    sizes = np.cumsum([tf.size(v).numpy() for v in variables])[:-1]
    if not len(rows):
      return np.zeros_like(weights)
    for variable, part in zip(variables, np.split(weights, sizes)):
      variable.assign(np.reshape(part, variable.shape))
    with tf.GradientTape() as tape:
      logits = self._model(self._data.features[rows])
      value = loss(self._data.labels[rows], logits)
    parts = tape.gradient(value, variables)
    return np.concatenate([np.ravel(part) for part in parts]).astype(float)


class Client(NamedTuple):
  """What a client sends, before noise, and its examples' squared moves."""

  sent: np.ndarray
  quiet: np.ndarray
  squared_moves: Optional[np.ndarray] = None

  @property
  def usable(self):
    return bool(np.all(np.isfinite(self.sent)) and np.any(self.sent))


def plain_update(case, work, weights, number, client):
  """The update of a client without noise of its own."""
  algorithm, data = case.algorithm, case.task.data()
  rows = data.indices(client)
  if algorithm.examples_per_round:
    chosen = cases.sampler_of(data).subset(
      number, client, len(rows), algorithm.examples_per_round
    )
    rows = rows[chosen]
  if algorithm.name == 'fed_sgd':
    update = work.gradient(weights, rows, LOSSES[algorithm.client_loss])
    return Client(update, update)
  after, batch = weights, algorithm.client_batch_size
  for _ in range(algorithm.client_epochs):
    for start in range(0, len(rows), batch):
      step = work.gradient(after, rows[start : start + batch])
      after = after - algorithm.client_learning_rate * step
  return Client(weights - after, weights - after)


def private_update(case, mechanism, work, weights, number, client):
  """The update of a client that adds noise, and its examples' moves."""
  algorithm, data = case.algorithm, case.task.data()
  clip_norm = mechanism.clip_norm
  draw = example_batches.ExampleBatches(
    data, mechanism, algorithm, cases.sampler_of(data)
  ).draw(number, client)

  def clipped_batch(at, rows):
    if mechanism.clipping == 'batch':
      return clipped(work.gradient(at, rows), clip_norm)
    parts = [clipped(work.gradient(at, [row]), clip_norm) for row in rows]
    return np.sum([0.0 * at, *parts], axis=0) / mechanism.batch_size

  deviation = mechanism.noise_multiplier * clip_norm
  if mechanism.clipping == 'example':
    deviation /= mechanism.batch_size
  after, moves = weights, []
  for step in range(draw.step_count):
    batch = set(draw.indices[draw.drawn[step]].tolist())
    quiet = clipped_batch(after, sorted(batch))
    # Those of a large task would take long, and nobody asks for them.
    if step == 0 and case.task is cases.SMALL:
      measured = draw.indices[draw.measured[0]].tolist()
      others = [clipped_batch(after, sorted(batch ^ {x})) for x in measured]
      moves = [np.sum((quiet - other) ** 2) for other in others]
    normal = noise_lib.client_normal(
      weights.size, cases.NOISE_SEED, number, client, step
    ).numpy()
    rate = algorithm.local_learning_rate or 1.0
    after = after - rate * (quiet + deviation * normal)
  sent = weights - after
  return Client(sent, quiet, np.array(moves) / clip_norm**2)


class Round(NamedTuple):
  """A round by hand.

  Attributes:
    released: The server's result.
    clients: What each participant and member of the panel computed.
    squared_distances: r² of the panel's clients, where they are protected.
    next_clip_norm: Of the round after.
  """

  released: np.ndarray
  clients: dict[int, Client]
  squared_distances: np.ndarray
  next_clip_norm: float


def _server_noise(case, clip_norm):
  """The deviation of the server's noise, and σ_b of adaptive clipping."""
  z = case.options.get('server_noise_multiplier', 0.0)
  if not case.by_clients:
    z = case.options['noise_multiplier']
  count_deviation = math.inf
  if 'adaptive' in case.options:
    count_deviation = max(cases.CLIENTS_PER_ROUND / 20, 2 * z)
    # Andrew et al., Theorem 1.
    z = (z**-2 - (2 * count_deviation) ** -2) ** -0.5
  return z * clip_norm / cases.CLIENTS_PER_ROUND, count_deviation


@functools.cache
def round_of(name, number):
  """Computes a round of a case, from the weights of the in-process engine."""
  case, runner = cases.ALL_CASES[name], cases.engine('inprocess', name)
  rounds = cases.rounds('inprocess', name)
  work = Work(case.task)
  state = rounds[number - 1].state if number else runner.initial_state()
  weights = cases.flat(runner, state)
  clip_norm = rounds[number].measurements.clip_norm
  cohort, panel = case.task.cohorts[number], case.task.panel
  found = {}
  for client in sorted({*cohort, *panel}):
    if case.by_clients:
      found[client] = private_update(
        case, runner.mechanism, work, weights, number, client
      )
    else:
      found[client] = plain_update(case, work, weights, number, client)
  usable = {client for client, part in found.items() if part.usable}
  updates = {client: found[client].sent for client in usable}
  if case.level in ('mean', 'sum', 'split'):
    updates = {c: clipped(u, clip_norm) for c, u in updates.items()}
  if case.level in cases.COUNTING_LEVELS:
    updates |= {c: 0.0 * weights for c in found if c not in usable}
  present = {client for client in cohort if client in updates}

  def aggregate(members):
    total = np.sum([0 * weights, *(updates[c] for c in members)], axis=0)
    if case.level == 'sum':
      return total / cases.CLIENTS_PER_ROUND
    floor = 1
    if case.level in cases.COUNTING_LEVELS:
      floor = runner.mechanism.least_participants
    return total / max(floor, len(members))

  deviation, count_deviation = _server_noise(case, clip_norm)
  mean = aggregate(present)
  released = mean
  # Where clients add noise and nobody came, the mechanism releases nothing.
  if deviation and (present or case.level in ('mean', 'sum', 'split')):
    released = _noised(mean, deviation, number, base.UPDATE_NOISE)
  distances = []
  for client in panel:
    moved = 0.0
    if client in updates and case.level == 'joint':
      moved = found[client].quiet
      if runner.mechanism.reference_is_last_mean and number:
        last = cases.released('inprocess', name, number - 1)
        moved = moved - clipped(last, clip_norm)
      # Zero-out adjacency: the noise of all stays, the update does not.
      moved = moved / len(present) if present else 0.0
    elif client in updates:
      moved = mean - aggregate(present ^ {client})
    distances.append(np.sum(np.square(moved)))
  variance = deviation**2
  if case.level == 'joint' and present:
    own = case.options['noise_multiplier'] * clip_norm
    variance += own**2 / len(present)
  if variance:
    distances = np.array(distances) / variance + 0.25 / count_deviation**2
  next_clip_norm = clip_norm
  if 'adaptive' in case.options:
    heard = present & usable
    below = sum(np.linalg.norm(found[c].sent) <= clip_norm for c in heard)
    below = _noised(
      np.array([below - len(heard) / 2]),
      count_deviation,
      number,
      base.COUNT_NOISE,
    )[0]
    share = below / cases.CLIENTS_PER_ROUND + 0.5
    quantile = case.options['adaptive'].quantile
    next_clip_norm *= math.exp(-0.2 * (share - quantile))
  return Round(released, found, np.asarray(distances), next_clip_norm)


def _noised(values, deviation, number, purpose):
  tensor = tf.constant(values, tf.float32)
  (noised,) = noise_lib.add_noise(
    [tensor], deviation, cases.NOISE_SEED, tf.constant(number), purpose
  )
  return noised.numpy().astype(float)
