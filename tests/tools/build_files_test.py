import pytest

from tools import build_files

_FILES = build_files.build_files()


@pytest.mark.parametrize(
  'path',
  _FILES,
  ids=lambda path: path.relative_to(build_files.ROOT).as_posix(),
)
def test_build_file_declares_the_imports_of_its_modules(path):
  wanted = _FILES[path]
  assert path.exists(), 'Run `make build-files`.'
  assert path.read_text('utf-8') == wanted, 'Run `make build-files`.'


def test_every_folder_with_a_build_file_still_has_modules():
  found = {
    path
    for top in ('tf_bdp', 'experiments', 'benchmarks', 'tools', 'tests')
    for path in (build_files.ROOT / top).rglob('BUILD')
  }
  assert found <= set(_FILES)


def test_imports_are_resolved_to_the_module_that_defines_them():
  accountant = build_files.ROOT / 'tf_bdp/accounting/accountant.py'
  found = {path.name for path in build_files.imports(accountant)}
  assert {'validation.py', 'ledger.py', 'mean_bounds.py'} <= found


def test_module_that_reads_templates_has_them_as_data():
  page = build_files.ROOT / 'tf_bdp/reporting/page.py'
  plots = build_files.ROOT / 'tf_bdp/reporting/plots.py'
  assert 'data = glob(["templates/*"]),' in build_files._target(page)
  assert 'data' not in build_files._target(plots)
