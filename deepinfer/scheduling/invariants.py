"""Do all books agree: pools, tables, queues, states and the step in flight?"""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Iterator

from deepinfer.errors import InvariantError
from deepinfer.scheduling.memory import Memory
from deepinfer.scheduling.roster import Roster
from deepinfer.scheduling.sequence import Sequence
from deepinfer.scheduling.states import ALLOWED_PLACES, Place
from deepinfer.scheduling.step import ScheduledStep
from deepinfer.scheduling.table import NO_ROW, NOT_RUN


def check(memory: Memory, roster: Roster, in_flight: abc.Sequence[ScheduledStep], block_size: int) -> None:
    """Raise InvariantError naming every disagreement; O(all owned blocks)."""
    memory.blocks.check_invariants()
    memory.slots.check_invariants()
    problems = [
        *_queue_problems(roster),
        *_ownership_problems(memory, roster),
        *_sharing_problems(memory, block_size),
        *(problem for sequence in roster for problem in _progress_problems(memory, sequence, block_size)),
        *_flight_problems(memory, roster, in_flight, block_size),
    ]
    if problems:
        raise InvariantError("scheduler: " + "; ".join(problems))


def _queue_problems(roster: Roster) -> Iterator[str]:
    waiting = {sequence.request_id for sequence in roster.waiting}
    prompted = {sequence.request_id for sequence in roster.prompted}
    roster.running.refresh()
    running = set(roster.running.request_ids)
    if len(running) != roster.num_running:
        yield f"{len(running)} rows run, the count says {roster.num_running}"
    yield from roster.running.problems()
    for sequence in roster:
        name = sequence.request_id
        if sequence.place not in ALLOWED_PLACES[sequence.status] or sequence.place is Place.NOWHERE:
            yield f"{name!r} is {sequence.status.name} in place {sequence.place.name}"
        found = [
            place
            for place, queue in ((Place.WAITING, waiting), (Place.PROMPTED, prompted), (Place.RUNNING, running))
            if name in queue
        ]
        expected = [] if sequence.place is Place.IN_FLIGHT else [sequence.place]
        if found != expected:
            yield f"{name!r} says {sequence.place.name}, but is in {[place.name for place in found]}"
    alive = {sequence.request_id for sequence in roster}
    if stray := (waiting | prompted | running) - alive:
        yield f"queued but not alive: {sorted(stray)}"


def _ownership_problems(memory: Memory, roster: Roster) -> Iterator[str]:
    table = memory.table
    held = memory.flights.held
    slot_owners = Counter([*memory.slot_copies.sources, *held.slots])
    block_owners = Counter([*memory.block_copies.sources, *held.blocks])
    for row, occupant in enumerate(table.occupant.tolist()):
        if occupant is None:
            if table.num_blocks[row] or table.computed[row] or table.block_table_ZN[row].any():
                yield f"row {row} is empty but not clean"
            continue
        slot_owners[row] += 1
        block_owners.update(table.blocks_of(row))
        if occupant.row != row or roster.find(occupant.request_id) is not occupant:
            yield f"row {row} is held by {occupant.request_id!r}, which is not alive there"
        if table.block_table_ZN[row, table.num_blocks[row] :].any():
            yield f"row {row} has block numbers behind the end of its table"
    for what, pool, owners in (("block", memory.blocks, block_owners), ("state slot", memory.slots, slot_owners)):
        for number, count in enumerate(pool.reference_counts()):
            if count != owners[number]:
                yield f"{what} {number} has reference count {count}, but {owners[number]} owners"


def _sharing_problems(memory: Memory, block_size: int) -> Iterator[str]:
    owners = Counter(
        block for occupant in memory.table.occupant.tolist() if occupant is not None for block in occupant.block_table
    )
    for occupant in memory.table.occupant.tolist():
        if occupant is not None:
            first_writable = occupant.num_tokens // block_size
            shared = [block for block in occupant.block_table[first_writable:].tolist() if owners[block] > 1]
            if shared:
                yield f"{occupant.request_id!r} may write blocks {shared}, which others own too"


def _progress_problems(memory: Memory, sequence: Sequence, block_size: int) -> Iterator[str]:
    name = sequence.request_id
    computed, length = sequence.num_tokens, sequence.length
    if length != sequence.num_prompt_tokens + len(sequence.output_token_ids):
        yield f"{name!r} counts {length} tokens and holds {sequence.num_prompt_tokens + len(sequence.output_token_ids)}"
        return
    if not 0 <= computed < length:
        yield f"{name!r} has computed {computed} of {length} positions"
    if computed > sequence.num_blocks * block_size:
        yield f"{name!r} has computed {computed} positions in {sequence.num_blocks} blocks of {block_size}"
    if sequence.row == NO_ROW:
        if sequence.place is not Place.WAITING:
            yield f"{name!r} is in place {sequence.place.name} without a state slot"
        return
    if sequence.place in (Place.RUNNING, Place.PROMPTED) and computed != length - 1:
        yield f"{name!r} decodes with {computed} of {length} positions computed"
    if length > memory.table.final_position[sequence.row]:
        yield f"{name!r} has {length} tokens and should have ended at {memory.table.final_position[sequence.row] + 1}"
    newest = int(sequence.token_ids(length - 1, length)[0])
    fed = int(memory.table.newest_tokens(memory.table.next_cell[[sequence.row]])[0, 0])
    if sequence.num_output_tokens and fed != newest:
        yield f"{name!r} would feed token {fed}, its newest is {newest}"


def _flight_problems(
    memory: Memory, roster: Roster, in_flight: abc.Sequence[ScheduledStep], block_size: int
) -> Iterator[str]:
    flying = set()
    for step in in_flight:
        for index, row in enumerate(step.table_row_R.tolist()):
            if memory.table.epoch[row] != step.epoch_R[index]:
                continue
            sequence = step.sequences[index]
            flying.add(sequence.request_id)
            owned = sequence.num_blocks * block_size
            # The look-ahead is that of the step that was planned last, which may be a younger one, or have left it out.
            is_newest = step is in_flight[-1] and memory.table.drafts[row] != NOT_RUN
            planned = sequence.length + int(memory.table.look_ahead[row]) if is_newest else owned
            if step.k_R[index] > min(planned, owned):
                yield f"{sequence.request_id!r} is scheduled to position {step.k_R[index]}, beyond what it owns"
    for sequence in roster:
        if sequence.place is Place.IN_FLIGHT and sequence.request_id not in flying:
            yield f"{sequence.request_id!r} is in flight, but in no step"
