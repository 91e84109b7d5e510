"""Tests of the files of recorded distances."""

import json
import os
import pathlib

import numpy as np
import pytest

from tf_bdp.accounting import recorded_distances

_DISTANCES = np.random.default_rng(0).random((4, 5))


@pytest.mark.parametrize('panel', [True, False])
def test_what_is_saved_is_loaded(tmp_path, panel):
  path = tmp_path / 'distances.npz'
  recorded_distances.save(path, _DISTANCES, panel)
  loaded = recorded_distances.load(path)
  np.testing.assert_array_equal(loaded.distances, _DISTANCES)
  assert loaded.panel is panel
  assert os.listdir(tmp_path) == ['distances.npz']


def test_saving_replaces_what_was_there(tmp_path):
  path = str(tmp_path / 'distances.npz')
  recorded_distances.save(path, _DISTANCES, True)
  recorded_distances.save(path, 2 * _DISTANCES, False)
  np.testing.assert_array_equal(
    recorded_distances.load(path).distances, 2 * _DISTANCES
  )


def test_integers_and_single_precision_become_float64(tmp_path):
  for dtype in (np.int32, np.float32):
    path = tmp_path / 'distances.npz'
    np.savez(path, distances=np.ones((2, 3), dtype))
    loaded = recorded_distances.load(path)
    assert loaded.distances.dtype == np.float64
    assert loaded.panel is False


def _write(tmp_path, text, name='distances.csv'):
  path = tmp_path / name
  path.write_text(text)
  return path


def test_a_csv_file_has_a_row_a_round(tmp_path):
  path = _write(tmp_path, '# recorded\n0.1,0.2,1e-3\n\n 0.3 ,0,1\n')
  loaded = recorded_distances.load(path)
  np.testing.assert_array_equal(
    loaded.distances, [[0.1, 0.2, 1e-3], [0.3, 0.0, 1.0]]
  )
  assert loaded.panel is False


def test_ragged_rows_are_refused_with_their_line(tmp_path):
  path = _write(tmp_path, '0.1,0.2,0.3\n# comment\n0.1,0.2\n')
  with pytest.raises(
    ValueError, match=r'Line 3 of .* has 2 distances, the first row 3'
  ):
    recorded_distances.load(path)


@pytest.mark.parametrize('field', ['near', '', '0.1;0.2', '1,'])
def test_text_in_a_csv_file_is_refused_with_its_line(tmp_path, field):
  path = _write(tmp_path, f'0.1,0.2,0.3\n0.1,0.2,{field}\n')
  with pytest.raises(ValueError, match=r'Line 2 of .*could not convert'):
    recorded_distances.load(path)


@pytest.mark.parametrize('text', ['', '\n\n', '# nothing\n'])
def test_an_empty_csv_file_is_refused(tmp_path, text):
  with pytest.raises(ValueError, match='holds no distances'):
    recorded_distances.load(_write(tmp_path, text))


def test_an_npz_file_without_rounds_is_refused(tmp_path):
  # As an empty .csv file is: no rounds would be accounted for as ε = 0.
  path = tmp_path / 'distances.npz'
  np.savez(path, distances=np.zeros((0, 5)))
  with pytest.raises(ValueError, match='distances'):
    recorded_distances.load(path)


@pytest.mark.parametrize('name', ['distances.npz', 'distances.csv'])
def test_a_missing_file_is_named(tmp_path, name):
  with pytest.raises(FileNotFoundError, match=f'no file .* {tmp_path}/{name}'):
    recorded_distances.load(tmp_path / name)


def test_other_files_are_refused(tmp_path):
  path = _write(tmp_path, '0.1', 'distances.txt')
  with pytest.raises(ValueError, match=r'ends in .npz, .json or .csv. F'):
    recorded_distances.load(path)
  with pytest.raises(ValueError, match=r'ends in .npz. Found'):
    recorded_distances.save(path, _DISTANCES, True)


def test_an_npz_file_of_other_arrays_is_refused(tmp_path):
  path = tmp_path / 'distances.npz'
  np.savez(path, norms=_DISTANCES)
  with pytest.raises(
    ValueError, match=r"must hold an array 'distances' .* Found \['norms'\]"
  ):
    recorded_distances.load(path)


@pytest.mark.parametrize(
  'distances',
  [
    np.ones(3),
    np.ones((2, 3, 4)),
    np.array([['a', 'b']]),
    np.ones((2, 2), bool),
    np.ones((2, 2), complex),
  ],
)
def test_arrays_of_another_shape_or_kind_are_refused(tmp_path, distances):
  path = tmp_path / 'distances.npz'
  np.savez(path, distances=distances)
  with pytest.raises(ValueError, match=r'must be numbers of shape'):
    recorded_distances.load(path)


class _Trap:
  """Unpickling it creates the file whose path it holds."""

  def __init__(self, path):
    self._path = path

  def __reduce__(self):
    return (pathlib.Path.touch, (self._path,))


@pytest.mark.parametrize('key', ['distances', 'panel'])
def test_pickled_contents_are_refused_and_not_run(tmp_path, key):
  sprung = tmp_path / 'sprung'
  path = tmp_path / 'distances.npz'
  contents = {'distances': _DISTANCES, 'panel': True}
  contents[key] = np.array([[_Trap(sprung)]], dtype=object)
  np.savez(path, allow_pickle=True, **contents)
  with pytest.raises(ValueError, match='allow_pickle=False'):
    recorded_distances.load(path)
  assert not sprung.exists()


@pytest.mark.parametrize('contents', ['text', 'truncated', 'npy', 'empty'])
def test_a_file_that_only_is_called_npz_is_refused(tmp_path, contents):
  path = tmp_path / 'distances.npz'
  if contents == 'text':
    path.write_text('0.1,0.2\n')
  elif contents == 'empty':
    path.write_bytes(b'')
  elif contents == 'npy':
    with open(path, 'wb') as file:
      np.save(file, _DISTANCES)
  else:
    recorded_distances.save(path, _DISTANCES, True)
    path.write_bytes(path.read_bytes()[:-40])
  with pytest.raises(ValueError):
    recorded_distances.load(path)


# --- Rounds of different numbers of units.

_RAGGED = [np.array([0.1, 0.2, 0.3]), np.zeros(0), np.array([0.5])]


def test_rounds_of_any_length_are_loaded_as_they_were_saved(tmp_path):
  path = tmp_path / 'distances.npz'
  recorded_distances.save(path, _RAGGED, False, [1.0, 0.5, 1.0])
  loaded = recorded_distances.load(path)
  for found, wanted in zip(loaded.distances, _RAGGED):
    np.testing.assert_array_equal(found, wanted)
  assert len(loaded.distances) == 3
  np.testing.assert_array_equal(loaded.worst_case_distances, [1.0, 0.5, 1.0])


def test_what_is_said_of_the_worst_case_and_of_everybody_is_kept(tmp_path):
  path = tmp_path / 'distances.npz'
  mixture = [(0.25, 0.5), (0.75, 1.0)]
  recorded_distances.save(
    path, _DISTANCES, True, population=True, worst_case_mixture=mixture
  )
  loaded = recorded_distances.load(path)
  assert loaded.population is True
  np.testing.assert_array_equal(loaded.worst_case_mixture, mixture)
  np.savez(path, distances=_DISTANCES)
  loaded = recorded_distances.load(path)
  assert loaded.population is False
  assert loaded.worst_case_mixture is None


def test_a_json_file_holds_lists_of_any_length(tmp_path):
  contents = {
    'distances': [[0.1, 0.2, 1], [], [0.5]],
    'worst_case_distances': [1, 1, 2],
  }
  path = _write(tmp_path, json.dumps(contents), 'distances.json')
  loaded = recorded_distances.load(path)
  assert [row.tolist() for row in loaded.distances] == contents['distances']
  assert loaded.worst_case_distances.tolist() == [1, 1, 2]
  assert loaded.panel is False
  contents = {'distances': [[0.1, 0.2], [0.3, 0.4]], 'panel': True}
  path = _write(tmp_path, json.dumps(contents), 'distances.json')
  loaded = recorded_distances.load(path)
  np.testing.assert_array_equal(loaded.distances, contents['distances'])
  assert loaded.panel is True


@pytest.mark.parametrize(
  'text, sentence',
  [
    ('', 'is not a .json file'),
    ('[[0.1]]', 'it holds no object'),
    ('{"norms": [[0.1]]}', r"Found \['norms'\]"),
    ('{"distances": 0.1}', 'no list of lists'),
    ('{"distances": [0.1, 0.2]}', 'must be numbers of shape'),
    ('{"distances": [["a"]]}', 'must be numbers of shape'),
    ('{"distances": [[[0.1]]]}', 'must be numbers of shape'),
    ('{"distances": [[0.1, [0.2]]]}', 'is not a .json file'),
    ('{"distances": [[], []]}', 'holds no distances'),
    ('{"distances": []}', 'holds no distances'),
    ('{"distances": [[0.1]], "panel": "yes"}', 'must be true or false'),
    ('{"distances": [[0.1]], "worst_case_distances": [1, 2]}', 'a round'),
    ('{"distances": [[0.1]], "worst_case_mixture": [1]}', 'must be pairs'),
  ],
)
def test_a_json_file_that_is_not_one_of_distances_is_refused(
  tmp_path, text, sentence
):
  with pytest.raises(ValueError, match=sentence):
    recorded_distances.load(_write(tmp_path, text, 'distances.json'))


@pytest.mark.parametrize(
  'lengths', [[2, 2], [-1, 4], [1.5, 1.5], [[3]], [True, False]]
)
def test_lengths_that_are_not_those_of_the_rows_are_refused(tmp_path, lengths):
  path = tmp_path / 'distances.npz'
  np.savez(path, distances=np.ones(3), row_lengths=np.array(lengths))
  with pytest.raises(
    ValueError, match=r"'row_lengths' in .* must say how many"
  ):
    recorded_distances.load(path)


def test_a_file_whose_contents_are_damaged_is_refused(tmp_path):
  path = tmp_path / 'distances.npz'
  recorded_distances.save(path, np.random.default_rng(0).random((50, 50)), True)
  contents = bytearray(path.read_bytes())
  place = contents.index(b'distances.npy') + 400
  contents[place : place + 64] = bytes(64)
  path.write_bytes(contents)
  with pytest.raises(ValueError, match=r'is not an .npz file'):
    recorded_distances.load(path)
