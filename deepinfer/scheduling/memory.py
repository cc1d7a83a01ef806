"""What live requests own: blocks, a state slot, a row of the sequence table, and the copies that forks still need.

Everything is taken and given back here, so a request owns either nothing or a whole consistent set.
"""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.blocks import BlockId, BlockPool, blocks_for
from deepinfer.scheduling.config import SchedulerConfig
from deepinfer.scheduling.copies import CopyPair, PendingCopies
from deepinfer.scheduling.flights import Flights
from deepinfer.scheduling.sequence import Sequence
from deepinfer.scheduling.step import ScheduledStep
from deepinfer.scheduling.table import NO_ROW, NOT_RUN, ZERO, SequenceTable

_MANY = 4
"""From so many rows on, emptying them together costs less than one after the other."""


class Shortage(NamedTuple):
    """Running rows that need more blocks for their next step, and how many each.

    Attributes:
        num_blocks: blocks that all the rows together are short of.
        longest: positions that the longest of the rows must hold.
    """

    rows: NDArray[np.int64]
    blocks: NDArray[np.int64]
    num_blocks: int
    longest: int


class Memory:
    """The two pools of one rank and the table of what was given to whom."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.blocks = BlockPool(config.num_blocks, "block")
        self.slots = BlockPool(config.num_state_slots, "state slot")
        self.table = SequenceTable(
            config.num_state_slots, config.max_table_blocks, config.block_size, config.history_tokens
        )
        self.block_copies = PendingCopies(self.blocks)
        self.slot_copies = PendingCopies(self.slots)
        self.flights = Flights(self.blocks, self.slots, defers=config.async_scheduling)

    def blocks_of_whole(self, sequence: Sequence) -> int:
        """Return the blocks that hold every position of ``sequence``."""
        return blocks_for(sequence.length, self._config.block_size)

    def can_reserve(self, sequence: Sequence) -> bool:
        """Say whether ``reserve`` would succeed."""
        missing = self.blocks_of_whole(sequence) - sequence.num_blocks
        has_slot = sequence.row != NO_ROW or self.slots.can_allocate()
        return has_slot and self.blocks.can_allocate(max(missing, 0))

    def reserve(self, sequence: Sequence) -> None:
        """Give ``sequence`` a state slot and all blocks of its length, as far as it does not own them."""
        missing = self.blocks_of_whole(sequence) - sequence.num_blocks
        if sequence.row == NO_ROW:
            row = self.slots.allocate()
            self.table.fill(row, sequence, sequence.token_limit(self._config.max_model_len))
        if missing > 0:
            self.table.add_blocks(sequence.row, self.blocks.allocate_array(missing))

    def release(self, sequence: Sequence) -> None:
        """Take back everything that ``sequence`` owns, its blocks from the last to the first; harmless if nothing.

        What a launched step may still touch becomes free when that step has completed.
        """
        row = sequence.row
        if row == NO_ROW:
            return
        if self.block_copies:
            self.block_copies.drop(self.table.blocks_of(row))
        if self.slot_copies:
            self.slot_copies.drop([row])
        self.flights.give_back(self.table.empty(row), [BlockId(row)])

    def release_many(self, sequences: abc.Sequence[Sequence]) -> None:
        """Do what ``release`` does for each of ``sequences``, in order."""
        rows = [BlockId(sequence.row) for sequence in sequences if sequence.row != NO_ROW]
        if len(rows) < _MANY or self.block_copies or self.slot_copies:
            for sequence in sequences:
                self.release(sequence)
            return
        self.flights.give_back(self.table.empty_many(np.array(rows, dtype=np.int64)), rows)

    def shortage(self, rows: NDArray[np.int64]) -> Shortage:
        """Return which of ``rows`` do not own every block that their next decode step may write."""
        length, look_ahead, capacity = self.table.growth_columns(rows)
        planned = length + look_ahead
        short = (planned > capacity).nonzero()[0]
        planned = planned.take(short)
        missing = planned - capacity.take(short)
        blocks = (missing + (self._config.block_size - 1)) // self._config.block_size
        return Shortage(rows.take(short), blocks, sum(blocks.tolist()), max(planned.tolist(), default=0))

    def grow(self, shortage: Shortage) -> None:
        """Give each row the blocks that it is short of: the shortest output first, the earliest among equals."""
        order = self.table.serving_order(shortage.rows)
        rows, blocks = shortage.rows.take(order), shortage.blocks.take(order)
        if shortage.num_blocks == len(rows):
            self.table.add_one_block_each(rows, self.blocks.allocate_array(shortage.num_blocks))
            return
        for row, count in zip(rows.tolist(), blocks.tolist(), strict=True):
            self.table.add_blocks(row, self.blocks.allocate_array(count))

    def look_ahead_to(
        self, rows_R: NDArray[np.int64], drafts: int | NDArray[np.int64], in_flight: ScheduledStep | None = None
    ) -> None:
        """Note what the next step of each row computes beside its newest token, as far as there are positions for it.

        That is so many drafts, and before them what the step ``in_flight`` may add: the newest token may come to stand
        so far back. How many drafts there are goes by the one token that the step in flight gives at least: where more
        are accepted the device drops those that have no position. A row that ends with that one token is not run.
        """
        table, most = self.table, self._config.most_positions
        length_R = table.length.take(rows_R)
        if in_flight is None:
            table.in_flight[rows_R] = 0
            table.look_ahead[rows_R] = table.drafts[rows_R] = np.clip(most - length_R, 0, drafts)
            return
        in_flight_Z = np.zeros_like(table.in_flight)
        is_current_Q = table.epoch.take(in_flight.table_row_R) == in_flight.epoch_R
        in_flight_Z[in_flight.table_row_R[is_current_Q]] = in_flight.q_R[is_current_Q]
        in_flight_R = in_flight_Z.take(rows_R)
        flies_R = in_flight_R > ZERO
        least_R = length_R + flies_R
        is_over_R = flies_R & ((least_R > most) | (length_R >= table.final_position.take(rows_R)))
        drafts_R = np.clip(most - least_R, 0, drafts)
        drafts_R = np.where(is_over_R, NOT_RUN, drafts_R)
        # A row that is not run keeps what the step in flight computes: NOT_RUN is -1.
        beside_R = in_flight_R + np.where(is_over_R, NOT_RUN, drafts)
        table.in_flight[rows_R] = in_flight_R
        table.drafts[rows_R] = drafts_R
        table.look_ahead[rows_R] = np.where(flies_R, np.minimum(beside_R, most - length_R), drafts_R)

    def give_back_surplus(self, rows_R: NDArray[np.int64]) -> None:
        """Take back blocks behind all that the next step of each row computes: the step before was planned longer."""
        length_R, look_ahead_R, capacity_R = self.table.growth_columns(rows_R)
        needed_R = -(-(length_R + look_ahead_R) // self._config.block_size)
        surplus = (needed_R * self._config.block_size < capacity_R).nonzero()[0]
        for row, needed in zip(rows_R.take(surplus).tolist(), needed_R.take(surplus).tolist(), strict=True):
            surplus_blocks = self.table.take_blocks_from(row, needed)[::-1]
            self.flights.give_back(np.array(surplus_blocks, dtype=np.int64), [])

    def give_up_look_ahead(self, rows_R: NDArray[np.int64]) -> None:
        """Take back the blocks that hold drafts alone; what rejected drafts left in them nobody reads."""
        self.table.look_ahead[rows_R] = self.table.drafts[rows_R] = 0
        for row in rows_R.tolist():
            needed = blocks_for(int(self.table.length[row]), self._config.block_size)
            if needed < self.table.num_blocks[row]:
                self.blocks.free_table(self.table.take_blocks_from(row, needed))

    def look_ahead_as_far_as_possible(self, rows_R: NDArray[np.int64], drafts: int | NDArray[np.int64]) -> None:
        """Give free blocks to drafts, in the order of ``rows_R``; no row verifies more than its blocks hold."""
        table, size = self.table, self._config.block_size
        self.look_ahead_to(rows_R, drafts)
        for row in rows_R.tolist():
            length, wanted = int(table.length[row]), int(table.look_ahead[row])
            missing = blocks_for(length + wanted, size) - int(table.num_blocks[row])
            if missing > 0 and (given := min(missing, self.blocks.num_free)):
                table.add_blocks(row, self.blocks.allocate_array(given))
            table.look_ahead[row] = table.drafts[row] = min(wanted, int(table.capacity[row]) - length)

    def try_fork(self, parent: Sequence, child: Sequence) -> bool:
        """Give ``child`` what ``parent`` has computed, or nothing when a block or a state slot for it is not free.

        Full blocks are shared. The half-full last block and the state slot will be written by both, so the child gets
        its own, to be filled by copies before the next step.
        """
        num_shared, num_half_full = divmod(parent.num_tokens, self._config.block_size)
        num_copied = 1 if num_half_full else 0
        if parent.row == NO_ROW or not (self.slots.can_allocate() and self.blocks.can_allocate(num_copied)):
            return False
        row = self.slots.allocate()
        self.table.fill(row, child, child.token_limit(self._config.max_model_len))
        self.table.computed[row] = parent.num_tokens
        self.slot_copies.add(parent.row, row)
        parent_blocks = self.table.blocks_of(parent.row)
        shared = parent_blocks[:num_shared]
        self.blocks.share_many(shared)
        self.table.add_blocks(row, shared)
        if num_copied:
            copied = self.blocks.allocate_many(1)
            self.table.add_blocks(row, copied)
            self.block_copies.add(parent_blocks[num_shared], copied[0])
        return True

    def adopt(self, sequence: Sequence) -> None:
        """Own memory for a request whose state another engine computed: all positions but the newest are ready."""
        self.reserve(sequence)
        self.table.computed[sequence.row] = sequence.length - 1

    def take_copies(self) -> tuple[tuple[CopyPair, ...], tuple[CopyPair, ...]]:
        """Hand out the block and state slot copies that must run before the step that is being scheduled."""
        if self.block_copies or self.slot_copies:
            self.flights.keep_for_next(
                [BlockId(source) for source in self.block_copies.sources],
                [BlockId(source) for source in self.slot_copies.sources],
            )
        return self.block_copies.take(), self.slot_copies.take()
