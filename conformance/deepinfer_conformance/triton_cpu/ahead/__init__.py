"""Ahead of time: compile kernels for GPUs that are not here, and read what came out."""
