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
  python -m experiments.train --dataset=mnist --partition=shards --clients=1000
  python -m experiments.train --engine=tff --algorithm=fed_avg
  python -m experiments.train --report_dir=reports/run --resume
"""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from absl import app, flags

from experiments import startup

flags.DEFINE_enum(
  'dataset', 'digits', ['digits', 'mnist', 'aptos'], 'What to learn.'
)
flags.DEFINE_string(
  'data_dir',
  None,
  "Where TensorFlow Datasets has its data, or puts them; for aptos Kaggle's "
  'folder with train.csv and train_images.',
)
flags.DEFINE_enum(
  'partition',
  'iid',
  ['iid', 'shards', 'dirichlet'],
  'How examples are spread over clients: at random, in two shards of one class '
  'each, or with class shares of a Dirichlet distribution.',
)
flags.DEFINE_float(
  'dirichlet_beta', 0.5, 'With --partition=dirichlet: small is uneven.'
)
flags.DEFINE_enum(
  'evaluate_on',
  'test',
  ['test', 'validation'],
  'What accuracy is measured on. validation sets a part of the training data '
  'aside, to choose hyper-parameters by.',
)
flags.DEFINE_float(
  'validation_share', 0.1, 'How much of the training data that is.'
)
flags.DEFINE_string(
  'activation', 'relu', 'Between layers of the CNN; tanh is bounded.'
)
flags.DEFINE_integer(
  'filters',
  16,
  'Of the first convolution of the CNN; those after it have twice as many.',
)
flags.DEFINE_integer('kernel_size', 8, 'Of the first convolution of the CNN.')
flags.DEFINE_bool(
  'normalised',
  False,
  'Whether the CNN normalises each image and its last features, averages where '
  'it pools, and starts with logits of 0; for much noise and few rounds.',
)
flags.DEFINE_string(
  'resnet50_weights',
  'imagenet',
  'With --dataset=aptos: a file with the weights of ResNet-50 without its top, '
  'or imagenet to download them.',
)
flags.DEFINE_enum(
  'fine_tune',
  'none',
  ['none', 'backbone', 'backbone_with_batch_norm'],
  'With --dataset=aptos: what is trained apart from the last layer.',
)
flags.DEFINE_integer(
  'augmentation_versions',
  4,
  'With --dataset=aptos: versions of each training image.',
)
flags.DEFINE_string(
  'cache_dir',
  '~/.cache/tf_bdp/features',
  'With --dataset=aptos: where the features of images are kept.',
)
flags.DEFINE_integer('clients', 100, 'Number of clients.')
flags.DEFINE_integer(
  'examples_per_client',
  0,
  'Examples of each client, used repeatedly if there are too few; 0 for an '
  'equal share.',
)
flags.DEFINE_enum(
  'engine',
  'inprocess',
  ['inprocess', 'tff'],
  "Where rounds run: in this process, on GPUs if there are any, or on TFF's "
  'C++ runtime, on CPUs.',
)
flags.DEFINE_enum(
  'algorithm', 'fed_sgd', ['fed_sgd', 'fed_avg'], 'How clients learn.'
)
flags.DEFINE_integer('rounds', 100, 'The most rounds.')
flags.DEFINE_float('learning_rate', 0.02, "The server's.")
flags.DEFINE_float(
  'learning_rate_decay',
  1.0,
  "What the server's learning rate is multiplied by in every round.",
)
flags.DEFINE_float('momentum', 0.9, "The server's.")
flags.DEFINE_float(
  'average_iterates',
  0.0,
  'Evaluate and save an exponential average of the weights, with this factor '
  'below 1; it takes noise out and costs no privacy.',
)
flags.DEFINE_float('client_learning_rate', 0.1, 'Of local steps in fed_avg.')
flags.DEFINE_integer(
  'client_epochs', 1, 'Local passes over the data in fed_avg.'
)
flags.DEFINE_integer(
  'client_batch_size',
  32,
  'Examples in a local step of fed_avg; at instance level, examples that a '
  'client draws for a step on average.',
)
flags.DEFINE_integer(
  'examples_per_round',
  0,
  'With fed_sgd and client privacy: of how many of its examples, drawn anew in '
  "each round, a client's update is; 0 for all.",
)
flags.DEFINE_enum(
  'client_loss',
  'plain',
  ['plain', 'balanced', 'calibrated'],
  'Whether clients let all classes that they have weigh the same (balanced) or '
  'allow for the classes that they have in their logits (calibrated), so that '
  'clients with different ones disagree less. With fed_sgd and client privacy.',
)
flags.DEFINE_enum(
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
flags.DEFINE_enum(
  'mechanism',
  'mean',
  ['mean', 'sum'],
  'What is released: the mean of clipped updates with noise (the paper), or '
  'their noised sum over the expected number (TFF, DP-FedAvg).',
)
flags.DEFINE_float(
  'noise_multiplier',
  None,
  "The noise's deviation. At client level that of the server, in units of the "
  'clip norm over the expected number of participants, by default 2. Else that '
  'of each client, in units of the clip norm (--clipping=batch, by default '
  '0.3) or of the clip norm over the batch size (--clipping=example, by '
  'default 2). 0 trains without privacy.',
)
flags.DEFINE_float(
  'server_noise_multiplier',
  0.0,
  "At the other levels, the server's own noise, in units of the clip norm over "
  'the expected number of participants: on top of that of the clients '
  '(instance_aggregate, joint), or counted on its own (split).',
)
flags.DEFINE_float('clip_norm', 1.0, 'Clip norm of an update or gradient.')
flags.DEFINE_enum(
  'clipping',
  'batch',
  ['batch', 'example'],
  'At instance level: clip the gradient of a batch as a whole, as the paper '
  'does, or that of each example, as DP-SGD does.',
)
flags.DEFINE_enum(
  'example_accounting',
  None,
  ['sequential', 'parallel', 'aggregate'],
  'How costs of examples are counted with --level=joint (by default aggregate) '
  'and split (by default parallel).',
)
flags.DEFINE_enum(
  'joint_reference',
  'zero',
  ['zero', 'last_mean'],
  'With --level=joint, around what an absent client contributes noise.',
)
flags.DEFINE_bool(
  'secure_aggregation',
  False,
  "Updates and costs reach the server by TFF's secure sums alone, in its test "
  'runtime (--engine=tff).',
)
flags.DEFINE_float(
  'clip_quantile',
  None,
  'Adaptive clipping: the share of updates that should be below the clip norm.',
)
flags.DEFINE_float(
  'participation_probability', 0.5, 'Chance of a client to be in a round.'
)
flags.DEFINE_enum(
  'sampling',
  'poisson',
  ['poisson', 'fixed_size'],
  'How participants are drawn. The theory assumes poisson.',
)
flags.DEFINE_float('delta', 1e-3, 'Target delta.')
flags.DEFINE_float(
  'example_delta',
  None,
  'Target delta of examples where clients are protected, too; by default the '
  'same.',
)
flags.DEFINE_integer(
  'panel_size',
  None,
  'Clients measured in every round, taking part or not; by default all, at '
  'most 100. With 0 only participants are, and composition is by Hoelder.',
)
flags.DEFINE_integer(
  'panel_examples',
  0,
  'At instance level: examples of each client of the panel that are measured '
  'in every round. With 0 those drawn are, and composition is by Hoelder.',
)
flags.DEFINE_enum(
  'estimator',
  None,
  ['betting', 'bernstein', 'student_t'],
  'Of the mean cost, for the progress bar and the budget: student_t is the '
  "paper's and rests on its assumption; the others hold for all distributions. "
  'By default betting for clients and bernstein for examples.',
)
flags.DEFINE_float(
  'bdp_epsilon_budget',
  None,
  'Stop before the round that would exceed this Bayesian epsilon.',
)
flags.DEFINE_float(
  'example_bdp_epsilon_budget',
  None,
  'The same for examples where clients are protected, too.',
)
flags.DEFINE_float(
  'dp_epsilon_budget',
  None,
  'Record when this ordinary epsilon is spent, and go on.',
)
flags.DEFINE_integer(
  'evaluate_every', 10, 'Rounds from one evaluation to the next.'
)
flags.DEFINE_integer(
  'checkpoint_every', 10, 'Rounds from one checkpoint to the next.'
)
flags.DEFINE_integer(
  'seed', 0, 'Of the split, the initial weights, the sampling and the panel.'
)
flags.DEFINE_integer(
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


def main(argv: list[str]) -> None:
  """Trains, accounts and reports."""
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected arguments: {argv[1:]}.')
  try:
    _train()
  except (ValueError, OSError, RuntimeError) as error:
    sys.exit(f'Error: {error}')


def _train() -> None:
  from experiments import run as run_lib
  from experiments import run_report

  names = [field.name for field in dataclasses.fields(run_lib.Settings)]
  settings = run_lib.Settings(**{n: flags.FLAGS[n].value for n in names})
  directory = pathlib.Path(_REPORT_DIR.value)
  outcome = run_lib.run(settings, directory, _RESUME.value, _OVERWRITE.value)
  print(run_report.write(directory, settings.to_dict(), outcome))


def run(
  defaults: Optional[Mapping[str, Any]] = None, levels: Sequence[str] = ()
) -> None:
  """Runs the script.

  Args:
    defaults: Values that flags have if they are not given.
    levels: What --level may be; anything if empty.
  """
  for name, value in (defaults or {}).items():
    flags.FLAGS.set_default(name, value)
  if levels:
    flags.register_validator(
      'level',
      lambda level: level in levels,
      f'This script is for --level={"|".join(levels)}; for others use '
      'experiments.train.',
    )
  startup.start(main)


if __name__ == '__main__':
  run()
