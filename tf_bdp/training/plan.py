"""One frozen description of a run, from which everything else is made.

Options of scripts are fields of `Privacy`, `Accounting`, `Schedule` and `Seeds`
here, and of `learning.Algorithm`: each has its default and its help once. A
`Plan` puts them together with a mechanism, checks that they fit each other, and
makes the sampler, the engine and the accountants.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable, Optional

from tf_bdp import options, validation
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import (
  claims,
  events,
  individual_filter,
  mean_bounds,
  replace_one,
)
from tf_bdp.engines import base as engines
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import sampling as sampling_lib
from tf_bdp.mechanisms import base as mechanisms
from tf_bdp.mechanisms import client, instance
from tf_bdp.training import plan_checks

if TYPE_CHECKING:
  from tf_bdp.learning import federated_data

_LARGEST_DEFAULT_PANEL = 100
# Not a copy: what is registered later is an estimator, too.
_ESTIMATORS: collections.ChainMap[str, Any] = collections.ChainMap(
  mean_bounds.ESTIMATORS,
  dict.fromkeys(accountant_lib.EXACT_ESTIMATORS),
)
# Whoever knows them knows who took part, or can take the noise away.
SECRET_SEEDS = ('sampling_seed', 'noise_seed')


@dataclasses.dataclass(frozen=True)
class Privacy:
  """What is protected, by whose noise."""

  level: str = options.option(
    'client',
    "What is protected. client: clients, by the server's noise. instance_...: "
    "examples, by each client's noise; costs are added up over clients "
    '(sequential), or the largest of any client counts (parallel), or the '
    'noise of all participants together hides an example (aggregate). joint: '
    "both, by the clients' noise. split: both, each by a noise of its own.",
    choices=mechanisms.LEVELS,
  )
  mechanism: str = options.option(
    'mean',
    'What the server releases at client level: the mean of clipped updates '
    'with noise (the paper), or their noised sum over the expected number '
    '(TFF, DP-FedAvg).',
    choices=client.KINDS,
  )
  noise_multiplier: Optional[float] = options.option(
    None,
    "Standard deviation of the noise. At client level it is the server's, in "
    'units of the clip norm over the expected number of participants, by '
    "default 2. At other levels it is each client's, in units of the clip norm "
    '(--clipping=batch, by default 0.3) or of the clip norm over the batch '
    'size (--clipping=example, by default 2). 0 trains without privacy.',
  )
  server_noise_multiplier: float = options.option(
    0.0,
    "At the other levels: the server's own noise, in units of the clip norm "
    "over the expected number of participants. It adds to the clients' noise "
    '(instance_aggregate, joint) or is counted on its own (split).',
  )
  clip_norm: float = options.option(
    1.0, 'Updates, or gradients, are clipped to this norm.'
  )
  clip_quantile: Optional[float] = options.option(
    None,
    'Adaptive clipping at client level: the clip norm follows this quantile of '
    "the updates' norms.",
  )
  clipping: str = options.option(
    'batch',
    'Where examples are protected: clip the gradient of a batch as a whole, as '
    'the paper does, or the gradient of each example, as DP-SGD does.',
    choices=instance.CLIPPINGS,
  )
  example_accounting: Optional[str] = options.option(
    None,
    'How costs of examples are counted with --level=joint (by default '
    'aggregate) and split (by default parallel).',
    choices=instance.ACCOUNTINGS,
  )
  joint_reference: str = options.option(
    'zero',
    'With --level=joint: whether an absent client contributes noise around '
    'zero or around the last released mean.',
    choices=('zero', 'last_mean'),
  )
  participation_probability: float = options.option(
    0.5, 'Chance that a client takes part in a round.'
  )
  least_participants: Optional[int] = options.option(
    None,
    'The mean at client level (and with --level=split) is the sum of updates '
    'over the number of participants, or over this number if fewer came: one '
    'client then moves the mean of a few by less. By default four standard '
    'deviations below the expected number, so that it seldom matters.',
  )
  sampling: str = options.option(
    'poisson',
    'How participants are drawn. poisson: each client by itself, as the theory '
    'assumes. fixed_size: always the expected number, which everybody knows; '
    'clients are then protected from being replaced, by DP alone.',
    choices=sampling_lib.KINDS,
  )
  secure_aggregation: bool = options.option(
    False,
    "Updates and costs reach the server by TFF's secure sums alone, in its "
    'test runtime (--engine=tff).',
  )
  panel_examples: int = options.option(
    0,
    'Where examples are protected: this many examples of each client of the '
    'panel are measured in every round. With 0 the drawn examples are '
    "measured, and rounds are composed by Hoelder's inequality.",
  )

  def __post_init__(self) -> None:
    options.check_choices(self)

  def check_idle(self, *names: str) -> None:
    """Raises ValueError for options that have no effect at the level."""
    plan_checks.check_idle(self, self.level, names)

  def build(self, facts: mechanisms.Facts) -> mechanisms.Mechanism:
    """Makes the mechanism of the level."""
    return mechanisms.LEVELS[self.level](self, facts)


@dataclasses.dataclass(frozen=True)
class Accounting:
  """What is accounted for, from which measurements, and when to stop."""

  delta: float = options.option(
    1e-3, 'Delta of the privacy guarantee; below one over the clients is usual.'
  )
  example_delta: Optional[float] = options.option(
    None,
    'Delta of examples where clients are protected, too; by default --delta.',
  )
  panel_size: Optional[int] = options.option(
    None,
    'Number of clients that are measured in every round, taking part or not; '
    'by default all, at most 100. With 0 only participants are measured, and '
    "rounds are composed by Hoelder's inequality.",
  )
  held_out_clients: int = options.option(
    0,
    'At client level, with a panel: this many clients, drawn at random, never '
    'train and are measured in every round. They tell how well one can see '
    'that a client did not take part; the larger figure of both counts.',
  )
  estimator: Optional[str] = options.option(
    None,
    'The claim that is asked for, or a bound of moments. census: for a client '
    'drawn from those of this run; each: for every one of them; both need a '
    'panel of all clients. sample: for one drawn from the population that the '
    'panel was drawn from. By moments: betting and bernstein hold for all '
    "distributions; student_t is the paper's and rests on its assumption; "
    'population is census by moments. By default census where all clients are '
    'in the panel, sample for other panels, and where there is no panel '
    'betting for clients and bernstein for examples.',
    choices=_ESTIMATORS,
  )
  bdp_epsilon_budget: Optional[float] = options.option(
    None,
    'Stop before the round that would exceed this Bayesian epsilon, of the '
    'claim asked for. The number of rounds then depends on the data, and tells '
    'something about them.',
  )
  example_bdp_epsilon_budget: Optional[float] = options.option(
    None,
    'Stop before the round that would exceed this Bayesian epsilon of '
    'examples, where clients are protected, too.',
  )
  dp_epsilon_budget: Optional[float] = options.option(
    None,
    'Stop before the round that would exceed this epsilon of differential '
    'privacy, which does not depend on the data. Of clients, if these are '
    'protected, else of examples.',
  )
  filter: Optional[float] = options.option(
    None,
    'Individual filter: with --mechanism=sum every client sends nothing any '
    'more before the round that would exceed its own budget of this epsilon, '
    'at --delta. The whole run then keeps that epsilon of differential privacy '
    'for anyone, however many rounds there are.',
  )

  def __post_init__(self) -> None:
    options.check_choices(self)
    validation.check_delta('delta', self.delta)
    if self.example_delta is not None:
      validation.check_delta('example_delta', self.example_delta)
    for name in (
      *('bdp_epsilon_budget', 'example_bdp_epsilon_budget'),
      *('dp_epsilon_budget', 'filter'),
    ):
      if getattr(self, name) is not None:
        validation.check_positive(name, getattr(self, name))
    if self.panel_size and self.panel_size < mean_bounds.FEWEST_UNITS:
      raise ValueError(
        f'panel_size must be at least {mean_bounds.FEWEST_UNITS}, or 0 for '
        f'none. Found {self.panel_size}.'
      )
    if self.held_out_clients and (
      self.held_out_clients < mean_bounds.FEWEST_UNITS
    ):
      raise ValueError(
        f'held_out_clients must be at least {mean_bounds.FEWEST_UNITS}, or 0 '
        f'for none. Found {self.held_out_clients}.'
      )


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Where rounds run, how many, and what happens between them."""

  engine: str = options.option(
    'inprocess',
    "Where rounds run: in this process, on GPUs if there are any, or on TFF's "
    'C++ runtime, on CPUs.',
    choices=engines.ENGINES,
  )
  rounds: int = options.option(100, 'Train for at most this many rounds.')
  average_iterates: float = options.option(
    0.0,
    'Evaluate and save an exponential average of the weights, with this factor '
    'below 1; it takes noise out and costs no privacy. 0 for the last weights.',
  )
  evaluate_every: int = options.option(
    10, 'Rounds from one evaluation to the next.'
  )
  checkpoint_every: int = options.option(
    10, 'Rounds from one checkpoint to the next.'
  )

  def __post_init__(self) -> None:
    options.check_choices(self)
    for name in ('rounds', 'evaluate_every', 'checkpoint_every'):
      validation.check_positive_integer(name, getattr(self, name))
    if not 0 <= self.average_iterates < 1:
      raise ValueError(
        f'average_iterates must be in [0, 1). Found {self.average_iterates}.'
      )


@dataclasses.dataclass(frozen=True)
class Seeds:
  """What makes a run reproducible."""

  seed: int = options.option(
    0, 'Seed of the split of the data and of the initial weights.'
  )
  sampling_seed: Optional[int] = options.option(
    None,
    'Makes all draws reproducible, for experiments, like --noise_seed: whoever '
    'knows it knows who took part, and amplification by sampling is not '
    'claimed. Without it draws are secret.',
  )
  noise_seed: Optional[int] = options.option(
    None,
    'Makes the noise reproducible, for experiments: whoever knows it can take '
    'the noise away. Without it noise is fresh and cannot be repeated.',
  )

  def __post_init__(self) -> None:
    for name in ('seed', 'sampling_seed'):
      value = getattr(self, name)
      if value is not None and value < 0:
        raise ValueError(f'{name} must be 0 or more. Found {value}.')


@dataclasses.dataclass(frozen=True)
class Plan:
  """A run, before it starts.

  Attributes:
    mechanism: What a round releases.
    client_count: How many clients the data are of. N, the number of those that
      may train, is `training_client_count`.
    algorithm: How clients and server learn.
    accounting: What is accounted for.
    schedule: How many rounds run, and by which engine.
    seeds: What makes the run reproducible.
    sampling: 'poisson' or 'fixed_size'; see `Sampler`.
    secure_aggregation: Whether clients report costs by secure sums.
  """

  mechanism: mechanisms.Mechanism
  client_count: int
  algorithm: algorithm_lib.Algorithm = dataclasses.field(
    default_factory=algorithm_lib.Algorithm
  )
  accounting: Accounting = Accounting()
  schedule: Schedule = Schedule()
  seeds: Seeds = Seeds()
  sampling: str = 'poisson'
  secure_aggregation: bool = False

  @classmethod
  def of(
    cls,
    data: 'federated_data.FederatedData',
    privacy: Privacy,
    algorithm: algorithm_lib.Algorithm,
    **groups: Any,
  ) -> 'Plan':
    """Makes the plan of a run from options and from the data.

    Args:
      data: The clients' data.
      privacy: What is protected.
      algorithm: How clients and server learn.
      **groups: `accounting`, `schedule` and `seeds`.
    """
    steps = algorithm.local_steps(
      max(data.holdings), algorithm.client_batch_size
    )
    accounting = groups.get('accounting', Accounting())
    plan_checks.check_some_train(data.client_count, accounting.held_out_clients)
    facts = mechanisms.Facts(
      data.holdings,
      algorithm.client_batch_size,
      steps,
      accounting.held_out_clients,
    )
    return cls(
      privacy.build(facts),
      data.client_count,
      algorithm,
      sampling=privacy.sampling,
      secure_aggregation=privacy.secure_aggregation,
      **groups,
    )

  def __post_init__(self) -> None:
    plan_checks.check(self)

  def individual_filter(self) -> Optional[individual_filter.IndividualFilter]:
    """Returns fresh accounts of all clients, if they are to be kept."""
    if self.accounting.filter is None:
      return None
    return individual_filter.IndividualFilter.create(
      self.accounting.filter,
      self.delta_of('client'),
      self.mechanism.participation_probability,
      float(self.mechanism.worst_case_squared_distance('client', 0)),
      self.schedule.rounds,
      self.client_count,
    )

  @property
  def only_dp(self) -> bool:
    """Whether clients are accounted for by replace-one DP alone."""
    unit = self.mechanism.units[0]
    return self.mechanism.relation(unit) is replace_one.REPLACE_ONE

  @property
  def training_client_count(self) -> int:
    """N, how many clients may take part."""
    return self.client_count - self.accounting.held_out_clients

  @property
  def panel_size(self) -> int:
    """How many clients are measured in every round."""
    size = self.accounting.panel_size
    if size is not None:
      return size
    if self.only_dp:
      return 0
    if self.accounting.filter is not None:
      return self.client_count
    # TFF cannot compute a noisy update a second time, to measure it.
    cannot_measure = (
      self.schedule.engine == 'tff'
      and self.mechanism.local is not None
      and self.mechanism.aggregation.compares
      and self.seeds.noise_seed is None
    )
    if self.secure_aggregation or cannot_measure:
      return 0
    return min(self.training_client_count, _LARGEST_DEFAULT_PANEL)

  @functools.cached_property
  def sampler(self) -> sampling_lib.Sampler:
    """What draws participants, panel and examples.

    One for the whole run, as without a seed every sampler has its own keys.
    """
    return sampling_lib.Sampler(
      self.client_count,
      self.mechanism.participation_probability,
      self.sampling,
      self.seeds.sampling_seed,
      self.accounting.held_out_clients,
    )

  def engine(
    self,
    model_fn: Callable[[], Any],
    data: 'federated_data.FederatedData',
    **options: Any,
  ) -> engines.Engine:
    """Makes the engine.

    Args:
      model_fn: Makes a Keras model whose outputs are logits.
      data: The clients' data.
      **options: Further arguments that this engine takes.
    """
    self.check_data(data.client_count)
    return engines.create(
      self.schedule.engine,
      model_fn,
      data,
      mechanism=self.mechanism,
      algorithm=self.algorithm,
      sampler=self.sampler,
      noise_seed=self.seeds.noise_seed,
      reporting=self.reporting() if self.secure_aggregation else None,
      **options,
    )

  def check_data(self, client_count: int) -> None:
    """Raises ValueError if the number of clients is not the planned one."""
    if client_count != self.client_count:
      raise ValueError(
        f'The plan is for {self.client_count} clients; the data are of '
        f'{client_count}.'
      )

  def is_panel(self, unit: str) -> bool:
    """Whether a unit is measured on a panel."""
    return self.mechanism.is_panel(unit, self.panel_size)

  def measures_everybody(self, unit: str) -> bool:
    """Whether the panel is all units that may train."""
    protected = unit == 'client' and unit in self.mechanism.units
    return protected and self.panel_size >= self.training_client_count

  def estimator_of(self, unit: str) -> str:
    """Returns the estimator of a unit: the one asked for, if it fits it.

    An exact one is for units on a panel; 'census' and 'each' are for clients.
    """
    asked_for, panel = self.accounting.estimator, self.is_panel(unit)
    everybody = self.measures_everybody(unit)
    fits = panel or asked_for not in accountant_lib.EXACT_ESTIMATORS
    if asked_for in plan_checks.OF_EVERYBODY:
      fits = everybody
    if asked_for is not None and fits:
      return asked_for
    if panel:
      return 'census' if everybody else 'sample'
    free = unit == 'example' or self.secure_aggregation
    return 'bernstein' if free else 'betting'

  def accountant(self, unit: str) -> Any:
    """Returns a fresh accountant of a unit.

    A `BayesianAccountant`, or a `ReplaceOneAccountant` where always the same
    number of clients takes part.
    """
    if self.only_dp:
      return replace_one.ReplaceOneAccountant()
    estimator, relation = self.estimator_of(unit), self.mechanism.relation(unit)
    if self.is_panel(unit):
      return accountant_lib.BayesianAccountant(
        estimator=estimator, neighboring_relation=relation
      )
    return accountant_lib.BayesianAccountant(
      'holder',
      estimator=estimator,
      neighboring_relation=relation,
      total_rounds=self.mechanism.cost_count(
        unit, self.schedule.rounds, self.training_client_count
      ),
    )

  def accountants(self) -> dict[str, Any]:
    """Returns a fresh accountant for each unit that is protected."""
    return {unit: self.accountant(unit) for unit in self.mechanism.units}

  def report(
    self, unit: str, accountant: accountant_lib.BayesianAccountant
  ) -> list[claims.ClaimedEpsilon]:
    """Returns ε of a unit by every claim that this run can make.

    Table, page, curves and progress bar show these figures and no others.

    Args:
      unit: What is protected.
      accountant: Its accountant, with all rounds composed.
    """
    delta, names = self.delta_of(unit), self.claim_names(unit)
    epsilons = {
      row.claim.name: row.epsilon
      for row in accountant.report(delta)
      if row.claim.name in names
    }
    if self.accounting.filter is not None:
      epsilons['filter'] = self.accounting.filter
    return claims.report(epsilons, delta, self.claim_of(unit))

  def claim_names(self, unit: str) -> list[str]:
    """Returns the names of the claims that `report` has figures of."""
    names = list(self.accountant(unit).claim_names)
    if self.accounting.filter is not None:
      names.insert(1, 'filter')
    if self.measures_everybody(unit):
      return names
    return [name for name in names if name not in plan_checks.OF_EVERYBODY]

  def claim_of(self, unit: str) -> str:
    """Returns the name of the claim asked for, for which budgets hold."""
    if self.accounting.filter is not None:
      return 'filter'
    return self.accountant(unit).claim

  def epsilon_columns(self) -> list[str]:
    """Returns the columns that metrics have for the figures of `report`."""
    return [
      self.epsilon_column(unit, name)
      for unit in self.mechanism.units
      for name in self.claim_names(unit)
    ]

  def epsilon_column(self, unit: str, claim: str) -> str:
    """Returns the column of a claim; that of a second unit begins with it."""
    prefix = '' if unit == self.mechanism.units[0] else f'{unit}_'
    return f'{prefix}{claim}_epsilon'

  def reporting(self) -> Mapping[str, events.Reporting]:
    """Returns how clients bound each unit's costs in secure aggregation."""
    return {
      unit: accountant.reporting(self.delta_of(unit))
      for unit, accountant in self.accountants().items()
    }

  def delta_of(self, unit: str) -> float:
    """Returns δ of a unit."""
    example_delta = self.accounting.example_delta
    if unit == self.mechanism.units[0] or example_delta is None:
      return self.accounting.delta
    return example_delta

  def budget_of(self, unit: str) -> Optional[float]:
    """Returns the Bayesian ε at which to stop, if there is one."""
    if unit == self.mechanism.units[0]:
      return self.accounting.bdp_epsilon_budget
    return self.accounting.example_bdp_epsilon_budget

  def settings(self) -> dict[str, Any]:
    """Returns everything that determines the run, by name, as plain data."""
    mechanism = dataclasses.asdict(self.mechanism)  # type: ignore[call-overload]
    groups = (self.algorithm, self.accounting, self.schedule, self.seeds)
    return {
      'level': self.mechanism.level,
      **{f'mechanism_{name}': value for name, value in mechanism.items()},
      'client_count': self.client_count,
      'sampling': self.sampling,
      'secure_aggregation': self.secure_aggregation,
      **options.to_flat(*groups),
    }


def public_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Returns settings as a page may show them, without the secret seeds."""
  public = dict(settings)
  for name in SECRET_SEEDS:
    if public.get(name) is not None:
      public[name] = 'seeded'
  return public
