"""Benchmarks; each prints the ratio to a named alternative."""
