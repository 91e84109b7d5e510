r"""Trains a private federated model and writes a report about it.

Client-level privacy: each round, every client takes part with a certain
probability and sends its clipped update; their noised mean updates the model.
Ordinary and Bayesian differential privacy are accounted for side by side.

Examples:
  python -m experiments.train
  python -m experiments.train --dataset=mnist --clients=1000 --rounds=100
  python -m experiments.train --engine=tff --algorithm=fed_avg
  python -m experiments.train --report_dir=reports/run --resume
"""

import functools
import os
import pathlib
import sys
from typing import Any

from absl import app, flags, logging

_DATASET = flags.DEFINE_enum(
  'dataset', 'digits', ['digits', 'mnist'], 'What to learn.'
)
_DATA_DIR = flags.DEFINE_string(
  'data_dir', None, 'Where TensorFlow Datasets has its data, or puts them.'
)
_CLIENTS = flags.DEFINE_integer('clients', 100, 'Number of clients.')
_EXAMPLES_PER_CLIENT = flags.DEFINE_integer(
  'examples_per_client',
  0,
  'Examples of each client, used repeatedly if there are too few; 0 for an '
  'equal share.',
)
_ENGINE = flags.DEFINE_enum(
  'engine',
  'inprocess',
  ['inprocess', 'tff'],
  "Where rounds run: in this process, on GPUs if there are any, or on TFF's "
  'C++ runtime, on CPUs.',
)
_ALGORITHM = flags.DEFINE_enum(
  'algorithm', 'fed_sgd', ['fed_sgd', 'fed_avg'], 'How clients learn.'
)
_ROUNDS = flags.DEFINE_integer('rounds', 100, 'The most rounds.')
_LEARNING_RATE = flags.DEFINE_float('learning_rate', 0.02, "The server's.")
_MOMENTUM = flags.DEFINE_float('momentum', 0.9, "The server's.")
_CLIENT_LEARNING_RATE = flags.DEFINE_float(
  'client_learning_rate', 0.1, 'Of local steps in fed_avg.'
)
_CLIENT_EPOCHS = flags.DEFINE_integer(
  'client_epochs', 1, 'Local passes over the data in fed_avg.'
)
_CLIENT_BATCH_SIZE = flags.DEFINE_integer(
  'client_batch_size', 32, 'Examples in a local step of fed_avg.'
)
_MECHANISM = flags.DEFINE_enum(
  'mechanism',
  'mean',
  ['mean', 'sum'],
  'What is released: the mean of clipped updates with noise (the paper), or '
  'their noised sum over the expected number (TFF, DP-FedAvg).',
)
_NOISE_MULTIPLIER = flags.DEFINE_float(
  'noise_multiplier',
  2.0,
  "z: the noise's deviation, in units of the clip norm over the expected "
  'number of participants. 0 trains without privacy.',
)
_CLIP_NORM = flags.DEFINE_float('clip_norm', 1.0, 'Clip norm of an update.')
_CLIP_QUANTILE = flags.DEFINE_float(
  'clip_quantile',
  None,
  'Adaptive clipping: the share of updates that should be below the clip norm.',
)
_PARTICIPATION_PROBABILITY = flags.DEFINE_float(
  'participation_probability', 0.5, 'Chance of a client to be in a round.'
)
_SAMPLING = flags.DEFINE_enum(
  'sampling',
  'poisson',
  ['poisson', 'fixed_size'],
  'How participants are drawn. The theory assumes poisson.',
)
_DELTA = flags.DEFINE_float('delta', 1e-3, 'Target delta.')
_PANEL_SIZE = flags.DEFINE_integer(
  'panel_size',
  None,
  'Clients measured in every round, taking part or not; by default all, at '
  'most 100. With 0 only participants are, and composition is by Hoelder.',
)
_ESTIMATOR = flags.DEFINE_enum(
  'estimator',
  'betting',
  ['betting', 'bernstein', 'student_t'],
  'Of the mean cost, for the progress bar and the budget: student_t is the '
  "paper's and rests on its assumption; the others hold for all distributions.",
)
_BDP_EPSILON_BUDGET = flags.DEFINE_float(
  'bdp_epsilon_budget',
  None,
  'Stop before the round that would exceed this Bayesian epsilon.',
)
_DP_EPSILON_BUDGET = flags.DEFINE_float(
  'dp_epsilon_budget',
  None,
  'Record when this ordinary epsilon is spent, and go on.',
)
_EVALUATE_EVERY = flags.DEFINE_integer(
  'evaluate_every', 10, 'Rounds from one evaluation to the next.'
)
_CHECKPOINT_EVERY = flags.DEFINE_integer(
  'checkpoint_every', 10, 'Rounds from one checkpoint to the next.'
)
_SEED = flags.DEFINE_integer(
  'seed', 0, 'Of the split, the initial weights, the sampling and the panel.'
)
_NOISE_SEED = flags.DEFINE_integer(
  'noise_seed',
  None,
  'Makes the noise reproducible, for experiments: whoever knows it can take '
  'the noise away. Without it noise is fresh and cannot be repeated.',
)
_REPORT_DIR = flags.DEFINE_string(
  'report_dir', 'reports/run', 'Where results and checkpoints go.'
)
_RESUME = flags.DEFINE_bool(
  'resume', False, 'Go on from the checkpoint in --report_dir.'
)
_OVERWRITE = flags.DEFINE_bool(
  'overwrite',
  False,
  'Discard a run that --report_dir already holds, unless it is resumed.',
)
# What may differ between a run and its continuation.
_NOT_SETTINGS = ('report_dir', 'resume', 'overwrite', 'data_dir')


def _settings() -> dict[str, Any]:
  """Returns the flags of this script, by name."""
  own = flags.FLAGS.get_key_flags_for_module(sys.modules[__name__])
  return {flag.name: flag.value for flag in own}


def main(argv: list[str]) -> None:
  """Trains, accounts and reports."""
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected arguments: {argv[1:]}.')
  try:
    _train()
  except (ValueError, OSError, RuntimeError) as error:
    sys.exit(f'Error: {error}')


def _train() -> None:
  from experiments import datasets, models, run_report
  from tf_bdp import mechanism as mechanism_lib
  from tf_bdp.learning import engine as engine_lib
  from tf_bdp.learning import evaluation, training

  clients = _CLIENTS.value
  panel_size = _PANEL_SIZE.value
  config = training.TrainingConfig(
    rounds=_ROUNDS.value,
    client_count=clients,
    delta=_DELTA.value,
    seed=_SEED.value,
    sampling=_SAMPLING.value,
    panel_size=min(clients, 100) if panel_size is None else panel_size,
    estimator=_ESTIMATOR.value,
    bdp_epsilon_budget=_BDP_EPSILON_BUDGET.value,
    dp_epsilon_budget=_DP_EPSILON_BUDGET.value,
    evaluate_every=_EVALUATE_EVERY.value,
    checkpoint_every=_CHECKPOINT_EVERY.value,
  )
  mechanism = mechanism_lib.GaussianMechanism(
    kind=_MECHANISM.value,
    noise_multiplier=_NOISE_MULTIPLIER.value,
    clip_norm=_CLIP_NORM.value,
    participation_probability=_PARTICIPATION_PROBABILITY.value,
    expected_clients=_PARTICIPATION_PROBABILITY.value * clients,
    clip_quantile=_CLIP_QUANTILE.value,
  )
  algorithm = engine_lib.Algorithm(
    name=_ALGORITHM.value,
    learning_rate=_LEARNING_RATE.value,
    momentum=_MOMENTUM.value,
    client_learning_rate=_CLIENT_LEARNING_RATE.value,
    client_epochs=_CLIENT_EPOCHS.value,
    client_batch_size=_CLIENT_BATCH_SIZE.value,
  )
  directory = pathlib.Path(_REPORT_DIR.value)
  if _OVERWRITE.value and not _RESUME.value:
    (directory / training.CHECKPOINT_FILE).unlink(missing_ok=True)
  if _ENGINE.value == 'tff':
    from tf_bdp.learning import tff_engine

    make_engine = tff_engine.TffEngine
  else:
    from tf_bdp.learning import inprocess_engine

    if _ALGORITHM.value == 'fed_sgd':
      inprocess_engine.compute_clients_in_parallel()
    make_engine = inprocess_engine.InProcessEngine
  dataset = datasets.load(_DATASET.value, _DATA_DIR.value)
  data = datasets.split_iid(
    dataset, clients, _EXAMPLES_PER_CLIENT.value, _SEED.value
  )
  model_fn = functools.partial(models.mnist_cnn, _SEED.value)
  engine = make_engine(
    model_fn, data, mechanism, algorithm, noise_seed=_NOISE_SEED.value
  )
  evaluator = evaluation.Evaluator(
    model_fn(), dataset.test_features, dataset.test_labels
  )
  settings = _settings()
  progress = training.train(
    engine,
    config,
    evaluator.evaluate,
    directory,
    {k: v for k, v in settings.items() if k not in _NOT_SETTINGS},
    resume=_RESUME.value,
  )
  evaluator.save(engine.model_weights(progress.state), directory / 'model')
  print(run_report.write(directory, mechanism, config, settings, progress))


def run() -> None:
  """Runs the script."""
  # --help and mistakes in flags are answered before the slow imports, which
  # must come before `app.run`: Keras 2.14 breaks if it is first imported there.
  app.define_help_flags()
  app.parse_flags_with_usage(sys.argv)
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  import tensorflow as tf

  tf.get_logger().setLevel('ERROR')
  logging.set_verbosity(logging.ERROR)

  app.run(main)


if __name__ == '__main__':
  run()
