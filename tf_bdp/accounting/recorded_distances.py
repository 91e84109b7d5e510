"""Files of recorded distances: a row for each round, a number for each unit.

Rows of a panel are equally long, and column i is the same unit in every round.
Participants make rows of any length, also of none.
"""

import csv
import json
import os
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import numpy.typing as npt

_Path = Union[str, 'os.PathLike[str]']
# An array [rounds, units], or an array for each round.
Rows = Union[np.ndarray, Sequence[np.ndarray]]


class RecordedDistances(NamedTuple):
  """Distances of sampled units over the rounds of a run.

  Attributes:
    distances: ‖Δ‖ in units of the clip norm: an array [rounds, units], or an
      array for each round where they are not equally long.
    panel: Whether column i is the same unit in every round.
    worst_case_distances: The largest distance that clipping allows in each
      round, where the file says.
    population: Whether the panel is everybody.
    worst_case_mixture: Where the worst case of a round is drawn: pairs of a
      probability and a distance, [pairs, 2]; see `BayesianGaussianEvent`.
  """

  distances: Rows
  panel: bool
  worst_case_distances: Optional[np.ndarray] = None
  population: bool = False
  worst_case_mixture: Optional[np.ndarray] = None


def save(
  path: _Path,
  distances: Union[npt.ArrayLike, Sequence[npt.ArrayLike]],
  panel: bool,
  worst_case_distances: Optional[npt.ArrayLike] = None,
  *,
  population: bool = False,
  worst_case_mixture: Optional[npt.ArrayLike] = None,
) -> None:
  """Writes distances to an .npz file, replacing it in one step.

  Args:
    path: A file name that ends in .npz.
    distances: An array [rounds, units], or a list of arrays, one a round.
    panel: Whether column i is the same unit in every round.
    worst_case_distances: One a round, if they are known.
    population: Whether the panel is everybody.
    worst_case_mixture: As of `RecordedDistances`.
  """
  if not str(path).endswith('.npz'):
    raise ValueError(f'A file of distances ends in .npz. Found {path}.')
  temporary = f'{path}.part.npz'
  arrays: dict[str, Any] = {'panel': panel, 'population': population}
  rows = [np.asarray(row, np.float64) for row in distances]  # type: ignore
  lengths = [row.size for row in rows]
  if len(set(lengths)) == 1 and lengths[0]:
    arrays['distances'] = np.stack(rows)
  else:
    arrays['distances'] = np.concatenate([np.zeros(0), *rows])
    arrays['row_lengths'] = np.array(lengths, np.int64)
  if worst_case_distances is not None:
    arrays['worst_case_distances'] = worst_case_distances
  if worst_case_mixture is not None:
    arrays['worst_case_mixture'] = worst_case_mixture
  np.savez_compressed(temporary, **arrays)
  os.replace(temporary, path)


def load(path: _Path) -> RecordedDistances:
  """Reads an .npz, .json or .csv file.

  An .npz file holds `distances` [rounds, units]; or, if rounds measured
  different numbers of units, all distances in a row and `row_lengths`, how many
  each round has. Optionally `panel`, `population`, `worst_case_distances` (one
  a round) and `worst_case_mixture`.

  A .json file holds an object of the same names, in which `distances` is a list
  of lists of any lengths.

  A .csv file has a line for each round, all equally long, and no header; lines
  that start with # are skipped. It does not say whether the units are a panel,
  so they are taken not to be one.

  Args:
    path: The file's name.

  Raises:
    FileNotFoundError: There is no such file.
    ValueError: The file is not one of distances.
  """
  if not os.path.exists(path):
    raise FileNotFoundError(f'There is no file of distances at {path}.')
  extension = os.path.splitext(path)[1].lower()
  if extension == '.csv':
    return RecordedDistances(_load_csv(path), panel=False)
  if extension == '.npz':
    return _recorded(path, _load_npz(path))
  if extension == '.json':
    return _recorded(path, _load_json(path))
  raise ValueError(
    f'A file of distances ends in .npz, .json or .csv. Found {path}.'
  )


def _load_npz(path: _Path) -> dict[str, Any]:
  try:
    # Pickled contents could run code; numpy refuses them by default.
    contents = np.load(path)
    if not isinstance(contents, np.lib.npyio.NpzFile):
      raise ValueError('it is a single array')
    with contents:
      arrays = {name: contents[name] for name in contents}
  except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
    raise ValueError(f'{path} is not an .npz file: {error}.') from error
  if 'row_lengths' not in arrays or 'distances' not in arrays:
    return arrays
  distances, lengths = arrays['distances'], arrays['row_lengths']
  if (
    lengths.dtype.kind not in 'iu'
    or lengths.ndim != 1
    or distances.ndim != 1
    or np.any(lengths < 0)
    or np.sum(lengths) != distances.size
  ):
    raise ValueError(
      f"'row_lengths' in {path} must say how many of 'distances' each round "
      f'has. Found {lengths.dtype} of shape {lengths.shape} for distances of '
      f'shape {distances.shape}.'
    )
  rows = np.split(distances, np.cumsum(lengths)[:-1])
  return {**arrays, 'distances': rows if lengths.size else []}


def _load_json(path: _Path) -> dict[str, Any]:
  try:
    with open(path, encoding='utf-8') as file:
      contents = json.load(file)
    if not isinstance(contents, dict):
      raise ValueError('it holds no object')
    distances = contents.pop('distances', None)
    arrays: dict[str, Any] = {k: np.array(v) for k, v in contents.items()}
    if distances is not None:
      if not isinstance(distances, list):
        raise ValueError("'distances' is no list of lists")
      arrays['distances'] = [np.array(row) for row in distances]
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(f'{path} is not a .json file: {error}.') from error
  return arrays


def _recorded(path: _Path, contents: dict[str, Any]) -> RecordedDistances:
  """Returns what a file holds; raises ValueError for what it should not."""
  if 'distances' not in contents:
    raise ValueError(
      f"{path} must hold an array 'distances' of shape [rounds, units]. "
      f'Found {sorted(contents)}.'
    )
  flags = {}
  for name in ('panel', 'population'):
    flags[name] = contents.get(name, np.array(False))
    if flags[name].dtype.kind not in 'biu' or flags[name].size != 1:
      raise ValueError(f'{name!r} in {path} must be true or false.')
  distances = _checked_rows(path, contents['distances'])
  worst = contents.get('worst_case_distances')
  if worst is not None and (
    worst.shape != (len(distances),) or worst.dtype.kind not in 'fiu'
  ):
    raise ValueError(
      f"'worst_case_distances' in {path} must be one number a round. Found "
      f'shape {worst.shape} for {len(distances)} rounds.'
    )
  mixture = contents.get('worst_case_mixture')
  if mixture is not None and (
    mixture.shape[1:] != (2,) or mixture.dtype.kind not in 'fiu'
  ):
    raise ValueError(
      f"'worst_case_mixture' in {path} must be pairs of a probability and a "
      f'distance. Found shape {mixture.shape}.'
    )
  return RecordedDistances(
    distances,
    bool(flags['panel']),
    worst,
    bool(flags['population']),
    mixture,
  )


def _checked_rows(path: _Path, distances: Rows) -> Rows:
  """Returns rows of float64, as one array if they are equally long."""
  rows = [distances] if isinstance(distances, np.ndarray) else distances
  wanted = 2 if isinstance(distances, np.ndarray) else 1
  for row in rows:
    if row.ndim != wanted or (row.size and row.dtype.kind not in 'fiu'):
      raise ValueError(
        f"'distances' in {path} must be numbers of shape [rounds, units]. "
        f'Found {row.dtype} of shape {row.shape}.'
      )
  if not sum(row.size for row in rows):
    raise ValueError(f"{path} holds no distances in 'distances'.")
  if isinstance(distances, np.ndarray):
    return distances.astype(np.float64)
  rows = [row.astype(np.float64) for row in rows]
  if len({row.size for row in rows}) == 1:
    return np.stack(rows)
  return rows


def _load_csv(path: _Path) -> np.ndarray:
  rows: list[list[float]] = []
  with open(path, newline='', encoding='utf-8') as file:
    reader = csv.reader(file)
    try:
      lines = list(enumerate(reader, start=1))
    except csv.Error as error:
      raise ValueError(f'{path} is not a .csv file: {error}.') from error
  for line, fields in lines:
    if not fields or fields[0].lstrip().startswith('#'):
      continue
    try:
      rows.append([float(field) for field in fields])
    except ValueError as error:
      raise ValueError(f'Line {line} of {path}: {error}.') from error
    if len(rows[-1]) != len(rows[0]):
      raise ValueError(
        f'Line {line} of {path} has {len(rows[-1])} distances, the first '
        f'row {len(rows[0])}. Record the same number of units every round, or '
        'use an .npz or .json file.'
      )
  if not rows:
    raise ValueError(f'{path} holds no distances.')
  return np.array(rows)
