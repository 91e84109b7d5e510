"""Which clients take part, which are measured, and which examples they draw.

A figure that is amplified by sampling holds against those who do not know the
draw, so draws are secret: without a seed they come from a key of the system's
entropy that is written nowhere. With a seed they can be repeated, by everybody.
"""

import dataclasses
import hashlib
import secrets
from typing import Optional, Protocol

import numpy as np

from tf_bdp import validation
from tf_bdp.mechanisms import base

KINDS = base.SAMPLINGS
# Tells the random streams of one seed, or of one key, apart.
_PARTICIPANTS, _PANEL, _BATCHES, _PANEL_EXAMPLES, _SUBSETS = 1, 2, 3, 4, 5
_HELD_OUT = 6
# What is the same in all rounds of a run, also after it was resumed.
_OF_PANEL = (_PANEL, _PANEL_EXAMPLES, _HELD_OUT)
_KEY_BYTES = 32


class _Stream(Protocol):
  """What a draw needs of a source of randomness."""

  def uniform(self, size: tuple[int, ...]) -> np.ndarray:
    """Returns independent numbers, uniform in [0, 1)."""

  def choice(self, count: int, size: int) -> np.ndarray:
    """Returns `size` of the numbers below `count`, without replacement."""


class _SeededStream:
  """The draws of a seed, by numpy's generator."""

  def __init__(self, *seed: int):
    self._generator = np.random.default_rng(seed)

  def uniform(self, size: tuple[int, ...]) -> np.ndarray:
    return self._generator.random(size)

  def choice(self, count: int, size: int) -> np.ndarray:
    return self._generator.choice(count, size, replace=False)


class _SecretStream:
  """The draws of a secret key, by SHAKE256 of the key and the purpose.

  Whoever does not know the key cannot tell its output from coin flips, even if
  the output of other streams is known (FIPS 202).
  """

  def __init__(self, key: bytes, *stream: int):
    # All of fixed length, so that no two streams are the same bytes.
    self._input = key + np.array(stream, '<u8').tobytes()

  def _words(self, count: int) -> np.ndarray:
    output = hashlib.shake_256(self._input).digest(8 * count)
    return np.frombuffer(output, '<u8')

  def uniform(self, size: tuple[int, ...]) -> np.ndarray:
    # 53 bits are all that a float holds: below q with a probability of q,
    # rounded up to the next multiple of 2⁻⁵³, as numpy's.
    words = self._words(int(np.prod(size))) >> np.uint64(11)
    return (words * 2.0**-53).reshape(size)

  def choice(self, count: int, size: int) -> np.ndarray:
    # Those with the smallest words. That two words are equal, and their order
    # is not random, happens with a probability below count² 2⁻⁶⁵.
    return np.argsort(self._words(count), kind='stable')[:size]


def _new_key() -> bytes:
  return secrets.token_bytes(_KEY_BYTES)


@dataclasses.dataclass(frozen=True)
class Sampler:
  """All draws of a run; the same for the same round and client.

  Attributes:
    client_count: How many clients there are, numbered from 0, held-out ones
      included.
    participation_probability: α.
    kind: 'poisson': each client is drawn independently. 'fixed_size': always
      the expected number of clients, without replacement.
    seed: Makes all draws reproducible, for experiments. Whoever knows it knows
      who took part: there is no amplification by sampling then. Without it
      draws are secret, and other ones in every process.
    held_out: How many clients, drawn at random, never take part.
    panel_key: Where there is no seed: from which panel and held-out clients are
      drawn. A run that is resumed goes on with it. Private.
  """

  client_count: int
  participation_probability: float = 1.0
  kind: str = 'poisson'
  seed: Optional[int] = None
  held_out: int = 0
  panel_key: bytes = dataclasses.field(
    default_factory=_new_key, repr=False, compare=False
  )
  # Of participants, batches and subsets; never leaves the process.
  _draw_key: bytes = dataclasses.field(
    default_factory=_new_key, init=False, repr=False, compare=False
  )

  def __post_init__(self) -> None:
    validation.check_choice('sampling', self.kind, KINDS)
    validation.check_positive_integer('client_count', self.client_count)
    validation.check_probability(
      'participation_probability', self.participation_probability
    )
    if self.seed is not None and self.seed < 0:
      raise ValueError(f'seed must be 0 or more. Found {self.seed}.')
    if not 0 <= self.held_out < self.client_count:
      raise ValueError(
        f'held_out must be below the {self.client_count} clients. Found '
        f'{self.held_out}.'
      )

  def draws_as(self, other: 'Sampler') -> bool:
    """Whether the other sampler draws from the same seed, or the same keys."""
    if self.seed is not None or other.seed is not None:
      return self.seed == other.seed
    keys = (self.panel_key, self._draw_key)
    return keys == (other.panel_key, other._draw_key)

  def resume_panel(self, panel_key: bytes) -> None:
    """Takes the panel of the run that is resumed; draws stay fresh.

    In place, as engine and loop of a run have the same sampler.
    """
    if len(panel_key) != _KEY_BYTES:
      raise ValueError(
        f'A panel key has {_KEY_BYTES} bytes. Found {len(panel_key)}.'
      )
    object.__setattr__(self, 'panel_key', panel_key)

  def _stream(self, purpose: int, *stream: int) -> _Stream:
    if self.seed is not None:
      return _SeededStream(self.seed, purpose, *stream)
    key = self.panel_key if purpose in _OF_PANEL else self._draw_key
    return _SecretStream(key, purpose, *stream)

  def held_out_clients(self) -> np.ndarray:
    """Returns the clients that never take part, in ascending order."""
    if not self.held_out:
      return np.zeros(0, np.int64)
    return np.sort(
      self._stream(_HELD_OUT).choice(self.client_count, self.held_out)
    )

  def training_clients(self) -> np.ndarray:
    """Returns the clients that may take part, in ascending order."""
    return np.delete(np.arange(self.client_count), self.held_out_clients())

  def participants(self, round_number: int) -> np.ndarray:
    """Returns the clients of a round, in ascending order."""
    clients = self.training_clients()
    stream = self._stream(_PARTICIPANTS, round_number)
    if self.kind == 'poisson':
      chances = stream.uniform((clients.size,))
      return clients[chances < self.participation_probability]
    size = round(self.participation_probability * clients.size)
    return clients[np.sort(stream.choice(clients.size, size))]

  def panel(self, size: int) -> np.ndarray:
    """Returns the clients that are measured in every round.

    They are of those that may take part; see `held_out_clients` for the others.
    """
    clients = self.training_clients()
    if not 0 <= size <= clients.size:
      raise ValueError(
        f'The panel must be at most the {clients.size} clients. Found {size}.'
      )
    return clients[np.sort(self._stream(_PANEL).choice(clients.size, size))]

  def batches(
    self,
    round_number: int,
    client: int,
    holding: int,
    draw_probability: float,
    steps: int,
  ) -> np.ndarray:
    """Draws the examples of a client's local steps, each independently.

    Args:
      round_number: Counts from 0.
      client: The client's number.
      holding: How many examples it has.
      draw_probability: The chance that an example is in a step's batch.
      steps: How many steps.

    Returns:
      Whether an example is drawn, [steps, holding].
    """
    validation.check_probability('draw_probability', draw_probability)
    stream = self._stream(_BATCHES, round_number, client)
    return stream.uniform((steps, holding)) < draw_probability

  def subset(
    self, round_number: int, client: int, holding: int, size: int
  ) -> np.ndarray:
    """Draws some of a client's examples, without replacement.

    Args:
      round_number: Counts from 0.
      client: The client's number.
      holding: How many examples it has.
      size: How many to draw; all if the client does not have more.

    Returns:
      Positions among the client's examples, ascending.
    """
    if size >= holding:
      return np.arange(holding)
    stream = self._stream(_SUBSETS, round_number, client)
    return np.sort(stream.choice(holding, size))

  def panel_examples(self, client: int, holding: int, size: int) -> np.ndarray:
    """Returns which examples of a client are in its panel, [holding]."""
    stream = self._stream(_PANEL_EXAMPLES, client)
    members = stream.choice(holding, min(size, holding))
    return np.isin(np.arange(holding), members)
