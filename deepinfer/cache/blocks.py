"""Who owns what: a pool of numbered pieces of memory with reference counts and a first-in-first-out free list.

The same pool serves the blocks of the long-range cache and the state slots. It knows numbers, never bytes.
"""

from __future__ import annotations

from typing import NewType

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InvariantError

BlockId = NewType("BlockId", int)

RESERVED_BLOCK = BlockId(0)
"""Never handed out: 0 in a block table, or as a state slot, means empty."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold ``num_tokens`` positions.

    For a running request ``num_tokens`` is its length plus the positions in flight plus its drafts: every position
    that the coming step may write must lie inside an owned block.
    """
    return -(-num_tokens // block_size)


class BlockPool:
    """Hands out block numbers 1 to ``num_blocks - 1``; a block returns to the free list when its last owner frees it.

    Deterministic: ``allocate`` takes the head of the free list and ``free`` appends to its tail, so the same calls
    give the same numbers. Every call is O(1) in the size of the pool, or O(n) in the number of blocks it names.
    """

    def __init__(self, num_blocks: int, what: str = "block") -> None:
        """Make a pool of ``num_blocks`` numbers, the reserved number 0 included; ``what`` names one in messages."""
        if num_blocks < 2:
            raise InvariantError(f"a pool needs the reserved {what} 0 and at least one more, got {num_blocks}")
        self._what = what
        self._num_blocks = num_blocks
        self._counts = np.zeros(num_blocks, dtype=np.int32)
        # A ring: the free blocks are the `_num_free` entries from `_head` on, in the order in which they go out.
        self._ring = np.arange(1, num_blocks, dtype=np.int32)
        self._head = 0
        self._num_free = num_blocks - 1

    @property
    def num_blocks(self) -> int:
        """All numbers, the reserved number 0 included."""
        return self._num_blocks

    @property
    def num_usable(self) -> int:
        """The numbers that can be owned: all but the reserved one."""
        return self._num_blocks - 1

    @property
    def num_free(self) -> int:
        """The numbers that nobody owns."""
        return self._num_free

    def can_allocate(self, count: int = 1) -> bool:
        """Say whether ``count`` blocks are free."""
        return count <= self._num_free

    def allocate(self) -> BlockId:
        """Take the head of the free list and own it once."""
        return BlockId(int(self.allocate_many(1)[0]))

    def allocate_many(self, count: int) -> NDArray[np.int32]:
        """Take ``count`` blocks from the head of the free list, in order, and own each once."""
        if count > self._num_free:
            raise InvariantError(f"{count} {self._what}s asked for, {self._num_free} free: ask can_allocate first")
        blocks = self._ring.take(np.arange(self._head, self._head + count), mode="wrap")
        self._head = (self._head + count) % self.num_usable
        self._num_free -= count
        self._counts[blocks] = 1
        return blocks

    def share(self, block: BlockId) -> None:
        """Add one owner to a block that is owned already."""
        self.share_many(np.array([block], dtype=np.int32))

    def share_many(self, blocks: NDArray[np.int32]) -> None:
        """Add one owner to each of ``blocks``, no number twice, all owned already."""
        self._refuse_unowned(blocks, "share")
        self._counts[blocks] += 1

    def free(self, block: BlockId) -> None:
        """Give up one ownership; at count zero the block goes to the tail of the free list."""
        self.free_many(np.array([block], dtype=np.int32))

    def free_many(self, blocks: NDArray[np.int32]) -> None:
        """Give up one ownership of each of ``blocks``, no number twice, returning them in the order given."""
        self._refuse_unowned(blocks, "free")
        counts = self._counts[blocks] - 1
        self._counts[blocks] = counts
        returned = blocks[counts == 0]
        tail = self._head + self._num_free
        self._ring[np.arange(tail, tail + len(returned)) % self.num_usable] = returned
        self._num_free += len(returned)

    def free_table(self, table: NDArray[np.int32]) -> None:
        """Give up one ownership of each block of a request's table, from its last block to its first."""
        self.free_many(table[::-1])

    def reference_count(self, block: BlockId) -> int:
        """Return how many owners ``block`` has."""
        return int(self._counts[block])

    def free_list(self) -> list[BlockId]:
        """Return the free blocks in the order in which they will be handed out."""
        return [BlockId(block) for block in self._free_ring().tolist()]

    def reference_counts(self) -> NDArray[np.int32]:
        """Return a copy of all reference counts, by block number."""
        return self._counts.copy()

    def check_invariants(self) -> None:
        """Raise InvariantError unless each block is either free, once, or owned, and number 0 is neither."""
        free = self._free_ring()
        problems = []
        if len(np.unique(free)) != len(free):
            problems.append("a number is in the free list twice")
        if (free <= 0).any() or (free >= self._num_blocks).any():
            problems.append("the free list holds a number that must never be handed out")
        if (self._counts < 0).any():
            problems.append(f"negative reference counts at {np.flatnonzero(self._counts < 0).tolist()}")
        if self._counts[RESERVED_BLOCK] != 0:
            problems.append("the reserved number 0 is owned")
        if (self._counts[free] != 0).any():
            problems.append(f"free and owned at once: {free[self._counts[free] != 0].tolist()}")
        owned = int((self._counts > 0).sum())
        if owned + len(free) != self.num_usable:
            problems.append(f"{owned} owned and {len(free)} free of {self.num_usable} usable")
        if problems:
            raise InvariantError(f"pool of {self._what}s: " + "; ".join(problems))

    def _free_ring(self) -> NDArray[np.int32]:
        return self._ring.take(np.arange(self._head, self._head + self._num_free), mode="wrap")

    def _refuse_unowned(self, blocks: NDArray[np.int32], act: str) -> None:
        unowned = self._counts[blocks] <= 0
        if unowned.any():
            raise InvariantError(f"cannot {act} {self._what}s {blocks[unowned].tolist()}: nobody owns them")
