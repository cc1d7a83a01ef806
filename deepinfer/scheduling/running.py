"""The running requests in step order, with what decode steps read of them kept from one step to the next.

The sequence table holds the truth. Decode steps follow each other with nearly the same rows, each one token longer, so
their columns are gathered when other rows run and otherwise moved on by one. No array here is ever changed in place
once a step may have seen it: steps share what has not changed.

Shapes: R running rows, B blocks of the longest table, G history ids.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import abc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.blocks import BlockPool
from deepinfer.scheduling.table import ONE, SequenceTable

if TYPE_CHECKING:
    from deepinfer.scheduling.sequence import Sequence

Array = TypeVar("Array", bound=NDArray[Any])

_OrderKey = tuple[int, int, int]


class RunningBatch:
    """Who runs, and the columns of the next decode step; call ``refresh`` before reading any.

    The order of the rows is the order of a step: history length descending, then arrival ascending. A fork counts as
    arriving with the request it came from, just before it and before its older forks.

    Attributes:
        rows_R: the rows; another array whenever other requests run.
        sequences, request_ids, epoch_R, state_slot_R: whose rows they are, in which occupation.
        length_R: tokens, the newest included; the newest is what the next step computes.
        look_ahead_R: positions in flight and drafts that the next step computes beside the newest token's.
        drafts_R: drafts that the next step verifies, or NOT_RUN.
        in_flight_R: tokens that the step in flight gives if all its drafts are accepted.
        eos_token_id_R, final_position_R: when they end.
        one_R, nothing_R, everything_R: as many ones, falses, trues as there are rows.
    """

    rows_R: NDArray[np.int64]
    sequences: abc.Sequence[Sequence]
    request_ids: list[str]
    epoch_R: NDArray[np.int64]
    state_slot_R: NDArray[np.int32]
    length_R: NDArray[np.int64]
    look_ahead_R: NDArray[np.int64]
    drafts_R: NDArray[np.int64]
    in_flight_R: NDArray[np.int64]
    eos_token_id_R: NDArray[np.int64]
    final_position_R: NDArray[np.int64]
    one_R: NDArray[np.int32]
    nothing_R: NDArray[np.bool_]
    everything_R: NDArray[np.bool_]
    # What its blocks can hold besides what is in flight, where its next token goes, its blocks and the longest table.
    _room_R: NDArray[np.int64]
    _next_cell_R: NDArray[np.int64]
    _block_table_RB: NDArray[np.int32] | None
    _width: int

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        # Four lists in step order. Without drafts all rows that run get one token in each decode step, so the keys,
        # which are the order, count from the decode steps so far and hold as long as a row runs; joining and leaving
        # is a search and the move of a few kilobytes. With drafts they are sorted again after each step.
        self._keys: list[_OrderKey] = []
        self._rows = array("q")
        self._sequences: list[Sequence] = []
        self._request_ids: list[str] = []
        self._key_of_row: dict[int, _OrderKey] = {}
        self._num_decoded = 0
        self._lists_are_shared = False
        self._is_stale = False
        self._make_constants(0)
        self._gather()

    def __len__(self) -> int:
        return len(self._rows)

    # --- who runs -----------------------------------------------------------------------------------------------

    def join(self, sequence: Sequence) -> None:
        """Let the decode steps from the next on serve ``sequence``, which owns a row."""
        key = (self._num_decoded - sequence.length, sequence.root_arrival, -sequence.arrival)
        self._prepare_change()
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._rows.insert(index, sequence.row)
        self._sequences.insert(index, sequence)
        self._request_ids.insert(index, sequence.request_id)
        self._key_of_row[sequence.row] = key

    def leave(self, sequence: Sequence) -> None:
        """Serve ``sequence``, which still owns its row, no longer."""
        self._prepare_change()
        index = bisect_left(self._keys, self._key_of_row.pop(sequence.row))
        del self._keys[index], self._rows[index], self._sequences[index], self._request_ids[index]

    def is_unchanged_since(self, rows_R: NDArray[np.int64]) -> bool:
        """Say whether ``rows_R``, taken from here for a step, still are the running rows, every one of them."""
        return rows_R is self.rows_R and not self._is_stale

    def refresh(self) -> None:
        """Make the columns true."""
        if self._is_stale:
            self._gather()
            self._is_stale = False

    def invalidate(self) -> None:
        """Read the columns again before the next step: the table was changed."""
        self._is_stale = True

    def count_decode_step(self) -> None:
        """Note that all who still run got a token, written into the table."""
        self._num_decoded += 1
        self._is_stale = True

    def problems(self) -> Iterator[str]:
        """Yield where what is kept here contradicts the table; after ``refresh`` it must not."""
        table, rows_R = self._table, self.rows_R
        columns = table.running_columns(rows_R)
        arrivals = (table.root_arrival.take(rows_R).tolist(), table.arrival.take(rows_R).tolist())
        keys = zip(columns.length.tolist(), *arrivals, strict=True)
        true_keys = [(self._num_decoded - length, root, -arrival) for length, root, arrival in keys]
        kept: dict[str, tuple[Any, Any]] = {
            "order": (self._keys, sorted(true_keys)),
            "length": (self.length_R, columns.length),
            "room": (self._room_R, columns.capacity - columns.look_ahead),
            "end token": (self.eos_token_id_R, columns.eos_token_id),
            "final position": (self.final_position_R, columns.final_position),
            "next cell": (self._next_cell_R, columns.next_cell),
            "epoch": (self.epoch_R, columns.epoch),
            "block table": (self.block_table(), table.block_tables(rows_R, int(columns.num_blocks.max(initial=0)))),
        }
        for name, (kept_R, true_R) in kept.items():
            if not np.array_equal(kept_R, true_R):
                yield f"the {name} of running rows {rows_R.tolist()} is kept as {kept_R}, but is {true_R}"
        if tuple(self.sequences) != table.sequences_of(rows_R):
            yield f"running requests {self.request_ids} are not those of rows {rows_R.tolist()}"

    def row_numbers(self) -> NDArray[np.int64]:
        """Return the rows that run, in step order, also before ``refresh``."""
        return np.array(self._rows, dtype=np.int64)

    def sort_again(self) -> None:
        """Note that those who still run got tokens, one of them perhaps more than another: with drafts."""
        self._prepare_change()
        length_of = self._table.length
        self._key_of_row = {
            row: (self._num_decoded - int(length_of[row]), *key[1:]) for row, key in self._key_of_row.items()
        }
        by_key = sorted(zip(self._rows, self._sequences, self._request_ids, strict=True), key=self._key_of)
        self._keys = [self._key_of_row[row] for row, _, _ in by_key]
        self._rows = array("q", [row for row, _, _ in by_key])
        self._sequences = [sequence for _, sequence, _ in by_key]
        self._request_ids = [request_id for _, _, request_id in by_key]

    # --- the next step ------------------------------------------------------------------------------------------

    def short_of_blocks(self) -> NDArray[np.int64]:
        """Return the numbers, in step order, of the rows that do not own every block that the next step may write."""
        is_short_R: NDArray[np.bool_] = self.length_R > self._room_R
        return is_short_R.nonzero()[0]

    def try_growing_by_one_block(self, short: NDArray[np.int64], pool: BlockPool, most_blocks: int) -> bool:
        """Give one block to each row that is short of blocks, in serving order, if that is enough for all of them.

        False, and nothing happens, if not: blocks are missing, a row needs two, or one may come to own more than
        ``most_blocks``.
        """
        table, rows_S = self._table, self.rows_R.take(short)
        room_S = self._room_R.take(short) + table.block_size
        if (
            self._width >= most_blocks
            or not pool.can_allocate(len(short))
            or np.count_nonzero(self.length_R.take(short) > room_S)
        ):
            return False
        rows_S = rows_S.take(table.serving_order(rows_S))
        longest_table = table.add_one_block_each(rows_S, pool.allocate_array(len(short)))
        self._room_R[short] = room_S
        self._width = max(self._width, longest_table)
        self._block_table_RB = None
        return True

    def block_table(self) -> NDArray[np.int32]:
        """Return the block numbers of all rows; the same array until one of them changes."""
        if self._block_table_RB is None:
            self._block_table_RB = _frozen(self._table.block_tables(self.rows_R, self._width))
        return self._block_table_RB

    def newest_tokens(self) -> NDArray[np.int64]:
        """Return the newest token and the ids before it, [G + 1, R], nearest first."""
        return self._table.newest_tokens(self._next_cell_R)

    def move_on(self, tokens_R: NDArray[np.int64]) -> None:
        """Give every row a token; the newest one of each has been computed."""
        next_R = self.length_R + ONE
        self._next_cell_R = self._table.append_to_cells(self.rows_R, self._next_cell_R, self.length_R, next_R, tokens_R)
        self.length_R = next_R
        self._num_decoded += 1

    def _key_of(self, entry: tuple[int, Sequence, str]) -> _OrderKey:
        return self._key_of_row[entry[0]]

    def _prepare_change(self) -> None:
        self._is_stale = True
        if self._lists_are_shared:
            self._sequences, self._request_ids = self._sequences.copy(), self._request_ids.copy()
            self._lists_are_shared = False

    def _gather(self) -> None:
        columns = self._table.running_columns(np.array(self._rows, dtype=np.int64))
        self.rows_R = columns.row
        self.epoch_R = columns.epoch
        self.length_R = columns.length
        self.look_ahead_R = columns.look_ahead
        self.drafts_R = columns.drafts
        self.in_flight_R = columns.in_flight
        self.eos_token_id_R = columns.eos_token_id
        self.final_position_R = columns.final_position
        self._next_cell_R = columns.next_cell
        self.state_slot_R = _frozen(columns.row.astype(np.int32))
        self._room_R = columns.capacity - columns.look_ahead
        self._width = int(columns.num_blocks[columns.num_blocks.argmax()]) if self._rows else 0
        self._block_table_RB = None
        self.sequences = self._sequences
        self.request_ids = self._request_ids
        self._lists_are_shared = True
        if len(self._rows) != len(self.one_R):
            self._make_constants(len(self._rows))

    def _make_constants(self, num_rows: int) -> None:
        self.one_R = _frozen(np.ones(num_rows, dtype=np.int32))
        self.nothing_R = _frozen(np.zeros(num_rows, dtype=np.bool_))
        self.everything_R = _frozen(np.ones(num_rows, dtype=np.bool_))


def _frozen(shared: Array) -> Array:
    """Return an array that steps will share, made read-only."""
    shared.setflags(write=False)
    return shared
