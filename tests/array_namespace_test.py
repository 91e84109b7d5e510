"""Tests of functions that fit numbers, arrays and tensors."""

import subprocess
import sys
import textwrap

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tf_bdp import array_namespace

_numbers = st.floats(-30, 30)


@pytest.mark.parametrize(
  'values', [(1,), (1.5, [2.0]), (np.ones(3), None), (), (True, 'a')]
)
def test_what_is_no_tensor_gets_numpys_functions(values):
  assert array_namespace.of(*values).where is np.where


@pytest.mark.parametrize('place', range(3))
def test_one_tensor_is_enough_for_tensorflows(place):
  values = [1.5, np.ones(2), [3]]
  values[place] = tf.constant(1.0)
  assert array_namespace.of(*values) is array_namespace.of_tensorflow()
  values[place] = tf.Variable(1.0)
  assert array_namespace.of(*values) is array_namespace.of_tensorflow()


def test_both_have_the_same_functions():
  ours, theirs = array_namespace.of(1.0), array_namespace.of_tensorflow()
  assert vars(ours).keys() == vars(theirs).keys()


@hypothesis.given(_numbers, _numbers)
def test_functions_of_one_name_give_the_same(one, other):
  xp, tensors = array_namespace.of(one), array_namespace.of_tensorflow()
  x, y = np.float64(one), np.float64(other)
  s, t = tf.constant(x), tf.constant(y)
  pairs = [
    (xp.minimum(x, y), tensors.minimum(s, t)),
    (xp.maximum(x, y), tensors.maximum(s, t)),
    (xp.where(x > y, x, y), tensors.where(s > t, s, t)),
    (xp.exp(x), tensors.exp(s)),
    (xp.expm1(x), tensors.expm1(s)),
    (xp.log(abs(x) + 1), tensors.log(abs(s) + 1)),
    (xp.log1p_exp(x), tensors.log1p_exp(s)),
  ]
  for wanted, found in pairs:
    assert found.dtype == tf.float64
    np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-300)
  assert bool(tensors.equal(s, t)) == bool(xp.equal(x, y)) == (one == other)
  assert bool(tensors.equal(s, s))


@pytest.mark.parametrize('number', [0.1, 1 / 3, 7, True, np.float32(0.1)])
def test_numbers_become_float64_without_a_detour_by_float32(number):
  for functions in (array_namespace.of(1.0), array_namespace.of_tensorflow()):
    found = np.asarray(functions.float64(number))
    assert found.dtype == np.float64
    assert found == np.float64(number)


@pytest.mark.parametrize('dtype', [tf.float32, tf.int32, tf.float64])
def test_tensors_become_float64(dtype):
  tensor = tf.constant([1, 2], dtype)
  found = array_namespace.of(tensor).float64(tensor)
  assert found.dtype == tf.float64
  np.testing.assert_array_equal(found, [1.0, 2.0])


def test_numbers_are_equal_in_the_graphs_that_tff_makes():
  # There `==` compares objects.
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    tensor = tf.constant(1)
    equal = array_namespace.of(tensor).equal(tensor, 1)
    assert session.run(equal)


def test_tensorflow_is_not_imported_for_numbers():
  program = """
    import sys
    from tf_bdp import array_namespace
    assert array_namespace.of(1.5, [2.0]).maximum(1.5, 2.0) == 2.0
    assert 'tensorflow' not in sys.modules
  """
  subprocess.run(
    [sys.executable, '-c', textwrap.dedent(program)], check=True, timeout=60
  )
