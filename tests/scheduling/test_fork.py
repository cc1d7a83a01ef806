"""Forks: what is shared, what is copied, and that neither side ever sees the other's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from deepinfer.cache.blocks import BlockId
from deepinfer.errors import ArgumentError
from deepinfer.scheduling.config import EngineType
from deepinfer.scheduling.sequence import Sequence, StopRules

Reference = Callable[[Iterable[int], int], list[int]]


def counts(bench: Any, sequence: Sequence) -> list[int]:
    return [bench.scheduler.memory.blocks.reference_count(BlockId(block)) for block in sequence.block_table.tolist()]


def different_tokens(step: Any, sampled: list[int]) -> list[int]:
    """Let a fork's first tokens differ from its parent's, as another seed would."""
    return [
        (token + 1) % 90 + 2 if sequence.request_id.endswith("f") else token
        for token, sequence in zip(sampled, step.sequences, strict=True)
    ]


@pytest.mark.parametrize("residue", [0, 1, 2, 3])
def test_parent_and_child_write_no_block_that_the_other_reads(
    residue: int, make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench()
    parent = bench.add("p", 8 + residue, max_tokens=12)
    bench.step()
    child = bench.scheduler.fork("p", "pf", StopRules(9))
    shared = (8 + residue) // 4
    assert child.block_table[:shared].tolist() == parent.block_table[:shared].tolist()
    assert counts(bench, parent)[:shared] == [2] * shared
    assert child.num_blocks == shared + (1 if residue else 0)
    assert len(bench.scheduler.memory.block_copies) == (1 if residue else 0)
    while bench.scheduler.has_unfinished():
        bench.step(tokens=different_tokens)
    assert bench.emitted["p"] == reference(parent.prompt_token_ids.tolist(), 12)
    own = []
    history = child.prompt_token_ids.tolist()
    for _ in range(9):
        own.append((reference(history + own, 1)[0] + 1) % 90 + 2)
    assert bench.emitted["pf"] == own
    bench.audit()


def test_the_childs_history_is_prompt_and_its_output_restarts(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("p", 6, max_tokens=9)
    for _ in range(4):
        bench.step()
    child = bench.scheduler.fork("p", "c", StopRules(2))
    assert child.prompt_token_ids.tolist()[6:] == bench.emitted["p"]
    assert (child.num_output_tokens, child.num_tokens, child.length) == (0, 9, 10)
    bench.drain()
    assert bench.emitted["c"] == bench.emitted["p"][4:6]
    assert bench.terminals["c"].num_prompt_tokens == 10


def test_a_fork_runs_in_the_next_decode_step_before_its_parent(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("p", 6, max_tokens=9)
    bench.add("q", 6, max_tokens=9)
    bench.step()
    bench.scheduler.fork("p", "c", StopRules(4))
    bench.scheduler.fork("p", "d", StopRules(4))
    assert [row[0] for row in bench.rows(bench.step())] == ["d", "c", "p", "q"]


def test_a_fork_of_a_fork_before_any_step_copies_from_the_first_source(
    make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench()
    bench.add("p", 6, max_tokens=3)
    bench.step()
    child = bench.scheduler.fork("p", "c", StopRules(6))
    grandchild = bench.scheduler.fork("c", "g", StopRules(6))
    bench.scheduler.abort("p")  # the source must not change hands before the copies are made
    bench.take_terminals()
    newcomer = bench.add("n", 20, max_tokens=2)
    bench.drain()
    assert bench.emitted["c"] == bench.emitted["g"] == reference(child.prompt_token_ids.tolist(), 6)
    assert bench.emitted["n"] == reference(newcomer.prompt_token_ids.tolist(), 2)
    assert grandchild.root_arrival == child.root_arrival == 1


def test_a_copy_whose_fork_is_gone_is_not_made_and_its_source_is_free_at_once(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("p", 6)
    bench.step()
    bench.scheduler.fork("p", "c", StopRules(6))
    bench.scheduler.abort("p")
    bench.scheduler.abort("c")
    bench.take_terminals()
    bench.audit()


def test_a_fork_of_a_half_computed_prompt_keeps_its_progress_and_goes_to_the_front(
    make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench(max_num_batched_tokens=10)
    parent = bench.add("p", 30, max_tokens=3)
    bench.add("q", 5, max_tokens=3)
    bench.step()
    child = bench.scheduler.fork("p", "c", StopRules(4))
    assert child.num_tokens == 10
    assert child.block_table[:2].tolist() == parent.block_table[:2].tolist()
    assert [sequence.request_id for sequence in bench.scheduler.roster.waiting] == ["c", "p", "q"]
    assert bench.rows(bench.step()) == [("c", 10, 10, 20)]
    bench.drain()
    prompt = parent.prompt_token_ids.tolist()
    assert bench.emitted["p"] == reference(prompt, 3)
    assert bench.emitted["c"] == reference(prompt, 4)


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_fork_of_a_waiting_request_queues_behind_everybody(
    max_tokens: int, make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench()
    prompt = bench.add("p", 9, max_tokens=2).prompt_token_ids.tolist()
    bench.add("q", 5, max_tokens=3)
    bench.scheduler.fork("p", "c", StopRules(max_tokens))
    assert [sequence.request_id for sequence in bench.scheduler.roster.waiting] == ["p", "q", "c"]
    bench.drain()
    assert bench.emitted["c"] == reference(prompt, max_tokens)


def test_a_fork_while_a_step_runs_starts_with_the_tokens_that_were_known(
    make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench()
    bench.add("p", 9, max_tokens=6)
    bench.step()
    bench.step()
    children = []
    bench.step(between=lambda _: children.append(bench.scheduler.fork("p", "c", StopRules(3))))
    [child] = children
    assert child.length == 9 + 2
    bench.drain()
    assert bench.emitted["c"] == reference(child.prompt_token_ids.tolist(), 3) == bench.emitted["p"][2:5]


@pytest.mark.parametrize("short", ["blocks", "slots"])
def test_a_fork_without_memory_for_its_copies_computes_its_history_itself(
    short: str, make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench(num_state_slots=2) if short == "slots" else make_bench(num_blocks=4)
    bench.add("p", 10, max_tokens=2)
    bench.step()
    child = bench.scheduler.fork("p", "c", StopRules(1))
    assert (child.num_tokens, child.state_slot) == (0, 0)
    bench.drain()
    assert bench.emitted["c"] == reference(child.prompt_token_ids.tolist(), 1)


def test_a_stream_of_forks_does_not_starve_the_queue(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_num_seqs=3, num_state_slots=4)
    bench.add("p", 6, max_tokens=150)
    bench.step()
    bench.add("q", 6, max_tokens=2)
    number = 0
    while "q" not in bench.terminals:
        for _ in range(3):
            bench.scheduler.fork("p", f"f{number}", StopRules(2))
            number += 1
        bench.step()
        assert number < 60
    bench.add("r", 6, max_tokens=2)
    while bench.scheduler.num_running > 1:
        bench.step()
    assert bench.scheduler.fork("p", "again", StopRules(2)).state_slot  # q was served: forks may overtake once more


def test_a_fork_of_nobody_or_of_a_finished_request_is_refused(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("p", 5, max_tokens=1)
    bench.drain()
    for parent in ("p", "nobody"):
        with pytest.raises(ArgumentError, match=f"{parent!r} is not alive"):
            bench.scheduler.fork(parent, "c", StopRules(1))
    bench.audit()


def test_forks_near_the_context_limit_end_like_everybody(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_model_len=16)
    bench.add("p", 15, max_tokens=100)
    bench.step()
    bench.scheduler.fork("p", "c", StopRules(100))
    bench.drain()
    assert {name: len(tokens) for name, tokens in bench.emitted.items()} == {"p": 2, "c": 1}


def test_a_prompt_engine_computes_a_forks_last_position_as_a_prompt(
    make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench(engine_type=EngineType.PROMPT)
    bench.add("p", 6, max_tokens=9)
    bench.step()
    child = bench.scheduler.fork("p", "c", StopRules(4))
    assert bench.rows(bench.step()) == [("c", 6, 1, 7)]
    assert bench.emitted["c"] == reference(child.prompt_token_ids.tolist(), 1)


def test_a_completion_engine_ends_a_fork_that_it_cannot_serve(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(engine_type=EngineType.COMPLETION, stop_preempted_requests=True, num_state_slots=2)
    bench.scheduler.try_receive(Sequence("p", range(2, 9), StopRules(3)))
    bench.scheduler.fork("p", "c", StopRules(4))
    bench.take_terminals()
    assert bench.terminals["c"].finish_reason == "insufficient_system_resource"
    assert "'p'" in bench.terminals["c"].text


def test_siblings_that_end_in_one_step_give_back_what_they_share_once(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_num_seqs=8, num_blocks=64, num_state_slots=9)
    bench.add("p", 8, max_tokens=12)
    bench.step()
    for name in ("a", "b", "c", "d"):
        bench.scheduler.fork("p", name, StopRules(11))
    num_alive = 0
    while bench.scheduler.has_unfinished():
        num_alive = len(bench.scheduler.roster)
        bench.step()
    assert num_alive == 5
    assert bench.scheduler.free_blocks == bench.scheduler.memory.blocks.num_usable
    bench.audit()
