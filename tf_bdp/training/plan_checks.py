"""Which options of a run fit each other; a sentence for those that do not."""

import dataclasses
from typing import TYPE_CHECKING, Any

from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.mechanisms import client

if TYPE_CHECKING:
  from tf_bdp.training import plan as plan_lib

# They take the panel for everybody; 'population' does so by moments.
OF_EVERYBODY = ('census', 'each')


def check(plan: 'plan_lib.Plan') -> None:
  """Raises ValueError, naming what is wrong, unless the plan can be run."""
  accounting, mechanism = plan.accounting, plan.mechanism
  if plan.secure_aggregation:
    _check_secure(plan)
  _check_sampling(plan)
  if accounting.held_out_clients:
    _check_held_out(plan)
  plan.sampler.panel(plan.panel_size)
  if accounting.filter is not None:
    _check_filter(plan)
  if len(mechanism.units) == 1:
    idle = ('example_delta', 'example_bdp_epsilon_budget')
    check_idle(accounting, mechanism.level, idle)
  local = mechanism.local
  if local is not None and local.panel_examples and not plan.panel_size:
    raise ValueError(
      'A panel of examples needs a panel of clients. Found panel_size = 0 '
      f'with panel_examples = {local.panel_examples}.'
    )
  _check_estimator(plan)


def check_idle(group: Any, level: str, names: tuple[str, ...]) -> None:
  """Raises ValueError for options that have no effect at a level."""
  for field in dataclasses.fields(group):
    if field.name in names and getattr(group, field.name) != field.default:
      raise ValueError(
        f'--{field.name} has no effect with --level={level}. Leave it out.'
      )


def check_some_train(client_count: int, held_out: int) -> None:
  """Raises ValueError if all clients are held out."""
  if held_out >= client_count:
    raise ValueError(
      f'held_out_clients must leave clients that train. Found {held_out} of '
      f'{client_count}.'
    )


def _check_sampling(plan: 'plan_lib.Plan') -> None:
  """Raises ValueError for draws that the mechanism's events are not of."""
  samplings = getattr(plan.mechanism, 'samplings', ('poisson',))
  if plan.sampling not in samplings:
    raise ValueError(
      f'The mechanism of --level={plan.mechanism.level} accounts for '
      f'participants drawn by --sampling={" or ".join(samplings)}. Found '
      f'--sampling={plan.sampling}.'
    )
  if not plan.only_dp:
    return
  for name in (
    *('panel_size', 'held_out_clients', 'estimator', 'bdp_epsilon_budget'),
  ):
    if getattr(plan.accounting, name):
      raise ValueError(
        f'--{name} has no effect with --sampling=fixed_size: a fixed number '
        'of clients is accounted for by differential privacy alone. Leave it '
        'out, or use --sampling=poisson.'
      )
  if plan.secure_aggregation:
    raise ValueError(
      'With --secure_aggregation clients report Bayesian costs, and with '
      '--sampling=fixed_size there are none. Use --sampling=poisson.'
    )


def _check_held_out(plan: 'plan_lib.Plan') -> None:
  """Raises ValueError where held-out clients cannot be measured."""
  held_out = plan.accounting.held_out_clients
  if plan.mechanism.units != ('client',) or plan.mechanism.local is not None:
    raise ValueError(
      'held_out_clients are measured by what they would send: it is for '
      'clients protected by noise of the server alone. Found '
      f'held_out_clients = {held_out} with --level={plan.mechanism.level}.'
    )
  check_some_train(plan.client_count, held_out)
  if not plan.panel_size:
    raise ValueError(
      'held_out_clients are measured beside a panel. Found panel_size = 0 '
      f'with held_out_clients = {held_out}.'
    )


def _check_secure(plan: 'plan_lib.Plan') -> None:
  """Raises ValueError for what secure sums do not allow."""
  local = plan.mechanism.local
  if plan.schedule.engine != 'tff':
    raise ValueError(
      "--secure_aggregation is done by TFF's secure sums. Add --engine=tff."
    )
  if plan.accounting.panel_size or (local and local.panel_examples):
    raise ValueError(
      'A panel adds up costs over rounds, which clients under secure '
      'aggregation would have to keep; those of TFF keep nothing. Leave out '
      '--panel_size and --panel_examples: composition is by Hoelder.'
    )
  if plan.accounting.estimator == 'betting':
    raise ValueError(
      'The betting estimator needs the single costs. With '
      '--secure_aggregation use --estimator=bernstein or student_t.'
    )


def _check_filter(plan: 'plan_lib.Plan') -> None:
  """Raises ValueError for what the individual filter does not allow."""
  mechanism = plan.mechanism
  if not isinstance(mechanism, client.ClientMechanism) or (
    mechanism.level != 'client'
  ):
    raise ValueError(
      '--filter lets single clients leave: it is for --level=client. Found '
      f'--level={mechanism.level}.'
    )
  if mechanism.kind != 'sum':
    raise ValueError(
      '--filter needs --mechanism=sum, under which a client moves what is '
      'released by its own update and by nothing of the others. Found '
      f'--mechanism={mechanism.kind}.'
    )
  if mechanism.adaptive is not None:
    raise ValueError(
      '--filter does not count what adaptive clipping releases about norms. '
      'Leave out --clip_quantile.'
    )
  if not mechanism.noise_multiplier:
    raise ValueError(
      '--filter needs noise: without it no update fits any budget. Found '
      '--noise_multiplier=0.'
    )
  if plan.secure_aggregation:
    raise ValueError(
      '--filter keeps an account for every client, which the server cannot '
      'under secure aggregation. Leave out --secure_aggregation.'
    )
  if plan.sampling != 'poisson':
    raise ValueError(
      '--filter counts clients that come independently of each other. Use '
      f'--sampling=poisson. Found --sampling={plan.sampling}.'
    )
  if plan.algorithm.examples_per_round:
    raise ValueError(
      "--filter measures the update of all of a client's examples: a random "
      'choice of them makes it random. Leave out --examples_per_round.'
    )
  if plan.accounting.held_out_clients:
    raise ValueError(
      '--filter rests on nothing that held-out clients tell. Leave out '
      '--held_out_clients.'
    )
  if plan.accounting.bdp_epsilon_budget is not None:
    raise ValueError(
      '--filter holds for a number of rounds that tells nothing. Leave out '
      '--bdp_epsilon_budget, at which the data decide.'
    )
  if plan.panel_size < plan.client_count:
    raise ValueError(
      f'--filter measures all {plan.client_count} clients in every round. '
      f'Leave out --panel_size. Found {plan.panel_size}.'
    )


def _check_estimator(plan: 'plan_lib.Plan') -> None:
  """Raises ValueError for an estimator that the panel is not made for."""
  estimator, units = plan.accounting.estimator, plan.mechanism.units
  everybody = plan.measures_everybody('client') and (
    estimator in OF_EVERYBODY or units == ('client',)
  )
  if estimator in ('population', *OF_EVERYBODY) and not everybody:
    raise ValueError(
      f'estimator={estimator} takes the panel for everybody: it is for '
      f'client privacy, with all {plan.training_client_count} clients in '
      f'the panel. Found panel_size = {plan.panel_size}.'
    )
  exact = estimator in accountant_lib.EXACT_ESTIMATORS
  if exact and not any(plan.is_panel(unit) for unit in units):
    raise ValueError(
      f'estimator={estimator} adds up what single units lose: it needs a '
      'panel, which is measured in every round. Add --panel_size or '
      '--panel_examples, or use betting or bernstein.'
    )
