"""The clients' own accounts. tests/soundness has the proof that they hold."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_mechanism
from scipy import stats

from tf_bdp import accounting
from tf_bdp.accounting import individual_filter, sampled_gaussian

_FREE = np.zeros(4, bool)


def _filter(epsilon=2.0, delta=1e-5, q=1.0, worst=1.0, rounds=100, clients=4):
  return individual_filter.IndividualFilter.create(
    epsilon, delta, q, worst, rounds, clients
  )


# Budgets.


@pytest.mark.parametrize('epsilon', [1e-3, 0.1, 1.0, 8.0, 50.0])
@pytest.mark.parametrize('delta', [1e-8, 1e-5, 1e-2, 0.3])
def test_mu_is_the_one_of_the_gaussian_mechanism(epsilon, delta):
  mu = math.sqrt(individual_filter.gaussian_budget(epsilon, delta))

  def profile(mu):
    near, far = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    return stats.norm.cdf(near) - math.exp(epsilon + stats.norm.logcdf(far))

  assert profile(mu) <= delta * (1 + 1e-9)
  assert profile(mu * (1 + 1e-6)) > delta
  # dp_accounting inverts the same profile for a deviation.
  loss = privacy_loss_mechanism.GaussianPrivacyLoss.from_privacy_guarantee(
    dp_accounting.pld.common.DifferentialPrivacyParameters(epsilon, delta)
  )
  assert mu == pytest.approx(1 / loss.standard_deviation, rel=1e-5)


@pytest.mark.parametrize('order', [1, 2, 8, 64, 510])
@pytest.mark.parametrize(
  ('epsilon', 'delta'), [(0.02, 1e-5), (1.0, 1e-5), (5.0, 1e-2)]
)
def test_the_budget_at_an_order_is_all_that_the_conversion_allows(
  order, epsilon, delta
):
  budget = individual_filter.renyi_budget(order, epsilon, delta)
  rdp = dp_accounting.rdp.compute_epsilon
  assert budget > 0
  assert rdp([order + 1], [budget / order], delta)[0] <= epsilon
  more = budget * (1 + 1e-9) / order
  assert rdp([order + 1], [more], delta)[0] > epsilon


@pytest.mark.parametrize('rounds', [1, 30, 1000])
def test_the_order_lets_the_largest_distance_stay_for_all_rounds(rounds):
  accounts = _filter(q=0.1, rounds=rounds)

  def stays(order):
    budget = individual_filter.renyi_budget(order, 2.0, 1e-5)
    squared = np.geomspace(1e-8, 1.0, 2000)
    costs = sampled_gaussian.log_moments(squared, 0.1, (order,))[:, 0]
    return np.max(squared, initial=0.0, where=rounds * costs <= budget)

  found = stays(accounts.order)
  best = max(stays(order) for order in range(1, 80))
  assert 0.97 * best <= found <= best


def test_the_order_does_not_depend_on_clients():
  orders = {_filter(q=0.3, clients=n).order for n in (1, 10, 1000)}
  assert len(orders) == 1 and None not in orders
  assert _filter(q=1.0).order is None


# Accounts.


@pytest.mark.parametrize('q', [1.0, 0.2])
def test_a_client_leaves_before_the_round_that_would_exceed_and_for_good(q):
  accounts = _filter(q=q)
  squared = np.array([0.2, 0.05, 0.01, 0.0])
  costs = accounts.costs(squared)
  wanted = [int(accounts.budget // cost) for cost in costs[:3]]
  assert wanted[0] < wanted[1] < wanted[2] < 1000
  stayed = np.zeros(4)
  for _ in range(1000):
    admitted = accounts.admits(range(4), squared)
    stayed += admitted
    accounts = accounts.charged(
      range(4), np.where(admitted, squared, 0.0), ~admitted
    )
    assert np.all(accounts.spent <= accounts.budget)
  assert stayed.tolist() == [*wanted, 1000]
  assert accounts.active == 1
  # Even with nothing to send they stay away.
  assert accounts.admits(range(4), np.zeros(4)).tolist() == [False] * 3 + [True]
  assert accounts.admits([3, 0], np.zeros(2)).tolist() == [True, False]


@pytest.mark.parametrize('q', [0.1, 0.6])
def test_the_whole_run_at_the_worst_case_is_within_the_budget_of_dp(q):
  accounts = _filter(q=q)
  rounds = int(accounts.budget // accounts.costs(np.array([0.04]))[0])
  assert rounds >= 3
  event = dp_accounting.PoissonSampledDpEvent(
    q, dp_accounting.GaussianDpEvent(5.0)
  )
  exact = accounting.BayesianAccountant().compose(event, rounds)
  assert exact.get_dp_epsilon(1e-5) <= 2.0
  # One order costs a good deal, but not the half of it.
  assert exact.get_dp_epsilon(1e-5) > 1.0


def test_measured_norms_are_rounded_up():
  assert _filter().costs(np.array([1.0]))[0] == pytest.approx(
    1 + 1e-5, rel=1e-12
  )
  assert _filter(q=0.5).costs(np.array([1.0]))[0] > 0


def test_messages_do_not_show_what_clients_spent():
  assert 'spent' not in repr(_filter()) and 'left' not in repr(_filter())


def test_accounts_are_frozen():
  before = _filter()
  after = before.charged(range(4), np.full(4, 0.1), _FREE)
  assert np.all(before.spent == 0) and np.all(after.spent > 0)


def test_clients_may_be_in_any_order():
  accounts = _filter()
  squared = np.array([0.01, 0.02, 0.03, 0.04])
  order = [2, 0, 3, 1]
  dropped = np.array([False, True, False, False])
  found = accounts.charged(order, squared[order], dropped[order])
  wanted = accounts.charged(range(4), squared, dropped)
  np.testing.assert_array_equal(found.spent, wanted.spent)
  np.testing.assert_array_equal(found.left, wanted.left)
  for clients in ([0, 1, 2], [0, 1, 2, 2]):
    with pytest.raises(RuntimeError, match='All 4 clients are charged'):
      accounts.charged(clients, squared[: len(clients)], dropped[clients])


# An engine that does not keep to the filter.


def test_an_engine_that_lets_a_client_through_is_caught():
  accounts = _filter()
  squared = np.array([0.9 * accounts.budget, 0.0, 0.0, 0.0])
  accounts = accounts.charged(range(4), squared, _FREE)
  with pytest.raises(RuntimeError, match='must not be released'):
    accounts.charged(range(4), squared, _FREE)
  gone = accounts.charged(
    range(4), np.zeros(4), np.array([True, False, False, False])
  )
  with pytest.raises(RuntimeError, match='must not be released'):
    gone.charged(range(4), np.zeros(4), _FREE)


@pytest.mark.parametrize('dropped', [None, np.zeros(3, bool)])
def test_an_engine_that_knows_no_filter_is_caught(dropped):
  with pytest.raises(RuntimeError, match='which clients the filter kept out'):
    _filter().charged(range(4), np.zeros(4), dropped)


# Checkpoints.


@pytest.mark.parametrize('q', [1.0, 0.1])
def test_accounts_are_restored_with_their_order(q):
  accounts = _filter(q=q, rounds=10).charged(range(4), np.full(4, 0.01), _FREE)
  accounts = accounts.charged(
    range(4), np.zeros(4), np.array([True, False, False, True])
  )
  # Now more rounds are planned, for which another order would be better.
  fresh = _filter(q=q, rounds=10_000)
  assert (fresh.order == accounts.order) == (q == 1)
  found = fresh.restored(accounts.to_arrays())
  assert (found.order, found.budget) == (accounts.order, accounts.budget)
  np.testing.assert_array_equal(found.spent, accounts.spent)
  np.testing.assert_array_equal(found.left, accounts.left)


def test_accounts_of_other_clients_are_refused():
  for arrays in ({}, _filter(clients=5).to_arrays()):
    with pytest.raises(ValueError, match="does not hold the filter's accounts"):
      _filter().restored(arrays)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'epsilon': 0.0}, 'filter must be positive'),
    ({'delta': 1.0}, 'delta must be above 0'),
    ({'q': 1.5}, 'participation_probability must be between'),
    ({'worst': math.inf}, 'worst_case_squared_distance must be positive'),
    ({'rounds': 0}, 'rounds must be a positive integer'),
  ],
)
def test_what_cannot_be_a_budget_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    _filter(**changes)
