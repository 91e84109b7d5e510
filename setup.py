"""Installs the accountant and its commands; the rest comes as extras."""

import pathlib
import re

import setuptools

_ROOT = pathlib.Path(__file__).parent
_VERSION = re.search(
  r"__version__ = '(.+)'", (_ROOT / 'tf_bdp/__init__.py').read_text('utf-8')
)

setuptools.setup(
  name='tf_bdp',
  version=_VERSION.group(1),
  description='Federated learning with Bayesian differential privacy.',
  long_description=(_ROOT / 'README.md').read_text('utf-8'),
  long_description_content_type='text/markdown',
  license='Apache 2.0',
  packages=setuptools.find_packages(include=['tf_bdp', 'tf_bdp.*']),
  package_data={
    '': ['*.pyi'],  # `lazy_loader` reads the names of a package there.
    'tf_bdp': ['py.typed'],
    'tf_bdp.reporting': ['templates/*'],
  },
  python_requires='>=3.9,<3.12',
  install_requires=[
    'absl-py>=1.0',
    'attrs>=22',
    'dp-accounting>=0.4.3,<0.5',
    'lazy-loader>=0.3',
    'numpy>=1.22',
    'scipy>=1.9',
    'tqdm>=4.64',
  ],
  extras_require={
    # TFF's own pins no longer resolve: install requirements-lock.txt with
    # `pip install --no-deps -r` first, then this extra is satisfied.
    'federated': [
      'tensorflow-federated==0.87.0',
      'tensorflow-privacy==0.9.0',
      'tensorflow-datasets>=4.9',
      'jinja2>=3.1',
      'matplotlib',
      'psutil',
    ],
    'experiments': ['scikit-learn'],
    'test': ['hypothesis', 'mpmath', 'pytest', 'pytest-xdist'],
  },
  entry_points={
    'console_scripts': [
      'compute_bdp_privacy = tf_bdp.analysis.compute_bdp_privacy:run',
      'compute_noise_from_bdp_budget = '
      'tf_bdp.analysis.compute_noise_from_bdp_budget:run',
    ]
  },
)
