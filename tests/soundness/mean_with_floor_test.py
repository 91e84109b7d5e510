"""The mean of clients whose number is secret: floor, mixture and empty round.

Divergences of what is really released, by quadrature; tests/accounting/
mixture_test.py composes the same rounds by Fourier transforms.
"""

import itertools
import math

import numpy as np
import pytest
from scipy import special

from tests.mechanisms import builders, oracles
from tf_bdp.accounting import sampled_gaussian
from tf_bdp.mechanisms import client as client_mechanism

_CLIP = builders.CLIP


def _benign(clients, size):
  """What clients of all kinds send."""
  generator = np.random.default_rng([clients, size])
  vectors = generator.normal(size=(clients, size))
  return np.array([oracles.clip(vector, _CLIP) for vector in vectors])


def _mean(alpha, clients, floor, noise=1.5):
  return client_mechanism.ClientMechanism(
    'mean', noise, _CLIP, alpha, alpha * clients, least_participants=floor
  )


def _mean_worlds(mechanism, others, update):
  """Everybody comes by a coin; all that is seen is the noisy mean."""
  alpha, floor = (
    mechanism.participation_probability,
    mechanism.least_participants,
  )
  weights, present, absent = [], [], []
  for came in itertools.product((False, True), repeat=len(others)):
    chance = math.prod(alpha if c else 1 - alpha for c in came)
    chosen = others[list(came)]
    without = chosen.sum(axis=0) / max(len(chosen), floor)
    joined = (chosen.sum(axis=0) + update) / max(len(chosen) + 1, floor)
    weights += [chance * (1 - alpha), chance * alpha]
    present += [without, joined]
    absent += [without, without]
  kept = np.array(weights) > 0
  deviation = mechanism.noise_multiplier * _CLIP / mechanism.clients_per_round
  return oracles.Worlds(
    np.array(weights)[kept],
    np.array(present)[kept],
    np.array(absent)[kept],
    deviation**2,
  )


def _mixed_costs(mixture, alpha, orders):
  """log E_n exp ℓ(λ; r(n)², α)."""
  chances, squared = np.transpose(mixture)
  costs = sampled_gaussian.log_moments(squared, alpha, orders)
  return special.logsumexp(costs, axis=0, b=chances[:, np.newaxis])


_means = pytest.mark.parametrize(
  'alpha, clients, floor',
  [
    *((0.3, 6, floor) for floor in (1, 2, 3, 6)),
    *((0.7, 5, floor) for floor in (1, 4, 5)),
    (1.0, 4, 2),
    (1.0, 4, 4),
  ],
)


@_means
def test_the_mixture_covers_the_divergence_of_a_mean(alpha, clients, floor):
  mechanism = _mean(alpha, clients, floor)
  orders = (1, 2, 4, 8)
  costs = _mixed_costs(mechanism.worst_case_mixture, alpha, orders)
  update = np.array([_CLIP])
  for others in (-1, 0, 0.5, 1):
    worlds = _mean_worlds(
      mechanism, others * np.repeat([update], clients - 1, axis=0), update
    )
    truth = worlds.log_moments(orders, 0.05)
    assert np.all(truth <= costs * (1 + 1e-9) + 1e-12)
    if others == -1 and alpha == 1:
      # It is no more than needed.
      np.testing.assert_allclose(truth[0], costs, rtol=1e-4)


@_means
def test_measured_distances_cover_the_divergence_of_a_mean(
  alpha, clients, floor
):
  # Of one client, over all that the others may do: given who of them came it is
  # a sampled Gaussian mechanism, whether or not the client came itself.
  mechanism = _mean(alpha, clients, floor)
  others, update = _benign(clients - 1, 1), np.array([0.8 * _CLIP])
  parts = []
  for came in itertools.product((False, True), repeat=clients - 1):
    chance = math.prod(alpha if c else 1 - alpha for c in came)
    chosen = others[list(came)]
    found = []
    for sent, mine in ((chosen, False), (np.array([*chosen, update]), True)):
      aggregate = np.sum(sent, axis=0) / max(len(sent), floor)
      measure = mechanism.measure(
        np.sum(update**2), np.sum((update - aggregate) ** 2), mine, len(sent)
      )
      found.append(
        float(mechanism.squared_distances(measure, mine, len(sent), _CLIP))
      )
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    parts.append((chance, found[0]))
  orders = (1, 2, 4, 8)
  truth = _mean_worlds(mechanism, others, update).log_moments(orders, 0.05)
  costs = _mixed_costs(parts, alpha, orders)
  assert np.all(truth <= costs * (1 + 1e-9) + 1e-12)
  worst = _mixed_costs(mechanism.worst_case_mixture, alpha, orders)
  assert np.all(costs <= worst * (1 + 1e-9))


def test_a_client_loses_more_than_if_the_empty_round_were_free():
  # As it was: nobody moves a mean of nobody. Of two clients one comes rarely.
  alpha, orders = 0.2, (1, 2, 4)
  mechanism = _mean(alpha, 2, 1, noise=1.0)
  worlds = _mean_worlds(mechanism, np.array([[_CLIP]]), np.array([_CLIP]))
  truth = np.max(worlds.log_moments(orders, 0.05), axis=0)
  # Beside the other one, who agrees, it moves nothing; alone it moves all.
  former = _mixed_costs([(1.0, 0.0)], alpha, orders)
  found = _mixed_costs(
    [
      (1 - alpha, mechanism.squared_distances(_CLIP**2, False, 0, _CLIP)),
      (alpha, 0.0),
    ],
    alpha,
    orders,
  )
  assert np.all(former == 0)
  assert np.all(truth > 1e-3)
  assert np.all(truth <= found * (1 + 1e-9))


def test_failing_clients_must_count_for_the_number_of_others_to_be_binomial():
  # If 9 of 10 clients fail and were left out, the last one is always alone.
  alpha, clients, orders = 0.5, 10, (1, 2, 4)
  mechanism = _mean(alpha, clients, 1)
  update = np.array([_CLIP])
  costs = _mixed_costs(mechanism.worst_case_mixture, alpha, orders)
  alone = _mean_worlds(mechanism, np.zeros((0, 1)), update)
  assert np.all(np.max(alone.log_moments(orders, 0.05), axis=0) > costs)
  zeros = _mean_worlds(mechanism, np.zeros((clients - 1, 1)), update)
  assert np.all(zeros.log_moments(orders, 0.05) <= costs * (1 + 1e-9))
