"""The block pool against its rules, and against a plain model of owners under random calls."""

from __future__ import annotations

import os
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.cache.blocks import BlockId, BlockPool, blocks_for
from deepinfer.errors import InvariantError

MAX_EXAMPLES = int(os.environ.get("DEEPINFER_TEST_MACHINE_EXAMPLES", "50"))


def test_a_prompt_of_16389_tokens_needs_129_blocks_with_five_positions_in_the_last() -> None:
    assert blocks_for(16_389, 128) == 129
    assert 16_389 - 128 * 128 == 5


@pytest.mark.parametrize(("length", "expected"), [(16_501, 129), (16_502, 130)])
def test_the_130th_block_is_needed_when_length_in_flight_and_drafts_pass_16512(length: int, expected: int) -> None:
    assert blocks_for(length + 6 + 5, 128) == expected


def test_allocation_takes_the_head_and_a_freed_table_returns_from_its_last_block_to_its_first() -> None:
    pool = BlockPool(6)
    table = pool.allocate_many(3)
    assert table == [1, 2, 3]
    pool.free_table(table)
    assert pool.free_list() == [4, 5, 3, 2, 1]
    assert pool.allocate() == 4


def test_block_zero_is_never_handed_out_and_never_freed() -> None:
    pool = BlockPool(4)
    assert 0 not in pool.allocate_many(3)
    with pytest.raises(InvariantError, match="nobody owns"):
        pool.free(BlockId(0))


def test_a_shared_block_returns_only_when_its_last_owner_frees_it() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.share(block)
    assert pool.reference_count(block) == 2
    pool.free(block)
    assert pool.num_free == 1
    pool.free(block)
    assert pool.free_list() == [2, 1]


def test_can_allocate_asks_and_takes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.can_allocate(3)
    assert not pool.can_allocate(4)
    assert pool.num_free == 3


def test_misuse_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(3, "state slot")
    with pytest.raises(InvariantError, match="3 state slots asked for, 2 free"):
        pool.allocate_many(3)
    for act in (pool.free, pool.share):
        for block in (1, -1, 3):
            with pytest.raises(InvariantError, match="nobody owns"):
                act(BlockId(block))
    assert pool.num_free == 2
    pool.check_invariants()


def test_a_pool_without_a_usable_block_is_refused() -> None:
    with pytest.raises(InvariantError, match="at least one more"):
        BlockPool(1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._append(1, pool._free[pool._head]), "twice"),
        (lambda pool: pool._append(1, BlockId(0)), "never be handed out"),
        (lambda pool: setattr(pool, "_tail", pool._tail - 1), "neither free nor owned"),
        (lambda pool: pool._counts.__setitem__(0, 1), "reserved number 0"),
        (lambda pool: pool._counts.__setitem__(1, -1), "negative"),
        (lambda pool: pool._counts.__setitem__(4, 1), "free and owned"),
    ],
)
def test_every_damage_to_the_books_is_found(damage: object, message: str) -> None:
    pool = BlockPool(5)
    pool.allocate_many(2)
    pool.check_invariants()
    damage(pool)  # type: ignore[operator]
    with pytest.raises(InvariantError, match=message):
        pool.check_invariants()


class PoolMachine(RuleBasedStateMachine):
    """Owners hold lists of blocks; the model is those lists and a queue."""

    SIZE = 9

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE)
        self.free: deque[int] = deque(range(1, self.SIZE))
        self.owners: list[list[BlockId]] = []

    def count(self, block: int) -> int:
        return sum(table.count(BlockId(block)) for table in self.owners)

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        assert self.pool.can_allocate(count) == (count <= len(self.free))
        if count <= len(self.free):
            table = self.pool.allocate_many(count)
            assert table == [self.free.popleft() for _ in range(count)]
            self.owners.append(table)
        else:
            with pytest.raises(InvariantError):
                self.pool.allocate_many(count)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.owners))
        kept = data.draw(st.integers(0, len(table)))
        self.pool.share_many(table[:kept])
        self.owners.append(table[:kept])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.free_table(table)
        self.free.extend(block for block in reversed(table) if not self.count(block))

    @rule(block=st.integers(-2, SIZE + 2))
    def free_what_nobody_owns(self, block: int) -> None:
        if not self.count(block):
            with pytest.raises(InvariantError):
                self.pool.free(BlockId(block))

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_invariants()
        assert self.pool.free_list() == list(self.free)
        for block in range(1, self.SIZE):
            assert self.pool.reference_count(BlockId(block)) == self.count(block)

    def teardown(self) -> None:
        for table in self.owners:
            self.pool.free_table(table)
        assert self.pool.num_free == self.pool.num_usable


PoolMachine.TestCase.settings = settings(max_examples=MAX_EXAMPLES, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
