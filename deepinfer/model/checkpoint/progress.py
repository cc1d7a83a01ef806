"""How far a long operation on a checkpoint is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Progress(NamedTuple):
    """State after one more tensor was read or written."""

    name: str
    done_tensors: int
    total_tensors: int
    done_bytes: int
    total_bytes: int


ProgressCallback = Callable[[Progress], None]
