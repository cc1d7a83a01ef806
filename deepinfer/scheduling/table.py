"""The numbers of every request that owns memory, as columns: work that grows with the batch is work on arrays.

A row is a state slot: the row number of a request is the number of its state slot, and row 0 belongs to nobody.
All numbers lie in one matrix, so that what a step needs of its rows is gathered in one call: at small batches the
number of array calls is the cost, and ``take`` is several times cheaper than indexing with an array.

Shapes: C columns, Z rows (state slots), N blocks of the longest block table, W tokens that a row keeps, R rows of a
step, G the newest token and its n-gram history, S some of the rows.
"""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.blocks import RESERVED_BLOCK, BlockId

if TYPE_CHECKING:
    from deepinfer.scheduling.sequence import Sequence

NO_ROW = 0
NO_TOKEN = -1
NOT_RUN = -1
"""In the place of a number of drafts: the row is not in the coming step."""

_LEAST_CELLS = 256
"""Cells for the newest tokens of a row, a power of two: its request must take them over when they are full, rarely."""

ZERO, ONE = np.array(0), np.array(1)
"""Arrays and arrays of no dimension go together in half the time of arrays and Python integers."""
ZERO.setflags(write=False)
ONE.setflags(write=False)


class GrowthColumns(NamedTuple):
    """What decides whether rows need another block."""

    length: NDArray[np.int64]
    look_ahead: NDArray[np.int64]
    capacity: NDArray[np.int64]


class StepColumns(NamedTuple):
    """What a step says about its rows."""

    epoch: NDArray[np.int64]
    num_blocks: NDArray[np.int64]
    computed: NDArray[np.int64]


class RunningColumns(NamedTuple):
    """What decode steps read of rows, again and again, until other rows run; ``row`` names the rows themselves."""

    row: NDArray[np.int64]
    length: NDArray[np.int64]
    look_ahead: NDArray[np.int64]
    capacity: NDArray[np.int64]
    drafts: NDArray[np.int64]
    in_flight: NDArray[np.int64]
    eos_token_id: NDArray[np.int64]
    final_position: NDArray[np.int64]
    next_cell: NDArray[np.int64]
    epoch: NDArray[np.int64]
    num_blocks: NDArray[np.int64]


class SequenceTable:
    """Columns over the rows; ``memory`` and ``commit`` change them and keep them true to each other.

    Attributes:
        look_ahead: positions in flight plus drafts that the coming step computes beside the newest token's.
        capacity: positions that the row's blocks hold.
        drafts: how many of the look-ahead are drafts of the coming step, or NOT_RUN.
        in_flight: tokens that the step in flight gives the row if all its drafts are accepted; 0 if it has none there.
        epoch: changes whenever the row changes hands, so that a stale result is known by number, never by request id.
        eos_token_id: the end token that ends the request, or NO_TOKEN.
        has_stop_token_ids: whether there are stop tokens besides the end token; ``num_with_stop_token_ids`` rows have.
        final_position: the position whose token ends the request by length.
        next_cell: where the row's next token goes among ``recent_cells``.
        recent_cells: W cells for each row, filled from the first: the newest tokens, at least those that a decode
            step carries, and all that the row's request has not taken over yet.
    """

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, history_tokens: int) -> None:
        self.history_tokens = history_tokens
        self.block_size = np.array(block_size)
        self._numbers_CZ = np.zeros((15, num_rows), dtype=np.int64)
        (
            self.root_arrival,
            self.num_prompt_tokens,
            self.arrival,
            row_number,
            self.length,
            self.look_ahead,
            self.capacity,
            self.drafts,
            self.in_flight,
            self.eos_token_id,
            self.final_position,
            self.next_cell,
            self.epoch,
            self.num_blocks,
            self.computed,
        ) = self._numbers_CZ
        # Neighbours, so that what is read together is gathered together.
        self._serving_CZ = self._numbers_CZ[1:5]
        self._running_CZ = self._numbers_CZ[3:14]
        self._growth_CZ = self._numbers_CZ[4:7]
        self._end_CZ = self._numbers_CZ[9:11]
        self._step_CZ = self._numbers_CZ[12:15]
        # What an empty row has nothing of.
        self._owned_columns = (*self._numbers_CZ[4:9], self.num_blocks, self.computed)
        row_number[:] = np.arange(num_rows)
        self.occupant: NDArray[Any] = np.full(num_rows, None, dtype=object)
        self.block_table_ZN = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self.num_with_stop_token_ids = 0
        self.has_stop_token_ids = np.zeros(num_rows, dtype=np.bool_)
        self._num_kept = history_tokens + 1
        self._cells_of_row = max(_LEAST_CELLS, 1 << (2 * self._num_kept).bit_length())
        self._cell_mask = np.array(self._cells_of_row - 1)
        self.recent_cells = np.full(num_rows * self._cells_of_row, NO_TOKEN, dtype=np.int64)
        self._first_new_cell = np.zeros(num_rows, dtype=np.int64)
        self._cells_back_G = np.arange(1, self._num_kept + 1, dtype=np.int64)[:, None]

    # --- rows change hands --------------------------------------------------------------------------------------

    def fill(self, row: int, sequence: Sequence, length_limit: int) -> None:
        """Give ``row`` to ``sequence``, which owns nothing yet and has computed nothing."""
        length = sequence.length
        rules = sequence.stop_rules
        self.length[row] = length
        self.final_position[row] = length_limit - 1
        self.num_prompt_tokens[row] = sequence.num_prompt_tokens
        self.arrival[row] = sequence.arrival
        self.root_arrival[row] = sequence.root_arrival
        self.eos_token_id[row] = NO_TOKEN if rules.eos_token_id is None or rules.ignore_eos else rules.eos_token_id
        self.epoch[row] += 1
        self.num_with_stop_token_ids += bool(rules.stop_token_ids)
        self.has_stop_token_ids[row] = bool(rules.stop_token_ids)
        next_cell = row * self._cells_of_row + self._num_kept
        tokens = sequence.tokens_before(length, self._num_kept)
        self.recent_cells[next_cell - self._num_kept : next_cell - len(tokens)] = NO_TOKEN
        self.recent_cells[next_cell - len(tokens) : next_cell] = tokens
        self.next_cell[row] = self._first_new_cell[row] = next_cell
        self.occupant[row] = sequence
        sequence.occupy(self, row)

    def empty(self, row: int) -> NDArray[np.int64]:
        """Take ``row`` from its occupant and return its blocks, from its last to its first."""
        self._turn_out(self.occupant[row])
        table_N = self.block_table_ZN[row, : self.num_blocks[row]]
        blocks: NDArray[np.int64] = table_N[::-1].astype(np.int64)
        table_N.fill(0)
        self._clear(row)
        return blocks

    def empty_many(self, rows_S: NDArray[np.int64]) -> NDArray[np.int64]:
        """Do what ``empty`` does for each of ``rows_S``; return their blocks, each table from its last to its first."""
        for sequence in self.sequences_of(rows_S):
            self._turn_out(sequence)
        width = int(self.num_blocks.take(rows_S).max())
        backwards_SN = self.block_table_ZN[rows_S, :width][:, ::-1]
        blocks: NDArray[np.int64] = backwards_SN[backwards_SN != RESERVED_BLOCK].astype(np.int64)
        self.block_table_ZN[rows_S, :width] = 0
        self._clear(rows_S)
        return blocks

    def _turn_out(self, sequence: Sequence) -> None:
        sequence.vacate()
        self.num_with_stop_token_ids -= bool(sequence.stop_rules.stop_token_ids)

    def _clear(self, rows: int | NDArray[np.int64]) -> None:
        self.has_stop_token_ids[rows] = False
        self.occupant[rows] = None
        self.epoch[rows] += 1
        for column in self._owned_columns:
            column[rows] = 0

    # --- blocks -------------------------------------------------------------------------------------------------

    def blocks_of(self, row: int) -> list[BlockId]:
        """Return the block numbers of ``row``, in order of positions."""
        blocks: list[BlockId] = self.block_table_ZN[row, : self.num_blocks[row]].tolist()
        return blocks

    def add_blocks(self, row: int, blocks: abc.Sequence[BlockId] | NDArray[np.int64]) -> None:
        """Append ``blocks`` to the table of ``row``."""
        first = int(self.num_blocks[row])
        end = first + len(blocks)
        self.block_table_ZN[row, first:end] = blocks
        self.num_blocks[row] = end
        self.capacity[row] = end * int(self.block_size)

    def take_blocks_from(self, row: int, num_kept: int) -> list[BlockId]:
        """Shorten the table of ``row`` to ``num_kept`` blocks and return the others, in order of positions."""
        last = int(self.num_blocks[row])
        taken: list[BlockId] = self.block_table_ZN[row, num_kept:last].tolist()
        self.block_table_ZN[row, num_kept:last] = 0
        self.num_blocks[row] = num_kept
        self.capacity[row] = num_kept * int(self.block_size)
        return taken

    def add_one_block_each(self, rows_R: NDArray[np.int64], blocks: NDArray[np.int64]) -> int:
        """Append one of ``blocks`` to the table of each of ``rows_R``, no row twice; return the longest's length."""
        num_blocks_R = self.num_blocks.take(rows_R)
        self.block_table_ZN[rows_R, num_blocks_R] = blocks
        num_blocks_R += ONE
        self.num_blocks[rows_R] = num_blocks_R
        self.capacity[rows_R] = num_blocks_R * self.block_size
        return int(num_blocks_R[num_blocks_R.argmax()])

    def block_tables(self, rows_R: NDArray[np.int64], width: int) -> NDArray[np.int32]:
        """Return a copy of the first ``width`` block numbers of each of ``rows_R``."""
        tables_ZN = self.block_table_ZN[:, :width]
        # ``take`` is the faster one, but would copy columns of all rows first.
        return tables_ZN.take(rows_R, axis=0) if tables_ZN.flags.c_contiguous else tables_ZN[rows_R]

    # --- tokens -------------------------------------------------------------------------------------------------

    def append_tokens(
        self, rows_R: NDArray[np.int64], positions_R: NDArray[np.int64], tokens_R: NDArray[np.int64]
    ) -> None:
        """Append one committed token, at its position, to each of ``rows_R``, no row twice."""
        self.append_to_cells(rows_R, self.next_cell.take(rows_R), positions_R, positions_R + ONE, tokens_R)

    def append_runs(self, rows_R: NDArray[np.int64], runs: abc.Sequence[abc.Sequence[int]]) -> None:
        """Append the committed tokens of each run, in order, to its row; whoever gets one is computed up to it."""
        for place in range(max(map(len, runs), default=0)):
            numbers = [number for number, run in enumerate(runs) if len(run) > place]
            rows_S = rows_R.take(numbers)
            tokens_S = np.array([runs[number][place] for number in numbers], dtype=np.int64)
            self.append_tokens(rows_S, self.length.take(rows_S), tokens_S)

    def append_to_cells(
        self,
        rows_R: NDArray[np.int64],
        cells_R: NDArray[np.int64],
        positions_R: NDArray[np.int64],
        next_positions_R: NDArray[np.int64],
        tokens_R: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Do what ``append_tokens`` does for rows whose next cells are known, and return the cells after those.

        Whoever gets a token has computed every position before it.
        """
        self.computed[rows_R] = positions_R
        self.length[rows_R] = next_positions_R
        self.recent_cells[cells_R] = tokens_R
        next_cells_R: NDArray[np.int64] = cells_R + ONE
        self.next_cell[rows_R] = next_cells_R
        for index in (next_cells_R & self._cell_mask == ZERO).nonzero()[0].tolist():
            next_cells_R[index] = self._make_room(int(rows_R[index]))
        return next_cells_R

    def newest_tokens(self, next_cells_R: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the newest token of rows with these next cells and the ids before it, [G, R], nearest first."""
        return self.recent_cells.take(next_cells_R - self._cells_back_G)

    def drain_tokens(self, row: int) -> list[int]:
        """Hand out the committed tokens of ``row`` that its request has not taken over yet."""
        next_cell = self.next_cell[row]
        tokens: list[int] = self.recent_cells[self._first_new_cell[row] : next_cell].tolist()
        self._first_new_cell[row] = next_cell
        return tokens

    def _make_room(self, row: int) -> int:
        """Let the request take over the tokens of its full row, move the kept ones to the front, return the next."""
        self.occupant[row].receive_drained(self.drain_tokens(row))
        first, end = row * self._cells_of_row, (row + 1) * self._cells_of_row
        next_cell = first + self._num_kept
        self.recent_cells[first:next_cell] = self.recent_cells[end - self._num_kept : end]
        self.next_cell[row] = self._first_new_cell[row] = next_cell
        return next_cell

    # --- what is read together ----------------------------------------------------------------------------------

    def running_columns(self, rows_R: NDArray[np.int64]) -> RunningColumns:
        """Gather, read-only, what decode steps read of ``rows_R``."""
        gathered_CR = self._running_CZ.take(rows_R, axis=1)
        gathered_CR.setflags(write=False)
        return RunningColumns(*gathered_CR)

    def serving_order(self, rows_R: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the order in which ``rows_R`` are served: output length ascending, then arrival ascending."""
        num_prompt_tokens, arrival, _, length = self._serving_CZ.take(rows_R, axis=1)
        return np.lexsort((arrival, length - num_prompt_tokens))

    def growth_columns(self, rows_R: NDArray[np.int64]) -> GrowthColumns:
        """Gather what decides whether ``rows_R`` need another block."""
        return GrowthColumns(*self._growth_CZ.take(rows_R, axis=1))

    def step_columns(self, rows_R: NDArray[np.int64]) -> StepColumns:
        """Gather what a prompt step says about ``rows_R``."""
        return StepColumns(*self._step_CZ.take(rows_R, axis=1))

    def end_columns(self, rows_R: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Gather the end tokens and final positions of ``rows_R``."""
        eos_token_id_R, final_position_R = self._end_CZ.take(rows_R, axis=1)
        return eos_token_id_R, final_position_R

    def sequences_of(self, rows_R: NDArray[np.int64]) -> tuple[Sequence, ...]:
        """Return the occupants of ``rows_R``, in order."""
        return tuple(self.occupant.take(rows_R).tolist())
