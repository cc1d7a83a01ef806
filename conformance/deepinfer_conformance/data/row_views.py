"""Which tensors of a call have one entry a row, and calls with other rows or other strides.

The contract's names say it: a suffix that begins with T (B in sampling, n in gathers) is indexed by rows first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from deepinfer_conformance.data.call import OpCall, mapped_arguments, tensors

_LETTERS: Final = {
    "codec.gather_window": "n",
    "codec.gather_entries": "n",
    "codec.gather_index_keys": "n",
    "sampling.weigh": "B",
    "sampling.sample": "B",
    "sampling.draw": "B",
    "sampling.uniforms": "B",
    "sampling.log_probabilities": "B",
    "drafting.attend": "R",
    "drafting.propose": "B",
    "drafting.guess": "B",
    "drafting.verify": "R",
    "drafting.match": "R",
}
_WITHOUT_SUFFIX: Final = {"norm.rotary": ("x",)}


def is_by_row(op: str, name: str) -> bool:
    """Return True if the tensor at a dotted argument name has one entry a row."""
    last = name.rpartition(".")[2]
    suffix = last.rpartition("_")[2] if "_" in last else ""
    return suffix.startswith(_LETTERS.get(op, "T")) or last in _WITHOUT_SUFFIX.get(op, ())


def row_count(call: OpCall) -> int:
    """Return T."""
    return next(int(tensor.shape[0]) for name, tensor in tensors(call.arguments) if is_by_row(call.op, name))


def changed_rows(call: OpCall, change: Callable[[torch.Tensor], torch.Tensor]) -> OpCall:
    """Return the call with every tensor that has one entry a row changed."""

    def each(tensor: torch.Tensor, name: str) -> torch.Tensor:
        return change(tensor) if is_by_row(call.op, name) else tensor

    return OpCall(call.op, mapped_arguments(call.arguments, each))


def with_rows(call: OpCall, rows: torch.Tensor) -> OpCall:
    """Return the call with rows chosen, repeated or reordered by an index."""
    return changed_rows(call, lambda tensor: tensor.index_select(0, rows))
