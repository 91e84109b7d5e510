r"""Computes the noise multiplier that a privacy budget would have needed.

In retrospect: for distances recorded in one run, the smallest noise multiplier
that keeps (epsilon, delta) by each claim. A plan for the next run, not a
guarantee of any; the distances change with the noise.

Example:
  compute_noise_from_bdp_budget \
    --distances_file=distances.npz \
    --participation_probability=0.1 \
    --epsilon=2 \
    --delta=1e-5
"""

from absl import flags

from tf_bdp.accounting import noise_report
from tf_bdp.analysis import command_line, distance_flags

_EPSILON = flags.DEFINE_float('epsilon', None, 'Target epsilon.', required=True)
flags.adopt_module_key_flags(distance_flags)


def main() -> None:
  """Prints the noise multipliers."""
  report = noise_report.compute_noise(
    **distance_flags.arguments(), epsilon=_EPSILON.value
  )
  distance_flags.show(report)


def run() -> None:
  """Runs the command; the entry point of the console script."""
  command_line.run(main, __doc__ or '')


if __name__ == '__main__':
  run()
