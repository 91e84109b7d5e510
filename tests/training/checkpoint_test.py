import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tf_bdp.training import checkpoint


def test_what_is_saved_is_loaded(tmp_path):
  path = tmp_path / 'c.npz'
  arrays = {'a': np.arange(6.0).reshape(2, 3), 'b': np.array(True)}
  contents = {'x': [0.1, 'ε', None], 'y': {'z': 1}}
  checkpoint.save(path, arrays, contents)
  loaded = checkpoint.load(path)
  assert loaded.contents == contents
  assert set(loaded.arrays) == {'a', 'b'}
  np.testing.assert_array_equal(loaded.arrays['a'], arrays['a'])


@pytest.mark.parametrize('size', [0, 10, 300])
def test_a_truncated_file_is_refused(tmp_path, size):
  path = tmp_path / 'c.npz'
  checkpoint.save(path, {'a': np.ones(100)}, {})
  path.write_bytes(path.read_bytes()[:size])
  with pytest.raises(ValueError, match='is not a checkpoint'):
    checkpoint.load(path)


def test_a_file_of_something_else_is_refused(tmp_path):
  np.savez(tmp_path / 'c.npz', a=np.ones(3))
  with pytest.raises(ValueError, match='is not a checkpoint'):
    checkpoint.load(tmp_path / 'c.npz')


def test_pickled_contents_are_not_run(tmp_path):
  np.savez(tmp_path / 'c.npz', a=np.array([object()], dtype=object))
  with pytest.raises(ValueError, match='is not a checkpoint'):
    checkpoint.load(tmp_path / 'c.npz')


def test_differing_settings_are_named():
  with pytest.raises(ValueError, match=r'rounds: 3 in .*, 4 here'):
    checkpoint.check_settings({'rounds': 3, 'a': 1}, {'rounds': 4, 'a': 1})
  checkpoint.check_settings({'a': [1, 2]}, {'a': (1, 2)})


def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path):
  path = tmp_path / 'c.npz'
  script = textwrap.dedent(
    f"""
    import pathlib
    import numpy as np
    from tf_bdp.training import checkpoint
    for number in range(10**6):
      array = np.full(200_000, number)
      checkpoint.save(pathlib.Path({str(path)!r}), {{'a': array}}, {{'n': number}})
      print(number, flush=True)
    """
  )
  seen = -1
  for saves in (1, 2, 5, 9):
    with subprocess.Popen(
      [sys.executable, '-c', script],
      stdout=subprocess.PIPE,
      env={**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3'},
    ) as process:
      for _ in range(saves):
        seen = int(process.stdout.readline())
      process.kill()
    loaded = checkpoint.load(path)
    number = loaded.contents['n']
    assert number >= seen
    assert np.all(loaded.arrays['a'] == number)
