"""A seed of the draws can be found, and then nothing is gained by sampling."""

import numpy as np
import pytest
from scipy import special

from tests.training import runs
from tf_bdp.learning import sampling
from tf_bdp.reporting import run_report
from tf_bdp.training import known_draws

_CLIENTS, _PROBABILITY, _ROUNDS, _SEEDS = 100, 0.3, 12, 100_000


def _numbers(sampler):
  """What leaks: how many took part in each of twelve rounds."""
  return [sampler.participants(number).size for number in range(_ROUNDS)]


def _fitting_seeds(numbers):
  """Tries all likely seeds, as anybody can who has this library."""
  fitting = range(_SEEDS)
  for number, wanted in enumerate(numbers):
    fitting = [
      seed
      for seed in fitting
      if np.count_nonzero(
        np.random.default_rng([seed, 1, number]).random(_CLIENTS) < _PROBABILITY
      )
      == wanted
    ]
  return fitting


def test_twelve_numbers_of_participants_single_out_a_seed():
  seeded = sampling.Sampler(_CLIENTS, _PROBABILITY, seed=31_415)
  assert _fitting_seeds(_numbers(seeded)) == [31_415]


def test_no_seed_fits_draws_that_were_not_seeded():
  # 100,000 seeds fit twelve numbers by chance with probability 1e-8.
  assert not _fitting_seeds(_numbers(sampling.Sampler(_CLIENTS, _PROBABILITY)))


def test_draws_are_secret_unless_a_seed_is_asked_for():
  for changes, seed in (({'sampling_seed': None}, None), ({}, 2)):
    # `seed` itself, of data and weights, is 2 in both.
    sampler = runs.plan('client', **changes).sampler
    assert sampler.seed == seed
  one, other = (runs.plan('client', sampling_seed=None) for _ in range(2))
  assert any(
    one.sampler.participants(n).tolist()
    != other.sampler.participants(n).tolist()
    for n in range(30)
  )


def _gaussian_delta(epsilon, mu):
  """Balle and Wang (2018), Theorem 8."""
  return special.ndtr(mu / 2 - epsilon / mu) - np.exp(
    epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)
  )


@pytest.mark.parametrize('mechanism', ['sum', 'mean'])
def test_the_report_of_a_seeded_run_claims_no_amplification(
  mechanism, tmp_path
):
  changes = {'mechanism': mechanism, 'panel_size': None, 'estimator': None}
  plan = runs.plan('client', **changes)
  done = runs.train(
    'client',
    tmp_path,
    runner=plan.engine(runs.model, runs.data()),
    **changes,
  )
  rows = {r.claim.name: r for r in known_draws.report('client', plan, done)}
  # Who took part, round by round, as the seed tells.
  took_part = np.array([part.taking_part for part in done.measurements])
  assert 0 < np.count_nonzero(took_part) < took_part.size
  worst = np.array(
    [
      plan.mechanism.worst_case_squared_distance('client', part.participants)
      for part in done.measurements
    ]
  )
  squared = np.array([e['client'].squared_distances for e in done.events])
  for name, mu2 in (
    ('dp', np.max(worst @ took_part)),
    ('each', np.max(np.sum(squared * took_part, axis=0))),
  ):
    assert _gaussian_delta(rows[name].epsilon, mu2**0.5) == pytest.approx(
      plan.accounting.delta, rel=0.02
    )
  deltas = _gaussian_delta(
    rows['census'].epsilon, np.sum(squared * took_part, axis=0) ** 0.5
  )
  assert np.mean(deltas) == pytest.approx(plan.accounting.delta, rel=0.02)
  # Amplified, DP was told to be less.
  amplified = done.accountants['client'].get_dp_epsilon(plan.accounting.delta)
  assert rows['dp'].epsilon > 1.05 * amplified
  assert [row.recommended for row in rows.values()].count(True) == 1


def test_seeds_are_not_on_the_page(tmp_path):
  changes = {'sampling_seed': 86_420, 'noise_seed': 97_531}
  plan = runs.plan('client', **changes)
  done = runs.train(
    'client',
    tmp_path,
    runner=plan.engine(runs.model, runs.data()),
    **changes,
  )
  printed = run_report.write(tmp_path, plan, done)
  texts = [printed] + [
    (tmp_path / name).read_text('utf-8')
    for name in ('report.html', 'settings.json', 'statement.txt', 'metrics.csv')
  ]
  for text in texts:
    assert '86420' not in text
    assert '97531' not in text
  assert 'amplification by sampling is not claimed' in texts[1]
  figure = known_draws.report('client', plan, done)[0].epsilon
  for text in (printed, texts[1], texts[3]):
    assert f'{figure:.3f}' in text
  assert '"sampling_seed": "seeded"' in texts[2]
