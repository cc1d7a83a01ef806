"""Who owns what: a pool of numbered pieces of memory with reference counts and a first-in-first-out free list.

The same pool serves the blocks of the long-range cache and the state slots. It knows numbers, never bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NewType

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
    Plain lists: a request's table is short, and for short tables they beat arrays by an order of magnitude.
    """

    def __init__(self, num_blocks: int, what: str = "block") -> None:
        """Make a pool of ``num_blocks`` numbers, the reserved number 0 included; ``what`` names one in messages."""
        if num_blocks < 2:
            raise InvariantError(f"a pool needs the reserved {what} 0 and at least one more, got {num_blocks}")
        self._what = what
        self._counts = [0] * num_blocks
        self._free = deque(BlockId(number) for number in range(1, num_blocks))

    @property
    def num_blocks(self) -> int:
        """All numbers, the reserved number 0 included."""
        return len(self._counts)

    @property
    def num_usable(self) -> int:
        """The numbers that can be owned: all but the reserved one."""
        return len(self._counts) - 1

    @property
    def num_free(self) -> int:
        """The numbers that nobody owns."""
        return len(self._free)

    def can_allocate(self, count: int = 1) -> bool:
        """Say whether ``count`` blocks are free."""
        return count <= len(self._free)

    def allocate(self) -> BlockId:
        """Take the head of the free list and own it once."""
        if not self._free:
            raise InvariantError(f"1 {self._what} asked for, 0 free: ask can_allocate first")
        block = self._free.popleft()
        self._counts[block] = 1
        return block

    def allocate_many(self, count: int) -> list[BlockId]:
        """Take ``count`` blocks from the head of the free list, in order, and own each once."""
        if not 0 <= count <= len(self._free):
            raise InvariantError(f"{count} {self._what}s asked for, {len(self._free)} free: ask can_allocate first")
        take = self._free.popleft
        blocks = [take() for _ in range(count)]
        for block in blocks:
            self._counts[block] = 1
        return blocks

    def share(self, block: BlockId) -> None:
        """Add one owner to a block that is owned already."""
        self.share_many((block,))

    def share_many(self, blocks: Sequence[BlockId]) -> None:
        """Add one owner to each of ``blocks``, all owned already."""
        self._refuse_unowned(blocks, "share")
        for block in blocks:
            self._counts[block] += 1

    def free(self, block: BlockId) -> None:
        """Give up one ownership; at count zero the block goes to the tail of the free list."""
        self.free_many((block,))

    def free_many(self, blocks: Sequence[BlockId]) -> None:
        """Give up one ownership of each of ``blocks``, no number twice, returning them in the order given."""
        self._refuse_unowned(blocks, "free")
        counts = self._counts
        for block in blocks:
            counts[block] -= 1
        self._free.extend([block for block in blocks if not counts[block]])

    def free_table(self, table: Sequence[BlockId]) -> None:
        """Give up one ownership of each block of a request's table, from its last block to its first."""
        self.free_many(table[::-1])

    def reference_count(self, block: BlockId) -> int:
        """Return how many owners ``block`` has."""
        return self._counts[block]

    def reference_counts(self) -> list[int]:
        """Return a copy of all reference counts, by block number."""
        return self._counts.copy()

    def free_list(self, first: int | None = None) -> list[BlockId]:
        """Return the free blocks, or the ``first`` so many, in the order in which they will be handed out."""
        return list(islice(self._free, first))

    def check_invariants(self) -> None:
        """Raise InvariantError unless each block is either free, once, or owned, and number 0 is neither."""
        problems = []
        free = set(self._free)
        if len(free) != len(self._free):
            problems.append("a number is in the free list twice")
        if strays := [block for block in free if not 0 < block < self.num_blocks]:
            problems.append(f"the free list holds numbers that must never be handed out: {sorted(strays)}")
        if negative := [block for block, count in enumerate(self._counts) if count < 0]:
            problems.append(f"negative reference counts at {negative}")
        if self._counts[RESERVED_BLOCK]:
            problems.append("the reserved number 0 is owned")
        owned = {block for block, count in enumerate(self._counts) if count > 0}
        if both := owned & free:
            problems.append(f"free and owned at once: {sorted(both)}")
        if lost := set(range(1, self.num_blocks)) - owned - free:
            problems.append(f"neither free nor owned: {sorted(lost)}")
        if problems:
            raise InvariantError(f"pool of {self._what}s: " + "; ".join(problems))

    def _refuse_unowned(self, blocks: Sequence[BlockId], act: str) -> None:
        counts = self._counts
        if unowned := [block for block in blocks if not 0 < block < len(counts) or counts[block] <= 0]:
            raise InvariantError(f"cannot {act} {self._what}s {unowned}: nobody owns them")
