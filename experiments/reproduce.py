r"""Reproduces the tables and figures of the paper.

Runs what is missing, resumes what was interrupted, and writes one CSV file for
each table and figure, PNG figures, and a page that sets our figures beside the
paper's. Hyper-parameters are in experiments/hyperparameters.

Examples:
  python -m experiments.reproduce --table=2 --data_dir=~/tensorflow_datasets
  python -m experiments.reproduce --all --aptos_dir=~/aptos2019
  python -m experiments.reproduce --table=2 --clients=100 --tune
  python -m experiments.reproduce --figure=2 --task=mnist_iid
  python -m experiments.reproduce --all --tiny
"""

import functools
import pathlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from absl import flags as absl_flags

from experiments import flags, startup

if TYPE_CHECKING:
  from experiments import jobs

_TABLE = absl_flags.DEFINE_multi_enum(
  'table', [], ['1', '2', '3', '4'], 'Tables to reproduce.'
)
_FIGURE = absl_flags.DEFINE_multi_enum(
  'figure', [], ['1', '2'], 'Figures to reproduce; not with --tune.'
)
_ALL = absl_flags.DEFINE_bool('all', False, 'All tables and figures.')
_CLIENTS = absl_flags.DEFINE_multi_integer(
  'clients', [], 'In Tables I to III, only these numbers of clients.'
)
_TASK = absl_flags.DEFINE_multi_enum(
  'task',
  [],
  ['aptos', 'mnist_iid', 'mnist_shards'],
  'In Table IV and the figures, only these.',
)
_TUNE = absl_flags.DEFINE_bool(
  'tune',
  False,
  'Instead of the tables, run what was tried for their hyper-parameters, on '
  'validation data.',
)
_SEEDS = absl_flags.DEFINE_integer(
  'seeds', 3, 'Runs of each cell with 100 clients; others have one.'
)
_TINY = absl_flags.DEFINE_bool(
  'tiny',
  False,
  'Few rounds and clients, to see that everything works; without --aptos_dir '
  'what needs APTOS is left out.',
)
_DATA_DIR = absl_flags.DEFINE_string(
  'data_dir', None, 'Where TensorFlow Datasets has MNIST, or puts it.'
)
_APTOS_DIR = absl_flags.DEFINE_string(
  'aptos_dir',
  None,
  "Kaggle's folder of APTOS 2019, with train.csv and train_images.",
)
_RESNET50_WEIGHTS = absl_flags.DEFINE_string(
  'resnet50_weights',
  'imagenet',
  'A file with the weights of ResNet-50 without its top, or imagenet to '
  'download them.',
)
_CACHE_DIR = absl_flags.DEFINE_string(
  'cache_dir',
  '~/.cache/tf_bdp/features',
  'Where the features of images are kept.',
)
_WORK_DIR = absl_flags.DEFINE_string(
  'work_dir',
  None,
  'Where runs are kept; by default reports/reproduce, with --tiny '
  'reports/tiny/runs.',
)
_RESULTS_DIR = absl_flags.DEFINE_string(
  'results_dir',
  None,
  'Where tables, figures and the page go; by default results, with --tiny '
  'reports/tiny/results.',
)
flags.show('what', _TABLE, _FIGURE, _ALL, _CLIENTS, _TASK, _TUNE, _SEEDS, _TINY)
flags.show('data', _DATA_DIR, _APTOS_DIR, _RESNET50_WEIGHTS, _CACHE_DIR)
flags.show('output', _WORK_DIR, _RESULTS_DIR)


class _Cell(NamedTuple):
  """A cell of a table or a panel of a figure, and what runs and writes it."""

  name: str
  is_aptos: bool
  write: Callable[[], Any]


def main() -> None:
  """Runs what is asked for."""
  from experiments import jobs, results_page

  work_dir, results_dir = 'reports/reproduce', 'results'
  if _TINY.value:
    work_dir, results_dir = 'reports/tiny/runs', 'reports/tiny/results'
  places = jobs.Places(
    _DATA_DIR.value,
    _APTOS_DIR.value,
    _RESNET50_WEIGHTS.value,
    _CACHE_DIR.value,
    pathlib.Path(_WORK_DIR.value or work_dir),
  )
  results = pathlib.Path(_RESULTS_DIR.value or results_dir)
  cells = _possible(list(_cells(places, results)))
  results.mkdir(parents=True, exist_ok=True)
  start = time.monotonic()
  for done, cell in enumerate(cells):
    left = (len(cells) - done) * (time.monotonic() - start) / max(done, 1)
    hint = f', about {left / 60:.0f} min left' if left > 60 else ''
    print(f'Cell {done + 1} of {len(cells)}{hint}: {cell.name}', flush=True)
    cell.write()
  print(f'Page: {results_page.write(results)}')


def _cells(places: 'jobs.Places', results: pathlib.Path) -> Iterator[_Cell]:
  """Yields what is asked for."""
  from experiments import figures, paper, results_page, tables, tuning

  every, tiny = _ALL.value, _TINY.value
  for table in paper.TITLES:
    wanted = every or str(table) in _TABLE.value
    chosen = tables.cells_of(table, _CLIENTS.value, _TASK.value)
    for cell in chosen if wanted else ():
      arguments = (table, [cell], places, results)
      if _TUNE.value:
        write = functools.partial(tuning.write, *arguments, tiny)
      else:
        write = functools.partial(tables.write, *arguments, _SEEDS.value, tiny)
      dataset = tables.settings_of(table, cell, 'private')['dataset']
      name = f'Table {results_page.name_of(table, cell)}'
      yield _Cell(name, dataset == 'aptos', write)
  for figure in results_page.FIGURES:
    wanted = (every or str(figure) in _FIGURE.value) and not _TUNE.value
    for panel, title in figures.PANELS.items() if wanted else ():
      if not _TASK.value or panel in _TASK.value:
        yield _Cell(
          f'Figure {figure}, {title}',
          panel == 'aptos',
          functools.partial(
            figures.write, figure, places, results, [panel], tiny
          ),
        )


def _possible(cells: list[_Cell]) -> list[_Cell]:
  """Returns the cells whose data are there.

  Raises:
    ValueError: There are none, or they are missing and this is no tiny pass.
  """
  if not cells:
    raise ValueError(
      'Give --table=N, --figure=N (not with --tune) or --all, and only '
      '--clients and --task that they have.'
    )
  folder = _APTOS_DIR.value
  if folder and pathlib.Path(folder, 'train.csv').expanduser().exists():
    return cells
  without = [cell for cell in cells if cell.is_aptos]
  others = [cell for cell in cells if not cell.is_aptos]
  if not without:
    return cells
  names = '; '.join(cell.name for cell in without)
  if folder or not _TINY.value or not others:
    raise ValueError(
      f"Give --aptos_dir=DIR, Kaggle's folder of APTOS 2019 with train.csv and "
      f'train_images, or leave out what needs it ({names}). Found {folder}.'
    )
  print(f'Left out, as APTOS 2019 is not given (--aptos_dir): {names}.')
  return others


if __name__ == '__main__':
  startup.start(main, 'the same command')
