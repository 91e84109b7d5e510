"""What only TFF's engine does: what its clients cannot know, its worker."""

import pytest
import tensorflow_federated as tff

from tests.engines import cases
from tf_bdp.aggregators import runtime


def test_clients_are_not_sent_the_last_mean():
  with pytest.raises(ValueError, match='not sent the last mean'):
    cases.make_engine('tff', 'joint_last_mean')


def test_noisy_updates_cannot_be_measured_again_without_a_seed(monkeypatch):
  runner = cases.engine('tff', 'split')
  monkeypatch.setattr(runner._rounds, '_noise_seed', None)
  state = runner.initial_state()
  with pytest.raises(ValueError, match='cannot compute a second time'):
    runner.run_round(state, 0, [0], [1, 2])


def test_a_client_that_is_not_there_is_refused():
  runner = cases.engine('tff', 'split')
  with pytest.raises(ValueError, match='There are 12 clients'):
    runner.run_round(runner.initial_state(), 0, [99], [])


def test_all_secure_engines_share_one_worker():
  before = tff.framework.get_context_stack().current
  try:
    cases.engine('secure', 'secure_sequential')
    context = tff.framework.get_context_stack().current
    cases.engine('secure', 'secure_joint')
    assert tff.framework.get_context_stack().current is context
    assert context is runtime.simulation_context()
  finally:
    tff.framework.set_default_context(before)
