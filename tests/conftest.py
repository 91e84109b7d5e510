"""Settings of the whole test run."""

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

from tf_bdp.aggregators import runtime


def pytest_sessionstart():
  """Lets TFF's worker end with pytest; it must precede TFF's first call."""
  runtime.reap_on_exit()
