r"""Trains with joint privacy (Section VI-D of the paper): MNIST by default.

The flags are those of `experiments.train`; the level is 'joint', or 'split' for
the baseline.

Examples:
  python -m experiments.joint_privacy --data_dir=~/tensorflow_datasets
  python -m experiments.joint_privacy --level=split --server_noise_multiplier=5
"""

from experiments import train

_DEFAULTS = {
  'level': 'joint',
  'dataset': 'mnist',
  'examples_per_client': 600,
  'participation_probability': 1.0,
  'noise_multiplier': 0.5,
  'client_batch_size': 60,
  'learning_rate': 0.05,
  'activation': 'tanh',
  'average_iterates': 0.9,
  'example_delta': 1e-5,
  'report_dir': 'reports/joint_privacy',
}

if __name__ == '__main__':
  train.run(_DEFAULTS, levels=('joint', 'split'))
