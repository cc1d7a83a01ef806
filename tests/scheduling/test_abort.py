"""Abort, in every state a request can be in: everything comes back once, one record, no token more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from deepinfer.errors import ArgumentError, DuplicateRequestError, InvariantError
from deepinfer.scheduling.commit import RowFailure
from deepinfer.scheduling.sequence import Sequence, StopRules
from deepinfer.scheduling.states import Status

Reference = Callable[[Iterable[int], int], list[int]]


def waiting(bench: Any) -> None:
    bench.add("x", 40)


def between_chunks(bench: Any) -> None:
    bench.add("x", 40)
    bench.step()


def between_later_chunks(bench: Any) -> None:
    bench.add("x", 40)
    bench.step()
    bench.step()


def running(bench: Any) -> None:
    bench.add("x", 10)
    bench.step()
    bench.step()


def preempted(bench: Any) -> None:
    running(bench)
    bench.scheduler.cancel(bench.scheduler.schedule())


def forked_from_running(bench: Any) -> None:
    bench.add("parent", 10)
    bench.step()
    bench.scheduler.fork("parent", "x", StopRules(5))


def forked_with_a_place(bench: Any) -> None:
    forked_from_running(bench)
    bench.step()


def forked_from_half_computed(bench: Any) -> None:
    bench.add("parent", 40)
    bench.step()
    bench.scheduler.fork("parent", "x", StopRules(5))


def forked_from_waiting(bench: Any) -> None:
    bench.add("parent", 40)
    bench.scheduler.fork("parent", "x", StopRules(5))


def parent_of_a_fork(bench: Any) -> None:
    bench.add("x", 10)
    bench.step()
    bench.scheduler.fork("x", "child", StopRules(5))


STATES = [
    waiting,
    between_chunks,
    between_later_chunks,
    running,
    preempted,
    forked_from_running,
    forked_with_a_place,
    forked_from_half_computed,
    forked_from_waiting,
    parent_of_a_fork,
]


@pytest.mark.parametrize("reach", STATES)
def test_abort_returns_everything_once_in_any_state(
    reach: Callable[[Any], None], make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench(max_num_batched_tokens=16)
    for _ in range(5):
        reach(bench)
        emitted = len(bench.emitted.get("x", []))
        assert bench.scheduler.abort("x") is True
        bench.scheduler.check_invariants()
        assert bench.scheduler.abort("x") is False
        bench.take_terminals()
        record = bench.terminals.pop("x")
        assert (record.finish_reason, len(record.output_token_ids)) == ("abort", emitted)
        bench.drain()
        bench.emitted.clear()
        bench.terminals.clear()
    follower = bench.add("follower", 21, max_tokens=5)
    bench.drain()
    assert bench.emitted["follower"] == reference(follower.prompt_token_ids.tolist(), 5)


@pytest.mark.parametrize(("prompt", "warm_up"), [(40, 0), (40, 1), (40, 2), (10, 0), (10, 1), (10, 4)])
def test_abort_while_its_step_runs_returns_everything_and_the_result_is_ignored(
    prompt: int, warm_up: int, make_bench: Callable[..., Any]
) -> None:
    bench = make_bench(max_num_batched_tokens=16)
    bench.add("x", prompt)
    bench.add("y", 5, max_tokens=3)
    for _ in range(warm_up):
        bench.step()
    emitted = len(bench.emitted.get("x", []))
    found = []
    bench.step(between=lambda _: found.append(bench.scheduler.abort("x")))
    assert found == [True]
    assert bench.terminals["x"].finish_reason == "abort"
    assert len(bench.emitted.get("x", [])) == emitted
    bench.drain()
    assert bench.terminals["y"].finish_reason == "length"


def test_fifty_aborts_between_chunks_leak_nothing(make_bench: Callable[..., Any], reference: Reference) -> None:
    bench = make_bench(max_num_batched_tokens=16)
    for number in range(50):
        bench.add(f"x{number}", 40)
        for _ in range(number % 2):
            bench.step()
        bench.step(between=(lambda _, n=number: bench.scheduler.abort(f"x{n}")) if number % 3 == 0 else None)
        bench.scheduler.abort(f"x{number}")
        bench.take_terminals()
        bench.audit()
    assert len(bench.terminals) == 50
    normal = bench.add("normal", 40, max_tokens=4)
    bench.drain()
    assert bench.emitted["normal"] == reference(normal.prompt_token_ids.tolist(), 4)


def test_a_prompt_of_50000_holds_391_blocks_and_a_slot_between_chunks_and_none_after_the_abort(
    make_bench: Callable[..., Any],
) -> None:
    bench = make_bench(block_size=128, num_blocks=600, max_num_batched_tokens=32_768, max_model_len=65_536)
    bench.worker.run = lambda step: [5] * step.num_requests
    bench.add("x", 50_000)
    bench.step()
    assert bench.scheduler.free_blocks == 599 - 391
    assert bench.scheduler.free_state_slots == 7
    bench.scheduler.abort("x")
    bench.take_terminals()
    bench.audit()


def test_aborting_an_unknown_request_is_harmless_and_says_so(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    assert bench.scheduler.abort("nobody") is False
    bench.audit()


def test_a_live_id_is_refused_and_the_first_request_is_untouched(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_num_batched_tokens=16)
    for reach in (waiting, between_chunks, running):
        reach(bench)
        for again in (
            lambda: bench.add("x", 5),
            lambda: bench.scheduler.fork("x", "x", StopRules(1)),
            lambda: bench.scheduler.try_receive(Sequence("x", [4], StopRules(1))),
        ):
            with pytest.raises(DuplicateRequestError, match="'x' is alive"):
                again()
            bench.scheduler.check_invariants()
        bench.drain()
        assert bench.terminals.pop("x").finish_reason == "length"
        bench.emitted.clear()


def test_an_id_that_has_ended_can_be_used_again_even_before_its_record_is_taken_and_gets_no_old_token(
    make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench()
    running(bench)
    step = bench.scheduler.schedule()
    bench.worker.run(step)
    bench.scheduler.abort("x")
    again = bench.add("x", 12, max_tokens=3)
    assert bench.scheduler.commit(step, [77]).token_R.tolist() == [-1]
    [record] = bench.scheduler.take_terminals()
    assert record.finish_reason == "abort"
    bench.emitted.clear()
    bench.drain()
    assert bench.emitted["x"] == reference(again.prompt_token_ids.tolist(), 3)


def test_a_row_that_changed_hands_while_the_step_ran_gets_nothing(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(num_state_slots=2, max_num_batched_tokens=16)
    bench.add("x", 40)
    step = bench.scheduler.schedule()
    bench.scheduler.abort("x")
    sequence = Sequence("y", range(2, 9), StopRules(3))
    assert bench.scheduler.try_receive(sequence)  # the same slot, the same row
    assert sequence.row == step.table_row_R[0]
    result = bench.scheduler.commit(step, [50])
    assert not result.is_emitted_R.any()
    assert (sequence.length, sequence.num_tokens) == (7, 6)


def test_a_request_object_serves_once(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    sequence = bench.add("x", 5, max_tokens=1)
    bench.drain()
    with pytest.raises(ArgumentError, match="make a new Sequence"):
        bench.scheduler.add(sequence)
    bench.audit()


def test_a_cancelled_step_is_computed_again_from_nothing(make_bench: Callable[..., Any], reference: Reference) -> None:
    bench = make_bench(max_num_batched_tokens=16)
    prompts = {name: bench.add(name, 10 + 9 * number, max_tokens=5) for number, name in enumerate("abc")}
    number = 0
    while bench.scheduler.has_unfinished():
        number += 1
        if number % 3 == 0 and number < 40:
            step = bench.scheduler.schedule()
            bench.worker.run(step)
            bench.scheduler.cancel(step)
            bench.scheduler.check_invariants()
        else:
            bench.step()
    bench.audit()
    for name, sequence in prompts.items():
        assert bench.emitted[name] == reference(sequence.prompt_token_ids.tolist(), 5)
        assert bench.terminals[name].preemptions > 0


def test_a_cancelled_step_takes_the_forks_whose_copies_it_carried_along(
    make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench(max_num_seqs=2, max_num_batched_tokens=16)
    bench.add("a", 10, max_tokens=9)
    bench.step()
    bench.add("b", 8, max_tokens=1)
    fork = bench.scheduler.fork("a", "a1", StopRules(4))
    fork_of_waiting = bench.scheduler.fork("b", "b1", StopRules(2))
    step = bench.scheduler.schedule()
    assert step.slot_copies
    bench.scheduler.cancel(step)  # the worker never ran it: the copies were not made
    assert fork.num_tokens == 0
    bench.drain()
    assert bench.emitted["a1"] == reference(fork.prompt_token_ids.tolist(), 4)
    assert bench.emitted["b1"] == reference(fork_of_waiting.prompt_token_ids.tolist(), 2)


def test_steps_are_committed_once_in_order_and_whole(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", 5)
    step = bench.scheduler.schedule()
    with pytest.raises(InvariantError, match="in flight"):
        bench.scheduler.schedule()
    with pytest.raises(InvariantError, match="1 rows, but its result has shape"):
        bench.scheduler.commit(step, [1, 2])
    with pytest.raises(InvariantError, match=r"failures name rows \[1\]"):
        bench.scheduler.commit(step, [1], {1: RowFailure(Status.FINISHED_INVALID, "NaN")})
    with pytest.raises(InvariantError, match="must end their requests"):
        bench.scheduler.commit(step, [1], {0: RowFailure(Status.WAITING, "later")})
    bench.worker.run(step)
    bench.commit(step, [9], {})
    for act in (lambda: bench.scheduler.commit(step, [9]), lambda: bench.scheduler.cancel(step)):
        with pytest.raises(InvariantError, match="committed or cancelled before"):
            act()
    assert bench.emitted["a"] == [9]


def test_an_empty_step_may_be_committed_or_not(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    step = bench.scheduler.schedule()
    assert (step.kind, step.num_requests, step.num_tokens) == ("empty", 0, 0)
    assert bench.scheduler.schedule().number == step.number + 1
    result = bench.scheduler.commit(step, np.empty(0))
    assert list(result.records()) == []
