import base64
import dataclasses
import html.parser
import json
import pathlib
import re

import numpy as np
import pytest

from tests.reporting import samples
from tf_bdp.accounting import attack_success_bound, claims, privacy_report
from tf_bdp.reporting import page as page_lib

_PLOTS = (
  'epsilon_over_rounds.png',
  'accuracy_over_epsilon.png',
  'distances.png',
)
_VOID = ('meta', 'link', 'img')


class _Page(html.parser.HTMLParser):
  """Collects what a page holds, and fails if its tags do not balance."""

  def __init__(self, text):
    super().__init__()
    self.open_tags, self.tags, self.references = [], [], []
    self.alternatives, self.cells, self.text = [], [], ''
    self.feed(text)
    self.close()
    assert not self.open_tags

  def handle_starttag(self, tag, attributes):
    self.tags.append(tag)
    self.references += [v for k, v in attributes if k in ('src', 'href')]
    if tag == 'img':
      self.alternatives.append(dict(attributes)['alt'])
    if tag in ('td', 'th'):
      self.cells.append('')
    if tag not in _VOID:
      self.open_tags.append(tag)

  def handle_endtag(self, tag):
    assert self.open_tags.pop() == tag

  def handle_data(self, data):
    self.text += data
    if {'td', 'th'} & set(self.open_tags):
      self.cells[-1] += data


@pytest.fixture(name='privacy', scope='module')
def _privacy():
  return privacy_report.compute_bdp_privacy(
    samples.distances(),
    noise_multiplier=1.5,
    participation_probability=0.2,
    delta=1e-4,
    panel=True,
    population=True,
  )


def _write(directory, report, rows=None, **changes):
  samples.write(directory, samples.fields() if rows is None else rows)
  arguments = {
    'title': 'A run',
    'settings': {'dataset': 'digits', 'rounds': 12},
    'privacy': [report],
    'distances': samples.distances(),
    **changes,
  }
  path = page_lib.write(directory, **arguments)
  return _Page(path.read_text('utf-8'))


@pytest.fixture(name='written', scope='module')
def _written(tmp_path_factory, privacy):
  """A page and its directory, for tests that only read them."""
  directory = tmp_path_factory.mktemp('page')
  return _write(directory, privacy), directory


def test_all_files_are_written_and_nothing_else(tmp_path, privacy):
  settings = {'rate': np.float32(0.5), 'clients': np.int64(3), 'path': tmp_path}
  _write(tmp_path, privacy, settings=settings)
  expected = {
    *('metrics.csv', 'statement.txt', 'privacy.json', 'settings.json'),
    'report.html',
  }
  assert {path.name for path in tmp_path.iterdir()} == {*expected, *_PLOTS}
  statement = (tmp_path / 'statement.txt').read_text('utf-8')
  assert statement == privacy.statement() + '\n'
  assert json.loads((tmp_path / 'settings.json').read_text('utf-8')) == {
    'rate': 0.5,
    'clients': 3,
    'path': str(tmp_path),
  }


def test_path_of_the_page_is_returned_for_a_directory_given_as_text(
  tmp_path, privacy
):
  (tmp_path / 'metrics.csv').write_text(','.join(samples.HEADER) + '\n')
  path = page_lib.write(
    str(tmp_path), title='', settings={}, privacy=[privacy], distances=None
  )
  assert path == pathlib.Path(tmp_path) / 'report.html'


def test_page_stands_alone(written):
  page, directory = written
  assert all(reference.startswith('data:') for reference in page.references)
  assert 'script' not in page.tags
  style = (directory / 'report.html').read_text('utf-8').split('</style>')[0]
  assert 'url(' not in style
  assert '@import' not in style


def test_plots_in_the_page_are_the_pictures_in_the_directory(written):
  page, directory = written
  sources = [r for r in page.references if r.startswith('data:image/png')]
  assert len(sources) == len(page.alternatives) == len(_PLOTS)
  assert all(page.alternatives)
  for name, source in zip(_PLOTS, sources):
    content = (directory / name).read_bytes()
    samples.assert_is_a_picture(content)
    assert base64.b64decode(source.partition(',')[2]) == content


def test_every_method_has_its_line(written, privacy):
  page, _ = written
  for row in privacy.rows:
    start = page.cells.index(row.method)
    assert page.cells[start + 1 : start + 6] == [
      f'{row.epsilon:.3f}',
      f'{row.delta:g}',
      '–' if row.order is None else str(row.order),
      f'{attack_success_bound(row.epsilon, row.delta):.4f}',
      row.assumption,
    ]


def test_every_claim_has_its_line_and_the_recommended_one_a_star(
  written, privacy
):
  page, _ = written
  names = [row.claim.name for row in privacy.claims]
  assert names == ['dp', 'each', 'census', 'sample', 'paper']
  for row in privacy.claims:
    star = '*' if row.recommended else ''
    start = page.cells.index(row.claim.name + star)
    assert page.cells[start + 1 : start + 6] == [
      f'{row.epsilon:.3f}',
      f'{row.delta:g}',
      f'{row.attack_success_bound:.4f}',
      claims.in_words(row.claim.protects, 'client'),
      row.claim.rests_on,
    ]


def test_the_recommended_claim_comes_first_and_dp_beside_it(written, privacy):
  _, directory = written
  text = (directory / 'report.html').read_text('utf-8')
  values = re.findall(r'<dd class="value">(.*?)</dd>', text)
  epsilons = {row.claim.name: row.epsilon for row in privacy.claims}
  assert privacy.recommended.claim.name == 'census'
  assert values == [
    f'{epsilons["census"]:.3f}',
    f'{epsilons["dp"]:.3f}',
    '62.00%',
    str(samples.ROUNDS),
  ]
  names = re.findall(r'<dt>(.*?)</dt>', text)
  assert names[:2] == [
    *('Clients, epsilon by census', 'Clients, epsilon by dp'),
  ]


def test_where_dp_is_recommended_it_is_there_once(tmp_path):
  # All of them as far away as they can be: nothing is gained.
  privacy = privacy_report.compute_bdp_privacy(
    np.ones((samples.ROUNDS, 40)),
    noise_multiplier=1.5,
    participation_probability=0.2,
    delta=1e-4,
    panel=True,
    population=True,
  )
  assert privacy.recommended.claim.name == 'dp'
  _write(tmp_path, privacy)
  text = (tmp_path / 'report.html').read_text('utf-8')
  names = re.findall(r'<dt>(.*?)</dt>', text)
  assert names == ['Clients, epsilon by dp', 'Final accuracy', 'Rounds']


def test_the_page_says_who_is_protected_against_whom_and_on_what_it_rests(
  written, privacy
):
  text = ' '.join(written[0].text.split())
  row = privacy.recommended
  for part in (
    f'by the claim {row.claim.name}.',
    claims.in_words(row.claim.protects, 'client'),
    claims.ATTACKER,
    f'with probability {row.attack_success_bound:.4f} at most',
    f'rests on {row.claim.rests_on}',
    row.reason,
  ):
    assert part in text


def test_curves_are_of_the_claims_that_the_metrics_have(written):
  page, _ = written
  # 0.7 · √12 and 0.2 · √12; the file has no other claims.
  for alternative in page.alternatives[:2]:
    assert alternative.endswith('dp epsilon 2.425, census epsilon 0.693.')


def test_figures_for_programs_have_the_names_of_claims(tmp_path, privacy):
  # JSON has no infinity.
  unbounded = privacy.rows[0]._replace(epsilon=np.inf)
  changed = dataclasses.replace(privacy, rows=[unbounded, *privacy.rows[1:]])
  _write(tmp_path, changed)
  text = (tmp_path / 'privacy.json').read_text('utf-8')
  assert 'Infinity' not in text and 'NaN' not in text
  data = json.loads(text)['client']
  assert {row['claim']: row['epsilon'] for row in data['claims']} == {
    row.claim.name: row.epsilon for row in privacy.claims
  }
  assert data['rows'][0]['epsilon'] is None


def test_how_many_took_part_is_not_on_the_page(tmp_path, privacy):
  rows = samples.fields()
  for row in rows:
    row[1:3] = 23987, 23988
    row[-1] = 23989.0
  page = _write(tmp_path, privacy, rows, expected_participants=20.0)
  text = (tmp_path / 'report.html').read_text('utf-8')
  for private in ('23987', '23988', '23989'):
    assert private not in text
  assert '20 participants expected' in page.text


def test_method_that_does_not_apply_has_no_figures(tmp_path):
  privacy = privacy_report.compute_bdp_privacy(
    samples.distances(),
    noise_multiplier=1.5,
    participation_probability=0.2,
    delta=1e-4,
  )
  page = _write(tmp_path, privacy)
  start = page.cells.index('BDP, panel')
  assert page.cells[start + 1] == page.cells[start + 4] == '–'
  assert page.cells[start + 5] == 'the units are not a panel'


def test_statement_verdicts_and_notes_are_in_the_page(tmp_path, privacy):
  page = _write(tmp_path, privacy, notes=['The noise was seeded.'])
  assert privacy.statement() in page.text
  assert 'The noise was seeded.' in page.text
  for finding in privacy.findings:
    start = page.cells.index(finding.check)
    assert page.cells[start + 1].endswith(finding.verdict)
    assert page.cells[start + 2] == finding.meaning


def test_data_that_do_not_fit_bdp_are_noted_at_the_top(tmp_path):
  # First all alike, then half of them three times as far as the others.
  distances = np.full((samples.ROUNDS, 40), 0.2)
  distances[samples.ROUNDS // 2 :, ::2] = 0.6
  privacy = privacy_report.compute_bdp_privacy(
    distances,
    noise_multiplier=1.5,
    participation_probability=0.2,
    delta=1e-4,
  )
  page = _write(tmp_path, privacy, distances=distances)
  assert 'rely on the claim dp' in page.text.partition('Method')[0]


def test_whatever_the_caller_says_is_escaped(tmp_path, privacy):
  evil = '<script>alert("1")</script>&'
  page = _write(
    tmp_path, privacy, title=evil, settings={evil: evil}, notes=[evil]
  )
  assert 'script' not in page.tags
  assert page.text.count(evil) == 5  # The title twice.


@pytest.mark.parametrize('content', ['', ','.join(samples.HEADER) + '\n'])
def test_run_of_no_rounds_has_a_page_that_says_so(tmp_path, privacy, content):
  (tmp_path / 'metrics.csv').write_text(content)
  path = page_lib.write(
    tmp_path, title='', settings={}, privacy=[privacy], distances=None
  )
  page = _Page(path.read_text('utf-8'))
  assert (
    f'account for {samples.ROUNDS} rounds, but metrics.csv has 0' in page.text
  )
  assert 'no round was evaluated' in page.text
  for name in _PLOTS:
    samples.assert_is_a_picture((tmp_path / name).read_bytes())


@pytest.mark.parametrize(
  'distances', [None, np.empty((0, 5)), np.empty((5, 0))]
)
def test_report_needs_no_distances(tmp_path, privacy, distances):
  page = _write(tmp_path, privacy, distances=distances)
  assert 'There are no distances to show.' in page.alternatives[2]
  samples.assert_is_a_picture((tmp_path / 'distances.png').read_bytes())


@pytest.mark.parametrize('distances', [np.ones(5), np.full((2, 2), np.nan)])
def test_distances_of_another_form_are_an_error(tmp_path, privacy, distances):
  with pytest.raises(ValueError, match=r'a finite array \[rounds, units\]'):
    _write(tmp_path, privacy, distances=distances)


def test_diverged_loss_is_not_shown_as_blank(tmp_path, privacy):
  rows = samples.fields(3)
  rows[-1][4:6] = 0.1, 'nan'
  page = _write(tmp_path, privacy, rows)
  assert 'nan' in page.cells


def test_metrics_are_few_rows_to_the_last(tmp_path, privacy):
  page = _write(tmp_path, privacy, samples.fields(103))
  assert '17 of 103 rounds; all are in metrics.csv' in ' '.join(
    page.text.split()
  )
  headings = ['Round', 'Clip norm', 'Accuracy', 'Loss']
  headings += ['Epsilon, dp', 'Epsilon, census']
  start = page.cells.index('Round')
  width = len(headings)
  assert page.cells[start : start + width] == headings
  cells = page.cells[start + width :]
  # Evaluated in every third round: those that are even, and the last.
  assert [int(cell) for cell in cells[::width]] == [*range(6, 103, 6)]


def test_every_unit_has_its_summary_its_section_and_its_statement(
  tmp_path, privacy
):
  examples = dataclasses.replace(privacy, unit='example', delta=1e-7)
  page = _write(tmp_path, privacy, privacy=[privacy, examples])
  statement = f'{privacy.statement()}\n\n{examples.statement()}'
  assert (tmp_path / 'statement.txt').read_text('utf-8') == f'{statement}\n'
  assert statement in page.text
  assert page.text.count('Final accuracy') == 2
  assert page.text.index('claimed of clients') < page.text.index(
    'claimed of examples'
  )
  assert 'How far one client moves' in page.text


def test_report_of_no_unit_is_an_error(tmp_path, privacy):
  with pytest.raises(ValueError, match='a report for each unit'):
    _write(tmp_path, privacy, privacy=[])
  assert not (tmp_path / 'statement.txt').exists()


def test_interrupted_write_leaves_the_former_page(
  tmp_path, privacy, monkeypatch
):
  _write(tmp_path, privacy)
  before = (tmp_path / 'report.html').read_bytes()
  files = set(tmp_path.iterdir())
  write_bytes = pathlib.Path.write_bytes

  def interrupted(path, content):
    if 'report.html' in path.name:
      write_bytes(path, content[:100])
      raise KeyboardInterrupt
    return write_bytes(path, content)

  monkeypatch.setattr(pathlib.Path, 'write_bytes', interrupted)
  with pytest.raises(KeyboardInterrupt):
    _write(tmp_path, privacy, title='Another')
  assert (tmp_path / 'report.html').read_bytes() == before
  assert set(tmp_path.iterdir()) == files


def test_statement_is_there_even_if_the_metrics_are_not(tmp_path, privacy):
  with pytest.raises(FileNotFoundError):
    page_lib.write(
      tmp_path, title='', settings={}, privacy=[privacy], distances=None
    )
  assert (tmp_path / 'statement.txt').exists()
