"""TFF aggregators that release a private mean and measure their clients.

`ClientPrivacyFactory.mean` and `.sum` go wherever TFF takes an
`UnweightedAggregationFactory`. Each round's measurements hold what
`events_from_metrics` turns into an event for the accountant. They are raw
client data without noise: whoever sees them is inside the trust boundary.
"""

import collections
import functools
from typing import Any, Callable, NamedTuple, Optional

import dp_accounting
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp import validation
from tf_bdp.aggregators import cost_reports, secure_sums
from tf_bdp.mechanisms import client as mechanism_lib
from tf_bdp.ops import clipping, noise


class ClientPrivacyState(NamedTuple):
  """The aggregator's state.

  Field names are those of TFF's own DP aggregator, so that
  `tff.aggregators.extract_dp_event_from_state`-like tools read it.
  """

  clip_norm: Any
  round_number: Any
  dp_event: Any
  is_init_state: Any


class ClientPrivacyFactory(tff.aggregators.UnweightedAggregationFactory):
  """Releases a private mean of client updates (Section V-A of the paper).

  Distances leave the clients as numbers: the clipped mean is sent back to the
  round's clients, and each answers with ‖u_i - mean‖², so the server never
  collects updates.
  """

  def __init__(
    self,
    mechanism: mechanism_lib.GaussianMechanism,
    *,
    max_distances: int = 1024,
    noise_seed: Optional[int] = None,
    release_aggregate: bool = False,
    reporting: Optional[cost_reports.Reporting] = None,
  ):
    """Makes a factory; `mean` and `sum` are the usual ways to.

    Args:
      mechanism: What is released.
      max_distances: The most clients whose distances are measured, a random
        sample of those of the round.
      noise_seed: For experiments only; see `noise.add_noise`.
      release_aggregate: Whether the measurements include the aggregate before
        noise, which measuring a panel needs.
      reporting: Makes updates and costs reach the server by secure sums alone;
        see `cost_reports`. No distances are measured then.
    """
    if reporting is not None and release_aggregate:
      raise ValueError(
        'The aggregate before noise is not released under secure aggregation.'
      )
    self._mechanism = mechanism
    self._max_distances = validation.check_positive_integer(
      'max_distances', max_distances
    )
    self._noise_seed = noise_seed
    self._release_aggregate = release_aggregate
    self._reporting = reporting

  @classmethod
  def mean(
    cls,
    noise_multiplier: float,
    clip_norm: float,
    participation_probability: float,
    expected_clients: float,
    **options: Any,
  ) -> 'ClientPrivacyFactory':
    """The paper's mechanism: the mean of clipped updates, noise z C / n̄.

    Distances are those of a client from the others.

    Args:
      noise_multiplier: z.
      clip_norm: C.
      participation_probability: The probability of a client to take part.
      expected_clients: n̄, that probability times the number of clients.
      **options: Those of the constructor.
    """
    mechanism = mechanism_lib.GaussianMechanism(
      'mean',
      noise_multiplier,
      clip_norm,
      participation_probability,
      expected_clients,
    )
    return cls(mechanism, **options)

  @classmethod
  def sum(
    cls,
    noise_multiplier: float,
    clip_norm: float,
    participation_probability: float,
    expected_clients: float,
    **options: Any,
  ) -> 'ClientPrivacyFactory':
    """TFF's and DP-FedAvg's mechanism: the noised sum over n̄.

    Distances are the norms of the clients' clipped updates. Arguments as for
    `mean`.
    """
    mechanism = mechanism_lib.GaussianMechanism(
      'sum',
      noise_multiplier,
      clip_norm,
      participation_probability,
      expected_clients,
    )
    return cls(mechanism, **options)

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """Creates the process for updates of `value_type`."""
    initial_state = self._build_initial_state()
    state_type = initial_state.type_signature.result
    clip_record = self._build_clip(value_type)
    record_type = clip_record.type_signature.result
    release = self._build_release(state_type, record_type)
    learn = self._learn if self._reporting is None else self._learn_securely

    @tff.federated_computation()
    def init_fn():
      return tff.federated_eval(initial_state, tff.SERVER)

    @tff.federated_computation(
      init_fn.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
    )
    def next_fn(state, value):
      clip_norm = tff.federated_broadcast(state.clip_norm)
      record = tff.federated_map(clip_record, (value, clip_norm))
      sums = self._sum(record, state.clip_norm)
      released = tff.federated_map(release, (state, sums))
      return tff.templates.MeasuredProcessOutput(
        released.state,
        released.result,
        learn(state, record, sums, released.aggregate),
      )

    return tff.templates.AggregationProcess(init_fn, next_fn)

  def _sum(self, record: tff.Value, clip_norm: tff.Value) -> tff.Value:
    """Sums the clients' records, which have the type of their sum."""
    add = _counting(self._reporting is not None)
    if self._reporting is not None:
      update = secure_sums.secure_update_sum(record.update, clip_norm)
    else:
      update = tff.federated_sum(record.update)
    return tff.federated_zip(
      collections.OrderedDict(
        update=update,
        usable=add(record.usable),
        failed=add(record.failed),
        below=add(record.below),
      )
    )

  def _learn(
    self,
    state: tff.Value,
    record: tff.Value,
    sums: tff.Value,
    aggregate: tff.Value,
  ) -> tff.Value:
    """Measures a sample of clients by their answers to the aggregate."""
    record_type = record.type_signature.member
    measure = self._build_measure(record_type)
    measurements = self._build_measurements(
      state.type_signature.member, record_type
    )
    measured = tff.federated_map(
      measure, (record, tff.federated_broadcast(aggregate))
    )
    sample = tff.aggregators.federated_sample(measured, self._max_distances)
    return tff.federated_map(measurements, (state, sums, aggregate, sample))

  def _learn_securely(
    self,
    state: tff.Value,
    record: tff.Value,
    sums: tff.Value,
    aggregate: tff.Value,
  ) -> tff.Value:
    """Learns sums of the clients' costs, and how many there are."""
    reporting = self._reporting
    assert reporting is not None
    record_type = record.type_signature.member
    squared_distance = self._build_squared_distance(record_type)
    q = self._mechanism.participation_probability

    @tff.tensorflow.computation(np.int32)
    def worst_case(count):
      return _worst_case_of(self._mechanism, tf.cast(count, tf.float64))

    @tff.tensorflow.computation(record_type)
    def is_usable(record):
      return record['usable'] > 0

    distances = tff.federated_map(
      squared_distance,
      (
        record,
        tff.federated_broadcast(aggregate),
        tff.federated_broadcast(sums.usable),
        tff.federated_broadcast(state.clip_norm),
      ),
    )
    costs = cost_reports.sum_client_costs(
      distances,
      tff.federated_map(is_usable, record),
      tff.federated_map(worst_case, sums.usable),
      q,
      reporting,
    )
    return tff.federated_zip(
      collections.OrderedDict(
        participants=sums.usable,
        failed_clients=sums.failed,
        clip_norm=state.clip_norm,
        client_costs=costs,
      )
    )

  def _build_squared_distance(self, record_type: tff.Type) -> tff.Computation:
    """What a client computes of itself: r², as the mechanism would."""
    mechanism = self._mechanism

    @tff.tensorflow.computation(
      record_type, record_type['update'], np.int32, np.float32
    )
    def squared_distance(record, aggregate, count, clip_norm):
      own = tf.nest.flatten(record['update'])
      squared = clipping.squared_norm(own)
      others = tf.constant(mechanism.expected_clients, tf.float64)
      if mechanism.kind == 'mean':
        parts = [p - m for p, m in zip(own, tf.nest.flatten(aggregate))]
        # Alone, a client is compared with nothing.
        squared = tf.where(count > 1, clipping.squared_norm(parts), squared)
        others = tf.maximum(tf.cast(count, tf.float64) - 1.0, 1.0)
      norm = tf.cast(clip_norm, tf.float64)
      moves = tf.cast(squared, tf.float64) / tf.square(norm * others)
      return mechanism.to_squared_distance(moves)

    return squared_distance

  def _build_initial_state(self) -> tff.Computation:
    @tff.tensorflow.computation
    def initial_state():
      return ClientPrivacyState(
        clip_norm=tf.constant(self._mechanism.clip_norm, tf.float32),
        round_number=tf.constant(0, tf.int32),
        dp_event=_gaussian_event(tf.constant(0.0)),
        is_init_state=tf.constant(True),
      )

    return initial_state

  def _build_clip(self, value_type: tff.Type) -> tff.Computation:
    @tff.tensorflow.computation(value_type, np.float32)
    def clip_record(value, clip_norm):
      clipped, usable, norm = clipping.clip(tf.nest.flatten(value), clip_norm)
      usable = tf.cast(usable, tf.int32)
      return collections.OrderedDict(
        update=tf.nest.pack_sequence_as(value, clipped),
        usable=usable,
        failed=1 - usable,
        below=usable * tf.cast(norm <= clip_norm, tf.int32),
      )

    return clip_record

  def _build_measure(self, record_type: tff.Type) -> tff.Computation:
    """The client's answer to the broadcast mean: is it usable, and how far."""
    is_mean = self._mechanism.kind == 'mean'

    @tff.tensorflow.computation(record_type, record_type['update'])
    def measure(record, aggregate):
      parts = tf.nest.flatten(record['update'])
      if is_mean:
        parts = [p - m for p, m in zip(parts, tf.nest.flatten(aggregate))]
      usable = tf.cast(record['usable'], tf.float32)
      return tf.stack([usable, clipping.squared_norm(parts)])

    return measure

  def _build_release(
    self, state_type: tff.Type, sums_type: tff.Type
  ) -> tff.Computation:
    """Noise, the next clip norm, and the round's DP event."""
    mechanism, seed = self._mechanism, self._noise_seed

    @tff.tensorflow.computation(state_type, sums_type)
    def release(state, sums):
      count = tf.cast(sums['usable'], tf.float32)
      divisor = mechanism.expected_clients
      if mechanism.kind == 'mean':
        divisor = tf.maximum(count, 1.0)
      aggregate = [part / divisor for part in tf.nest.flatten(sums['update'])]
      noised = aggregate
      if mechanism.noise_multiplier:
        noised = noise.add_noise(
          aggregate,
          mechanism.noise_per_clip_norm * state.clip_norm,
          seed,
          state.round_number,
        )
      next_state = ClientPrivacyState(
        # Half a count each way, so that nobody counts for more than one half.
        clip_norm=self._next_clip_norm(
          state, tf.cast(sums['below'], tf.float32) - count / 2.0
        ),
        round_number=state.round_number + 1,
        dp_event=_gaussian_event(_noise_multiplier_of(mechanism, count)),
        is_init_state=tf.constant(False),
      )
      pack = sums['update']
      return collections.OrderedDict(
        state=next_state,
        result=tf.nest.pack_sequence_as(pack, noised),
        aggregate=tf.nest.pack_sequence_as(pack, aggregate),
      )

    return release

  def _next_clip_norm(
    self, state: ClientPrivacyState, below: tf.Tensor
  ) -> tf.Tensor:
    mechanism = self._mechanism
    if mechanism.clip_quantile is None:
      return state.clip_norm
    if mechanism.noise_multiplier:
      (below,) = noise.add_noise(
        [below],
        mechanism.count_deviation,
        self._noise_seed,
        state.round_number,
        noise.COUNT_NOISE,
      )
    share = below / mechanism.expected_clients + 0.5
    return state.clip_norm * tf.exp(mechanism.clip_norm_growth(share))

  def _build_measurements(
    self, state_type: tff.Type, sums_type: tff.Type
  ) -> tff.Computation:
    sample_type = tff.TensorType(np.float32, [None, 2])

    @tff.tensorflow.computation(
      state_type, sums_type, sums_type['update'], sample_type
    )
    def measurements(state, sums, aggregate, sample):
      squared = tf.boolean_mask(sample[:, 1], sample[:, 0] > 0)
      if self._mechanism.kind == 'mean':
        # Alone, a client is compared with nothing.
        norm = clipping.squared_norm(tf.nest.flatten(aggregate))
        alone = tf.equal(sums['usable'], 1)
        squared = tf.where(alone, tf.fill(tf.shape(squared), norm), squared)
      result = collections.OrderedDict(
        squared_measures=squared,
        participants=sums['usable'],
        failed_clients=sums['failed'],
        clip_norm=state.clip_norm,
      )
      for name, value in self._mechanism.to_scalars().items():
        result[name] = tf.constant(value, tf.float64)
      if self._release_aggregate:
        result['aggregate'] = aggregate
      return result

    return measurements


def _counting(secure: bool) -> Callable[[tff.Value], tff.Value]:
  """Returns what sums zeros and ones."""
  if secure:
    return functools.partial(tff.federated_secure_sum, max_input=1)
  return tff.federated_sum


def _gaussian_event(noise_multiplier: tf.Tensor) -> Any:
  return dp_accounting.GaussianDpEvent(noise_multiplier).to_named_tuple()


def _noise_multiplier_of(
  mechanism: mechanism_lib.GaussianMechanism, participants: tf.Tensor
) -> tf.Tensor:
  """Z of the plain Gaussian mechanism with the round's worst-case distance."""
  if not mechanism.noise_multiplier:
    return tf.constant(0.0)
  return tf.math.rsqrt(_worst_case_of(mechanism, participants))


def _worst_case_of(
  mechanism: mechanism_lib.GaussianMechanism, participants: tf.Tensor
) -> tf.Tensor:
  """The mechanism's worst-case squared distance, of a tensor."""
  of = mechanism.worst_case_squared_distance
  dtype = participants.dtype
  if mechanism.kind == 'sum':
    return tf.constant(of(1), dtype)
  # 2 / n is exact from n = 2 on; below, the mechanism has its own rules.
  squared = mechanism.to_squared_distance(
    tf.square(2 / tf.maximum(participants, 1))
  )
  return tf.where(
    participants >= 2,
    squared,
    tf.where(
      participants >= 1, tf.constant(of(1), dtype), tf.constant(of(0), dtype)
    ),
  )
