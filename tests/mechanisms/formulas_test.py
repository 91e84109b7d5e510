"""Tests that formulas give the same for numbers, arrays and tensors.

They stand once and are used in this process and inside TFF's graphs; what they
should give is tested, for numbers, beside each mechanism.
"""

import math

import hypothesis
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tests.mechanisms import builders
from tf_bdp import array_namespace
from tf_bdp.mechanisms import adaptive_clipping, base, client, noisy_mean

_positive = st.floats(0.05, 20)
_counts = st.integers(0, 40)
# TensorFlow takes subnormal numbers for zero, which is not rounded.
_sizes = st.one_of(st.just(0.0), st.floats(1e-30, 9))
_measures = st.lists(_sizes, min_size=1, max_size=5).map(np.array)


def _assert_same(formula, *values):
  """Of numbers or arrays, of tensors, and of tensors in a graph.

  Args:
    formula: A function of the values.
    *values: Python's numbers and numpy's arrays. Integers become int32, as
      TFF's counts are.
  """
  tensors = [
    tf.constant(v, tf.int32) if isinstance(v, int) else tf.constant(v)
    for v in (np.float64(v) if isinstance(v, float) else v for v in values)
  ]
  wanted = np.asarray(formula(*values), np.float64)
  found = formula(*tensors)
  assert not tf.is_tensor(found) or found.dtype == tf.float64
  # A graph like TFF's, in which `==` is not what it is elsewhere.
  with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    constants = [tf.constant(tensor.numpy()) for tensor in tensors]
    # What does not depend on them is a number still.
    float64 = array_namespace.of(*constants).float64
    in_graph = session.run(float64(formula(*constants)))
  for result in (found, in_graph):
    # TensorFlow takes subnormal numbers for zero.
    np.testing.assert_allclose(result, wanted, rtol=1e-13, atol=1e-300)


@st.composite
def _client_mechanisms(draw):
  adaptive = None
  if draw(st.booleans()):
    adaptive = adaptive_clipping.AdaptiveClipping(draw(st.floats(0, 1)))
  kind = draw(st.sampled_from(client.KINDS))
  alpha, clients = draw(st.floats(0.01, 1)), draw(st.integers(1, 50))
  floor = None
  if kind == 'mean' and draw(st.booleans()):
    floor = draw(st.integers(1, clients))
  return client.ClientMechanism(
    kind,
    draw(st.one_of(st.just(0.0), _positive)),
    draw(_positive),
    alpha,
    alpha * clients,
    adaptive,
    floor,
  )


@st.composite
def _example_mechanisms(draw, levels=builders.LEVELS):
  level = draw(st.sampled_from(levels))
  options = {}
  if level != 'joint':
    options['local_steps'] = draw(st.integers(1, 2))
  if level in ('joint', 'instance_aggregate'):
    options['server_noise_multiplier'] = draw(builders.SERVERS)
  if level == 'joint':
    options['reference_is_last_mean'] = draw(st.booleans())
    options['accounting'] = draw(
      st.sampled_from(['sequential', 'parallel', 'aggregate'])
    )
  alpha = draw(st.floats(0.01, 1))
  return builders.make_mechanism(
    level,
    noise_multiplier=draw(_positive),
    clipping=draw(st.sampled_from(builders.CLIPPINGS)),
    batch_size=draw(st.integers(1, 30)),
    participation_probability=alpha,
    clients_per_round=alpha * draw(st.integers(1, 60)),
    **options,
  )


@hypothesis.given(_client_mechanisms(), _counts)
def test_the_worst_case_of_a_client(mechanism, count):
  def worst_case(count):
    return mechanism.worst_case_squared_distance('client', count)

  _assert_same(worst_case, count)


@hypothesis.given(
  _client_mechanisms().filter(lambda mechanism: mechanism.noise_multiplier),
  _measures,
  st.booleans(),
  _counts,
  _positive,
)
def test_distances_of_clients(mechanism, measures, took_part, count, clip):
  count = max(count, int(took_part))
  took_part = np.full(measures.shape, took_part)
  _assert_same(mechanism.squared_distances, measures, took_part, count, clip)
  # As TFF has them: float32, of which every bit is kept.
  small, clip = measures.astype(np.float32), np.float32(clip)
  _assert_same(mechanism.squared_distances, small, took_part, count, clip)


@hypothesis.given(
  _client_mechanisms(), _measures, st.booleans(), st.integers(0, 9)
)
def test_what_is_measured_of_a_client(mechanism, measures, took_part, count):
  took_part = np.full(measures.shape, took_part)
  _assert_same(mechanism.measure, measures, measures / 3, took_part, count)


@hypothesis.given(
  st.floats(0, 1), st.floats(0.01, 1), _positive, st.floats(-1, 2)
)
def test_the_next_clip_norm(quantile, rate, clip, share):
  adaptive = adaptive_clipping.AdaptiveClipping(quantile, rate)
  _assert_same(adaptive.next_clip_norm, clip, share)


def _release(aggregation):
  """A release as a function of numbers; its noise depends on all it is told."""

  def add_noise(values, deviation, purpose):
    return [value + (deviation + purpose) for value in values]

  def release(clip, update, usable, below, failed):
    released = aggregation.release(
      client.ClippingState(clip),
      base.Sums([update], usable, below, failed),
      add_noise,
    )
    parts = (released.result, released.aggregate, [released.state.clip_norm])
    flat = [part for (part,) in parts]
    if not any(map(tf.is_tensor, flat)):
      return np.concatenate([np.ravel(part) for part in flat])
    return tf.concat(
      [tf.reshape(tf.cast(part, tf.float64), [-1]) for part in flat], 0
    )

  return release


@hypothesis.given(
  st.one_of(
    _client_mechanisms(),
    st.builds(noisy_mean.NoisyMean, st.sampled_from([0.0, 0.3]), _positive),
  ),
  _measures,
  _positive,
  _counts,
)
def test_what_is_released(aggregation, update, clip, count):
  below, failed = float(count // 2), float(count // 3)
  values = (clip, update, float(count), below, failed)
  _assert_same(_release(aggregation), *values)


@hypothesis.given(_example_mechanisms(), _counts, st.integers(0, 100))
def test_the_formulas_of_examples(mechanism, count, holding):
  def worst_case(count):
    return mechanism.worst_case_squared_distance('example', count)

  for formula in (
    *(worst_case, mechanism.inclusion_probability),
    *(mechanism.example_variance, mechanism.mean_variance),
  ):
    _assert_same(formula, count)
  _assert_same(mechanism.draw_probability, holding)
  _assert_same(mechanism.example_probability, holding)


@hypothesis.given(_example_mechanisms(levels=['joint']), _measures, _counts)
def test_the_formulas_of_clients_in_joint(mechanism, measures, count):
  def worst_case(count):
    return mechanism.worst_case_squared_distance('client', count)

  _assert_same(worst_case, count)
  _assert_same(mechanism.client_squared_distances, measures, count)


def test_numbers_give_numbers_without_tensorflows_rounding():
  # Float32 would be off by 1e-8.
  mechanism = client.ClientMechanism('sum', 0.3, 1.0, 0.1, 7.0)
  worst = mechanism.worst_case_squared_distance('client', 3)
  assert math.isclose(worst, (1 / 0.3 + 2.0**-20) ** 2, rel_tol=2e-15)
  tensor = mechanism.squared_distances(
    tf.constant([0.1], tf.float64), True, tf.constant(3), tf.constant(1.0)
  )
  wanted = (math.sqrt(0.1) / 0.3 + 2.0**-20) ** 2
  assert math.isclose(float(tensor[0]), wanted, rel_tol=1e-14)
