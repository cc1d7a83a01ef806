"""A fixed loop over numpy arrays that does the least a decode step can do: the yardstick beside `bench core`.

It has no queues, no preemption, no epochs and no errors. It never changes, so that the ratio to it can be compared
between machines and between commits.

Legend: R rows, N blocks of a table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class ReferenceLoop:
    """Rows of lengths, limits and block tables; a row whose request ends is given to the next at once."""

    def __init__(
        self, running: int, *, block_size: int, prompt_tokens: int, life_tokens: int, end_token_id: int
    ) -> None:
        self._block_size = block_size
        self._prompt_tokens = prompt_tokens
        self._life_tokens = life_tokens
        self._end_token_id = end_token_id
        most_blocks = -(-(prompt_tokens + block_size + life_tokens) // block_size) + 1
        self._free = np.arange(1, running * most_blocks + 1, dtype=np.int32)
        self._free_count = len(self._free)
        self._table_RN = np.zeros((running, most_blocks), dtype=np.int32)
        self._block_count_R = np.zeros(running, dtype=np.int64)
        self._length_R = np.zeros(running, dtype=np.int32)
        self._limit_R = np.zeros(running, dtype=np.int32)
        self._ids = [""] * running
        self._admitted = 0
        for row in range(running):
            self._admit(row, 1 + row % life_tokens)

    def step(self, tokens_R: NDArray[np.int64]) -> list[tuple[str, int, bool]]:
        """Commit one token per row and return one record per row."""
        short = (self._length_R >= self._block_count_R * self._block_size).nonzero()[0]
        count_S = self._block_count_R[short]
        self._free_count -= len(short)
        self._table_RN[short, count_S] = self._free[self._free_count : self._free_count + len(short)]
        self._block_count_R[short] = count_S + 1
        self.positions_R = self._length_R.copy()
        self.block_table_RN = self._table_RN[:, : self._block_count_R.max()].copy()
        self._length_R += 1
        self.lengths_R = self._length_R.copy()
        ended_R = (tokens_R == self._end_token_id) | (self._length_R >= self._limit_R)
        records = list(zip(self._ids, tokens_R.tolist(), ended_R.tolist(), strict=True))
        for row in ended_R.nonzero()[0].tolist():
            self._release(row)
            self._admit(row, self._life_tokens)
        return records

    def _admit(self, row: int, life_tokens: int) -> None:
        length = self._prompt_tokens + self._admitted % self._block_size
        count = -(-length // self._block_size)
        self._free_count -= count
        self._table_RN[row, :count] = self._free[self._free_count : self._free_count + count]
        self._block_count_R[row] = count
        self._length_R[row] = length
        self._limit_R[row] = length + life_tokens
        self._ids[row] = str(self._admitted)
        self._admitted += 1

    def _release(self, row: int) -> None:
        count = int(self._block_count_R[row])
        self._free[self._free_count : self._free_count + count] = self._table_RN[row, :count]
        self._table_RN[row, :count] = 0
        self._free_count += count
