"""The self-check finds every kind of damage to the books."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer.errors import InvariantError
from deepinfer.scheduling.sequence import StopRules
from deepinfer.scheduling.states import Place, Status


def busy(make_bench: Callable[..., Any]) -> Any:
    """A running request with a running fork, a half-computed prompt, a waiting request and a waiting fork."""
    bench = make_bench(max_num_batched_tokens=16)
    bench.add("run", 9)
    bench.step()
    bench.scheduler.fork("run", "fork", StopRules(9))
    bench.step()
    bench.add("half", 30)
    bench.step()
    bench.add("wait", 9)
    bench.scheduler.fork("run", "prompted", StopRules(9))
    bench.scheduler.check_invariants()
    return bench


def row(bench: Any, name: str) -> int:
    return int(bench.scheduler.find(name).row)


DAMAGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a leaked block": (lambda b: b.scheduler.memory.blocks.allocate(), "reference count 1, but 0 owners"),
    "a leaked slot": (lambda b: b.scheduler.memory.slots.allocate(), "state slot . has reference count 1"),
    "a block given back twice": (
        lambda b: b.scheduler.memory.blocks.free(b.scheduler.find("run").block_table[-1]),
        "reference count",
    ),
    "a writable block in two tables": (
        lambda b: b.scheduler.memory.table.block_table_ZN.__setitem__(
            (row(b, "half"), b.scheduler.find("half").num_blocks - 1),
            b.scheduler.find("run").block_table[-1],
        ),
        "which others own too",
    ),
    "progress beyond the tokens": (
        lambda b: b.scheduler.memory.table.computed.__setitem__(row(b, "half"), 30),
        "computed 30 of 30",
    ),
    "progress beyond the blocks": (
        lambda b: b.scheduler.memory.table.num_blocks.__setitem__(row(b, "run"), 1),
        "behind the end of its table",
    ),
    "a decoding request that is behind": (
        lambda b: b.scheduler.memory.table.computed.__setitem__(row(b, "run"), 9),
        "decodes with 9 of",
    ),
    "a runner that does not run": (
        lambda b: b.scheduler.roster.running.join(b.scheduler.find("half")),
        "says WAITING, but is in",
    ),
    "a row that grew by itself": (
        lambda b: b.scheduler.memory.table.length.__setitem__(row(b, "run"), 20),
        "the length of running rows .* is kept as",
    ),
    "runners out of order": (
        lambda b: b.scheduler.roster.running._keys.reverse(),
        "the order of running rows .* is kept as",
    ),
    "a status without its queue": (
        lambda b: setattr(b.scheduler.find("wait"), "place", Place.PROMPTED),
        "says PROMPTED, but is in",
    ),
    "a finished request that is alive": (
        lambda b: setattr(b.scheduler.find("wait"), "status", Status.FINISHED_ABORTED),
        "is FINISHED_ABORTED in place WAITING",
    ),
    "an empty row that is not clean": (
        lambda b: b.scheduler.memory.table.block_table_ZN.__setitem__((8, 3), 7),
        "row 8 is empty but not clean",
    ),
    "a wrong input token": (
        lambda b: b.scheduler.memory.table.recent_cells.__setitem__(
            b.scheduler.memory.table.next_cell[row(b, "run")] - 1, 100
        ),
        "would feed token 100",
    ),
    "a missed end": (
        lambda b: b.scheduler.memory.table.final_position.__setitem__(row(b, "run"), 9),
        "should have ended",
    ),
    "a chunk that no step knows": (
        lambda b: b.scheduler.roster.take_flight(b.scheduler.find("half"), is_partial=True),
        "in flight, but in no step",
    ),
    "a forgotten copy": (lambda b: b.scheduler.memory.block_copies._source_of.clear(), "reference count"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_check_names_the_damage(damage: str, make_bench: Callable[..., Any]) -> None:
    bench = busy(make_bench)
    act, message = DAMAGES[damage]
    act(bench)
    with pytest.raises(InvariantError, match=message):
        bench.scheduler.check_invariants()


def test_a_step_in_flight_that_outgrows_its_blocks_is_found(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", 9)
    step = bench.scheduler.schedule()
    bench.scheduler.check_invariants()
    step.k_R[0] = 13
    with pytest.raises(InvariantError, match="scheduled to position 13"):
        bench.scheduler.check_invariants()


def test_all_damages_are_named_at_once(make_bench: Callable[..., Any]) -> None:
    bench = busy(make_bench)
    bench.scheduler.memory.slots.allocate()
    bench.scheduler.memory.table.computed[row(bench, "half")] = 30
    with pytest.raises(InvariantError, match=r"reference count 1.*computed 30 of 30"):
        bench.scheduler.check_invariants()
