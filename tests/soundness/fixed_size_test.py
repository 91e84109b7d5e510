"""A fixed number of participants is known: clients are replaced, not added."""

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from tests.training import runs
from tf_bdp import mechanisms
from tf_bdp.mechanisms import base
from tf_bdp.reporting import run_report
from tf_bdp.training import plan as plan_lib

_N, _ALPHA, _NOISE, _ROUNDS, _DELTA = 100, 0.1, 2.0, 100, 1e-5


def _delta_of_two_clients(epsilon, step=1e-3):
  """Returns δ at ε of two populations that differ in one client, from below.

  That client sends C, or -C; all others send 0. It is one of the 10 of 100 in a
  tenth of the draws. Losses of a round are rounded down, and added up over the
  rounds by Fourier's transform.
  """
  x = np.linspace(-20, 20, 400_001)
  with_it, with_other = (
    (1 - _ALPHA) * stats.norm.pdf(x, 0, _NOISE)
    + _ALPHA * stats.norm.pdf(x, sent, _NOISE)
    for sent in (1.0, -1.0)
  )
  masses = with_it * (x[1] - x[0])
  losses = np.floor(np.log(with_it / with_other) / step).astype(int)
  first = losses.min()
  once = np.bincount(losses - first, masses)
  size = 1 << int(np.ceil(np.log2(_ROUNDS * once.size)))
  total = np.fft.irfft(np.fft.rfft(once, size) ** _ROUNDS, size)
  loss = step * (np.arange(size) + _ROUNDS * first)
  above = loss > epsilon
  return np.sum(total[above] * -np.expm1(epsilon - loss[above]))


def _plan(kind='sum', **changes):
  mechanism = mechanisms.ClientMechanism(
    **{
      **{'kind': kind, 'noise_multiplier': _NOISE, 'clip_norm': 1.0},
      **{'participation_probability': _ALPHA, 'sampling': 'fixed_size'},
      'clients_per_round': _ALPHA * _N,
      **changes,
    }
  )
  return plan_lib.Plan(
    mechanism,
    _N,
    accounting=plan_lib.Accounting(delta=_DELTA),
    sampling='fixed_size',
  )


def _accountant(plan):
  nothing = mechanisms.measurements.Measurements(
    10, 0, 1.0, np.zeros(10), np.ones(10, bool)
  )
  event = plan.mechanism.events(nothing)['client']
  return plan.accountant('client').compose(event, _ROUNDS)


def test_what_was_told_for_adding_a_client_does_not_hold_for_replacing_one():
  # Exact for a Poisson sample of the same size: 2.36.
  poisson = dp_accounting.pld.PLDAccountant().compose(
    dp_accounting.PoissonSampledDpEvent(
      _ALPHA, dp_accounting.GaussianDpEvent(_NOISE)
    ),
    _ROUNDS,
  )
  told = poisson.get_epsilon(_DELTA)
  assert told == pytest.approx(2.34, abs=0.03)
  assert _delta_of_two_clients(told) > 50 * _DELTA


@pytest.mark.parametrize('kind', ['sum', 'mean'])
def test_a_plan_of_a_fixed_number_is_accounted_for_as_replace_one(kind):
  accountant = _accountant(_plan(kind))
  epsilon = accountant.get_epsilon(_DELTA)
  assert _delta_of_two_clients(epsilon) <= _DELTA
  # By Theorem 9 of Balle, Barthe and Gaboardi, composed on a fine grid.
  assert epsilon == pytest.approx(7.805, abs=0.005)
  relation = dp_accounting.NeighboringRelation.REPLACE_ONE
  assert accountant.neighboring_relation is relation
  (row,) = accountant.report(_DELTA)
  assert (row.claim.name, row.epsilon) == ('dp', epsilon)


def test_a_clip_norm_that_follows_a_quantile_costs_no_more():
  # The count of those below moves by one, and z covers both releases.
  adaptive = mechanisms.AdaptiveClipping(0.5)
  plan = _plan(adaptive=adaptive)
  assert plan.mechanism.worst_case_squared_distance(
    'client', 10
  ) == pytest.approx(4 / _NOISE**2, rel=1e-5)
  assert _accountant(plan).get_epsilon(_DELTA) == pytest.approx(7.805, abs=0.01)


def test_replacing_a_client_moves_no_release_by_more_than_the_worst_case():
  # Also if an update is not usable: it counts as zero, and nothing else moves.
  mechanism = _plan('mean').mechanism
  state = mechanism.initial_state()

  def released(*updates):
    usable = [u for u in updates if u is not None]
    total = np.sum([np.zeros(2), *usable], axis=0)
    sums = base.Sums([total], np.float32(len(usable)), np.float32(0))
    return mechanism.release(state, sums, lambda v, *_: v).aggregate[0]

  one, other = np.array([1.0, 0.0]), np.array([-1.0, 0.0])
  deviation = mechanism.noise_per_clip_norm * float(state.clip_norm)
  worst = mechanism.worst_case_squared_distance('client', 10) ** 0.5
  moves = [
    np.linalg.norm(released(*[one] * 9, a) - released(*[one] * 9, b))
    for a, b in ((one, other), (one, None), (other, None))
  ]
  assert max(moves) / deviation == pytest.approx(worst, rel=1e-5)


def test_the_statement_of_a_run_says_replace_one_and_no_bayesian_figure(
  tmp_path,
):
  changes = {'sampling': 'fixed_size', 'panel_size': None, 'estimator': None}
  plan = runs.plan('client', **changes)
  runner = plan.engine(runs.model, runs.data())
  done = runs.train('client', tmp_path, runner=runner, **changes)
  assert {part.participants for part in done.measurements} == {4}
  run_report.write(tmp_path, plan, done)
  statement = ' '.join((tmp_path / 'statement.txt').read_text().split())
  assert 'anyone (replace-one adjacency)' in statement
  assert 'add-or-remove' not in statement
  assert 'BDP is not claimed' in statement
  claims = run_report.privacy_of('client', plan, done).claims
  assert [row.claim.name for row in claims] == ['dp']
  wanted = plan.accountant('client').compose(
    dp_accounting.SampledWithoutReplacementDpEvent(
      8, 4, dp_accounting.GaussianDpEvent(1.5 / 2)
    ),
    runs.ROUNDS,
  )
  epsilon = wanted.get_epsilon(plan.accounting.delta)
  assert done.rows[-1]['dp_epsilon'] == pytest.approx(epsilon, rel=1e-4)
  assert f'{epsilon:.3f}' in statement
