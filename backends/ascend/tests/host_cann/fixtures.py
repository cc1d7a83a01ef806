"""The emulated machine as a fixture of pytest."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch

from host_cann.loading import Emulator, load

NEEDS = "torch-npu 2.13 is not installed: run these tests in an environment of their own (host_cann/README.md)"


@pytest.fixture(scope="session")
def host_cann_machine() -> Emulator:
    """An emulated Ascend950PR_9599 under torch.npu, one for the whole session."""
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip(NEEDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch_npu while it starts
        machine = load()
        torch.ones(1).to("npu:0")
    return machine
