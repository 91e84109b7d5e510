import base64
import subprocess
import sys

import numpy as np
import pytest

from tests.reporting import samples
from tf_bdp.accounting import claims
from tf_bdp.reporting import metrics_file, plots

_OF_ROWS = (plots.epsilon_over_rounds, plots.accuracy_over_epsilon)
_CLAIMS = ('dp', 'census')


def _rows(tmp_path, fields):
  return metrics_file.read(samples.write(tmp_path, fields))


@pytest.mark.parametrize('plot', _OF_ROWS)
def test_curves_are_drawn_and_told_in_words(tmp_path, plot):
  picture = plot(_rows(tmp_path, samples.fields()), _CLAIMS)
  samples.assert_is_a_picture(picture.png)
  # 0.5 + 0.01 · 12, 0.7 · √12 and 0.2 · √12.
  assert picture.alternative.endswith(
    'It ends at round 12, accuracy 62.00%, dp epsilon 2.425, census epsilon '
    '0.693.'
  )


@pytest.mark.parametrize('plot', _OF_ROWS)
def test_without_rounds_a_picture_says_so(plot):
  picture = plot([], _CLAIMS)
  samples.assert_is_a_picture(picture.png)
  assert picture.alternative.endswith('There are no rounds to show.')


@pytest.mark.parametrize('plot', _OF_ROWS)
def test_every_claim_has_a_curve(tmp_path, plot):
  names = list(claims.CLAIMS)
  path = tmp_path / 'metrics.csv'
  columns = ','.join(f'{name}_epsilon' for name in names)
  path.write_text(f'round,accuracy,{columns}\n1,0.5,6,5,4,3,2,1\n')
  picture = plot(metrics_file.read(path), names)
  samples.assert_is_a_picture(picture.png)
  for epsilon, name in zip((6, 5, 4, 3, 2, 1), names):
    assert f'{name} epsilon {epsilon}.000' in picture.alternative


@pytest.mark.parametrize('dp_epsilon', ['', 'inf', 1e6, 0.0])
@pytest.mark.parametrize('epsilon', ['', 'inf'])
def test_epsilons_may_be_blank_infinite_or_large(tmp_path, dp_epsilon, epsilon):
  fields = samples.fields(9)
  fields[2][6] = dp_epsilon
  for row in fields:  # That of the other claim is never finite.
    row[7] = epsilon
  rows = _rows(tmp_path, fields)
  for plot in _OF_ROWS:
    picture = plot(rows, _CLAIMS)
    samples.assert_is_a_picture(picture.png)
    assert picture.alternative.endswith(f'census epsilon {epsilon or "–"}.')


def test_the_spread_of_distances_is_told_in_words():
  distances = np.linspace(0.0, 1.0, 101).reshape(1, 101)
  picture = plots.spread_of_distances(distances, 1.0)
  samples.assert_is_a_picture(picture.png)
  assert 'Median 0.5, 90% below 0.9, largest 1, in' in picture.alternative


@pytest.mark.parametrize('shape', [(0, 0), (0, 5), (5, 0)])
def test_without_distances_a_picture_says_so(shape):
  picture = plots.spread_of_distances(np.empty(shape), 1.0)
  samples.assert_is_a_picture(picture.png)
  assert picture.alternative.endswith('There are no distances to show.')


@pytest.mark.parametrize('distances', [np.zeros((1, 1)), np.full((3, 2), 1e-6)])
@pytest.mark.parametrize('worst_case', [1e-6, 1.0])
def test_degenerate_distances_have_a_plot(distances, worst_case):
  picture = plots.spread_of_distances(distances, worst_case)
  samples.assert_is_a_picture(picture.png)


def test_address_of_a_plot_holds_the_picture():
  kind, _, content = plots.Plot(b'png', '').data_uri.partition(',')
  assert kind == 'data:image/png;base64'
  assert base64.b64decode(content) == b'png'


def test_import_does_not_import_matplotlib():
  program = (
    'import sys, tf_bdp.reporting.page; '
    "sys.exit(any('matplotlib' in name for name in sys.modules))"
  )
  process = subprocess.run([sys.executable, '-c', program], check=False)
  assert process.returncode == 0
