"""How the tests of this folder call the instance mechanisms: here only."""

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.mechanisms import oracles
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import ledger
from tf_bdp.mechanisms import instance, joint, measurements, split

DELTA = 1e-5
ORDERS = (1, 2, 4, 8, 16)
# σ, C, B, α, n̄, N and z, of which no two are alike.
SIGMA, CLIP, BATCH, ALPHA, EXPECTED, TOTAL = 0.8, 1.5, 4, 0.25, 6.0, 400
SERVER = 0.7
CLIENTS = 24  # n̄ / α
INSTANCE_LEVELS = tuple(f'instance_{a}' for a in instance.ACCOUNTINGS)
LEVELS = (*INSTANCE_LEVELS, 'joint', 'split')
CLIPPINGS = instance.CLIPPINGS
SERVERS = st.sampled_from([0.0, SERVER])

every_level = pytest.mark.parametrize('level', LEVELS)
# All that can be together.
every_kind = pytest.mark.parametrize(
  'level, clipping, server',
  [
    (level, clipping, server)
    for level in LEVELS
    for clipping in CLIPPINGS
    for server in (0.0, SERVER)
    if (server and level in ('instance_aggregate', 'joint'))
    or bool(server) == (level == 'split')
  ],
)
# The tests' lists of orders are short.
ignore_best_order = pytest.mark.filterwarnings('ignore:The best order')

_KINDS = {
  'joint': (joint.JointMechanism, {'accounting': 'aggregate'}),
  'split': (
    split.SplitMechanism,
    {'accounting': 'parallel', 'server_noise_multiplier': SERVER},
  ),
}


def make_mechanism(level='instance_aggregate', **more):
  accounting = level.removeprefix('instance_')
  kind, own = _KINDS.get(
    level, (instance.InstanceMechanism, {'accounting': accounting})
  )
  settings = {
    'noise_multiplier': SIGMA,
    'clip_norm': CLIP,
    'batch_size': BATCH,
    'participation_probability': ALPHA,
    'clients_per_round': EXPECTED,
    'total_examples': TOTAL,
    **own,
  }
  return kind(**{**settings, **more})


def definition(mechanism):
  """The same numbers, for the definition of what is released."""
  return oracles.Definition(
    mechanism.clipping,
    mechanism.clip_norm,
    mechanism.noise_multiplier,
    mechanism.server_noise_multiplier,
    mechanism.batch_size,
    mechanism.clients_per_round,
  )


def make_groups(parts, in_every_round=True):
  """Groups from tuples of client, step, holding and squared moves over C²."""
  groups = measurements.ExampleGroups.of(
    [(*part[:3], np.asarray(part[3]), in_every_round) for part in parts]
  )
  # As exact as the tests' numbers.
  moves = np.concatenate([np.zeros(0), *(part[3] for part in parts)])
  return groups._replace(squared_moves=moves)


def no_groups():
  return measurements.ExampleGroups.of([])


def random_groups(clients, holding=20, steps=1, units=5, most=1.0, seed=0):
  generator = np.random.default_rng(seed)
  return make_groups(
    [
      (client, step, holding, most * generator.random(units))
      for client in range(clients)
      for step in range(steps)
    ]
  )


def measured(squared_updates, count, took_part=True, panel=False, groups=None):
  """A round's measurements of clients, and of examples in groups.

  All clients took part or not, unless it is told of each.
  """
  squared_updates = np.asarray(squared_updates, dtype=np.float64)
  took_part = np.broadcast_to(took_part, squared_updates.shape)
  return measurements.Measurements(
    count, 0, CLIP, squared_updates, took_part, panel, groups
  )


def example_event(mechanism, parts, count):
  """Of groups, or of the tuples that make them."""
  groups = make_groups(parts) if isinstance(parts, list) else parts
  return mechanism.events(measured([], count, groups=groups))['example']


def single_example_event(mechanism, holding, squared_move, count):
  """Of one client whose examples all move as far."""
  return example_event(mechanism, [(0, 0, holding, [squared_move] * 3)], count)


def client_event(
  mechanism, squared_updates, count, took_part=True, panel=False
):
  """As `measured`; without examples, which do not matter to clients."""
  round_ = measured(squared_updates, count, took_part, panel, no_groups())
  return mechanism.events(round_)['client']


def all_events(
  mechanism, squared_updates, groups, count, panel=False, took_part=True
):
  """Of all units; as `client_event` and `example_event`."""
  return mechanism.events(
    measured(squared_updates, count, took_part, panel, groups)
  )


def reported_event(mechanism, unit, costs, failure_probability, count):
  """Of a round in which all that the server learnt was these costs."""
  costs = measurements.ReportedCosts(costs, failure_probability)
  round_ = measured([], count)._replace(
    reported=dict.fromkeys(mechanism.units, costs)
  )
  return mechanism.events(round_)[unit]


def local_events(mechanism, groups, count):
  return mechanism.local_events(measured([], count, groups=groups))


def sampled(event):
  """The groups of all rounds of an event."""
  return [group for part, _ in ledger.rounds_of(event) for group in part.groups]


def make_accountant(composition='product', **settings):
  settings.setdefault('orders', ORDERS)
  return accountant_lib.BayesianAccountant(composition, **settings)


def population_epsilon(event):
  accountant = make_accountant(estimator='population').compose(event)
  return accountant.get_epsilon(DELTA)
