"""Tests of loss distributions and privacy profiles against independent truths."""

import math

import dp_accounting
import hypothesis
import mpmath
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import sparse, stats

from tf_bdp.accounting import loss_distribution as loss_lib
from tf_bdp.accounting import privacy_profiles

Level = loss_lib.Level
_EPSILONS = np.array([0.0, 0.05, 0.3, 1.0, 2.5])


def _compose(rounds, squared_mu=0.0, **settings):
  """The profile of one unit with rounds of [r, q, a, count]."""
  levels = [Level(*row[:3]) for row in rounds]
  counts = sparse.csr_matrix([[float(row[3]) for row in rounds]])
  return privacy_profiles.compose(
    np.array([squared_mu]), levels, counts, **settings
  )


def _epsilon(profile, delta):
  return privacy_profiles.smallest_epsilon(
    lambda e: profile.deltas(e)[0], delta, profile.largest_epsilon
  )


# --- The closed form.


def _gaussian_by_mpmath(mu, epsilon):
  with mpmath.workdps(60):
    mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)
    return float(
      mpmath.ncdf(mu / 2 - epsilon / mu)
      - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)
    )


@pytest.mark.parametrize('mu', [1e-6, 1e-3, 0.1, 1.0, 7.0, 60.0])
@pytest.mark.parametrize('deviations', [-30, -1, -1e-3, 0.0, 1e-3, 2, 9, 30])
def test_the_gaussian_divergence_is_that_of_mpmath(mu, deviations):
  epsilon = max(0.0, mu * mu / 2 + deviations * mu)
  expected = _gaussian_by_mpmath(mu, epsilon)
  found = float(privacy_profiles.gaussian_delta(np.array([mu]), epsilon)[0])
  # Both terms are nearly the same where μ is small.
  assert found == pytest.approx(expected, rel=1e-9 + 2e-13 / mu, abs=1e-300)


@pytest.mark.parametrize('mu', [0.0, 1e-200, 1e-3, 1.0, 1e3, 1e99])
def test_the_gaussian_divergence_takes_any_mu_and_epsilon(mu):
  for epsilon in (0.0, 1e-300, 1.0, 1e9, math.inf):
    delta = privacy_profiles.gaussian_delta(np.array([mu]), epsilon)
    assert 0 <= delta[0] <= 1


# --- One round.


def _one_round(level, epsilon, direction):
  """The divergence of one round, in closed form."""
  r, q, a = level
  power = math.exp(epsilon)
  if direction == 'remove':
    # P > e^ε Q beyond x.
    rest = (power - (1 - q)) / q
    x = math.log(rest) / r + r / 2
    upper = (1 - q) * stats.norm.sf(x) + q * stats.norm.sf(x - r)
    return a * (upper - power * stats.norm.sf(x))
  rest = (1 / power - (1 - q)) / q
  if rest <= 0:
    return 0.0
  x = math.log(rest) / r + r / 2
  lower = (1 - q) * stats.norm.cdf(x) + q * stats.norm.cdf(x - r)
  return a * (stats.norm.cdf(x) - power * lower)


def _divergence(loss, step, epsilon):
  losses = step * (loss.first + np.arange(loss.masses.size))
  gains = np.maximum(0.0, -np.expm1(np.minimum(epsilon - losses, 0.0)))
  return float(loss.masses @ gains) + loss.infinite_mass


@pytest.mark.parametrize('direction', loss_lib.DIRECTIONS)
@pytest.mark.parametrize(
  'level',
  [
    Level(1.0, 0.1, 1.0),
    Level(0.2, 0.01, 1.0),
    Level(4.0, 0.9, 1.0),
    Level(2.0, 1.0, 0.3),
    Level(0.05, 0.6, 0.5),
    Level(10.0, 0.001, 1.0),
  ],
)
def test_a_round_on_the_grid_is_exact_at_its_points_and_above_between(
  level, direction
):
  step = level.distance / 100
  loss = loss_lib.loss_distribution(level, step, direction)
  assert np.sum(loss.masses) + loss.infinite_mass == pytest.approx(1, abs=1e-14)
  assert np.all(loss.masses >= 0)
  for k in (0, 1, 7, 60, 150):
    exact = _one_round(level, k * step, direction)
    assert _divergence(loss, step, k * step) == pytest.approx(exact, abs=1e-13)
    between = (k + 0.4) * step
    exact = _one_round(level, between, direction)
    assert _divergence(loss, step, between) >= exact - 1e-13


# --- Several rounds: a bracket of the truth by other means.


def _bracket_of_round(level, step, direction, up):
  """Losses of small cells of x, all moved down, or all up, to the grid."""
  r, q, a = level
  x = np.linspace(-9.0, r + 9.0, 200_001)
  near = np.diff(stats.norm.cdf(x))
  far = np.diff(stats.norm.cdf(x - r))
  with np.errstate(divide='ignore'):
    loss = np.logaddexp(np.log1p(-q), np.log(q) + r * x - r * r / 2)
  masses = (1 - q) * near + q * far
  low, high = loss[:-1], loss[1:]
  if direction == 'add':
    masses, low, high = near, -loss[1:], -loss[:-1]
  places = np.ceil(high / step) if up else np.floor(low / step)
  return places.astype(int), a * masses, 1 - a


def _bracket(rounds, epsilons, step, up):
  """δ of composed rounds, from below or (but for 1e-17 a round) above."""
  results = []
  for direction in loss_lib.DIRECTIONS:
    size = 2**18  # Nothing wraps around.
    spectrum = np.ones(size // 2 + 1, dtype=complex)
    for r, q, a, count in rounds:
      places, masses, none = _bracket_of_round(
        Level(r, q, a), step, direction, up
      )
      pmf = np.bincount(places % size, masses, size)
      pmf[0] += none
      spectrum *= np.fft.rfft(pmf) ** count
    pmf = np.fft.irfft(spectrum, size)[: size // 2]
    losses = step * np.arange(size // 2)
    results.append(
      [
        float(pmf @ np.maximum(0, -np.expm1(np.minimum(e - losses, 0))))
        for e in epsilons
      ]
    )
  return np.max(results, axis=0)


_LEDGERS = {
  'one kind': [(0.5, 0.2, 1.0, 8)],
  'small q': [(1.5, 0.01, 1.0, 12)],
  'large q': [(0.3, 0.95, 1.0, 6)],
  'inclusion': [(0.6, 0.5, 0.3, 10), (0.5, 1.0, 0.4, 2)],
  'several q': [(0.5, 0.2, 1.0, 3), (0.2, 0.7, 1.0, 4), (0.9, 0.05, 0.5, 2)],
  'with sure rounds': [(0.5, 0.2, 1.0, 5), (0.7, 1.0, 1.0, 1)],
}


@pytest.mark.parametrize('name', list(_LEDGERS))
def test_a_profile_is_never_below_the_truth_and_hardly_above(name):
  rounds = _LEDGERS[name]
  sure = sum(r * r * n for r, q, a, n in rounds if q == a == 1)
  sampled = [row for row in rounds if not row[1] == row[2] == 1]
  found = _compose(sampled, sure)
  found = np.array([found.deltas(e)[0] for e in _EPSILONS])
  step = 2e-4
  below = _bracket(rounds, _EPSILONS, step, up=False)
  above = _bracket(rounds, _EPSILONS, step, up=True)
  assert np.all(found >= below - 1e-13)
  assert np.all(found <= above * 1.001 + 1e-10)


@pytest.mark.parametrize('name', ['several q', 'inclusion', 'small q'])
def test_a_profile_is_what_sampling_losses_gives(name):
  generator = np.random.default_rng(0)
  draws = 400_000
  loss = np.zeros(draws)
  for r, q, a, count in _LEDGERS[name]:
    for _ in range(count):
      x = generator.normal(size=draws) + r * (generator.random(draws) < q)
      taken = generator.random(draws) < a
      with np.errstate(divide='ignore'):
        lost = np.logaddexp(np.log1p(-q), np.log(q) + r * x - r * r / 2)
      loss += np.where(taken, lost, 0.0)
  profile = _compose(_LEDGERS[name])
  for epsilon in _EPSILONS[:4]:
    gains = np.maximum(0.0, -np.expm1(np.minimum(epsilon - loss, 0.0)))
    error = np.std(gains) / math.sqrt(draws)
    # The other direction is the smaller one here.
    assert profile.deltas(epsilon)[0] == pytest.approx(
      np.mean(gains), abs=5 * error + 1e-6
    )


@pytest.mark.parametrize(
  'r, q, count', [(0.3, 0.01, 1000), (0.1, 0.9, 20), (0.05, 0.1, 2000)]
)
def test_a_profile_agrees_with_the_pld_accountant(r, q, count):
  profiles = [
    _compose([(r, q, 1.0, count)], resolution=resolution)
    for resolution in (privacy_profiles.OF_MANY, privacy_profiles.OF_ONE)
  ]
  pld = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-5)
  pld.compose(
    dp_accounting.PoissonSampledDpEvent(
      q, dp_accounting.GaussianDpEvent(1 / r)
    ),
    count,
  )
  for delta in (1e-3, 1e-6, 1e-9):
    expected = pld.get_epsilon(delta)
    for profile in profiles:
      # PLD's own discretisation errs upwards, too.
      assert expected * (1 - 1e-4) <= _epsilon(profile, delta)
      assert _epsilon(profile, delta) <= expected * (1 + 1e-3)


@pytest.mark.parametrize('rounds', [1, 30, 1000, 100_000])
def test_gaussians_by_fourier_transforms_have_their_closed_form(rounds):
  mu = 1.3
  found = _compose([(mu / math.sqrt(rounds), 1.0, 1.0, rounds)])
  for delta in (0.1, 1e-3, 1e-6, 1e-9, 1e-13, 1e-25):
    exact = _epsilon(
      privacy_profiles.GaussianProfiles(np.array([mu**2])), delta
    )
    # Below 1e-10 moments take over from transforms.
    slack = 2e-3 if delta > 1e-8 else 0.06
    assert exact * (1 - 1e-9) <= _epsilon(found, delta) <= exact * (1 + slack)


def test_units_of_all_sizes_have_the_profiles_that_they_have_alone():
  distances = [1e-5, 1e-3, 0.02, 0.4, 5.0]
  levels = [Level(r, 0.3, 1.0) for r in distances]
  together = privacy_profiles.compose(
    np.zeros(6),
    levels,
    sparse.csr_matrix(np.vstack([np.diag([20.0] * 5), np.zeros(5)])),
  )
  epsilons = together.individual_epsilons(1e-4)
  assert epsilons[-1] == 0
  for r, epsilon in zip(distances, epsilons):
    alone = _epsilon(_compose([(r, 0.3, 1.0, 20)]), 1e-4)
    # ε is tabulated over five orders of magnitude; here it has eight.
    assert alone * (1 - 1e-3) <= epsilon <= alone * (1 + 1e-3) + 5e-3


def test_a_unit_too_far_away_has_no_privacy_and_does_not_disturb_others():
  levels = [Level(0.5, 0.3, 1.0), Level(1e6, 0.3, 1.0)]
  profiles = privacy_profiles.compose(
    np.zeros(2), levels, sparse.csr_matrix(np.eye(2))
  )
  alone = _compose([(0.5, 0.3, 1.0, 1)])
  assert profiles.deltas(1.0)[1] == 1
  assert profiles.deltas(0.1)[0] == pytest.approx(
    alone.deltas(0.1)[0], rel=1e-3
  )


def test_units_that_are_all_too_far_away_have_no_privacy():
  assert _compose([(1e6, 0.3, 1.0, 1)]).deltas(1e6)[0] == 1


# --- Properties.

_rounds = st.lists(
  st.tuples(
    st.floats(1e-3, 3),
    st.floats(1e-3, 1),
    st.floats(1e-2, 1),
    st.integers(1, 50),
  ),
  min_size=1,
  max_size=3,
)
_properties = hypothesis.settings(
  derandomize=True, max_examples=12, deadline=None
)


@_properties
@hypothesis.given(rounds=_rounds, sure=st.floats(0, 2))
def test_delta_falls_with_epsilon_and_grows_with_rounds(rounds, sure):
  profile = _compose(rounds, sure)
  more = _compose([*rounds, (0.5, 0.5, 0.5, 1)], sure)
  deltas = np.array([profile.deltas(e)[0] for e in _EPSILONS])
  assert np.all(np.diff(deltas) <= 1e-15)
  larger = np.array([more.deltas(e)[0] for e in _EPSILONS])
  assert np.all(larger >= deltas * (1 - 1e-3) - 1e-10)


@_properties
@hypothesis.given(
  distances=st.lists(st.floats(1e-3, 1), min_size=2, max_size=4),
  q=st.floats(1e-2, 1),
)
def test_shares_of_the_worst_case_do_not_grow_with_epsilon(distances, q):
  worst = _compose([(1.0, q, 1.0, 5)])
  counts = sparse.csr_matrix(5 * np.eye(len(distances)))
  if q == 1:
    units = privacy_profiles.GaussianProfiles(5 * np.square(distances))
    worst = privacy_profiles.GaussianProfiles(np.array([5.0]))
  else:
    levels = [Level(r, q, 1.0) for r in distances]
    units = privacy_profiles.compose(
      np.zeros(len(distances)),
      levels,
      counts,
      least_epsilon=worst.largest_epsilon,
    )
  shares = units.shares(worst)
  last, least = np.ones(len(distances)), 1.0
  for epsilon in np.linspace(0, 10, 60):
    found = shares(epsilon)
    assert found.largest_delta <= least
    if found.largest_delta <= privacy_profiles.NEGLIGIBLE_DELTA:
      break
    assert np.all((found.shares >= 0) & (found.shares <= last * (1 + 1e-9)))
    # They account for all that a unit has.
    whole = found.shares * found.largest_delta
    assert np.all(whole >= units.deltas(epsilon) * (1 - 1e-9) - 1e-20)
    last, least = found
