"""Federated learning with Bayesian differential privacy on TensorFlow."""

__version__ = '0.1.0'
