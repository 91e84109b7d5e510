"""One description of a run: defaults, what does not fit, what it makes."""

import dataclasses

import dp_accounting
import numpy as np
import pytest

from tests.training import runs
from tf_bdp import options
from tf_bdp.accounting import mean_bounds
from tf_bdp.engines import in_process
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data
from tf_bdp.mechanisms import ClientMechanism, InstanceMechanism, base
from tf_bdp.training import plan as plan_lib

_GROUPS = (
  plan_lib.Privacy,
  algorithm_lib.Algorithm,
  plan_lib.Accounting,
  plan_lib.Schedule,
  plan_lib.Seeds,
)


# Settings.


def test_every_setting_has_one_name_one_default_and_a_help_text():
  names = [
    options.name_of(field)
    for group in _GROUPS
    for field in dataclasses.fields(group)
  ]
  assert len(names) == len(set(names))
  for group in _GROUPS:
    for field in dataclasses.fields(group):
      assert field.default is not dataclasses.MISSING
      assert field.metadata['help'].endswith('.')
      choices = field.metadata['choices']
      if choices is not None and field.default is not None:
        assert field.default in choices


def test_a_plan_without_groups_has_their_defaults():
  mechanism = ClientMechanism('mean', 1.0, 1.0, 0.5, 4.0)
  plan = plan_lib.Plan(mechanism, 8)
  assert plan.algorithm == algorithm_lib.Algorithm()
  assert plan.accounting == plan_lib.Accounting()
  assert plan.schedule == plan_lib.Schedule()
  assert plan.seeds == plan_lib.Seeds()
  privacy = plan_lib.Privacy()
  assert (plan.sampling, plan.secure_aggregation) == (
    *(privacy.sampling, privacy.secure_aggregation),
  )


def test_registries_are_the_choices():
  fields = {
    options.name_of(field): field
    for group in _GROUPS
    for field in dataclasses.fields(group)
  }
  assert set(base.LEVELS) == set(runs.LEVELS)
  assert set(fields['level'].metadata['choices']) == set(base.LEVELS)
  assert set(fields['estimator'].metadata['choices']) == set(
    mean_bounds.ESTIMATORS
  )


@pytest.mark.parametrize('level', runs.LEVELS)
def test_settings_of_a_plan_tell_all_that_its_options_say(level):
  settings = runs.plan(level).settings()
  for group in _GROUPS[1:]:
    names = {options.name_of(field) for field in dataclasses.fields(group)}
    assert names <= settings.keys()
  assert settings['level'] == level
  for change, name in (
    ({'clip_norm': 2.0}, 'mechanism_clip_norm'),
    ({'participation_probability': 0.4}, 'mechanism_participation_probability'),
    ({'sampling_seed': 8}, 'sampling_seed'),
    ({'sampling_seed': None}, 'sampling_seed'),
    ({'rounds': 9}, 'rounds'),
    ({'noise_seed': 8}, 'noise_seed'),
    ({'learning_rate': 0.3}, 'learning_rate'),
  ):
    assert runs.plan(level, **change).settings()[name] != settings[name]


# Mechanisms made of options.


@pytest.mark.parametrize('level', runs.LEVELS)
def test_a_mechanism_is_made_of_options_and_facts_of_the_data(level):
  plan = runs.plan(level)
  mechanism = plan.mechanism
  assert (mechanism.level, mechanism.units) == (level, runs.UNITS[level])
  assert mechanism.noise_multiplier == 1.5
  assert mechanism.clients_per_round == 0.5 * runs.CLIENTS
  if level != 'client':
    assert mechanism.batch_size == 6
    assert mechanism.total_examples == runs.CLIENTS * runs.EXAMPLES
    assert mechanism.smallest_holding == runs.EXAMPLES
    steps = 2 if plan.algorithm.name == 'fed_avg' else 1
    assert mechanism.local_steps == steps


def test_noise_has_a_default_by_where_it_is_added():
  wanted = {
    ('client', 'batch'): 2.0,
    ('instance_parallel', 'batch'): 0.3,
    ('instance_parallel', 'example'): 2.0,
  }
  for (level, clipping), noise in wanted.items():
    plan = runs.plan(
      level,
      noise_multiplier=None,
      panel_size=0,
      panel_examples=0,
      clipping=clipping,
    )
    assert plan.mechanism.noise_multiplier == noise


@pytest.mark.parametrize('level', runs.LEVELS)
def test_composition_is_by_panels_where_there_are_and_else_by_hoelder(level):
  wanted = {
    'client': {'client': None},
    # Every step of every client counts.
    'instance_sequential': {'example': runs.ROUNDS * runs.CLIENTS},
    'instance_parallel': {'example': None},
    'instance_aggregate': {'example': runs.ROUNDS},
    'joint': {'client': None, 'example': None},
    'split': {'client': runs.ROUNDS, 'example': 2 * runs.ROUNDS},
  }[level]
  plan = runs.plan(level)
  accountants = plan.accountants()
  found = {unit: a.settings for unit, a in accountants.items()}
  assert {unit: s['total_rounds'] for unit, s in found.items()} == wanted
  for unit, settings in found.items():
    panel = settings['total_rounds'] is None
    assert settings['composition'] == ('panel' if panel else 'holder')
    assert plan.is_panel(unit) == panel
    assert settings['estimator'] == 'student_t'


def test_without_a_panel_clients_are_composed_by_hoelder():
  plan = runs.plan('client', panel_size=0)
  settings = plan.accountant('client').settings
  assert not plan.is_panel('client')
  assert settings['composition'] == 'holder'
  assert settings['total_rounds'] == runs.ROUNDS


def test_accountants_are_for_the_relation_of_the_mechanism():
  relations = dp_accounting.NeighboringRelation
  for level, unit, _ in runs.LEVELS_AND_UNITS:
    wanted = relations.ADD_OR_REMOVE_ONE
    if (level, unit) == ('joint', 'client'):
      wanted = relations.REPLACE_SPECIAL
    accountant = runs.plan(level).accountant(unit)
    assert accountant.neighboring_relation == wanted


def test_the_estimator_has_a_default_by_unit():
  accountants = runs.plan('joint', estimator=None).accountants()
  found = {u: a.settings['estimator'] for u, a in accountants.items()}
  assert found == {'client': 'betting', 'example': 'bernstein'}
  secure = runs.plan('client', **_SECURE, estimator=None)
  assert secure.accountant('client').settings['estimator'] == 'bernstein'


def test_deltas_and_budgets_are_those_of_the_unit():
  one = runs.plan('instance_parallel', delta=2e-3, bdp_epsilon_budget=3.0)
  assert (one.delta_of('example'), one.budget_of('example')) == (2e-3, 3.0)
  both = runs.plan(
    'joint',
    delta=2e-3,
    example_delta=4e-3,
    bdp_epsilon_budget=3.0,
    example_bdp_epsilon_budget=5.0,
  )
  assert (both.delta_of('client'), both.budget_of('client')) == (2e-3, 3.0)
  assert (both.delta_of('example'), both.budget_of('example')) == (4e-3, 5.0)
  both = runs.plan('split', delta=2e-3, example_delta=None)
  assert both.delta_of('example') == 2e-3
  assert both.budget_of('client') is both.budget_of('example') is None


# Panels.

_FIXED_SIZE = {'sampling': 'fixed_size', 'panel_size': None, 'estimator': None}
_SECURE = {'secure_aggregation': True, 'engine': 'tff', 'panel_size': None}


@pytest.mark.parametrize(
  ('level', 'changes', 'wanted'),
  [
    ('client', {'panel_size': None}, runs.CLIENTS),
    ('client', {'panel_size': 4}, 4),
    ('client', {'panel_size': 0}, 0),
    # TFF cannot compute a noisy update a second time, unless it is seeded.
    ('split', {'panel_size': None, 'engine': 'tff'}, runs.CLIENTS),
    ('split', {'panel_size': None, 'engine': 'tff', 'noise_seed': None}, 0),
    ('split', {'panel_size': None, 'noise_seed': None}, runs.CLIENTS),
    (
      'joint',
      {'panel_size': None, 'engine': 'tff', 'noise_seed': None},
      runs.CLIENTS,
    ),
    ('client', _SECURE, 0),
  ],
)
def test_the_panel_is_everybody_where_it_can_be_measured(
  level, changes, wanted
):
  assert runs.plan(level, **changes).panel_size == wanted


def test_a_panel_is_of_a_hundred_clients_at_most():
  mechanism = ClientMechanism('mean', 1.0, 1.0, 0.5, 150.0)
  assert plan_lib.Plan(mechanism, 300).panel_size == 100


def test_sampling_is_that_of_the_plan():
  plan = runs.plan('client', **_FIXED_SIZE)
  sampler = plan.sampler
  assert plan.settings()['sampling'] == 'fixed_size'
  assert sampler.kind == 'fixed_size' and sampler.seed == 2
  assert all(len(sampler.participants(number)) == 4 for number in range(5))


def test_a_plan_has_one_sampler_which_its_engine_has_too():
  plan = runs.plan('client', sampling_seed=None)
  assert plan.sampler is plan.sampler
  assert plan.engine(runs.model, runs.data()).sampler is plan.sampler
  assert not plan.sampler.draws_as(
    runs.plan('client', sampling_seed=None).sampler
  )


@pytest.mark.parametrize('level', runs.LEVELS)
def test_a_fixed_number_is_drawn_where_that_does_not_change_the_figures(level):
  # Of examples nobody is added or removed by who takes part, and with joint
  # privacy an absent client contributes noise.
  if level in ('client', 'split'):
    return
  one, other = (
    runs.plan(level, sampling=kind) for kind in ('poisson', 'fixed_size')
  )
  assert one.mechanism == other.mechanism
  assert other.sampler.kind == 'fixed_size'


def test_a_plan_must_draw_as_its_mechanism_counts():
  mechanism = ClientMechanism('sum', 1.0, 1.0, 0.5, 4.0)
  fixed = dataclasses.replace(mechanism, sampling='fixed_size')
  for kind, other in ((mechanism, 'fixed_size'), (fixed, 'poisson')):
    with pytest.raises(ValueError, match=f'Found --sampling={other}'):
      plan_lib.Plan(kind, 8, sampling=other)
  assert plan_lib.Plan(fixed, 8, sampling='fixed_size').panel_size == 0


def test_held_out_clients_are_not_of_those_that_noise_is_for():
  plan = runs.plan('client', held_out_clients=3, panel_size=None)
  assert plan.client_count == runs.CLIENTS
  assert plan.training_client_count == 5
  # n̄ = α N, of those that may take part.
  assert plan.mechanism.clients_per_round == 0.5 * 5
  assert plan.panel_size == 5
  census = runs.plan(
    'client', held_out_clients=3, panel_size=None, estimator='population'
  )
  assert census.accountant('client').settings['estimator'] == 'population'


def test_public_settings_say_that_seeds_were_given_and_not_which():
  settings = runs.plan('client').settings()
  public = plan_lib.public_settings(settings)
  assert settings['noise_seed'] == 3
  assert public == {
    **settings,
    **{'sampling_seed': 'seeded', 'noise_seed': 'seeded'},
  }
  secret = runs.plan('client', sampling_seed=None, noise_seed=None).settings()
  assert plan_lib.public_settings(secret) == secret


# What does not fit.


@pytest.mark.parametrize(
  ('level', 'changes', 'sentence'),
  [
    ('none', {}, 'level must be one of .*client.*joint'),
    ('client', {'rounds': 0}, 'rounds must be a positive integer'),
    ('client', {'evaluate_every': 0}, 'evaluate_every must be a positive'),
    ('client', {'average_iterates': 1.0}, r'average_iterates must be in \[0'),
    ('client', {'engine': 'none'}, 'engine must be one of'),
    ('client', {'estimator': 'none'}, 'estimator must be one of'),
    ('client', {'delta': 0.0}, 'delta must be above 0'),
    ('client', {'delta': -1e-3}, 'delta must be above 0'),
    ('joint', {'example_delta': 0.0}, 'example_delta must be above 0'),
    ('client', {'sampling': 'none'}, 'sampling must be one of'),
    ('client', {'seed': -1}, 'seed must be 0 or more. Found -1'),
    ('client', {'sampling_seed': -1}, 'sampling_seed must be 0 or more. Found'),
    # A fixed number of participants.
    *(
      (
        *('client', {**_FIXED_SIZE, name: value}),
        f'--{name} has no effect with --sampling=fixed_size',
      )
      for name, value in (
        *(('panel_size', 5), ('estimator', 'betting')),
        *(('bdp_epsilon_budget', 1.0), ('held_out_clients', 3)),
      )
    ),
    (
      *('client', {**_FIXED_SIZE, 'secure_aggregation': True, 'engine': 'tff'}),
      'there are none. Use --sampling=poisson',
    ),
    (
      *('split', {'sampling': 'fixed_size'}),
      'drawn by --sampling=poisson. Found --sampling=fixed_size',
    ),
    (
      *('client', {**_FIXED_SIZE, 'participation_probability': 0.05}),
      'found 0.4, which is nobody',
    ),
    # Held-out clients.
    ('client', {'held_out_clients': 2}, 'must be at least 3, or 0 for none'),
    ('client', {'held_out_clients': -1}, 'must be at least 3, or 0 for none'),
    ('client', {'held_out_clients': 8}, 'must leave clients that train'),
    ('client', {'held_out_clients': 4}, 'at most the 4 clients. Found 5'),
    (
      *('client', {'held_out_clients': 3, 'panel_size': 0}),
      'measured beside a panel. Found panel_size = 0',
    ),
    *(
      (level, {'held_out_clients': 3}, 'noise of the server alone')
      for level in runs.LEVELS
      if level != 'client'
    ),
    ('client', {'panel_size': 2}, 'panel_size must be at least 3'),
    ('client', {'panel_size': 99}, 'panel must be at most the 8 clients'),
    ('client', {'bdp_epsilon_budget': -1.0}, 'bdp_epsilon_budget must be pos'),
    ('client', {'dp_epsilon_budget': 0.0}, 'dp_epsilon_budget must be positiv'),
    (
      *('joint', {'example_bdp_epsilon_budget': 0.0}),
      'example_bdp_epsilon_budget must be positive',
    ),
    *(
      (level, {name: 0.5}, f'--{name} has no effect with --level={level}')
      for level in ('client', 'instance_aggregate')
      for name in ('example_delta', 'example_bdp_epsilon_budget')
    ),
    *(
      ('client', change, 'has no effect with --level=client. Leave it out')
      for change in (
        {'server_noise_multiplier': 1.0},
        {'clipping': 'example'},
        {'example_accounting': 'parallel'},
        {'joint_reference': 'last_mean'},
        {'panel_examples': 3},
      )
    ),
    *(
      (level, change, f'has no effect with --level={level}')
      for level in ('instance_parallel', 'split')
      for change in (
        {'mechanism': 'sum'},
        {'clip_quantile': 0.5},
        {'joint_reference': 'last_mean'},
      )
    ),
    # Mechanisms.
    ('joint', {'noise_multiplier': -1.0}, 'noise_multiplier must be non-neg'),
    ('joint', {'noise_multiplier': np.nan}, 'noise_multiplier must be non-neg'),
    (
      *('split', {'server_noise_multiplier': -1.0}),
      'server_noise_multiplier must be non-negative',
    ),
    ('joint', {'clip_norm': 0.0}, 'clip_norm must be positive'),
    ('client', {'participation_probability': 1.5}, 'must be between 0 and 1'),
    ('joint', {'algorithm': 'fed_avg'}, 'Joint privacy is for FedSGD only'),
    ('joint', {'panel_examples': 2}, 'panel_examples must be at least 3'),
    (
      *('instance_sequential', {'panel_examples': 3}),
      'there is no panel of examples',
    ),
    (
      *('instance_parallel', {'server_noise_multiplier': 1.0}),
      'server_noise_multiplier must be 0',
    ),
    (
      *('split', {'example_accounting': 'aggregate'}),
      'cannot be counted together',
    ),
    ('split', {'server_noise_multiplier': 0.0}, 'needs both'),
    ('joint', {'clipping': 'none'}, 'clipping must be one of'),
    # Panels.
    *(
      (level, {'panel_size': 0}, 'A panel of examples needs a panel of clients')
      for level in ('joint', 'instance_parallel')
    ),
    ('client', {'estimator': 'population'}, 'with all 8 clients in the panel'),
    (
      *('joint', {'estimator': 'population', 'panel_size': 8}),
      'it is for client privacy',
    ),
    # Secure aggregation.
    ('client', {**_SECURE, 'engine': 'inprocess'}, 'Add --engine=tff'),
    ('client', {**_SECURE, 'panel_size': 4}, 'Leave out --panel_size'),
    ('joint', _SECURE, 'Leave out --panel_size and --panel_examples'),
    ('client', {**_SECURE, 'estimator': 'betting'}, 'needs the single costs'),
  ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(level, changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    runs.plan(level, **changes)


def test_a_panel_of_everybody_may_be_taken_for_everybody():
  plan = runs.plan('client', estimator='population', panel_size=None)
  assert plan.accountant('client').settings['estimator'] == 'population'


def test_costs_are_reported_where_their_number_is_known():
  plan = runs.plan('split', **_SECURE, estimator='bernstein')
  reporting = plan.reporting()
  assert tuple(reporting) == ('client', 'example')
  assert reporting['client'].power == runs.ROUNDS
  assert reporting['example'].power == 2 * runs.ROUNDS
  assert {part.estimator for part in reporting.values()} == {'bernstein'}
  with pytest.raises(ValueError, match="Only with composition='holder'"):
    runs.plan('joint').reporting()


# Engines.


def test_a_plan_makes_its_engine():
  runner = runs.engine('client')
  assert isinstance(runner, in_process.InProcessEngine)
  assert runner.client_count == runs.CLIENTS
  assert runner.mechanism == runs.plan('client').mechanism


def test_data_of_other_clients_are_refused():
  data = federated_data.FederatedData(
    runs.data().features, runs.data().labels, [np.arange(4), np.arange(4, 8)]
  )
  with pytest.raises(ValueError, match='for 8 clients; the data are of 2'):
    runs.plan('client').engine(runs.model, data)


def test_data_that_do_not_fit_the_mechanism_are_refused():
  mechanism = runs.plan('instance_sequential').mechanism
  assert isinstance(mechanism, InstanceMechanism)
  for algorithm, changes, sentence in (
    ('fed_avg', {'local_steps': 1}, 'takes up to 2 local steps'),
    ('fed_sgd', {'smallest_holding': 13}, 'a client has 12 examples'),
  ):
    plan = plan_lib.Plan(
      dataclasses.replace(mechanism, **changes),
      runs.CLIENTS,
      algorithm_lib.Algorithm(algorithm),
    )
    with pytest.raises(ValueError, match=sentence):
      plan.engine(runs.model, runs.data())
