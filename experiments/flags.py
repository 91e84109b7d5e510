"""Flags of scripts, made of the options that dataclasses declare."""

import dataclasses
import sys
import typing
from collections.abc import Mapping
from typing import Any, Optional, TypeVar

from absl import flags

from tf_bdp import options

_Group = TypeVar('_Group')
_PARSERS = {
  str: flags.ArgumentParser,
  int: flags.IntegerParser,
  float: flags.FloatParser,
}
# The groups of `--help`, in this order.
_groups: dict[str, None] = {}


def define(group: str, kind: type) -> None:
  """Defines a flag for each field of a dataclass of options.

  Args:
    group: Under which heading `--help` shows them.
    kind: The dataclass.
  """
  _groups[group] = None
  types = typing.get_type_hints(kind)
  for field in dataclasses.fields(kind):
    name, text = options.name_of(field), field.metadata['help']
    choices, value_type = field.metadata['choices'], types[field.name]
    (value_type, *_) = typing.get_args(value_type) or (value_type,)
    flag: flags.Flag
    if choices is not None:
      flag = flags.EnumFlag(name, field.default, text, list(choices))
    elif value_type is bool:
      flag = flags.BooleanFlag(name, field.default, text)
    else:
      parser = _PARSERS[value_type]()
      serializer = flags.ArgumentSerializer()
      flag = flags.Flag(parser, serializer, name, field.default, text)
    flags.DEFINE_flag(flag, module_name=group)


def read(kind: type[_Group]) -> _Group:
  """Makes a group of options from the flags."""
  names = [options.name_of(field) for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
  values = {name: flags.FLAGS[name].value for name in names}
  return options.from_flat(kind, values)


def set_defaults(defaults: Mapping[str, Any]) -> None:
  """Changes the values that flags have if they are not given."""
  for name, value in defaults.items():
    flags.FLAGS.set_default(name, value)


def help_text(description: Optional[str]) -> str:
  """Returns what `--help` shows: a description, then the flags in groups."""
  parts = [(description or '').rstrip()]
  parts += [flags.FLAGS.module_help(group) for group in _groups]
  return '\n'.join(parts)


def show_help_if_asked(arguments: list[str]) -> None:
  """Prints the help in groups, and ends the process, if --help is given."""
  if {'--help', '-help', '-h', '-?', '--helpshort'} & set(arguments):
    print(help_text(sys.modules['__main__'].__doc__))
    sys.exit(0)
