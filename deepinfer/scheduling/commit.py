"""What becomes of a step's result: progress, new tokens, stop tests, endings.

Shapes: R requests of the step; E rows that emit a token.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import InvariantError
from deepinfer.scheduling.admission import Admission
from deepinfer.scheduling.memory import Memory
from deepinfer.scheduling.roster import Ending, Roster
from deepinfer.scheduling.running import RunningBatch
from deepinfer.scheduling.sequence import Sequence
from deepinfer.scheduling.states import Status
from deepinfer.scheduling.step import ScheduledStep, StepCommit, TerminalRecord
from deepinfer.scheduling.table import NO_TOKEN


class RowFailure(NamedTuple):
    """Why one row of a step has no token: the request ends with this status and text."""

    status: Status
    text: str


class _End(NamedTuple):
    """A row whose token ends its request, and whether it stops it; else the request has its full length."""

    number: int
    token_id: int
    is_stopped: bool


class Commit:
    """Applies results to the requests they were computed for, and to nobody else."""

    def __init__(self, memory: Memory, roster: Roster, admission: Admission) -> None:
        self._memory = memory
        self._roster = roster
        self._admission = admission

    def apply(
        self, step: ScheduledStep, token_ids_R: NDArray[np.int64], failures: Mapping[int, RowFailure]
    ) -> StepCommit:
        """Commit one sampled token per row, except for rows that failed, are unfinished chunks, or changed hands."""
        running = self._roster.running
        if not failures and running.is_unchanged_since(step.table_row_R):
            return self._commit_running(step, token_ids_R, running)
        return self._commit_valid(step, token_ids_R, failures)

    def apply_runs(
        self, step: ScheduledStep, runs: abc.Sequence[abc.Sequence[int]], failures: Mapping[int, RowFailure]
    ) -> StepCommit:
        """Commit the accepted drafts and the sampled token of each row, up to the first that ends its request.

        A request that fails keeps the tokens of its run, and ends behind them unless one of them ends it.
        """
        table = self._memory.table
        is_valid_R = table.epoch.take(step.table_row_R) == step.epoch_R
        is_finished_R = np.zeros(step.num_requests, dtype=np.bool_)
        if step.kind == "prefill":
            valid = is_valid_R.nonzero()[0]
            table.computed[step.table_row_R.take(valid)] = step.k_R.take(valid)
        ends: list[_End] = []
        emitted: list[tuple[int, ...]] = []
        for index, sequence in enumerate(step.sequences):
            run: tuple[int, ...] = ()
            if is_valid_R[index] and not step.is_partial_R[index]:
                run, is_stopped = self._cut(sequence, runs[index])
                if is_stopped is not None:
                    ends.append(_End(index, run[-1], is_stopped=is_stopped))
            emitted.append(run)
        table.append_runs(step.table_row_R, emitted)
        if step.kind == "prefill":
            failed = [index for index in failures if is_valid_R[index]]
            self._place_after_prompt(step, [index for index in is_valid_R.nonzero()[0].tolist() if index not in failed])
        terminals = self._end_all(step, ends, is_finished_R)
        for index in sorted(failures):
            if is_valid_R[index] and not is_finished_R[index]:
                is_finished_R[index] = True
                status, text = failures[index]
                terminals.append(self._roster.end(step.sequences[index], status, text=text))
        if step.kind == "decode":
            self._roster.running.sort_again()
        token_R = np.array([run[-1] if run else NO_TOKEN for run in emitted], dtype=np.int64)
        is_emitted_R = np.array([bool(run) for run in emitted], dtype=np.bool_)
        return StepCommit(step, token_R, is_emitted_R, is_finished_R, tuple(terminals), tuple(emitted))

    def _cut(self, sequence: Sequence, run: abc.Sequence[int]) -> tuple[tuple[int, ...], bool | None]:
        """Return the run up to the token that ends its request, and whether that one stops it; None if none does."""
        table, rules = self._memory.table, sequence.stop_rules
        first = int(table.length[sequence.row])
        final = int(table.final_position[sequence.row])
        for place, token_id in enumerate(run):
            # At the position of the length cap a stop wins.
            if rules.is_stop(token_id) or first + place >= final:
                return tuple(run[: place + 1]), rules.is_stop(token_id)
        return tuple(run), None

    def _commit_running(self, step: ScheduledStep, token_ids_R: NDArray[np.int64], running: RunningBatch) -> StepCommit:
        """Commit a decode step whose requests all run on: every row is valid and emits."""
        positions_R = running.length_R
        running.move_on(token_ids_R)
        end_R = (running.eos_token_id_R, running.final_position_R)
        ends = self._find_ends(running.rows_R, positions_R, token_ids_R, end_R)
        is_finished_R = running.nothing_R
        terminals = []
        if ends:
            is_finished_R = is_finished_R.copy()
            terminals = self._end_all(step, ends, is_finished_R)
        return StepCommit(step, token_ids_R, running.everything_R, is_finished_R, tuple(terminals))

    def _commit_valid(
        self, step: ScheduledStep, token_ids_R: NDArray[np.int64], failures: Mapping[int, RowFailure]
    ) -> StepCommit:
        """Commit the rows that did not fail and whose requests are still the same."""
        table = self._memory.table
        is_valid_R = table.epoch.take(step.table_row_R) == step.epoch_R
        is_finished_R = np.zeros(step.num_requests, dtype=np.bool_)
        terminals = []
        for index in sorted(failures):
            if is_valid_R[index]:
                is_valid_R[index] = False
                is_finished_R[index] = True
                status, text = failures[index]
                terminals.append(self._roster.end(step.sequences[index], status, text=text))

        valid = is_valid_R.nonzero()[0]
        table.computed[step.table_row_R.take(valid)] = step.k_R.take(valid)
        is_emitted_R = is_valid_R
        if step.kind == "prefill":
            is_emitted_R = is_valid_R & ~step.is_partial_R
        emitting = is_emitted_R.nonzero()[0]
        rows_E = step.table_row_R.take(emitting)
        positions_E = step.k_R.take(emitting).astype(np.int64)
        tokens_E = token_ids_R.take(emitting)
        table.append_tokens(rows_E, positions_E, tokens_E)
        if step.kind == "decode":
            running = self._roster.running
            # A request that joined while the step was in flight got no token from it.
            if len(running) == len(emitting):
                running.count_decode_step()
            else:
                running.sort_again()
        else:
            self._place_after_prompt(step, valid.tolist())
        found = self._find_ends(rows_E, positions_E, tokens_E, table.end_columns(rows_E))
        ends = [end._replace(number=int(emitting[end.number])) for end in found]
        terminals += self._end_all(step, ends, is_finished_R)

        token_R = np.full(step.num_requests, NO_TOKEN, dtype=np.int64)
        token_R[emitting] = tokens_E
        return StepCommit(step, token_R, is_emitted_R, is_finished_R, tuple(terminals))

    def _place_after_prompt(self, step: ScheduledStep, valid: list[int]) -> None:
        unfinished = []
        for index in valid:
            if step.is_partial_R[index]:
                unfinished.append(step.sequences[index])
            else:
                self._roster.join_running(step.sequences[index])
        self._admission.return_unfinished(unfinished)

    def _find_ends(
        self,
        rows_E: NDArray[np.int64],
        positions_E: NDArray[np.int64],
        tokens_E: NDArray[np.int64],
        end_E: tuple[NDArray[np.int64], NDArray[np.int64]],
    ) -> list[_End]:
        """Return the rows, by their number among these, whose token ends its request.

        At the position of the length cap a stop wins.
        """
        eos_token_id_E, final_position_E = end_E
        is_stopped_E = tokens_E == eos_token_id_E
        if self._memory.table.num_with_stop_token_ids:
            self._mark_stop_token_ids(rows_E, tokens_E, is_stopped_E)
        ended = (is_stopped_E | (positions_E >= final_position_E)).nonzero()[0]
        if not len(ended):
            return []
        tokens, stops = tokens_E.take(ended).tolist(), is_stopped_E.take(ended).tolist()
        return [_End(*end) for end in zip(ended.tolist(), tokens, stops, strict=True)]

    def _mark_stop_token_ids(
        self, rows_E: NDArray[np.int64], tokens_E: NDArray[np.int64], is_stopped_E: NDArray[np.bool_]
    ) -> None:
        table = self._memory.table
        for nth in table.has_stop_token_ids.take(rows_E).nonzero()[0].tolist():
            sequence: Sequence = table.occupant[rows_E[nth]]
            if int(tokens_E[nth]) in sequence.stop_rules.stop_token_ids:
                is_stopped_E[nth] = True

    def _end_all(self, step: ScheduledStep, ends: list[_End], is_finished_R: NDArray[np.bool_]) -> list[TerminalRecord]:
        endings = []
        for index, token_id, is_stopped in ends:
            is_finished_R[index] = True
            sequence = step.sequences[index]
            if is_stopped:
                is_eos = sequence.stop_rules.is_end(token_id)
                endings.append(Ending(sequence, Status.FINISHED_STOPPED, None if is_eos else token_id))
            else:
                endings.append(Ending(sequence, Status.FINISHED_LENGTH_CAPPED, None))
        return self._roster.end_many(endings)


def refuse_misfit(step: ScheduledStep, shape: tuple[int, ...], failures: Mapping[int, RowFailure]) -> None:
    """Raise InvariantError unless a result and its failures have the rows of their step."""
    if shape != (step.num_requests,):
        raise InvariantError(f"step {step.number} has {step.num_requests} rows, but its result has shape {list(shape)}")
    if not failures:
        return
    unknown = [index for index in failures if not 0 <= index < step.num_requests]
    if unknown:
        raise InvariantError(f"step {step.number} has {step.num_requests} rows, but failures name rows {unknown}")
    unfinished = {index: failure[0].name for index, failure in failures.items() if not failure[0].is_finished}
    if unfinished:
        raise InvariantError(f"failures of step {step.number} must end their requests, but say {unfinished}")
