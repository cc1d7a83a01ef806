"""Tests that need Triton; they run in the suite's repaired interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deepinfer_conformance import triton_cpu


@pytest.fixture
def session() -> Iterator[triton_cpu.Session]:
    """Launches run on CPU tensors, and are remembered."""
    with triton_cpu.interpreted() as running:
        yield running


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
