"""The individual filter: clients leave before they exceed their own budget.

Under a sum of clipped updates with a fixed divisor, what a round tells about a
client depends on the client's own r = ‖u‖/(z C) and on nobody else's. So each
can keep an account of its own, and send nothing any more before the round in
which it would exceed it. All that is released is then (ε, δ)-DP, whatever the
data are: the account is a rule of the mechanism, no estimate.

  q = 1: Σ_t r_t² <= μ²(ε, δ), where μ is that of the one Gaussian mechanism
    with this ε and δ (Koskela, Tobaben and Honkela 2023, "Individual privacy
    accounting with Gaussian differential privacy").
  q < 1: Σ_t ℓ(λ; r_t², q) <= B(λ) at one order λ, fixed in advance, where B is
    the most that the conversion to (ε, δ) allows (Feldman and Zrnic 2021,
    "Individual privacy accounting via a Rényi filter"). A client is charged
    whether it came or not: ℓ is about not knowing that.

Both hold however rounds depend on what was released before. Who has left, and
even that anybody has, is private: it must not show but through the releases.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np

from tf_bdp import validation
from tf_bdp.accounting import conversion, privacy_profiles, sampled_gaussian

# The orders λ from which one is chosen.
_ORDERS = tuple(sorted({round(1.08**k) for k in range(82)}))
_BISECTIONS = 20
# Norms are measured in float32, in sums over all weights; each r² is charged as
# if it were larger by this share.
_ROUNDING = 1e-5
# How far sums of the same costs may differ by their order in float64.
_SAME = 1e-9


@dataclasses.dataclass(frozen=True, eq=False)
class IndividualFilter:
  """The accounts of all clients; `charged` returns the next one.

  Attributes:
    epsilon: ε of everybody's budget.
    delta: δ of everybody's budget.
    participation_probability: q, the chance that a client takes part.
    order: λ at which costs are counted; None at q = 1, where r² is.
    budget: What each client may spend, in that unit.
    spent: What each client has spent, [clients]. Private data.
    left: Which clients have left for good, [clients]. Private data.
  """

  epsilon: float
  delta: float
  participation_probability: float
  order: Optional[int]
  budget: float
  # Private data do not belong in messages.
  spent: np.ndarray = dataclasses.field(repr=False)
  left: np.ndarray = dataclasses.field(repr=False)

  @classmethod
  def create(
    cls,
    epsilon: float,
    delta: float,
    participation_probability: float,
    worst_case_squared_distance: float,
    rounds: int,
    client_count: int,
  ) -> 'IndividualFilter':
    """Opens the accounts.

    Args:
      epsilon: ε.
      delta: δ.
      participation_probability: q.
      worst_case_squared_distance: The largest r² that clipping allows.
      rounds: How many rounds are planned. The order is the one that lets the
        largest r² stay for all of them, which does not depend on data.
      client_count: N.
    """
    epsilon = validation.check_positive('filter', epsilon)
    delta = validation.check_delta('delta', delta)
    q = validation.check_probability(
      'participation_probability', participation_probability
    )
    worst = validation.check_positive(
      'worst_case_squared_distance', worst_case_squared_distance
    )
    validation.check_positive_integer('rounds', rounds)
    order, budget = None, gaussian_budget(epsilon, delta)
    if q < 1:
      order = best_order(epsilon, delta, q, worst, rounds)
      budget = renyi_budget(order, epsilon, delta)
    nothing = np.zeros(client_count)
    return cls(epsilon, delta, q, order, budget, nothing, nothing > 0)

  @property
  def active(self) -> int:
    """How many clients have not left. Private data."""
    return int(np.count_nonzero(~self.left))

  def costs(self, squared_distances: np.ndarray) -> np.ndarray:
    """Returns what a round costs clients, given their r²."""
    squared = np.asarray(squared_distances, np.float64) * (1 + _ROUNDING)
    if self.order is None:
      return squared
    # `tight` bounds both directions: Mironov, Talwar and Zhang 2019, Theorem 5.
    return sampled_gaussian.log_moments(
      squared, self.participation_probability, (self.order,)
    )[:, 0]

  def admits(
    self, clients: Sequence[int], squared_distances: np.ndarray
  ) -> np.ndarray:
    """Tells which clients may still send what they have.

    Args:
      clients: Their numbers.
      squared_distances: Their r² in the coming round, if they come.
    """
    rows = np.asarray(clients, np.int64)
    after = self.spent[rows] + self.costs(squared_distances)
    return ~self.left[rows] & (after <= self.budget)

  def charged(
    self,
    clients: Sequence[int],
    squared_distances: np.ndarray,
    dropped: Optional[np.ndarray],
  ) -> 'IndividualFilter':
    """Returns the accounts after a round.

    Args:
      clients: All clients, in the order of what follows.
      squared_distances: Their r², whether they came or not.
      dropped: Which of them could not have come, because `admits` was false.

    Raises:
      RuntimeError: A client was let through that should not have been.
    """
    rows = np.asarray(clients, np.int64)
    if not np.array_equal(np.sort(rows), np.arange(self.left.size)):
      raise RuntimeError(
        f'All {self.left.size} clients are charged in every round. Found '
        f'{rows.size}.'
      )
    if dropped is None or np.shape(dropped) != rows.shape:
      raise RuntimeError(
        'The engine does not say which clients the filter kept out, so nothing '
        'is known about their budgets. Use an engine that takes a filter.'
      )
    costs, left = np.zeros(rows.size), np.zeros(rows.size, bool)
    costs[rows] = self.costs(squared_distances)
    left[rows] = dropped
    let_in_again = self.left & ~left
    spent = self.spent + np.where(left, 0.0, costs)
    if np.any(let_in_again) or np.any(spent > self.budget * (1 + _SAME)):
      raise RuntimeError(
        'The engine let clients through that would exceed their own budgets: '
        'the round must not be released.'
      )
    return dataclasses.replace(self, spent=spent, left=left)

  def to_arrays(self) -> dict[str, np.ndarray]:
    """Returns what `restored` takes, for a checkpoint. Private data."""
    order = np.array(self.order or 0)
    return {'order': order, 'spent': self.spent, 'left': self.left}

  def restored(self, arrays: Mapping[str, np.ndarray]) -> 'IndividualFilter':
    """Returns the filter with the accounts that `to_arrays` returned.

    And with their order: it stays the one that was fixed in advance, even if
    more rounds are planned now.
    """
    own = self.to_arrays()
    if {name: np.shape(array) for name, array in arrays.items()} != {
      name: array.shape for name, array in own.items()
    }:
      raise ValueError(
        "The checkpoint does not hold the filter's accounts of these clients."
      )
    order = int(arrays['order']) or None
    budget = self.budget
    if order is not None:
      budget = renyi_budget(order, self.epsilon, self.delta)
    return dataclasses.replace(
      self,
      order=order,
      budget=budget,
      spent=arrays['spent'].astype(np.float64),
      left=arrays['left'].astype(bool),
    )


def gaussian_budget(epsilon: float, delta: float) -> float:
  """Returns the largest μ² with which Gaussian rounds are (ε, δ)-DP.

  Rounded down. The divergence is the same in both directions.

  >>> round(gaussian_budget(1.0, 0.1269), 2)
  1.0
  """

  def keeps(mu: float) -> bool:
    return float(privacy_profiles.gaussian_delta(np.array(mu), epsilon)) < delta

  low, high = 0.0, 1.0
  while keeps(high):
    low, high = high, 2 * high
  while high - low > 1e-12 * high:
    middle = (low + high) / 2
    low, high = (middle, high) if keeps(middle) else (low, middle)
  return low * low


def best_order(
  epsilon: float, delta: float, q: float, worst: float, rounds: int
) -> int:
  """Returns the order at which the largest r² may stay for all rounds.

  If even the worst case may, the one at which it could stay longest. It is a
  matter of use alone: the filter holds at every order fixed in advance.
  """
  budgets = np.array([renyi_budget(o, epsilon, delta) for o in _ORDERS])

  def rounds_at(squared_distance: float) -> np.ndarray:
    costs = sampled_gaussian.log_moments([squared_distance], q, _ORDERS)[0]
    return budgets / np.maximum(costs, 1e-300)

  low, high = 0.0, worst
  if np.max(rounds_at(worst)) < rounds:
    for _ in range(_BISECTIONS):
      middle = (low + high) / 2
      enough = np.max(rounds_at(middle)) >= rounds
      low, high = (middle, high) if enough else (low, middle)
  return _ORDERS[int(np.argmax(rounds_at(high)))]


def renyi_budget(order: int, epsilon: float, delta: float) -> float:
  """Returns the largest log-moment at one order that is (ε, δ)-DP.

  Rounded down. The inverse of `conversion.epsilon_from_costs`, the tight one.
  """
  alpha = order + 1
  divergence = epsilon - math.log1p(-1 / alpha)
  divergence += math.log(delta * alpha) / order
  # As dp_accounting has it: where the KL divergence is as small as this, δ
  # alone is enough.
  divergence = max(divergence, -math.log1p(-(delta**2)))
  cost = order * divergence
  while (
    conversion.epsilon_from_costs((order,), np.array([cost]), delta)[0]
    > epsilon
  ):
    cost *= 1 - 1e-12
  return cost
