"""Settings of the whole test run."""

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

from tf_bdp.learning import tff_worker


def pytest_sessionstart():
  """Lets TFF's worker end with pytest; it must precede TFF's first call."""
  tff_worker.reap_on_exit()
