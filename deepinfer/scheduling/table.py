"""The numbers of every request that owns memory, as columns: work that grows with the batch is work on arrays.

A row is a state slot: the row number of a request is the number of its state slot, and row 0 belongs to nobody.

Shapes: Z rows (state slots), N blocks of the longest block table, G history ids, W recent tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from deepinfer.scheduling.sequence import Sequence

NO_ROW = 0

_KEPT_OUTPUT_TOKENS = 32
"""Committed tokens that a row keeps before they are handed to its request's list, so that the list grows rarely."""


class SequenceTable:
    """Columns over the rows; whoever changes a column keeps the others true (``memory`` and ``commit`` do)."""

    def __init__(self, num_rows: int, max_blocks: int, history_tokens: int) -> None:
        self.num_rows = num_rows
        self.history_tokens = history_tokens
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
        # Positions handed to a step that the host has not read, and drafts that the next step verifies: both 0
        # until steps are scheduled ahead and drafts exist, but every sum that must hold them does.
        self.in_flight = np.zeros(num_rows, dtype=np.int64)
        self.drafts = np.zeros(num_rows, dtype=np.int64)
        self.eos_token_id = np.full(num_rows, -1, dtype=np.int64)
        self.has_stop_token_ids = np.zeros(num_rows, dtype=np.bool_)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)
        self.block_table_ZN = np.zeros((num_rows, max_blocks), dtype=np.int32)
        # The newest token and the ids before it, nearest first: the input of a decode row and its n-gram history.
        self.recent_ZG = np.full((num_rows, history_tokens + 1), -1, dtype=np.int64)
        self._kept_ZW = np.zeros((num_rows, _KEPT_OUTPUT_TOKENS), dtype=np.int64)
        self._num_kept = np.zeros(num_rows, dtype=np.int64)

    def fill(self, row: int, sequence: Sequence, length_limit: int) -> None:
        """Give ``row`` to ``sequence``, which owns nothing yet and has computed nothing."""
        self.recent_ZG[row] = sequence.history_before(sequence.length, self.history_tokens + 1)
        self.length[row] = sequence.length
        self.length_limit[row] = length_limit
        self.num_prompt_tokens[row] = sequence.num_prompt_tokens
        self.arrival[row] = sequence.arrival
        self.root_arrival[row] = sequence.root_arrival
        rules = sequence.stop_rules
        self.eos_token_id[row] = -1 if rules.eos_token_id is None or rules.ignore_eos else rules.eos_token_id
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
        for column in (self.num_blocks, self.length, self.computed, self.in_flight, self.drafts, self._num_kept):
            column[row] = 0

    def blocks_of(self, row: int) -> NDArray[np.int32]:
        """Return a view of the block numbers of ``row``."""
        return self.block_table_ZN[row, : self.num_blocks[row]]

    def add_blocks(self, row: int, blocks: NDArray[np.int32]) -> None:
        """Append ``blocks`` to the table of ``row``."""
        first = int(self.num_blocks[row])
        self.block_table_ZN[row, first : first + len(blocks)] = blocks
        self.num_blocks[row] = first + len(blocks)

    def append_tokens(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Append one committed token to each of ``rows``, no row twice."""
        recent = self.recent_ZG[rows]
        recent[:, 1:] = recent[:, :-1]
        recent[:, 0] = tokens
        self.recent_ZG[rows] = recent
        self.length[rows] += 1
        kept = self._num_kept[rows]
        self._kept_ZW[rows, kept] = tokens
        kept += 1
        self._num_kept[rows] = kept
        for row in rows[kept == _KEPT_OUTPUT_TOKENS].tolist():
            self.occupant[row].receive_drained(self.drain_tokens(row))

    def drain_tokens(self, row: int) -> list[int]:
        """Hand out the committed tokens of ``row`` that its request has not taken over yet."""
        kept: list[int] = self._kept_ZW[row, : self._num_kept[row]].tolist()
        self._num_kept[row] = 0
        return kept

    def sequences_of(self, rows: NDArray[np.int64]) -> tuple[Sequence, ...]:
        """Return the occupants of ``rows``, in order."""
        return tuple(self.occupant[rows].tolist())
