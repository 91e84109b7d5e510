"""The TFF aggregator of every level: clip, sum, release, measure.

A mechanism's `Aggregation` decides what is released, a `Summation` how clients'
values are summed, and a `Measurement` what the server learns about clients.
"""

import collections
from typing import Any, NamedTuple, Optional, Protocol

import dp_accounting
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp.aggregators import runtime
from tf_bdp.mechanisms import base
from tf_bdp.ops import clipping, noise

runtime.reap_on_exit()


class Summation(Protocol):
  """How values of clients become sums at the server."""

  def update(self, updates: tff.Value, bound: tff.Value) -> tff.Value:
    """Sums updates; the server holds a bound of their coordinates."""

  def count(self, ones: tff.Value) -> tff.Value:
    """Sums zeros and ones."""


class PlainSummation:
  """Sums in the clear."""

  def update(self, updates: tff.Value, bound: tff.Value) -> tff.Value:
    """Sums updates."""
    del bound
    return tff.federated_sum(updates)

  def count(self, ones: tff.Value) -> tff.Value:
    """Sums zeros and ones."""
    return tff.federated_sum(ones)


class RoundValues(NamedTuple):
  """What a measurement can be made of.

  Attributes:
    clip_norm: Of the round, at the server.
    record: At the clients: their update after clipping; whether it is usable,
      has failed and was below the clip norm, and whether the client counts as
      a participant, as 0 or 1.
    participants: n, at the server.
    aggregate: The mean before noise, at the server.
  """

  clip_norm: tff.Value
  record: tff.Value
  participants: tff.Value
  aggregate: tff.Value


class Measurement(Protocol):
  """What the server learns about clients of a round, beside their number."""

  def learn(
    self, aggregation: Any, values: RoundValues
  ) -> 'collections.OrderedDict[str, tff.Value]':
    """Returns values at the server, by their names in the metrics.

    Args:
      aggregation: The mechanism's.
      values: Of the round.
    """


class NoMeasurement:
  """The server learns the number of clients and nothing else."""

  def learn(
    self, aggregation: Any, values: RoundValues
  ) -> 'collections.OrderedDict[str, tff.Value]':
    """Returns nothing."""
    del aggregation, values
    return collections.OrderedDict()


class PrivateMeanState(NamedTuple):
  """The aggregator's state.

  Attributes:
    aggregation: The mechanism's own state, which includes the clip norm.
    round_number: Counts from 0.
    dp_event: A round as ordinary DP sees it at its worst, before sampling.
    is_init_state: Whether no round has run yet. TFF's
      `extract_dp_event_from_state` reads this field and the one before.
  """

  aggregation: Any
  round_number: Any
  dp_event: Any
  is_init_state: Any


class PrivateMeanFactory(tff.aggregators.UnweightedAggregationFactory):
  """Releases what a mechanism's aggregation makes of the clients' updates.

  Updates that are NaN, infinite or all zeros have failed: TFF's client work
  puts zeros in place of an update that is not finite. They count as zeros, or
  not at all; see `Aggregation.counts_failed`.
  """

  def __init__(
    self,
    aggregation: base.Aggregation,
    *,
    noise_seed: Optional[int] = None,
    summation: Optional[Summation] = None,
    measurement: Optional[Measurement] = None,
  ):
    """Makes a factory.

    Args:
      aggregation: What is released; `mechanism.aggregation`.
      noise_seed: For experiments only; see `noise.add_noise`.
      summation: How values of clients are summed; by default in the clear. See
        `secure_sums.SecureSummation`.
      measurement: What the server learns about clients; by default nothing.
    """
    self._aggregation = aggregation
    self._noise_seed = noise_seed
    self._summation = summation or PlainSummation()
    self._measurement = measurement or NoMeasurement()

  def create(
    self, value_type: tff.Type, weight_type: Optional[tff.Type] = None
  ) -> tff.templates.AggregationProcess:
    """Creates the process for updates of `value_type`."""
    if weight_type is not None:
      raise TypeError(
        'This aggregator takes no weights: with them, a client would move the '
        'result by its weight times the clip norm. Where TFF wants a weighted '
        'one, wrap it: tff.aggregators.as_weighted_aggregator(aggregator). '
        'tf_bdp.learning.build_fed_sgd does so by itself.'
      )
    initial_state = self._build_initial_state()
    clip_record = self._build_clip(value_type)

    @tff.federated_computation()
    def init_fn():
      return tff.federated_eval(initial_state, tff.SERVER)

    @tff.federated_computation(
      init_fn.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
    )
    def next_fn(state, value):
      clip_norm = state.aggregation.clip_norm
      record = tff.federated_map(
        clip_record, (value, tff.federated_broadcast(clip_norm))
      )
      sums = tff.federated_zip(
        collections.OrderedDict(
          update=self._summation.update(record.update, clip_norm),
          usable=self._summation.count(record.usable),
          failed=self._summation.count(record.failed),
          below=self._summation.count(record.below),
        )
      )
      release = self._build_release(
        state.type_signature.member, sums.type_signature.member
      )
      released = tff.federated_map(release, (state, sums))
      learnt = self._measurement.learn(
        self._aggregation,
        RoundValues(
          clip_norm, record, released.participants, released.aggregate
        ),
      )
      measurements = collections.OrderedDict(
        participants=released.participants,
        failed_clients=sums.failed,
        clip_norm=clip_norm,
        **learnt,
      )
      return tff.templates.MeasuredProcessOutput(
        released.state, released.result, tff.federated_zip(measurements)
      )

    return tff.templates.AggregationProcess(init_fn, next_fn)

  def _build_initial_state(self) -> tff.Computation:
    @tff.tensorflow.computation
    def initial_state():
      return PrivateMeanState(
        aggregation=tf.nest.map_structure(
          tf.constant, self._aggregation.initial_state()
        ),
        round_number=tf.constant(0, tf.int32),
        dp_event=_gaussian_event(tf.constant(0.0)),
        is_init_state=tf.constant(True),
      )

    return initial_state

  def _build_clip(self, value_type: tff.Type) -> tff.Computation:
    @tff.tensorflow.computation(value_type, np.float32)
    def clip_record(value, clip_norm):
      parts = tf.nest.flatten(value)
      clipped, is_usable, norm = clipping.clip(parts, clip_norm)
      if not self._aggregation.clips:
        clipped = [
          tf.where(is_usable, part, tf.zeros_like(part)) for part in parts
        ]
      usable = tf.cast(is_usable, tf.int32)
      counts_failed = self._aggregation.counts_failed
      return collections.OrderedDict(
        update=tf.nest.pack_sequence_as(value, clipped),
        usable=usable,
        failed=1 - usable,
        counted=tf.ones_like(usable) if counts_failed else usable,
        below=usable * tf.cast(norm <= clip_norm, tf.int32),
      )

    return clip_record

  def _build_release(
    self, state_type: tff.Type, sums_type: tff.Type
  ) -> tff.Computation:
    """Builds what adds noise and makes the next state and the DP event."""
    aggregation = self._aggregation

    @tff.tensorflow.computation(state_type, sums_type)
    def release(state, sums):
      def add_noise(values, deviation, purpose):
        return noise.add_noise(
          values, deviation, self._noise_seed, state.round_number, purpose
        )

      participants = sums['usable']
      if aggregation.counts_failed:
        participants += sums['failed']
      released = aggregation.release(
        state.aggregation,
        base.Sums(
          tf.nest.flatten(sums['update']),
          tf.cast(sums['usable'], tf.float32),
          tf.cast(sums['below'], tf.float32),
          tf.cast(sums['failed'], tf.float32),
        ),
        add_noise,
      )
      next_state = PrivateMeanState(
        aggregation=released.state,
        round_number=state.round_number + 1,
        dp_event=_gaussian_event(tf.constant(_noise_multiplier(aggregation))),
        is_init_state=tf.constant(False),
      )

      def pack(parts):
        return tf.nest.pack_sequence_as(sums['update'], parts)

      return collections.OrderedDict(
        state=next_state,
        result=pack(released.result),
        aggregate=pack(released.aggregate),
        participants=participants,
      )

    return release


def measure_clients(
  aggregation: base.Aggregation, values: RoundValues
) -> tff.Value:
  """Returns the clients' squared measures: each computes its own."""
  record_type = values.record.type_signature.member

  @tff.tensorflow.computation(record_type, record_type['update'], np.int32)
  def measure(record, aggregate, count):
    own = tf.nest.flatten(record['update'])
    away = [p - m for p, m in zip(own, tf.nest.flatten(aggregate))]
    return aggregation.measure(
      clipping.squared_norm(own), clipping.squared_norm(away), True, count
    )

  sent = map(tff.federated_broadcast, (values.aggregate, values.participants))
  return tff.federated_map(measure, (values.record, *sent))


def _gaussian_event(noise_multiplier: tf.Tensor) -> Any:
  return dp_accounting.GaussianDpEvent(noise_multiplier).to_named_tuple()


def _noise_multiplier(aggregation: Any) -> np.float32:
  """Returns z of a plain Gaussian mechanism with the same worst case.

  Of a mean the worst of all numbers of participants: the number of a round is
  secret. z is 0, which stands for no privacy, where clients add noise of their
  own: the aggregation alone cannot account for that.
  """
  if not (aggregation.clips and aggregation.noise_multiplier):
    return np.float32(0.0)
  mixture = aggregation.worst_case_mixture
  if mixture is None:
    worst = float(aggregation.worst_case_squared_distance('client', 0))
  else:
    worst = max(squared_distance for _, squared_distance in mixture)
  return np.float32(worst**-0.5)
