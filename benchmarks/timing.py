"""Fair timing of alternatives in one process."""

import time
from collections.abc import Mapping
from typing import Callable


def fastest_in_turn(
  functions: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, float]:
  """Returns the least seconds of each, run in turn after a warm-up.

  In turn, so that whatever else the machine does meets them all.
  """
  best = dict.fromkeys(functions, float('inf'))
  for function in functions.values():
    function()
  for _ in range(repeats):
    for name, function in functions.items():
      start = time.perf_counter()
      function()
      best[name] = min(best[name], time.perf_counter() - start)
  return best
