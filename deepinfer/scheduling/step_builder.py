"""Writes a selection of rows or chunks into the arrays of a step.

Shapes: R requests of the step, T new positions of the step, B blocks of its longest table, G history ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.scheduling.admission import Chunk
from deepinfer.scheduling.memory import Memory
from deepinfer.scheduling.step import GroupKind, ScheduledStep, StepKind
from deepinfer.scheduling.table import StepColumns


class StepBuilder:
    """Numbers the steps and fills their arrays from the sequence table."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._num_steps = 0

    def decode_step(self, rows_R: NDArray[np.int64]) -> ScheduledStep:
        """Return the step in which each of ``rows_R`` computes its newest token."""
        columns = self._memory.table.step_columns(rows_R)
        return self._step(
            "decode",
            rows_R,
            columns,
            q_R=np.ones(len(rows_R), dtype=np.int32),
            is_partial_R=np.zeros(len(rows_R), dtype=np.bool_),
            input_ids_T=columns.newest_GR[0],
            history_RG=np.ascontiguousarray(columns.newest_GR[1:].T),
        )

    def prompt_step(self, chunks: list[Chunk]) -> ScheduledStep:
        """Return the step that computes ``chunks``, which own their memory."""
        num_history = self._memory.table.history_tokens
        rows_R = np.array([chunk.sequence.row for chunk in chunks], dtype=np.int64)
        columns = self._memory.table.step_columns(rows_R)
        ids = []
        history = []
        for (sequence, num_tokens, _), start in zip(chunks, columns.computed.tolist(), strict=True):
            ids.append(sequence.token_ids(start, start + num_tokens))
            history.append(sequence.history_before(start, num_history))
        return self._step(
            "prefill",
            rows_R,
            columns,
            q_R=np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32),
            is_partial_R=np.array([chunk.is_partial for chunk in chunks], dtype=np.bool_),
            input_ids_T=np.concatenate(ids),
            history_RG=np.stack(history),
        )

    def empty_step(self, group_kind: GroupKind) -> ScheduledStep:
        """Return a step without rows; pending copies stay pending, because nothing is written meanwhile."""
        self._num_steps += 1
        nothing = np.empty(0, dtype=np.int64)
        nothing_int32 = np.empty(0, dtype=np.int32)
        return ScheduledStep(
            number=self._num_steps,
            kind="empty",
            group_kind=group_kind,
            sequences=(),
            table_row_R=nothing,
            cached_R=nothing_int32,
            q_R=nothing_int32,
            k_R=nothing_int32,
            state_slot_R=nothing_int32,
            block_table_RB=np.empty((0, 0), dtype=np.int32),
            is_partial_R=np.empty(0, dtype=np.bool_),
            epoch_R=nothing,
            input_ids_T=nothing,
            history_RG=np.empty((0, self._memory.table.history_tokens), dtype=np.int64),
            block_copies=(),
            slot_copies=(),
        )

    def _step(
        self,
        kind: StepKind,
        rows_R: NDArray[np.int64],
        columns: StepColumns,
        *,
        q_R: NDArray[np.int32],
        is_partial_R: NDArray[np.bool_],
        input_ids_T: NDArray[np.int64],
        history_RG: NDArray[np.int64],
    ) -> ScheduledStep:
        self._num_steps += 1
        table = self._memory.table
        cached_R = columns.computed.astype(np.int32)
        longest = int(columns.num_blocks.max())
        block_copies, slot_copies = self._memory.take_copies()
        return ScheduledStep(
            number=self._num_steps,
            kind=kind,
            group_kind="prefill" if kind == "prefill" else "decode",
            sequences=table.sequences_of(rows_R),
            table_row_R=rows_R,
            cached_R=cached_R,
            q_R=q_R,
            k_R=cached_R + q_R,
            state_slot_R=rows_R.astype(np.int32),
            block_table_RB=table.block_table_ZN[:, :longest].take(rows_R, axis=0),
            is_partial_R=is_partial_R,
            epoch_R=columns.epoch,
            input_ids_T=input_ids_T,
            history_RG=history_RG,
            block_copies=block_copies,
            slot_copies=slot_copies,
        )
