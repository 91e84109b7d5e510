"""A bar for what takes longer than a few seconds, where somebody watches."""

import contextlib
from typing import Any

import tqdm

_DELAY_SECONDS = 3.0


def bar(
  description: str, total: int, unit: str
) -> contextlib.AbstractContextManager[Any]:
  """Returns tqdm's bar on stderr, which shows nothing if that is no terminal.

  Args:
    description: What takes so long.
    total: How many units of work there are.
    unit: What one of them is.
  """
  return tqdm.tqdm(
    desc=description,
    total=total,
    unit=unit,
    delay=_DELAY_SECONDS,
    disable=None,
    leave=False,
  )
