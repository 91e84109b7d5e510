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

import pathlib
import sys

from absl import app, flags

from experiments import startup

_TABLE = flags.DEFINE_multi_enum(
  'table', [], ['1', '2', '3', '4'], 'Tables to reproduce.'
)
_FIGURE = flags.DEFINE_multi_enum(
  'figure', [], ['1', '2'], 'Figures to reproduce.'
)
_TUNE = flags.DEFINE_bool(
  'tune',
  False,
  'Instead of the tables, run what was tried for their hyper-parameters, on '
  'validation data.',
)
_ALL = flags.DEFINE_bool('all', False, 'All of them.')
_CLIENTS = flags.DEFINE_multi_integer(
  'clients', [], 'In Tables I to III, only these numbers of clients.'
)
_TASK = flags.DEFINE_multi_enum(
  'task',
  [],
  ['aptos', 'mnist_iid', 'mnist_shards'],
  'In Table IV and the figures, only these.',
)
_SEEDS = flags.DEFINE_integer(
  'seeds', 3, 'Runs of each cell with 100 clients; others have one.'
)
_DATA_DIR = flags.DEFINE_string(
  'data_dir', None, 'Where TensorFlow Datasets has MNIST, or puts it.'
)
_APTOS_DIR = flags.DEFINE_string(
  'aptos_dir', None, "Kaggle's folder of APTOS 2019."
)
_RESNET50_WEIGHTS = flags.DEFINE_string(
  'resnet50_weights', 'imagenet', 'A file, or imagenet to download them.'
)
_CACHE_DIR = flags.DEFINE_string(
  'cache_dir', '~/.cache/tf_bdp/features', 'Where features are kept.'
)
_WORK_DIR = flags.DEFINE_string(
  'work_dir', 'reports/reproduce', 'Where runs are kept.'
)
_RESULTS_DIR = flags.DEFINE_string(
  'results_dir', 'results', 'Where tables, figures and the page go.'
)
_TINY = flags.DEFINE_bool(
  'tiny', False, 'Few rounds and clients, to see that everything works.'
)


def main(argv: list[str]) -> None:
  """Runs what is asked for."""
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected arguments: {argv[1:]}.')
  tables, figures = _TABLE.value, _FIGURE.value
  if _ALL.value:
    tables, figures = ['1', '2', '3', '4'], ['1', '2']
  if _TUNE.value:
    figures = []
  if not tables and not figures:
    raise app.UsageError(
      'Give --table=N, --figure=N (not with --tune) or --all.'
    )
  try:
    _reproduce([int(t) for t in tables], [int(f) for f in figures])
  except (ValueError, OSError, RuntimeError) as error:
    sys.exit(f'Error: {error}')


def _reproduce(tables: list[int], figures: list[int]) -> None:
  from experiments import figures as figures_lib
  from experiments import jobs, results_page, tuning
  from experiments import tables as tables_lib

  places = jobs.Places(
    _DATA_DIR.value,
    _APTOS_DIR.value,
    _RESNET50_WEIGHTS.value,
    _CACHE_DIR.value,
    pathlib.Path(_WORK_DIR.value),
  )
  results = pathlib.Path(_RESULTS_DIR.value)
  results.mkdir(parents=True, exist_ok=True)
  for table in tables:
    cells = tables_lib.cells_of(table, _CLIENTS.value, _TASK.value)
    if _TUNE.value:
      tuning.write(table, cells, places, results, _TINY.value)
    else:
      tables_lib.write(table, cells, places, results, _SEEDS.value, _TINY.value)
  for figure in figures:
    figures_lib.write(figure, places, results, _TASK.value, _TINY.value)
  page = results_page.write(results)
  print(f'Page: {page}')


if __name__ == '__main__':
  startup.start(main)
