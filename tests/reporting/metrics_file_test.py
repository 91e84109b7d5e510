import numpy as np
import pytest

from tests.reporting import samples
from tf_bdp.reporting import metrics_file


def test_blanks_are_none_in_rows_and_nan_in_series(tmp_path):
  rows = metrics_file.read(samples.write(tmp_path, samples.fields(3)))
  assert [row['accuracy'] for row in rows] == [None, None, 0.53]
  np.testing.assert_array_equal(
    metrics_file.series(rows, 'accuracy'), [np.nan, np.nan, 0.53]
  )
  assert metrics_file.evaluated(rows) == rows[-1:]


def test_a_figure_is_text_in_the_format_of_its_column(tmp_path):
  *_, third, row = metrics_file.read(samples.write(tmp_path, samples.fields(4)))
  assert metrics_file.text(row, 'round') == '4'
  assert metrics_file.text(third, 'dp_epsilon') == '1.212'  # 0.7 · √3.
  assert metrics_file.text(row, 'accuracy') == '–'
  assert metrics_file.text(row, 'dp_epsilon') == '–'


def test_columns_of_epsilon_are_those_that_the_file_has(tmp_path):
  path = tmp_path / 'metrics.csv'
  path.write_text('round,dp_epsilon,example_sample_epsilon,other\n1,2,3,4\n')
  (row,) = metrics_file.read(path)
  assert metrics_file.epsilon_columns(row) == [
    *('dp_epsilon', 'example_sample_epsilon'),
  ]
  assert 'other' not in row
  assert metrics_file.column('dp_epsilon').heading == 'Epsilon, dp'
  heading = metrics_file.column('example_sample_epsilon').heading
  assert heading == 'Epsilon, example, sample'


def test_columns_that_the_file_has_not_are_blank(tmp_path):
  path = tmp_path / 'metrics.csv'
  path.write_text('round,accuracy\n1,0.5\n')
  (row,) = metrics_file.read(path)
  assert (row['round'], row['accuracy'], row['loss']) == (1.0, 0.5, None)


def test_text_among_the_metrics_is_an_error_that_names_its_place(tmp_path):
  rows = samples.fields(3)
  rows[1][5] = 'low'
  with pytest.raises(ValueError, match=r"loss in line 3 .* Found 'low'"):
    metrics_file.read(samples.write(tmp_path, rows))


@pytest.mark.parametrize(
  'rounds, shown',
  [
    (0, []),
    (1, [1]),
    (20, list(range(1, 21))),
    (21, [*range(2, 21, 2), 21]),
    (100, list(range(5, 101, 5))),
    (103, [*range(10, 101, 10), 103]),
    (1000, list(range(50, 1001, 50))),
  ],
)
def test_spaced_rows_are_few_and_reach_to_the_last(rounds, shown):
  rows = [{'round': float(index)} for index in range(1, rounds + 1)]
  assert [row['round'] for row in metrics_file.spaced(rows, 20)] == shown
