"""One shard mapped into memory, giving tensors that are views of the file.

The mapping is private, so that a stray write changes this process's pages and never the file. It reserves no memory:
an Engram table of the released model takes 98 GB, which a plain private mapping must find free before the first read.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import torch

from deepinfer.model.checkpoint.headers import StoredEntry

# Linux's MAP_NORESERVE, which the mmap module names only in later versions of Python.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
_TORCH_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}


class MappedShard:
    """A shard whose header was found sound; pages are read from disk when they are first touched."""

    def __init__(self, path: Path, data_start: int) -> None:
        """Map a file whose tensors' offsets count from ``data_start``."""
        with path.open("rb") as stream:
            mapping = mmap.mmap(
                stream.fileno(),
                0,
                flags=mmap.MAP_PRIVATE | _NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        # The tensor keeps the mapping alive, and every view of it does too.
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self._data_start = data_start

    def tensor(self, entry: StoredEntry) -> torch.Tensor:
        """Give a view of one tensor; a copy only if the file placed it at an address its type cannot have."""
        dtype = _TORCH_DTYPES[entry.dtype]
        first = self._data_start + entry.begin
        raw = self._bytes[first : first + entry.num_bytes]
        if first % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)
