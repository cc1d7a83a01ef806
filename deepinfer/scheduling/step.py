"""What crosses the border to the worker and back: a scheduled step, what its commit did, and how requests ended.

Shapes: R requests of the step, T new positions of the step, B blocks of its longest table, G history ids.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from deepinfer.scheduling.copies import CopyPair as CopyPair
from deepinfer.scheduling.sequence import Sequence
from deepinfer.scheduling.states import FINISH_REASONS, Status

StepKind = Literal["prefill", "decode", "empty"]
GroupKind = Literal["prefill", "decode"]


@dataclass(slots=True, eq=False)  # not frozen: that would double the cost of its making, and one is made per step
class ScheduledStep:
    """One step of the model: which positions of which requests run, and in which memory.

    The copies come first: the worker executes ``block_copies`` and ``slot_copies`` before anything of this step touches
    the caches. No source is a destination, so their order does not matter. An empty step carries none.

    Attributes:
        number: counts the steps of this scheduler, empty ones included.
        kind: what this rank runs.
        group_kind: what the group runs; an empty step takes part in it with a placeholder.
        sequences: the requests of the rows.
        request_ids: their ids.
        table_row_R: rows of the sequence table, equal to the state slots.
        cached_R, q_R, k_R: positions before this step, new in it, and both together.
        state_slot_R: state slots.
        block_table_RB: block numbers in order of positions, padded with 0.
        is_partial_R: an unfinished prompt chunk, whose sampled token is thrown away.
        epoch_R: the occupation of the row for which this step was made.
        in_flight_R: tokens that the step before gives the request if all its drafts are accepted, where this step was
            planned before that one's result was known; else 0. Where it is not 0, ``cached_R`` and ``k_R`` count all
            of them, the request's ids are not known yet, and the worker puts the truth in their places.
        input_ids_T: the new token ids, row after row; -1 in the place of a draft, or of a token that is in flight,
            whose id the worker knows.
        history_RG: the ids before each row's first new one, nearest first; -1 where there is none or an image, and
            where they are in flight.
        block_copies, slot_copies: for forks.
        round_drafts: drafts of each request that are made behind the step; None for as many as there may be. The engine
            decides it while the step runs.
    """

    number: int
    kind: StepKind
    group_kind: GroupKind
    sequences: abc.Sequence[Sequence]
    request_ids: list[str]
    table_row_R: NDArray[np.int64]
    cached_R: NDArray[np.int32]
    q_R: NDArray[np.int32]
    k_R: NDArray[np.int32]
    state_slot_R: NDArray[np.int32]
    block_table_RB: NDArray[np.int32]
    is_partial_R: NDArray[np.bool_]
    epoch_R: NDArray[np.int64]
    in_flight_R: NDArray[np.int64]
    input_ids_T: NDArray[np.int64]
    history_RG: NDArray[np.int64]
    block_copies: tuple[CopyPair, ...]
    slot_copies: tuple[CopyPair, ...]
    round_drafts: int | None = None

    def hand_out(self, drafts_R: NDArray[np.int64]) -> None:
        """Note how the rows of a step that was planned ahead were really shared out: so many drafts for each request.

        The rows of all requests together stay as many as they are, and the last position of each where it is.
        """
        self.q_R = (drafts_R + 1).astype(np.int32)
        self.cached_R = np.where(self.in_flight_R > 0, self.k_R - self.q_R, self.cached_R)

    @property
    def num_requests(self) -> int:
        """Requests of the step."""
        return len(self.table_row_R)

    @property
    def num_tokens(self) -> int:
        """New positions of the step."""
        return len(self.input_ids_T)


class TerminalRecord(NamedTuple):
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


class StepRecords(abc.Sequence[RowRecord]):
    """The records of a step as three columns; a record is made when somebody reads it."""

    __slots__ = ("_columns",)

    def __init__(self, request_ids: list[str], token_ids: list[int | None], is_finished: list[bool]) -> None:
        """Take the columns, equally long."""
        self._columns = (request_ids, token_ids, is_finished)

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, index: int) -> RowRecord: ...

    @overload
    def __getitem__(self, index: slice) -> StepRecords: ...

    def __getitem__(self, index: int | slice) -> RowRecord | StepRecords:
        request_ids, token_ids, is_finished = self._columns
        if isinstance(index, slice):
            return StepRecords(request_ids[index], token_ids[index], is_finished[index])
        return RowRecord(request_ids[index], token_ids[index], is_finished[index])

    def __iter__(self) -> Iterator[RowRecord]:
        return map(RowRecord._make, self.tuples())

    def tuples(self) -> Iterator[tuple[str, int | None, bool]]:
        """Return all records as plain tuples, for callers that read all of them: several times faster."""
        return zip(*self._columns, strict=True)


@dataclass(frozen=True, slots=True, eq=False)
class StepCommit:
    """What a commit did, row by row of its step.

    Attributes:
        token_R: the (last) emitted token, or -1 where nothing was emitted (unfinished chunk, failure, stale row).
        is_emitted_R: whether a token was emitted.
        is_finished_R: whether the request ended in this commit.
        terminals: the records of those that ended, also handed out by ``Scheduler.take_terminals``.
        runs: the emitted tokens of each row, where rows may emit several; else None.
    """

    step: ScheduledStep
    token_R: NDArray[np.int64]
    is_emitted_R: NDArray[np.bool_]
    is_finished_R: NDArray[np.bool_]
    terminals: tuple[TerminalRecord, ...]
    runs: tuple[tuple[int, ...], ...] | None = None

    def records(self) -> StepRecords:
        """Return one record for each emitted token, and for each row that ended without one, in step order."""
        request_ids = self.step.request_ids
        if self.runs is not None:
            return self._records_of_runs(request_ids, self.runs)
        token_ids: list[int | None] = self.token_R.tolist()
        is_finished = self.is_finished_R.tolist()
        if not self.is_emitted_R.all():
            is_told_R = self.is_emitted_R | self.is_finished_R
            emitted = zip(token_ids, self.is_emitted_R.tolist(), strict=True)
            token_ids = [token_id if is_emitted else None for token_id, is_emitted in emitted]
            request_ids = list(compress(request_ids, is_told_R))
            token_ids = list(compress(token_ids, is_told_R))
            is_finished = list(compress(is_finished, is_told_R))
        return StepRecords(request_ids, token_ids, is_finished)

    def _records_of_runs(self, request_ids: list[str], runs: tuple[tuple[int, ...], ...]) -> StepRecords:
        told = [
            (request_id, token_id, is_finished and place + 1 >= len(run))
            for request_id, run, is_finished in zip(request_ids, runs, self.is_finished_R.tolist(), strict=True)
            for place, token_id in enumerate(run or ((None,) if is_finished else ()))
        ]
        return StepRecords([row[0] for row in told], [row[1] for row in told], [row[2] for row in told])
