"""TFF aggregators that release a private mean and measure their clients.

`ClientPrivacyFactory.mean` and `.sum` go wherever TFF takes an
`UnweightedAggregationFactory`. `tf_bdp.learning.events_from_metrics` makes
events for the accountant from the metrics of each round.
"""

from typing import Any, Optional

from tf_bdp.aggregators import distance_samples, private_mean
from tf_bdp.mechanisms import adaptive_clipping
from tf_bdp.mechanisms import client as client_mechanism


class ClientPrivacyFactory(private_mean.PrivateMeanFactory):
  """Releases a private mean of client updates (Section V-A of the paper).

  The named constructors take the arguments of
  `tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed` and
  `.gaussian_adaptive`, and the probability that a client takes part in a round;
  `clients_per_round` is the expected number of participants. `options` are
  further arguments of the constructor.

  Attributes:
    mechanism: What is released, and what that costs.
  """

  def __init__(
    self,
    mechanism: client_mechanism.ClientMechanism,
    *,
    max_distances: int = 1024,
    noise_seed: Optional[int] = None,
    summation: Optional[private_mean.Summation] = None,
    measurement: Optional[private_mean.Measurement] = None,
  ):
    """Makes a factory.

    Args:
      mechanism: What is released.
      max_distances: How many clients of a round are measured at most; if there
        are more, a random sample of them.
      noise_seed: For experiments only; see `noise.add_noise`.
      summation: How values of clients are summed; by default in the clear. See
        `secure_sums.SecureSummation`.
      measurement: What the server learns about clients; by default a sample of
        distances. See `cost_reports.ClientCosts`.
    """
    self.mechanism = mechanism
    if measurement is None:
      measurement = distance_samples.DistanceSample(max_distances)
    super().__init__(
      mechanism,
      noise_seed=noise_seed,
      summation=summation,
      measurement=measurement,
    )

  @classmethod
  def mean(
    cls,
    noise_multiplier: float,
    clients_per_round: float,
    clip: float,
    *,
    participation_probability: float,
    least_participants: Optional[int] = None,
    **options: Any,
  ) -> 'ClientPrivacyFactory':
    """The paper's mechanism: the mean of clipped updates, noise z C / n̄.

    A client is measured by how far it is from the mean of the participants.
    `least_participants` is the least number that the sum is divided by; see
    `ClientMechanism`.
    """
    mechanism = client_mechanism.ClientMechanism(
      'mean',
      noise_multiplier,
      clip,
      participation_probability,
      clients_per_round,
      least_participants=least_participants,
    )
    return cls(mechanism, **options)

  @classmethod
  def sum(
    cls,
    noise_multiplier: float,
    clients_per_round: float,
    clip: float,
    *,
    participation_probability: float,
    **options: Any,
  ) -> 'ClientPrivacyFactory':
    """TFF's and DP-FedAvg's mechanism: the noised sum of updates over n̄.

    A client is measured by the norm of its clipped update.
    """
    mechanism = client_mechanism.ClientMechanism(
      'sum',
      noise_multiplier,
      clip,
      participation_probability,
      clients_per_round,
    )
    return cls(mechanism, **options)

  @classmethod
  def adaptive(
    cls,
    kind: str,
    noise_multiplier: float,
    clients_per_round: float,
    *,
    participation_probability: float,
    initial_l2_norm_clip: float = 0.1,
    target_unclipped_quantile: float = 0.5,
    learning_rate: float = 0.2,
    clipped_count_stddev: Optional[float] = None,
    least_participants: Optional[int] = None,
    **options: Any,
  ) -> 'ClientPrivacyFactory':
    """The same with a clip norm that follows the updates (Andrew et al. 2021).

    The count of unclipped clients that this takes is accounted for.

    Args:
      kind: 'mean' or 'sum'.
      noise_multiplier: z, for both releases together, update and count.
      clients_per_round: n̄.
      participation_probability: The probability that a client takes part.
      initial_l2_norm_clip: C of the first round.
      target_unclipped_quantile: The share of updates that should be below C.
      learning_rate: How fast C follows.
      clipped_count_stddev: The standard deviation of the noise on the count; by
        default n̄ / 20, or 2 z if that is more.
      least_participants: Of a mean; see `ClientMechanism`.
      **options: Further arguments of the constructor.
    """
    mechanism = client_mechanism.ClientMechanism(
      kind,
      noise_multiplier,
      initial_l2_norm_clip,
      participation_probability,
      clients_per_round,
      adaptive_clipping.AdaptiveClipping(
        target_unclipped_quantile, learning_rate, clipped_count_stddev
      ),
      least_participants,
    )
    return cls(mechanism, **options)
