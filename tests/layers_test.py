"""Each layer of tf_bdp imports only those above it."""

import pytest

from tools import build_files

_MODULES = sorted((build_files.ROOT / 'tf_bdp').rglob('*.py'))


@pytest.mark.parametrize(
  'module',
  _MODULES,
  ids=lambda module: module.relative_to(build_files.ROOT).as_posix(),
)
def test_a_module_imports_only_from_its_layer_and_those_above(module):
  if module == build_files.ROOT / 'tf_bdp/__init__.py':
    return  # It names all layers, and loads each when it is asked for.
  own = build_files.layer_of(module)
  below = [
    str(other.relative_to(build_files.ROOT))
    for other in build_files.imports(module)
    if build_files.layer_of(other) > own
  ]
  assert not below


def test_every_package_has_a_layer():
  packages = {module.parts[-2] for module in _MODULES} - {'tf_bdp'}
  assert packages == set(build_files.LAYERS)


def test_an_import_from_below_would_be_found(tmp_path, monkeypatch):
  monkeypatch.setattr(build_files, 'ROOT', tmp_path)
  for package in ('accounting', 'engines'):
    (tmp_path / 'tf_bdp' / package).mkdir(parents=True)
  (tmp_path / 'tf_bdp/engines/base.py').write_text('')
  module = tmp_path / 'tf_bdp/accounting/bad.py'
  module.write_text('def f():\n  from tf_bdp.engines import base\n')
  (found,) = build_files.imports(module)
  assert build_files.layer_of(found) > build_files.layer_of(module)
