"""Flags made of options, and the help that the scripts show."""

import re
import subprocess
import sys
from typing import NamedTuple

import pytest
from absl import flags as absl_flags
from absl.testing import flagsaver

from experiments import flags, run
from tests.experiments import scripts
from tf_bdp import options

_GROUPS = ('data', 'model', 'training', 'privacy', 'accounting', 'output')


class _Help(NamedTuple):
  headings: list
  names: list


def _help(script):
  """Returns what a script's help has, which it shows without TensorFlow."""
  result = subprocess.run(
    [
      sys.executable,
      '-X',
      'importtime',
      '-m',
      f'experiments.{script}',
      '--help',
    ],
    cwd=scripts.ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  assert not re.search(r'\|\s+(tensorflow|keras|jax)\b', result.stderr)
  names = re.findall(r'^  --(?:\[no\])?(\w+):', result.stdout, re.MULTILINE)
  headings = re.findall(r'^(\w+):$', result.stdout, re.MULTILINE)
  return _Help([h for h in headings if h != 'Examples'], names)


@pytest.mark.parametrize(
  'script', ['train', 'client_privacy', 'instance_privacy', 'joint_privacy']
)
def test_help_shows_all_settings_in_groups_and_in_order(script):
  shown = _help(script)
  assert tuple(shown.headings) == _GROUPS
  settings = run.Settings.of().to_dict()
  assert set(settings) | {'report_dir', 'resume', 'overwrite'} == set(
    shown.names
  )
  assert len(shown.names) == len(set(shown.names))
  first = {name: position for position, name in enumerate(shown.names)}
  for group in (run.tasks.Data, run.plan_lib.Privacy, run.plan_lib.Accounting):
    positions = [first[name] for name in options.to_flat(group())]
    assert positions == sorted(positions)


def test_reproduce_shows_what_it_does_then_where():
  shown = _help('reproduce')
  assert shown.headings == ['what', 'data', 'output']
  assert shown.names[0] == 'table'
  assert shown.names[-1] == 'results_dir'


def test_flags_are_read_into_the_group_they_were_made_of():
  with flagsaver.flagsaver():
    argv = ['x', '--level=joint', '--clip_norm=2', '--secure_aggregation']
    absl_flags.FLAGS(argv)
    read = flags.read(run.plan_lib.Privacy)
  expected = run.plan_lib.Privacy(
    level='joint', clip_norm=2.0, secure_aggregation=True
  )
  assert read == expected


def test_flags_have_the_defaults_of_the_options():
  with flagsaver.flagsaver():
    absl_flags.FLAGS(['x'])
    for field in run.dataclasses.fields(run.Settings):
      assert flags.read(field.type) == field.type()
