"""Checkpoints: one file that is whole or not there, without pickles."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_CONTENTS = '__contents__'


class Checkpoint(NamedTuple):
  """Arrays, and plain data that JSON can hold."""

  arrays: dict[str, np.ndarray]
  contents: dict[str, Any]


def save(
  path: pathlib.Path,
  arrays: Mapping[str, np.ndarray],
  contents: Mapping[str, Any],
) -> None:
  """Replaces the file in one step, once it is on the disk.

  A process that is killed at any moment leaves the old file or the new one.
  """
  text = json.dumps(contents).encode()
  temporary = path.with_name(path.name + '.part')
  with open(temporary, 'wb') as file:
    np.savez(file, **arrays, **{_CONTENTS: np.frombuffer(text, np.uint8)})
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)
  folder = os.open(path.parent, os.O_RDONLY)
  try:
    os.fsync(folder)
  finally:
    os.close(folder)


def load(path: pathlib.Path) -> Checkpoint:
  """Reads a file that `save` wrote; raises ValueError if it is not one."""
  try:
    with np.load(path, allow_pickle=False) as file:
      arrays = {name: file[name] for name in file.files}
    contents = json.loads(arrays.pop(_CONTENTS).tobytes())
  except FileNotFoundError:
    raise
  except Exception as error:  # A damaged file makes zipfile raise anything.
    raise ValueError(f'{path} is not a checkpoint: {error}.') from error
  return Checkpoint(arrays, contents)


def check_settings(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
  """Raises ValueError, naming what differs, unless the settings are equal."""
  plain = json.loads(json.dumps(here))
  different = [
    f'{name}: {saved.get(name)!r} in the checkpoint, {plain.get(name)!r} here'
    for name in sorted({*saved, *plain})
    if saved.get(name) != plain.get(name)
  ]
  if different:
    raise ValueError(
      'The checkpoint was made with other settings. Give the same ones, or '
      f'another directory. {"; ".join(different)}.'
    )
