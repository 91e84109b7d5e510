"""How clients and server learn, apart from privacy; and which models may."""

import dataclasses

import numpy as np
import tensorflow as tf

from tf_bdp import validation
from tf_bdp.learning import federated_data, sampling

# The mean cross-entropy of logits, of every engine, as TFF wants it.
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# What a class that a client does not have counts for in calibrated logits. With
# next to nothing a client would only tell its own classes apart, with a lot
# clients disagree; on validation data 0.01 and 0.03 did better than 1e-4.
_ABSENT_CLASS = 0.02
ALGORITHMS = ('fed_sgd', 'fed_avg')
CLIENT_LOSSES = ('plain', 'balanced', 'calibrated')


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """How clients and server learn, apart from privacy.

  Attributes:
    name: 'fed_sgd': a client sends the gradient of its mean loss. 'fed_avg': it
      trains, and sends by how much its weights went down.
    learning_rate: The server's.
    learning_rate_decay: What the server's learning rate is multiplied by from
      one round to the next.
    momentum: The server's.
    client_learning_rate: Of the local steps of 'fed_avg'.
    client_epochs: Passes over a client's data in a round of 'fed_avg'.
    client_batch_size: Examples in a local step of 'fed_avg'; at instance level
      the mechanism's own is used.
    examples_per_round: How many of its examples, drawn anew in each round, a
      client's update of 'fed_sgd' is of; 0 for all. At instance level the
      mechanism's own batches are used.
    client_loss: What a client makes of the classes that it has, so that clients
      with different ones disagree less; other than 'plain', 'fed_sgd' only.
      'balanced': all classes that it has weigh the same, however many examples
      there are of each. 'calibrated': it adds the logarithm of the share that
      each class has of its data to the logits before the loss, and so does not
      ask for its own classes at all inputs (Zhang et al., "Federated Learning
      with Label Distribution Skew via Logits Calibration", 2022).
  """

  name: str = 'fed_sgd'
  learning_rate: float = 1.0
  learning_rate_decay: float = 1.0
  momentum: float = 0.0
  client_learning_rate: float = 0.1
  client_epochs: int = 1
  client_batch_size: int = 32
  examples_per_round: int = 0
  client_loss: str = 'plain'

  def __post_init__(self) -> None:
    validation.check_choice('algorithm', self.name, ALGORITHMS)
    validation.check_positive('learning_rate', self.learning_rate)
    validation.check_positive('learning_rate_decay', self.learning_rate_decay)
    if self.learning_rate_decay > 1:
      raise ValueError(
        'learning_rate_decay must be at most 1. Found '
        f'{self.learning_rate_decay}.'
      )
    if not 0 <= self.momentum < 1:
      raise ValueError(f'momentum must be in [0, 1). Found {self.momentum}.')
    validation.check_positive('client_learning_rate', self.client_learning_rate)
    validation.check_positive_integer('client_epochs', self.client_epochs)
    validation.check_positive_integer(
      'client_batch_size', self.client_batch_size
    )
    validation.check_choice('client_loss', self.client_loss, CLIENT_LOSSES)
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

  @property
  def loss(self) -> tf.keras.losses.Loss:
    """The loss of a client's data."""
    return (
      LOSS if self.client_loss == 'plain' else _ClientLoss(self.client_loss)
    )

  def examples_of(
    self,
    data: federated_data.FederatedData,
    seed: int,
    round_number: int,
    client: int,
  ) -> np.ndarray:
    """Returns the examples that a client's update of a round is of."""
    indices = data.indices(client)
    if not self.examples_per_round:
      return indices
    drawn = sampling.subset(
      seed, round_number, client, len(indices), self.examples_per_round
    )
    return indices[drawn]

  def local_steps(self, holding: int, batch_size: int) -> int:
    """Returns how many steps a client takes that has `holding` examples."""
    if self.name == 'fed_sgd':
      return 1
    return self.client_epochs * max(1, -(-holding // batch_size))


class _ClientLoss(tf.keras.losses.Loss):
  """The loss of all data of a client, as TFF wants it; see `Algorithm`."""

  def __init__(self, kind: str):
    super().__init__()
    self._kind = kind

  def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Returns the losses of the examples."""
    return _losses(tf.reshape(y_true, [-1]), y_pred, self._kind)


def _losses(labels: tf.Tensor, logits: tf.Tensor, kind: str) -> tf.Tensor:
  """Returns the losses of a client's examples, of which the mean counts."""
  classes = tf.one_hot(labels, tf.shape(logits)[-1])
  shares = tf.reduce_mean(classes, axis=0)
  if kind == 'calibrated':
    logits += tf.math.log(shares + _ABSENT_CLASS)
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
  if kind == 'balanced':
    present = tf.math.count_nonzero(shares, dtype=tf.float32)
    losses /= present * tf.linalg.matvec(classes, shares)
  return losses


def mean_loss(
  labels: tf.Tensor, logits: tf.Tensor, client_loss: str = 'plain'
) -> tf.Tensor:
  """Returns the loss; Keras itself refuses to average on several devices."""
  return tf.reduce_mean(_losses(labels, logits, client_loss))


def check_model(model: tf.keras.Model) -> None:
  """Raises ValueError for layers that the accounting does not cover."""
  for layer in model.submodules:
    if isinstance(layer, tf.keras.layers.BatchNormalization):
      if layer.trainable:
        raise ValueError(
          f'Layer {layer.name!r} is a batch normalisation in training mode: '
          'its moving averages would leave the clients neither clipped nor '
          'noised. Freeze it (trainable=False), or use another normalisation.'
        )
    elif isinstance(layer, tf.keras.__internal__.layers.BaseRandomLayer):
      raise ValueError(
        f'Layer {layer.name!r} is random: the updates that are measured would '
        'not be those that are released. Leave it out.'
      )
