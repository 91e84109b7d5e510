"""Tests of the named constructors, with TFF's words."""

import inspect

import numpy as np
import pytest
import tensorflow_federated as tff

from tests.aggregators import builders
from tf_bdp import aggregators
from tf_bdp.mechanisms import adaptive_clipping, client

_KINDS = builders.KINDS
_VALUE_TYPE = builders.VALUE_TYPE
_mechanism = builders.mechanism
_run = builders.run
_flat = builders.flat
_vectors = builders.vectors


def _factory(name, *arguments, **options):
  constructor = getattr(aggregators.ClientPrivacyFactory, name)
  return constructor(*arguments, participation_probability=0.1, **options)


@pytest.mark.parametrize('name', _KINDS)
def test_named_constructors_make_the_mechanism_and_hide_the_aggregate(name):
  factory = _factory(
    name,
    noise_multiplier=1.0,
    clients_per_round=10.0,
    clip=2.0,
    max_distances=5,
  )
  assert isinstance(factory, tff.aggregators.UnweightedAggregationFactory)
  assert factory.mechanism == client.ClientMechanism(name, 1.0, 2.0, 0.1, 10.0)
  process = factory.create(tff.TensorType(np.float32, [3]))
  measured = process.next.type_signature.result.measurements.member
  assert 'aggregate' not in dir(measured)
  assert 'squared_measures' in dir(measured)
  output = process.next(process.initialize(), [np.ones(3, np.float32)] * 7)
  assert output.measurements['clip_norm'] == 2.0
  assert output.measurements['participants'] == 7
  assert output.measurements['squared_measures'].shape == (5,)


def test_the_arguments_are_in_the_order_of_tffs_own():
  # `DifferentiallyPrivateFactory.gaussian_fixed` and `.gaussian_adaptive`.
  theirs = tff.aggregators.DifferentiallyPrivateFactory
  ours = aggregators.ClientPrivacyFactory
  for constructor, other in (
    (ours.mean, theirs.gaussian_fixed),
    (ours.sum, theirs.gaussian_fixed),
    (ours.adaptive, theirs.gaussian_adaptive),
  ):
    names = list(inspect.signature(constructor).parameters)
    wanted = list(inspect.signature(other).parameters)
    assert [name for name in names if name in wanted] == wanted
  adaptive = inspect.signature(ours.adaptive).parameters
  for name, parameter in inspect.signature(
    theirs.gaussian_adaptive
  ).parameters.items():
    assert adaptive[name].default == parameter.default


@pytest.mark.parametrize('kind', _KINDS)
def test_the_adaptive_constructor_makes_the_mechanism(kind):
  factory = _factory(
    'adaptive',
    kind,
    1.0,
    100.0,
    initial_l2_norm_clip=0.3,
    target_unclipped_quantile=0.7,
    learning_rate=0.4,
    clipped_count_stddev=6.0,
  )
  assert factory.mechanism == client.ClientMechanism(
    kind,
    1.0,
    0.3,
    0.1,
    100.0,
    adaptive_clipping.AdaptiveClipping(0.7, 0.4, 6.0),
  )


def test_adaptive_clipping_moves_the_clip_norm_as_tffs_own_does():
  # Without noise, from TFF's first clip norm and with its learning rate.
  theirs = tff.aggregators.DifferentiallyPrivateFactory.gaussian_adaptive(
    noise_multiplier=1e-9, clients_per_round=4.0, clipped_count_stddev=1e-6
  ).create(_VALUE_TYPE)
  ours = _factory(
    'adaptive', 'sum', 1e-9, 4.0, clipped_count_stddev=1e-6
  ).create(_VALUE_TYPE)
  states = [theirs.initialize(), ours.initialize()]
  for seed in range(3):
    vectors = 0.1 * _vectors(4, seed)
    outputs = [
      _run(process, vectors, state)
      for process, state in zip((theirs, ours), states)
    ]
    states = [output.state for output in outputs]
    np.testing.assert_allclose(
      *(_flat(output.result) for output in outputs), rtol=1e-4, atol=1e-6
    )
    their_clip = states[0].query_state.numerator_state.sum_state.l2_norm_clip
    assert float(states[1].aggregation.clip_norm) == pytest.approx(
      float(their_clip), rel=1e-5
    )


@pytest.mark.parametrize('most', [0, -1, 1.5, True])
def test_max_distances_must_be_a_positive_integer(most):
  with pytest.raises(ValueError, match='max_distances must be a positive int'):
    aggregators.ClientPrivacyFactory(_mechanism('mean'), max_distances=most)


def test_bad_settings_are_refused_by_the_named_constructors():
  with pytest.raises(ValueError, match='clip_norm must be positive'):
    _factory('mean', 1.0, 10.0, -1.0)
  with pytest.raises(ValueError, match='noise_multiplier must be non-neg'):
    _factory('sum', -1.0, 10.0, 1.0)
  with pytest.raises(ValueError, match='clip_quantile must be between'):
    _factory('adaptive', 'sum', 1.0, 10.0, target_unclipped_quantile=2.0)
