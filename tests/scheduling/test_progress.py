"""No deadlock: the cases that stop the original for ever, and bounded progress whatever the pool holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from deepinfer.scheduling.config import SchedulerConfig
from deepinfer.scheduling.scheduler import Scheduler
from deepinfer.scheduling.sequence import Sequence, StopRules

Reference = Callable[[Iterable[int], int], list[int]]


def test_a_chunked_prompt_is_not_stopped_by_its_own_blocks(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(num_blocks=20, max_num_batched_tokens=32)
    bench.add("a", 72, max_tokens=4)
    rows = [bench.rows(bench.step())[0][1:] for _ in range(4)]
    assert rows == [(0, 32, 32), (32, 32, 64), (64, 8, 72), (72, 1, 73)]
    assert bench.drain() == 2


def test_beside_a_running_request_too_a_chunked_prompt_is_not_stopped_by_its_own_blocks(
    make_bench: Callable[..., Any],
) -> None:
    bench = make_bench(num_blocks=41, max_num_batched_tokens=64)
    bench.add("runner", 4, max_tokens=100)
    bench.step()
    bench.add("a", 148, max_tokens=1)  # 37 of 40 blocks
    assert [bench.rows(bench.step())[0][0] for _ in range(4)] == ["a", "a", "a", "runner"]


def test_two_ordinary_requests_that_stop_the_original_both_finish(
    make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench(num_blocks=20, max_num_batched_tokens=24)
    prompts = {
        "a": bench.add("a", 30, max_tokens=20).prompt_token_ids.tolist(),
        "b": bench.add("b", 40, max_tokens=4).prompt_token_ids.tolist(),
    }
    bench.drain(limit=60)
    assert bench.emitted == {"a": reference(prompts["a"], 20), "b": reference(prompts["b"], 4)}


def test_a_fork_that_needs_a_block_does_not_stop_its_parent(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(num_blocks=6)
    bench.add("a", 18, max_tokens=3)
    bench.step()
    bench.scheduler.fork("a", "a1", StopRules(1))
    bench.drain(limit=10)
    assert {name: record.finish_reason for name, record in bench.terminals.items()} == {"a": "length", "a1": "length"}


@pytest.mark.parametrize("watermark", [0.5, 0.9])
def test_a_head_takes_the_blocks_of_half_computed_prompts_behind_it_where_nothing_else_advances(
    watermark: float, make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench(num_blocks=20, max_num_batched_tokens=32, cache_usage_watermark=watermark)
    prompt = bench.add("a", 60, chunk_checkpoints=[8], max_tokens=2).prompt_token_ids.tolist()
    bench.step()
    child = bench.scheduler.fork("a", "a1", StopRules(2))  # shares two blocks, needs thirteen more: only four are free
    assert child.num_blocks == 2
    assert [sequence.request_id for sequence in bench.scheduler.roster.waiting] == ["a1", "a"]
    bench.drain(limit=20)
    assert bench.emitted == {"a": reference(prompt, 2), "a1": reference(prompt, 2)}


def workload(bench: Any, pressure: int) -> None:
    """Requests of several shapes, the largest of which needs 12 blocks of 4."""
    bench.add("long", 30, max_tokens=15)
    bench.add("chunky", 40, max_tokens=6)
    bench.add("tiny", 3, max_tokens=12)
    if pressure > 1:
        bench.add("steady", 8, max_tokens=30)
        bench.add("late", 20, max_tokens=20)


@pytest.mark.parametrize("interval", [1, 5, 70])
@pytest.mark.parametrize("budget", [8, 24, 64])
def test_every_schedule_advances_or_ends_someone_in_every_pool_from_exactly_one_fits_up(
    make_bench: Callable[..., Any], reference: Reference, interval: int, budget: int
) -> None:
    for usable in range(12, 44, 3):
        bench = make_bench(num_blocks=usable + 1, max_num_batched_tokens=budget, prefill_attempt_interval=interval)
        bench.checks = usable == 12
        workload(bench, pressure=2)
        prompts = {sequence.request_id: sequence for sequence in bench.scheduler.roster}
        steps = 0
        forked = False
        while bench.scheduler.has_unfinished():
            ended = len(bench.terminals)
            step = bench.step()
            steps += 1
            assert step.kind != "empty" or len(bench.terminals) > ended
            assert steps < 700
            if not forked and len(bench.emitted.get("long", [])) == 4:
                forked = True
                prompts["fork"] = bench.scheduler.fork("long", "fork", StopRules(8))
        bench.audit()
        for name, sequence in prompts.items():
            count = len(bench.emitted[name])
            assert count == sequence.stop_rules.max_tokens
            assert bench.emitted[name] == reference(sequence.prompt_token_ids.tolist(), count)


def test_in_stop_mode_every_pool_drains_too(make_bench: Callable[..., Any]) -> None:
    for usable in range(12, 30):
        bench = make_bench(num_blocks=usable + 1, stop_preempted_requests=True)
        workload(bench, pressure=2)
        bench.drain(limit=400)
        reasons = {record.finish_reason for record in bench.terminals.values()}
        assert reasons <= {"length", "insufficient_system_resource"}


def test_state_slots_can_run_out_while_blocks_are_free(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(num_state_slots=2)
    for name in ("a", "b", "c"):
        bench.add(name, 6, max_tokens=3)
    bench.step()
    bench.scheduler.fork("a", "a1", StopRules(2))  # no slot for it: it queues behind everybody
    bench.drain(limit=30)
    assert list(bench.terminals) == ["a", "b", "c", "a1"]
    assert {record.finish_reason for record in bench.terminals.values()} == {"length"}


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_a_prompt_at_the_size_of_the_pool_runs_or_is_refused_and_the_queue_goes_on(
    make_bench: Callable[..., Any], offset: int
) -> None:
    bench = make_bench(num_blocks=12)
    bench.add("big", 4 * (11 + offset), max_tokens=6)
    for number in range(5):
        bench.add(f"small{number}", 3, max_tokens=2)
    bench.drain(limit=60)
    reason = {-1: "insufficient_system_resource", 0: "insufficient_system_resource", 1: "ignored"}[offset]
    assert bench.terminals["big"].finish_reason == reason
    assert len(bench.emitted.get("big", [])) == {-1: 5, 0: 1, 1: 0}[offset]
    assert all(bench.terminals[f"small{number}"].finish_reason == "length" for number in range(5))


def test_the_original_scenario_of_prompts_at_the_size_of_the_pool(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(num_blocks=20, max_num_batched_tokens=256)
    for length in (74, 76, 77):
        bench.add(f"n{length}", length, max_tokens=3)
    bench.take_terminals()
    assert bench.terminals["n77"].finish_reason == "ignored"
    bench.drain(limit=10)
    assert bench.terminals["n74"].finish_reason == "length"
    assert bench.terminals["n74"].preemptions == 0
    assert bench.terminals["n76"].finish_reason == "insufficient_system_resource"
    assert len(bench.emitted["n76"]) == 1
    assert bench.terminals["n76"].preemptions == 0


def test_the_wait_of_a_big_head_and_of_the_small_ones_behind_it_is_bounded(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(num_blocks=20)
    bench.add("runner", 30, max_tokens=12)
    bench.step()
    bench.add("big", 60, max_tokens=2)
    number = 0
    waited: dict[str, int] = {}
    for steps in range(200):
        while bench.scheduler.num_waiting < 5:  # endless small arrivals
            bench.add(f"small{number}", 3, max_tokens=2)
            number += 1
        for name, *_ in bench.rows(bench.step()):
            waited.setdefault(name, steps)
    assert waited["big"] <= 14  # as soon as the runner has ended
    assert len(waited) > 150


@pytest.mark.parametrize("prompt", [28, 29, 30, 31, 32])
def test_at_the_context_limit_a_request_ends_by_length_and_writes_no_position_beyond(
    make_bench: Callable[..., Any], reference: Reference, prompt: int
) -> None:
    bench = make_bench(max_model_len=32)
    sequence = bench.add("a", prompt, max_tokens=100)
    neighbour = bench.add("b", 5, max_tokens=12)
    steps = bench.drain()  # the worker refuses a row beyond the limit
    assert bench.terminals["a"].finish_reason == "length"
    assert bench.emitted["a"] == reference(sequence.prompt_token_ids.tolist(), 33 - prompt)
    assert bench.emitted["b"] == reference(neighbour.prompt_token_ids.tolist(), 12)
    assert steps <= 13


def test_a_prompt_beyond_the_context_limit_is_refused(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_model_len=32)
    bench.add("a", 33)
    bench.take_terminals()
    assert bench.terminals["a"].finish_reason == "ignored"
    assert "33 tokens" in bench.terminals["a"].text
    bench.audit()


def test_huge_max_tokens_reserve_nothing(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    for number, max_tokens in enumerate((2**31 - 1, 2**63, 10**30)):
        bench.add(str(number), 4, max_tokens=max_tokens)
    bench.step()
    assert bench.scheduler.free_blocks == 60
    assert all(bench.scheduler.abort(str(number)) for number in range(3))
    bench.take_terminals()
    bench.audit()


def test_a_million_decode_steps_cannot_wrap_the_clock() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=4, num_state_slots=2, max_model_len=64, block_size=4))
    scheduler.clock.decode_step = 10**18
    scheduler.add(Sequence("a", [5], StopRules(1)))
    assert scheduler.schedule().kind == "prefill"
