"""What a reader of a report must know besides its figures, as sentences."""

from collections.abc import Sequence

from tf_bdp.training import known_draws
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
  if progress.dp_stop is not None:
    text += (
      f'; DP alone would have stopped after round {progress.dp_stop["round"]} '
      f'at accuracy {progress.dp_stop["accuracy"]:.3f}'
    )
  return text + '.'


def of_run(
  plan: plan_lib.Plan, progress: progress_lib.Progress
) -> Sequence[str]:
  """Returns all notes of a run."""
  notes = [outcome(progress), *plan.mechanism.caveats()]
  if plan.mechanism.local is not None:
    notes += _of_examples(plan)
  seed = plan.seeds.noise_seed
  if seed is not None:
    notes.append(
      'The noise was seeded (--noise_seed). Whoever knows the seed can take it '
      'away: this is an experiment, not protection.'
    )
  notes.append(_of_draws(plan))
  if plan.seeds.sampling_seed is not None:
    units = plan.mechanism.units
    notes += [known_draws.sentence(unit, plan, progress) for unit in units]
  if plan.is_panel('client') and plan.mechanism.local is None:
    notes.append(_of_halves(plan))
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


def _of_draws(plan: plan_lib.Plan) -> str:
  """Says from what the draws came."""
  if plan.seeds.sampling_seed is not None:
    return known_draws.SENTENCE
  return (
    "Participants and batches were drawn from the system's entropy, and are "
    'written nowhere: the gain by sampling holds against whoever does not know '
    'the draw.'
  )


def _of_halves(plan: plan_lib.Plan) -> str:
  """Says which of the two directions was measured."""
  held_out = plan.accounting.held_out_clients
  if held_out:
    return (
      f'{held_out} clients, drawn at random, never trained and were measured '
      'in every round: distances of clients that train tell how well one can '
      'see that a client took part, those of the held-out ones how well that '
      'it did not. The larger figure of the two is given.'
    )
  return (
    'Only the first half is measured: distances of clients that train tell how '
    'well one can see that a client took part. How well one can see that it '
    'did not is told by clients that do not train (--held_out_clients).'
  )


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
