"""Sums and maxima that the server learns without any client's own value.

Building blocks for `tff.federated_computation`, all of them on
`tff.federated_secure_sum`: its integers are fixed-point numbers here. Privacy
costs are rounded up, so that no cost is under-reported; updates are rounded
towards zero, so that no norm grows.

The protocol behind the secure sum is the runtime's. TFF's own runtime has none:
a simulation runs in `runtime.simulation_context`, where secure sums are plain.
"""

import collections
from typing import Any, Optional, Union

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp import validation

MOST_CLIENTS = 2**20
DEFAULT_LEVELS = 64
DEFAULT_SMALLEST_SHARE = 1e-9

# TFF takes inputs of up to 62 bits, and sums are int64.
_SUM_BITS = 62
# As many as `tff.aggregators.SecureSumFactory` has, the sign included.
_UPDATE_BITS = 32
# A float64's sign and exponent.
_NOT_MANTISSA = np.int64(-(2**52))
_EXACT_INTEGERS = 2**53

_Public = Union[tff.Value, npt.ArrayLike]


def resolution(
  upper: npt.ArrayLike = 1.0, max_clients: int = MOST_CLIENTS
) -> np.ndarray:
  """Returns the step to which `secure_sum` rounds up every client's value.

  Two to the power of -62, times `max_clients` and `upper`, both rounded up to
  a power of two.

  Args:
    upper: As for `secure_sum`, but a number or an array.
    max_clients: As for `secure_sum`.
  """
  limit = tf.constant(np.asarray(upper, dtype=np.float64))
  return _step(limit, _input_bits(max_clients)).numpy()


def secure_sum(
  values: tff.Value, upper: _Public, max_clients: int = MOST_CLIENTS
) -> tff.Value:
  """Returns the sum of the clients' values, or a little more.

  Each value is rounded up to a multiple of `resolution(upper, max_clients)`.
  Below zero, it counts as zero. If it is NaN or above `upper`, which costs that
  are capped at their worst case never are, the sum is infinite.

  Args:
    values: A floating-point tensor at the clients.
    upper: The largest possible value: a public number, an array of the values'
      shape, or either of them placed at the server.
    max_clients: The largest number of clients for which the sum cannot
      overflow. The fewer, the finer are the steps. If there are more, the
      computation fails.

  Returns:
    A float64 tensor at the server.
  """
  bits = _input_bits(max_clients)
  limit = _at_server(upper)
  limit_type = limit.type_signature.member

  @tff.tensorflow.computation(values.type_signature.member, limit_type)
  def encode(value: tf.Tensor, limit: tf.Tensor) -> Any:
    value, limit = tf.cast(value, tf.float64), tf.cast(limit, tf.float64)
    inside = (value <= limit) & tf.math.is_finite(limit)  # NaN is not.
    value = tf.where(inside, tf.maximum(value, 0.0), 0.0)
    return collections.OrderedDict(
      clients=tf.constant(1, tf.int64),
      steps=tf.cast(tf.math.ceil(value / _step(limit, bits)), tf.int64),
      outside=1 - tf.cast(inside, tf.int64),
    )

  encoded = tff.federated_map(encode, (values, tff.federated_broadcast(limit)))
  sums = tff.federated_secure_sum(
    encoded, collections.OrderedDict(clients=1, steps=2**bits, outside=1)
  )

  @tff.tensorflow.computation(sums.type_signature.member, limit_type)
  def decode(sums: Any, limit: tf.Tensor) -> tf.Tensor:
    few_enough = tf.debugging.assert_less_equal(
      sums['clients'],
      tf.constant(max_clients, tf.int64),
      message=f'secure_sum was made for max_clients = {max_clients}',
    )
    with tf.control_dependencies([few_enough]):
      steps = tf.identity(sums['steps'])
    total = tf.cast(steps, tf.float64)
    # Beyond, float64 may have rounded it down.
    exact = steps <= _EXACT_INTEGERS
    total = tf.where(exact, total, total * (1.0 + 2.0**-51))
    total *= _step(tf.cast(limit, tf.float64), bits)
    return tf.where(sums['outside'] > 0, np.float64(np.inf), total)

  return tff.federated_map(decode, (sums, limit))


def secure_maximum(
  values: tff.Value,
  upper: _Public,
  levels: int = DEFAULT_LEVELS,
  smallest_share: float = DEFAULT_SMALLEST_SHARE,
  passes: int = 2,
) -> tff.Value:
  """Returns the largest of the clients' values, rounded up to a public level.

  The levels of the first pass are zero and a geometric sequence up to `upper`,
  each larger than the one before by the factor smallest_share^(-1/(levels-1)).
  Every further pass lays as many between the level found and the one before.
  The result is at most f times the maximum, with

    f = smallest_share^(-1/(levels-1)^passes), by default 1.0053,

  unless the maximum is below `smallest_share` times `upper`, which then stands
  in its place; zero if all are zero, or there is no client; infinite if a value
  is NaN or above `upper`.

  The server learns how many clients are at each level, and not which. A pass is
  a secure sum that needs the result of the one before: where a protocol has
  only one for each round, use one pass with more levels.

  Args:
    values: A floating-point tensor at the clients.
    upper: As for `secure_sum`.
    levels: The number of levels of each pass, not counting zero.
    smallest_share: The smallest level above zero, as a share of `upper`.
    passes: The number of passes.

  Returns:
    A float64 tensor at the server.
  """
  if validation.check_positive_integer('levels', levels) < 2:
    raise ValueError(f'levels must be at least 2. Found {levels}.')
  validation.check_delta('smallest_share', smallest_share)
  validation.check_positive_integer('passes', passes)
  result = _at_server(upper)
  for _ in range(passes):
    shares = smallest_share ** (1.0 - np.linspace(0.0, 1.0, levels))
    result = _largest_level(values, result, np.concatenate([[0.0], shares]))
    smallest_share **= 1.0 / (levels - 1)
  return result


def secure_update_sum(updates: tff.Value, bound: _Public) -> tff.Value:
  """Returns the sum of the clients' updates.

  Each coordinate is rounded towards zero, to a multiple of 2^-31 times `bound`
  (or the power of two above it), and cut to at most `bound`; NaN and infinity
  become zero. So no client's norm grows, as it can in
  `tff.aggregators.SecureSumFactory`, which rounds to the nearest.

  Args:
    updates: A structure of floating-point tensors at the clients.
    bound: The largest absolute value of a coordinate, such as the clip norm: a
      public number, or one placed at the server.

  Returns:
    A structure of the same type at the server.
  """
  update_type = updates.type_signature.member
  if not tff.types.is_structure_of_floats(update_type):
    raise TypeError(
      'Updates must be structures of floating-point tensors. Found '
      f'{update_type}.'
    )
  limit = _at_server(bound)
  limit_type = limit.type_signature.member
  bits = _UPDATE_BITS - 1

  @tff.tensorflow.computation(update_type, limit_type)
  def encode(update: Any, limit: tf.Tensor) -> Any:
    limit = tf.cast(limit, tf.float64)

    def encode_part(part: tf.Tensor) -> tf.Tensor:
      part = tf.cast(part, tf.float64)
      part = tf.where(tf.math.is_finite(part), part, 0.0)
      part = tf.clip_by_value(part, -limit, limit)
      # The cast rounds towards zero. Secure sums take no negative numbers.
      return tf.cast(part / _step(limit, bits), tf.int64) + 2**bits

    return tf.nest.map_structure(encode_part, update)

  encoded = tff.federated_map(encode, (updates, tff.federated_broadcast(limit)))
  sums = tff.federated_secure_sum(encoded, 2**_UPDATE_BITS)
  clients = tff.federated_secure_sum(
    tff.federated_value(np.int64(1), tff.CLIENTS), 1
  )

  @tff.tensorflow.computation(sums.type_signature.member, np.int64, limit_type)
  def decode(sums: Any, clients: tf.Tensor, limit: tf.Tensor) -> Any:
    step = _step(tf.cast(limit, tf.float64), bits)
    dtypes = tff.types.structure_from_tensor_type_tree(
      lambda part_type: part_type.dtype, update_type
    )
    decoded = [
      tf.cast(tf.cast(part - clients * 2**bits, tf.float64) * step, dtype)
      for part, dtype in zip(tf.nest.flatten(sums), tf.nest.flatten(dtypes))
    ]
    return tf.nest.pack_sequence_as(sums, decoded)

  return tff.federated_map(decode, (sums, clients, limit))


class SecureSummation:
  """Sums of updates and counts, for `private_mean.PrivateMeanFactory`."""

  def __init__(self, bound: Optional[float] = None):
    """Makes a summation.

    Args:
      bound: The largest absolute value of a coordinate; by default the clip
        norm.
    """
    if bound is not None:
      validation.check_positive('bound', bound)
    self._bound = bound

  def update(self, updates: tff.Value, bound: tff.Value) -> tff.Value:
    """Sums updates; the server holds a bound of their coordinates."""
    return secure_update_sum(
      updates, bound if self._bound is None else self._bound
    )

  def count(self, ones: tff.Value) -> tff.Value:
    """Sums zeros and ones."""
    return tff.federated_secure_sum(ones, 1)


def check_context() -> None:
  """Raises RuntimeError if secure sums cannot run in TFF's current context.

  It tries one. Without this check the first round would fail, with an error
  that does not say why.
  """

  @tff.federated_computation(tff.FederatedType(np.int32, tff.CLIENTS))
  def count(ones: tff.Value) -> tff.Value:
    return tff.federated_secure_sum(ones, 1)

  try:
    found = count([np.int32(1)] * 2)
  except Exception as error:
    raise RuntimeError(
      "TFF's current context cannot run secure sums. To simulate them, call "
      'tf_bdp.aggregators.runtime.use_simulation_context() before the '
      'first round.'
    ) from error
  if found != 2:
    raise RuntimeError(f'A secure sum of 1 and 1 was {found}.')


def _largest_level(
  values: tff.Value, limit: tff.Value, shares: np.ndarray
) -> tff.Value:
  """Rounds values up to shares of the limit; returns the largest of them."""
  value_type = values.type_signature.member

  @tff.tensorflow.computation(limit.type_signature.member)
  def make_grid(limit: tf.Tensor) -> tf.Tensor:
    limit = tf.broadcast_to(tf.cast(limit, tf.float64), value_type.shape)
    return limit[..., tf.newaxis] * tf.constant(shares)

  # Made once and sent, so that all see the same bits.
  grid = tff.federated_map(make_grid, limit)
  grid_type = grid.type_signature.member

  @tff.tensorflow.computation(value_type, grid_type)
  def encode(value: tf.Tensor, grid: tf.Tensor) -> tf.Tensor:
    value = tf.cast(value, tf.float64)
    # Counts the levels that reach the value: none reaches NaN. (To negate the
    # comparison would not do, for TensorFlow optimises that to `>`.)
    reach = tf.cast(value[..., tf.newaxis] <= grid, tf.int32)
    level = shares.size - tf.reduce_sum(reach, axis=-1)
    return tf.one_hot(level, shares.size + 1, dtype=tf.int32)

  encoded = tff.federated_map(encode, (values, tff.federated_broadcast(grid)))
  counts = tff.federated_secure_sum(encoded, 1)

  @tff.tensorflow.computation(counts.type_signature.member, grid_type)
  def decode(counts: tf.Tensor, grid: tf.Tensor) -> tf.Tensor:
    beyond = tf.fill([*value_type.shape, 1], np.float64(np.inf))
    grid = tf.concat([grid, beyond], axis=-1)
    return tf.reduce_max(tf.where(counts > 0, grid, 0.0), axis=-1)

  return tff.federated_map(decode, (counts, grid))


def _at_server(value: _Public) -> tff.Value:
  if isinstance(value, tff.Value):
    return value
  array = np.asarray(value, dtype=np.float64)
  if not np.all(np.isfinite(array) & (array >= 0)):
    raise ValueError(
      f'Bounds must be finite and non-negative. Found {array.tolist()}.'
    )
  return tff.federated_value(array, tff.SERVER)


def _input_bits(max_clients: int) -> int:
  """Returns the largest b with max_clients times 2^b at most 2^62."""
  clients = validation.check_positive_integer('max_clients', max_clients)
  bits = _SUM_BITS - (clients - 1).bit_length()
  if bits < 1:
    raise ValueError(f'max_clients must be at most 2**61. Found {max_clients}.')
  return bits


def _step(limit: tf.Tensor, bits: int) -> tf.Tensor:
  """Returns a power of two that is at least `limit` / 2^bits.

  Dividing by it and multiplying with it is exact.
  """
  cleared = tf.bitwise.bitwise_and(tf.bitcast(limit, tf.int64), _NOT_MANTISSA)
  power = tf.bitcast(cleared, tf.float64)
  power = tf.where(power < limit, 2.0 * power, power)
  return tf.maximum(power * 2.0**-bits, np.finfo(np.float64).tiny)
