"""Who owns what: a pool of numbered pieces of memory with reference counts and a first-in-first-out free list.

The same pool serves the blocks of the long-range cache and the state slots. It knows numbers, never bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InvariantError

BlockId = NewType("BlockId", int)

RESERVED_BLOCK = BlockId(0)
"""Never handed out: 0 in a block table, or as a state slot, means empty."""

_ONE = np.array(1)
"""Compared with arrays in half the time of Python's 1."""
_ONE.setflags(write=False)


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
    Arrays: the blocks of all requests that end in a step go back in a few calls, and table rows are arrays too.
    """

    def __init__(self, num_blocks: int, what: str = "block") -> None:
        """Make a pool of ``num_blocks`` numbers, the reserved number 0 included; ``what`` names one in messages."""
        if num_blocks < 2:
            raise InvariantError(f"a pool needs the reserved {what} 0 and at least one more, got {num_blocks}")
        self._what = what
        # One place more than there are numbers: what is too large is looked up there, and is owned by nobody.
        self._counts = np.zeros(num_blocks + 1, dtype=np.int64)
        # The free list lies between head and tail, and moves to the front when its tail meets the end.
        self._free = np.empty(2 * num_blocks, dtype=np.int64)
        self._free[: num_blocks - 1] = np.arange(1, num_blocks)
        self._head, self._tail = 0, num_blocks - 1

    @property
    def num_blocks(self) -> int:
        """All numbers, the reserved number 0 included."""
        return len(self._counts) - 1

    @property
    def num_usable(self) -> int:
        """The numbers that can be owned: all but the reserved one."""
        return len(self._counts) - 2

    @property
    def num_free(self) -> int:
        """The numbers that nobody owns."""
        return self._tail - self._head

    def can_allocate(self, count: int = 1) -> bool:
        """Say whether ``count`` blocks are free."""
        return count <= self._tail - self._head

    def allocate(self) -> BlockId:
        """Take the head of the free list and own it once."""
        self._refuse_too_many(1)
        block = BlockId(int(self._free[self._head]))
        self._head += 1
        self._counts[block] = 1
        return block

    def allocate_many(self, count: int) -> list[BlockId]:
        """Take ``count`` blocks from the head of the free list, in order, and own each once."""
        blocks: list[BlockId] = self.allocate_array(count).tolist()
        return blocks

    def allocate_array(self, count: int) -> NDArray[np.int64]:
        """Do what ``allocate_many`` does, for callers that write the numbers into an array."""
        self._refuse_too_many(count)
        blocks = self._free[self._head : self._head + count].copy()
        self._head += count
        self._counts[blocks] = 1
        return blocks

    def share(self, block: BlockId) -> None:
        """Add one owner to a block that is owned already."""
        self.share_many((block,))

    def share_many(self, blocks: Sequence[BlockId]) -> None:
        """Add one owner to each of ``blocks``, all owned already."""
        self._refuse_unowned(blocks, "share")
        np.add.at(self._counts, np.asarray(blocks, dtype=np.int64), 1)

    def free(self, block: BlockId) -> None:
        """Give up one ownership; at count zero the block goes to the tail of the free list."""
        num_owners = int(self._counts[block]) if 0 < block < self.num_blocks else 0
        if num_owners <= 0:
            self._refuse_unowned((block,), "free")
        self._counts[block] = num_owners - 1
        if num_owners == 1:
            self._append(1, block)

    def free_many(self, blocks: Sequence[BlockId] | NDArray[np.int64]) -> None:
        """Give up one ownership for each of ``blocks``, returning those that nobody owns any more in the order given.

        No number may stand there more often than it is owned.
        """
        freed = np.asarray(blocks, dtype=np.int64)
        # Clipped, a number that must not be freed leads to 0 or to the place behind the last: nobody owns those.
        is_sole = self._counts.take(freed, mode="clip") == _ONE
        if np.count_nonzero(is_sole) == len(freed):
            self._counts[freed] = 0
            self._append(len(freed), freed)
            return
        shared: list[BlockId] = freed.tolist()
        self._refuse_unowned(shared, "free")
        for block in shared:
            self.free(block)

    def free_table(self, table: Sequence[BlockId]) -> None:
        """Give up one ownership of each block of a request's table, from its last block to its first."""
        self.free_many(table[::-1])

    def reference_count(self, block: BlockId) -> int:
        """Return how many owners ``block`` has."""
        return int(self._counts[block])

    def reference_counts(self) -> list[int]:
        """Return a copy of all reference counts, by block number."""
        counts: list[int] = self._counts[:-1].tolist()
        return counts

    def free_list(self, first: int | None = None) -> list[BlockId]:
        """Return the free blocks, or the ``first`` so many, in the order in which they will be handed out."""
        blocks: list[BlockId] = self._free[self._head : self._tail][:first].tolist()
        return blocks

    def check_invariants(self) -> None:
        """Raise InvariantError unless each block is either free, once, or owned, and number 0 is neither."""
        problems = []
        counts = self.reference_counts()
        free = set(self.free_list())
        if len(free) != self.num_free:
            problems.append("a number is in the free list twice")
        if strays := [block for block in free if not 0 < block < self.num_blocks]:
            problems.append(f"the free list holds numbers that must never be handed out: {sorted(strays)}")
        if negative := [block for block, count in enumerate(counts) if count < 0]:
            problems.append(f"negative reference counts at {negative}")
        if counts[RESERVED_BLOCK]:
            problems.append("the reserved number 0 is owned")
        owned = {block for block, count in enumerate(counts) if count > 0}
        if both := owned & free:
            problems.append(f"free and owned at once: {sorted(both)}")
        if lost := set(range(1, self.num_blocks)) - owned - free:
            problems.append(f"neither free nor owned: {sorted(lost)}")
        if problems:
            raise InvariantError(f"pool of {self._what}s: " + "; ".join(problems))

    def _append(self, count: int, blocks: BlockId | NDArray[np.int64]) -> None:
        if self._tail + count > len(self._free):
            num_free = self.num_free
            self._free[:num_free] = self._free[self._head : self._tail]
            self._head, self._tail = 0, num_free
        self._free[self._tail : self._tail + count] = blocks
        self._tail += count

    def _refuse_too_many(self, count: int) -> None:
        if not 0 <= count <= self.num_free:
            raise InvariantError(f"{count} {self._what}s asked for, {self.num_free} free: ask can_allocate first")

    def _refuse_unowned(self, blocks: Sequence[BlockId], act: str) -> None:
        counts, end = self._counts, self.num_blocks
        if unowned := [block for block in blocks if not 0 < block < end or counts[block] <= 0]:
            raise InvariantError(f"cannot {act} {self._what}s {unowned}: nobody owns them")
