"""Steps planned ahead: the same answers, whatever happens while a step is in flight, and nobody's memory too early.

Each test runs on a device that computes at once, in the caller's thread, and on one with a thread of its own.
Reported faults: 1, 3, 5, 11, 30, 44, 47.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from deepinfer.accelerator import ImmediateStream, Stream
from deepinfer.engine.options import EngineOptions
from deepinfer.errors import ArgumentError
from deepinfer.settings import Settings
from deepinfer_conformance.drivers import Calls, Fault, FaultKind, FaultyDriver, InjectedFaultError, OracleDriver
from deepinfer_cpu_ref.streams import ThreadStream

Ahead = Callable[..., Any]


class ThreadedOracle(OracleDriver):
    """The oracle on a device that computes while the host goes on."""

    def new_stream(self) -> Stream:
        return ThreadStream()


@pytest.fixture(params=[OracleDriver, ThreadedOracle], ids=["at once", "thread"])
def oracle_driver(request: pytest.FixtureRequest) -> type[OracleDriver]:
    return request.param


@pytest.fixture
def ahead(drive: Callable[..., Any], oracle_driver: type[OracleDriver]) -> Ahead:
    """Build an engine that plans ahead, with the books compared at each launch."""

    def build(*, faults: list[Fault] | None = None, **options: Any) -> Any:
        driver = oracle_driver() if faults is None else FaultyDriver(oracle_driver(), faults)
        driven = drive(driver, **{"async_scheduling": True, **options})
        watch(driven.engine)
        return driven

    return build


def watch(engine: Any) -> None:
    """Let every launch and every reading compare who owns what a step in flight touches."""
    pipeline = engine._loop.pipeline
    for name in ("launch", "judge", "read"):
        method = getattr(pipeline, name)

        def checked(*args: Any, method: Callable[..., Any] = method) -> Any:
            nobody_else_owns_what_is_in_flight(engine)
            return method(*args)

        setattr(pipeline, name, checked)


def nobody_else_owns_what_is_in_flight(engine: Any) -> None:
    """Fault 3: between launch and completion a block or slot belongs to the rows of the step, or to nobody."""
    scheduler = engine._books.scheduler
    steps = scheduler.memory.flights.steps
    assert len(steps) <= 2
    assert [step.kind for step in steps[:-1]] in ([], ["decode"])
    owner = {
        block: sequence.request_id
        for sequence in scheduler.roster
        for block in sequence.block_table.tolist()
        if scheduler.memory.blocks.reference_count(block) == 1
    }
    free = set(scheduler.memory.blocks.free_list())
    free_slots = set(scheduler.memory.slots.free_list())
    for step in steps:
        for name, slot, table in zip(
            step.request_ids, step.state_slot_R.tolist(), step.block_table_RB.tolist(), strict=True
        ):
            for block in filter(None, table):
                assert block not in free
                assert owner.get(block, name) == name
            assert slot not in free_slots


def test_answers_are_those_of_every_request_alone(ahead: Ahead, expected: Any, prompt_of: Any) -> None:
    """Chunks, siblings, stops, lengths; and one step more than without at most for each way of ending."""
    engine = ahead(max_num_batched_tokens=8, max_num_seqs=4)
    for number in range(5):
        engine.add(str(number), prompt_of(3 + 5 * number, number), max_tokens=4 + number, n=1 + number % 2)
    alone = expected(prompt_of(6, 9), 9)
    engine.add("stop", prompt_of(6, 9), max_tokens=9, stop_token_ids=[alone[4]])
    engine.drain()
    for number in range(5):
        for index in range(1 + number % 2):
            assert engine.tokens(str(number), index) == expected(prompt_of(3 + 5 * number, number), 4 + number)
    assert engine.tokens("stop") == alone[: alone.index(alone[4]) + 1]
    assert engine.answer("stop").finish_reason == "stop"


def test_a_step_is_launched_before_the_one_before_it_is_read(ahead: Ahead, prompt_of: Any) -> None:
    engine = ahead()
    told: list[str] = []
    pipeline = engine.engine._loop.pipeline
    for name in ("launch", "judge", "read"):
        method = getattr(pipeline, name)
        setattr(pipeline, name, lambda *args, name=name, method=method: (told.append(name), method(*args))[1])
    engine.add("a", prompt_of(5), max_tokens=4)
    assert len(engine.step()) == 1  # a prompt step is read at once
    assert told == ["launch", "judge", "read"]
    told.clear()
    assert engine.step() == []
    assert told == ["launch", "judge"]
    (record,) = engine.step()
    assert len(record.outputs[0].token_ids) == 2
    assert told == ["launch", "judge", "launch", "read", "judge"]
    engine.drain()


def test_a_request_that_ends_with_the_step_in_flight_for_certain_is_not_run_again(ahead: Ahead, prompt_of: Any) -> None:
    engine = ahead()
    engine.add("a", prompt_of(5), max_tokens=4)
    engine.drain()
    assert [step.kind for step in engine.steps] == ["prefill", "decode", "decode", "decode", "empty"]


def test_a_request_that_ended_in_flight_runs_once_more_and_adds_nothing(
    ahead: Ahead, expected: Any, prompt_of: Any
) -> None:
    alone = expected(prompt_of(6), 9)
    engine = ahead()
    engine.add("a", prompt_of(6), max_tokens=9, stop_token_ids=[alone[2]])
    engine.add("b", prompt_of(4, 1), max_tokens=9)
    engine.drain()
    kept = alone[: alone.index(alone[2]) + 1]
    assert engine.tokens("a") == kept
    assert engine.tokens("b") == expected(prompt_of(4, 1), 9)
    rows = [row.request_id for step in engine.steps for row in step.rows]
    assert rows.count("a") == len(kept) + 1


@pytest.mark.parametrize("steps", range(7))
def test_an_abort_at_any_time_adds_no_token_and_leaks_nothing(
    ahead: Ahead, expected: Any, prompt_of: Any, steps: int
) -> None:
    """Fault 1, and 47: the id may be used again at once, and never gets what was in flight for the one before."""
    engine = ahead(max_num_batched_tokens=16, max_num_seqs=2)
    engine.add("gone", prompt_of(20), max_tokens=30)
    engine.add("stays", prompt_of(3, 1), max_tokens=9)
    engine.step(steps)
    told = engine.records["gone"][-1].outputs[0].token_ids if engine.records["gone"] else ()
    assert engine.engine.abort_request("gone") is True
    assert engine.engine.abort_request("gone") is False
    engine.step()
    answer = engine.answer("gone")
    assert (answer.finish_reason, tuple(answer.token_ids)) == ("abort", tuple(told))
    engine.add("gone", prompt_of(7, 5), max_tokens=6)
    engine.drain()
    assert engine.tokens("gone") == expected(prompt_of(7, 5), 6)
    assert engine.tokens("stays") == expected(prompt_of(3, 1), 9)


@pytest.mark.parametrize("way", ["stop token", "length", "abort", "preempt"])
def test_memory_that_a_step_in_flight_touches_goes_to_nobody(
    ahead: Ahead, expected: Any, prompt_of: Any, way: str
) -> None:
    """Fault 3: B must have A's blocks, and is what it would be alone."""
    alone = expected(prompt_of(14), 20)
    ends = {"stop token": {"stop_token_ids": [alone[4]]}, "length": {"max_tokens": 5}}.get(way, {})
    engine = ahead(num_blocks=1 + 6, max_num_seqs=2, prefill_attempt_interval=1, prefill_any_attempt_interval=1)
    engine.add("a", prompt_of(14), **{"max_tokens": 10, **ends})
    engine.step(3)
    engine.add("b", prompt_of(9, 1) if way == "preempt" else prompt_of(16, 1), max_tokens=8)
    if way == "abort":
        assert engine.engine.abort_request("a")
    engine.drain()
    assert engine.tokens("b") == expected(prompt_of(9, 1) if way == "preempt" else prompt_of(16, 1), 8)
    assert engine.tokens("a") == alone[: len(engine.tokens("a"))]


@pytest.mark.parametrize("blocks", [6, 9, 14])
def test_a_short_pool_preempts_and_everybody_finishes(ahead: Ahead, expected: Any, prompt_of: Any, blocks: int) -> None:
    """Fault 11: preemptions stay few, and nobody is preempted while a step is in flight."""
    engine = ahead(num_blocks=1 + blocks, max_num_seqs=4)
    preempt = engine.engine._books.scheduler._preemption.preempt

    def settled(sequence: Any) -> None:
        assert engine.engine._books.scheduler.memory.flights.steps == []
        preempt(sequence)

    engine.engine._books.scheduler._preemption.preempt = settled
    for number in range(4):
        engine.add(str(number), prompt_of(5, number), max_tokens=18)
    engine.drain()
    for number in range(4):
        assert engine.tokens(str(number)) == expected(prompt_of(5, number), 18)
    assert 0 < engine.engine.stats().preemptions <= 4 * 5


@pytest.mark.parametrize("steps", range(1, 7))
@pytest.mark.parametrize("seats", [2, 1])
def test_a_fork_continues_from_what_its_parent_has_shown(
    ahead: Ahead, expected: Any, prompt_of: Any, steps: int, seats: int
) -> None:
    engine = ahead(max_num_batched_tokens=8, max_num_seqs=seats, num_state_slots=4)
    engine.add("parent", prompt_of(13), max_tokens=9)
    engine.step(steps)
    shown = list(engine.records["parent"][-1].outputs[0].token_ids) if engine.records["parent"] else []
    engine.fork("parent", "child", max_tokens=7)
    engine.drain()
    assert engine.tokens("parent") == expected(prompt_of(13), 9)
    assert engine.tokens("child") == expected([*prompt_of(13), *shown], 7)


def test_a_fork_shares_its_parents_memory_while_a_step_is_in_flight(ahead: Ahead, prompt_of: Any) -> None:
    engine = ahead()
    engine.add("parent", prompt_of(12), max_tokens=9)
    engine.step(3)
    engine.fork("parent", "child", max_tokens=4)
    engine.step()
    (child,) = [row for row in engine.engine.last_step.rows if row.request_id == "child"]
    assert (child.cached, child.q) == (13, 1)
    engine.drain()


@pytest.mark.parametrize("length", [28, 31, 32])
def test_the_context_limit_ends_a_request_and_no_position_beyond_it_is_planned(
    ahead: Ahead, expected: Any, prompt_of: Any, length: int
) -> None:
    """Fault 5."""
    engine = ahead(max_model_len=32, num_blocks=40)
    engine.add("limited", prompt_of(length), max_tokens=100)
    engine.add("healthy", prompt_of(6, 1), max_tokens=12)
    engine.drain()
    limited = engine.answer("limited")
    assert (limited.finish_reason, list(limited.token_ids)) == ("length", expected(prompt_of(length), 33 - length))
    assert max(row.k for step in engine.steps for row in step.rows) <= 32
    assert engine.tokens("healthy") == expected(prompt_of(6, 1), 12)


def test_a_request_that_outgrows_the_pool_ends_alone_with_the_reason(
    ahead: Ahead, expected: Any, prompt_of: Any
) -> None:
    engine = ahead(num_blocks=1 + 5, max_model_len=64)
    engine.add("big", prompt_of(10), max_tokens=50)
    engine.drain()
    big = engine.answer("big")
    assert (big.finish_reason, list(big.token_ids)) == ("insufficient_system_resource", expected(prompt_of(10), 11))


# attention.sparse runs four times a step: prompts in the calls 0 to 3, then one decode step after the other.
@pytest.mark.parametrize("call", [2, 5, 10, 15])
@pytest.mark.parametrize("kind", [FaultKind.RAISE, FaultKind.OUT_OF_MEMORY])
def test_a_fault_ends_the_requests_of_its_step_and_no_other(
    ahead: Ahead, expected: Any, prompt_of: Any, call: int, kind: FaultKind
) -> None:
    """It comes out of the step that waits for it, with its type; the step behind it is given up as well."""
    engine = ahead(faults=[Fault(op="attention.sparse", kind=kind, calls=Calls.at(call))], max_num_seqs=2)
    for name in ("a", "b"):
        engine.add(name, prompt_of(6, ord(name)), max_tokens=6)
    engine.add("spared", prompt_of(5, 1), max_tokens=5)
    with pytest.raises((InjectedFaultError, RuntimeError)) as caught:
        engine.drain()
    engine.engine.check_invariants()
    engine.drain()
    for name in ("a", "b"):
        answer = engine.answer(name)
        assert answer.finish_reason == "abort"
        assert type(caught.value).__name__ in answer.message
        assert list(answer.token_ids) == expected(prompt_of(6, ord(name)), 6)[: len(answer.token_ids)]
    assert engine.tokens("spared") == expected(prompt_of(5, 1), 5)


def test_a_row_that_is_not_a_number_ends_its_request_alone(ahead: Ahead, expected: Any, prompt_of: Any) -> None:
    """Fault 30: the step behind it begins with no token, and gives none."""
    fault = Fault(op="linear.dense", kind=FaultKind.NAN, calls=Calls.at(29 * 3), row=0, element=5, amount=float("inf"))
    engine = ahead(faults=[fault])
    engine.add("struck", prompt_of(9), max_tokens=8)
    engine.add("spared", prompt_of(4, 1), max_tokens=8)
    engine.drain()
    struck = engine.answer("struck")
    assert struck.finish_reason == "invalid"
    assert list(struck.token_ids) == expected(prompt_of(9), 8)[: len(struck.token_ids)]
    assert engine.tokens("spared") == expected(prompt_of(4, 1), 8)


@pytest.mark.parametrize("name", ["launch", "judge", "read"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_an_interrupt_at_every_hook_leaves_the_engine_usable(
    ahead: Ahead, expected: Any, prompt_of: Any, name: str, number: int, *, after: bool
) -> None:
    engine = ahead(max_num_batched_tokens=8, max_num_seqs=2)
    method = getattr(engine.engine._loop.pipeline, name)
    passed: list[str] = []

    def hook(*args: Any) -> Any:
        passed.append(name)
        if len(passed) == number and not after:
            raise KeyboardInterrupt
        result = method(*args)
        if len(passed) == number:
            raise KeyboardInterrupt
        return result

    setattr(engine.engine._loop.pipeline, name, hook)
    for request_id in ("a", "b", "c"):
        engine.add(request_id, prompt_of(11, ord(request_id)), max_tokens=5)
    with pytest.raises(KeyboardInterrupt):
        engine.drain()
    engine.engine.check_invariants()
    engine.drain()
    assert "abort" in {engine.answer(request_id).finish_reason for request_id in "abc"}
    for request_id in ("a", "b", "c"):
        told = engine.tokens(request_id)
        assert told == expected(prompt_of(11, ord(request_id)), 5)[: len(told)]
    engine.add("next", prompt_of(11), max_tokens=4)
    engine.drain()
    assert engine.tokens("next") == expected(prompt_of(11), 4)


def test_a_step_cut_off_between_its_books_ends_every_request_once(ahead: Ahead, expected: Any, prompt_of: Any) -> None:
    engine = ahead()
    engine.add("a", prompt_of(11), max_tokens=9)
    engine.step(3)
    commit = engine.engine._books.scheduler.commit

    def cut_off(*args: Any) -> Any:
        commit(*args)
        raise KeyboardInterrupt

    engine.engine._books.scheduler.commit = cut_off
    with pytest.raises(KeyboardInterrupt):
        engine.engine.step()
    engine.drain()
    assert engine.answer("a").finish_reason == "abort"
    assert "interrupted" in engine.answer("a").message
    engine.add("a", prompt_of(11), max_tokens=9)
    engine.drain()
    assert engine.tokens("a") == expected(prompt_of(11), 9)


def device_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "deepinfer-cpu_ref-stream"]


def test_the_devices_thread_ends_with_the_engine(drive: Any, prompt_of: Any) -> None:
    gc.collect()
    before = set(device_threads())
    engine = drive(ThreadedOracle(), async_scheduling=True)
    engine.add("a", prompt_of(5), max_tokens=4)
    engine.step(2)
    (thread,) = set(device_threads()) - before
    engine.engine.close()  # with a step in flight
    assert not thread.is_alive()
    engine.drain()
    assert len(engine.tokens("a")) == 4
    (thread,) = set(device_threads()) - before
    del engine
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_dropping_the_last_request_leaves_nothing_in_flight(ahead: Ahead, prompt_of: Any) -> None:
    engine = ahead()
    engine.add("a", prompt_of(5), max_tokens=30)
    engine.step(3)
    engine.engine.discard_requests(["a"])
    del engine.records["a"]
    engine.audit()


def test_where_the_choice_comes_from() -> None:
    on = Settings(zero_overhead_scheduling=True)
    assert EngineOptions().under(on).async_scheduling is True
    assert EngineOptions().under(Settings(zero_overhead_scheduling=False)).async_scheduling is False
    assert EngineOptions(async_scheduling=False).under(on).async_scheduling is False
    assert EngineOptions(async_scheduling=True).under(Settings(zero_overhead_scheduling=False)).async_scheduling is True
    assert EngineOptions(engine_type="prompt").under(on).async_scheduling is False
    with pytest.raises(ArgumentError, match="prompt' has no decode step to plan ahead"):
        EngineOptions(engine_type="prompt", async_scheduling=True)


def test_times_are_the_hosts_and_the_devices(drive: Any, prompt_of: Any) -> None:
    for driver, options in ((ThreadedOracle(), True), (OracleDriver(), True), (OracleDriver(), False)):
        engine = drive(driver, async_scheduling=options)
        engine.add("a", prompt_of(5), max_tokens=4)
        engine.drain()
        times = engine.engine.times
        assert 0 < times.host_s < times.called_s
        assert times.device_s is not None
        assert times.device_s > 0


def test_the_base_stream_runs_work_at_once_and_keeps_its_exception_for_the_wait() -> None:
    stream = ImmediateStream()
    done: list[int] = []
    mark = stream.enqueue(lambda: done.append(1))
    assert (done, mark.done()) == ([1], True)
    mark.wait()
    assert mark.elapsed_s is not None

    def fail() -> None:
        raise ValueError("no")

    failed = stream.enqueue(fail)
    with pytest.raises(ValueError, match="no"):
        failed.wait()
    stream.close()
