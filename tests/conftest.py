"""Settings of the whole test run."""

import functools
import os

import dp_accounting
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


@pytest.fixture(autouse=True, scope='session')
def _kept_costs_of_dp_accounting():
  """Lets dp_accounting compute the cost of one kind of round once.

  These functions of numbers take most of the time of many tests. What they
  return is composed to something new, never changed.
  """
  with pytest.MonkeyPatch.context() as patch:
    for module, name, size in (
      (
        dp_accounting.pld.privacy_loss_distribution,
        'from_gaussian_mechanism',
        32,
      ),
      (dp_accounting.rdp.rdp_privacy_accountant, '_compute_log_a', 2**16),
    ):
      if hasattr(module, name):  # Not in all releases.
        kept = functools.lru_cache(size)(getattr(module, name))
        patch.setattr(module, name, kept)
    yield


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
