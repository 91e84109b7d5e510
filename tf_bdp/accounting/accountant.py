"""The Bayesian privacy accountant."""

import copy
import functools
import itertools
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Callable, Optional

import dp_accounting
import numpy as np
import numpy.typing as npt

from tf_bdp import validation
from tf_bdp.accounting import (
  accountant_state,
  chord_table,
  claims,
  events,
  log_space,
  loss_distribution,
  mean_bounds,
  privacy_profiles,
  round_bounds,
  sampled_gaussian,
  unit_ledger,
  worst_case,
)
from tf_bdp.accounting import (
  conversion as conversion_lib,
)
from tf_bdp.accounting import (
  ledger as ledger_lib,
)

COMPOSITIONS = ('panel', 'holder', 'product')
# By the exact divergences of single units; the others bound moments.
EXACT_ESTIMATORS = ('sample', 'census', 'each')

# Few and well spread: each order's bound takes its part of δ.
DEFAULT_ORDERS = (
  *range(1, 9),
  *(10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64),
  *(80, 96, 128, 192, 256, 384, 512),
)
# The part of δ that is kept for bounds that fail, unless another is given.
ESTIMATOR_SHARE = 0.1
# Rounds whose moments are computed together, which is faster.
_MOST_WAITING = 64


class BayesianAccountant(dp_accounting.PrivacyAccountant):
  """Accounts for Bayesian differential privacy of sampled Gaussian mechanisms.

  It adds up what a person who stays for all rounds may lose, in expectation
  over the people whom the sampled units stand for:

    panel: from the same units measured every round, their exact divergences
      δ_x(ε) (estimators 'sample', 'census', 'each'), or log E_x[exp Σ_t ℓ_t(x)]
      (the other estimators).
    holder: (1/T) Σ_t log E_x[exp T ℓ_t(x)] for T rounds fixed in advance, by
      Hölder's inequality (Triastcyn and Faltings 2020); any units each round.
    product: Σ_t log E_x[exp ℓ_t(x)], as if people were drawn anew each round
      (the paper's Theorem 1). It under-reports for a person who stays.

  Expectations are replaced by upper confidence bounds. Those may fail, with
  probabilities that add up to a part of δ; the rest is left for the tail of
  the privacy loss. Where every round has a worst case, the figure is never
  above the exact one of differential privacy at that rest.

  >>> from tf_bdp.accounting.events import BayesianGaussianEvent
  >>> event = BayesianGaussianEvent([0.01] * 1000, 0.1, 1.0, panel=True)
  >>> accountant = BayesianAccountant().compose(event, 100)
  >>> round(accountant.get_epsilon(1e-5), 2)
  5.06
  """

  def __init__(
    self,
    composition: str = 'panel',
    *,
    estimator: Optional[str] = None,
    direction: str = 'tight',
    conversion: str = 'tight',
    orders: npt.ArrayLike = DEFAULT_ORDERS,
    estimator_delta: Optional[float] = None,
    total_rounds: Optional[int] = None,
    count_orders: bool = True,
    neighboring_relation: dp_accounting.NeighboringRelation = (
      dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    ),
  ):
    """Makes an accountant that has seen no round.

    Args:
      composition: 'panel', 'holder' or 'product'; see above.
      estimator: By the exact divergences of a panel's units: 'sample' (they
        were drawn from a population, whose mean is bounded), 'census' (they
        are the whole population) or 'each' (the one who loses most counts);
        see `claims.CLAIMS`. By moments: 'betting' or 'bernstein' (valid for
        every distribution, need a worst case), 'student_t' (the paper's, rests
        on its assumption) or 'population' (as 'census'). By default 'sample'
        for a panel, 'betting' otherwise.
      direction: 'tight' or 'printed', for moments; see `log_moments`.
      conversion: 'tight' or 'chernoff', for moments; see
        `conversion.epsilon_from_costs`. Theorem 2's bounds another probability
        than differential privacy does, and is compared with its own worst case.
      orders: The orders λ of the log-moments, positive integers.
      estimator_delta: The part of δ kept for bounds that fail; by default a
        tenth of δ.
      total_rounds: T, which 'holder' needs in advance. The others take none.
      count_orders: Whether δ is also shared among the orders, as it must be
        because ε is a minimum over them. The paper does not.
      neighboring_relation: Which pairs of data sets the distances are about;
        `mechanism.relation(unit)`.
    """
    super().__init__(neighboring_relation)
    validation.check_choice('composition', composition, COMPOSITIONS)
    if estimator is None:
      estimator = 'sample' if composition == 'panel' else 'betting'
    validation.check_choice(
      'estimator', estimator, (*EXACT_ESTIMATORS, *mean_bounds.ESTIMATORS)
    )
    validation.check_choice('direction', direction, sampled_gaussian.DIRECTIONS)
    validation.check_choice(
      'conversion', conversion, conversion_lib.CONVERSIONS
    )
    if estimator in EXACT_ESTIMATORS:
      _check_exact(composition, estimator, direction, conversion)
    if estimator_delta is not None:
      estimator_delta = validation.check_delta(
        'estimator_delta', estimator_delta
      )
    if composition == 'holder':
      if total_rounds is None:
        raise ValueError(
          "composition='holder' needs total_rounds, fixed before training."
        )
      total_rounds = validation.check_positive_integer(
        'total_rounds', total_rounds
      )
    elif total_rounds is not None:
      raise ValueError(
        f"total_rounds is for composition='holder' only. Found {composition!r}."
      )
    self._composition = composition
    self._estimator = estimator
    self._direction = direction
    self._conversion = conversion
    self._orders = validation.check_orders(orders)
    self._estimator_delta = estimator_delta
    self._total_rounds = total_rounds
    self._count_orders = count_orders

    self._entries: tuple[ledger_lib.Entry, ...] = ()
    # 'panel': Σ_t ℓ_t of every member, [units, orders], for each group.
    self._panels: tuple[np.ndarray, ...] = ()
    # 'holder' and 'product': what every round's bound needs.
    self._rounds: tuple[round_bounds.RoundBounds, ...] = ()
    # Exact: what the units of all groups went through, one after the other, the
    # sizes of the groups, the paper's account of the same rounds, and rounds
    # that it has yet to take.
    self._units: Optional[unit_ledger.UnitLedger] = None
    self._group_sizes: tuple[int, ...] = ()
    self._paper: Optional[BayesianAccountant] = None
    self._for_paper: tuple[tuple[dp_accounting.DpEvent, int], ...] = ()
    if self._is_exact:
      self._paper = BayesianAccountant.paper(
        orders=self._orders, estimator_delta=estimator_delta
      )
    # Found when needed, and kept until another round is composed.
    self._profiles_of_units: Optional[privacy_profiles.Profiles] = None
    self._charged_rounds: Optional[worst_case.RoundsByLabel] = None

  @classmethod
  def paper(
    cls,
    direction: str = 'printed',
    orders: npt.ArrayLike = DEFAULT_ORDERS,
    estimator_delta: Optional[float] = None,
  ) -> 'BayesianAccountant':
    """Returns the accountant of the paper, to reproduce its figures.

    Product composition, Student's t, the conversion of Theorem 2, and δ shared
    among rounds only. It under-reports; see the class's docstring.

    Args:
      direction: 'printed' for the maximum of Theorem 3, 'tight' for its L part.
      orders: The orders λ.
      estimator_delta: As for the constructor.
    """
    return cls(
      'product',
      estimator='student_t',
      direction=direction,
      conversion='chernoff',
      orders=orders,
      estimator_delta=estimator_delta,
      count_orders=False,
    )

  def as_in_the_paper(self) -> 'BayesianAccountant':
    """Returns the paper's account of the same rounds; of exact ones only."""
    if self._paper is None:
      raise ValueError('Only exact accountants keep the account of the paper.')
    return self._paper_so_far()

  @property
  def settings(self) -> dict[str, Any]:
    """The constructor's arguments, as plain data."""
    return {
      'composition': self._composition,
      'estimator': self._estimator,
      'direction': self._direction,
      'conversion': self._conversion,
      'orders': list(self._orders),
      'estimator_delta': self._estimator_delta,
      'total_rounds': self._total_rounds,
      'count_orders': self._count_orders,
    }

  @property
  def claim(self) -> str:
    """The name of the claim that `get_epsilon` makes."""
    if self._is_exact:
      return self._estimator
    if self._composition == 'product' or self._estimator == 'student_t':
      return 'paper'
    return 'census' if self._estimator == 'population' else 'sample'

  @property
  def claim_names(self) -> tuple[str, ...]:
    """The names of all claims of which `report` has a figure, in its order."""
    made = {'dp', self.claim}
    if self._is_exact:
      made |= {*EXACT_ESTIMATORS, 'paper'}
    return tuple(name for name in claims.CLAIMS if name in made)

  @property
  def _is_exact(self) -> bool:
    return self._estimator in EXACT_ESTIMATORS

  @property
  def ledger(self) -> dp_accounting.DpEvent:
    """The rounds as differential privacy sees them, without the distances.

    `dp_accounting.rdp.RdpAccountant().compose(accountant.ledger)` gives the DP
    figure of the same run. Rounds without a worst case are non-private there.
    Where dp_accounting has no event for what took place, it is one that costs
    more (see `ledger.to_dp_event`): a worst case that is drawn is the largest
    that could be. `get_dp_epsilon` has the figure without that.
    """
    return ledger_lib.to_dp_event(self._entries)

  def compose(
    self, event: dp_accounting.DpEvent, count: int = 1
  ) -> 'BayesianAccountant':
    """Adds an event, or nothing at all if any part of it is refused.

    Args:
      event: A `BayesianGaussianEvent`, a `ParallelEvent` of such, a
        `MixedGaussianEvent`, a `ReportedCostEvent` (not with
        composition='panel'), or dp_accounting's Gaussian, Poisson-sampled,
        composed, self-composed, no-op or non-private event.
      count: How many times it took place.

    Returns:
      This accountant.

    Raises:
      UnsupportedEventError: The accountant has no account of such an event.
      ValueError: The event does not fit the accountant or what it has seen.
    """
    if not isinstance(event, dp_accounting.DpEvent):
      raise TypeError(f'event must be a DpEvent. Found {type(event)}.')
    count = validation.check_positive_integer('count', count)
    try:
      rounds = list(ledger_lib.rounds_of(event, count))
    except ledger_lib.UnsupportedPartError as error:
      raise dp_accounting.UnsupportedEventError(
        f'Unsupported event: {error}, caused by subevent {error.event}.'
      ) from error
    self._check(rounds)
    self._add([(e, entry.repeats) for e, entry in rounds if e is not None])
    for _, entry in rounds:
      self._entries = ledger_lib.appended(self._entries, entry)
    if self._is_exact:
      self._for_paper = (*self._for_paper, (event, count))
      if max(len(self._for_paper), len(rounds)) >= _MOST_WAITING:
        self._paper, self._for_paper = self._paper_so_far(), ()
    self._profiles_of_units = self._charged_rounds = None
    return self

  def _maybe_compose(
    self, event: dp_accounting.DpEvent, count: int, do_compose: bool
  ) -> Optional[dp_accounting.PrivacyAccountant.CompositionErrorDetails]:
    """Answers `supports`; `compose` above does not go this way."""
    try:
      self._check(list(ledger_lib.rounds_of(event)))
    except ledger_lib.UnsupportedPartError as error:
      return self.CompositionErrorDetails(error.event, str(error))
    except ValueError as error:
      return self.CompositionErrorDetails(event, str(error))
    if do_compose:
      self.compose(event, count)
    return None

  def get_epsilon(self, target_delta: float) -> float:
    """Returns ε at δ for all events so far."""
    if not 0 <= target_delta <= 1:
      raise ValueError(
        f'target_delta must be between 0 and 1. Found {target_delta}.'
      )
    if self._is_non_private():
      return math.inf
    if target_delta in (0, 1):
      free = target_delta == 1 or not np.any(self._worst_case_costs())
      return 0.0 if free else math.inf
    if self._is_exact:
      return self._claimed_epsilon(self._estimator, target_delta)
    epsilon, _ = self.get_epsilon_and_optimal_order(target_delta)
    if self._conversion != 'tight' or epsilon == 0:
      return epsilon
    rest = target_delta - self._delta_for_bounds(target_delta)
    return min(epsilon, self._claimed_epsilon('dp', rest))

  def get_epsilon_and_optimal_order(
    self, target_delta: float
  ) -> tuple[float, int]:
    """Returns ε at δ by moments, and the order λ (Rényi order λ + 1) of it.

    It may exceed what `get_epsilon` returns, which is also compared with exact
    differential privacy.
    """
    if self._is_exact:
      raise ValueError(
        f'estimator={self._estimator!r} is exact and has no orders. Use '
        'get_epsilon.'
      )
    validation.check_delta('target_delta', target_delta)
    kept = self._delta_for_bounds(target_delta)
    if kept >= target_delta:
      raise ValueError(
        f'target_delta must be above estimator_delta = {kept}, the part of it '
        f'kept for bounds that fail. Found {target_delta}.'
      )
    if kept < self._least_delta_for_bounds():
      raise ValueError(
        'The reported costs were bounded for a larger delta or fewer rounds: '
        f'they need {self._least_delta_for_bounds():.3g} of delta for bounds '
        f'that fail, and target_delta = {target_delta:g} leaves {kept:.3g}.'
      )
    epsilon, order = conversion_lib.epsilon_from_costs(
      self._orders, self._costs(kept), target_delta - kept, self._conversion
    )
    at_end = order == self._orders[-1] or 1 < order == self._orders[0]
    if at_end and 0 < epsilon < math.inf:
      warnings.warn(
        f'The best order is {order}, at the end of the list from '
        f'{self._orders[0]} to {self._orders[-1]}; a longer list of orders may '
        'give a smaller epsilon.',
        stacklevel=2,
      )
    return epsilon, order

  def individual_epsilons(self, target_delta: float) -> np.ndarray:
    """Returns ε at δ of every unit of the panel, group after group.

    Private data: each belongs to the unit that it is about, and to nobody else
    unless it is released with privacy of its own.
    """
    validation.check_delta('target_delta', target_delta)
    if not self._is_exact or self._units is None:
      raise ValueError(
        'Single units are known to exact accountants of panels only. Found '
        f'composition={self._composition!r}, estimator={self._estimator!r} '
        f'and {sum(self._group_sizes)} units.'
      )
    if self._is_non_private():
      return np.full(self._units.units, math.inf)
    epsilons = self._profiles().individual_epsilons(target_delta)
    return np.minimum(epsilons, self._claimed_epsilon('dp', target_delta))

  def report(self, target_delta: float) -> list[claims.ClaimedEpsilon]:
    """Returns ε at δ by every claim that can be made, one recommended.

    Exact accountants make all of `claims.CLAIMS` but 'filter'. Others make two:
    differential privacy, and what their settings stand for.
    """
    validation.check_delta('target_delta', target_delta)
    epsilons = {'dp': self._claimed_epsilon('dp', target_delta)}
    if self._is_exact:
      for name in EXACT_ESTIMATORS:
        epsilons[name] = self._claimed_epsilon(name, target_delta)
      epsilons['paper'] = self._paper_so_far().get_epsilon(target_delta)
    else:
      epsilons[self.claim] = self.get_epsilon(target_delta)
    return claims.report(epsilons, target_delta, self.claim)

  def get_dp_epsilon(self, target_delta: float) -> float:
    """Returns the exact ε of differential privacy for all events so far.

    Infinite if a round has no worst case.
    """
    validation.check_delta('target_delta', target_delta)
    return self._claimed_epsilon('dp', target_delta)

  def get_worst_case_epsilon(self, target_delta: float) -> float:
    """Returns ε of differential privacy for all events so far, by moments.

    At the accountant's own orders; `report` has the exact one, and `ledger`
    gives the rounds to other accountants. Infinite if a round has no worst
    case.
    """
    validation.check_delta('target_delta', target_delta)
    costs = self._worst_case_costs()
    return conversion_lib.epsilon_from_costs(
      self._orders, costs, target_delta, self._conversion
    )[0]

  def reporting(self, target_delta: float) -> events.Reporting:
    """Returns how costs are to be bounded where the distances are, for ε at δ.

    Reported costs are bounded before they are composed, so the number of bounds
    must be known: it takes composition='holder'.
    """
    validation.check_delta('target_delta', target_delta)
    if self._composition != 'holder' or self._total_rounds is None:
      raise ValueError(
        "Only with composition='holder' is the number of bounds known in "
        f'advance. Found {self._composition!r}.'
      )
    kept = self._estimator_delta or ESTIMATOR_SHARE * target_delta
    orders = len(self._orders) if self._count_orders else 1
    return events.Reporting(
      self._orders,
      self._estimator,
      kept / (self._total_rounds * orders),
      self._total_rounds,
    )

  def explain(self, target_delta: float) -> dict[str, Any]:
    """Returns ε at δ with everything that it rests on, as plain data."""
    validation.check_delta('target_delta', target_delta)
    order = None
    if not self._is_exact:
      _, order = self.get_epsilon_and_optimal_order(target_delta)
    kept = self._delta_for_bounds(target_delta)
    units = [s.count for r in self._rounds for s in r.samples if s.count]
    units += [*(len(panel) for panel in self._panels), *self._group_sizes]
    return {
      'epsilon': self.get_epsilon(target_delta),
      'delta': target_delta,
      'composition': self._composition,
      'rounds': sum(entry.repeats for entry in self._entries),
      'estimator': self._estimator,
      'fewest_units': min(units, default=None),
      'failure_probability': kept / max(self._bounds_taken(), 1),
      'delta_for_failures': kept,
      'direction': 'both' if self._is_exact else self._direction,
      'conversion': 'exact' if self._is_exact else self._conversion,
      'order': order,
    }

  def get_delta(self, target_epsilon: float) -> float:
    """Returns δ at ε for all events so far, the part for bounds included."""
    if not target_epsilon >= 0:
      raise ValueError(
        f'target_epsilon must be non-negative. Found {target_epsilon}.'
      )
    if self._is_non_private():
      return 1.0
    if self._is_exact:
      return self._exact_delta(target_epsilon)
    tail = functools.partial(
      conversion_lib.delta_from_costs,
      self._orders,
      epsilon=target_epsilon,
      conversion=self._conversion,
    )
    exact = 1.0
    if self._conversion == 'tight':
      exact = self._claimed_delta('dp')(target_epsilon)

    def needed(delta: float) -> float:
      kept = self._delta_for_bounds(delta)
      if kept < self._least_delta_for_bounds():
        return math.inf
      return min(tail(self._costs(kept)), exact) + kept

    return self._sufficient_delta(needed)

  def would_exceed(
    self,
    event: dp_accounting.DpEvent,
    target_epsilon: float,
    target_delta: float,
  ) -> bool:
    """Tells whether `event` would bring ε at δ above the target.

    The accountant stays as it is. Stopping on the answer gives nothing away
    only if the target was fixed in advance.
    """
    return self.copy().compose(event).exceeds(target_epsilon, target_delta)

  def exceeds(self, target_epsilon: float, target_delta: float) -> bool:
    """Tells whether ε at δ is above the target.

    The answer is that of `get_epsilon`, which takes long: it is asked only if
    moments, which are never below it, do not settle the matter.
    """
    quick = math.inf
    if not 0 < target_delta < 1:
      pass  # Moments say nothing about these.
    elif not self._is_exact:
      quick, _ = self.get_epsilon_and_optimal_order(target_delta)
    elif (rest := target_delta - self._delta_for_bounds(target_delta)) > 0:
      quick, _ = conversion_lib.epsilon_from_costs(
        self._orders, self._worst_case_costs(), rest
      )
    if quick <= target_epsilon:
      return False
    return self.get_epsilon(target_delta) > target_epsilon

  def copy(self) -> 'BayesianAccountant':
    """Returns an accountant that has seen the same, and goes its own way."""
    # All that `compose` changes is replaced, never modified.
    return copy.copy(self)

  def state_dict(self) -> dict[str, Any]:
    """Returns settings and all that was seen, as data that JSON can hold."""
    seen = accountant_state.Seen(
      self._entries, self._panels, self._rounds, self._units, self._group_sizes
    )
    paper = self._paper_so_far().state_dict() if self._is_exact else None
    return seen.to_state(self.settings, paper)

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Replaces all that was seen by what `state_dict` returned.

    Args:
      state: The plain data.

    Raises:
      ValueError: The state is not one, is damaged, or comes from an accountant
        of other settings. This accountant is then unchanged.
    """
    accountant_state.check(state, self.settings)
    paper = copy.copy(self._paper)
    try:
      seen = accountant_state.Seen.from_state(
        state, self.settings, self._is_exact
      )
      if paper is not None:
        paper.load_state_dict(state['paper'])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
      raise ValueError(f'The state is damaged: {error!s}.') from error
    self._entries, self._panels, self._rounds = (
      seen.entries,
      seen.panels,
      seen.rounds,
    )
    self._units, self._group_sizes = seen.units, seen.group_sizes
    self._paper, self._for_paper = paper, ()
    self._profiles_of_units = self._charged_rounds = None

  def _check(self, rounds: Iterable[tuple[Any, ledger_lib.Entry]]) -> None:
    """Raises ValueError if rounds do not fit the settings or what was seen."""
    sizes = [len(panel) for panel in self._panels] + list(self._group_sizes)
    estimated = self._estimated_rounds()
    for event, entry in rounds:
      if event is None:
        continue
      estimated += entry.repeats
      if isinstance(event, events.ReportedCostEvent):
        self._check_reported(event)
        continue
      if self._estimator in ('betting', 'bernstein') and math.isinf(
        entry.squared_distance
      ):
        raise ValueError(
          f'estimator={self._estimator!r} needs the event to have a '
          "worst_case_squared_distance. Clip, or use estimator='student_t'."
        )
      if self._composition == 'panel':
        sizes = _check_panel(event, sizes)
    if self._total_rounds is not None and estimated > self._total_rounds:
      raise ValueError(
        f'total_rounds = {self._total_rounds} was fixed in advance; this event '
        f'would be round {estimated}.'
      )

  def _check_reported(self, event: events.ReportedCostEvent) -> None:
    if self._composition == 'panel':
      raise ValueError(
        "composition='panel' adds up the costs of single units. For reported "
        "costs use composition='holder'."
      )
    if self._estimator == 'population':
      raise ValueError(
        "Reported costs are bounds, which may fail; estimator='population' "
        'keeps nothing of delta for that. Use another.'
      )
    if len(event.costs) != len(self._orders):
      raise ValueError(
        f'costs must be of the {len(self._orders)} orders of the accountant. '
        f'Found {len(event.costs)}.'
      )

  def _add(self, rounds: Sequence[tuple[ledger_lib.Estimated, int]]) -> None:
    """Adds checked events and how often they took place."""
    if self._is_exact:
      for event, count in rounds:
        self._add_units(event.groups, count)
      return
    # Many units at once are faster.
    groups = [
      group
      for event, _ in rounds
      if not isinstance(event, events.ReportedCostEvent)
      for group in event.groups
    ]
    costs = iter(zip(groups, self._unit_costs(groups)))
    for event, count in rounds:
      if isinstance(event, events.ReportedCostEvent):
        self._add_reported(event, count)
      else:
        own = list(itertools.islice(costs, len(event.groups)))
        self._add_costs(own, count, getattr(event, 'labels', None))

  def _add_reported(self, event: events.ReportedCostEvent, count: int) -> None:
    power = self._total_rounds or 1
    reported = mean_bounds.Reported(
      power * np.array(event.costs), event.failure_probability
    )
    part = round_bounds.RoundBounds((reported,), count)
    self._rounds = (*self._rounds, part)

  def _add_costs(
    self,
    costs: Sequence[tuple[events.BayesianGaussianEvent, np.ndarray]],
    count: int,
    labels: Optional[tuple[int, ...]],
  ) -> None:
    """Adds rounds by the costs of their units, group by group."""
    if self._composition == 'panel':
      before = self._panels or (np.zeros(1),) * len(costs)
      self._panels = tuple(b + count * c for b, (_, c) in zip(before, costs))
      return
    power = self._total_rounds or 1
    kind = mean_bounds.ESTIMATORS[self._estimator]
    samples = tuple(
      kind.from_sample(power * c, power * self._largest_cost(group))
      for group, c in costs
    )
    part = round_bounds.RoundBounds(samples, count, labels)
    self._rounds = (*self._rounds, part)

  def _paper_so_far(self) -> 'BayesianAccountant':
    """Returns the paper's account of all rounds, those that wait included."""
    waiting = [
      dp_accounting.SelfComposedDpEvent(event, count)
      for event, count in self._for_paper
    ]
    paper: Any = copy.copy(self._paper)
    return paper.compose(dp_accounting.ComposedDpEvent(waiting))

  def _add_units(
    self, groups: Sequence[events.BayesianGaussianEvent], count: int
  ) -> None:
    """Adds rounds to the ledger of the units."""
    self._group_sizes = tuple(g.squared_distances.size for g in groups)
    units = self._units or unit_ledger.UnitLedger.empty(sum(self._group_sizes))
    q, a = (
      np.repeat([getattr(group, name) for group in groups], self._group_sizes)
      for name in ('participation_probability', 'inclusion_probability')
    )
    distances = np.concatenate([group.squared_distances for group in groups])
    self._units = units.added(distances, q, a, count)

  def _profiles(self) -> privacy_profiles.Profiles:
    """Returns δ_x(ε) of all units, rounds that are known exactly included."""
    if self._profiles_of_units is None:
      units = self._units or unit_ledger.UnitLedger.empty(1)
      known = [entry for entry in self._entries if not entry.estimated]
      mixed = []
      # Rounds that are known alone count for everybody.
      for kind, count in worst_case.by_label(known)[None]:
        if kind.is_drawn:
          mixed.append((loss_distribution.MixedLevel.of(*kind), count))
        else:
          ((_, squared),), q, a = kind
          units = units.added(squared, q, a, count)
      self._profiles_of_units = units.profiles(
        least_epsilon=max(
          worst_case.profiles(self._charged()).largest_epsilon,
          worst_case.profiles(self._realised()).largest_epsilon,
        ),
        mixed=mixed,
      )
    return self._profiles_of_units

  def _charged(self) -> worst_case.RoundsByLabel:
    """Returns the rounds as differential privacy is charged for them."""
    if self._charged_rounds is None:
      self._charged_rounds = worst_case.by_label(self._entries)
    return self._charged_rounds

  def _realised(self, only_estimated: bool = False) -> worst_case.RoundsByLabel:
    """Returns the rounds at the largest r² that any unit could have in them.

    It limits estimates. What differential privacy is charged may be less, where
    the worst case of a round is drawn and this one was an unlucky draw.
    """
    return worst_case.by_label(
      entry.realised
      for entry in self._entries
      if entry.estimated or not only_estimated
    )

  def _claimed_epsilon(self, claim: str, delta: float) -> float:
    """Returns ε of a claim by exact divergences, never above DP."""
    if self._is_non_private():
      return math.inf
    kept = 0.0
    largest = worst_case.profiles(self._charged()).largest_epsilon
    if claim != 'dp':
      kept = self._delta_for_bounds(delta, claim)
      largest = max(largest, self._profiles().largest_epsilon)
    if kept >= delta:
      raise ValueError(
        f'target_delta must be above estimator_delta = {kept}, the part of it '
        f'kept for bounds that fail. Found {delta}.'
      )
    epsilon = privacy_profiles.smallest_epsilon(
      functools.partial(self._claimed_delta(claim), failure_probability=kept),
      delta - kept,
      largest,
    )
    by_moments, _ = conversion_lib.epsilon_from_costs(
      self._orders, self._worst_case_costs(), delta - kept
    )
    return min(epsilon, by_moments)

  def _claimed_delta(self, claim: str) -> Callable[..., float]:
    """Returns δ of a claim as a function of ε, with which it does not grow.

    It also takes the failure_probability δ′ of a sample's bound. That bound
    falls with ε, so that the ε reported is below the true one only if it fails
    at the true one: δ′ is spent once.
    """
    worst = worst_case.profiles(self._charged())

    def limit(epsilon: float, failure_probability: float = 0.0) -> float:
      del failure_probability
      return float(np.max(worst.deltas(epsilon)))

    if claim == 'dp' or not self._group_sizes:
      return limit
    units = self._profiles()
    ends = np.cumsum(self._group_sizes)[:-1]
    shares = None
    if claim == 'sample':
      shares = units.shares(worst_case.profiles(self._realised()))

    def claimed(epsilon: float, failure_probability: float = 0.0) -> float:
      if shares is not None:
        at_epsilon = shares(epsilon)
        means = [
          mean_bounds.betting_share(group, failure_probability)
          for group in np.split(at_epsilon.shares, ends)
        ]
        delta = max(means) * at_epsilon.largest_delta
        delta = max(delta, privacy_profiles.NEGLIGIBLE_DELTA)
        return min(delta, limit(epsilon))
      deltas = units.deltas(epsilon)
      if claim == 'census':
        deltas = np.array([np.mean(g) for g in np.split(deltas, ends)])
      return min(float(np.max(deltas)), limit(epsilon))

    return claimed

  def _exact_delta(self, epsilon: float) -> float:
    """Returns δ at ε, the part for a bound that fails included."""
    claimed = self._claimed_delta(self._estimator)

    def needed(delta: float) -> float:
      kept = self._delta_for_bounds(delta)
      return claimed(epsilon, kept) + kept

    return self._sufficient_delta(needed)

  def _sufficient_delta(self, needed: Callable[[float], float]) -> float:
    """Returns the smallest δ with needed(δ) <= δ, at most 1."""
    if not self._bounds_taken() or self._estimator_delta is not None:
      return min(needed(0.5), 1.0)  # The part for bounds is the same for all δ.
    return _smallest_sufficient(needed)

  def _is_non_private(self) -> bool:
    return any(
      math.isinf(entry.squared_distance) and not entry.estimated
      for entry in self._entries
    )

  def _unit_costs(
    self, groups: Sequence[events.BayesianGaussianEvent]
  ) -> list[np.ndarray]:
    """Returns ℓ of every unit and order, [units, orders] for each group."""
    result: list[np.ndarray] = [np.zeros(0)] * len(groups)
    probabilities = [group.participation_probability for group in groups]
    for q in set(probabilities):  # Many units at once are faster.
      chosen = [i for i, other in enumerate(probabilities) if other == q]
      distances = [groups[i].squared_distances for i in chosen]
      costs = chord_table.log_moments_upper_bound(
        np.concatenate(distances), q, self._orders, self._direction
      )
      ends = np.cumsum([part.size for part in distances])[:-1]
      for i, part in zip(chosen, np.split(costs, ends)):
        result[i] = log_space.included(part, groups[i].inclusion_probability)
    return result

  def _largest_cost(self, group: events.BayesianGaussianEvent) -> np.ndarray:
    """Returns ℓ of the farthest unit that a group could have."""
    worst = group.worst_case_squared_distance
    kind = worst_case.Kind(
      ((1.0, math.inf if worst is None else worst),),
      group.participation_probability,
      group.inclusion_probability,
    )
    return worst_case.cost(kind, self._orders, self._direction)

  def _costs(self, delta_for_bounds: float) -> np.ndarray:
    """Returns c(λ), true for all orders but with the given probability.

    At most those of the worst case, also where costs were reported.
    """
    bounds = self._bounds_taken()
    # Where no bound is taken, the probability that one fails is not used.
    failure = delta_for_bounds / bounds if bounds else 0.5
    worst = self._costs_of(self._charged())
    known = [entry for entry in self._entries if not entry.estimated]
    costs = self._costs_of(worst_case.by_label(known))[None]
    costs = costs + round_bounds.totals(
      self._rounds,
      list(worst),
      len(self._orders),
      failure,
      self._total_rounds or 1,
    )
    if self._panels:
      kind = mean_bounds.ESTIMATORS[self._estimator]
      limits = self._costs_of(self._realised(only_estimated=True))
      limit = np.max([*limits.values()], axis=0)
      samples = tuple(kind.from_sample(panel, limit) for panel in self._panels)
      part = round_bounds.RoundBounds(samples, 1)
      costs = costs + part.log_upper_bound(failure)
    return np.max(np.minimum(costs, [*worst.values()]), axis=0)

  def _worst_case_costs(self) -> np.ndarray:
    """Returns the costs of differential privacy, of whom loses most."""
    return np.max([*self._costs_of(self._charged()).values()], axis=0)

  def _costs_of(
    self, rounds: worst_case.RoundsByLabel
  ) -> dict[Optional[int], np.ndarray]:
    return worst_case.costs(rounds, self._orders, self._direction)

  def _estimated_rounds(self) -> int:
    return sum(entry.repeats for entry in self._entries if entry.estimated)

  def _bounds_taken(self) -> int:
    """Returns how many bounds ε rests on; the chances that they fail add up."""
    rounds = self._estimated_rounds()
    if not rounds or self._estimator in ('population', 'census', 'each'):
      return 0
    if self._estimator == 'sample':
      return 1
    if self._composition == 'panel':
      rounds = 1
    elif self._composition == 'holder':
      rounds = self._total_rounds or rounds
    return rounds * (len(self._orders) if self._count_orders else 1)

  def _least_delta_for_bounds(self) -> float:
    """Returns what reported costs need at least; less by rounding will do."""
    failures = [
      sample.failure_probability
      for part in self._rounds
      for sample in part.samples
      if isinstance(sample, mean_bounds.Reported)
    ]
    return max(failures, default=0.0) * self._bounds_taken() * (1 - 1e-9)

  def _delta_for_bounds(
    self, delta: float, claim: Optional[str] = None
  ) -> float:
    """Returns the part of δ for bounds that fail, of one claim or its own."""
    bounds = self._bounds_taken()
    if claim is not None:
      bounds = int(claim == 'sample' and self._units is not None)
    if not bounds:
      return 0.0
    return self._estimator_delta or ESTIMATOR_SHARE * delta


def _check_exact(
  composition: str, estimator: str, direction: str, conversion: str
) -> None:
  """Raises ValueError where an exact estimator is asked for what it is not."""
  if composition != 'panel':
    raise ValueError(
      f'estimator={estimator!r} adds up what single units lose, which takes '
      f"composition='panel'. Found {composition!r}; use 'betting' there."
    )
  if (direction, conversion) != ('tight', 'tight'):
    raise ValueError(
      f'estimator={estimator!r} is exact: direction and conversion are for '
      f'moments. Found {direction!r} and {conversion!r}; use another '
      'estimator with them.'
    )


def _check_panel(event: Any, sizes: list[int]) -> list[int]:
  """Returns the sizes of the panels; raises ValueError if they are others."""
  if not event.panel:
    raise ValueError(
      "composition='panel' needs events with panel=True, of the same units "
      "in every round. For a round's own participants use "
      "composition='holder'."
    )
  found = [group.squared_distances.size for group in event.groups]
  if sizes and found != sizes:
    whole = 'A panel is measured as a whole in every round.'
    if len(sizes) == len(found) == 1:
      raise ValueError(
        f'The panel has {sizes[0]} units; the event has {found[0]}. {whole}'
      )
    raise ValueError(
      f'The panels have {sizes} units; those of the event {found}. {whole}'
    )
  return found


def _smallest_sufficient(needed: Callable[[float], float]) -> float:
  """Returns the smallest δ with needed(δ) <= δ, or 1, rounded up.

  With more δ the bounds are smaller and so is what the tail needs: whatever
  suffices, more of it does, too.
  """
  high, low = 0.0, math.log(1e-300)
  if needed(1 - 1e-12) > 1 - 1e-12:
    return 1.0
  while high - low > 1e-9:
    middle = (low + high) / 2
    if needed(math.exp(middle)) <= math.exp(middle):
      high = middle
    else:
      low = middle
  return math.exp(high)
