"""Which clients take part, and which are measured."""

import numpy as np

from tf_bdp import validation

KINDS = ('poisson', 'fixed_size')
# Tells the random streams of one seed apart.
_PARTICIPANTS, _PANEL, _BATCHES, _PANEL_EXAMPLES, _SUBSETS = 1, 2, 3, 4, 5


def participants(
  kind: str,
  seed: int,
  round_number: int,
  client_count: int,
  participation_probability: float,
) -> np.ndarray:
  """Draws the clients of a round, the same for the same seed and round.

  Args:
    kind: 'poisson': each client by itself, as the theory assumes. 'fixed_size':
      always the expected number, for which the figures are not proven.
    seed: Of the run. Amplification by sampling holds against those who do not
      know it.
    round_number: Counts from 0.
    client_count: N.
    participation_probability: α.

  Returns:
    The clients' numbers, ascending.
  """
  validation.check_choice('sampling', kind, KINDS)
  validation.check_probability(
    'participation_probability', participation_probability
  )
  generator = np.random.default_rng([seed, _PARTICIPANTS, round_number])
  if kind == 'poisson':
    chances = generator.random(client_count)
    return np.flatnonzero(chances < participation_probability)
  size = round(participation_probability * client_count)
  return np.sort(generator.choice(client_count, size, replace=False))


def panel(seed: int, client_count: int, size: int) -> np.ndarray:
  """Draws the clients that are measured in every round."""
  if not 0 <= size <= client_count:
    raise ValueError(
      f'The panel must be at most the {client_count} clients. Found {size}.'
    )
  generator = np.random.default_rng([seed, _PANEL])
  return np.sort(generator.choice(client_count, size, replace=False))


def batches(
  seed: int,
  round_number: int,
  client: int,
  holding: int,
  draw_probability: float,
  steps: int,
) -> np.ndarray:
  """Draws the examples of a client's local steps, each by itself.

  Args:
    seed: Of the run.
    round_number: Counts from 0.
    client: The client's number.
    holding: How many examples it has.
    draw_probability: The chance of each example to be in a step's batch.
    steps: How many steps.

  Returns:
    Whether an example is drawn, [steps, holding].
  """
  validation.check_probability('draw_probability', draw_probability)
  generator = np.random.default_rng([seed, _BATCHES, round_number, client])
  return generator.random((steps, holding)) < draw_probability


def subset(
  seed: int, round_number: int, client: int, holding: int, size: int
) -> np.ndarray:
  """Draws which of its examples a client's update is of, without return.

  Args:
    seed: Of the run.
    round_number: Counts from 0.
    client: The client's number.
    holding: How many examples it has.
    size: How many to draw; all if there are no more.

  Returns:
    Their positions among those that the client has, ascending.
  """
  if size >= holding:
    return np.arange(holding)
  generator = np.random.default_rng([seed, _SUBSETS, round_number, client])
  return np.sort(generator.choice(holding, size, replace=False))


def panel_examples(
  seed: int, client: int, holding: int, size: int
) -> np.ndarray:
  """Returns which examples of a client are in its panel, [holding]."""
  generator = np.random.default_rng([seed, _PANEL_EXAMPLES, client])
  members = generator.choice(holding, min(size, holding), replace=False)
  return np.isin(np.arange(holding), members)
