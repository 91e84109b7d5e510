"""Rounds on TFF's C++ runtime."""

import os
from collections.abc import Mapping, Sequence
from typing import Callable, NamedTuple, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
import tree

from tf_bdp.aggregators import cost_reports, runtime
from tf_bdp.engines import base, tff_rounds
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data, metrics, models, sampling
from tf_bdp.mechanisms import base as mechanisms
from tf_bdp.mechanisms import measurements as measurements_lib


class TffState(NamedTuple):
  """TFF's own state of the process."""

  process: tff.learning.templates.LearningAlgorithmState


class TffEngine(base.Engine):
  """The round as a TFF learning process."""

  def __init__(
    self,
    model_fn: Callable[[], tf.keras.Model],
    data: federated_data.FederatedData,
    *,
    mechanism: mechanisms.Mechanism,
    algorithm: algorithm_lib.Algorithm,
    sampler: sampling.Sampler,
    noise_seed: Optional[int] = None,
    reporting: Optional[Mapping[str, cost_reports.Reporting]] = None,
  ):
    """Builds the process.

    Args:
      model_fn: Makes a Keras model whose outputs are logits.
      data: The clients' data.
      mechanism: What is released.
      algorithm: FedSGD or FedAvg, and the server's optimiser.
      sampler: Draws the examples that clients use, if they do not use all.
      noise_seed: For experiments only.
      reporting: Under secure aggregation, how the costs of each unit are
        bounded. Updates and costs then reach the server by secure sums alone,
        which TFF's test runtime simulates.
    """
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
    if reporting is not None:
      runtime.use_simulation_context()
    model = model_fn()
    models.check(model)
    self.mechanism = mechanism
    self.client_count = data.client_count
    self.sampler = sampler
    self._reporting = reporting
    self._initial_weights = [v.numpy() for v in model.trainable_variables]
    make: Callable[..., tff_rounds.Rounds] = tff_rounds.ClientRounds
    if mechanism.local is not None:
      make = tff_rounds.ExampleRounds
    self._rounds = make(
      model_fn, data, sampler, mechanism, algorithm, reporting, noise_seed
    )
    self._process = self._rounds.process
    # Keras binds its classes to the kind of graph in which a model was made
    # last, and TFF makes models in old ones: bind them back for this process.
    model_fn()

  def initial_state(self) -> TffState:
    """Returns the process's initial state, with the model's initial weights."""
    state = self._process.initialize()
    weights = self._process.get_model_weights(state)
    weights = tff.learning.models.ModelWeights(
      trainable=list(self._initial_weights), non_trainable=weights.non_trainable
    )
    return TffState(self._process.set_model_weights(state, weights))

  def model_weights(self, state: TffState) -> list[np.ndarray]:
    """Returns the trainable weights, in the model's order."""
    weights = self._process.get_model_weights(state.process)
    return [np.asarray(part) for part in weights.trainable]

  def to_arrays(self, state: TffState) -> dict[str, np.ndarray]:
    """Returns the leaves of the state."""
    leaves = tree.flatten(state.process)
    return {f'leaf_{i}': np.asarray(leaf) for i, leaf in enumerate(leaves)}

  def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> TffState:
    """Restores what `to_arrays` returned."""
    template = self._process.initialize()
    if len(tree.flatten(template)) != len(arrays):
      raise ValueError('The checkpoint is not one of this TFF process.')
    leaves = [arrays[f'leaf_{i}'] for i in range(len(arrays))]
    # Scalars come back as arrays without dimensions; TFF wants them plain.
    plain = [leaf if leaf.ndim else leaf.item() for leaf in leaves]
    return TffState(tree.unflatten_as(template, plain))

  def release(
    self,
    state: TffState,
    round_number: int,
    participants: Sequence[int],
    panel: Sequence[int],
  ) -> tuple[TffState, measurements_lib.Measurements]:
    """Runs one round, then measures the panel; see `Engine.run_round`."""
    before = self._process.get_model_weights(state.process)
    output = self._process.next(
      state.process,
      [self._rounds.dataset(round_number, client) for client in participants],
    )
    measured = metrics.measurements_from_metrics(
      output.metrics, self.mechanism, self._reporting
    )
    if panel:
      if self._reporting is not None:
        raise ValueError(
          'Where clients report costs, there is no panel: use panel_size = 0.'
        )
      done = tff_rounds.DoneRound(
        before, round_number, participants, output.metrics
      )
      measured = self._rounds.measure_panel(done, panel, measured)
    return TffState(output.state), measured
