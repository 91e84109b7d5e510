"""How scripts end where they cannot go on."""

import gc
import signal
import sys
import time

import pytest

from experiments import startup


@pytest.fixture(name='arguments', autouse=True)
def _arguments(monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['script'])
  monkeypatch.setattr(sys, 'unraisablehook', sys.unraisablehook)
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


def test_an_interrupt_within_the_garbage_collector_is_not_lost(capsys):
  def callback(phase, info):
    gc.callbacks.remove(callback)
    signal.raise_signal(signal.SIGINT)

  def main():
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(10)
    raise AssertionError('It went on.')

  with pytest.raises(SystemExit) as end:
    startup.start(main, 'the same command')
  assert end.value.code == 130
  errors = capsys.readouterr().err
  assert errors == '\nInterrupted. To go on: the same command.\n'


@pytest.mark.parametrize('error', [ValueError, OSError, RuntimeError])
def test_an_error_is_told_in_one_sentence(error):
  def main():
    raise error('It is so.')

  with pytest.raises(SystemExit, match=r'^Error: It is so\.$'):
    startup.start(main, '')
