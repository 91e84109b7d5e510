"""Which cases of the engines only the slow suite runs."""

import pytest

from tests.engines import cases


def pytest_collection_modifyitems(items):
  """Marks cases that take long and differ little from others."""
  for item in items:
    parameters = getattr(getattr(item, 'callspec', None), 'params', {})
    case, name = parameters.get('case'), parameters.get('name', 'secure')
    if name != 'inprocess' and case in cases.SLOW_CASES:
      item.add_marker(pytest.mark.slow)
