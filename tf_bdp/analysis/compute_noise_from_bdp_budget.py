r"""Computes the noise multiplier that a privacy budget would have needed.

In retrospect: for distances recorded in one run, the smallest noise multiplier
that keeps (epsilon, delta) with each way of accounting. A plan for the next
run, not a guarantee of any; the distances change with the noise.

Example:
  compute_noise_from_bdp_budget \
    --distances_file=distances.npz \
    --participation_probability=0.1 \
    --epsilon=2 \
    --delta=1e-5
"""

import json

from absl import flags

from tf_bdp.analysis import compute_noise_from_bdp_budget_lib, distance_flags

_EPSILON = flags.DEFINE_float('epsilon', None, 'Target epsilon.')


def main(argv: list[str]) -> None:
  """Prints the noise multipliers."""
  del argv
  recording = distance_flags.recording()
  report = compute_noise_from_bdp_budget_lib.compute_noise(
    recording.distances,
    participation_probability=distance_flags.PARTICIPATION_PROBABILITY.value,
    epsilon=_EPSILON.value,
    delta=distance_flags.DELTA.value,
    worst_case_distance=recording.worst_case_distance,
    panel=recording.panel,
    unit=distance_flags.UNIT.value,
  )
  if distance_flags.FORMAT.value == 'json':
    print(json.dumps(report.to_dict(), indent=2))
  else:
    print(report.statement())


def run() -> None:
  """Runs the command; the entry point of the console script."""
  flags.mark_flags_as_required(['epsilon', 'participation_probability'])
  distance_flags.run(main, __doc__ or '')


if __name__ == '__main__':
  run()
