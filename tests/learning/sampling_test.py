"""Tests of all random draws of a run, against their distributions."""

import numpy as np
import pytest
from scipy import stats

from tf_bdp.learning import sampling

# How unlikely a true hypothesis must be before a test of it fails.
_LEVEL = 1e-6


def _drawn(seed, rounds, count, probability, kind='poisson'):
  """Who took part, [rounds, clients]."""
  taken = np.zeros((rounds, count), bool)
  for number in range(rounds):
    taken[number, _draw(kind, seed, number, count, probability)] = True
  return taken


def _draw(kind, seed, number, count, probability):
  sampler = sampling.Sampler(count, probability, kind, seed)
  return sampler.participants(number)


def _panel(seed, count, size):
  return sampling.Sampler(count, seed=seed).panel(size)


def _subset(seed, number, client, holding, size):
  sampler = sampling.Sampler(100, seed=seed)
  return sampler.subset(number, client, holding, size)


def test_each_client_takes_part_with_the_probability():
  taken = _drawn(1, 2000, 50, 0.2)
  for part in taken.sum(axis=0):
    assert stats.binomtest(int(part), 2000, 0.2).pvalue > _LEVEL
  assert stats.binomtest(int(taken.sum()), 100_000, 0.2).pvalue > _LEVEL


def test_the_number_of_participants_is_binomial():
  sizes = _drawn(2, 3000, 10, 0.3).sum(axis=1)
  wanted = stats.binom.pmf(np.arange(11), 10, 0.3) * 3000
  found = np.bincount(sizes, minlength=11)
  # Classes that are expected fewer than five times are taken together.
  common = wanted >= 5
  result = stats.chisquare(
    [*found[common], found[~common].sum()],
    [*wanted[common], wanted[~common].sum()],
  )
  assert result.pvalue > _LEVEL
  # An empty round has a chance of 2.8 %.
  assert found[0] > 0


def test_clients_are_drawn_independently_of_each_other():
  taken = _drawn(3, 4000, 12, 0.4).astype(float)
  correlation = np.corrcoef(taken.T)
  others = correlation[~np.eye(12, dtype=bool)]
  assert np.max(np.abs(others)) < 5.5 * 4000**-0.5


def test_rounds_are_drawn_independently_of_each_other():
  taken = _drawn(4, 400, 1000, 0.3).astype(float)
  for lag in (1, 2, 3):
    one, other = taken[:-lag].ravel(), taken[lag:].ravel()
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 * one.size**-0.5


def test_seeds_that_differ_by_one_are_independent_in_all_rounds():
  one = _drawn(5, 100, 1000, 0.3).astype(float)
  other = _drawn(6, 100, 1000, 0.3).astype(float)
  for lag in (0, 1):
    # Nor are they each other's rounds, one later or earlier.
    for a, b in ((one, other), (other, one)):
      a, b = a[lag:].ravel(), b[: len(b) - lag].ravel()
      assert abs(np.corrcoef(a, b)[0, 1]) < 5 * a.size**-0.5


@pytest.mark.parametrize('kind', sampling.KINDS)
def test_a_round_is_the_same_for_the_same_seed_in_any_order(kind):
  first = [_draw(kind, 9, number, 100, 0.1) for number in range(5)]
  again = [_draw(kind, 9, number, 100, 0.1) for number in reversed(range(5))]
  for one, other in zip(first, reversed(again)):
    np.testing.assert_array_equal(one, other)
  assert any(not np.array_equal(first[0], other) for other in first[1:])


@pytest.mark.parametrize('kind', sampling.KINDS)
def test_participants_are_ascending_client_numbers_without_repetition(kind):
  for number in range(20):
    drawn = _draw(kind, 0, number, 30, 0.5)
    assert np.all(np.diff(drawn) > 0)
    assert drawn.min() >= 0
    assert drawn.max() < 30


def test_probability_one_takes_all_and_zero_nobody():
  for kind in sampling.KINDS:
    np.testing.assert_array_equal(_draw(kind, 0, 0, 7, 1.0), np.arange(7))
    assert _draw(kind, 0, 0, 7, 0.0).size == 0


def test_fixed_size_rounds_all_have_the_expected_number():
  taken = _drawn(7, 1000, 40, 0.25, 'fixed_size')
  np.testing.assert_array_equal(taken.sum(axis=1), 10)
  for part in taken.sum(axis=0):
    assert stats.binomtest(int(part), 1000, 0.25).pvalue > _LEVEL


def test_an_unknown_kind_is_refused():
  with pytest.raises(ValueError, match=r"sampling must be one of \('poisson'"):
    _draw('bernoulli', 0, 0, 7, 0.5)


def test_a_panel_is_fixed_ascending_and_without_repetition():
  panel = _panel(3, 1000, 200)
  np.testing.assert_array_equal(panel, _panel(3, 1000, 200))
  assert panel.size == 200
  assert np.all(np.diff(panel) > 0)
  assert panel.min() >= 0
  assert panel.max() < 1000
  assert not np.array_equal(panel, _panel(4, 1000, 200))


def test_every_client_is_in_a_panel_with_the_same_probability():
  members = np.zeros(20, int)
  for seed in range(2000):
    members[_panel(seed, 20, 5)] += 1
  for times in members:
    assert stats.binomtest(int(times), 2000, 0.25).pvalue > _LEVEL


def test_the_panel_is_independent_of_who_takes_part():
  shared = [
    np.intersect1d(
      _panel(seed, 100, 50), _draw('fixed_size', seed, 0, 100, 0.5)
    ).size
    for seed in range(1000)
  ]
  # Hypergeometric: 25 of deviation 2.51.
  deviation = stats.hypergeom.std(100, 50, 50)
  assert abs(np.mean(shared) - 25) < 5 * deviation / 1000**0.5


def test_a_panel_may_be_all_clients_but_not_more():
  np.testing.assert_array_equal(_panel(0, 9, 9), np.arange(9))
  with pytest.raises(ValueError, match=r'at most the 9 clients. Found 10.'):
    _panel(0, 9, 10)


def test_a_subset_is_ascending_without_repetition_and_of_its_size():
  drawn = _subset(3, 7, 11, 600, 60)
  np.testing.assert_array_equal(drawn, _subset(3, 7, 11, 600, 60))
  assert drawn.size == 60
  assert np.all(np.diff(drawn) > 0)
  assert drawn.min() >= 0
  assert drawn.max() < 600
  for other in ((4, 7, 11), (3, 8, 11), (3, 7, 12)):
    assert not np.array_equal(drawn, _subset(*other, 600, 60))


def test_every_example_is_in_a_subset_with_the_same_probability():
  members = np.zeros(20, int)
  for number in range(2000):
    members[_subset(1, number, 5, 20, 5)] += 1
  for times in members:
    assert stats.binomtest(int(times), 2000, 0.25).pvalue > _LEVEL


@pytest.mark.parametrize('size', [9, 10, 1000])
def test_a_subset_of_more_than_there_is_is_all(size):
  np.testing.assert_array_equal(_subset(0, 0, 0, 9, size), np.arange(9))


def test_batches_are_of_each_example_by_itself():
  sampler = sampling.Sampler(10, seed=3)
  drawn = sampler.batches(2, 7, 4000, 0.3, 5)
  assert drawn.shape == (5, 4000)
  assert stats.binomtest(int(drawn.sum()), 20_000, 0.3).pvalue > _LEVEL
  for step in range(1, 5):
    both = np.corrcoef(drawn[0], drawn[step])[0, 1]
    assert abs(both) < 5 * 4000**-0.5
  np.testing.assert_array_equal(drawn, sampler.batches(2, 7, 4000, 0.3, 5))
  other = sampling.Sampler(10, seed=4)
  for different in (
    sampler.batches(3, 7, 4000, 0.3, 5),
    sampler.batches(2, 8, 4000, 0.3, 5),
    other.batches(2, 7, 4000, 0.3, 5),
  ):
    correlation = np.corrcoef(drawn.ravel(), different.ravel())[0, 1]
    assert abs(correlation) < 5 * 20_000**-0.5


def test_the_panel_of_a_clients_examples_is_the_same_in_every_round():
  sampler = sampling.Sampler(10, seed=3)
  members = sampler.panel_examples(7, 50, 20)
  assert members.shape == (50,)
  assert members.sum() == 20
  np.testing.assert_array_equal(members, sampler.panel_examples(7, 50, 20))
  assert not np.array_equal(members, sampler.panel_examples(8, 50, 20))
  assert np.all(sampler.panel_examples(7, 5, 20))


def test_draws_do_not_depend_on_how_many_take_part():
  # So that runs that differ in it alone have the same batches.
  few, many = (sampling.Sampler(10, q, seed=3) for q in (0.1, 0.9))
  np.testing.assert_array_equal(few.panel(4), many.panel(4))
  np.testing.assert_array_equal(
    few.batches(1, 2, 9, 0.5, 2), many.batches(1, 2, 9, 0.5, 2)
  )
  assert set(few.participants(0)) <= set(many.participants(0))


@pytest.mark.parametrize(
  'name, value, sentence',
  [
    ('client_count', 0, 'client_count must be a positive integer. Found 0'),
    ('participation_probability', 1.5, 'must be between 0 and 1. Found 1.5'),
    ('kind', 'bernoulli', "sampling must be one of .* Found 'bernoulli'"),
    ('seed', -1, 'seed must be 0 or more. Found -1'),
  ],
)
def test_bad_settings_are_refused_with_a_sentence(name, value, sentence):
  with pytest.raises(ValueError, match=sentence):
    sampling.Sampler(**{'client_count': 7, name: value})


def test_a_draw_with_no_probability_is_refused():
  with pytest.raises(ValueError, match='draw_probability must be between'):
    sampling.Sampler(7).batches(0, 0, 5, 1.5, 1)
