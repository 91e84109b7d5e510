"""Tests of the distances that clients answer with."""

import math

import numpy as np
import pytest

from tests.aggregators import builders
from tf_bdp import learning
from tf_bdp.accounting import events
from tf_bdp.aggregators import distance_samples

_CLIP, _EXPECTED = builders.CLIP, builders.EXPECTED
_PROBABILITY, _KINDS = builders.PROBABILITY, builders.KINDS
_mechanism = builders.mechanism
_process = builders.process
_run = builders.run
_clipped = builders.clipped
_leave_one_out = builders.leave_one_out
_vectors = builders.vectors


def _distances(metrics, kind, noise=1.0):
  """Moves of the released mean, from the measurements."""
  mechanism = _mechanism(kind, noise)
  measures = np.asarray(metrics['squared_measures'])
  squared = mechanism.squared_distances(
    measures,
    np.ones(measures.size, bool),
    int(metrics['participants']),
    float(metrics['clip_norm']),
  )
  return np.sqrt(squared) * noise * _CLIP / _EXPECTED


@pytest.mark.parametrize('count', [1, 2, 3, 12])
@pytest.mark.parametrize('kind', _KINDS)
def test_distances_are_those_of_leaving_one_out(kind, count):
  vectors = _vectors(count, 10 + count)
  output = _run(_process(kind), vectors)
  found = _distances(output.measurements, kind)
  wanted = _leave_one_out(kind, _clipped(vectors))
  # They come in the order of the random sample.
  np.testing.assert_allclose(np.sort(found), np.sort(wanted), rtol=1e-5)


@pytest.mark.parametrize('kind', _KINDS)
def test_opposite_clients_reach_the_worst_case_and_no_more(kind):
  axis = np.array([0, 0, 0, 7.0, 0])
  output = _run(_process(kind), [axis, -axis])
  found = _distances(output.measurements, kind, noise=0.5)
  worst = _mechanism(kind, 0.5).worst_case_squared_distance('client', 2)
  limit = math.sqrt(worst) * 0.5 * _CLIP / _EXPECTED
  np.testing.assert_allclose(found, limit, rtol=1e-6)


@pytest.mark.parametrize('kind', _KINDS)
def test_clients_that_agree_cost_nothing_under_mean_alone(kind):
  output = _run(_process(kind), [np.ones(5) * 0.3] * 4)
  found = _distances(output.measurements, kind)
  wanted = 0.0 if kind == 'mean' else np.sqrt(5) * 0.3 / _EXPECTED
  np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize('kind', _KINDS)
def test_one_that_is_left_alone_by_failures_is_measured_from_zero(kind):
  good = _vectors(1, 6)
  output = _run(_process(kind), [np.full(5, np.nan), good[0]])
  wanted = _clipped(good)
  if kind == 'mean':
    # Those that fail are zeros, and measured as well.
    wanted = np.concatenate([wanted, np.zeros((1, 5))])
  np.testing.assert_allclose(
    np.sort(_distances(output.measurements, kind)),
    np.sort(_leave_one_out(kind, wanted)),
    rtol=1e-5,
  )


@pytest.mark.parametrize('most', [0, -1, 1.5, True])
def test_the_most_distances_are_a_positive_integer(most):
  with pytest.raises(ValueError, match='max_distances must be a positive int'):
    distance_samples.DistanceSample(most)


def test_a_bounded_sample_holds_some_of_the_distances():
  vectors = _vectors(10, 7)
  everyone = np.asarray(
    _run(_process('mean'), vectors).measurements['squared_measures']
  )
  assert everyone.size == 10
  process = _process('mean', most=4)
  samples = []
  for _ in range(6):
    output = _run(process, vectors)
    sample = np.sort(output.measurements['squared_measures'])
    assert sample.size == 4
    nearest = np.argmin(np.abs(sample[:, None] - everyone), axis=1)
    np.testing.assert_allclose(sample, everyone[nearest], rtol=1e-5)
    assert len(set(nearest)) == 4
    assert output.measurements['participants'] == 10
    samples.append(tuple(nearest))
  # The same sample six times has a chance of 210^-5.
  assert len(set(samples)) > 1


def test_a_bounded_sample_of_two_is_accounted_for_by_the_worst_case():
  vectors = _vectors(8, 9)
  process = _process('mean', 0.7, seed=2, most=2)
  metrics = _run(process, vectors).measurements
  mechanism = _mechanism('mean', 0.7)
  event = learning.events_from_metrics(metrics, mechanism)['client']
  assert event == events.MixedGaussianEvent(
    mechanism.worst_case_mixture, _PROBABILITY
  )
