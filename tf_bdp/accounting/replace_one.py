"""Differential privacy of rounds that draw a fixed number of units.

A draw of always n units out of N, without replacement, tells how many took
part, so there is nobody to add or to remove: neighbours differ by one unit in
another's place (replace-one). Distances are then between what the one and the
other contribute, up to twice the clip norm.

With δ_M(ε) of the mechanism on the units drawn and γ = n/N, a round has
δ(log(1 + γ(e^ε - 1))) <= γ δ_M(ε) for ε >= 0 (Balle, Barthe and Gaboardi 2018,
"Privacy amplification by subsampling", Theorem 9). Replacing is symmetric, so
with α = e^ε the bound for α < 1 is that of 1/α seen from the other side. Both
together are the privacy profile of a pair of distributions that dominates the
round, and products of such pairs dominate all rounds (Zhu, Dong and Wang 2022,
"Optimal accounting of differential privacy via characteristic function").
"""

import copy
import functools
import math
from typing import Any, Optional

import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from scipy import special

from tf_bdp import validation
from tf_bdp.accounting import claims

REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE

_STATE_FORMAT = 'tf_bdp.ReplaceOneAccountant'
_STATE_VERSION = 1
# Grid points to a standard deviation of the loss of a round.
_POINTS = 20
# Of the normal distribution; 1.8e-33 lies beyond it.
_FARTHEST = 12.0
# Beyond this the figure is of no use to anyone, and the grid too large.
_LARGEST_EPSILON = 500.0
_LARGEST_LOSS = 700.0

# A round: r², and the share n/N of the units that are drawn.
_Kind = tuple[float, float]


class ReplaceOneAccountant(dp_accounting.PrivacyAccountant):
  """Accounts for Gaussian mechanisms on a fixed number of units.

  It knows the worst case alone: the only claim that it makes is `dp`.

  >>> event = dp_accounting.SampledWithoutReplacementDpEvent(
  ...     100, 10, dp_accounting.GaussianDpEvent(1.0))
  >>> accountant = ReplaceOneAccountant().compose(event, 100)
  >>> round(accountant.get_epsilon(1e-5), 1)
  7.8
  """

  def __init__(self) -> None:
    """Makes an accountant that has seen no round."""
    super().__init__(REPLACE_ONE)
    self._counts: dict[_Kind, int] = {}
    self._non_private = False

  @property
  def settings(self) -> dict[str, Any]:
    """How it accounts, as plain data."""
    return {'composition': 'exact', 'estimator': 'dp', 'total_rounds': None}

  @property
  def claim(self) -> str:
    """The name of the claim that it makes."""
    return 'dp'

  @property
  def claim_names(self) -> tuple[str, ...]:
    """The names of all claims of `report`."""
    return (self.claim,)

  def _maybe_compose(
    self, event: dp_accounting.DpEvent, count: int, do_compose: bool
  ) -> Optional[dp_accounting.PrivacyAccountant.CompositionErrorDetails]:
    if isinstance(event, dp_accounting.NoOpDpEvent):
      return None
    if isinstance(event, dp_accounting.ComposedDpEvent):
      errors = (
        self._maybe_compose(part, count, do_compose) for part in event.events
      )
      return next(filter(None, errors), None)
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
      self._non_private = self._non_private or do_compose
      return None
    if not (
      isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent)
      and isinstance(event.event, dp_accounting.GaussianDpEvent)
    ):
      return self.CompositionErrorDetails(
        event, 'Only Gaussian mechanisms on a fixed number of units are known'
      )
    share = event.sample_size / event.source_dataset_size
    validation.check_probability('sample_size / source_dataset_size', share)
    noise = validation.check_positive(
      'noise_multiplier', event.event.noise_multiplier
    )
    if do_compose and share:
      kind = (1 / noise**2, share)
      self._counts[kind] = self._counts.get(kind, 0) + count
    return None

  def get_epsilon(self, target_delta: float) -> float:
    """Returns ε of differential privacy at δ; infinite if it is above 500."""
    validation.check_delta('target_delta', target_delta)
    if self._non_private:
      return math.inf
    if not self._counts:
      return 0.0
    losses = _losses(tuple(sorted(self._counts.items())))
    if losses is None:
      return math.inf
    epsilon = float(losses.get_epsilon_for_delta(target_delta))
    return epsilon if epsilon <= _LARGEST_EPSILON else math.inf

  def get_delta(self, target_epsilon: float) -> float:
    """Returns δ of differential privacy at ε."""
    validation.check_not_negative('target_epsilon', target_epsilon)
    if self._non_private:
      return 1.0
    if not self._counts:
      return 0.0
    losses = _losses(tuple(sorted(self._counts.items())))
    if losses is None:
      return 1.0
    return float(losses.get_delta_for_epsilon(target_epsilon))

  def exceeds(self, target_epsilon: float, target_delta: float) -> bool:
    """Whether ε at δ is above the target."""
    return self.get_epsilon(target_delta) > target_epsilon

  # As of `BayesianAccountant`: what is asked for by name is the same here.
  get_dp_epsilon = get_epsilon
  get_worst_case_epsilon = get_epsilon

  def report(self, target_delta: float) -> list[claims.ClaimedEpsilon]:
    """Returns ε at δ of the one claim that can be made."""
    return claims.report(
      {'dp': self.get_epsilon(target_delta)}, target_delta, 'dp'
    )

  def copy(self) -> 'ReplaceOneAccountant':
    """Returns an accountant that has seen the same, and goes its own way."""
    return copy.deepcopy(self)

  def state_dict(self) -> dict[str, Any]:
    """Returns all that was seen, as data that JSON can hold."""
    return {
      'format': _STATE_FORMAT,
      'version': _STATE_VERSION,
      'rounds': [[*kind, count] for kind, count in self._counts.items()],
      'non_private': self._non_private,
    }

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Replaces all that was seen by what `state_dict` returned.

    Raises:
      ValueError: The state is not one, or is damaged. This accountant is then
        unchanged.
    """
    if (
      not isinstance(state, dict)
      or state.get('format') != _STATE_FORMAT
      or state.get('version') != _STATE_VERSION
    ):
      raise ValueError('The state is not one of a ReplaceOneAccountant.')
    try:
      counts = {}
      for squared_distance, share, count in state['rounds']:
        validation.check_positive('r²', squared_distance)
        validation.check_probability('share', share)
        validation.check_positive_integer('count', count)
        counts[float(squared_distance), float(share)] = count
      non_private = state['non_private']
      if not isinstance(non_private, bool):
        raise ValueError('non_private is not one')
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(f'The state is damaged: {error!s}.') from error
    self._counts, self._non_private = counts, non_private


def round_deltas(
  epsilons: np.ndarray, distance: float, share: float
) -> np.ndarray:
  """Returns δ(ε) of one round, for any ε; see the module's docstring.

  Args:
    epsilons: ε, negative ones included.
    distance: r, between what a unit and another in its place contribute.
    share: γ, the share of the units that is drawn.
  """
  size = np.abs(epsilons)
  # log(1 + (e^ε - 1) / γ), which does not overflow.
  within = np.where(
    size < 1,
    np.log1p(np.expm1(np.minimum(size, 1)) / share),
    size + np.log((1 - (1 - share) * np.exp(-size)) / share),
  )
  deltas = special.ndtr(distance / 2 - within / distance) - np.exp(
    within + special.log_ndtr(-distance / 2 - within / distance)
  )
  deltas = share * np.maximum(deltas, 0.0)
  # δ_α(P, Q) = 1 - α + α δ_{1/α}(Q, P).
  reverse = -np.expm1(-size) + np.exp(-size) * deltas
  return np.where(epsilons >= 0, deltas, reverse)


@functools.lru_cache(maxsize=8)
def _losses(
  rounds: tuple[tuple[_Kind, int], ...],
) -> Optional[privacy_loss_distribution.PrivacyLossDistribution]:
  """Returns the loss of all rounds, rounded upward; None if it is too large."""
  squared = sum(count * _scale(*kind) ** 2 for kind, count in rounds)
  step = math.sqrt(squared / sum(count for _, count in rounds)) / _POINTS
  together: Any = None
  for (squared_distance, share), count in rounds:
    distance = math.sqrt(squared_distance)
    largest = _FARTHEST * distance + squared_distance / 2
    if largest > _LARGEST_LOSS:
      return None
    largest = math.log1p(share * math.expm1(largest))
    last = math.ceil(largest / step)
    grid = np.arange(-last, last + 1)
    deltas = round_deltas(step * grid, distance, share)
    # Where they grew by rounding, what came before is raised.
    deltas = np.minimum(np.maximum.accumulate(deltas[::-1])[::-1], 1.0)
    masses = pld_pmf.create_pmf_pessimistic_connect_dots(step, grid, deltas)
    one = privacy_loss_distribution.PrivacyLossDistribution(masses)
    many = one.self_compose(count)
    together = many if together is None else together.compose(many)
  return together


def _scale(squared_distance: float, share: float) -> float:
  """Returns about the standard deviation of the loss of a round."""
  squared = min(squared_distance, _LARGEST_LOSS)
  return math.sqrt(math.log1p(share**2 * math.expm1(squared)))
