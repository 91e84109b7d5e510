"""metrics.csv and TensorBoard: one row a round, each round once."""

import collections

import pytest
import tensorflow as tf

from tests.training import runs
from tf_bdp.training import round_log


def _steps(directory):
  """Returns the steps of every scalar that TensorBoard shows, with values."""
  found = collections.defaultdict(list)
  for path in sorted((directory / 'tensorboard').iterdir()):
    for event in tf.compat.v1.train.summary_iterator(str(path)):
      for value in event.summary.value:
        number = float(tf.make_ndarray(value.tensor))
        found[value.tag].append((event.step, number))
  return found


@pytest.mark.parametrize('level', ['client', 'joint'])
def test_the_file_says_what_the_run_says(whole, level):
  directory, done = whole(level)
  rows = runs.rows(directory)
  assert len(rows) == runs.ROUNDS
  for row, wanted in zip(rows, done.rows):
    assert row.keys() == wanted.keys() - {'seconds'}
    for name, value in row.items():
      assert value == '' if wanted[name] == '' else float(value) == wanted[name]


@pytest.mark.parametrize('level', ['client', 'joint'])
def test_columns_of_figures_have_the_names_of_claims(whole, level):
  directory, _ = whole(level)
  header = (directory / round_log.METRICS_FILE).read_text().splitlines()[0]
  names = ('dp', 'sample', 'paper')
  units = ('', 'example_') if level == 'joint' else ('',)
  epsilons = [f'{unit}{name}_epsilon' for unit in units for name in names]
  assert header.split(',') == [
    *('round', 'participants', 'failed_clients', 'clip_norm', 'accuracy'),
    *('loss', *epsilons, 'seconds'),
  ]


def test_tensorboard_shows_every_number_of_every_round(whole):
  directory, done = whole('joint')
  found = _steps(directory)
  for name in {*done.rows[0]} - {'round'}:
    wanted = [(r['round'], r[name]) for r in done.rows if r[name] != '']
    assert [step for step, _ in found[name]] == [step for step, _ in wanted]
    for (_, number), (_, value) in zip(found[name], wanted):
      assert number == pytest.approx(value, rel=1e-6)


def test_after_a_resume_each_step_is_shown_once(whole, tmp_path):
  runner = runs.engine('client')
  for rounds in (3, 2):
    with runs.interrupted(runner, rounds), pytest.raises(KeyboardInterrupt):
      runs.train('client', tmp_path, resume=True)
  runs.train('client', tmp_path, resume=True)
  found, wanted = _steps(tmp_path), _steps(whole('client')[0])
  assert found.keys() == wanted.keys()
  for name in {*wanted} - {'seconds'}:
    assert found[name] == wanted[name]


def test_rounds_that_the_checkpoint_does_not_have_are_taken_out(tmp_path):
  row = dict.fromkeys(
    ('participants', 'failed_clients', 'clip_norm', 'accuracy', 'loss'), 1.0
  )
  columns = ('dp_epsilon', 'census_epsilon')
  row |= {**dict.fromkeys(columns, 2.0), 'seconds': 0.1}
  with round_log.open_log(tmp_path, columns, []) as add:
    for number in (1, 2, 3):
      add({'round': number, **row})
  assert [r['round'] for r in runs.rows(tmp_path)] == ['1', '2', '3']
  # Only two of them were in the checkpoint.
  known = [{'round': number, **row} for number in (1, 2)]
  with round_log.open_log(tmp_path, columns, known):
    assert [r['round'] for r in runs.rows(tmp_path)] == ['1', '2']
  assert [step for step, _ in _steps(tmp_path)['accuracy']] == [1, 2]
