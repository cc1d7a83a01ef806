"""The decode step: forks take their places, every running request gets the blocks it needs, or somebody makes room."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from deepinfer.scheduling.admission import outgrown_text
from deepinfer.scheduling.config import SchedulerConfig
from deepinfer.scheduling.memory import Memory, Shortage
from deepinfer.scheduling.preemption import Preemption
from deepinfer.scheduling.roster import Roster
from deepinfer.scheduling.sequence import Sequence
from deepinfer.scheduling.states import Status


class DecodeSelection:
    """Chooses the rows of a decode step."""

    def __init__(self, config: SchedulerConfig, memory: Memory, roster: Roster, preemption: Preemption) -> None:
        self._config = config
        self._memory = memory
        self._roster = roster
        self._preemption = preemption

    def choose_rows(self) -> NDArray[np.int64]:
        """Return the rows of the step, in step order; each owns every block that the step writes."""
        self._seat_prompted()
        rows = self._roster.running_rows()
        shortage = self._memory.shortage(rows)
        if not len(shortage.rows):
            return rows
        if self._is_served_by_free_blocks(shortage):
            self._memory.grow(self._in_serving_order(shortage))
            return rows
        self._serve_one_by_one()
        return self._roster.running_rows()

    def _seat_prompted(self) -> None:
        for sequence in self._roster.prompted:
            if self._roster.num_running >= self._config.max_num_seqs:
                return
            self._roster.join_running(sequence)

    def _is_served_by_free_blocks(self, shortage: Shortage) -> bool:
        longest = max((self._memory.table.num_blocks.take(shortage.rows) + shortage.blocks).tolist())
        return longest <= self._config.max_table_blocks and self._memory.blocks.can_allocate(shortage.num_blocks)

    def _in_serving_order(self, shortage: Shortage) -> Shortage:
        """Return the shortage with the shortest output first, the earliest arrival among equals."""
        table, rows = self._memory.table, shortage.rows
        num_outputs = table.length.take(rows) - table.num_prompt_tokens.take(rows)
        order = np.lexsort((table.arrival.take(rows), num_outputs))
        return Shortage(rows.take(order), shortage.blocks.take(order))

    def _serve_one_by_one(self) -> None:
        """Serve from the short end of the outputs and preempt from the long end, only for one who really needs it."""
        sequences = self._memory.table.sequences_of(self._roster.running_rows())
        unserved = deque(sorted(sequences, key=lambda sequence: (sequence.num_output_tokens, sequence.arrival)))
        while unserved:
            self._serve(unserved.popleft(), unserved)

    def _serve(self, candidate: Sequence, unserved: deque[Sequence]) -> None:
        shortage = self._memory.shortage(np.array([candidate.row]))
        num_needed = shortage.num_blocks
        if num_needed == 0:
            return
        num_whole = candidate.num_blocks + num_needed
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
