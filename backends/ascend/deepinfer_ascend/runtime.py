"""The one place that imports torch_npu, and the facts about it that need no import."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Final

from deepinfer.errors import DriverUnavailableError
from deepinfer_ascend import environment

DISTRIBUTION: Final = "torch-npu"


def installed_version() -> str | None:
    """Return the version of torch-npu by its metadata, without importing it, or None."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def load() -> ModuleType:
    """Import torch_npu, with the vendor's variables set before its runtime starts; DriverUnavailableError if it fails.

    Float32 products are kept in float32 afterwards: the matrix unit's HF32 rounding is switched off.
    """
    environment.apply_at_start()
    try:
        module = importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise DriverUnavailableError(
            f"torch_npu {installed_version() or 'is not installed and'} cannot be imported: {error}. Source CANN's "
            f"set_env.sh in this shell; `deepinfer devices` lists what is missing"
        ) from error
    npu().matmul.allow_hf32 = False
    return module


def npu() -> Any:
    """Return ``torch.npu``, which torch_npu adds to torch when it is imported."""
    return importlib.import_module("torch").npu
