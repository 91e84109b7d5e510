"""Seeded runs of every level do what they did when they were recorded.

`runs.json` was first written by the release before the redesign of November
2026, with which the redesign agreed. A change that is meant to alter figures
records them anew:

  python -m tests.golden.golden_test
"""

import json
import pathlib
import re

import pytest

from experiments import run
from tf_bdp.reporting import run_report

_FILE = pathlib.Path(__file__).with_name('runs.json')
_RUNS = json.loads(_FILE.read_text('utf-8'))
_NUMBER = re.compile(r'-?\d+\.?\d*(?:e[-+]?\d+)?')


def _run(settings, directory):
  # Draws were of `seed` when the runs were recorded.
  seeded = {'sampling_seed': settings.get('seed', 0), **settings}
  plan, progress, _ = run.run(run.Settings.of(**seeded), directory)
  rows = [
    {k: None if v == '' else v for k, v in row.items() if k != 'seconds'}
    for row in progress.rows
  ]
  statement: list[str] = []
  for unit in plan.mechanism.units if plan.mechanism.noise_multiplier else ():
    privacy = run_report.privacy_of(unit, plan, progress)
    statement += [
      *([''] if statement else []),
      *privacy.statement().split('\n'),
    ]
  return {'settings': settings, 'rows': rows, 'statement': statement}


@pytest.mark.parametrize('name', _RUNS)
def test_a_run_has_the_metrics_and_the_statement_that_it_had(name, tmp_path):
  wanted = _RUNS[name]
  found = _run(wanted['settings'], tmp_path)
  assert len(found['rows']) == len(wanted['rows'])
  for row, old in zip(found['rows'], wanted['rows']):
    # Another processor sums in another order: an image may change its class.
    accuracy, old_accuracy = row.pop('accuracy'), dict(old).pop('accuracy')
    assert accuracy == pytest.approx(old_accuracy, abs=0.02)
    old = {key: value for key, value in old.items() if key != 'accuracy'}
    # The grid of an exact figure follows the distances: a last digit of one
    # can make it another grid, with other rounding up.
    assert row == pytest.approx(old, rel=3e-3)
  text, old_text = ('\n'.join(r['statement']) for r in (found, wanted))
  assert _NUMBER.sub('#', text) == _NUMBER.sub('#', old_text)
  numbers, old_numbers = (
    [float(number) for number in _NUMBER.findall(part)]
    for part in (text, old_text)
  )
  assert numbers == pytest.approx(old_numbers, rel=5e-3)


def _record():
  import tempfile

  runs = {}
  for name, golden in _RUNS.items():
    with tempfile.TemporaryDirectory() as directory:
      runs[name] = _run(golden['settings'], pathlib.Path(directory))
  _FILE.write_text(json.dumps(runs, indent=1) + '\n', 'utf-8')


if __name__ == '__main__':
  _record()
