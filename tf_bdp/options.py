"""Settings as frozen dataclasses whose fields say what they are for.

A field made by `option` holds its default, its help text and its choices in one
place. Scripts make a flag from it (see `experiments.flags`); checkpoints and
reports list it by name.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Optional, TypeVar

from tf_bdp import validation

_Group = TypeVar('_Group')


def option(
  default: Any,
  help_text: str,
  *,
  choices: Optional[Collection[str]] = None,
  flag: Optional[str] = None,
) -> Any:
  """Returns a dataclass field for a setting.

  Args:
    default: Its value if it is left out.
    help_text: What it does, for `--help`.
    choices: The values that it may have; `check_choices` refuses others.
    flag: The setting's name in scripts and checkpoints, if that is not the name
      of the field.
  """
  return dataclasses.field(
    default=default,
    metadata={'help': help_text, 'choices': choices, 'flag': flag},
  )


def name_of(field: 'dataclasses.Field[Any]') -> str:
  """Returns the name of a field's setting in scripts and checkpoints."""
  return field.metadata.get('flag') or field.name


def check_choices(group: Any) -> None:
  """Raises ValueError for a value that is not among its field's choices."""
  for field in dataclasses.fields(group):
    choices = field.metadata.get('choices')
    value = getattr(group, field.name)
    if choices is not None and not (value is None and field.default is None):
      validation.check_choice(name_of(field), value, tuple(choices))


def to_flat(*groups: Any) -> dict[str, Any]:
  """Returns the settings of all groups by name."""
  return {
    name_of(field): getattr(group, field.name)
    for group in groups
    for field in dataclasses.fields(group)
  }


def from_flat(kind: type[_Group], values: Mapping[str, Any]) -> _Group:
  """Makes a group from values by name; ignores names of other groups."""
  found = {
    field.name: values[name_of(field)]
    for field in dataclasses.fields(kind)  # type: ignore[arg-type]
    if name_of(field) in values
  }
  return kind(**found)
