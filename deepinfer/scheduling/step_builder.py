"""Writes a selection of rows or chunks into the arrays of a step.

Shapes: R requests of the step, T new positions of the step, B blocks of its longest table, G history ids.
"""

from __future__ import annotations

from collections import abc
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.scheduling.admission import Chunk
from deepinfer.scheduling.memory import Memory
from deepinfer.scheduling.running import RunningBatch
from deepinfer.scheduling.sequence import Sequence
from deepinfer.scheduling.step import GroupKind, ScheduledStep
from deepinfer.scheduling.table import NO_TOKEN, ONE, ZERO


class _Columns(NamedTuple):
    """The columns of the rows that run."""

    sequences: abc.Sequence[Sequence]
    request_ids: list[str]
    rows_R: NDArray[np.int64]
    epoch_R: NDArray[np.int64]
    state_slot_R: NDArray[np.int32]
    length_R: NDArray[np.int64]
    look_ahead_R: NDArray[np.int64]
    drafts_R: NDArray[np.int64]
    in_flight_R: NDArray[np.int64]
    nothing_R: NDArray[np.bool_]
    block_table_RB: NDArray[np.int32]
    newest_GR: NDArray[np.int64]

    @classmethod
    def of(cls, running: RunningBatch) -> _Columns:
        """Take those of all running rows as they are, or copies without the rows that are not run."""
        every = cls(
            running.sequences,
            running.request_ids,
            running.rows_R,
            running.epoch_R,
            running.state_slot_R,
            running.length_R,
            running.look_ahead_R,
            running.drafts_R,
            running.in_flight_R,
            running.nothing_R,
            running.block_table(),
            running.newest_tokens(),
        )
        numbers = (running.drafts_R >= ZERO).nonzero()[0]
        if len(numbers) == len(running):
            return every
        chosen: list[int] = numbers.tolist()
        return cls(
            [every.sequences[number] for number in chosen],
            [every.request_ids[number] for number in chosen],
            every.rows_R.take(numbers),
            every.epoch_R.take(numbers),
            every.state_slot_R.take(numbers),
            every.length_R.take(numbers),
            every.look_ahead_R.take(numbers),
            every.drafts_R.take(numbers),
            every.in_flight_R.take(numbers),
            every.nothing_R.take(numbers),
            every.block_table_RB.take(numbers, axis=0),
            every.newest_GR.take(numbers, axis=1),
        )


class StepBuilder:
    """Numbers the steps and fills their arrays from the sequence table."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._num_steps = 0

    def decode_step(self, running: RunningBatch) -> ScheduledStep:
        """Return the step in which each running request computes its newest token."""
        self._num_steps += 1
        newest_GR = running.newest_tokens()
        k_R = running.length_R.astype(np.int32)
        block_copies, slot_copies = self._memory.take_copies()
        return ScheduledStep(
            number=self._num_steps,
            kind="decode",
            group_kind="decode",
            sequences=running.sequences,
            request_ids=running.request_ids,
            table_row_R=running.rows_R,
            cached_R=k_R - running.one_R,
            q_R=running.one_R,
            k_R=k_R,
            state_slot_R=running.state_slot_R,
            block_table_RB=running.block_table(),
            is_partial_R=running.nothing_R,
            epoch_R=running.epoch_R,
            in_flight_R=running.in_flight_R,
            input_ids_T=newest_GR[0],
            history_RG=np.ascontiguousarray(newest_GR[1:].T),
            block_copies=block_copies,
            slot_copies=slot_copies,
        )

    def planned_step(self, running: RunningBatch) -> ScheduledStep:
        """Return the step in which each running request computes its newest token and verifies its drafts.

        The ids of drafts lie with whoever drew them, those of tokens in flight with whoever makes them: NO_TOKEN stands
        in their places. Rows that are NOT_RUN are left out.
        """
        run = _Columns.of(running)
        if not len(run.rows_R):
            return self.empty_step("decode")
        self._num_steps += 1
        k_R = (run.length_R + run.look_ahead_R).astype(np.int32)
        q_R = (run.drafts_R + ONE).astype(np.int32)
        flies_R = run.in_flight_R > ZERO
        input_ids_T = np.full(int(q_R.sum()), NO_TOKEN, dtype=np.int64)
        input_ids_T[np.cumsum(q_R) - q_R] = np.where(flies_R, NO_TOKEN, run.newest_GR[0])
        block_copies, slot_copies = self._memory.take_copies()
        return ScheduledStep(
            number=self._num_steps,
            kind="decode",
            group_kind="decode",
            sequences=run.sequences,
            request_ids=run.request_ids,
            table_row_R=run.rows_R,
            cached_R=k_R - q_R,
            q_R=q_R,
            k_R=k_R,
            state_slot_R=run.state_slot_R,
            block_table_RB=run.block_table_RB,
            is_partial_R=run.nothing_R,
            epoch_R=run.epoch_R,
            in_flight_R=run.in_flight_R,
            input_ids_T=input_ids_T,
            history_RG=np.ascontiguousarray(np.where(flies_R, NO_TOKEN, run.newest_GR[1:]).T),
            block_copies=block_copies,
            slot_copies=slot_copies,
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
        self._num_steps += 1
        table = self._memory.table
        q_R = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int32)
        cached_R = columns.computed.astype(np.int32)
        block_copies, slot_copies = self._memory.take_copies()
        return ScheduledStep(
            number=self._num_steps,
            kind="prefill",
            group_kind="prefill",
            sequences=tuple(chunk.sequence for chunk in chunks),
            request_ids=[chunk.sequence.request_id for chunk in chunks],
            table_row_R=rows_R,
            cached_R=cached_R,
            q_R=q_R,
            k_R=cached_R + q_R,
            state_slot_R=rows_R.astype(np.int32),
            block_table_RB=table.block_tables(rows_R, int(columns.num_blocks.max())),
            is_partial_R=np.array([chunk.is_partial for chunk in chunks], dtype=np.bool_),
            epoch_R=columns.epoch,
            in_flight_R=np.zeros(len(rows_R), dtype=np.int64),
            input_ids_T=np.concatenate(ids),
            history_RG=np.stack(history),
            block_copies=block_copies,
            slot_copies=slot_copies,
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
            request_ids=[],
            table_row_R=nothing,
            cached_R=nothing_int32,
            q_R=nothing_int32,
            k_R=nothing_int32,
            state_slot_R=nothing_int32,
            block_table_RB=np.empty((0, 0), dtype=np.int32),
            is_partial_R=np.empty(0, dtype=np.bool_),
            epoch_R=nothing,
            in_flight_R=nothing,
            input_ids_T=nothing,
            history_RG=np.empty((0, self._memory.table.history_tokens), dtype=np.int64),
            block_copies=(),
            slot_copies=(),
        )
