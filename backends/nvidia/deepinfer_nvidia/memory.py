"""Memory of one GPU as the runtime sees it, and of the host in interpreted mode."""

from __future__ import annotations

import os
from typing import Any, Final

import torch

from deepinfer.accelerator.interface import MemoryInfo

RESERVED_BYTES: Final = 2 * 2**30
"""Kept free for NCCL's buffers, captured graphs, and scratch memory of scores and split sums."""


def cuda_memory(index: int, cuda: Any = torch.cuda) -> MemoryInfo:
    """Return total and free bytes of device ``index``; what torch's allocator holds without use counts as free."""
    free_bytes, total_bytes = cuda.mem_get_info(index)
    idle_bytes = cuda.memory_reserved(index) - cuda.memory_allocated(index)
    return MemoryInfo(int(total_bytes), int(free_bytes) + int(idle_bytes), min(RESERVED_BYTES, int(total_bytes)))


def host_memory() -> MemoryInfo:
    """Return the memory of the host."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return MemoryInfo(os.sysconf("SC_PHYS_PAGES") * page_bytes, os.sysconf("SC_AVPHYS_PAGES") * page_bytes)
