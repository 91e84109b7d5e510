"""Federated learning with Bayesian differential privacy.

What needs TFF is loaded when it is first used: the import takes seconds.
"""

import importlib
from typing import Any

_LAZY = {
  'build_fed_avg': 'processes',
  'build_fed_sgd': 'processes',
  'build_panel_measurement': 'processes',
  'events_from_metrics': 'processes',
  'build_private_process': 'instance_processes',
  'events_of_round': 'instance_processes',
  'part_dataset': 'instance_processes',
  'Algorithm': 'engine',
  'ExampleBatches': 'example_batches',
  'FederatedData': 'federated_data',
}


def __getattr__(name: str) -> Any:
  if name in _LAZY:
    module = importlib.import_module(f'{__name__}.{_LAZY[name]}')
    return getattr(module, name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
