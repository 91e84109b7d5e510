r"""Computes Bayesian and ordinary differential privacy of a federated run.

The counterpart of TF Privacy's compute_dp_sgd_privacy: from the distances that
were recorded during training, the noise and the sampling, it prints what can be
claimed: for each claim epsilon, who is protected and what it rests on, and one
claim that is recommended.

Example:
  compute_bdp_privacy \
    --distances_file=distances.npz \
    --noise_multiplier=1.0 \
    --participation_probability=0.1 \
    --delta=1e-5
"""

from absl import flags

from tf_bdp.accounting import privacy_report
from tf_bdp.analysis import command_line, distance_flags

_NOISE_MULTIPLIER = flags.DEFINE_float(
  'noise_multiplier',
  None,
  'Ratio of the standard deviation of the Gaussian noise to the clip norm.',
  required=True,
)
_SAMPLING = flags.DEFINE_enum(
  'sampling',
  'poisson',
  ['poisson', 'fixed_size'],
  'How the units of a round were drawn. Distances say nothing about draws of a '
  'fixed number of units, which are refused.',
)
flags.adopt_module_key_flags(distance_flags)


def main() -> None:
  """Prints the statement."""
  report = privacy_report.compute_bdp_privacy(
    **distance_flags.arguments(),
    noise_multiplier=_NOISE_MULTIPLIER.value,
    mechanism=distance_flags.MECHANISM.value,
    sampling=_SAMPLING.value,
  )
  distance_flags.show(report)


def run() -> None:
  """Runs the command; the entry point of the console script."""
  command_line.run(main, __doc__ or '')


if __name__ == '__main__':
  run()
