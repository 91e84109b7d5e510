"""Clipping, noise and gradients of examples, as TensorFlow operations."""
