"""What only the in-process engine does: chunks, recomputing, devices."""

import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tests.engines import cases
from tf_bdp.engines import client_updates, in_process
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data


def check_same(runners, rounds):
  """Compares the rounds of two engines of one kind."""
  for one, other in zip(*rounds, strict=True):
    cases.check_same_measurements(one.measurements, other.measurements)
    np.testing.assert_allclose(
      cases.flat(runners[0], one.state),
      cases.flat(runners[1], other.state),
      rtol=1e-4,
      atol=2e-6,
    )


@pytest.mark.parametrize(
  ('examples', 'updates', 'kept'),
  [
    (2**27, 2 * 4 * 50, 2**27),
    (2**27, 2 * 4 * 50, 0),
    (8 * 64, 2**27, 2**27),
    (1, 1, 0),
  ],
  ids=['few_updates', 'recomputed', 'few_examples', 'one_by_one'],
)
@pytest.mark.parametrize(
  'case',
  [
    *('mean', 'mean_steps', 'sum', 'sum_steps'),
    *('joint_panel', 'split', 'parallel_panel'),
  ],
)
def test_chunks_do_not_change_the_round(
  monkeypatch, case, examples, updates, kept
):
  wanted = cases.rounds('inprocess', case)[:4]
  monkeypatch.setattr(client_updates, '_CHUNK_EXAMPLES', examples)
  monkeypatch.setattr(client_updates, '_CHUNK_UPDATES', updates)
  monkeypatch.setattr(in_process, '_MOST_KEPT_UPDATES', kept)
  runner, sizes = cases.engine('inprocess', case), []
  padded = federated_data.padded
  monkeypatch.setattr(
    federated_data,
    'padded',
    lambda rows: sizes.append(len(rows)) or padded(rows),
  )
  cohorts, panel = cases.SMALL.cohorts[:4], cases.SMALL.panel
  found = cases.run(runner, cohorts, panel)
  check_same([runner, runner], [wanted, found])
  # There really were chunks, and a second pass where updates were not kept.
  assert max(sizes) < 8
  mechanism = runner.mechanism
  if mechanism.local and not mechanism.local.measures_absent_clients:
    panel = ()
  clients = sum(len({*cohort, *panel}) for cohort in cohorts)
  passes = sum(sizes) / clients
  # Noisy updates cannot be computed a second time.
  if kept or case in ('sum', 'sum_steps') or mechanism.local:
    assert passes == 1
  else:
    assert passes > 1.5


def test_a_chunk_of_unequal_clients_stays_within_its_bytes(monkeypatch):
  # The first is small; those after it must not be padded beyond the limit.
  features = np.zeros((1000, 4, 4, 1), np.float32)
  features[:, 0] = 1.0
  clients = [np.arange(size) for size in (1, 1, 1, 100, 1, 100, 1, 100)]
  data = federated_data.FederatedData(features, np.zeros(1000, int), clients)
  limit = 200 * features[:1].nbytes
  monkeypatch.setattr(client_updates, '_CHUNK_EXAMPLES', limit)
  algorithm = algorithm_lib.Algorithm()
  runner = in_process.InProcessEngine(
    cases.conv_model,
    data,
    mechanism=cases.mechanism_of('mean', algorithm, data, noise_multiplier=0.0),
    algorithm=algorithm,
    sampler=cases.sampler_of(data),
  )
  taken = []
  padded = federated_data.padded

  def recorded(rows):
    indices, sizes = padded(rows)
    taken.append(indices.size * features[:1].nbytes)
    return indices, sizes

  monkeypatch.setattr(federated_data, 'padded', recorded)
  cases.run(runner, [range(8)])
  assert max(taken) <= limit


@pytest.mark.parametrize('case', ['mean', 'mean_steps', 'joint_panel'])
def test_a_new_engine_continues_where_another_stopped(case):
  first, second = cases.engine('inprocess', case), None
  rounds = cases.rounds('inprocess', case)
  second = cases.make_engine('inprocess', case)
  state = second.from_arrays(first.to_arrays(rounds[2].state))
  cohorts = cases.SMALL.cohorts[3:5]
  for wanted, found in zip(
    rounds[3:], cases.run(second, cohorts, cases.SMALL.panel, state, 3)
  ):
    np.testing.assert_array_equal(
      cases.flat(second, found.state), cases.flat(first, wanted.state)
    )


def test_secure_aggregation_is_refused():
  with pytest.raises(ValueError, match='secure sums of TFF: use its engine'):
    cases.make_engine('inprocess', 'mean_quiet', reporting={})


# Several devices.

_TWO_DEVICES = """
  import tensorflow as tf
  cpu = tf.config.list_physical_devices('CPU')[0]
  tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2
  )
  from tests.engines import cases
  from tests.engines.in_process_test import check_same
  from tf_bdp.engines import client_updates, in_process

  two = tf.distribute.MirroredStrategy(['/cpu:0', '/cpu:1'])
  assert two.num_replicas_in_sync == 2

  def check(case, *cohorts, panel=cases.SMALL.panel):
    runners = [
      cases.make_engine('inprocess', case, strategy=s) for s in (None, two)
    ]
    check_same(runners, [cases.run(r, cohorts, panel) for r in runners])

  # A single client leaves one device without any.
  usual = ((0, 1, 2, cases.OVERFLOWING, 5), (3,))
  for case in ('mean', 'sum', 'joint_panel', 'split'):
    check(case, *usual)
  check('mean', (), (3, 4), panel=[])
  check('split', (), (3, 4), panel=[])
  client_updates._CHUNK_UPDATES = 3 * 4 * 47
  in_process._MOST_KEPT_UPDATES = 0
  check('mean', *usual)
  try:
    cases.make_engine('inprocess', 'mean_steps', strategy=two)
  except ValueError as error:
    assert 'fed_avg runs on one device' in str(error), error
  else:
    raise AssertionError('fed_avg was not refused')
  print('ALL THE SAME')
"""


@pytest.mark.slow
def test_two_devices_do_the_same_rounds_as_one_and_refuse_fed_avg():
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(_TWO_DEVICES)],
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    timeout=240,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert 'ALL THE SAME' in done.stdout
