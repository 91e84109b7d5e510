"""How the tests of this folder call the instance mechanisms: here only."""

import numpy as np

from tests.mechanisms import oracles
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import ledger
from tf_bdp.mechanisms import instance

DELTA = 1e-5
ORDERS = (1, 2, 4, 8, 16)
# σ, C, B, α, n̄, N and z, of which no two are alike.
SIGMA, CLIP, BATCH, ALPHA, EXPECTED, TOTAL = 0.8, 1.5, 4, 0.25, 6.0, 400
SERVER = 0.7
CLIENTS = 24  # n̄ / α
LEVELS = instance.LEVELS
INSTANCE_LEVELS = instance.INSTANCE_LEVELS
CLIPPINGS = instance.CLIPPINGS


def make_mechanism(level='instance_aggregate', **more):
  settings = {
    'noise_multiplier': SIGMA,
    'clip_norm': CLIP,
    'batch_size': BATCH,
    'participation_probability': ALPHA,
    'expected_clients': EXPECTED,
    'total_examples': TOTAL,
  }
  if level == 'split':
    settings['server_noise_multiplier'] = SERVER
  return instance.InstanceMechanism(level, **{**settings, **more})


def definition(mechanism):
  """The same numbers, for the definition of what is released."""
  return oracles.Definition(
    mechanism.clipping,
    mechanism.clip_norm,
    mechanism.noise_multiplier,
    mechanism.server_noise_multiplier,
    mechanism.batch_size,
    mechanism.expected_clients,
  )


def make_groups(parts, in_every_round=True):
  """Groups from tuples of client, step, holding and squared moves over C²."""
  clients, steps, holdings, moves = zip(*parts)
  return instance.ExampleGroups(
    np.array(clients),
    np.array(steps),
    np.array(holdings),
    np.array([len(part) for part in moves]),
    np.concatenate([np.zeros(0), *moves]),
    np.full(len(parts), in_every_round),
  )


def no_groups():
  return instance.ExampleGroups.empty()


def random_groups(clients, holding=20, steps=1, units=5, most=1.0, seed=0):
  generator = np.random.default_rng(seed)
  return make_groups(
    [
      (client, step, holding, most * generator.random(units))
      for client in range(clients)
      for step in range(steps)
    ]
  )


def example_event(mechanism, parts, count):
  """Of groups, or of the tuples that make them."""
  groups = make_groups(parts) if isinstance(parts, list) else parts
  return mechanism.example_event(groups, count)


def single_example_event(mechanism, holding, squared_move, count):
  """Of one client whose examples all move as far."""
  return example_event(mechanism, [(0, 0, holding, [squared_move] * 3)], count)


def client_event(
  mechanism, squared_updates, count, took_part=True, panel=False
):
  """Of clients, all of whom took part or not unless it is told of each."""
  squared_updates = np.asarray(squared_updates, dtype=np.float64)
  took_part = np.broadcast_to(took_part, squared_updates.shape)
  return mechanism.client_event(squared_updates, took_part, count, CLIP, panel)


def all_events(
  mechanism, squared_updates, groups, count, panel=False, took_part=True
):
  """Of all units; as `client_event` and `example_event`."""
  squared_updates = np.asarray(squared_updates, dtype=np.float64)
  took_part = np.broadcast_to(took_part, squared_updates.shape)
  return mechanism.events(
    squared_updates, took_part, groups, count, CLIP, panel
  )


def sampled(event):
  """The groups of all rounds of an event."""
  return [group for part, _ in ledger.rounds_of(event) for group in part.groups]


def make_accountant(composition='product', **settings):
  settings.setdefault('orders', ORDERS)
  return accountant_lib.BayesianAccountant(composition, **settings)


def population_epsilon(event):
  accountant = make_accountant(estimator='population').compose(event)
  return accountant.get_epsilon(DELTA)
