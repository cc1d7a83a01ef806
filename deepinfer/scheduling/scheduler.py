"""The scheduler of one rank: requests go in, steps come out, results are committed, endings are reported."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer.errors import ArgumentError, InvariantError
from deepinfer.scheduling import forking, invariants
from deepinfer.scheduling.admission import Admission
from deepinfer.scheduling.commit import Commit, RowFailure, refuse_misfit
from deepinfer.scheduling.config import EngineType, SchedulerConfig
from deepinfer.scheduling.decode import DecodeSelection, DraftLengths
from deepinfer.scheduling.memory import Memory
from deepinfer.scheduling.preemption import Preemption
from deepinfer.scheduling.roster import Roster
from deepinfer.scheduling.sequence import Sequence, StopRules
from deepinfer.scheduling.states import Place, Status
from deepinfer.scheduling.step import ScheduledStep, StepCommit, TerminalRecord
from deepinfer.scheduling.step_builder import StepBuilder
from deepinfer.scheduling.votes import SoloVotes, StepClock, VoteGroup

_NO_FAILURES: Mapping[int, RowFailure] = {}


class Scheduler:
    """Chooses the next step, and commits its result.

    One step is in flight at most; with asynchronous scheduling a second one while ``schedule`` has been called and the
    result of the first has not been committed.

    Bounded progress: on one rank whose blocks are all its own, each ``schedule`` that finds unfinished requests
    gives a step with rows or ends a request, and each step with rows computes at least one position.
    """

    def __init__(
        self, config: SchedulerConfig, votes: VoteGroup | None = None, lengths: DraftLengths | None = None
    ) -> None:
        self.config = config
        self.memory = Memory(config)
        self.roster = Roster(self.memory)
        self.clock = StepClock(config.prefill_attempt_interval, config.prefill_any_attempt_interval)
        self._votes: VoteGroup = SoloVotes() if votes is None else votes
        self._preemption = Preemption(config, self.memory, self.roster)
        self._admission = Admission(config, self.memory, self.roster, self._preemption)
        self._decode = DecodeSelection(config, self.memory, self.roster, self._preemption, lengths)
        self._commit = Commit(self.memory, self.roster, self._admission)
        self._builder = StepBuilder(self.memory)

    # --- requests -----------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Take a new request into the waiting queue; one that can never be served ends at once, as ignored.

        Raises DuplicateRequestError if a request of that id is alive.
        """
        self.roster.register(sequence)
        refusal = self._admission.refusal(sequence)
        if refusal is None:
            self.roster.enqueue(sequence, front=False)
        else:
            self.roster.end(sequence, Status.FINISHED_IGNORED, text=refusal)

    def try_receive(self, sequence: Sequence) -> bool:
        """Take a request whose positions but the newest another engine computed; False if there is no memory now.

        On True it is this scheduler's: its blocks and state slot are owned, ready to be filled, and the next decode
        step may serve it; or it ended at once, as ignored, because it can never be served.
        """
        refusal = self._admission.size_refusal(sequence)
        is_new = self.roster.find(sequence.request_id) is None
        if is_new and refusal is None and not self.memory.can_reserve(sequence):
            return False
        self.roster.register(sequence)
        sequence.is_continuation = True
        if refusal is not None:
            self.roster.end(sequence, Status.FINISHED_IGNORED, text=refusal)
        else:
            self.memory.adopt(sequence)
            self.roster.await_decode(sequence)
        return True

    def hand_over(self, request_id: str) -> Sequence:
        """Let a request whose prompt is computed go to another engine, which will report its end.

        Its memory goes back at once: its state must have been exported before.
        """
        sequence = self.roster.find(request_id)
        if sequence is None or sequence.place is not Place.RUNNING:
            raise ArgumentError("hand_over", [f"request {request_id!r} is not running here"])
        self.roster.depart(sequence)
        return sequence

    def fork(self, parent_id: str, child_id: str, stop_rules: StopRules) -> Sequence:
        """Start a request that continues from everything ``parent_id`` has so far, sharing what is computed.

        Raises ArgumentError if the parent is not alive, DuplicateRequestError if the child's id is.
        """
        parent = self.roster.find(parent_id)
        if parent is None:
            raise ArgumentError("fork", [f"request {parent_id!r} is not alive: it ended or was never added"])
        child = forking.child_of(parent, child_id, stop_rules)
        self.roster.register(child)
        child.root_arrival = parent.root_arrival
        may_share = self._is_settled_enough_to_fork() and forking.may_overtake(self.config, self.roster)
        has_state = may_share and self.memory.try_fork(parent, child)
        forking.enqueue_child(parent, child, self.config, self.roster, has_state=has_state)
        return child

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; False, and nothing happens, if it is not alive."""
        return self.finish(request_id, Status.FINISHED_ABORTED)

    def finish(self, request_id: str, status: Status, stop_reason: int | str | None = None, text: str = "") -> bool:
        """End a request for a reason found outside: a stop string, a failed image; False if it is not alive.

        A stop wins over a length cap at the same token: it replaces the reason of a record not handed out yet.
        """
        if not status.is_finished:
            raise ArgumentError("finish", [f"{status.name} is not an end; choose a FINISHED status"])
        sequence = self.roster.find(request_id)
        if sequence is None:
            return status is Status.FINISHED_STOPPED and self.roster.overrule_length_cap(request_id, stop_reason)
        self.roster.end(sequence, status, stop_reason=stop_reason, text=text)
        return True

    def find(self, request_id: str) -> Sequence | None:
        """Return the live request of that id."""
        return self.roster.find(request_id)

    # --- steps --------------------------------------------------------------------------------------------------

    def schedule(self, settle: Callable[[], object] | None = None) -> ScheduledStep:
        """Choose the next step and the memory for it.

        Args:
            settle: commits the step in flight. It is called where the step cannot be planned without that one's result:
                before a prompt step, and before anybody would lose memory for want of blocks. None: nothing may be in
                flight.
        """
        in_flight = self.memory.flights.newest
        if in_flight is not None and (settle is None or in_flight.kind != "decode"):
            raise InvariantError(f"step {in_flight.number} is in flight: commit or cancel it first")
        step = self._choose_step(settle)
        if step.kind != "empty":
            self.memory.flights.open(step)
        return step

    def commit(
        self,
        step: ScheduledStep,
        token_ids_R: ArrayLike,
        failures: Mapping[int, RowFailure] = _NO_FAILURES,
    ) -> StepCommit:
        """Apply the sampled tokens of ``step``, one per row; ``failures`` says which rows have none, and why."""
        tokens_R = np.array(token_ids_R, dtype=np.int64)
        self._land(step, tokens_R.shape, failures)
        return self._commit.apply(step, tokens_R, failures)

    def commit_runs(
        self,
        step: ScheduledStep,
        runs: abc.Sequence[abc.Sequence[int]],
        failures: Mapping[int, RowFailure] = _NO_FAILURES,
    ) -> StepCommit:
        """Apply what each row of ``step`` emitted: accepted drafts, then a token; rows that fail may lack the last."""
        self._land(step, (len(runs),), failures)
        return self._commit.apply_runs(step, runs, failures)

    def current_rows(self, step: ScheduledStep) -> NDArray[np.bool_]:
        """Return, for each row of ``step``, whether its result still belongs to the request it was computed for."""
        is_current_R: NDArray[np.bool_] = self.memory.table.epoch.take(step.table_row_R) == step.epoch_R
        return is_current_R

    def due_rows(self, step: ScheduledStep) -> NDArray[np.bool_]:
        """Return, for each row of ``step``, whether its request is to get a token from it.

        Not from an unfinished chunk, and not where more drafts of the step before were accepted than there are
        positions: the step was planned for fewer, and the request has outgrown the cache.
        """
        is_due_R: NDArray[np.bool_] = self.memory.table.length.take(step.table_row_R) <= step.k_R
        return is_due_R & self.current_rows(step)

    def lengths(self, step: ScheduledStep) -> list[int]:
        """Return the tokens of each request of ``step``; of one that has ended, what its row was planned for."""
        length_R = np.where(self.current_rows(step), self.memory.table.length.take(step.table_row_R), step.cached_R + 1)
        lengths: list[int] = length_R.tolist()
        return lengths

    def cancel(self, step: ScheduledStep) -> None:
        """Give up a step whose result will never come: what it may have half written is recomputed.

        That is the memory of its requests, and of the forks whose copies it carried. Nothing of the step may still run.
        """
        self.memory.flights.close(step)
        lost = [
            sequence
            for sequence, epoch in zip(step.sequences, step.epoch_R.tolist(), strict=True)
            if sequence.epoch == epoch
        ]
        for pair in step.slot_copies:
            fork: Sequence | None = self.memory.table.occupant[pair.destination]
            if fork is not None and fork not in lost:
                lost.append(fork)
        for sequence in reversed(lost):
            self._preemption.give_up_progress(sequence)

    def take_terminals(self) -> list[TerminalRecord]:
        """Hand out the terminal records since the last call: over all calls, one for each request that ended."""
        return self.roster.take_terminals()

    # --- what can be seen ---------------------------------------------------------------------------------------

    def has_unfinished(self) -> bool:
        """Say whether any request is alive."""
        return len(self.roster) > 0

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody owns."""
        return self.memory.blocks.num_free

    @property
    def free_state_slots(self) -> int:
        """State slots that nobody owns."""
        return self.memory.slots.num_free

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a prompt step or, as forks, for their first decode step."""
        return self.roster.num_waiting + self.roster.num_prompted

    @property
    def num_running(self) -> int:
        """Requests that the next decode step may serve."""
        return self.roster.num_running

    def check_invariants(self) -> None:
        """Raise InvariantError, naming everything that is wrong, unless all books agree."""
        invariants.check(self.memory, self.roster, self.memory.flights.steps, self.config.block_size)

    # ------------------------------------------------------------------------------------------------------------

    def _choose_step(self, settle: Callable[[], object] | None) -> ScheduledStep:
        kind = self.config.engine_type
        if kind is EngineType.PROMPT:
            return self._try_prompt_step() or self._builder.empty_step("prefill")
        if kind is EngineType.NORMAL and self._group_tries_prefill():
            self._settle(settle)
            step = self._try_prompt_step()
            # Agreement to try is not admission: an empty prompt step of the whole group would restart the count,
            # invite the next empty attempt, and keep the running requests from ever advancing.
            if self._votes.any_rank(says_yes=step is not None):
                self.clock.count_prompt_step()
                return step or self._builder.empty_step("prefill")
        self.clock.count_decode_step()
        if not self._decode.serve_running(self.memory.flights.newest):
            self._settle(settle)
            self._decode.serve_running()
        running = self.roster.running
        if not len(running):
            return self._builder.empty_step("decode")
        if self.config.num_speculative_tokens or self.config.async_scheduling:
            return self._builder.planned_step(running)
        return self._builder.decode_step(running)

    def _settle(self, settle: Callable[[], object] | None) -> None:
        if settle is not None and self.memory.flights.newest is not None:
            settle()

    def _group_tries_prefill(self) -> bool:
        can_decode = self.roster.num_running + self.roster.num_prompted > 0
        return self.clock.prefill_is_tried(self._votes, wants=self._admission.wants_prefill(), can_decode=can_decode)

    def _try_prompt_step(self) -> ScheduledStep | None:
        chunks = self._admission.choose_chunks()
        return self._builder.prompt_step(chunks) if chunks else None

    def _is_settled_enough_to_fork(self) -> bool:
        """Say whether a child can share its parent's committed state.

        A decode step in flight writes as many positions as a step may disown, and the child's copies are made before
        the step after it: what the child reads is still there. A second step would write over it.
        """
        steps = self.memory.flights.steps
        return not steps or (self.config.async_scheduling and len(steps) == 1 and steps[0].kind == "decode")

    def _land(self, step: ScheduledStep, shape: tuple[int, ...], failures: Mapping[int, RowFailure]) -> None:
        """Note that a step has completed, before its result ends requests that a younger step may still touch."""
        flights = self.memory.flights
        if step.kind != "empty" and step is not flights.oldest:
            raise InvariantError(f"step {step.number} is not in flight: it was committed or cancelled before")
        refuse_misfit(step, shape, failures)
        if step.kind != "empty":
            flights.close(step)
