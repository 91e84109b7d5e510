"""Flags of scripts, made of the options that dataclasses declare."""

import dataclasses
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
# The flags under each heading of `--help`, in this order.
_headings: dict[str, list[str]] = {}


def define(heading: str, kind: type) -> None:
  """Defines a flag for each field of a dataclass of options.

  Args:
    heading: Under which `--help` shows them.
    kind: The dataclass.
  """
  types = typing.get_type_hints(kind)
  for field in dataclasses.fields(kind):
    name, text = options.name_of(field), field.metadata['help']
    choices, value_type = field.metadata['choices'], types[field.name]
    (value_type, *_) = typing.get_args(value_type) or (value_type,)
    flag: flags.Flag
    if choices is not None:
      # Not a copy: what is registered later is a choice, too.
      flag = flags.EnumFlag(name, field.default, text, choices)
    elif value_type is bool:
      flag = flags.BooleanFlag(name, field.default, text)
    else:
      parser = _PARSERS[value_type]()
      serializer = flags.ArgumentSerializer()
      flag = flags.Flag(parser, serializer, name, field.default, text)
    show(heading, flags.DEFINE_flag(flag, module_name=heading))


def show(heading: str, *holders: 'flags.FlagHolder[Any]') -> None:
  """Lets `--help` show flags under a heading."""
  names = [holder.name for holder in holders]
  _headings.setdefault(heading, []).extend(names)


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
  for heading, names in _headings.items():
    parts += [f'\n{heading}:', *(_describe(flags.FLAGS[n]) for n in names)]
  return '\n'.join(parts)


def _describe(flag: flags.Flag) -> str:
  name = f'[no]{flag.name}' if flag.boolean else flag.name
  # absl adds to the help of a flag that can be repeated.
  text = ' '.join(flag.help.split()).replace('.;', ';')
  if flag.default not in (None, []):
    text += f' (default: {flag.default_as_str})'
  return flags.text_wrap(
    f'--{name}: {text}', indent=' ' * 4, firstline_indent='  '
  )
