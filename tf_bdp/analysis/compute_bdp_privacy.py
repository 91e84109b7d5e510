r"""Computes Bayesian and ordinary differential privacy of a federated run.

The counterpart of TF Privacy's compute_dp_sgd_privacy: from the distances that
were recorded during training, the noise and the sampling, it prints a privacy
statement with both kinds of guarantee and what each rests on.

Example:
  compute_bdp_privacy \
    --distances_file=distances.npz \
    --noise_multiplier=1.0 \
    --participation_probability=0.1 \
    --delta=1e-5
"""

import json

from absl import flags

from tf_bdp.accounting import privacy_report
from tf_bdp.analysis import distance_flags

_NOISE_MULTIPLIER = flags.DEFINE_float(
  'noise_multiplier',
  None,
  "Ratio of the Gaussian noise's deviation to the clip norm.",
)
_SAMPLING = flags.DEFINE_enum(
  'sampling',
  'poisson',
  ['poisson', 'fixed_size'],
  'How the units of a round were drawn. The theory assumes Poisson sampling; '
  'anything else is named in the statement.',
)


def main(argv: list[str]) -> None:
  """Prints the statement."""
  del argv
  recording = distance_flags.recording()
  report = privacy_report.compute_bdp_privacy(
    recording.distances,
    noise_multiplier=_NOISE_MULTIPLIER.value,
    participation_probability=distance_flags.PARTICIPATION_PROBABILITY.value,
    delta=distance_flags.DELTA.value,
    worst_case_distance=recording.worst_case_distance,
    panel=recording.panel,
    mechanism=distance_flags.MECHANISM.value,
    unit=distance_flags.UNIT.value,
    sampling=_SAMPLING.value,
  )
  if distance_flags.FORMAT.value == 'json':
    print(json.dumps(report.to_dict(), indent=2))
  else:
    print(report.statement())


def run() -> None:
  """Runs the command; the entry point of the console script."""
  flags.mark_flags_as_required(
    ['noise_multiplier', 'participation_probability']
  )
  distance_flags.run(main, __doc__ or '')


if __name__ == '__main__':
  run()
