"""Tests of the driver. Those in `triton_driver` need Triton 3.9.0 and run in a lane of their own (.ci/run)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from deepinfer_nvidia.availability import ThisMachine


def pytest_collection_modifyitems(items):
    if ThisMachine().cuda_version() is not None and torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def recording_cuda():
    """The module of the recording stand-in; test modules are loaded by path and cannot import it."""
    spec = importlib.util.spec_from_file_location("recording_cuda", Path(__file__).with_name("recording_cuda.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
