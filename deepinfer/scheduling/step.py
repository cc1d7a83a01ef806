"""What crosses the border to the worker and back: a scheduled step, what its commit did, and how requests ended.

Shapes: R requests of the step, T new positions of the step, B blocks of its longest table, G history ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.scheduling.copies import CopyPair as CopyPair
from deepinfer.scheduling.sequence import Sequence
from deepinfer.scheduling.states import FINISH_REASONS, Status

StepKind = Literal["prefill", "decode", "empty"]
GroupKind = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledStep:
    """One step of the model: which positions of which requests run, and in which memory.

    The copies come first: the worker executes ``block_copies`` and ``slot_copies`` before anything of this step touches
    the caches. No source is a destination, so their order does not matter. An empty step carries none.

    Attributes:
        number: counts the steps of this scheduler, empty ones included.
        kind: what this rank runs.
        group_kind: what the group runs; an empty step takes part in it with a placeholder.
        sequences: the requests of the rows.
        table_row_R: rows of the sequence table, equal to the state slots.
        cached_R, q_R, k_R: positions before this step, new in it, and both together.
        state_slot_R: state slots.
        block_table_RB: block numbers in order of positions, padded with 0.
        is_partial_R: an unfinished prompt chunk, whose sampled token is thrown away.
        epoch_R: the occupation of the row for which this step was made.
        input_ids_T: the new token ids, row after row.
        history_RG: the ids before each row's first new one, nearest first; -1 where there is none or an image.
        block_copies, slot_copies: for forks.
    """

    number: int
    kind: StepKind
    group_kind: GroupKind
    sequences: tuple[Sequence, ...]
    table_row_R: NDArray[np.int64]
    cached_R: NDArray[np.int32]
    q_R: NDArray[np.int32]
    k_R: NDArray[np.int32]
    state_slot_R: NDArray[np.int32]
    block_table_RB: NDArray[np.int32]
    is_partial_R: NDArray[np.bool_]
    epoch_R: NDArray[np.int64]
    input_ids_T: NDArray[np.int64]
    history_RG: NDArray[np.int64]
    block_copies: tuple[CopyPair, ...]
    slot_copies: tuple[CopyPair, ...]

    @property
    def num_requests(self) -> int:
        """Requests of the step."""
        return len(self.table_row_R)

    @property
    def num_tokens(self) -> int:
        """New positions of the step."""
        return len(self.input_ids_T)


@dataclass(frozen=True, slots=True)
class TerminalRecord:
    """How a request ended; exactly one for every request that was ever added or forked here.

    Attributes:
        finish_reason: the user's word for ``status``.
        stop_reason: the stop token id or stop string that ended it; None for the end token and every other end.
        text: why, where the status alone does not say it.
    """

    request_id: str
    status: Status
    stop_reason: int | str | None
    text: str
    num_prompt_tokens: int
    output_token_ids: tuple[int, ...]
    preemptions: int

    @property
    def finish_reason(self) -> str:
        """The word that the request's output carries."""
        return FINISH_REASONS[self.status]


class RowRecord(NamedTuple):
    """What one row of a step gave its request."""

    request_id: str
    token_id: int | None
    is_finished: bool


@dataclass(frozen=True, slots=True, eq=False)
class StepCommit:
    """What a commit did, row by row of its step.

    Attributes:
        token_R: the emitted token, or -1 where nothing was emitted (unfinished chunk, failure, stale row).
        is_emitted_R: whether a token was emitted.
        is_finished_R: whether the request ended in this commit.
        terminals: the records of those that ended, also handed out by ``Scheduler.take_terminals``.
    """

    step: ScheduledStep
    token_R: NDArray[np.int64]
    is_emitted_R: NDArray[np.bool_]
    is_finished_R: NDArray[np.bool_]
    terminals: tuple[TerminalRecord, ...]

    def records(self) -> list[RowRecord]:
        """Return one record for each row that emitted a token or ended, in the order of the step."""
        request_ids = [sequence.request_id for sequence in self.step.sequences]
        token_ids: list[int | None] = self.token_R.tolist()
        rows = zip(request_ids, token_ids, self.is_finished_R.tolist(), strict=True)
        # tuple.__new__ skips the generated constructor, which would cost more than the rest of the commit.
        records: list[RowRecord] = list(map(tuple.__new__, repeat(RowRecord), rows))
        if np.count_nonzero(self.is_emitted_R) == len(records):
            return records
        return [
            record if is_emitted else record._replace(token_id=None)
            for record, is_emitted in zip(records, self.is_emitted_R.tolist(), strict=True)
            if is_emitted or record.is_finished
        ]
