"""Settings of the whole test run."""

import os

import hypothesis
import pytest

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


# The same examples in every run; how many is told where 30 are not right.
hypothesis.settings.register_profile(
  'reproducible',
  derandomize=True,
  database=None,
  deadline=None,
  max_examples=30,
  suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile('reproducible')


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  """Keeps tests in one process that share what is expensive to build.

  These are the tests of a file, and all tests of engines.
  """
  for item in items:
    shares = (
      item.path.parent if item.path.parent.name == 'engines' else item.path
    )
    item.add_marker(pytest.mark.xdist_group(str(shares)))
