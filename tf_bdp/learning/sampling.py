"""Which clients take part, which are measured, and which examples they draw."""

import dataclasses

import numpy as np

from tf_bdp import validation

KINDS = ('poisson', 'fixed_size')
# Tells the random streams of one seed apart.
_PARTICIPANTS, _PANEL, _BATCHES, _PANEL_EXAMPLES, _SUBSETS = 1, 2, 3, 4, 5


@dataclasses.dataclass(frozen=True)
class Sampler:
  """All draws of a run; the same for the same seed, round and client.

  Attributes:
    client_count: N. Clients are numbered from 0.
    participation_probability: α.
    kind: 'poisson': each client is drawn independently, as the theory assumes.
      'fixed_size': always the expected number of clients, without replacement;
      the figures are not proven for it.
    seed: Seed of all draws. Amplification by sampling holds against those who
      do not know it.
  """

  client_count: int
  participation_probability: float = 1.0
  kind: str = 'poisson'
  seed: int = 0

  def __post_init__(self) -> None:
    validation.check_choice('sampling', self.kind, KINDS)
    validation.check_positive_integer('client_count', self.client_count)
    validation.check_probability(
      'participation_probability', self.participation_probability
    )
    if self.seed < 0:
      raise ValueError(f'seed must be 0 or more. Found {self.seed}.')

  def _generator(self, *stream: int) -> np.random.Generator:
    return np.random.default_rng([self.seed, *stream])

  def participants(self, round_number: int) -> np.ndarray:
    """Returns the clients of a round, in ascending order."""
    generator = self._generator(_PARTICIPANTS, round_number)
    if self.kind == 'poisson':
      chances = generator.random(self.client_count)
      return np.flatnonzero(chances < self.participation_probability)
    size = round(self.participation_probability * self.client_count)
    return np.sort(generator.choice(self.client_count, size, replace=False))

  def panel(self, size: int) -> np.ndarray:
    """Returns the clients that are measured in every round."""
    if not 0 <= size <= self.client_count:
      raise ValueError(
        f'The panel must be at most the {self.client_count} clients. Found '
        f'{size}.'
      )
    generator = self._generator(_PANEL)
    return np.sort(generator.choice(self.client_count, size, replace=False))

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
    generator = self._generator(_BATCHES, round_number, client)
    return generator.random((steps, holding)) < draw_probability

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
    generator = self._generator(_SUBSETS, round_number, client)
    return np.sort(generator.choice(holding, size, replace=False))

  def panel_examples(self, client: int, holding: int, size: int) -> np.ndarray:
    """Returns which examples of a client are in its panel, [holding]."""
    generator = self._generator(_PANEL_EXAMPLES, client)
    members = generator.choice(holding, min(size, holding), replace=False)
    return np.isin(np.arange(holding), members)
