"""Marks for Triton functions.

Triton compiles a kernel anew for integers that are 1 or divisible by 16 and for addresses that are. A sum over a row
may then be another tree, and a configuration that nobody checked may run. Kernels of this package are therefore
compiled once for each set of constants and dtypes: integers are never specialised, and addresses are either promised
to be aligned (`rows.aligned` and fresh tensors keep the promise) or named in ``unaligned``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton

_SCALARS = ("tl.int32", "tl.int64", "tl.float32")


def kernel(*, unaligned: Sequence[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """Mark a function that is launched over a grid.

    Args:
        unaligned: pointer parameters whose address is not promised to be a multiple of 16 bytes.
    """

    def mark(function: Callable[..., None]) -> Any:
        scalars = [name for name, annotation in function.__annotations__.items() if annotation in _SCALARS]
        return triton.jit(function, do_not_specialize=scalars, do_not_specialize_on_alignment=list(unaligned))

    return mark


def device_function(function: Callable[..., Any]) -> Any:
    """Mark a function that kernels call."""
    return triton.jit(function)
