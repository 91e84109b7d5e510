"""The individual filter keeps (ε, δ), whatever a client does: by simulation.

One client, one dimension. In every round it sends a number r_t of its choice,
which may depend on all that was released before, and the round releases it with
noise N(0, 1): y_t = c_t r_t + noise, where c_t says whether the client came and
the filter let it through. Without the client y_t is noise. How well the two
worlds can be told apart is computed from the exact ratio of their densities,
over many simulated runs: each is a client of one and the same real filter.
"""

import math
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

from tf_bdp.accounting import individual_filter

_RUNS = 40_000


class _Divergence(NamedTuple):
  """Pr[world] - e^ε Pr[other world] at its largest, and its standard error."""

  delta: float
  error: float


def _divergence(losses, epsilon):
  """Returns E[(1 - e^(ε - L))₊] of simulated privacy losses L."""
  parts = np.maximum(-np.expm1(np.minimum(epsilon - losses, 0.0)), 0.0)
  return _Divergence(float(np.mean(parts)), np.std(parts) / len(parts) ** 0.5)


# What a client does: r of the next round, given the round's number, all
# outputs so far and how much they speak for the client being there.
def _constant(number, outputs, loss):
  del number, outputs
  return np.full(loss.size, 0.25)


def _growing(number, outputs, loss):
  del outputs
  return np.full(loss.size, 0.05 * 1.3**number)


def _after_the_output(number, outputs, loss):
  """Is loud after a large output, and silent after a small one."""
  del number
  last = outputs[-1] if outputs else np.zeros(loss.size)
  return 0.5 / (1 + np.exp(-3 * last))


def _who_wins_goes_on(number, outputs, loss):
  """Sends more the better it can be seen already."""
  del number, outputs
  return np.clip(0.2 + 0.5 * loss, 0.0, 1.0)


def _who_loses_goes_on(number, outputs, loss):
  del number, outputs
  return np.clip(0.2 - 0.5 * loss, 0.0, 1.0)


_CLIENTS = (
  *(_constant, _growing, _after_the_output),
  *(_who_wins_goes_on, _who_loses_goes_on),
)


def _make(epsilon, delta, q, rounds):
  return individual_filter.IndividualFilter.create(
    epsilon, delta, q, 1.0, rounds, _RUNS
  )


def _simulate(accounts, client, rounds, there, seed, leaves_late=False):
  """Returns log(density with the client / density without it) of all runs.

  Args:
    accounts: The filter, with one account for each run.
    client: What the client does.
    rounds: How many rounds.
    there: Whether the outputs are those with the client.
    seed: Of the noise.
    leaves_late: A mistake: the client leaves after it exceeded its budget.
  """
  generator = np.random.default_rng(seed)
  q, everybody = accounts.participation_probability, np.arange(_RUNS)
  loss, outputs = np.zeros(_RUNS), []
  spent = np.zeros(_RUNS)
  for number in range(rounds):
    sent = client(number, outputs, loss)
    if leaves_late:
      admitted = spent <= accounts.budget
      spent += accounts.costs(sent**2)
    else:
      admitted = accounts.admits(everybody, sent**2)
      accounts = accounts.charged(
        everybody, np.where(admitted, sent**2, 0.0), ~admitted
      )
    sent = np.where(admitted, sent, 0.0)
    came = generator.random(_RUNS) < q
    output = generator.normal(size=_RUNS) + there * came * sent
    outputs.append(output)
    loss = loss + np.log1p(q * np.expm1(sent * output - sent**2 / 2))
  return loss


def _both(accounts, client, rounds, epsilon, **mistake):
  """Returns the divergence in both directions."""
  arguments = accounts, client, rounds
  with_it = _simulate(*arguments, there=True, seed=1, **mistake)
  without = _simulate(*arguments, there=False, seed=2, **mistake)
  return _divergence(with_it, epsilon), _divergence(-without, epsilon)


@pytest.mark.parametrize('client', _CLIENTS)
@pytest.mark.parametrize(
  ('epsilon', 'delta'), [(1.0, 0.02), (0.3, 0.1), (3.0, 0.01)]
)
def test_who_always_comes_is_within_its_budget(client, epsilon, delta):
  accounts = _make(epsilon, delta, 1.0, 40)
  for found in _both(accounts, client, 40, epsilon):
    assert found.delta <= delta + 4 * found.error


def test_and_whoever_uses_it_up_has_all_of_it():
  # The bound is exact: small steps leave nothing over.
  accounts = _make(1.0, 0.02, 1.0, 40)

  def small_steps(number, outputs, loss):
    del number, outputs
    return np.full(loss.size, 0.999 * math.sqrt(accounts.budget / 40))

  for found in _both(accounts, small_steps, 40, 1.0):
    assert found.delta == pytest.approx(0.02, abs=4 * found.error + 2e-4)


@pytest.mark.parametrize('client', _CLIENTS)
@pytest.mark.parametrize(
  ('epsilon', 'delta', 'q'), [(1.0, 0.02, 0.3), (0.3, 0.1, 0.6)]
)
def test_who_may_come_is_within_its_budget(client, epsilon, delta, q):
  accounts = _make(epsilon, delta, q, 25)
  for found in _both(accounts, client, 25, epsilon):
    assert found.delta <= delta + 4 * found.error


@pytest.mark.parametrize('q', [1.0, 0.3])
def test_a_client_that_grows_never_exceeds_its_budget(q):
  accounts = individual_filter.IndividualFilter.create(1.0, 0.02, q, 1.0, 9, 1)
  order, norm = accounts.order, 0.01
  for _ in range(60):
    squared = np.array([norm**2])
    admitted = accounts.admits([0], squared)
    squared = np.where(admitted, squared, 0.0)
    accounts = accounts.charged([0], squared, ~admitted)
    assert accounts.spent[0] <= accounts.budget
    # The order is that of the beginning, whatever the client sends.
    assert accounts.order == order
    norm = min(1.0, 1.2 * norm)
  assert accounts.left[0]


# Mistakes that the tests above would find.


def test_a_filter_that_looks_after_the_round_is_caught():
  accounts = _make(1.0, 0.02, 1.0, 40)

  def doubling(number, outputs, loss):
    del outputs
    return np.full(loss.size, min(0.05 * 2**number, 1.0))

  found, _ = _both(accounts, doubling, 10, 1.0)
  assert found.delta <= 0.02
  found, _ = _both(accounts, doubling, 10, 1.0, leaves_late=True)
  assert found.delta > 3 * 0.02


def test_a_filter_that_charges_only_who_came_is_caught():
  epsilon, delta, q, squared = 1.0, 0.01, 0.05, 1.0
  accounts = _make(epsilon, delta, q, 20)
  times = int(accounts.budget // accounts.costs(np.array([squared]))[0])
  assert times >= 5
  # As it should be: so many rounds, whether the client comes or not.
  distance = math.sqrt(squared)
  generator = np.random.default_rng(0)
  came = generator.random((_RUNS, times)) < q
  outputs = generator.normal(size=(_RUNS, times)) + distance * came
  ratios = 1 + q * np.expm1(distance * outputs - squared / 2)
  found = _divergence(np.sum(np.log(ratios), axis=1), epsilon)
  assert found.delta <= delta
  # With the mistake the client stays until it has come so many times. How
  # often it has come is hidden: its probabilities go along.
  losses, count = np.zeros(_RUNS), np.zeros(_RUNS, int)
  hidden = np.zeros((_RUNS, times + 1))
  hidden[:, 0] = 1
  for _ in range(200):
    came = (count < times) & (generator.random(_RUNS) < q)
    count += came
    output = generator.normal(size=_RUNS) + distance * came
    ratio = np.exp(distance * output - squared / 2)[:, np.newaxis]
    after = hidden * (1 - q)
    after[:, -1] = hidden[:, -1]
    after[:, 1:] += hidden[:, :-1] * q * ratio
    total = np.sum(after, axis=1)
    losses += np.log(total)
    hidden = after / total[:, np.newaxis]
  found = _divergence(losses, epsilon)
  assert found.delta > 5 * delta


# The same by quadrature, without chance: two rounds.


def _profile(mu, epsilon):
  """Returns δ(ε) of a Gaussian mechanism; ε may be negative."""
  mu = np.maximum(mu, 1e-9)
  near, far = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
  return stats.norm.cdf(near) - np.exp(epsilon + stats.norm.logcdf(far))


@pytest.mark.parametrize(
  ('first', 'late'),
  [(0.1, False), (0.5, False), (0.9, False), (0.5, True), (0.9, True)],
)
def test_two_rounds_by_quadrature(first, late):
  epsilon, delta = 1.0, 0.02
  points, width = np.linspace(-10.0, 10.0, 8001, retstep=True)
  accounts = individual_filter.IndividualFilter.create(
    epsilon, delta, 1.0, 1.0, 2, points.size
  )
  distance = first * math.sqrt(accounts.budget)
  squared = np.full(points.size, distance**2)
  accounts = accounts.charged(
    np.arange(points.size), squared, np.zeros(points.size, bool)
  )
  loss = distance * points - distance**2 / 2
  # Nothing is sent after an output that speaks against the client.
  goes_on = loss > -distance
  second = np.where(goes_on, 0.9999 * math.sqrt(accounts.budget), 0.0)
  if not late:
    second *= math.sqrt(1 - first**2)
    assert np.all(accounts.admits(np.arange(points.size), second**2))
    admitted = accounts.admits(np.arange(points.size), 1.01 * second**2)
    np.testing.assert_array_equal(admitted, ~goes_on)
  densities = stats.norm.pdf(points - distance)
  after = np.where(
    second > 0,
    _profile(second, epsilon - loss),
    np.maximum(-np.expm1(np.minimum(epsilon - loss, 0.0)), 0.0),
  )
  found = float(np.sum(densities * after) * width)
  if late:
    assert found > delta
  else:
    assert 0.8 * delta < found <= delta
