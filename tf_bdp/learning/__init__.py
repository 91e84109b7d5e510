"""Federated learning with Bayesian differential privacy.

What needs TFF is loaded when it is first used: the import takes seconds.
"""

from typing import Any

_FROM_PROCESSES = (
  'build_fed_avg',
  'build_fed_sgd',
  'build_panel_measurement',
  'events_from_metrics',
)


def __getattr__(name: str) -> Any:
  if name in _FROM_PROCESSES:
    from tf_bdp.learning import processes

    return getattr(processes, name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
