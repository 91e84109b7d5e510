"""The losses of clients, as Keras and TFF want them."""

import tensorflow as tf

# The mean cross-entropy of logits, which all engines use, as TFF wants it.
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# The share that calibrated logits assume for a class which a client lacks. If
# tiny, a client only learns to tell its own classes apart; if large, clients
# disagree. On validation data 0.01 and 0.03 did better than 1e-4.
_ABSENT_CLASS = 0.02


def of(client_loss: str) -> tf.keras.losses.Loss:
  """Returns the loss of a client's data, by its name in `Algorithm`."""
  return LOSS if client_loss == 'plain' else _ClientLoss(client_loss)


class _ClientLoss(tf.keras.losses.Loss):
  """The loss of all data of a client, as TFF wants it; see `Algorithm`."""

  def __init__(self, kind: str):
    super().__init__()
    self._kind = kind

  def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Returns the losses of the examples."""
    return _losses(tf.reshape(y_true, [-1]), y_pred, self._kind)


def _losses(labels: tf.Tensor, logits: tf.Tensor, kind: str) -> tf.Tensor:
  """Returns the losses of a client's examples; their mean is its loss."""
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
