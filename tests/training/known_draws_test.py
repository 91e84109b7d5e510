"""Figures without amplification, at every level."""

import numpy as np
import pytest
from scipy import optimize, special

from tests.training import runs
from tf_bdp.accounting import claims
from tf_bdp.training import known_draws

_BAYESIAN = ('each', 'census', 'sample')


def _epsilon(squared_mu, delta):
  """ε of a Gaussian mechanism: Balle and Wang (2018), Theorem 8."""
  mu = squared_mu**0.5
  return optimize.brentq(
    lambda e: (
      special.ndtr(mu / 2 - e / mu)
      - np.exp(e + special.log_ndtr(-mu / 2 - e / mu))
      - delta
    ),
    0,
    1e3,
  )


def _cohorts(plan):
  cohorts = [plan.sampler.participants(n) for n in range(runs.ROUNDS)]
  return np.array([np.isin(np.arange(runs.CLIENTS), c) for c in cohorts])


@pytest.mark.parametrize(('level', 'unit', 'prefix'), runs.LEVELS_AND_UNITS)
def test_dp_is_of_the_client_that_took_part_in_most(whole, level, unit, prefix):
  _, done = whole(level)
  plan = runs.plan(level)
  rows = {r.claim.name: r for r in known_draws.report(unit, plan, done)}
  worst = np.array(
    [
      plan.mechanism.worst_case_squared_distance(unit, part.participants)
      for part in done.measurements
    ]
  )
  if unit == 'example':
    worst = worst * plan.mechanism.local.local_steps
  delta = plan.delta_of(unit)
  wanted = _epsilon(np.max(worst @ _cohorts(plan)), delta)
  assert rows['dp'].epsilon == pytest.approx(wanted, rel=1e-3)
  assert rows['dp'].delta == delta
  has_panel = plan.is_panel(unit)
  assert tuple(rows) == (('dp', *_BAYESIAN) if has_panel else ('dp',))
  assert [row.recommended for row in rows.values()].count(True) == 1
  if has_panel:
    assert 0 < rows['census'].epsilon <= rows['each'].epsilon
    assert rows['each'].epsilon <= rows['dp'].epsilon
  assert claims.format_table(list(rows.values())).startswith('Claim')


def test_a_client_loses_nothing_in_rounds_that_it_was_not_in(whole):
  _, done = whole('client')
  plan = runs.plan('client')
  rows = {r.claim.name: r for r in known_draws.report('client', plan, done)}
  squared = np.array([e['client'].squared_distances for e in done.events])
  took_part = np.array([part.taking_part for part in done.measurements])
  members = plan.sampler.panel(plan.panel_size)
  np.testing.assert_array_equal(took_part, _cohorts(plan)[:, members])
  lost = np.sum(squared * took_part, axis=0)
  wanted = _epsilon(np.max(lost), plan.accounting.delta)
  assert rows['each'].epsilon == pytest.approx(wanted, rel=1e-3)
  always = _epsilon(np.max(np.sum(squared, axis=0)), plan.accounting.delta)
  assert rows['each'].epsilon < always


def test_examples_of_absent_clients_lose_nothing(whole):
  _, done = whole('joint')
  plan = runs.plan('joint')
  rows = {r.claim.name: r for r in known_draws.report('example', plan, done)}
  cohorts, lost = _cohorts(plan), []
  for part, cohort in zip(done.measurements, cohorts):
    groups = part.examples
    variance = plan.mechanism.example_variance(part.participants)
    moves = np.array(groups.moves()) / variance
    lost.append(moves * cohort[groups.clients][:, np.newaxis])
  wanted = _epsilon(np.max(np.sum(lost, axis=0)), plan.delta_of('example'))
  assert rows['each'].epsilon == pytest.approx(wanted, rel=1e-3)


def test_a_fixed_number_of_clients_is_replaced_also_if_it_is_known(tmp_path):
  changes = {'sampling': 'fixed_size', 'panel_size': None, 'estimator': None}
  plan = runs.plan('client', **changes)
  done = runs.train(
    'client',
    tmp_path,
    runner=plan.engine(runs.model, runs.data()),
    **changes,
  )
  (row,) = known_draws.report('client', plan, done)
  times = np.max(np.sum(_cohorts(plan), axis=0))
  wanted = _epsilon(times * 4 / 1.5**2, plan.accounting.delta)
  assert row.epsilon == pytest.approx(wanted, rel=1e-3)


def test_held_out_clients_were_in_no_round(tmp_path):
  changes = {'held_out_clients': 3, 'panel_size': None}
  plan = runs.plan('client', **changes)
  done = runs.train(
    'client',
    tmp_path,
    runner=plan.engine(runs.model, runs.data()),
    **changes,
  )
  rows = {r.claim.name: r for r in known_draws.report('client', plan, done)}
  squared = np.array(
    [
      np.concatenate([g.squared_distances for g in e['client'].groups])
      for e in done.events
    ]
  )
  took_part = np.array([part.taking_part for part in done.measurements])
  assert not np.any(took_part[:, 5:])
  wanted = _epsilon(
    np.max(np.sum(squared * took_part, axis=0)), plan.accounting.delta
  )
  assert rows['each'].epsilon == pytest.approx(wanted, rel=1e-3)


def test_secret_draws_are_not_known(whole):
  _, done = whole('client')
  plan = runs.plan('client', sampling_seed=None)
  with pytest.raises(ValueError, match='draws are secret'):
    known_draws.report('client', plan, done)


def test_without_noise_nothing_is_private(tmp_path):
  changes = {'noise_multiplier': 0.0}
  plan = runs.plan('client', **changes)
  done = runs.train(
    'client',
    tmp_path,
    runner=plan.engine(runs.model, runs.data()),
    **changes,
  )
  (row,) = known_draws.report('client', plan, done)
  assert row.epsilon == np.inf
