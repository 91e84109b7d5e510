"""How clients and server learn, apart from privacy."""

import dataclasses
from typing import Any, Optional

import numpy as np

from tf_bdp import options, validation
from tf_bdp.learning import federated_data, sampling

ALGORITHMS = ('fed_sgd', 'fed_avg')
CLIENT_LOSSES = ('plain', 'balanced', 'calibrated')


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """How clients compute their updates, and what the server does with the mean.

  In 'fed_sgd' a client sends the gradient of its mean loss; in 'fed_avg' it
  trains, and sends by how much that lowered its weights.

  The calibrated loss adds to each logit the logarithm of the class's share of
  the client's data, so that the update does not push every input towards the
  client's own classes (Zhang et al., "Federated Learning with Label
  Distribution Skew via Logits Calibration", 2022).
  """

  name: str = options.option(
    'fed_sgd',
    "How clients learn: fed_sgd sends the gradient of a client's loss, fed_avg "
    'trains on the client and sends how its weights changed.',
    choices=ALGORITHMS,
    flag='algorithm',
  )
  learning_rate: float = options.option(0.02, 'Learning rate of the server.')
  learning_rate_decay: float = options.option(
    1.0, "The server's learning rate is multiplied by this after every round."
  )
  momentum: float = options.option(0.9, "Momentum of the server's optimiser.")
  client_learning_rate: float = options.option(
    0.1, 'Learning rate of the local steps in fed_avg.'
  )
  client_epochs: int = options.option(
    1, 'Passes of a client over its data in a round of fed_avg.'
  )
  client_batch_size: int = options.option(
    32,
    'Examples in a local step of fed_avg; where examples are protected, how '
    'many a client draws for a step on average.',
  )
  examples_per_round: int = options.option(
    0,
    'With fed_sgd and client privacy: in each round a client draws this many '
    'of its examples, without replacement, and computes its update from them; '
    '0 for all.',
  )
  client_loss: str = options.option(
    'plain',
    'balanced: all classes that a client has weigh the same in its loss. '
    "calibrated: a client's loss allows for which classes it has. Both make "
    'clients with different classes disagree less. With fed_sgd and client '
    'privacy.',
    choices=CLIENT_LOSSES,
  )

  def __post_init__(self) -> None:
    options.check_choices(self)
    for name in (
      'learning_rate',
      'learning_rate_decay',
      'client_learning_rate',
    ):
      validation.check_positive(name, getattr(self, name))
    if self.learning_rate_decay > 1:
      raise ValueError(
        'learning_rate_decay must be at most 1. Found '
        f'{self.learning_rate_decay}.'
      )
    if not 0 <= self.momentum < 1:
      raise ValueError(f'momentum must be in [0, 1). Found {self.momentum}.')
    for name in ('client_epochs', 'client_batch_size'):
      validation.check_positive_integer(name, getattr(self, name))
    if self.examples_per_round:
      validation.check_positive_integer(
        'examples_per_round', self.examples_per_round
      )
      if self.name != 'fed_sgd':
        raise ValueError(
          'examples_per_round is for fed_sgd. With fed_avg leave it out; '
          'client_batch_size says how many examples a local step is of.'
        )
    if self.client_loss != 'plain' and self.name != 'fed_sgd':
      raise ValueError(
        f'client_loss={self.client_loss} takes the shares of classes from all '
        f'data of a client at once. Use it with fed_sgd, not with {self.name}.'
      )

  def examples_of(
    self,
    data: federated_data.FederatedData,
    sampler: sampling.Sampler,
    round_number: int,
    client: int,
  ) -> np.ndarray:
    """Returns the examples from which a client computes a round's update."""
    indices = data.indices(client)
    if not self.examples_per_round:
      return indices
    drawn = sampler.subset(
      round_number, client, len(indices), self.examples_per_round
    )
    return indices[drawn]

  def local_steps(self, holding: int, batch_size: int) -> int:
    """Returns how many steps a client takes that has `holding` examples."""
    if self.name == 'fed_sgd':
      return 1
    return self.client_epochs * max(1, -(-holding // batch_size))

  @property
  def local_learning_rate(self) -> Optional[float]:
    """The learning rate of local steps; None if there are none."""
    return None if self.name == 'fed_sgd' else self.client_learning_rate

  def learning_rate_at(self, round_number: Any) -> Any:
    """Returns the server's learning rate in a round, a number or a tensor."""
    return self.learning_rate * self.learning_rate_decay**round_number
