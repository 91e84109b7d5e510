"""Settings of the whole test run."""

import os

import hypothesis

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
