"""Runs that nothing interrupts, each done once."""

import functools

import pytest

from tests.training import runs


@pytest.fixture(name='whole', scope='package')
def _whole(tmp_path_factory):
  @functools.cache
  def run(level):
    directory = tmp_path_factory.mktemp(level)
    return directory, runs.train(level, directory)

  return run
