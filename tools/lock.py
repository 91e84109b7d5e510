"""Resolves requirements.in into a complete lock file, printed to stdout.

TensorFlow Federated pins releases that are no longer published, so pip cannot
resolve it. This asks pip for TFF's declared requirements, replaces those that
requirements.in pins with `==`, and lets pip resolve them without installing
anything. Install the result with `pip install --no-deps -r`.
"""

import json
import pathlib
import re
import subprocess
import sys
from typing import Any

_PINNED_WITHOUT_RESOLVER = 'tensorflow-federated'
_HEADER = '# Made by `make lock` from requirements.in. Install with --no-deps.'


def _name(requirement: str) -> str:
  """Returns the normalised name of the package that a requirement is about."""
  name = re.split(r'[\s<>=!~;\[(]', requirement, maxsplit=1)[0]
  return re.sub(r'[-_.]+', '-', name).lower()


def _resolve(requirements: list[str], *options: str) -> list[dict[str, Any]]:
  """Returns the metadata of all packages that pip would install."""
  command = [sys.executable, '-m', 'pip', 'install', '--quiet', '--dry-run']
  command += ['--ignore-installed', '--report', '-', *options, *requirements]
  report = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
  return [package['metadata'] for package in json.loads(report)['install']]


def main() -> None:
  source = pathlib.Path(__file__).parents[1] / 'requirements.in'
  lines = [line.split('#')[0].strip() for line in source.open()]
  wanted = {_name(line): line for line in lines if line}
  federated = wanted.pop(_PINNED_WITHOUT_RESOLVER)
  (metadata,) = _resolve([federated], '--no-deps')
  declared = [r for r in metadata['requires_dist'] if 'extra ==' not in r]
  pinned = {name for name, line in wanted.items() if '==' in line}
  requirements = list(wanted.values())
  requirements += [r for r in declared if _name(r) not in pinned]
  packages = [metadata, *_resolve(requirements)]
  pins = sorted(f'{_name(p["name"])}=={p["version"]}' for p in packages)
  print('\n'.join([_HEADER, *pins]))


if __name__ == '__main__':
  main()
