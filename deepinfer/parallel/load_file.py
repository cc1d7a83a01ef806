"""Load windows and layouts as JSON files."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ArgumentError
from deepinfer.parallel.loads import LoadWindow
from deepinfer.parallel.placement import Layout

_MOST: Final = np.iinfo(np.int64).max


def read_loads(file: Path) -> LoadWindow:
    """Read ``{"counts": [[[...]]]}``, nested as steps, layers, experts; raises ArgumentError for anything else."""
    return LoadWindow(_integers(file, "counts", "steps, layers, experts", 3))


def read_layout(file: Path) -> Layout:
    """Read ``{"layout": [[...]]}``, nested as layers, slots, from a plan; raises ArgumentError for anything else."""
    return _integers(file, "layout", "layers, slots", 2, most=np.iinfo(np.int32).max).astype(np.int32)


def _integers(file: Path, key: str, nesting: str, dimensions: int, most: int = _MOST) -> NDArray[np.int64]:
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
    beyond = _first_beyond(values, content[key], most) if values.ndim == dimensions else None
    if beyond is not None:
        problem = f"{key!r} holds {reprlib.repr(beyond)}; numbers lie between {-most - 1} and {most}"
        raise ArgumentError(str(file), [problem])
    if values.ndim != dimensions or values.dtype.kind not in "iu":
        raise ArgumentError(str(file), [f"{key!r} has shape {values.shape} and type {values.dtype}; {wanted}"])
    return values.astype(np.int64)


def _first_beyond(values: NDArray[Any], nested: list[Any], most: int) -> int | None:
    """Return the first whole number that ``most`` does not bound, where all are whole: numpy wraps or rounds it."""
    if values.dtype.kind == "i" and values.size and -most - 1 <= values.min() and values.max() <= most:
        return None
    numbers = np.array(nested, dtype=object).ravel().tolist()
    if not all(isinstance(number, int) for number in numbers):
        return None
    return next((number for number in numbers if not -most - 1 <= number <= most), None)
