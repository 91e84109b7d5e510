r"""Trains a private federated model and writes a report about it.

Each round, every client takes part with a certain probability and sends an
update; their mean updates the model. --level says what is protected: at client
level the server adds noise to clipped updates; at instance level each client
adds noise to the gradients of its batches; joint privacy counts that noise for
clients, too. Ordinary and Bayesian differential privacy are accounted for side
by side.

Examples:
  python -m experiments.train
  python -m experiments.train --level=joint --panel_examples=10
  python -m experiments.train --dataset=mnist --partition=shards --clients=1000
  python -m experiments.train --engine=tff --algorithm=fed_avg
  python -m experiments.train --report_dir=reports/run --resume
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from absl import flags as absl_flags

from experiments import flags, startup, tasks
from experiments import run as run_lib
from tf_bdp import options


@dataclasses.dataclass(frozen=True)
class _Output:
  """Where results go."""

  report_dir: str = options.option(
    'reports/run', 'Where results and checkpoints go.'
  )
  resume: bool = options.option(
    False,
    'Go on from the checkpoint in --report_dir. With a panel, --rounds may be '
    'more than before.',
  )
  overwrite: bool = options.option(
    False,
    'Discard a run that --report_dir already holds, unless it is resumed.',
  )


# Headings of --help for the groups of settings.
_HEADINGS = {
  'data': 'data',
  'model': 'model',
  'algorithm': 'training',
  'schedule': 'training',
  'seeds': 'training',
  'privacy': 'privacy',
  'accounting': 'accounting',
}
_GROUPS = {f.name: f.type for f in dataclasses.fields(run_lib.Settings)}
for _name, _heading in _HEADINGS.items():
  flags.define(_heading, _GROUPS[_name])
flags.define('output', _Output)


def main(defaults: Mapping[str, Any]) -> None:
  """Trains, accounts and reports.

  Args:
    defaults: Of the script, which go before those of the data set.
  """
  chosen = absl_flags.FLAGS
  model = chosen.model if chosen['model'].present else defaults.get('model')
  recipe = tasks.recipe(chosen.dataset, chosen.level, model)
  flags.set_defaults({**recipe, **defaults})
  settings = run_lib.Settings(*(flags.read(kind) for kind in _GROUPS.values()))
  output = flags.read(_Output)
  directory = pathlib.Path(output.report_dir)
  plan, progress, _ = run_lib.run(
    settings, directory, output.resume, output.overwrite
  )
  from tf_bdp.reporting import run_report

  notes = []
  if plan.mechanism.local is not None and settings.data.examples_per_client:
    notes.append(
      'An example counts as one at each client that holds it. Where data are '
      'used again to fill more clients, a person who is at several of them is '
      'protected less.'
    )
  summary = run_report.write(
    directory,
    plan,
    progress,
    title=f'Private federated learning on {settings.data.dataset}',
    settings=settings.to_dict(),
    notes=notes,
  )
  print(summary)


def run(
  defaults: Optional[Mapping[str, Any]] = None, levels: Sequence[str] = ()
) -> None:
  """Runs the script.

  Args:
    defaults: Values that flags have if they are not given.
    levels: What --level may be; anything if empty.
  """
  defaults = defaults or {}
  flags.set_defaults(defaults)
  if levels:
    absl_flags.register_validator(
      'level',
      lambda level: level in levels,
      f'This script is for --level={"|".join(levels)}; for others use '
      'experiments.train.',
    )
  startup.start(
    functools.partial(main, defaults),
    'the same command with --resume (and without --overwrite)',
  )


if __name__ == '__main__':
  run()
