"""Federated learning with Bayesian differential privacy."""
