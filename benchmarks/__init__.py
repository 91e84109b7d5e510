"""Benchmarks; each prints the ratio to a named alternative."""

from experiments import startup

startup.silence_tensorflow()  # Its log would drown the figures.
