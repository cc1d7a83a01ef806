"""Who loses its memory when there is not enough, and what becomes of it.

Victims of a running candidate that needs blocks, in this order: the running request with the most output tokens, the
latest arrival among equals; half-computed prompts and waiting forks, latest arrival first; the candidate itself.

Victims do not rotate for ever: one comes back only when its whole history fits again, and that as a rule takes a
request that ends meanwhile. The tests hold the preemptions of each request below the number of requests plus one.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer.scheduling.config import EngineType, SchedulerConfig
from deepinfer.scheduling.memory import Memory
from deepinfer.scheduling.roster import Roster
from deepinfer.scheduling.sequence import Sequence
from deepinfer.scheduling.states import Place, Status


class Preemption:
    """Takes memory from requests: they are recomputed later, or end, as the configuration says."""

    def __init__(self, config: SchedulerConfig, memory: Memory, roster: Roster) -> None:
        self._config = config
        self._memory = memory
        self._roster = roster

    def preempt(self, sequence: Sequence) -> None:
        """Take everything from ``sequence``; to be recomputed, it goes to the front of the waiting queue."""
        if self._config.stop_preempted_requests:
            self._roster.end(
                sequence,
                Status.FINISHED_PREEMPTED,
                text=f"preempted after {sequence.num_output_tokens} output tokens because the cache was full; "
                "stop_preempted_requests is set",
            )
        else:
            self.recompute(sequence)

    def recompute(self, sequence: Sequence) -> None:
        """Forget the progress of ``sequence``, not its tokens; it goes to the front of the waiting queue."""
        sequence.preemptions += 1
        sequence.is_continuation = True
        self._roster.enqueue(sequence, front=True)
        self._memory.release(sequence)

    def give_up_progress(self, sequence: Sequence) -> None:
        """Recompute ``sequence`` because its step failed; an engine without prompt steps can only end it."""
        if self._config.engine_type is EngineType.COMPLETION:
            text = "its step was given up, and this engine cannot recompute it"
            self._roster.end(sequence, Status.FINISHED_PREEMPTED, text=text)
        else:
            self.recompute(sequence)

    def parked_victims(self, spared: Sequence | None = None) -> Iterator[Sequence]:
        """Yield the half-computed prompts and waiting forks that own memory, latest arrival first."""
        parked = [
            sequence
            for sequence in self._memory.table.occupant.tolist()
            if sequence is not None and sequence.place in (Place.WAITING, Place.PROMPTED) and sequence is not spared
        ]
        yield from sorted(parked, key=lambda sequence: -sequence.arrival)

    def reclaim_for(self, sequence: Sequence) -> bool:
        """Take memory from parked requests until ``sequence`` can have all it asks for; say whether it can.

        For a head of the queue on a rank where nothing else can advance: waiting would be for ever.
        """
        for victim in self.parked_victims(spared=sequence):
            if self._memory.can_reserve(sequence):
                break
            self.preempt(victim)
        return self._memory.can_reserve(sequence)
