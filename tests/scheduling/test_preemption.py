"""Who makes room, in which order, and that preemption changes nothing but time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from deepinfer.scheduling.sequence import StopRules
from deepinfer.scheduling.states import Status

Reference = Callable[[Iterable[int], int], list[int]]


def alive(bench: Any) -> dict[str, Any]:
    return {sequence.request_id: sequence for sequence in bench.scheduler.roster}


def occupy_rest(bench: Any, leave_free: int = 0) -> list[Any]:
    """A third party takes the free blocks, so that a test can say how many there are."""
    pool = bench.scheduler.memory.blocks
    bench.checks = False
    return pool.allocate_many(pool.num_free - leave_free)


def run_until(bench: Any, name: str, outputs: int) -> None:
    while len(bench.emitted.get(name, [])) < outputs:
        bench.step()


def test_the_longest_output_leaves_and_the_others_are_served(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    # At the end the outputs are 30, 12, 4 and 1, and everyone's newest token opens a new block.
    bench.add("a", 3, max_tokens=100)
    run_until(bench, "a", 30 - 12 + 1)
    bench.add("b", 5, max_tokens=100)
    run_until(bench, "b", 12 - 4 + 1)
    bench.add("c", 5, max_tokens=100)
    run_until(bench, "c", 4 - 1 + 1)
    bench.add("d", 8, max_tokens=100)
    run_until(bench, "d", 1)
    assert {name: len(tokens) for name, tokens in bench.emitted.items()} == {"a": 30, "b": 12, "c": 4, "d": 1}
    assert all(sequence.num_tokens % 4 == 0 for sequence in alive(bench).values())
    occupy_rest(bench)
    step = bench.step()
    assert [row[0] for row in bench.rows(step)] == ["b", "c", "d"]  # by history length: 17, 9, 9
    assert [sequence.request_id for sequence in bench.scheduler.roster.waiting] == ["a"]
    # D was served first from the end of A's table, then C, then B.
    a_blocks = bench.scheduler.memory.blocks.free_list()
    newest = {row[0]: sequence.block_table[-1] for row, sequence in zip(bench.rows(step), step.sequences, strict=True)}
    assert len(a_blocks) == 8 - 3
    assert len(set(newest.values())) == 3


def test_nobody_is_preempted_while_last_blocks_have_room(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", 9, max_tokens=30)
    bench.add("b", 9, max_tokens=30)
    bench.step()
    occupy_rest(bench)
    for _ in range(3):  # positions 9, 10, 11 lie in the third blocks
        assert len(bench.rows(bench.step())) == 2
    assert len(bench.rows(bench.step())) == 1


def test_among_equal_outputs_the_latest_arrival_leaves(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    for name in ("a", "b", "c"):
        bench.add(name, 4, max_tokens=30)
    bench.step()
    occupy_rest(bench, leave_free=2)
    assert [row[0] for row in bench.rows(bench.step())] == ["a", "b"]


def test_a_preempted_request_goes_to_the_front_without_progress_and_with_its_tokens(
    make_bench: Callable[..., Any],
) -> None:
    bench = make_bench()
    sequence = bench.add("a", 8, max_tokens=30)
    for _ in range(5):
        bench.step()
    bench.add("b", 200)  # cannot be admitted: waits
    occupy_rest(bench)
    bench.step()
    assert [waiting.request_id for waiting in bench.scheduler.roster.waiting] == ["a", "b"]
    assert (sequence.num_tokens, sequence.num_blocks, sequence.state_slot) == (0, 0, 0)
    assert list(sequence.output_token_ids) == bench.emitted["a"]
    assert sequence.preemptions == 1


def test_a_half_computed_prompt_is_the_victim_when_only_the_candidate_runs(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(num_blocks=21, max_num_batched_tokens=32, prefill_attempt_interval=10**6)
    bench.add("runner", 4, max_tokens=100)
    bench.step()
    half = bench.add("half", 60, chunk_checkpoints=[8])
    bench.scheduler.clock.decode_step = 0
    assert bench.rows(bench.step()) == [("half", 0, 8, 8)]
    bench.scheduler.clock.decode_step = 1
    assert half.num_blocks == 15
    steps = [bench.rows(bench.step())[0][0] for _ in range(17)]
    assert steps == ["runner"] * 17  # 4 + 17 tokens: the sixth block is there because the half-computed prompt left
    assert (half.num_blocks, half.num_tokens, half.preemptions) == (0, 0, 1)
    assert half.status is Status.WAITING


def test_a_waiting_fork_makes_room_when_only_the_candidate_runs(
    make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench(max_num_seqs=1, num_blocks=6)
    prompt = bench.add("a", 11, max_tokens=9).prompt_token_ids.tolist()
    for _ in range(3):
        bench.step()
    fork = bench.scheduler.fork("a", "a1", StopRules(2))  # waits: there is one place, and it is taken
    assert (fork.num_blocks, bench.scheduler.free_blocks) == (4, 0)  # three shared, its own copy of the fourth
    while fork.num_blocks:
        assert [row[0] for row in bench.rows(bench.step())] == ["a"]
    assert fork.status is Status.WAITING
    assert fork.preemptions == 1
    bench.drain(limit=20)
    assert bench.emitted["a"] == reference(prompt, 9)
    assert bench.emitted["a1"] == reference(fork.prompt_token_ids.tolist(), 2)


def test_the_latest_of_several_parked_requests_leaves_first(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(num_blocks=30, prefill_attempt_interval=10**6)
    bench.add("runner", 4, max_tokens=100)
    bench.step()
    bench.add("half", 40, chunk_checkpoints=[8])
    bench.scheduler.clock.decode_step = 0
    bench.step()
    bench.scheduler.fork("half", "half1", StopRules(1))
    occupy_rest(bench)
    bench.step()
    assert alive(bench)["half1"].preemptions == 1
    assert alive(bench)["half"].preemptions == 1  # the fork held shared blocks only: it had to be both


def test_stop_mode_ends_the_victim_with_its_tokens_and_a_reason(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(stop_preempted_requests=True)
    bench.add("a", 4, max_tokens=30)
    bench.step()
    bench.step()
    bench.add("b", 7, max_tokens=30)
    bench.step()
    bench.step()
    occupy_rest(bench)
    for _ in range(4):
        bench.step()
    record = bench.terminals["a"]
    assert record.finish_reason == "insufficient_system_resource"
    assert list(record.output_token_ids) == bench.emitted["a"]
    assert "stop_preempted_requests" in record.text


@pytest.mark.parametrize("interval", [1, 7, 70])
@pytest.mark.parametrize("spare", range(0, 36, 5))
def test_four_requests_finish_in_any_pool_and_nobody_is_preempted_often(
    make_bench: Callable[..., Any], reference: Reference, spare: int, interval: int
) -> None:
    # From "exactly one fits" (12 blocks) up: 8 + 40 tokens in blocks of 4.
    bench = make_bench(num_blocks=13 + spare, prefill_attempt_interval=interval)
    prompts = {name: bench.add(name, 8, max_tokens=40).prompt_token_ids.tolist() for name in "abcd"}
    committed = [0]
    while bench.scheduler.has_unfinished():
        bench.step()
        committed.append(sum(len(tokens) for tokens in bench.emitted.values()))
    window = 2 * interval
    assert all(later > earlier for earlier, later in zip(committed, committed[window:], strict=False))
    bench.audit()
    for name, prompt in prompts.items():
        assert bench.emitted[name] == reference(prompt, 40)
        assert bench.terminals[name].preemptions <= len(prompts) + 1


def test_preemption_changes_no_token(make_bench: Callable[..., Any], reference: Reference) -> None:
    bench = make_bench(num_blocks=16, max_num_batched_tokens=12)
    prompts = {name: bench.add(name, 5 + 3 * number, max_tokens=25) for number, name in enumerate("abcdef")}
    bench.drain()
    assert sum(record.preemptions for record in bench.terminals.values()) > 3
    for name, sequence in prompts.items():
        assert bench.emitted[name] == reference(sequence.prompt_token_ids.tolist(), 25)


def test_a_request_that_outgrew_the_step_budget_is_recomputed_in_chunks_even_without_chunking(
    make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench(enable_chunked_prefill=False, max_num_batched_tokens=16, max_prefill_history_tokens=20)
    sequence = bench.add("a", 10, max_tokens=40)
    for _ in range(20):
        bench.step()
    step = bench.scheduler.schedule()
    bench.scheduler.cancel(step)
    bench.drain()
    assert bench.terminals["a"].preemptions == 1
    assert bench.emitted["a"] == reference(sequence.prompt_token_ids.tolist(), 40)


def test_blocks_go_to_the_shortest_output_first_and_to_the_earliest_among_equals(
    make_bench: Callable[..., Any],
) -> None:
    bench = make_bench()
    bench.add("long", 12, max_tokens=30)
    for _ in range(5):
        bench.step()
    for name in ("first", "second"):
        bench.add(name, 8, max_tokens=30)
    bench.step()  # 16, 8 and 8 positions are computed: everybody's next token opens a block
    [newest] = bench.scheduler.memory.blocks.free_list(1)
    step = bench.step()
    taken = {sequence.request_id: int(sequence.block_table[-1]) - newest for sequence in step.sequences}
    assert taken == {"first": 0, "second": 1, "long": 2}


def test_a_waiting_request_that_has_outgrown_the_whole_pool_ends(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(num_blocks=6)
    sequence = bench.add("a", 19, max_tokens=100)
    bench.step()
    bench.step()
    bench.scheduler._preemption.recompute(sequence)  # a victim of 21 tokens: 6 blocks, the pool has 5
    bench.add("b", 3, max_tokens=1)
    bench.drain(limit=3)
    assert bench.terminals["a"].finish_reason == "insufficient_system_resource"
    assert bench.terminals["b"].finish_reason == "length"


def test_a_victim_that_no_longer_fits_the_whole_pool_ends(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(num_blocks=6, max_num_seqs=2)
    bench.add("a", 19, max_tokens=100)
    bench.step()
    bench.step()  # 20 positions in 5 of 5 blocks, 21 tokens
    bench.scheduler.fork("a", "a1", StopRules(50))
    assert bench.drain() < 10
    assert {name: record.finish_reason for name, record in bench.terminals.items()} == {
        "a": "insufficient_system_resource",
        "a1": "insufficient_system_resource",
    }
    assert "has grown to 21 tokens and needs 6 blocks" in bench.terminals["a"].text
