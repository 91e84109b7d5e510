"""The noise is the same however many take part: N is fixed in advance."""

import numpy as np
import pytest

from tests.training import runs
from tf_bdp.mechanisms import base


@pytest.mark.parametrize('kind', ['poisson', 'fixed_size'])
@pytest.mark.parametrize('mechanism', ['sum', 'mean'])
@pytest.mark.parametrize('clip_quantile', [None, 0.5])
def test_the_servers_noise_does_not_tell_how_many_took_part(
  mechanism, clip_quantile, kind
):
  changes = {'mechanism': mechanism, 'clip_quantile': clip_quantile}
  if kind == 'fixed_size':
    changes |= {'sampling': kind, 'panel_size': None, 'estimator': None}
  plan = runs.plan('client', **changes)
  aggregation, seen = plan.mechanism.aggregation, set()

  def add_noise(values, deviation, purpose):
    seen.add((purpose, float(deviation)))
    return values

  for count in (0, 1, 3, 8):
    sums = base.Sums([np.ones(2)], np.float32(count), np.float32(count))
    aggregation.release(aggregation.initial_state(), sums, add_noise)
  assert len(seen) == (1 if clip_quantile is None else 2)
  # z C / n̄ of N = 8 clients that take part with probability 1/2.
  if clip_quantile is None:
    assert seen == {(base.UPDATE_NOISE, 1.5 / 4)}


@pytest.mark.parametrize('level', ['instance_aggregate', 'joint', 'split'])
def test_the_servers_noise_on_top_of_the_clients_does_not_either(level):
  plan = runs.plan(level, server_noise_multiplier=2.0)
  aggregation, seen = plan.mechanism.aggregation, set()

  def add_noise(values, deviation, purpose):
    seen.add((purpose, float(deviation)))
    return values

  for count in (0, 1, 3, 8):
    sums = base.Sums([np.ones(2)], np.float32(count), np.float32(count))
    aggregation.release(aggregation.initial_state(), sums, add_noise)
  assert seen == {(base.UPDATE_NOISE, 2.0 / 4)}
