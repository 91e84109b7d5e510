"""Lets a formula stand once for numbers, arrays and tensors.

Formulas of mechanisms are needed in this process and inside TFF's graphs. They
are written with the functions of `array_namespace.of(...)`, which are
TensorFlow's if an argument is a tensor, and numpy's otherwise. TensorFlow is
never imported here: before somebody else has, there are no tensors.
"""

import functools
import sys
import types
from typing import Any

import numpy as np

_NUMPY = types.SimpleNamespace(
  float64=lambda values: np.asarray(values, np.float64),
  where=np.where,
  equal=np.equal,
  minimum=np.minimum,
  maximum=np.maximum,
  exp=np.exp,
  expm1=np.expm1,
  log=np.log,
  log1p_exp=lambda values: np.logaddexp(0.0, values),
)


def of(*values: Any) -> Any:
  """Returns the functions that fit the values.

  >>> of(1.5, [2.0]).maximum(1.5, 2.0)
  2.0
  """
  tensorflow = sys.modules.get('tensorflow')
  if tensorflow is not None and any(map(tensorflow.is_tensor, values)):
    return of_tensorflow()
  return _NUMPY


@functools.cache
def of_tensorflow() -> types.SimpleNamespace:
  """Returns TensorFlow's functions, which must have been imported."""
  tf = sys.modules['tensorflow']

  def float64(values: Any) -> Any:
    if tf.is_tensor(values):
      return tf.cast(values, tf.float64)
    # `tf.cast` would first make float32 of Python's numbers.
    return tf.constant(np.asarray(values, np.float64))

  return types.SimpleNamespace(
    float64=float64,
    where=tf.where,
    equal=tf.equal,
    minimum=tf.minimum,
    maximum=tf.maximum,
    exp=tf.exp,
    expm1=tf.math.expm1,
    log=tf.math.log,
    log1p_exp=tf.math.softplus,
  )
