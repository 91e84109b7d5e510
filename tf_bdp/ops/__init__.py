"""Clipping, noise and gradients of examples, as TensorFlow operations."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
