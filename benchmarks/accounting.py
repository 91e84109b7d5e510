"""Speed of the accountant against what one writes without it.

For moments, that is the loop from the paper: for each order, scipy's logsumexp
over the terms of Theorem 3, then Eq. 5 with scipy's t.ppf. Both are timed in
this process, in turn, and the fastest of several runs counts.

For exact figures, it is one `PLDAccountant` a unit. That takes hours, so it is
timed for a few rounds of a few units and multiplied; distributions grow with
the rounds, so the whole would take longer than that.
"""

import resource
import time
from typing import Callable

import dp_accounting
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


_EXACT_UNITS, _EXACT_ROUNDS, _EXACT_Q = 1000, 300, 0.1
_PLD_UNITS, _PLD_ROUNDS = 2, 5


def exact_run(
  units: int, rounds: int, q: float, worst: float = 1.0
) -> list[accounting.BayesianGaussianEvent]:
  """Returns the rounds of units whose lognormal distances come and go."""
  rng = np.random.default_rng(0)
  usual = worst * rng.lognormal(-1.5, 0.6, units)
  return [
    accounting.BayesianGaussianEvent(
      np.minimum(usual * rng.lognormal(0.0, 0.3, units), worst) ** 2,
      q,
      worst**2,
      panel=True,
    )
    for _ in range(rounds)
  ]


def accountants_epsilons(
  rounds: list[accounting.BayesianGaussianEvent],
) -> np.ndarray:
  """Returns ε of every unit."""
  accountant = accounting.BayesianAccountant(estimator='census')
  for event in rounds:
    accountant.compose(event)
  return accountant.individual_epsilons(1e-5)


def pld_accountants_epsilon(
  rounds: list[accounting.BayesianGaussianEvent], unit: int
) -> float:
  """Returns ε of one unit by a `PLDAccountant` of its own."""
  accountant = dp_accounting.pld.PLDAccountant()
  for event in rounds:
    noise = 1 / np.sqrt(event.squared_distances[unit])
    accountant.compose(
      dp_accounting.PoissonSampledDpEvent(
        event.participation_probability, dp_accounting.GaussianDpEvent(noise)
      )
    )
  return accountant.get_epsilon(1e-5)


def _print_exact() -> None:
  """Prints how long exact figures take."""
  rounds = exact_run(_EXACT_UNITS, _EXACT_ROUNDS, _EXACT_Q)
  fast = _once(lambda: accountants_epsilons(rounds))
  few = rounds[:_PLD_ROUNDS]
  slow = sum(
    _once(lambda u=unit: pld_accountants_epsilon(few, u))
    for unit in range(_PLD_UNITS)
  )
  share = _PLD_UNITS * _PLD_ROUNDS / (_EXACT_UNITS * _EXACT_ROUNDS)
  print(
    f'\nExact figures of {_EXACT_UNITS} units, {_EXACT_ROUNDS} rounds at q = '
    f'{_EXACT_Q}: {fast:.1f} s, the first time. One PLDAccountant a unit: '
    f'{slow / share:.0f} s, multiplied from {_PLD_ROUNDS} rounds of '
    f'{_PLD_UNITS} units; {slow / share / fast:.0f}x'
  )

  def all_claims(rounds: list, count: int = 1) -> None:
    accountant = accounting.BayesianAccountant(estimator='census')
    for event in rounds:
      accountant.compose(event, count)
    accountant.report(1e-5)

  long = exact_run(200, 2000, 0.05, 0.5)
  seconds = _once(lambda: all_claims(long))
  print(f'All claims of 200 units, 2,000 rounds: {seconds:.1f} s')
  one = exact_run(200, 1, 0.05, 0.05)
  seconds = _once(lambda: all_claims(one, 10**5))
  print(f'One round of 200 units, 100,000 times: {seconds:.1f} s')
  million = exact_run(10**6, 1, 1.0)
  for estimator in ('census', 'each', 'sample'):
    accountant = accounting.BayesianAccountant(estimator=estimator)
    seconds = _once(
      lambda a=accountant: a.compose(million[0]).get_epsilon(1e-6)
    )
    print(f'10^6 units at q = 1, {estimator}: {seconds:.1f} s')


def main(argv: list[str]) -> None:
  """Prints the tables."""
  del argv
  _print_exact()
  rng = np.random.default_rng(0)
  print(f'\nOne round of {_UNITS} distances, seconds and ratio:')
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
