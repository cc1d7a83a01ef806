"""Memory of one NPU as the runtime sees it."""

from __future__ import annotations

from typing import Final

from deepinfer.accelerator.interface import MemoryInfo
from deepinfer_ascend import runtime

RESERVED_BYTES: Final = 1536 * 2**20
"""Kept free for workspaces of operators, HCCL buffers (200 MB a group and direction by default) and task queues."""


def npu_memory(index: int) -> MemoryInfo:
    """Return total and free bytes of NPU ``index``; what torch-npu's allocator holds without use counts as free."""
    free_bytes, total_bytes = runtime.npu().mem_get_info(index)
    idle_bytes = runtime.npu().memory_reserved(index) - runtime.npu().memory_allocated(index)
    return MemoryInfo(int(total_bytes), int(free_bytes) + int(idle_bytes), min(RESERVED_BYTES, int(total_bytes)))
