"""Tests of all random draws of a run, against their distributions.

Every test is done twice: for draws of a seed, and for those of a secret key.
"""

import hashlib
import secrets
import sys
import time
from unittest import mock

import numpy as np
import pytest
from scipy import stats

from tf_bdp.learning import sampling

# How unlikely a true hypothesis must be before a test of it fails.
_LEVEL = 1e-6
_SOURCE = 'seeded'


@pytest.fixture(params=['seeded', 'secret'], autouse=True)
def _source(request, monkeypatch):
  monkeypatch.setattr(sys.modules[__name__], '_SOURCE', request.param)


def _sampler(seed, *arguments, **options):
  """Makes a sampler of a seed, or of a key that is the same for a seed."""
  if _SOURCE == 'seeded':
    return sampling.Sampler(*arguments, **options, seed=seed)
  key = hashlib.sha256(b'%d' % seed).digest()
  with mock.patch.object(secrets, 'token_bytes', lambda size: key[:size]):
    return sampling.Sampler(*arguments, **options)


def _drawn(seed, rounds, count, probability, kind='poisson'):
  """Who took part, [rounds, clients]."""
  taken = np.zeros((rounds, count), bool)
  for number in range(rounds):
    taken[number, _draw(kind, seed, number, count, probability)] = True
  return taken


def _draw(kind, seed, number, count, probability):
  sampler = _sampler(seed, count, probability, kind)
  return sampler.participants(number)


def _panel(seed, count, size):
  return _sampler(seed, count).panel(size)


def _subset(seed, number, client, holding, size):
  sampler = _sampler(seed, 100)
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
  sampler = _sampler(3, 10)
  drawn = sampler.batches(2, 7, 4000, 0.3, 5)
  assert drawn.shape == (5, 4000)
  assert stats.binomtest(int(drawn.sum()), 20_000, 0.3).pvalue > _LEVEL
  for step in range(1, 5):
    both = np.corrcoef(drawn[0], drawn[step])[0, 1]
    assert abs(both) < 5 * 4000**-0.5
  np.testing.assert_array_equal(drawn, sampler.batches(2, 7, 4000, 0.3, 5))
  other = _sampler(4, 10)
  for different in (
    sampler.batches(3, 7, 4000, 0.3, 5),
    sampler.batches(2, 8, 4000, 0.3, 5),
    other.batches(2, 7, 4000, 0.3, 5),
  ):
    correlation = np.corrcoef(drawn.ravel(), different.ravel())[0, 1]
    assert abs(correlation) < 5 * 20_000**-0.5


def test_the_panel_of_a_clients_examples_is_the_same_in_every_round():
  sampler = _sampler(3, 10)
  members = sampler.panel_examples(7, 50, 20)
  assert members.shape == (50,)
  assert members.sum() == 20
  np.testing.assert_array_equal(members, sampler.panel_examples(7, 50, 20))
  assert not np.array_equal(members, sampler.panel_examples(8, 50, 20))
  assert np.all(sampler.panel_examples(7, 5, 20))


def test_draws_do_not_depend_on_how_many_take_part():
  # So that runs that differ in it alone have the same batches.
  few, many = (_sampler(3, 10, q) for q in (0.1, 0.9))
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
    ('held_out', 7, 'held_out must be below the 7 clients. Found 7'),
    ('held_out', -1, 'held_out must be below the 7 clients. Found -1'),
  ],
)
def test_bad_settings_are_refused_with_a_sentence(name, value, sentence):
  with pytest.raises(ValueError, match=sentence):
    sampling.Sampler(**{'client_count': 7, name: value})


def test_a_draw_with_no_probability_is_refused():
  with pytest.raises(ValueError, match='draw_probability must be between'):
    sampling.Sampler(7).batches(0, 0, 5, 1.5, 1)


# Held-out clients.


def test_held_out_clients_never_take_part_and_are_in_no_panel():
  for kind in sampling.KINDS:
    sampler = _sampler(5, 40, 0.5, kind, held_out=10)
    held_out = sampler.held_out_clients()
    assert held_out.size == 10
    assert np.all(np.diff(held_out) > 0)
    np.testing.assert_array_equal(held_out, sampler.held_out_clients())
    seen = np.concatenate([sampler.participants(n) for n in range(50)])
    everybody = np.union1d(seen, held_out)
    np.testing.assert_array_equal(everybody, np.arange(40))
    assert not np.intersect1d(seen, held_out).size
    assert not np.intersect1d(sampler.panel(20), held_out).size
    np.testing.assert_array_equal(
      sampler.panel(30), np.setdiff1d(np.arange(40), held_out)
    )
    with pytest.raises(ValueError, match=r'at most the 30 clients. Found 31'):
      sampler.panel(31)
  # Of a fixed size: half of those that may take part.
  assert sampler.participants(0).size == 15


def test_every_client_is_held_out_with_the_same_probability():
  times = np.zeros(20, int)
  for seed in range(2000):
    times[_sampler(seed, 20, held_out=5).held_out_clients()] += 1
  for part in times:
    assert stats.binomtest(int(part), 2000, 0.25).pvalue > _LEVEL


def test_nobody_is_held_out_unless_asked_for():
  assert _sampler(1, 20).held_out_clients().size == 0


# Seeds and keys.


def test_draws_of_a_seed_are_those_of_numpys_generator():
  # As in all releases, so that recorded runs are the same.
  def generator(*stream):
    return np.random.default_rng([9, *stream])

  sampler = sampling.Sampler(50, 0.3, seed=9)
  fixed = sampling.Sampler(50, 0.3, 'fixed_size', seed=9)
  for found, wanted in (
    (
      sampler.participants(4),
      np.flatnonzero(generator(1, 4).random(50) < 0.3),
    ),
    (
      fixed.participants(4),
      np.sort(generator(1, 4).choice(50, 15, replace=False)),
    ),
    (sampler.panel(7), np.sort(generator(2).choice(50, 7, replace=False))),
    (
      sampler.batches(4, 3, 6, 0.5, 2),
      generator(3, 4, 3).random((2, 6)) < 0.5,
    ),
    (
      np.flatnonzero(sampler.panel_examples(3, 20, 5)),
      np.sort(generator(4, 3).choice(20, 5, replace=False)),
    ),
    (
      sampler.subset(4, 3, 20, 5),
      np.sort(generator(5, 4, 3).choice(20, 5, replace=False)),
    ),
  ):
    np.testing.assert_array_equal(found, wanted)


def _all_draws(sampler):
  return [
    *(sampler.participants(n).tolist() for n in range(20)),
    sampler.batches(0, 1, 100, 0.5, 2).tolist(),
    sampler.subset(0, 1, 100, 50).tolist(),
  ]


def _all_of_panel(sampler):
  return [
    sampler.panel(40).tolist(),
    sampler.held_out_clients().tolist(),
    sampler.panel_examples(3, 100, 50).tolist(),
  ]


def test_without_a_seed_every_sampler_draws_otherwise_and_always_the_same():
  one, other = (sampling.Sampler(100, 0.5, held_out=20) for _ in range(2))
  assert _all_draws(one) == _all_draws(one)
  assert _all_of_panel(one) == _all_of_panel(one)
  for mine, theirs in zip(_all_draws(one), _all_draws(other)):
    assert mine != theirs
  for mine, theirs in zip(_all_of_panel(one), _all_of_panel(other)):
    assert mine != theirs
  assert not one.draws_as(other)
  assert one.draws_as(one)


def test_a_resumed_sampler_has_the_panel_and_fresh_draws():
  before, after = (sampling.Sampler(100, 0.5, held_out=20) for _ in range(2))
  # Who may train is part of the panel's key, the draws are not.
  after.resume_panel(before.panel_key)
  assert _all_of_panel(after) == _all_of_panel(before)
  for mine, theirs in zip(_all_draws(after), _all_draws(before)):
    assert mine != theirs
  assert not after.draws_as(before)
  with pytest.raises(ValueError, match=r'A panel key has 32 bytes. Found 3'):
    after.resume_panel(b'abc')


def test_seeded_samplers_draw_alike_by_their_seeds():
  one, same, other = (sampling.Sampler(9, seed=s) for s in (1, 1, 2))
  assert one.draws_as(same)
  assert not one.draws_as(other)
  assert not one.draws_as(sampling.Sampler(9))
  assert not sampling.Sampler(9).draws_as(one)


def test_keys_are_long_and_not_in_messages():
  sampler = sampling.Sampler(9)
  keys = [sampler.panel_key, sampler._draw_key]
  assert [len(key) for key in keys] == [32, 32]
  assert keys[0] != keys[1]
  for key in keys:
    assert repr(key) not in repr(sampler)
    assert key.hex() not in repr(sampler)


def test_ten_thousand_clients_are_drawn_in_no_time():
  sampler = _sampler(1, 10_000, 0.1)
  start = time.perf_counter()
  for number in range(20):
    sampler.participants(number)
    sampler.batches(number, 1, 600, 0.1, 20)
  # Measured: 0.26 ms each. A loop over clients in Python takes 100 times more.
  assert time.perf_counter() - start < 1
