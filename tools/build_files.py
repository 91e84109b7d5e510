"""Writes the BUILD files from the imports: one target for each module.

Dependencies inside the repository are declared; packages from the registry
come from the Python environment (requirements-lock.txt). Who may depend on a
package follows from `LAYERS`. A test fails when the files are not what this
would write, and another when an import goes against the layers.
"""

import ast
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
_FOLDERS = ('tf_bdp', 'experiments', 'benchmarks', 'tools', 'tests')
# Each package of tf_bdp imports only those above it.
LAYERS = (
  *('accounting', 'mechanisms', 'ops', 'aggregators', 'learning', 'engines'),
  *('training', 'reporting', 'analysis'),
)
_HEADER = '# Made by `make build-files` from the imports.\n'
_PUBLIC = '"//visibility:public"'
_ROOT_BUILD = (
  f'{_HEADER}\npackage(default_visibility = [{_PUBLIC}])\n'
  '\nlicenses(["notice"])  # Apache 2.0\n\nexports_files(["LICENSE"])\n'
)


def build_files() -> dict[pathlib.Path, str]:
  """Returns the contents of every BUILD file, by path."""
  files = {ROOT / 'BUILD': _ROOT_BUILD}
  for top in _FOLDERS:
    for folder in [ROOT / top, *(ROOT / top).rglob('*')]:
      modules = sorted(folder.glob('*.py')) if folder.is_dir() else []
      if modules:
        targets = [_target(module) for module in modules]
        text = '\n'.join([_HEADER, _visibility(folder), *targets])
        files[folder / 'BUILD'] = text
  return files


def layer_of(module: pathlib.Path) -> int:
  """Returns the place of a module in `LAYERS`; -1 is above all of them."""
  top, *rest = module.relative_to(ROOT).parts
  if top != 'tf_bdp':
    return len(LAYERS)
  return LAYERS.index(rest[0]) if len(rest) > 1 else -1


def imports(module: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the modules of this repository that a module imports."""
  yield from _imports(module, ())
  stub = module.with_suffix('.pyi')
  if stub.exists():  # What a package loads when it is first asked for it.
    yield from _imports(stub, module.relative_to(ROOT).parts[:-1])


def _visibility(folder: pathlib.Path) -> str:
  """Returns who may depend on the modules of a folder."""
  layer = layer_of(folder / 'module.py')
  if layer in (-1, len(LAYERS)):
    return f'package(default_visibility = [{_PUBLIC}])\n'
  others = [f'tf_bdp/{name}' for name in LAYERS[layer:]]
  others += [top for top in _FOLDERS if top != 'tf_bdp']
  lines = [f'    "//{other}:__subpackages__",' for other in others]
  return '\n'.join(['package(default_visibility = [', *lines, '])', ''])


def _target(module: pathlib.Path) -> str:
  """Returns the rule of one module."""
  kind = 'py_test' if module.name.endswith('_test.py') else 'py_library'
  label = _label(module)
  lines = [
    f'{kind}(',
    f'    name = "{label.partition(":")[2]}",',
    f'    srcs = ["{module.name}"],',
  ]
  if _reads_templates(module):
    lines.append('    data = glob(["templates/*"]),')
  labels = sorted({_label(m) for m in imports(module)} - {label})
  if module.name == '__init__.py':  # The public names.
    lines.append(f'    visibility = [{_PUBLIC}],')
  if labels:
    lines += [
      '    deps = [',
      *(f'        "{dep}",' for dep in labels),
      '    ],',
    ]
  return '\n'.join([*lines, ')', ''])


def _reads_templates(module: pathlib.Path) -> bool:
  """Says whether a module reads files of the folder `templates` beside it."""
  source = module.read_text('utf-8')
  return (module.parent / 'templates').is_dir() and "'templates'" in source


def _label(module: pathlib.Path) -> str:
  """Returns the Bazel label of a module; a package has its folder's name."""
  folder = module.parent
  name = folder.name if module.name == '__init__.py' else module.stem
  return f'//{folder.relative_to(ROOT).as_posix()}:{name}'


def _imports(
  module: pathlib.Path, package: tuple[str, ...]
) -> Iterator[pathlib.Path]:
  """Yields what a file imports; relative imports are of the package."""
  for node in ast.walk(ast.parse(module.read_text('utf-8'))):
    names: list[str] = []
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      source = [*(package if node.level else ()), *filter(None, [node.module])]
      names = ['.'.join([*source, alias.name]) for alias in node.names]
    for name in names:
      found = _find(name)
      if found:
        yield found


def _find(name: str) -> pathlib.Path | None:
  """Returns the file that defines a dotted name, if it is in the repository."""
  parts = name.split('.')
  if parts[0] not in _FOLDERS:
    return None
  for length in (len(parts), len(parts) - 1):
    path = ROOT.joinpath(*parts[:length])
    for file in (path.with_suffix('.py'), path / '__init__.py'):
      if length and file.exists():
        return file
  return None


def main() -> None:
  for path, text in build_files().items():
    path.write_text(text, 'utf-8')


if __name__ == '__main__':
  main()
