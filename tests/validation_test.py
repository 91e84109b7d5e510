"""Tests of the checks of arguments: what passes, and the sentences."""

import math

import numpy as np
import pytest

from tf_bdp import validation


@pytest.mark.parametrize('value', [1e-300, 1, np.float32(0.5), 1e300])
def test_positive_numbers_pass(value):
  result = validation.check_positive('x', value)
  assert result == value
  assert type(result) is float


@pytest.mark.parametrize('value', [0, -1, math.nan, math.inf])
def test_other_numbers_are_not_positive(value):
  with pytest.raises(
    ValueError, match=f'x must be positive and finite. Found {value}.'
  ):
    validation.check_positive('x', value)


@pytest.mark.parametrize('value', [0, 0.0, 1e-300, np.float32(0.5), 1e300])
def test_numbers_that_are_not_negative_pass(value):
  result = validation.check_not_negative('x', value)
  assert result == value
  assert type(result) is float


@pytest.mark.parametrize('value', [-1e-300, -1, math.nan, math.inf])
def test_negative_numbers_and_infinite_ones_are_refused(value):
  with pytest.raises(
    ValueError, match=f'x must be non-negative and finite. Found {value}.'
  ):
    validation.check_not_negative('x', value)


@pytest.mark.parametrize('value', [1, 7.0, np.int64(3)])
def test_positive_integers_pass(value):
  result = validation.check_positive_integer('x', value)
  assert result == value
  assert type(result) is int


@pytest.mark.parametrize('value', [0, -1, 1.5, True, '3', math.nan, math.inf])
def test_others_are_no_positive_integers(value):
  with pytest.raises(ValueError, match=r'x must be a positive integer. Found '):
    validation.check_positive_integer('x', value)


@pytest.mark.parametrize('value', [0, 1, 0.5, 1e-300])
def test_probabilities_pass(value):
  assert validation.check_probability('x', value) == value


@pytest.mark.parametrize('value', [-1e-9, 1 + 1e-9, math.nan, math.inf])
def test_others_are_no_probabilities(value):
  with pytest.raises(ValueError, match=r'x must be between 0 and 1. Found '):
    validation.check_probability('x', value)


@pytest.mark.parametrize('value', [0, 1, -1e-5, 2, math.nan])
def test_delta_lies_strictly_between_zero_and_one(value):
  with pytest.raises(
    ValueError, match=r'x must be above 0 and below 1. Found '
  ):
    validation.check_delta('x', value)
  assert validation.check_delta('x', 1e-300) == 1e-300


def test_a_choice_is_one_of_the_choices():
  assert validation.check_choice('x', 'a', ('a', 'b')) == 'a'
  with pytest.raises(ValueError, match=r"one of \('a', 'b'\). Found 'c'"):
    validation.check_choice('x', 'c', ('a', 'b'))


def test_orders_become_a_tuple_of_integers():
  orders = validation.check_orders(np.array([1.0, 2.0, 8.0]))
  assert orders == (1, 2, 8)
  assert all(type(order) is int for order in orders)


@pytest.mark.parametrize(
  'orders', [[0], [1, -2], [1.5], [math.nan], [math.inf], ['1'], [True]]
)
def test_others_are_no_orders(orders):
  with pytest.raises(ValueError, match='orders must be positive integers'):
    validation.check_orders(orders)


@pytest.mark.parametrize('orders', [[], 3, [[1, 2]]])
def test_orders_are_a_list(orders):
  with pytest.raises(ValueError, match='orders must be a non-empty list'):
    validation.check_orders(orders)


def test_orders_increase():
  with pytest.raises(ValueError, match='orders must be in increasing order'):
    validation.check_orders([1, 3, 2])
  with pytest.raises(ValueError, match='none twice'):
    validation.check_orders([1, 2, 2])


def test_squared_distances_become_float64():
  values = validation.check_squared_distances('x', [0, 1, 2])
  assert values.dtype == np.float64


@pytest.mark.parametrize(
  'values, sentence',
  [
    ([0.1, math.nan], 'Found 1 NaN of 2, the first at index 1.'),
    ([math.inf, 1.0, math.inf], 'Found 2 infinite of 3, the first at index 0.'),
    ([1.0, -0.1], 'Found 1 negative of 2, the first at index 1.'),
    ([1e201], 'Found 1 too large of 1, the first at index 0.'),
  ],
)
def test_what_is_wrong_with_distances_is_said(values, sentence):
  with pytest.raises(ValueError, match=sentence):
    validation.check_squared_distances('x', values)
