"""The numbers of every request that owns memory, as columns: work that grows with the batch is work on arrays.

A row is a state slot: the row number of a request is the number of its state slot, and row 0 belongs to nobody.
Columns are read with ``take``, which is several times faster than indexing with an array.

Shapes: Z rows (state slots), N blocks of the longest block table, W outputs that a row keeps, R rows of a step,
G the newest token and its n-gram history.
"""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING, Any

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


class SequenceTable:
    """Columns over the rows; ``memory`` and ``commit`` change them and keep them true to each other."""

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, history_tokens: int) -> None:
        self.history_tokens = history_tokens
        self._block_size = block_size
        self.occupant: NDArray[Any] = np.full(num_rows, None, dtype=object)
        # Changes whenever a row changes hands, so that a stale result is known by number and never by request id.
        self.epoch = np.zeros(num_rows, dtype=np.int64)
        self.is_running = np.zeros(num_rows, dtype=np.bool_)
        self.arrival = np.zeros(num_rows, dtype=np.int64)
        self.root_arrival = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self.length = np.zeros(num_rows, dtype=np.int64)
        self.length_limit = np.zeros(num_rows, dtype=np.int64)
        self.computed = np.zeros(num_rows, dtype=np.int64)
        # Positions in flight plus drafts: 0 until steps are planned ahead and drafts exist, but the sum that decides
        # how many blocks a row must own holds it.
        self.look_ahead = np.zeros(num_rows, dtype=np.int64)
        self.eos_token_id = np.full(num_rows, NO_TOKEN, dtype=np.int64)
        self.has_stop_token_ids = np.zeros(num_rows, dtype=np.bool_)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)
        self.capacity = np.zeros(num_rows, dtype=np.int64)
        self.block_table_ZN = np.zeros((num_rows, max_blocks), dtype=np.int32)
        # The newest token and the ids before it, nearest first; NO_TOKEN where there is none and for an image
        # position, which stops the n-gram memory alike.
        self._newest_GZ = np.full((history_tokens + 1, num_rows), NO_TOKEN, dtype=np.int64)
        # The output at position p lies in column p % W until it is drained.
        self._outputs_ZW = np.zeros((num_rows, _KEPT_OUTPUTS), dtype=np.int64)
        self._num_drained = np.zeros(num_rows, dtype=np.int64)

    def fill(self, row: int, sequence: Sequence, length_limit: int) -> None:
        """Give ``row`` to ``sequence``, which owns nothing yet and has computed nothing."""
        length = sequence.length
        self._newest_GZ[:, row] = sequence.history_before(length, self.history_tokens + 1)
        self._num_drained[row] = length
        self.length[row] = length
        self.length_limit[row] = length_limit
        self.num_prompt_tokens[row] = sequence.num_prompt_tokens
        self.arrival[row] = sequence.arrival
        self.root_arrival[row] = sequence.root_arrival
        rules = sequence.stop_rules
        self.eos_token_id[row] = NO_TOKEN if rules.eos_token_id is None or rules.ignore_eos else rules.eos_token_id
        self.has_stop_token_ids[row] = bool(rules.stop_token_ids)
        self.occupant[row] = sequence
        self.epoch[row] += 1
        sequence.occupy(self, row)

    def empty(self, row: int) -> None:
        """Take ``row`` from its occupant; its blocks must have been given back."""
        self.occupant[row].vacate()
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

    def add_one_block_each(self, rows: NDArray[np.int64], blocks: abc.Sequence[BlockId]) -> None:
        """Append one of ``blocks`` to the table of each of ``rows``, no row twice."""
        num_blocks = self.num_blocks.take(rows)
        self.block_table_ZN[rows, num_blocks] = blocks
        num_blocks += 1
        self.num_blocks[rows] = num_blocks
        self.capacity[rows] = num_blocks * self._block_size

    def append_tokens(
        self, rows_R: NDArray[np.int64], positions_R: NDArray[np.int64], tokens_R: NDArray[np.int64]
    ) -> None:
        """Append one committed token, at its position, to each of ``rows_R``, no row twice."""
        for nth in range(self.history_tokens, 0, -1):
            self._newest_GZ[nth][rows_R] = self._newest_GZ[nth - 1].take(rows_R)
        self._newest_GZ[0][rows_R] = tokens_R
        self.length[rows_R] = positions_R + 1
        column_R = positions_R & _COLUMN_MASK
        self._outputs_ZW[rows_R, column_R] = tokens_R
        # Drained at its last column, before the next token overwrites its first.
        for row in rows_R[column_R == _COLUMN_MASK].tolist():
            self.occupant[row].receive_drained(self.drain_tokens(row))

    def drain_tokens(self, row: int) -> list[int]:
        """Hand out the committed tokens of ``row`` that its request has not taken over yet."""
        positions = np.arange(self._num_drained[row], self.length[row])
        self._num_drained[row] = self.length[row]
        tokens: list[int] = self._outputs_ZW[row, positions & _COLUMN_MASK].tolist()
        return tokens

    def newest_tokens(self, rows_R: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [R, G]: the newest token of each row, then the ids before it, nearest first."""
        newest_RG = np.empty((len(rows_R), self.history_tokens + 1), dtype=np.int64)
        for nth, newest_Z in enumerate(self._newest_GZ):
            newest_RG[:, nth] = newest_Z.take(rows_R)
        return newest_RG

    def sequences_of(self, rows: NDArray[np.int64]) -> tuple[Sequence, ...]:
        """Return the occupants of ``rows``, in order."""
        return tuple(self.occupant.take(rows).tolist())
