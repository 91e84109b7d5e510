"""TFF aggregators that release a private mean and measure their clients.

`ClientPrivacyFactory.mean` and `.sum` go wherever TFF takes an
`UnweightedAggregationFactory`. Each round's measurements hold what
`events_from_metrics` turns into an event for the accountant. They are raw
client data without noise: whoever sees them is inside the trust boundary.
"""

import collections
from typing import Any, NamedTuple, Optional

import dp_accounting
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp import mechanism as mechanism_lib
from tf_bdp import mechanism_ops, validation


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
  ):
    """Makes a factory; `mean` and `sum` are the usual ways to.

    Args:
      mechanism: What is released.
      max_distances: The most clients whose distances are measured, a random
        sample of those of the round.
      noise_seed: For experiments only; see `mechanism_ops.add_noise`.
      release_aggregate: Whether the measurements include the aggregate before
        noise, which measuring a panel needs.
    """
    self._mechanism = mechanism
    self._max_distances = validation.check_positive_integer(
      'max_distances', max_distances
    )
    self._noise_seed = noise_seed
    self._release_aggregate = release_aggregate

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
    # A sum has the type of what is summed.
    measure = self._build_measure(record_type)
    release = self._build_release(state_type, record_type)
    measurements = self._build_measurements(state_type, record_type)

    @tff.federated_computation()
    def init_fn():
      return tff.federated_eval(initial_state, tff.SERVER)

    @tff.federated_computation(
      init_fn.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
    )
    def next_fn(state, value):
      clip_norm = tff.federated_broadcast(state.clip_norm)
      record = tff.federated_map(clip_record, (value, clip_norm))
      sums = tff.federated_zip(
        collections.OrderedDict(
          update=tff.federated_sum(record.update),
          usable=tff.federated_sum(record.usable),
          failed=tff.federated_sum(record.failed),
          below=tff.federated_sum(record.below),
        )
      )
      released = tff.federated_map(release, (state, sums))
      aggregate = tff.federated_broadcast(released.aggregate)
      measured = tff.federated_map(measure, (record, aggregate))
      sample = tff.aggregators.federated_sample(measured, self._max_distances)
      output = tff.federated_map(
        measurements, (state, sums, released.aggregate, sample)
      )
      return tff.templates.MeasuredProcessOutput(
        released.state, released.result, output
      )

    return tff.templates.AggregationProcess(init_fn, next_fn)

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
      clipped, usable, norm = mechanism_ops.clip(
        tf.nest.flatten(value), clip_norm
      )
      usable = tf.cast(usable, tf.float32)
      return collections.OrderedDict(
        update=tf.nest.pack_sequence_as(value, clipped),
        usable=usable,
        failed=1.0 - usable,
        # Half a count each way, so that nobody counts for more than one half.
        below=usable * (tf.cast(norm <= clip_norm, tf.float32) - 0.5),
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
      return tf.stack([record['usable'], mechanism_ops.squared_norm(parts)])

    return measure

  def _build_release(
    self, state_type: tff.Type, sums_type: tff.Type
  ) -> tff.Computation:
    """Noise, the next clip norm, and the round's DP event."""
    mechanism, seed = self._mechanism, self._noise_seed

    @tff.tensorflow.computation(state_type, sums_type)
    def release(state, sums):
      count = sums['usable']
      divisor = mechanism.expected_clients
      if mechanism.kind == 'mean':
        divisor = tf.maximum(count, 1.0)
      aggregate = [part / divisor for part in tf.nest.flatten(sums['update'])]
      noised = aggregate
      if mechanism.noise_multiplier:
        noised = mechanism_ops.add_noise(
          aggregate,
          mechanism.noise_per_clip_norm * state.clip_norm,
          seed,
          state.round_number,
        )
      next_state = ClientPrivacyState(
        clip_norm=self._next_clip_norm(state, sums['below']),
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
      (below,) = mechanism_ops.add_noise(
        [below],
        mechanism.count_deviation,
        self._noise_seed,
        state.round_number,
        mechanism_ops.COUNT_NOISE,
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
        norm = mechanism_ops.squared_norm(tf.nest.flatten(aggregate))
        alone = tf.equal(sums['usable'], 1.0)
        squared = tf.where(alone, tf.fill(tf.shape(squared), norm), squared)
      result = collections.OrderedDict(
        squared_measures=squared,
        participants=tf.cast(sums['usable'], tf.int32),
        failed_clients=tf.cast(sums['failed'], tf.int32),
        clip_norm=state.clip_norm,
      )
      for name, value in self._mechanism.to_scalars().items():
        result[name] = tf.constant(value, tf.float64)
      if self._release_aggregate:
        result['aggregate'] = aggregate
      return result

    return measurements


def _gaussian_event(noise_multiplier: tf.Tensor) -> Any:
  return dp_accounting.GaussianDpEvent(noise_multiplier).to_named_tuple()


def _noise_multiplier_of(
  mechanism: mechanism_lib.GaussianMechanism, participants: tf.Tensor
) -> tf.Tensor:
  """Z of the plain Gaussian mechanism with the round's worst-case distance."""

  def of(count: int) -> float:
    return mechanism.worst_case_squared_distance(count) ** -0.5

  if not mechanism.noise_multiplier:
    return tf.constant(0.0)
  if mechanism.kind == 'sum':
    return tf.constant(of(1), tf.float32)
  # 2 / n is exact from n = 2 on; below, the mechanism has its own rules.
  scale = 2 / mechanism.noise_per_clip_norm
  extra = mechanism.worst_case_squared_distance(2) - (scale / 2) ** 2
  squared = tf.square(scale / tf.maximum(participants, 1.0)) + extra
  alone = tf.constant(of(1), tf.float32)
  # Adaptive clipping releases its count even if nobody came.
  empty = of(0) if mechanism.worst_case_squared_distance(0) else np.inf
  return tf.where(
    participants >= 2,
    tf.math.rsqrt(squared),
    tf.where(participants >= 1, alone, empty),
  )
