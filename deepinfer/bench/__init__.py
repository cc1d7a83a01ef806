"""Benchmarks as library functions with typed results; `deepinfer bench` prints and saves what they return."""
