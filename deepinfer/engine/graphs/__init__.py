"""Recorded graphs of decode steps: sizes, buffers, capture and replay."""
