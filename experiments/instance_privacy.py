r"""Trains with instance privacy (Section VI-C of the paper): MNIST by default.

The flags are those of `experiments.train`; the level is one of the three of
instance privacy.

Examples:
  python -m experiments.instance_privacy --data_dir=~/tensorflow_datasets
  python -m experiments.instance_privacy --level=instance_sequential \
    --partition=shards --clients=1000 --participation_probability=0.1
"""

from experiments import train

_DEFAULTS = {
  'level': 'instance_aggregate',
  'dataset': 'mnist',
  'examples_per_client': 600,
  'participation_probability': 1.0,
  'noise_multiplier': 0.3,
  'client_batch_size': 60,
  'learning_rate': 0.05,
  'activation': 'tanh',
  'average_iterates': 0.9,
  'delta': 1e-5,
  'report_dir': 'reports/instance_privacy',
}

if __name__ == '__main__':
  train.run(
    _DEFAULTS,
    levels=('instance_sequential', 'instance_parallel', 'instance_aggregate'),
  )
