"""Tests of the bar for what takes long."""

import io
import sys

import pytest

from tf_bdp.accounting import progress


class _Terminal(io.StringIO):
  def isatty(self):
    return True


def _shown(monkeypatch, file, delay):
  monkeypatch.setattr(progress, '_DELAY_SECONDS', delay)
  monkeypatch.setattr(sys, 'stderr', file)
  with progress.bar('Accounting', 3, 'round') as bar:
    for _ in range(3):
      bar.update()
      bar.refresh()
  return file.getvalue()


def test_a_terminal_shows_what_takes_long(monkeypatch):
  assert 'Accounting' in _shown(monkeypatch, _Terminal(), 1e-9)


@pytest.mark.parametrize(
  'file, delay', [(io.StringIO(), 1e-9), (_Terminal(), 1000.0)]
)
def test_files_and_short_work_show_nothing(monkeypatch, file, delay):
  monkeypatch.setattr(progress, '_DELAY_SECONDS', delay)
  monkeypatch.setattr(sys, 'stderr', file)
  with progress.bar('Accounting', 3, 'round') as bar:
    for _ in range(3):
      bar.update()
  assert 'Accounting' not in file.getvalue()
