"""A world in which an average along the realised trajectory under-reports.

Each of N clients has a coordinate of its own. In the first round all of them
send r₁ there. In the second only the client whose coordinate came out largest
sends, r₂; the others send nothing. Along every trajectory one client has the
distances (r₁, r₂) and N - 1 have (r₁, 0), so the claims `census` and `each` are
the same for all trajectories. But who gets through is who could be seen best:
for a client fixed in advance both rounds speak for it together more often than
one time in N. What can be told about such a client is here computed exactly.

That is a limit of these claims, and their text says so: they rest on the
realised trajectory. `dp` and `filter` do not, and hold here as everywhere.
"""

import math

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from tf_bdp import accounting
from tf_bdp.accounting import claims, events, individual_filter

# N, r₁, r₂, ε.
_WORLDS = [
  (10, 1.0, 1.0, 4.0),
  (30, 0.3, 0.5, 1.0),
  (30, 1.0, 2.0, 8.0),
  (100, 2.0, 2.0, 8.0),
]
_POINTS, _WIDTH = np.linspace(-10.0, 16.0, 20_001, retstep=True)


def _profile(mu, epsilon):
  """Returns δ(ε) of a Gaussian mechanism; ε may be negative."""
  near, far = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
  return stats.norm.cdf(near) - np.exp(epsilon + stats.norm.logcdf(far))


def _true_delta(clients, first, second, epsilon):
  """Returns δ of one client fixed in advance: the divergence of both rounds.

  Given its coordinate y of the first round, the client gets through with the
  probability that all others came out below; these are the same in both worlds.
  """
  loss = first * _POINTS - first**2 / 2
  through = stats.norm.cdf(_POINTS - first) ** (clients - 1)
  one_round = np.maximum(-np.expm1(np.minimum(epsilon - loss, 0.0)), 0.0)
  both = _profile(second, epsilon - loss) if second else one_round
  return float(
    np.sum(
      stats.norm.pdf(_POINTS - first)
      * (through * both + (1 - through) * one_round)
      * _WIDTH
    )
  )


def _accountant(estimator, clients, first, second):
  worst = max(first, second) ** 2
  sent = np.zeros(clients)
  sent[0] = second**2
  accountant = accounting.BayesianAccountant(estimator=estimator)
  for squared in (np.full(clients, first**2), sent):
    accountant.compose(
      events.BayesianGaussianEvent(squared, 1.0, worst, panel=True)
    )
  return accountant


def test_the_quadrature_is_the_simulation():
  clients, first, second, epsilon = _WORLDS[0]
  generator = np.random.default_rng(0)
  outputs = generator.normal(size=(100_000, clients)) + first
  loss = first * outputs[:, 0] - first**2 / 2
  through = np.argmax(outputs, axis=1) == 0
  output = generator.normal(size=through.size) + second
  loss += np.where(through, second * output - second**2 / 2, 0.0)
  parts = np.maximum(-np.expm1(np.minimum(epsilon - loss, 0.0)), 0.0)
  error = np.std(parts) / len(parts) ** 0.5
  exact = _true_delta(clients, first, second, epsilon)
  assert np.mean(parts) == pytest.approx(exact, abs=4 * error)
  assert error < 0.1 * exact


@pytest.mark.parametrize('world', _WORLDS)
def test_census_says_a_fraction_of_the_truth(world):
  *rounds, epsilon = world
  claimed = _accountant('census', *rounds).get_delta(epsilon)
  ratio = _true_delta(*world) / claimed
  assert 4 < ratio < 9
  assert 'trajectory' in claims.CLAIMS['census'].rests_on


@pytest.mark.parametrize('world', _WORLDS)
def test_dp_covers_it(world):
  clients, first, second, epsilon = world
  event = dp_accounting.GaussianDpEvent(1 / max(first, second))
  dp = accounting.BayesianAccountant().compose(event, 2)
  assert _true_delta(*world) <= dp.get_delta(epsilon)
  # The accountant that makes the claim has the same figure of DP.
  delta = _true_delta(*world)
  by_census = _accountant('census', clients, first, second)
  assert by_census.get_dp_epsilon(delta) >= epsilon


@pytest.mark.parametrize('world', _WORLDS)
def test_the_filter_covers_it(world):
  clients, first, second, epsilon = world
  # With a budget of what census claims: who gets through must not use it.
  claimed = _accountant('census', *world[:3]).get_delta(epsilon)
  accounts = individual_filter.IndividualFilter.create(
    epsilon, claimed, 1.0, max(first, second) ** 2, 2, clients
  )
  sent = []
  for squared in (
    np.full(clients, first**2),
    np.where(np.arange(clients) == 0, second**2, 0.0),
  ):
    admitted = accounts.admits(range(clients), squared)
    kept = np.where(admitted, squared, 0.0)
    accounts = accounts.charged(range(clients), kept, ~admitted)
    sent.append(math.sqrt(kept[0]))
  assert sent[0] == first and sent[1] == 0
  assert _true_delta(clients, *sent, epsilon) <= claimed
