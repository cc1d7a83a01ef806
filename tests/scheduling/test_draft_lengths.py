"""Draft lengths that change from request to request and from step to step: rows, blocks, and the same tokens.

Reported fault 44: blocks owned are those of the length and of the drafts of the step, and no others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Make = Callable[..., Any]
Reference = Callable[[Iterable[int], int], list[int]]


class Erratic:
    """Chooses lengths that nobody can foresee, sometimes more than there is room for.

    Attributes:
        most: the largest room that it was told of.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.most = 0

    def choose(
        self, rows_R: NDArray[np.int64], epoch_R: NDArray[np.int64], most_R: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        self.calls += 1
        self.most = max(self.most, int(most_R.max(initial=0)))
        lots = [
            zlib.crc32(f"{self.calls}:{row}:{epoch}".encode()) % 8 for row, epoch in zip(rows_R, epoch_R, strict=True)
        ]
        return np.array(lots, dtype=np.int64)


class Constant:
    def __init__(self, *lengths: int) -> None:
        self.lengths = list(lengths)

    def choose(
        self, rows_R: NDArray[np.int64], epoch_R: NDArray[np.int64], most_R: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return np.full(len(rows_R), self.lengths.pop(0) if len(self.lengths) > 1 else self.lengths[0])


@pytest.mark.parametrize("blocks", [64, 15, 13])
def test_erratic_lengths_change_no_token_and_own_no_block_too_many(
    make_bench: Make, reference: Reference, blocks: int
) -> None:
    """With plenty of blocks, with few, and with preemptions."""
    lengths = Erratic()
    bench = make_bench(num_speculative_tokens=5, num_blocks=blocks, lengths=lengths)
    prompts = {
        name: bench.add(name, 5 + nth, max_tokens=24).prompt_token_ids.tolist() for nth, name in enumerate("abcd")
    }
    widths = set()

    def check(step: Any) -> None:
        if step.kind == "decode":
            owned = [sequence.num_blocks for sequence in step.sequences]
            assert owned == [-(-k // 4) for k in step.k_R.tolist()]
            widths.update(step.q_R.tolist())

    while bench.scheduler.has_unfinished():
        bench.step(between=check)
        bench.scheduler.check_invariants()
    assert {name: bench.emitted[name] for name in prompts} == {name: reference(prompts[name], 24) for name in prompts}
    assert widths == {1, 2, 3, 4, 5, 6}
    assert lengths.most == 5
    bench.audit()


def test_blocks_for_drafts_that_are_not_verified_go_back_in_the_next_step(make_bench: Make) -> None:
    bench = make_bench(num_speculative_tokens=5, lengths=Constant(5, 0, 5), is_right=lambda *_: False)
    sequence = bench.add("a", 7, max_tokens=20)
    owned = []
    for _ in range(4):
        bench.step(between=lambda step: owned.append((step.kind, int(step.k_R[0]), sequence.num_blocks)))
    assert owned == [("prefill", 7, 2), ("decode", 13, 4), ("decode", 9, 3), ("decode", 15, 4)]


def test_a_request_near_its_limit_is_offered_no_more_than_there_are_positions(make_bench: Make) -> None:
    lengths = Erratic()
    bench = make_bench(max_model_len=16, num_speculative_tokens=5, lengths=lengths)
    bench.add("a", 14, max_tokens=60)
    bench.drain()
    assert len(bench.emitted["a"]) == 3
    assert lengths.most == 1


def test_planned_ahead_a_request_owns_memory_for_every_draft_that_it_may_be_handed(make_bench: Make) -> None:
    """The host plans two drafts, by older chances; the device may give the request up to five."""
    bench = make_bench(num_speculative_tokens=5, async_scheduling=True, lengths=Constant(2), is_right=lambda *_: False)
    sequence = bench.add("a", 7, max_tokens=20)
    planned = []

    def note(step: Any) -> None:
        planned.append((step.kind, *(int(each[0]) for each in (step.in_flight_R, step.q_R, step.k_R))))
        assert sequence.num_blocks * 4 >= step.k_R[0]

    for _ in range(4):
        bench.step(between=note)
    # Behind the newest token stand what is in flight and five drafts; nothing is in flight behind a prompt.
    assert planned == [("prefill", 0, 7, 7), ("decode", 0, 3, 10), ("decode", 3, 3, 16), ("decode", 3, 3, 17)]


def test_what_was_handed_out_is_what_the_next_plan_counts_with(make_bench: Make) -> None:
    bench = make_bench(num_speculative_tokens=5, async_scheduling=True, lengths=Constant(2), is_right=lambda *_: False)
    bench.add("a", 7, max_tokens=20)
    planned = []

    def hand_out(step: Any) -> None:
        if step.in_flight_R[0]:
            step.hand_out(np.array([4]))
            assert (int(step.q_R[0]), int(step.cached_R[0]), int(step.k_R[0])) == (5, step.k_R[0] - 5, step.k_R[0])
        planned.append(int(step.in_flight_R[0]))

    for _ in range(4):
        bench.step(between=hand_out)
    assert planned == [0, 0, 3, 5]


@pytest.mark.parametrize("blocks", [64, 15, 13])
def test_erratic_lengths_planned_ahead_change_no_token(make_bench: Make, reference: Reference, blocks: int) -> None:
    lengths = Erratic()
    bench = make_bench(num_speculative_tokens=5, async_scheduling=True, num_blocks=blocks, lengths=lengths)
    prompts = {
        name: bench.add(name, 5 + nth, max_tokens=24).prompt_token_ids.tolist() for nth, name in enumerate("abcd")
    }
    bench.drain()
    assert {name: bench.emitted[name] for name in prompts} == {name: reference(prompts[name], 24) for name in prompts}
