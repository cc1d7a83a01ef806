"""The two cache pools as byte tensors, and the typed views of each layer on them.

Legend: N blocks, Z state slots, R ring positions, E entries per block, P pending rows, W pending width, b bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.caches import EntryCache, IndexCache, PendingCache, WindowCache
from deepinfer.accelerator.interface import AcceleratorDriver
from deepinfer.cache.layout import CacheLayout
from deepinfer.errors import ArgumentError


class CachePools:
    """Views of every layer on the block pool and the state pool.

    The views alias the pools: an op that writes through a view writes the pool. torch keeps sizes, strides and
    offsets in 64 bits, so pools may pass 2^31 bytes.

    Attributes:
        layout: the byte layout.
        block_bytes_Nb: uint8 [N, block_bytes], the paged pool.
        slot_bytes_Zb: uint8 [Z, slot_bytes], the state pool.
    """

    def __init__(self, layout: CacheLayout, block_bytes_Nb: Tensor, slot_bytes_Zb: Tensor) -> None:
        _check(layout, block_bytes_Nb, slot_bytes_Zb)
        self.layout = layout
        self.block_bytes_Nb = block_bytes_Nb
        self.slot_bytes_Zb = slot_bytes_Zb
        self._windows = self._window_views()
        self._entries = self._entry_views()
        self._index_keys = self._index_views()
        self._pending = self._pending_views()

    @classmethod
    def allocate(cls, layout: CacheLayout, driver: AcceleratorDriver, *, num_blocks: int, num_slots: int) -> CachePools:
        """Allocate both pools on the driver's device; their contents may be anything, NaN included."""
        blocks = driver.allocate((num_blocks, layout.block_bytes), torch.uint8)
        slots = driver.allocate((num_slots, layout.slot_bytes), torch.uint8)
        return cls(layout, blocks, slots)

    @property
    def num_blocks(self) -> int:
        """Blocks in the paged pool, the reserved block 0 included."""
        return int(self.block_bytes_Nb.shape[0])

    @property
    def num_slots(self) -> int:
        """Slots in the state pool, the reserved slot 0 included."""
        return int(self.slot_bytes_Zb.shape[0])

    def window(self, layer: int) -> WindowCache:
        """Return the window ring of a layer (a draft stage counts on after the text layers)."""
        return self._windows[layer]

    def entries(self, owner: int) -> EntryCache:
        """Return the main records of an owner layer."""
        return self._entries[owner]

    def index_keys(self, owner: int) -> IndexCache:
        """Return the index keys of an owner layer."""
        return self._index_keys[owner]

    def pending(self, owner: int) -> PendingCache:
        """Return the pending rows of an owner layer with a ratio above one."""
        return self._pending[owner]

    def _window_views(self) -> dict[int, WindowCache]:
        record = self.layout.window_format
        shape = (self.layout.ring, record.nbytes)
        return {
            section.layer: WindowCache(_section(self.slot_bytes_Zb, section.offset_bytes, shape), record)
            for section in self.layout.rings
        }

    def _entry_views(self) -> dict[int, EntryCache]:
        record = self.layout.main_format
        return {
            section.layer: EntryCache(
                _section(self.block_bytes_Nb, section.main_offset_bytes, (section.entries, record.nbytes)),
                record,
                section.ratio,
            )
            for section in self.layout.owners
        }

    def _index_views(self) -> dict[int, IndexCache]:
        record = self.layout.index_format
        return {
            section.layer: IndexCache(
                self.block_bytes_Nb.narrow(1, section.index_offset_bytes, section.entries * record.nbytes),
                record,
                section.entries,
                section.ratio,
            )
            for section in self.layout.owners
        }

    def _pending_views(self) -> dict[int, PendingCache]:
        if not self.layout.pendings:
            return {}
        floats_Zf = self.slot_bytes_Zb.view(torch.float32)
        return {
            section.layer: PendingCache(
                _section(floats_Zf, section.offset_bytes // floats_Zf.element_size(), (section.capacity, section.width))
            )
            for section in self.layout.pendings
        }


def _section(pool: Tensor, offset: int, shape: tuple[int, int]) -> Tensor:
    return pool.narrow(1, offset, shape[0] * shape[1]).view(pool.shape[0], *shape)


def _check(layout: CacheLayout, block_bytes_Nb: Tensor, slot_bytes_Zb: Tensor) -> None:
    problems: list[str] = []
    for name, pool, item_bytes in (
        ("block_bytes_Nb", block_bytes_Nb, layout.block_bytes),
        ("slot_bytes_Zb", slot_bytes_Zb, layout.slot_bytes),
    ):
        if pool.dtype != torch.uint8 or pool.dim() != 2 or pool.shape[1] != item_bytes or not pool.is_contiguous():
            problems.append(
                f"{name}: {pool.dtype} {list(pool.shape)} given, a contiguous uint8 [any, {item_bytes}] is needed"
            )
    if problems:
        raise ArgumentError("cache pools", problems)
