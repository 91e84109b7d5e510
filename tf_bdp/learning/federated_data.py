"""Examples and who holds them, without a copy for each client."""

import functools
from collections.abc import Sequence

import numpy as np


class FederatedData:
  """A training set and, for every client, which examples it holds.

  Clients are numbered from 0. An example may belong to several clients; memory
  grows with the examples and with what clients hold, not with copies.
  """

  def __init__(
    self,
    features: np.ndarray,
    labels: np.ndarray,
    clients: Sequence[np.ndarray],
  ):
    """Checks and keeps the arrays.

    Args:
      features: All examples, [examples, ...], float32.
      labels: Their labels, [examples], integers.
      clients: For every client the indices of its examples.
    """
    if np.ndim(labels) != 1 or not np.issubdtype(
      np.asarray(labels).dtype, np.integer
    ):
      raise ValueError(
        'labels must be one integer for each example. Found '
        f'{np.asarray(labels).dtype} of shape {np.shape(labels)}. Of one-hot '
        'labels take np.argmax(labels, axis=-1).'
      )
    if len(features) != len(labels):
      raise ValueError(
        f'features and labels must be equally many. Found {len(features)} and '
        f'{len(labels)}.'
      )
    if len(clients) == 0:
      raise ValueError('clients must name at least one client. Found none.')
    if not np.all(np.isfinite(features)):
      raise ValueError('features must be finite. Found NaN or infinite ones.')
    for client, indices in enumerate(clients):
      if len(indices) and not (
        np.min(indices) >= 0 and np.max(indices) < len(labels)
      ):
        raise ValueError(
          f'Client {client} holds examples that there are not: its indices '
          f'must be from 0 to {len(labels) - 1}.'
        )
    self.features = features
    self.labels = labels
    self._clients = clients

  @property
  def client_count(self) -> int:
    """The number of clients."""
    return len(self._clients)

  @functools.cached_property
  def holdings(self) -> list[int]:
    """How many examples each client has."""
    return [len(indices) for indices in self._clients]

  def indices(self, client: int) -> np.ndarray:
    """Returns which examples a client holds."""
    if not 0 <= client < self.client_count:
      raise ValueError(
        f'There are {self.client_count} clients, numbered from 0. Found '
        f'client {client}.'
      )
    return self._clients[client]


def participants_first(
  participants: Sequence[int], panel: Sequence[int]
) -> list[int]:
  """Returns the participants, then the other members of the panel."""
  taking_part = set(participants)
  return [*participants, *(c for c in panel if c not in taking_part)]


def padded(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  """Returns clients' examples as one array, and how many each really has.

  Args:
    rows: The indices of each client's examples.

  Returns:
    The indices, [clients, examples], where entries beyond a client's size have
    no meaning, and the sizes.
  """
  sizes = np.array([len(row) for row in rows], np.int32)
  indices = np.zeros((len(rows), max(sizes, default=0)), np.int64)
  for target, row in zip(indices, rows):
    target[: len(row)] = row
  return indices, sizes
