"""Tests of settings whose fields say what they are for."""

import dataclasses
from typing import Optional

import pytest

from tf_bdp import options


@dataclasses.dataclass(frozen=True)
class _Colours:
  name: str = options.option(
    'red', 'Which colour.', choices=('red', 'blue'), flag='colour'
  )
  border: Optional[str] = options.option(
    None, 'Of the border; none by default.', choices=('thin', 'thick')
  )
  width: float = options.option(1.5, 'How wide.')

  def __post_init__(self):
    options.check_choices(self)


@dataclasses.dataclass(frozen=True)
class _Sizes:
  size: int = options.option(3, 'How many.')


def test_a_field_keeps_its_default_and_what_it_is_for():
  name, border, width = dataclasses.fields(_Colours)
  assert _Colours() == _Colours('red', None, 1.5)
  assert name.metadata['help'] == 'Which colour.'
  assert name.metadata['choices'] == ('red', 'blue')
  assert width.metadata['choices'] is None
  found = [options.name_of(field) for field in (name, border, width)]
  assert found == ['colour', 'border', 'width']


def test_a_plain_field_goes_by_its_own_name():
  @dataclasses.dataclass
  class Plain:
    depth: int = 1

  (field,) = dataclasses.fields(Plain)
  assert options.name_of(field) == 'depth'
  options.check_choices(Plain())
  assert options.to_flat(Plain()) == {'depth': 1}


def test_a_value_that_is_none_of_the_choices_is_refused_by_its_flag():
  sentence = r"colour must be one of \('red', 'blue'\). Found 'green'"
  with pytest.raises(ValueError, match=sentence):
    _Colours('green')
  with pytest.raises(ValueError, match=r"border must be one of .* Found 'no'"):
    _Colours(border='no')


def test_none_is_a_choice_only_where_it_is_the_default():
  assert _Colours(border=None).border is None
  with pytest.raises(ValueError, match=r'colour must be one of .* Found None'):
    _Colours(None)


def test_groups_become_one_list_of_settings_and_back():
  groups = _Colours('blue', 'thin', 2.0), _Sizes(7)
  flat = options.to_flat(*groups)
  assert flat == {'colour': 'blue', 'border': 'thin', 'width': 2.0, 'size': 7}
  assert options.from_flat(_Colours, flat) == groups[0]
  assert options.from_flat(_Sizes, flat) == groups[1]


def test_what_is_left_out_has_its_default_and_is_checked():
  assert options.from_flat(_Colours, {'size': 7}) == _Colours()
  with pytest.raises(ValueError, match='colour must be one of'):
    options.from_flat(_Colours, {'colour': 'green'})
