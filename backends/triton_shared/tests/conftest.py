"""Kernels run in the suite's repaired interpreter; where Triton is not installed, their tests are not collected.

The root environment has no Triton (1 GB): CI collects this folder in an overlay environment (docs/triton-kit.md).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from deepinfer_conformance.triton_cpu import Session

sys.path.insert(0, str(Path(__file__).parent))  # for kernel_drivers, which the conformance tests share

HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob: list[str] = [] if HAS_TRITON else ["test_*.py"]


def pytest_report_header() -> str:
    return "" if HAS_TRITON else "backends/triton_shared: Triton is not installed, its kernels are NOT tested here"


@pytest.fixture
def session() -> Iterator[Session]:
    """Launches run on CPU tensors."""
    from deepinfer_conformance import triton_cpu

    with triton_cpu.interpreted() as running:
        yield running


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
