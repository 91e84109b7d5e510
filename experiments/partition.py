"""Splits of a training set over clients: which examples each of them holds.

Where there are not enough examples for all clients they are used again, each
time in another order, as in the paper. No client holds an example twice, nor
two versions of an image: at instance level they would be protected as two.
"""

from collections.abc import Iterator

import numpy as np

from experiments import datasets
from tf_bdp import validation
from tf_bdp.learning import federated_data

KINDS = ('iid', 'shards', 'dirichlet')
SHARDS_PER_CLIENT = 2
# Tells this use of the seed from others.
_SPLIT = 0


def split(
  dataset: datasets.Dataset,
  kind: str,
  clients: int,
  examples_per_client: int,
  seed: int,
  dirichlet_beta: float = 0.5,
) -> federated_data.FederatedData:
  """Gives every client the same number of training examples.

  Args:
    dataset: The data.
    kind: 'iid': examples at random. 'shards': two random shards, each of a
      single class (McMahan et al., "Communication-Efficient Learning of Deep
      Networks from Decentralized Data", section 3). 'dirichlet': classes in
      proportions that a Dirichlet distribution gives (Hsu et al., "Measuring
      the Effects of Non-Identical Data Distribution for Federated Visual
      Classification", section 3).
    clients: The number of clients.
    examples_per_client: How many each gets; 0 for an equal share of all, which
      'shards' makes even. The paper has 600, in shards of 300.
    seed: Of the split.
    dirichlet_beta: Of 'dirichlet': β; the smaller, the fewer classes a client
      has.

  Raises:
    ValueError: There are not enough examples for one client.
  """
  validation.check_choice('partition', kind, KINDS)
  validation.check_positive_integer('clients', clients)
  validation.check_positive('dirichlet_beta', dirichlet_beta)
  held = _examples_of_one(dataset, kind, clients, examples_per_client)
  generator = np.random.default_rng([seed, _SPLIT])
  images = len(dataset.train_labels) // dataset.train_versions
  labels = dataset.train_labels[:images]
  if kind == 'iid':
    indices = _iid(images, clients, held, generator)
  elif kind == 'shards':
    indices = _shards(labels, clients, held, generator)
  else:
    indices = _dirichlet(labels, clients, held, dirichlet_beta, generator)
  if dataset.train_versions > 1:
    versions = _versions(indices, dataset.train_versions, generator)
    indices = indices + images * versions
  return federated_data.FederatedData(
    dataset.train_features, dataset.train_labels, list(indices)
  )


def _examples_of_one(
  dataset: datasets.Dataset, kind: str, clients: int, examples_per_client: int
) -> int:
  """Returns how many examples a client holds."""
  size = len(dataset.train_labels)
  images = size // dataset.train_versions
  fewest = SHARDS_PER_CLIENT if kind == 'shards' else 1
  if examples_per_client == 0:
    share = min(size // clients, images)
    if share < fewest:
      raise ValueError(
        f'There are {size} examples for {clients} clients. Give '
        'examples_per_client, to use them several times.'
      )
    return share - share % fewest
  validation.check_positive_integer('examples_per_client', examples_per_client)
  if examples_per_client > images:
    raise ValueError(
      f'examples_per_client must be at most {images}, the number of training '
      f'images. Found {examples_per_client}: a client would hold the same '
      'ones twice.'
    )
  if examples_per_client % fewest:
    raise ValueError(
      f'examples_per_client must be a multiple of {fewest}, the number of '
      f'shards that a client has. Found {examples_per_client}.'
    )
  return examples_per_client


class _Deck:
  """Examples that are dealt at random, and shuffled anew when used up."""

  def __init__(self, examples: np.ndarray, generator: np.random.Generator):
    self._examples = examples.astype(np.int32)
    self._generator = generator
    self._left = generator.permutation(self._examples)

  def deal(self, count: int) -> np.ndarray:
    """Returns `count` different examples, at most as many as there are."""
    hand = self._left[:count]
    self._left = self._left[count:]
    wanted = count - len(hand)
    if not wanted:
      return hand
    shuffled = self._generator.permutation(self._examples)
    # Those in the hand go to the bottom, so that it has none of them twice.
    again = np.isin(shuffled, hand)
    shuffled = np.concatenate([shuffled[~again], shuffled[again]])
    self._left = shuffled[wanted:]
    return np.concatenate([hand, shuffled[:wanted]])


def _versions(
  images: np.ndarray, versions: int, generator: np.random.Generator
) -> np.ndarray:
  """Returns which version each use of an image takes: each in its turn."""
  flat = images.ravel()
  order = np.argsort(flat, kind='stable')
  _, starts, counts = np.unique(
    flat[order], return_index=True, return_counts=True
  )
  # The first use takes any of them, or most would be plain.
  first = generator.integers(versions, size=len(starts))
  turn = np.arange(flat.size) - np.repeat(starts - first, counts)
  result = np.empty_like(flat)
  result[order] = turn % versions
  return result.reshape(images.shape)


def _iid(
  size: int, clients: int, held: int, generator: np.random.Generator
) -> np.ndarray:
  deck = _Deck(np.arange(size), generator)
  return np.stack([deck.deal(held) for _ in range(clients)])


def _shards(
  labels: np.ndarray, clients: int, held: int, generator: np.random.Generator
) -> np.ndarray:
  """Deals shards of one class.

  McMahan et al. sort by class and cut, so that some of their shards are of two
  classes; here, as the paper has it, none is. What does not fill a shard of
  its class is left out, and so is an odd shard; with the next use of the data
  it is others that are. MNIST gives 194 shards of 300 at a time, so the last 3
  of 100 clients hold examples that others have.
  """
  shard_size = held // SHARDS_PER_CLIENT
  classes, counts = np.unique(labels, return_counts=True)
  if counts.min() < shard_size:
    raise ValueError(
      f'Class {classes[counts.argmin()]} has {counts.min()} examples and a '
      f'shard {shard_size}: no client would have that class. Give '
      f'examples_per_client of at most {SHARDS_PER_CLIENT * counts.min()}.'
    )
  members = [np.flatnonzero(labels == label) for label in classes]
  indices = np.empty((0, held), np.int32)
  while len(indices) < clients:
    shards = np.concatenate(
      [
        generator.permutation(rows)[: len(rows) - len(rows) % shard_size]
        for rows in members
      ]
    ).reshape(-1, shard_size)
    generator.shuffle(shards)
    pairs = len(shards) // SHARDS_PER_CLIENT
    shards = shards[: pairs * SHARDS_PER_CLIENT].reshape(pairs, held)
    indices = np.concatenate([indices, shards.astype(np.int32)])
  return indices[:clients]


def _dirichlet(
  labels: np.ndarray,
  clients: int,
  held: int,
  beta: float,
  generator: np.random.Generator,
) -> np.ndarray:
  """Deals classes in random proportions.

  A client's proportions are q ~ Dir(β C p), for C classes that have the shares
  p of all examples: where these are equal, Dir(β, ..., β). Hsu et al. write
  α = β C. The classes of its examples are independent draws from q. A class
  is used again when it is used up, so that the last client's q is as random as
  the first's, even if other classes are not used up yet.
  """
  classes, counts = np.unique(labels, return_counts=True)
  decks = [
    _Deck(np.flatnonzero(labels == label), generator) for label in classes
  ]
  prior = counts / np.sum(counts)
  proportions = generator.dirichlet(beta * len(classes) * prior, size=clients)
  wanted = generator.multinomial(held, proportions)
  return np.stack(
    [
      np.concatenate(
        [deck.deal(count) for deck, count in zip(decks, client_counts)]
      )
      for client_counts in _within(counts, wanted, generator)
    ]
  )


def _within(
  available: np.ndarray, wanted: np.ndarray, generator: np.random.Generator
) -> Iterator[np.ndarray]:
  """Yields rows of `wanted` that have no more of a class than there are.

  What is too much is replaced by others of the remaining examples at random.
  """
  for row in wanted:
    possible = np.minimum(row, available)
    excess = np.sum(row - possible)
    if excess:
      possible = possible + generator.multivariate_hypergeometric(
        available - possible, excess
      )
    yield possible
