"""Proves that accounting needs no TensorFlow."""

import pkgutil
import subprocess
import sys

import tf_bdp.accounting
import tf_bdp.analysis
import tf_bdp.reporting

_CHECK = """
import importlib, sys
for name in {names!r}:
  importlib.import_module(name)
found = sorted(
  name for name in sys.modules
  if name.startswith(('tensorflow', 'tensorboard', 'keras', 'jax'))
)
assert not found, found
"""


def _modules(package):
  return [package.__name__] + [
    f'{package.__name__}.{module.name}'
    for module in pkgutil.iter_modules(package.__path__)
  ]


def _assert_imports_no_tensorflow(names):
  process = subprocess.run(
    [sys.executable, '-c', _CHECK.format(names=names)],
    capture_output=True,
    text=True,
    check=False,
  )
  assert process.returncode == 0, process.stderr


def test_the_package_imports_no_tensorflow():
  _assert_imports_no_tensorflow(['tf_bdp.accounting'])


def test_no_module_of_accounting_analysis_or_reporting_imports_tensorflow():
  packages = (tf_bdp.accounting, tf_bdp.analysis, tf_bdp.reporting)
  names = [name for package in packages for name in _modules(package)]
  assert 'tf_bdp.analysis.compute_bdp_privacy' in names
  _assert_imports_no_tensorflow(names)


def test_the_public_names_are_there():
  for name in (
    'BayesianAccountant',
    'BayesianGaussianEvent',
    'attack_success_bound',
    'bernstein',
    'betting',
    'log_moments',
    'student_t',
  ):
    assert hasattr(tf_bdp.accounting, name)
