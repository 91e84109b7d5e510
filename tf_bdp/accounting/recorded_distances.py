"""Files of recorded distances: one row a round, one column a unit."""

import csv
import os
import zipfile
from typing import NamedTuple, Union

import numpy as np
import numpy.typing as npt

_Path = Union[str, 'os.PathLike[str]']


class RecordedDistances(NamedTuple):
  """Distances of sampled units over the rounds of a run.

  Attributes:
    distances: ‖Δ‖ in units of the clip norm, [rounds, units].
    panel: Whether column i is the same unit in every round.
  """

  distances: np.ndarray
  panel: bool


def save(path: _Path, distances: npt.ArrayLike, panel: bool) -> None:
  """Writes distances to an .npz file, replacing it in one step.

  Args:
    path: A file name that ends in .npz.
    distances: An array [rounds, units].
    panel: Whether column i is the same unit in every round.
  """
  if not str(path).endswith('.npz'):
    raise ValueError(f'A file of distances ends in .npz. Found {path}.')
  temporary = f'{path}.part.npz'
  np.savez_compressed(temporary, distances=np.asarray(distances), panel=panel)
  os.replace(temporary, path)


def load(path: _Path) -> RecordedDistances:
  """Reads an .npz file (`distances`, optionally `panel`) or a .csv file.

  A .csv file has no header; lines that start with # are skipped. It does not
  say whether the units are a panel, so they are taken not to be one.

  Args:
    path: The file's name.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: The file is not one of distances, or its rows are ragged.
  """
  if not os.path.exists(path):
    raise FileNotFoundError(f'There is no file of distances at {path}.')
  extension = os.path.splitext(path)[1].lower()
  if extension == '.csv':
    return RecordedDistances(_load_csv(path), panel=False)
  if extension == '.npz':
    return _load_npz(path)
  raise ValueError(f'A file of distances ends in .npz or .csv. Found {path}.')


def _load_npz(path: _Path) -> RecordedDistances:
  try:
    # Pickled contents could run code; numpy refuses them by default.
    contents = np.load(path)
  except (ValueError, EOFError, zipfile.BadZipFile) as error:
    raise ValueError(f'{path} is not an .npz file: {error}.') from error
  if not isinstance(contents, np.lib.npyio.NpzFile):
    raise ValueError(f'{path} is not an .npz file but a single array.')
  with contents:
    if 'distances' not in contents:
      raise ValueError(
        f"{path} must hold an array 'distances' of shape [rounds, units]. "
        f'Found {sorted(contents)}.'
      )
    distances = contents['distances']
    panel = bool(contents['panel']) if 'panel' in contents else False
  if (
    distances.ndim != 2
    or distances.size == 0
    or distances.dtype.kind not in 'fiu'
  ):
    raise ValueError(
      f"'distances' in {path} must be numbers of shape [rounds, units]. "
      f'Found {distances.dtype} of shape {distances.shape}.'
    )
  return RecordedDistances(distances.astype(np.float64), panel)


def _load_csv(path: _Path) -> np.ndarray:
  rows: list[list[float]] = []
  with open(path, newline='', encoding='utf-8') as file:
    for line, fields in enumerate(csv.reader(file), start=1):
      if not fields or fields[0].lstrip().startswith('#'):
        continue
      try:
        rows.append([float(field) for field in fields])
      except ValueError as error:
        raise ValueError(f'Line {line} of {path}: {error}.') from error
      if len(rows[-1]) != len(rows[0]):
        raise ValueError(
          f'Line {line} of {path} has {len(rows[-1])} distances, the first '
          f'row {len(rows[0])}. Record the same number of units every round.'
        )
  if not rows:
    raise ValueError(f'{path} holds no distances.')
  return np.array(rows)
