"""Rounds on TFF's C++ runtime that protect examples."""

from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tf_bdp.aggregators import cost_reports, secure_sums
from tf_bdp.engines import base as engine
from tf_bdp.engines import tff as tff_engine
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import example_batches, federated_data, instance_processes
from tf_bdp.mechanisms import instance as instance_mechanism


class TffInstanceEngine(tff_engine.TffEngine):
  """The round as a TFF learning process, at every level but the client's."""

  mechanism: instance_mechanism.InstanceMechanism

  def __init__(
    self,
    model_fn: Callable[[], tf.keras.Model],
    data: federated_data.FederatedData,
    mechanism: instance_mechanism.InstanceMechanism,
    algorithm: algorithm_lib.Algorithm,
    noise_seed: Optional[int] = None,
    seed: int = 0,
    reporting: Optional[Mapping[str, cost_reports.Reporting]] = None,
  ):
    """Builds the process.

    Args:
      model_fn: As for `InProcessEngine`, like the others below.
      data: The clients' data.
      mechanism: What is released.
      algorithm: FedSGD or FedAvg, and the server's optimiser.
      noise_seed: For experiments only.
      seed: Of the batches that clients draw.
      reporting: As for `TffEngine`.
    """
    if mechanism.reference_is_last_mean:
      raise ValueError(
        "TFF's clients are not sent the last mean. Leave out "
        'reference_is_last_mean, or use the other engine.'
      )
    self._start(model_fn, mechanism, reporting)
    self._noise_is_seeded = noise_seed is not None
    self._batches = example_batches.ExampleBatches(
      data, mechanism, algorithm, seed
    )
    self._measurement = instance_processes.MovesByExample.of(self._batches)
    self._reports = None
    if reporting is not None:
      self._reports = cost_reports.ReportedCosts(
        mechanism,
        self._measurement.longest,
        reporting['example'],
        reporting.get('client', reporting['example']),
      )
    spec = instance_processes.spec_of(self._batches)
    parts = (
      *(model_fn, spec, mechanism, algorithm),
      *(self._reports or self._measurement, noise_seed),
    )
    client_work = instance_processes.build_client_work(*parts)
    aggregator = self._build_aggregator(algorithm, noise_seed)
    self._process = instance_processes.build_process(
      model_fn,
      client_work,
      aggregator,
      tff_engine.server_optimizer(algorithm),
    )
    if reporting is None:
      self._measure_panel = instance_processes.build_panel_measurement(*parts)
    # Keras binds its classes to the kind of graph in which a model was made
    # last, and TFF makes models in old ones: bind them back for this process.
    model_fn()

  def _build_aggregator(
    self, algorithm: algorithm_lib.Algorithm, noise_seed: Optional[int]
  ) -> tff.aggregators.UnweightedAggregationFactory:
    mechanism, options = self.mechanism, {}
    if mechanism.level == 'split':
      options = {
        'max_distances': self._batches.data.client_count,
        'release_aggregate': self._reporting is None,
        'reporting': self._reporting and self._reporting['client'],
      }
    elif self._reporting is not None:
      # Noise beyond eight deviations is cut off, after it was added.
      step = mechanism.clip_norm * (
        1.0 + 8.0 * mechanism.client_noise_per_clip_norm
      )
      if algorithm.name == 'fed_avg':
        step *= algorithm.client_learning_rate * mechanism.local_steps
      options = {
        'sum_factory': secure_sums.SecureUpdateSumFactory(step),
        'secure_counts': True,
      }
    return instance_processes.build_aggregator(mechanism, noise_seed, **options)

  def run_round(
    self,
    state: tff_engine.TffState,
    round_number: int,
    participants: Sequence[int],
    panel: Sequence[int],
  ) -> engine.RoundOutput:
    """Runs one round, then measures the panel."""
    if panel and self.mechanism.level == 'split' and not self._noise_is_seeded:
      raise ValueError(
        'In split privacy a panel is measured by its noisy updates, which TFF '
        'cannot compute a second time. Use panel_size = 0 or the other engine.'
      )
    before = self._process.get_model_weights(state.process)
    output = self._process.next(
      state.process, [self._dataset_of(round_number, c) for c in participants]
    )
    if self._reports is not None:
      return self._reported(tff_engine.TffState(output.state), output.metrics)
    metrics = output.metrics['aggregator']
    answers = self._measurement.read(output.metrics['client_work'])
    clients = self._batches.clients(participants, panel)
    # In 'split' all of the panel are compared with the aggregate.
    others = clients[len(participants) :]
    if self.mechanism.level == 'split':
      others = list(panel)
    compared: dict[int, np.ndarray] = {}
    if others:
      more, rows = self._measure_panel(
        {
          'weights': before,
          'round_number': round_number,
          'aggregate': metrics.get('aggregate', before.trainable),
        },
        [self._dataset_of(round_number, client) for client in others],
      )
      answers = {**self._measurement.read(more), **answers}
      compared = {int(row[0]): row[1:] for row in np.asarray(rows)}
    draws = {c: self._batches.draw(round_number, c) for c in clients}
    result = engine.RoundOutput(
      state=tff_engine.TffState(output.state),
      participants=int(metrics['participants']),
      failed_clients=int(metrics['failed_clients']),
      clip_norm=self.mechanism.clip_norm,
      squared_measures=self._squared_measures(participants, answers, metrics),
      examples=self._batches.groups(
        draws,
        {c: answers[c].squared_moves for c in draws if answers[c].usable},
        participants,
        panel,
      ),
    )
    if not panel or 'client' not in self.mechanism.units:
      return result
    usable = np.array([answers[client].usable for client in panel])
    taking_part = np.isin(panel, participants) & usable
    measures = np.array([answers[client].squared_norm for client in panel])
    if self.mechanism.level == 'split':
      norms, distances = np.array([compared[client] for client in panel]).T
      # Alone, a client is compared with nothing.
      alone = taking_part & (result.participants == 1)
      measures = np.where(alone, norms, distances)
    return result._replace(
      panel_squared_measures=np.where(usable, measures, 0.0),
      panel_taking_part=taking_part,
    )

  def _squared_measures(
    self,
    participants: Sequence[int],
    answers: Mapping[int, instance_processes.Answer],
    metrics: Mapping[str, Any],
  ) -> np.ndarray:
    """Returns the measures of the participants whose updates are usable."""
    if self.mechanism.level == 'split':
      return np.asarray(metrics['squared_measures'])
    usable = [c for c in participants if answers[c].usable]
    return np.array([answers[client].squared_norm for client in usable])

  def _reported(
    self, state: tff_engine.TffState, metrics: Mapping[str, Any]
  ) -> engine.RoundOutput:
    """Returns a round of which the server learnt only sums and maxima."""
    assert self._reports is not None and self._reporting is not None
    reported = self._reports.read(metrics['client_work'])
    counts = metrics['aggregator']
    count = int(counts['participants'])
    if self.mechanism.level == 'split':
      reported['client'] = cost_reports.bound_of_client_costs(
        counts['client_costs'],
        self.mechanism.worst_case_client_squared_distance(count),
        self.mechanism.participation_probability,
        self._reporting['client'],
      )
    return engine.RoundOutput(
      state=state,
      participants=count,
      failed_clients=int(counts['failed_clients']),
      clip_norm=self.mechanism.clip_norm,
      squared_measures=np.zeros(0),
      reported=reported,
    )

  def _dataset_of(self, round_number: int, client: int) -> tf.data.Dataset:
    return instance_processes.part_dataset(self._batches, round_number, client)
