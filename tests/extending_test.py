"""What is added by one file and its registration, as docs/architecture.md says.

The recipes of the docs are written to files, imported and trained with.
"""

import importlib
import pathlib
import re
import sys

import numpy as np
import pytest

from tests.training import runs
from tf_bdp.accounting import events, mean_bounds
from tf_bdp.engines import base as engines
from tf_bdp.mechanisms import base as mechanisms

_DOCS = pathlib.Path(__file__).parents[1] / 'docs' / 'architecture.md'
_REGISTRIES = (mechanisms.LEVELS, mean_bounds.ESTIMATORS, engines.ENGINES)


@pytest.fixture(name='add')
def _add(tmp_path, monkeypatch):
  """Imports a recipe as a module; what it registers is taken out afterwards."""
  monkeypatch.syspath_prepend(tmp_path)
  before = [dict(registry) for registry in _REGISTRIES]

  def add(heading):
    section = _DOCS.read_text().split(f'### … {heading}\n')[1]
    (code, *_) = re.findall(r'```python\n(.*?)```', section, re.S)
    name = 'added_' + heading.partition(',')[0].replace(' ', '_')
    sys.modules.pop(name, None)
    (tmp_path / f'{name}.py').write_text(code)
    importlib.invalidate_caches()
    return importlib.import_module(name)

  yield add
  for registry, entries in zip(_REGISTRIES, before):
    registry.clear()
    registry.update(entries)


def test_a_mechanism_is_added_by_registration(add, tmp_path):
  with pytest.raises(ValueError, match='level must be one of'):
    runs.plan('shrinking_clip')
  add('a mechanism, or a level')
  runner = runs.plan('shrinking_clip').engine(runs.model, runs.data())
  wanted = runs.train('shrinking_clip', tmp_path / 'whole', runner=runner)
  # Its state goes from round to round, and into checkpoints.
  clip_norms = [part.clip_norm for part in wanted.measurements]
  np.testing.assert_allclose(clip_norms, 0.99 ** np.arange(6), rtol=1e-5)
  path = tmp_path / 'cut'
  with runs.interrupted(runner, 3), pytest.raises(KeyboardInterrupt):
    runs.train('shrinking_clip', path, runner=runner)
  runs.check_same(
    runs.train('shrinking_clip', path, runner=runner, resume=True), wanted
  )
  assert (
    wanted.rows[1]['sample_epsilon']
    < wanted.rows[-1]['sample_epsilon']
    < np.inf
  )


def test_tff_runs_an_added_mechanism(add):
  add('a mechanism, or a level')
  names = ('inprocess', 'tff')
  runners = [
    runs.plan('shrinking_clip', engine=name).engine(runs.model, runs.data())
    for name in names
  ]
  assert [type(runner).__name__ for runner in runners] == [
    *('InProcessEngine', 'TffEngine'),
  ]
  states = [runner.initial_state() for runner in runners]
  for number in range(2):
    rounds = [
      runner.run_round(state, number, [0, 2, 3, 5], [1, 2, 4])
      for runner, state in zip(runners, states)
    ]
    states = [part.state for part in rounds]
    one, other = (part.measurements for part in rounds)
    assert one.clip_norm == pytest.approx(0.99**number, rel=1e-5)
    assert other.clip_norm == pytest.approx(one.clip_norm, rel=1e-6)
    np.testing.assert_allclose(
      one.squared_measures, other.squared_measures, rtol=1e-4, atol=1e-6
    )
  for one, other in zip(
    *(r.model_weights(s) for r, s in zip(runners, states)), strict=True
  ):
    np.testing.assert_allclose(one, other, atol=3e-6)


def test_an_estimator_is_added_by_registration(add, tmp_path):
  with pytest.raises(ValueError, match='estimator must be one of'):
    runs.plan('client', estimator='hoeffding')
  added = add('an estimator')
  plan = runs.plan('client', estimator='hoeffding', rounds=2)
  runner = plan.engine(runs.model, runs.data())
  done = runs.train(
    'client', tmp_path, runner=runner, estimator='hoeffding', rounds=2
  )
  settings = done.accountants['client'].settings
  assert settings['estimator'] == 'hoeffding'
  last = done.rows[-1]
  # At most the worst case, which here leaves a tenth of δ to the bound.
  assert 0 < last['sample_epsilon'] <= 1.02 * last['dp_epsilon'] < np.inf
  # Of many units it is Hoeffding's bound of the mean of y, by hand.
  log_values = np.linspace(0.1, 1.0, 1000)[:, np.newaxis]
  bound = added.Hoeffding.from_sample(log_values, np.array([1.0]))
  margin = (np.e - 1) * np.sqrt(np.log(1e3) / 2000)
  by_hand = np.log(np.mean(np.exp(log_values)) + margin)
  np.testing.assert_allclose(bound.log_upper_bound(1e-3), [by_hand], rtol=1e-9)
  event = events.BayesianGaussianEvent(np.full(1000, 0.1), 0.5, 1.0, panel=True)
  assert plan.accountant('client').compose(event).get_epsilon(1e-3) > 0


def test_an_engine_is_added_by_registration(add, tmp_path, capsys):
  with pytest.raises(ValueError, match='engine must be one of'):
    runs.plan('client', engine='timed')
  added = add('an engine')
  runner = runs.plan('client', engine='timed').engine(runs.model, runs.data())
  assert isinstance(runner, added.TimedEngine)
  found = runs.train('client', tmp_path, runner=runner, engine='timed')
  assert found.round_number == runs.ROUNDS
  said = re.findall(
    r'^Round (\d+): \d+\.\d\d s$', capsys.readouterr().out, re.M
  )
  assert said == [str(number + 1) for number in range(runs.ROUNDS)]
  # Engines may also be named, and are imported when they are made.
  engines.ENGINES['named'] = f'{added.__name__}:TimedEngine'
  named = runs.plan('client', engine='named').engine(runs.model, runs.data())
  assert type(named) is added.TimedEngine
