"""Speed of the accountant against the straightforward loop over orders.

The alternative is what one writes from the paper: for each order, scipy's
logsumexp over the terms of Theorem 3, then Eq. 5 with scipy's t.ppf. Both are
timed in this process, in turn, and the fastest of several runs counts.
"""

import resource
import time
from typing import Callable

import numpy as np
from absl import app
from scipy import special, stats

from benchmarks import timing
from tf_bdp import accounting
from tf_bdp.accounting import chord_table

_UNITS = 1000
_ORDERS = {
  '1 to 64': tuple(range(1, 65)),
  '64 from 1 to 512': tuple(
    int(order) for order in np.unique(np.geomspace(1, 512, 88).round())[-64:]
  ),
}


def straightforward_cost(
  squared_distances: np.ndarray, q: float, orders: tuple[int, ...]
) -> np.ndarray:
  """Returns Eq. 5 for every order, as one writes it from the paper."""
  units = squared_distances.size
  costs = []
  for order in orders:
    k = np.arange(order + 2)
    log_binomial = np.log(special.binom(order + 1, k))
    weights = log_binomial + k * np.log(q) + (order + 1 - k) * np.log1p(-q)
    exponents = np.outer(squared_distances, k * (k - 1) / 2)
    values = special.logsumexp(weights + exponents, axis=1)
    log_mean = special.logsumexp(values) - np.log(units)
    log_square = special.logsumexp(2 * values) - np.log(units)
    variance = -np.expm1(min(0.0, 2 * log_mean - log_square))
    log_deviation = (log_square + np.log(max(variance, 1e-300))) / 2
    factor = stats.t.ppf(1 - 1e-8, units - 1) / np.sqrt(units - 1)
    costs.append(np.logaddexp(log_mean, np.log(factor) + log_deviation))
  return np.array(costs)


def accountants_cost(
  squared_distances: np.ndarray, q: float, orders: tuple[int, ...]
) -> np.ndarray:
  """Returns the same from the parts of the accountant."""
  costs = chord_table.log_moments_upper_bound(
    squared_distances, q, orders, 'tight'
  )
  return accounting.student_t(costs, 1e-8)


def _once(function: Callable[[], object]) -> float:
  start = time.perf_counter()
  function()
  return time.perf_counter() - start


def main(argv: list[str]) -> None:
  """Prints the table."""
  del argv
  rng = np.random.default_rng(0)
  print(f'One round of {_UNITS} distances, seconds and ratio:')
  print(
    f'{"orders":<18}{"q":>6}{"median r²":>11}{"loop":>10}{"first":>10}'
    f'{"then":>10}{"ratio":>8}'
  )
  for name, orders in _ORDERS.items():
    for q in (0.01, 0.1):
      for scale in (1e-3, 1e-1):
        distances = scale * rng.lognormal(0.0, 1.0, _UNITS)
        chord_table.clear_cache()

        def fast(d=distances, q=q, orders=orders) -> np.ndarray:
          return accountants_cost(d, q, orders)

        def slow(d=distances, q=q, orders=orders) -> np.ndarray:
          return straightforward_cost(d, q, orders)

        first = _once(fast)
        seconds = timing.fastest_in_turn({'fast': fast, 'slow': slow}, 10)
        then, loop = seconds['fast'], seconds['slow']
        np.testing.assert_allclose(fast(), slow(), rtol=1e-4, atol=1e-9)
        print(
          f'{name:<18}{q:>6}{scale:>11}{loop:>10.4f}{first:>10.4f}'
          f'{then:>10.5f}{loop / then:>7.0f}x'
        )

  print('\nA round of 10^6 distances at the default orders:')
  distances = np.minimum(0.01 * rng.lognormal(0.0, 1.0, 10**6), 1.0)
  event = accounting.BayesianGaussianEvent(distances, 0.001, 1.0, panel=True)
  for estimator in ('student_t', 'betting'):
    accountant = accounting.BayesianAccountant(estimator=estimator)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    compose = _once(lambda a=accountant: a.compose(event))
    query = _once(lambda a=accountant: a.get_epsilon(1e-6))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
      f'{estimator:<12}compose {compose:.2f} s, epsilon {query:.2f} s, '
      f'peak memory +{(after - before) / 2**20:.2f} GiB'
    )


if __name__ == '__main__':
  app.run(main)
