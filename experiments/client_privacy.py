r"""Trains with client privacy (Section VI-B of the paper): MNIST by default.

The flags are those of `experiments.train`, with the level fixed to 'client'.

Examples:
  python -m experiments.client_privacy --data_dir=~/tensorflow_datasets
  python -m experiments.client_privacy --partition=shards --clients=1000 \
    --participation_probability=0.1 --bdp_epsilon_budget=1.5 --delta=1e-5
"""

from experiments import train

_DEFAULTS = {
  'level': 'client',
  'dataset': 'mnist',
  'model': 'cnn',
  'examples_per_client': 600,
  'participation_probability': 1.0,
  'noise_multiplier': 5.0,
  'learning_rate': 0.05,
  'activation': 'tanh',
  'average_iterates': 0.9,
  'report_dir': 'reports/client_privacy',
}

if __name__ == '__main__':
  train.run(_DEFAULTS, levels=('client',))
