r"""Trains a private federated model and writes a report about it.

Each round, every client takes part with a certain probability and sends an
update; their mean updates the model. --level says what is protected: at client
level the server adds noise to clipped updates; at instance level each client
adds noise to the gradients of its batches; joint privacy counts that noise for
clients, too. Ordinary and Bayesian differential privacy are accounted for side
by side.

Examples:
  python -m experiments.train
  python -m experiments.train --level=joint --panel_examples=10
  python -m experiments.train --dataset=mnist --clients=1000 --rounds=100
  python -m experiments.train --engine=tff --algorithm=fed_avg
  python -m experiments.train --report_dir=reports/run --resume
"""

import functools
import os
import pathlib
import sys
from typing import TYPE_CHECKING, Any, Callable

from absl import app, flags, logging

if TYPE_CHECKING:
  from tf_bdp.learning import engine as engine_lib
  from tf_bdp.learning import federated_data, training

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
  'client_batch_size',
  32,
  'Examples in a local step of fed_avg; at instance level, examples that a '
  'client draws for a step on average.',
)
_LEVEL = flags.DEFINE_enum(
  'level',
  'client',
  [
    *('client', 'instance_sequential', 'instance_parallel'),
    *('instance_aggregate', 'joint', 'split'),
  ],
  'What is protected: clients by noise of the server; examples by noise of the '
  'clients, whose costs are added up over clients (sequential), of which the '
  'largest counts (parallel), or which hides examples of others as well '
  '(aggregate); both, by the same noise (joint) or by two noises (split).',
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
  None,
  "The noise's deviation. At client level that of the server, in units of the "
  'clip norm over the expected number of participants, by default 2. Else that '
  'of each client, in units of the clip norm (--clipping=batch, by default '
  '0.3) or of the clip norm over the batch size (--clipping=example, by '
  'default 2). 0 trains without privacy.',
)
_SERVER_NOISE_MULTIPLIER = flags.DEFINE_float(
  'server_noise_multiplier',
  0.0,
  "At the other levels, the server's own noise, in units of the clip norm over "
  'the expected number of participants: on top of that of the clients '
  '(instance_aggregate, joint), or counted on its own (split).',
)
_CLIP_NORM = flags.DEFINE_float(
  'clip_norm', 1.0, 'Clip norm of an update or gradient.'
)
_CLIPPING = flags.DEFINE_enum(
  'clipping',
  'batch',
  ['batch', 'example'],
  'At instance level: clip the gradient of a batch as a whole, as the paper '
  'does, or that of each example, as DP-SGD does.',
)
_EXAMPLE_ACCOUNTING = flags.DEFINE_enum(
  'example_accounting',
  None,
  ['sequential', 'parallel', 'aggregate'],
  'How costs of examples are counted with --level=joint (by default aggregate) '
  'and split (by default parallel).',
)
_JOINT_REFERENCE = flags.DEFINE_enum(
  'joint_reference',
  'zero',
  ['zero', 'last_mean'],
  'With --level=joint, around what an absent client contributes noise.',
)
_SECURE_AGGREGATION = flags.DEFINE_bool(
  'secure_aggregation',
  False,
  "Updates and costs reach the server by TFF's secure sums alone, in its test "
  'runtime (--engine=tff).',
)
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
_EXAMPLE_DELTA = flags.DEFINE_float(
  'example_delta',
  None,
  'Target delta of examples where clients are protected, too; by default the '
  'same.',
)
_PANEL_SIZE = flags.DEFINE_integer(
  'panel_size',
  None,
  'Clients measured in every round, taking part or not; by default all, at '
  'most 100. With 0 only participants are, and composition is by Hoelder.',
)
_PANEL_EXAMPLES = flags.DEFINE_integer(
  'panel_examples',
  0,
  'At instance level: examples of each client of the panel that are measured '
  'in every round. With 0 those drawn are, and composition is by Hoelder.',
)
_ESTIMATOR = flags.DEFINE_enum(
  'estimator',
  None,
  ['betting', 'bernstein', 'student_t'],
  'Of the mean cost, for the progress bar and the budget: student_t is the '
  "paper's and rests on its assumption; the others hold for all distributions. "
  'By default betting for clients and bernstein for examples.',
)
_BDP_EPSILON_BUDGET = flags.DEFINE_float(
  'bdp_epsilon_budget',
  None,
  'Stop before the round that would exceed this Bayesian epsilon.',
)
_EXAMPLE_BDP_EPSILON_BUDGET = flags.DEFINE_float(
  'example_bdp_epsilon_budget',
  None,
  'The same for examples where clients are protected, too.',
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
  from tf_bdp.learning import engine as engine_lib
  from tf_bdp.learning import evaluation, training

  config = _config()
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
  if _ENGINE.value == 'inprocess' and _ALGORITHM.value == 'fed_sgd':
    from tf_bdp.learning import inprocess_engine

    inprocess_engine.compute_clients_in_parallel()
  dataset = datasets.load(_DATASET.value, _DATA_DIR.value)
  data = datasets.split_iid(
    dataset, _CLIENTS.value, _EXAMPLES_PER_CLIENT.value, _SEED.value
  )
  model_fn = functools.partial(models.mnist_cnn, _SEED.value)
  mechanism = _mechanism(data, algorithm)
  engine = _engine(model_fn, data, mechanism, algorithm, config)
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
  print(
    run_report.write(directory, engine.mechanism, config, settings, progress)
  )


def _config() -> 'training.TrainingConfig':
  from tf_bdp.learning import training

  clients, panel_size = _CLIENTS.value, _PANEL_SIZE.value
  estimator = _ESTIMATOR.value
  if panel_size is None:
    panel_size = min(clients, 100)
  if _SECURE_AGGREGATION.value:
    panel_size = _check_secure()
    estimator = estimator or 'bernstein'
  return training.TrainingConfig(
    rounds=_ROUNDS.value,
    client_count=clients,
    delta=_DELTA.value,
    example_delta=_EXAMPLE_DELTA.value,
    seed=_SEED.value,
    sampling=_SAMPLING.value,
    panel_size=panel_size,
    estimator=estimator or 'betting',
    example_estimator=estimator or 'bernstein',
    bdp_epsilon_budget=_BDP_EPSILON_BUDGET.value,
    example_bdp_epsilon_budget=_EXAMPLE_BDP_EPSILON_BUDGET.value,
    dp_epsilon_budget=_DP_EPSILON_BUDGET.value,
    evaluate_every=_EVALUATE_EVERY.value,
    checkpoint_every=_CHECKPOINT_EVERY.value,
  )


def _check_secure() -> int:
  """Raises ValueError for what secure sums do not allow; returns the panel."""
  if _ENGINE.value != 'tff':
    raise ValueError(
      "--secure_aggregation is done by TFF's secure sums. Add --engine=tff."
    )
  if _PANEL_SIZE.value or _PANEL_EXAMPLES.value:
    raise ValueError(
      'A panel adds up costs over rounds, which clients under secure '
      'aggregation would have to keep; those of TFF keep nothing. Leave out '
      '--panel_size and --panel_examples: composition is by Hoelder.'
    )
  if _ESTIMATOR.value == 'betting':
    raise ValueError(
      'The betting estimator needs the single costs. With --secure_aggregation '
      'use --estimator=bernstein or student_t.'
    )
  return 0


def _mechanism(
  data: 'federated_data.FederatedData', algorithm: 'engine_lib.Algorithm'
) -> 'engine_lib.Mechanism':
  """Returns the mechanism of the level."""
  from tf_bdp import instance_mechanism
  from tf_bdp import mechanism as mechanism_lib

  level, clipping = _LEVEL.value, _CLIPPING.value
  noise = _NOISE_MULTIPLIER.value
  if noise is None:
    noise = 0.3 if level != 'client' and clipping == 'batch' else 2.0
  participation = _PARTICIPATION_PROBABILITY.value
  expected = participation * data.client_count
  if level == 'client':
    _refuse_for_level(
      'client',
      [_SERVER_NOISE_MULTIPLIER, _CLIPPING, _EXAMPLE_ACCOUNTING],
      [_JOINT_REFERENCE, _PANEL_EXAMPLES, _EXAMPLE_DELTA],
    )
    return mechanism_lib.GaussianMechanism(
      kind=_MECHANISM.value,
      noise_multiplier=noise,
      clip_norm=_CLIP_NORM.value,
      participation_probability=participation,
      expected_clients=expected,
      clip_quantile=_CLIP_QUANTILE.value,
    )
  _refuse_for_level(level, [_MECHANISM, _CLIP_QUANTILE])
  holdings = [len(data.indices(c)) for c in range(data.client_count)]
  return instance_mechanism.InstanceMechanism(
    level=level,
    noise_multiplier=noise,
    clip_norm=_CLIP_NORM.value,
    batch_size=_CLIENT_BATCH_SIZE.value,
    participation_probability=participation,
    expected_clients=expected,
    total_examples=sum(holdings),
    smallest_holding=max(1, min(holdings)),
    clipping=clipping,
    server_noise_multiplier=_SERVER_NOISE_MULTIPLIER.value,
    accounting=_EXAMPLE_ACCOUNTING.value or '',
    local_steps=algorithm.local_steps(max(holdings), _CLIENT_BATCH_SIZE.value),
    panel_examples=_PANEL_EXAMPLES.value,
    reference_is_last_mean=_JOINT_REFERENCE.value == 'last_mean',
  )


def _refuse_for_level(level: str, *groups: list[flags.FlagHolder[Any]]) -> None:
  """Raises ValueError for flags that have no effect at a level."""
  for holder in (holder for group in groups for holder in group):
    if flags.FLAGS[holder.name].using_default_value:
      continue
    raise ValueError(
      f'--{holder.name} has no effect with --level={level}. Leave it out.'
    )


def _engine(
  model_fn: Callable[[], Any],
  data: 'federated_data.FederatedData',
  mechanism: 'engine_lib.Mechanism',
  algorithm: 'engine_lib.Algorithm',
  config: 'training.TrainingConfig',
) -> 'engine_lib.Engine':
  """Returns the engine for the mechanism."""
  options: dict[str, Any] = {'noise_seed': _NOISE_SEED.value}
  if _SECURE_AGGREGATION.value:
    options['reporting'] = config.reporting(mechanism)
  if _LEVEL.value != 'client':
    options['seed'] = _SEED.value
  if _ENGINE.value == 'inprocess':
    from tf_bdp.learning import inprocess_engine

    make = inprocess_engine.InProcessEngine
  elif _LEVEL.value == 'client':
    from tf_bdp.learning import tff_engine

    make = tff_engine.TffEngine
  else:
    from tf_bdp.learning import tff_instance_engine

    make = tff_instance_engine.TffInstanceEngine
  return make(model_fn, data, mechanism, algorithm, **options)


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
