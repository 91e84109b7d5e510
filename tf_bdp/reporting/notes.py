"""What a reader of a report must know besides its figures, as sentences."""

from collections.abc import Sequence

from tf_bdp.training import plan as plan_lib
from tf_bdp.training import progress as progress_lib


def outcome(progress: progress_lib.Progress) -> str:
  """Returns how a run ended, as a sentence."""
  evaluated = [row for row in progress.rows if row['accuracy'] != '']
  text = f'{progress.round_number} rounds'
  if evaluated:
    text += f', test accuracy {evaluated[-1]["accuracy"]:.3f}'
  if progress.stopped:
    text += f'; stopped, because {progress.stopped}'
  return text + '.'


def of_run(
  plan: plan_lib.Plan, progress: progress_lib.Progress
) -> Sequence[str]:
  """Returns all notes of a run."""
  notes = [outcome(progress), *plan.mechanism.caveats(), *_of_the_end(plan)]
  if plan.mechanism.local is not None:
    notes += _of_examples(plan)
  seed = plan.seeds.noise_seed
  if seed is not None:
    notes.append(
      f'The noise was seeded (--noise_seed={seed}). Whoever knows the seed can '
      'take it away: this is an experiment, not protection.'
    )
  notes.append(
    'Participants were drawn with a seed. The gain by sampling holds against '
    'those who do not know it.'
  )
  if plan.schedule.engine == 'tff' and seed is None:
    notes.append(
      "TFF's noise comes from TensorFlow's generator, freshly seeded by the "
      'system. It is not a cryptographic source; that of the other engine is.'
    )
  used = {a.settings['estimator'] for a in progress.accountants.values()}
  notes.append(
    'The curves show what the run itself went by: integer orders, and the '
    f'estimator {" and ".join(sorted(used))}. The table adds tighter figures '
    'of DP.'
  )
  failed = sum(row['failed_clients'] for row in progress.rows)
  if failed:
    notes.append(
      f'{failed} client updates were NaN, infinite or zero and left out.'
    )
  return notes


def _of_the_end(plan: plan_lib.Plan) -> list[str]:
  """Says what the number of rounds tells, and what the filter did."""
  notes, accounting = [], plan.accounting
  if any(plan.budget_of(unit) is not None for unit in plan.mechanism.units):
    notes.append(
      'Training was to stop at an epsilon that depends on the data. So the '
      'number of rounds does, and no figure here covers what it tells: one '
      'client can make the difference. To tell nothing, fix the rounds, or '
      'stop by --dp_epsilon_budget.'
    )
  if accounting.filter is not None:
    notes.append(
      'Each client left before it would have exceeded its own budget of '
      f'epsilon = {accounting.filter:g} at delta = {accounting.delta:g}. The '
      'run keeps that for anyone, whatever the data are. Who has left, and '
      'when, is private: it stays in metrics.csv and the checkpoint.'
    )
  return notes


def _of_examples(plan: plan_lib.Plan) -> list[str]:
  """Says whose examples the figures cover, and what the server saw."""
  local, notes = plan.mechanism.local, []
  assert local is not None
  if not plan.secure_aggregation and (
    local.averages_noise or local.panel_examples
  ):
    notes.append(
      'The largest cost of any client is that of those measured: the panel of '
      'clients and, without a panel of examples, those who took part. Other '
      'clients can bound their own loss by parallel accounting.'
    )
  if local.clipping == 'batch':
    notes.append(
      'Batch gradients were clipped as a whole, as in the paper: one example '
      'can move them by twice the clip norm, and the DP figures of examples '
      'say so. Clip per example for the DP of DP-SGD.'
    )
  if plan.secure_aggregation:
    notes.append(
      'The server saw sums of updates, and of costs sums or maxima on a public '
      'grid, rounded up; no value of a single client.'
    )
  else:
    notes.append(
      "The server saw each client's noisy update, and measured distances "
      'without noise: it is inside the trust boundary.'
    )
  return notes
