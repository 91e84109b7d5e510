"""Federated learning with Bayesian differential privacy on TensorFlow.

Packages are loaded when they are first used: the accountant needs neither
TensorFlow nor TFF, and what needs TFF takes seconds to import.
"""

import lazy_loader

__version__ = '0.1.0'

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
