"""What every engine does at every level, over the table of `cases`."""

import dataclasses
import io

import dp_accounting
import numpy as np
import pytest

from tests.engines import by_hand, cases
from tf_bdp.accounting import accountant as accountant_lib
from tf_bdp.accounting import events
from tf_bdp.engines import in_process
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.mechanisms import measurements as measurements_lib

_ALL = cases.cases_of()
_OTHERS = [(name, case) for name, case in _ALL if name != 'inprocess']
# Secure engines measure nothing but costs; see `secure_test`.
_MEASURING = cases.cases_of(engines=('inprocess', 'tff'))
_SMALL = [(name, case) for name, case in _MEASURING if case in cases.CASES]


def _check_same_weights(runners, rounds, atol=3e-6):
  for one, other in zip(*rounds, strict=True):
    np.testing.assert_allclose(
      cases.flat(runners[0], one.state),
      cases.flat(runners[1], other.state),
      rtol=1e-4,
      atol=atol,
    )


def _epsilons(case, mechanism, rounds, panel):
  """ε of BDP and of DP, of every unit."""
  result = {}
  for unit, accountant in cases.accountants(case, mechanism, panel).items():
    for part in rounds:
      accountant.compose(part.events[unit])
    result[unit] = (
      accountant.get_epsilon(1e-3),
      accountant.get_worst_case_epsilon(1e-3),
    )
  return result


# Engines with each other.


@pytest.mark.parametrize(('name', 'case'), _OTHERS)
def test_engines_train_the_same_model(name, case):
  names = ('inprocess', name)
  runners = [cases.engine(n, case) for n in names]
  rounds = [cases.rounds(n, case) for n in names]
  # Secure sums round coordinates to 2^-31 of their bound.
  _check_same_weights(runners, rounds, 1e-5 if name == 'secure' else 3e-6)
  first = cases.flat(runners[0], runners[0].initial_state())
  last = cases.flat(runners[0], rounds[0][-1].state)
  assert np.max(np.abs(last - first)) > 0.05


@pytest.mark.parametrize(
  ('name', 'case'), [part for part in _OTHERS if part in _MEASURING]
)
def test_engines_measure_the_same(name, case):
  runs = [cases.rounds]
  if not cases.CASES[case].panel_examples:
    runs.append(cases.rounds_without_panel)
  for run in runs:
    for one, other in zip(run('inprocess', case), run(name, case), strict=True):
      cases.check_same_measurements(one.measurements, other.measurements)


@pytest.mark.parametrize(
  ('name', 'case'), [part for part in _OTHERS if part in _MEASURING]
)
def test_epsilons_are_the_same(name, case):
  mechanism, panel = cases.engine(name, case).mechanism, cases.SMALL.panel
  one, other = (
    _epsilons(case, mechanism, cases.rounds(n, case), panel)
    for n in ('inprocess', name)
  )
  for unit in mechanism.units:
    assert one[unit] == pytest.approx(other[unit], rel=1e-4)
    if mechanism.noise_multiplier:
      assert 0 < one[unit][0] <= one[unit][1] < np.inf
    else:
      assert one[unit] == (np.inf, np.inf)


@pytest.mark.parametrize('case', ['mean', 'sum_steps', 'sequential', 'split'])
def test_epsilons_of_participants_alone_are_the_same(case):
  mechanism = cases.engine('inprocess', case).mechanism
  one, other = (
    _epsilons(case, mechanism, cases.rounds_without_panel(n, case), ())
    for n in ('inprocess', 'tff')
  )
  for unit in mechanism.units:
    assert one[unit] == pytest.approx(other[unit], rel=1e-4)
    assert 0 < one[unit][0] <= one[unit][1] < np.inf


@pytest.mark.parametrize('case', ['mean', 'sum_steps'])
@pytest.mark.parametrize('name', ['inprocess', 'tff'])
def test_held_out_clients_are_measured_like_members_who_are_absent(name, case):
  runner, cohort = cases.engine(name, case), (0, 1, 2)
  state = runner.initial_state()
  trained, held_out = (1, 4, 2), (3, 5, 6)
  halves = runner.run_round(state, 0, cohort, trained, held_out)
  whole = runner.run_round(state, 0, cohort, [*trained, *held_out])
  measured = halves.measurements
  assert measured.held_out == 3
  assert measured.taking_part.tolist() == [True, False, True, *[False] * 3]
  cases.check_same_measurements(
    measured._replace(held_out=0), whole.measurements
  )
  event, other = halves.events['client'], whole.events['client']
  assert isinstance(event, events.ParallelEvent)
  distances = [group.squared_distances for group in event.groups]
  assert [part.size for part in distances] == [3, 3]
  assert np.all(distances[1] > 0)
  np.testing.assert_allclose(
    np.concatenate(distances), other.squared_distances, rtol=1e-5
  )
  for group in event.groups:
    assert group.panel
    assert group.worst_case_squared_distance == pytest.approx(
      other.worst_case_squared_distance
    )


@pytest.mark.parametrize(('name', 'case'), _ALL)
def test_events_are_those_of_what_was_measured(name, case):
  mechanism = cases.engine(name, case).mechanism
  for part in cases.rounds(name, case):
    assert tuple(part.events) == mechanism.units
    assert part.events == mechanism.events(part.measurements)


# Engines against rounds by hand. Several, one, nobody, one failing.


@pytest.mark.parametrize('number', range(4))
@pytest.mark.parametrize(('name', 'case'), _ALL)
def test_a_round_releases_what_its_definition_says(name, case, number):
  wanted = by_hand.round_of(case, number)
  np.testing.assert_allclose(
    cases.released(name, case, number), wanted.released, atol=2e-5
  )
  following = cases.rounds(name, case)[number + 1 : number + 2]
  for part in following:
    assert part.measurements.clip_norm == pytest.approx(
      wanted.next_clip_norm, rel=1e-5
    )


@pytest.mark.parametrize(
  'case',
  # With the others single gradients are clipped, not updates.
  [c for c, p in cases.CASES.items() if p.options.get('clipping') != 'example'],
)
def test_some_updates_are_clipped_and_some_are_not(case):
  clients = by_hand.round_of(case, 0).clients.values()
  norms = [np.linalg.norm(part.quiet) for part in clients if part.usable]
  below = np.array(norms) < cases.SMALL.clip_norm * (1 - 1e-9)
  assert 0 < np.sum(below) < below.size


@pytest.mark.parametrize('number', range(4))
@pytest.mark.parametrize(('name', 'case'), _SMALL)
def test_distances_of_clients_are_those_of_rounds_with_and_without(
  name, case, number
):
  runner, part = cases.engine(name, case), cases.rounds(name, case)[number]
  if 'client' not in runner.mechanism.units:
    assert 'client' not in part.events
    return
  measured, wanted = part.measurements, by_hand.round_of(case, number)
  assert measured.panel
  if isinstance(part.events['client'], events.BayesianGaussianEvent):
    found = part.events['client'].squared_distances
    np.testing.assert_allclose(
      np.sqrt(found), np.sqrt(wanted.squared_distances), rtol=1e-3, atol=1e-4
    )
  else:
    assert case == 'mean_quiet' or measured.participants == 0
  # The quiet round measures as if there were noise, of a deviation of one.
  if case == 'mean_quiet':
    loud = dataclasses.replace(
      runner.mechanism,
      noise_multiplier=cases.CLIENTS_PER_ROUND / cases.SMALL.clip_norm,
    )
    found = loud.squared_distances(
      measured.squared_measures,
      measured.taking_part,
      measured.participants,
      measured.clip_norm,
    )
    np.testing.assert_allclose(
      np.sqrt(found), np.sqrt(wanted.squared_distances), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize(
  'case',
  [
    case
    for name, case in cases.cases_of('mean', 'sum', 'joint', 'split')
    if name == 'inprocess' and not cases.ALL_CASES[case].panel_examples
    if case in cases.CASES
  ],
)
def test_participants_are_measured_with_a_panel_as_without(case):
  panel = cases.rounds('inprocess', case)[0].measurements
  alone = cases.rounds_without_panel('inprocess', case)[0].measurements
  assert panel.panel and not alone.panel
  assert np.all(alone.taking_part)
  cohort = cases.SMALL.cohorts[0]
  for member, squared in zip(cases.SMALL.panel, panel.squared_measures):
    if member in cohort:
      own = alone.squared_measures[cohort.index(member)]
      assert own == pytest.approx(squared, rel=1e-4)


@pytest.mark.parametrize('number', range(4))
@pytest.mark.parametrize(
  ('name', 'case'),
  [(n, c) for n, c in _SMALL if cases.CASES[c].by_clients],
)
def test_moves_of_examples_are_those_of_batches_with_and_without(
  name, case, number
):
  mechanism = cases.engine(name, case).mechanism
  groups = cases.rounds(name, case)[number].measurements.examples
  wanted = by_hand.round_of(case, number).clients
  cohort = cases.SMALL.cohorts[number]
  seen = []
  for client, step, moves in zip(
    groups.clients.tolist(), groups.steps.tolist(), groups.moves()
  ):
    if step:
      continue
    seen.append(client)
    if client not in cohort and not mechanism.averages_noise:
      # A panel's client of which nothing was released.
      np.testing.assert_array_equal(moves, 0.0)
    elif client == cases.OVERFLOWING:
      np.testing.assert_allclose(moves, mechanism.worst_case_move**2, rtol=1e-5)
    else:
      np.testing.assert_allclose(
        np.sqrt(moves),
        np.sqrt(wanted[client].squared_moves),
        rtol=2e-3,
        atol=4e-3,
      )
  members = set(cohort)
  if mechanism.panel_examples:
    members = set(cases.SMALL.panel)
  elif mechanism.averages_noise:
    members |= set(cases.SMALL.panel)
  assert set(seen) == members and len(seen) == len(members)


# Clients that cannot be used, and rounds without anybody.


@pytest.mark.parametrize(('name', 'case'), _ALL)
def test_failing_clients_are_left_out_and_counted(name, case):
  measured = [part.measurements for part in cases.rounds(name, case)]
  counts = [(part.participants, part.failed_clients) for part in measured]
  if case in cases.SECURE_CASES:
    assert counts == [(7, 0), (0, 0), (6, 0), (4, 1)]
    return
  extreme = counts.pop(4)
  # A gradient of zero from huge features is not a number, or it is. A client
  # without examples has no update, unless it sends noise.
  if cases.CASES[case].by_clients:
    assert extreme in [(4, 0), (3, 1)]
  else:
    assert extreme == (2, 2)
  assert counts == [(5, 0), (1, 0), (0, 0), (2, 1), (0, 1), (1, 1)]


@pytest.mark.parametrize(('name', 'case'), _ALL)
def test_whatever_clients_hold_weights_and_measures_stay_finite(name, case):
  runner = cases.engine(name, case)
  mechanism, task = runner.mechanism, cases.ALL_CASES[case].task
  for cohort, part in zip(task.cohorts, cases.rounds(name, case)):
    assert np.all(np.isfinite(cases.flat(runner, part.state)))
    measured = part.measurements
    assert np.all(np.isfinite(measured.squared_measures))
    if measured.panel:
      # One whose update cannot be computed moves nothing.
      assert measured.squared_measures[-1] == 0
      expected = np.isin(task.panel, cohort) & (
        np.array(task.panel) != cases.OVERFLOWING
      )
      np.testing.assert_array_equal(measured.taking_part, expected)
    if measured.examples is None:
      continue
    worst = mechanism.worst_case_move**2
    assert cases.EMPTY not in measured.examples.clients
    moves = measured.examples.squared_moves
    assert np.all((moves >= 0) & (moves <= worst * (1 + 1e-5)))


@pytest.mark.parametrize(
  ('name', 'case'),
  [
    part
    for part in _SMALL
    if part[1] in ('mean_quiet', 'sequential', 'aggregate')
  ],
)
def test_rounds_without_usable_clients_leave_the_model_alone(name, case):
  runner = cases.engine(name, case)
  weights = [cases.flat(runner, r.state) for r in cases.rounds(name, case)]
  np.testing.assert_array_equal(weights[1], weights[2])
  np.testing.assert_array_equal(weights[4], weights[5])
  assert not np.array_equal(weights[0], weights[1])


@pytest.mark.parametrize(
  ('name', 'case'), cases.cases_of('mean', engines=('inprocess', 'tff'))[:2]
)
def test_a_client_without_examples_changes_nothing(name, case):
  runner = cases.engine(name, case)
  (part,) = cases.run(runner, [(2, cases.EMPTY, 3)], [cases.EMPTY, 2])
  (without,) = cases.run(runner, [(2, 3)])
  measured = part.measurements
  assert (measured.participants, measured.failed_clients) == (2, 1)
  np.testing.assert_allclose(
    cases.flat(runner, part.state), cases.flat(runner, without.state), atol=1e-6
  )
  assert measured.squared_measures[0] == 0
  assert measured.taking_part.tolist() == [False, True]


# States.


def _through_a_file(arrays):
  buffer = io.BytesIO()
  np.savez(buffer, **arrays)
  buffer.seek(0)
  with np.load(buffer, allow_pickle=False) as loaded:
    return {name: loaded[name] for name in loaded.files}


# TFF's rounds are slow, so not all of those that have the same kind of state.
_RESTORED = [
  (name, case)
  for name, case in _ALL
  if name == 'inprocess'
  or case in ('mean', 'sum_steps', 'aggregate', 'joint_panel', 'split_steps')
  or case in ('secure_mean_steps', 'secure_joint')
]


@pytest.mark.parametrize(('name', 'case'), _RESTORED)
def test_a_restored_state_goes_on_bit_for_bit(name, case):
  runner, rounds = cases.engine(name, case), cases.rounds(name, case)
  task = cases.ALL_CASES[case].task
  arrays = runner.to_arrays(rounds[2].state)
  restored = runner.from_arrays(_through_a_file(arrays))
  (found,) = cases.run(runner, task.cohorts[3:4], task.panel, restored, 3)
  wanted, again = (runner.to_arrays(r.state) for r in (rounds[3], found))
  assert wanted.keys() == again.keys() == arrays.keys()
  for key, array in wanted.items():
    np.testing.assert_array_equal(again[key], array)
  one, other = (
    measurements_lib.to_arrays([r.measurements]) for r in (rounds[3], found)
  )
  assert one.keys() == other.keys()
  for key in one:
    # TFF does not keep the order of participants.
    np.testing.assert_array_equal(np.sort(other[key]), np.sort(one[key]))
  # The state that went on once was not changed by it.
  for key, array in runner.to_arrays(rounds[2].state).items():
    np.testing.assert_array_equal(array, arrays[key])


@pytest.mark.parametrize(('name', 'case'), _ALL)
def test_the_initial_state_has_the_models_initial_weights(name, case):
  runner = cases.engine(name, case)
  found = runner.model_weights(runner.initial_state())
  model = cases.ALL_CASES[case].task.model()
  for part, variable in zip(found, model.trainable_variables, strict=True):
    assert part.shape == variable.shape
    np.testing.assert_array_equal(part, variable)


@pytest.mark.parametrize(
  ('name', 'sentence'),
  [
    ('inprocess', 'it is of another model'),
    ('tff', 'not one of this TFF process'),
  ],
)
def test_a_state_of_another_model_is_refused(name, sentence):
  runner = cases.engine(name, 'mean_quiet')
  arrays = runner.to_arrays(runner.initial_state())
  arrays.pop(min(arrays))
  with pytest.raises(ValueError, match=sentence):
    runner.from_arrays(arrays)


def test_a_panel_of_examples_needs_a_panel_of_clients():
  for name in ('inprocess', 'tff'):
    runner = cases.engine(name, 'joint_panel')
    with pytest.raises(ValueError, match='panel_examples = 4 without any'):
      runner.run_round(runner.initial_state(), 0, [0, 1], [])


# What events say, against accountants fed by hand.


def _runner(level, data, **options):
  algorithm = algorithm_lib.Algorithm(learning_rate=0.5, momentum=0.0)
  mechanism = cases.mechanism_of(
    level, algorithm, data, noise_multiplier=0.4, **options
  )
  return in_process.InProcessEngine(
    cases.conv_model,
    data,
    mechanism=mechanism,
    algorithm=algorithm,
    sampler=cases.sampler_of(data),
    noise_seed=5,
  )


def _holder(total_rounds, estimator='student_t'):
  return accountant_lib.BayesianAccountant(
    'holder', estimator=estimator, total_rounds=total_rounds
  )


def test_sequential_with_one_client_is_central_training_by_hand():
  data = cases.images((40,), 2)
  runner = _runner('sequential', data, batch_size=10)
  by_engine, own = _holder(4), _holder(4)
  for part in cases.run(runner, [(0,)] * 4):
    by_engine.compose(part.events['example'])
    # Sampled with q = B / N, noise 0.4 C, and moves of at most 2 C.
    moves = part.measurements.examples.squared_moves.astype(np.float64)
    own.compose(
      events.BayesianGaussianEvent(moves / 0.4**2, 10 / 40, (2 / 0.4) ** 2)
    )
  assert by_engine.get_epsilon(1e-3) == own.get_epsilon(1e-3)
  orders = np.array(own.settings['orders'])
  central = dp_accounting.rdp.RdpAccountant((orders + 1.0).tolist()).compose(
    dp_accounting.PoissonSampledDpEvent(
      10 / 40, dp_accounting.GaussianDpEvent(0.4 / 2)
    ),
    4,
  )
  assert by_engine.get_worst_case_epsilon(1e-3) == pytest.approx(
    central.get_epsilon(1e-3), rel=1e-9
  )


def test_sequential_adds_up_the_clients_costs_with_q_of_all_examples():
  runner = _runner('sequential', cases.images((12, 8, 20), 2), batch_size=6)
  (part,) = cases.run(runner, [(0, 1, 2)])
  by_engine, own = _holder(3).compose(part.events['example']), _holder(3)
  for moves in part.measurements.examples.moves():
    assert moves.size >= 3
    own.compose(
      events.BayesianGaussianEvent(
        moves.astype(np.float64) / 0.4**2, 6 / 40, (2 / 0.4) ** 2
      )
    )
  assert by_engine.get_epsilon(1e-3) == own.get_epsilon(1e-3)


@pytest.mark.parametrize('level', ['parallel', 'aggregate'])
def test_parallel_is_the_largest_of_the_clients_own_accounts(level):
  sizes = (12, 8, 20)
  runner = _runner(level, cases.images(sizes, 2), batch_size=6)
  (part,) = cases.run(runner, [(0, 1, 2)], [0, 1])
  variance, inclusions = 0.4**2, (1.0, 1.0, 1.0)
  if level == 'aggregate':
    # The noise of all three, which are three of 4 / 0.4 clients. Of the last
    # nothing would be known if it had not come.
    variance, inclusions = 3 * 0.4**2, (0.3, 0.3, 1.0)
  whole = _holder(1, 'bernstein').compose(part.events['example'])
  own = [
    _holder(1, 'bernstein').compose(
      events.BayesianGaussianEvent(
        moves.astype(np.float64) / variance,
        6 / size,
        4 / variance,
        inclusion_probability=inclusion,
      )
    )
    for size, moves, inclusion in zip(
      sizes, part.measurements.examples.moves(), inclusions
    )
  ]
  # Of every order, with a tenth of δ for bounds that fail.
  costs = np.array([accountant._costs(1e-4) for accountant in own])
  np.testing.assert_allclose(
    whole._costs(1e-4), np.max(costs, axis=0), rtol=1e-12
  )
  # No client's own ε is more.
  assert whole.get_epsilon(1e-3) >= max(a.get_epsilon(1e-3) for a in own)
  assert np.all(np.ptp(costs, axis=0) > 0)
