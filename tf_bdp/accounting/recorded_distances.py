"""Files of recorded distances: one row a round, one column a unit."""

import csv
import os
import zipfile
from typing import NamedTuple, Optional, Union

import numpy as np
import numpy.typing as npt

_Path = Union[str, 'os.PathLike[str]']


class RecordedDistances(NamedTuple):
  """Distances of sampled units over the rounds of a run.

  Attributes:
    distances: ‖Δ‖ in units of the clip norm, [rounds, units].
    panel: Whether column i is the same unit in every round.
    worst_case_distances: The largest distance that clipping allows in each
      round, where the file says.
  """

  distances: np.ndarray
  panel: bool
  worst_case_distances: Optional[np.ndarray] = None


def save(
  path: _Path,
  distances: npt.ArrayLike,
  panel: bool,
  worst_case_distances: Optional[npt.ArrayLike] = None,
) -> None:
  """Writes distances to an .npz file, replacing it in one step.

  Args:
    path: A file name that ends in .npz.
    distances: An array [rounds, units].
    panel: Whether column i is the same unit in every round.
    worst_case_distances: One a round, if they are known.
  """
  if not str(path).endswith('.npz'):
    raise ValueError(f'A file of distances ends in .npz. Found {path}.')
  temporary = f'{path}.part.npz'
  arrays = {'distances': np.asarray(distances), 'panel': np.asarray(panel)}
  if worst_case_distances is not None:
    arrays['worst_case_distances'] = np.asarray(worst_case_distances)
  np.savez_compressed(temporary, **arrays)
  os.replace(temporary, path)


def load(path: _Path) -> RecordedDistances:
  """Reads an .npz or .csv file.

  An .npz file holds `distances`, optionally `panel` and `worst_case_distances`.
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
    worst = contents.get('worst_case_distances')
  if (
    distances.ndim != 2
    or distances.size == 0
    or distances.dtype.kind not in 'fiu'
  ):
    raise ValueError(
      f"'distances' in {path} must be numbers of shape [rounds, units]. "
      f'Found {distances.dtype} of shape {distances.shape}.'
    )
  if worst is not None and worst.shape != (len(distances),):
    raise ValueError(
      f"'worst_case_distances' in {path} must be one number a round. Found "
      f'shape {worst.shape} for {len(distances)} rounds.'
    )
  return RecordedDistances(distances.astype(np.float64), panel, worst)


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
