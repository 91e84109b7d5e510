"""What a checkpoint holds: a resumed run is one that was not interrupted."""

import shutil

import dp_accounting
import numpy as np
import pytest

from tests.training import runs
from tf_bdp.accounting import events
from tf_bdp.engines import base as engines
from tf_bdp.mechanisms import measurements as measurements_lib
from tf_bdp.training import checkpoint, loop, progress


@pytest.mark.parametrize('rounds', [1, 2, 5])
@pytest.mark.parametrize('level', runs.LEVELS)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
  whole, level, rounds, tmp_path
):
  runner = runs.engine(level)
  with (
    runs.interrupted(runner, rounds, middle=rounds == 2) as done,
    pytest.raises(KeyboardInterrupt),
  ):
    runs.train(level, tmp_path)
  # Interrupted between two checkpoints, or in the middle of a round: what is
  # done is kept, and nothing is done again.
  with runs.interrupted(runner, runs.ROUNDS - len(done)):
    resumed = runs.train(level, tmp_path, resume=True)
  directory, wanted = whole(level)
  runs.check_same(resumed, wanted)
  assert runs.numbers(tmp_path) == runs.same_rows(runs.numbers(directory))


def test_an_interrupt_while_evaluating_loses_that_round_only(whole, tmp_path):
  calls = []

  def evaluate(weights):
    calls.append(None)
    if len(calls) == 2:
      raise KeyboardInterrupt
    return runs.evaluator().evaluate(weights)

  with pytest.raises(KeyboardInterrupt):
    loop.train(runs.engine('client'), runs.plan('client'), evaluate, tmp_path)
  saved = checkpoint.load(tmp_path / progress.CHECKPOINT_FILE)
  assert len(saved.contents['rows']) == 3
  resumed = runs.train('client', tmp_path, resume=True)
  runs.check_same(resumed, whole('client')[1])


def test_an_interrupt_in_the_first_round_leaves_nothing_to_resume(tmp_path):
  runner = runs.engine('client')
  with (
    runs.interrupted(runner, 0, middle=True),
    pytest.raises(KeyboardInterrupt),
  ):
    runs.train('client', tmp_path)
  assert not (tmp_path / progress.CHECKPOINT_FILE).exists()
  assert runs.train('client', tmp_path, rounds=1).round_number == 1


@pytest.mark.parametrize('level', ['client', 'joint'])
def test_a_run_that_was_killed_at_any_moment_can_be_resumed(
  whole, level, tmp_path, monkeypatch
):
  # Every checkpoint as it was when it had been written, with a log that had
  # gone on when the process was killed.
  save, copies = progress.save, []

  def saved(directory, *arguments):
    save(directory, *arguments)
    copies.append(tmp_path / str(len(copies)))
    shutil.copytree(directory, copies[-1])

  with monkeypatch.context() as patch:
    patch.setattr(progress, 'save', saved)
    runs.train(level, tmp_path / 'run')
  assert len(copies) == 4  # After rounds 2, 4 and 6, and at the end.
  _, wanted = whole(level)
  for copy in copies:
    shutil.copy(tmp_path / 'run' / 'metrics.csv', copy)
    (copy / 'checkpoint.npz.part').write_bytes(b'half a file')
    runs.check_same(runs.train(level, copy, resume=True), wanted)
    wanted_rows = runs.same_rows(runs.numbers(tmp_path / 'run'))
    assert runs.numbers(copy) == wanted_rows


@pytest.mark.parametrize('level', runs.LEVELS)
def test_resuming_a_finished_run_changes_nothing(whole, level):
  directory, wanted = whole(level)
  before = runs.rows(directory)
  with runs.interrupted(runs.engine(level), 0):
    runs.check_same(runs.train(level, directory, resume=True), wanted)
  assert runs.rows(directory) == before


def test_averages_are_resumed(tmp_path):
  changes = {'average_iterates': 0.7}
  wanted = runs.train('client', tmp_path / 'whole', **changes)
  with (
    runs.interrupted(runs.engine('client'), 4),
    pytest.raises(KeyboardInterrupt),
  ):
    runs.train('client', tmp_path / 'cut', **changes)
  found = runs.train('client', tmp_path / 'cut', resume=True, **changes)
  runs.check_same(found, wanted)
  assert found.averaged is not None


# Draws that are secret.

_PANELS = {
  'client': {'held_out_clients': 3, 'panel_size': 4},
  'joint': {'panel_size': 5},
}


@pytest.mark.parametrize('level', _PANELS)
def test_a_run_of_secret_draws_goes_on_with_its_panel(level, tmp_path):
  def start():
    plan = runs.plan(level, sampling_seed=None, **_PANELS[level])
    return plan, plan.engine(runs.model, runs.data())

  def train(plan, runner, **options):
    return loop.train(
      runner, plan, runs.evaluator().evaluate, tmp_path, **options
    )

  def panel(plan):
    return [
      plan.sampler.panel(plan.panel_size).tolist(),
      plan.sampler.held_out_clients().tolist(),
      plan.sampler.panel_examples(2, 12, 4).tolist(),
    ]

  plan, runner = start()
  with runs.interrupted(runner, 3), pytest.raises(KeyboardInterrupt):
    train(plan, runner)
  plan_after, runner_after = start()
  keys = [plan.sampler._draw_key, plan_after.sampler._draw_key]
  done = train(plan_after, runner_after, resume=True)
  assert done.round_number == runs.ROUNDS
  # Panels of eight clients are seldom the same by chance; keys never are.
  assert plan_after.sampler.panel_key == plan.sampler.panel_key
  assert panel(plan_after) == panel(plan)
  assert runner_after.sampler is plan_after.sampler
  assert plan_after.sampler._draw_key == keys[1] != keys[0]
  # The key of the draws is nowhere.
  for path in tmp_path.rglob('*'):
    content = path.read_bytes() if path.is_file() else b''
    for key in keys:
      assert key not in content
      assert key.hex().encode() not in content
  if level == 'client':
    assert {part.held_out for part in done.measurements} == {3}
    assert {len(event['client'].groups) for event in done.events} == {2}
  restored = train(*start(), resume=True)
  assert restored.events == done.events


def test_another_sampling_seed_is_refused_as_are_secret_draws(whole):
  directory, _ = whole('client')
  for seed in (3, None):
    plan = runs.plan('client', sampling_seed=seed)
    with pytest.raises(
      ValueError, match=f'sampling_seed: 2 in the checkpoint, {seed} here'
    ):
      loop.train(
        plan.engine(runs.model, runs.data()),
        plan,
        runs.evaluator().evaluate,
        directory,
        resume=True,
      )


def test_an_engine_of_another_sampler_is_refused(tmp_path):
  for seed in (3, None):
    with pytest.raises(ValueError, match=r'Make it by plan.engine'):
      runs.train('client', tmp_path, sampling_seed=seed)
  assert not list(tmp_path.iterdir())


# What is not resumed.


def test_other_settings_are_refused_by_name(whole, tmp_path):
  directory, _ = whole('joint')
  with pytest.raises(ValueError, match=r"level: 'joint' in .*, 'split' here"):
    runs.train('split', directory, resume=True)
  with pytest.raises(
    ValueError, match=r'mechanism_noise_multiplier: 1\.5 in .*, 2\.0 here'
  ):
    runs.train('joint', directory, resume=True, noise_multiplier=2.0)
  with pytest.raises(ValueError, match=r'seed: 2 in the checkpoint, 3 here'):
    runs.train('joint', directory, resume=True, seed=3)
  # What a script calls its settings is compared in place of the plan's.
  runs.train('client', tmp_path, rounds=1, settings={'name': 'one'})
  with pytest.raises(ValueError, match=r"name: 'one' in .*, 'other' here"):
    runs.train('client', tmp_path, resume=True, settings={'name': 'other'})


def test_a_checkpoint_of_another_release_is_refused(whole, tmp_path):
  directory, _ = whole('client')
  arrays, contents = checkpoint.load(directory / progress.CHECKPOINT_FILE)
  for version in ({'version': 2}, {'version': 1}, {}):
    old = {**contents, **version}
    if not version:
      del old['version']
    checkpoint.save(tmp_path / progress.CHECKPOINT_FILE, arrays, old)
    with pytest.raises(ValueError, match='another release of tf_bdp'):
      runs.train('client', tmp_path, resume=True)


def test_a_damaged_checkpoint_is_refused(whole, tmp_path):
  directory, _ = whole('client')
  whole_file = (directory / progress.CHECKPOINT_FILE).read_bytes()
  (tmp_path / progress.CHECKPOINT_FILE).write_bytes(whole_file[:1000])
  with pytest.raises(ValueError, match='is not a checkpoint'):
    runs.train('client', tmp_path, resume=True)


@pytest.mark.parametrize('level', ['client', 'joint', 'instance_parallel'])
def test_with_panels_a_run_can_be_extended(whole, level, tmp_path):
  runs.train(level, tmp_path, rounds=4)
  longer = runs.train(level, tmp_path, resume=True)
  _, wanted = whole(level)
  runs.check_same(longer, wanted)


@pytest.mark.parametrize('level', ['instance_sequential', 'split'])
def test_where_hoelder_had_to_know_the_rounds_they_cannot_be_changed(
  level, tmp_path
):
  runs.train(level, tmp_path, rounds=4)
  with pytest.raises(
    ValueError, match=r'planned for 4 rounds.*With a panel it'
  ):
    runs.train(level, tmp_path, resume=True)


# Reported costs.


class _Reporter(engines.Engine):
  """Reports made-up costs, of which the last round has none."""

  client_count = runs.CLIENTS

  def __init__(self, plan):
    self.mechanism = plan.mechanism
    self._reporting = plan.reporting()

  def initial_state(self):
    return np.float64(1.0)

  def release(self, state, round_number, participants, panel):
    assert not panel
    count = len(participants) if round_number < runs.ROUNDS - 1 else 0
    generator = np.random.default_rng(round_number)
    reported = {
      unit: measurements_lib.ReportedCosts(
        generator.random(len(reporting.orders)) * 0.01 * bool(count),
        reporting.failure_probability,
      )
      for unit, reporting in self._reporting.items()
    }
    nothing = np.zeros(0), np.zeros(0, bool)
    return state + round_number, measurements_lib.Measurements(
      count, 0, 1.0, *nothing, reported=reported
    )

  def model_weights(self, state):
    return [v.numpy() for v in runs.model().trainable_variables]

  def to_arrays(self, state):
    return {'state': np.asarray(state)}

  def from_arrays(self, arrays):
    return arrays['state'][()]


@pytest.mark.parametrize('level', ['instance_sequential', 'joint', 'split'])
def test_reported_costs_survive_a_checkpoint(level, tmp_path):
  changes = {'panel_size': 0, 'panel_examples': 0}
  plan = runs.plan(level, **changes)
  runner = _Reporter(plan)
  wanted = runs.train(level, tmp_path / 'whole', runner=runner, **changes)
  with runs.interrupted(runner, 3), pytest.raises(KeyboardInterrupt):
    runs.train(level, tmp_path / 'cut', runner=runner, **changes)
  resumed = runs.train(
    level, tmp_path / 'cut', runner=runner, resume=True, **changes
  )
  runs.check_same(resumed, wanted)
  assert resumed.state == 1.0 + sum(range(runs.ROUNDS))
  for unit, accountant in plan.accountants().items():
    rounds = resumed.events_of(unit)
    for event in rounds:
      accountant.compose(event)
    assert accountant.state_dict() == wanted.accountants[unit].state_dict()
    # An empty round costs nothing, unless how many came is secret.
    empty = (dp_accounting.NoOpDpEvent, events.MixedGaussianEvent)
    assert isinstance(rounds[-1], empty)
    first = rounds[0].event if unit == 'example' else rounds[0]
    assert isinstance(first, events.ReportedCostEvent)
