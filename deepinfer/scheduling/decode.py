"""The decode step: forks take their places, every running request gets the blocks it needs, or somebody makes room."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.blocks import blocks_for
from deepinfer.scheduling.admission import outgrown_text
from deepinfer.scheduling.config import SchedulerConfig
from deepinfer.scheduling.memory import Memory, Shortage
from deepinfer.scheduling.preemption import Preemption
from deepinfer.scheduling.roster import Roster
from deepinfer.scheduling.sequence import Sequence
from deepinfer.scheduling.states import Status
from deepinfer.scheduling.step import ScheduledStep
from deepinfer.scheduling.table import NOT_RUN, ZERO


class DraftLengths(Protocol):
    """Chooses how many drafts each running request verifies, where that is not the same for all."""

    def choose(
        self, rows_R: NDArray[np.int64], epoch_R: NDArray[np.int64], most_R: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return int64 [R], for each row of the sequence table in its occupation, at most ``most_R``."""


class DecodeSelection:
    """Chooses the rows of a decode step."""

    def __init__(
        self,
        config: SchedulerConfig,
        memory: Memory,
        roster: Roster,
        preemption: Preemption,
        lengths: DraftLengths | None = None,
    ) -> None:
        self._config = config
        self._lengths = lengths
        self._memory = memory
        self._roster = roster
        self._preemption = preemption

    def serve_running(self, in_flight: ScheduledStep | None = None) -> bool:
        """Settle who runs in the step, which is everybody who then is running; each owns every block it writes.

        Args:
            in_flight: the decode step whose result is not known yet; it counts as if all its drafts were accepted.

        Returns:
            False if somebody would have to lose memory while a step is in flight: commit it and ask again.
        """
        self._seat_prompted()
        running = self._roster.running
        drafts = self._config.num_speculative_tokens
        if drafts or self._config.async_scheduling:
            rows_R = running.row_numbers()
            self._memory.look_ahead_to(rows_R, drafts, in_flight)
            if self._lengths is not None:
                self._choose_lengths(rows_R, self._lengths)
            if in_flight is None and (self._config.async_scheduling or self._lengths is not None):
                self._memory.give_back_surplus(rows_R)
            running.invalidate()
        running.refresh()
        short = running.short_of_blocks()
        if not len(short) or running.try_growing_by_one_block(
            short, self._memory.blocks, self._config.num_usable_blocks
        ):
            return True
        shortage = self._memory.shortage(running.rows_R.take(short))
        if self._is_served_by_free_blocks(shortage):
            self._memory.grow(shortage)
        elif in_flight is not None:
            return False
        elif drafts:
            self._serve_with_fewer_drafts()
        else:
            self._serve_one_by_one()
        running.invalidate()
        running.refresh()
        return True

    def _seat_prompted(self) -> None:
        if not self._roster.num_prompted:
            return
        for sequence in self._roster.prompted:
            if self._roster.num_running >= self._config.max_num_seqs:
                return
            self._roster.join_running(sequence)

    def _is_served_by_free_blocks(self, shortage: Shortage) -> bool:
        fits = blocks_for(shortage.longest, self._config.block_size) <= self._config.num_usable_blocks
        return fits and self._memory.blocks.can_allocate(shortage.num_blocks)

    def _choose_lengths(self, rows_R: NDArray[np.int64], lengths: DraftLengths) -> None:
        """Note the chosen lengths. A row that flies keeps memory for every draft: it may be handed others' rows."""
        table = self._memory.table
        rows_R = rows_R[table.drafts.take(rows_R) != NOT_RUN]
        most_R = table.drafts.take(rows_R)
        chosen_R = lengths.choose(rows_R, table.epoch.take(rows_R), most_R).clip(0, most_R)
        table.drafts[rows_R] = chosen_R
        flies_R = table.in_flight.take(rows_R) > ZERO
        table.look_ahead[rows_R] = np.where(flies_R, table.look_ahead.take(rows_R), chosen_R)

    def _serve_with_fewer_drafts(self) -> None:
        """Nobody loses its memory for another one's drafts: they get what the newest tokens leave.

        So requests are preempted exactly where they would be without drafts.
        """
        running = self._roster.running
        wanted_Z = self._memory.table.look_ahead.copy()
        self._memory.give_up_look_ahead(running.row_numbers())
        self._serve_one_by_one()
        rows_R = running.row_numbers()
        rows_R = rows_R.take(self._memory.table.serving_order(rows_R))
        self._memory.look_ahead_as_far_as_possible(rows_R, wanted_Z.take(rows_R))

    def _serve_one_by_one(self) -> None:
        """Serve from the short end of the outputs and preempt from the long end, only for one who really needs it."""
        sequences = self._roster.running.sequences
        unserved = deque(sorted(sequences, key=lambda sequence: (sequence.num_output_tokens, sequence.arrival)))
        while unserved:
            self._serve(unserved.popleft(), unserved)

    def _serve(self, candidate: Sequence, unserved: deque[Sequence]) -> None:
        shortage = self._memory.shortage(np.array([candidate.row]))
        num_needed = shortage.num_blocks
        if num_needed == 0:
            return
        num_whole = blocks_for(shortage.longest, self._config.block_size)
        if num_whole > self._config.num_usable_blocks:
            text = outgrown_text(candidate, num_whole, self._config)
            self._roster.end(candidate, Status.FINISHED_PREEMPTED, text=text)
            return
        while not self._memory.blocks.can_allocate(num_needed) and unserved:
            self._preemption.preempt(unserved.pop())
        for victim in self._preemption.parked_victims():
            if self._memory.blocks.can_allocate(num_needed):
                break
            self._preemption.preempt(victim)
        if self._memory.blocks.can_allocate(num_needed):
            self._memory.grow(shortage)
        else:
            self._preemption.preempt(candidate)
