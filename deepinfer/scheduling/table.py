"""The numbers of every request that owns memory, as columns: work that grows with the batch is work on arrays.

A row is a state slot: the row number of a request is the number of its state slot, and row 0 belongs to nobody.
All numbers lie in one matrix, so that what a step needs of its rows is gathered in one call: at small batches the
number of array calls is the cost, and ``take`` is several times cheaper than indexing with an array.

Shapes: C columns, Z rows (state slots), N blocks of the longest block table, W outputs that a row keeps, R rows of a
step, G the newest token and its n-gram history.
"""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.blocks import BlockId

if TYPE_CHECKING:
    from deepinfer.scheduling.sequence import Sequence

NO_ROW = 0
NO_TOKEN = -1

_KEPT_OUTPUTS = 128
"""Committed tokens that a row keeps, a power of two, so that its request's list of outputs grows rarely."""
_COLUMN_MASK = _KEPT_OUTPUTS - 1


class GrowthColumns(NamedTuple):
    """What decides whether rows need another block."""

    length: NDArray[np.int64]
    look_ahead: NDArray[np.int64]
    capacity: NDArray[np.int64]


class StepColumns(NamedTuple):
    """What a step says about its rows; ``newest_GR`` holds the newest token, then the ids before it."""

    computed: NDArray[np.int64]
    num_blocks: NDArray[np.int64]
    epoch: NDArray[np.int64]
    newest_GR: NDArray[np.int64]


class EndColumns(NamedTuple):
    """What decides whether rows end with the token just made."""

    eos_token_id: NDArray[np.int64]
    final_position: NDArray[np.int64]


class SequenceTable:
    """Columns over the rows; ``memory`` and ``commit`` change them and keep them true to each other.

    Attributes:
        look_ahead: positions in flight plus drafts: 0 until steps are planned ahead and drafts exist, but the sum
            that decides how many blocks a row must own holds it.
        capacity: positions that the row's blocks hold.
        epoch: changes whenever the row changes hands, so that a stale result is known by number, never by request id.
        final_position: the position whose token ends the request by length.
    """

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, history_tokens: int) -> None:
        self.history_tokens = history_tokens
        self._block_size = block_size
        self._numbers_CZ = np.zeros((11 + 1 + history_tokens, num_rows), dtype=np.int64)
        (
            self.num_prompt_tokens,
            self.arrival,
            self._minus_root_arrival,
            self.length,
            self.look_ahead,
            self.capacity,
            self.eos_token_id,
            self.final_position,
            self.computed,
            self.num_blocks,
            self.epoch,
            *self._newest_GZ,
        ) = self._numbers_CZ
        # Neighbours, so that what is read together is gathered together.
        self._serving_CZ = self._numbers_CZ[0:4]
        self._order_CZ = self._numbers_CZ[1:4]
        self._growth_CZ = self._numbers_CZ[3:6]
        self._end_CZ = self._numbers_CZ[6:8]
        self._step_CZ = self._numbers_CZ[8:]
        self.occupant: NDArray[Any] = np.full(num_rows, None, dtype=object)
        self.is_running = np.zeros(num_rows, dtype=np.bool_)
        self.block_table_ZN = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self.num_with_stop_token_ids = 0
        # The output at position p lies in column p % W until it is drained.
        self._outputs_ZW = np.zeros((num_rows, _KEPT_OUTPUTS), dtype=np.int64)
        self._num_drained = np.zeros(num_rows, dtype=np.int64)

    def fill(self, row: int, sequence: Sequence, length_limit: int) -> None:
        """Give ``row`` to ``sequence``, which owns nothing yet and has computed nothing."""
        length = sequence.length
        rules = sequence.stop_rules
        self.length[row] = length
        self.final_position[row] = length_limit - 1
        self.num_prompt_tokens[row] = sequence.num_prompt_tokens
        self.arrival[row] = sequence.arrival
        self._minus_root_arrival[row] = -sequence.root_arrival
        self.eos_token_id[row] = NO_TOKEN if rules.eos_token_id is None or rules.ignore_eos else rules.eos_token_id
        self.num_with_stop_token_ids += bool(rules.stop_token_ids)
        self.epoch[row] += 1
        newest_G = sequence.history_before(length, self.history_tokens + 1).tolist()
        for newest_Z, token_id in zip(self._newest_GZ, newest_G, strict=True):
            newest_Z[row] = token_id
        self._num_drained[row] = length
        self.occupant[row] = sequence
        sequence.occupy(self, row)

    def empty(self, row: int) -> None:
        """Take ``row`` from its occupant; its blocks must have been given back."""
        sequence: Sequence = self.occupant[row]
        sequence.vacate()
        self.num_with_stop_token_ids -= bool(sequence.stop_rules.stop_token_ids)
        self.occupant[row] = None
        self.epoch[row] += 1
        self.is_running[row] = False
        self.block_table_ZN[row, : self.num_blocks[row]] = 0
        for column in (self.num_blocks, self.capacity, self.length, self.computed, self.look_ahead):
            column[row] = 0

    def blocks_of(self, row: int) -> list[BlockId]:
        """Return the block numbers of ``row``, in order of positions."""
        blocks: list[BlockId] = self.block_table_ZN[row, : self.num_blocks[row]].tolist()
        return blocks

    def add_blocks(self, row: int, blocks: abc.Sequence[BlockId]) -> None:
        """Append ``blocks`` to the table of ``row``."""
        first = int(self.num_blocks[row])
        self.block_table_ZN[row, first : first + len(blocks)] = blocks
        self.num_blocks[row] = first + len(blocks)
        self.capacity[row] = (first + len(blocks)) * self._block_size

    def add_one_block_each(self, rows_R: NDArray[np.int64], blocks: abc.Sequence[BlockId]) -> None:
        """Append one of ``blocks`` to the table of each of ``rows_R``, no row twice."""
        num_blocks_R = self.num_blocks.take(rows_R)
        self.block_table_ZN[rows_R, num_blocks_R] = blocks
        num_blocks_R += 1
        self.num_blocks[rows_R] = num_blocks_R
        self.capacity[rows_R] = num_blocks_R * self._block_size

    def append_tokens(
        self, rows_R: NDArray[np.int64], positions_R: NDArray[np.int64], tokens_R: NDArray[np.int64]
    ) -> None:
        """Append one committed token, at its position, to each of ``rows_R``, no row twice."""
        newest_GZ = self._newest_GZ
        for nth in range(self.history_tokens, 0, -1):
            newest_GZ[nth][rows_R] = newest_GZ[nth - 1].take(rows_R)
        newest_GZ[0][rows_R] = tokens_R
        self.length[rows_R] = positions_R + 1
        column_R = positions_R & _COLUMN_MASK
        self._outputs_ZW[rows_R, column_R] = tokens_R
        # Drained at its last column, before the next token overwrites its first.
        for index in (column_R == _COLUMN_MASK).nonzero()[0].tolist():
            row = int(rows_R[index])
            self.occupant[row].receive_drained(self.drain_tokens(row))

    def drain_tokens(self, row: int) -> list[int]:
        """Hand out the committed tokens of ``row`` that its request has not taken over yet."""
        first, length = int(self._num_drained[row]), int(self.length[row])
        self._num_drained[row] = length
        start, stop = first & _COLUMN_MASK, length & _COLUMN_MASK
        outputs_W = self._outputs_ZW[row]
        tokens: list[int] = []
        if first < length:
            tokens = (
                outputs_W[start:stop].tolist()
                if start < stop
                else outputs_W[start:].tolist() + outputs_W[:stop].tolist()
            )
        return tokens

    def in_step_order(self, rows_R: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``rows_R`` by history length descending, then root arrival ascending, then arrival descending."""
        return rows_R.take(np.lexsort(self._order_CZ.take(rows_R, axis=1))[::-1])

    def serving_order(self, rows_R: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the order in which ``rows_R`` are served: output length ascending, then arrival ascending."""
        num_prompt_tokens, arrival, _, length = self._serving_CZ.take(rows_R, axis=1)
        return np.lexsort((arrival, length - num_prompt_tokens))

    def growth_columns(self, rows_R: NDArray[np.int64]) -> GrowthColumns:
        """Gather what decides whether ``rows_R`` need another block."""
        return GrowthColumns(*self._growth_CZ.take(rows_R, axis=1))

    def step_columns(self, rows_R: NDArray[np.int64]) -> StepColumns:
        """Gather what a step says about ``rows_R``."""
        gathered_CR = self._step_CZ.take(rows_R, axis=1)
        computed, num_blocks, epoch = gathered_CR[:3]
        return StepColumns(computed, num_blocks, epoch, gathered_CR[3:])

    def end_columns(self, rows_R: NDArray[np.int64]) -> EndColumns:
        """Gather what decides whether ``rows_R`` end with the token just made."""
        return EndColumns(*self._end_CZ.take(rows_R, axis=1))

    def sequences_of(self, rows_R: NDArray[np.int64]) -> tuple[Sequence, ...]:
        """Return the occupants of ``rows_R``, in order."""
        return tuple(self.occupant.take(rows_R).tolist())
