"""Load windows and layouts as JSON files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ArgumentError
from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.placement import Layout


def read_loads(file: Path) -> LoadWindow:
    """Read ``{"counts": [[[...]]]}``, nested as steps, layers, experts; raises ArgumentError for anything else."""
    return LoadWindow(_integers(file, "counts", "steps, layers, experts", 3))


def read_layout(file: Path) -> Layout:
    """Read ``{"layout": [[...]]}``, nested as layers, slots, from a plan; raises ArgumentError for anything else."""
    return _integers(file, "layout", "layers, slots", 2).astype(np.int32)


def _integers(file: Path, key: str, nesting: str, dimensions: int) -> NDArray[np.int64]:
    wanted = f'write {{"{key}": ...}} with whole numbers nested as {nesting}'
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:  # no JSON, no text, endless digits, endless nesting
        raise ArgumentError(str(file), [f"no JSON ({error}); {wanted}"]) from error
    if not isinstance(content, dict) or key not in content:
        raise ArgumentError(str(file), [f"no {key!r} in it; {wanted}"])
    try:
        values = np.array(content[key])
    except ValueError as error:
        raise ArgumentError(str(file), [f"{key!r} is ragged; {wanted}"]) from error
    if values.ndim != dimensions or values.dtype.kind not in "iu":
        raise ArgumentError(str(file), [f"{key!r} has shape {values.shape} and type {values.dtype}; {wanted}"])
    return values.astype(np.int64)
