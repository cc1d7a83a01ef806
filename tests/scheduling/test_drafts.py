"""Drafts in the scheduler: rows, blocks and positions of verifying steps, and runs of several tokens.

Reported faults: 5 (the context limit), 14 (what ends inside a run), 30 (stale results), 44 (blocks at an edge).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from deepinfer.scheduling.commit import RowFailure
from deepinfer.scheduling.states import Status

Make = Callable[..., Any]
Reference = Callable[[Iterable[int], int], list[int]]


def right(request_id: str, position: int) -> bool:
    return True


def wrong(request_id: str, position: int) -> bool:
    return False


@pytest.mark.parametrize("drafts", range(6))
@pytest.mark.parametrize("length", range(8, 12))
@pytest.mark.parametrize("accepted", range(4))
def test_blocks_are_those_of_the_length_and_the_drafts(
    make_bench: Make, drafts: int, length: int, accepted: int
) -> None:
    """Fault 44; and nothing is written outside of them: the bench would find its neighbour's memory changed."""
    bench = make_bench(num_speculative_tokens=drafts, is_right=lambda _, position: position % 4 < accepted)
    neighbour = bench.add("neighbour", 9, max_tokens=20)
    sequence = bench.add("a", length, max_tokens=20)
    for _ in range(9):
        step = bench.step(between=lambda step: check_blocks(bench, step))
        if step.kind == "decode" and sequence.num_blocks:
            assert sequence.num_blocks == -(-step.k_R.max() // 4) or step.num_requests > 1
    bench.drain()
    assert len(bench.emitted["a"]) == 20
    assert len(neighbour.output_token_ids) == 20


def check_blocks(bench: Any, step: Any) -> None:
    if step.kind == "decode":
        owned = [sequence.num_blocks for sequence in step.sequences]
        assert owned == [-(-k // 4) for k in step.k_R.tolist()]
        assert step.q_R.tolist() == [1 + bench.config.num_speculative_tokens] * step.num_requests
        assert step.num_tokens == int(step.q_R.sum())


@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("rightness", [right, wrong])
@pytest.mark.parametrize("prompt", range(26, 33))
def test_a_request_ends_at_the_context_limit_and_writes_nothing_beyond(
    make_bench: Make, reference: Reference, prompt: int, rightness: Callable[[str, int], bool], drafts: int
) -> None:
    """Fault 5. The bench refuses a step whose positions pass max_model_len."""
    bench = make_bench(max_model_len=32, num_speculative_tokens=drafts, is_right=rightness)
    sequence = bench.add("a", prompt, max_tokens=60)
    healthy = bench.add("b", 5, max_tokens=9)
    steps = bench.drain()
    made = bench.emitted["a"]
    assert bench.terminals["a"].finish_reason == "length"
    assert made == reference(sequence.prompt_token_ids.tolist(), 33 - prompt)
    assert bench.emitted["b"] == reference(healthy.prompt_token_ids.tolist(), 9)
    assert steps <= max(33 - prompt, 9) + 1


def test_a_pool_that_holds_a_request_without_drafts_holds_it_with_them(make_bench: Make, reference: Reference) -> None:
    bench = make_bench(num_blocks=6, num_speculative_tokens=5)  # 20 positions
    sequence = bench.add("a", 9, max_tokens=12)
    bench.drain()
    assert bench.terminals["a"].finish_reason == "length"
    assert bench.emitted["a"] == reference(sequence.prompt_token_ids.tolist(), 12)


def test_nobody_is_preempted_for_another_ones_drafts(make_bench: Make, reference: Reference) -> None:
    """Two requests whose 8 blocks are exactly enough: without their drafts, which get what is left."""
    bench = make_bench(num_blocks=9, num_speculative_tokens=5)
    prompts = {name: bench.add(name, 8, max_tokens=9).prompt_token_ids.tolist() for name in "ab"}
    widths = set()
    while bench.scheduler.has_unfinished():
        step = bench.step()
        widths.update(step.q_R.tolist() if step.kind == "decode" else [])
    assert all(bench.terminals[name].preemptions == 0 for name in "ab")
    assert {name: bench.emitted[name] for name in "ab"} == {name: reference(prompts[name], 9) for name in "ab"}
    assert min(widths) < 6 <= max(widths)
    bench.audit()


@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_preempted_requests_go_on_with_the_same_tokens(make_bench: Make, reference: Reference, drafts: int) -> None:
    bench = make_bench(num_blocks=14, num_speculative_tokens=drafts)
    prompts = {
        name: bench.add(name, 6 + nth, max_tokens=24).prompt_token_ids.tolist() for nth, name in enumerate("abcd")
    }
    bench.drain()
    assert sum(record.preemptions for record in bench.terminals.values()) > 0
    assert bench.emitted == {name: reference(prompt, 24) for name, prompt in prompts.items()}
    assert all(record.preemptions <= len(prompts) + 1 for record in bench.terminals.values())


@pytest.mark.parametrize("end", ["eos", "stop"])
def test_a_run_is_cut_behind_the_token_that_ends_its_request(make_bench: Make, reference: Reference, end: str) -> None:
    """Fault 14: neither tokens nor positions behind the end, wherever in the run it lies."""
    for nth in range(1, 8):
        bench = make_bench(num_speculative_tokens=5, is_right=right)
        plain = reference(bench.add("first", 7, max_tokens=1).prompt_token_ids.tolist(), 8)
        if plain.index(plain[nth]) < nth:
            continue
        bench = make_bench(num_speculative_tokens=5, is_right=right)
        rules = {"eos_token_id": plain[nth]} if end == "eos" else {"stop_token_ids": frozenset([plain[nth]])}
        bench.add("first", 7, max_tokens=30, **rules)
        bench.drain()
        record = bench.terminals["first"]
        assert list(record.output_token_ids) == plain[: nth + 1]
        assert (record.finish_reason, record.stop_reason) == ("stop", None if end == "eos" else plain[nth])


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_stop_wins_at_the_token_of_the_length_cap_and_loses_behind_it(make_bench: Make, max_tokens: int) -> None:
    bench = make_bench(num_speculative_tokens=5)
    bench.add("a", 7, max_tokens=max_tokens, eos_token_id=1)
    bench.step(tokens=lambda step, _: [[9]])
    if max_tokens > 1:
        bench.step(tokens=lambda step, _: [[9, 9, 9, 1, 9, 9]])
    if max_tokens >= 5:
        assert (bench.terminals["a"].finish_reason, bench.emitted["a"]) == ("stop", [9, 9, 9, 9, 1])
    else:
        assert (bench.terminals["a"].finish_reason, bench.emitted["a"]) == ("length", [9] * max_tokens)
    bench.audit()


def test_the_order_of_rows_follows_the_lengths_after_runs_of_different_lengths(make_bench: Make) -> None:
    bench = make_bench(num_speculative_tokens=3, is_right=lambda name, _: name == "b")
    for name, length in (("a", 9), ("b", 8), ("c", 7)):
        bench.add(name, length, max_tokens=30)
    orders = [[row[0] for row in bench.rows(bench.step())] for _ in range(5)]
    assert orders[1] == ["a", "b", "c"]
    assert orders[4] == ["b", "a", "c"]


def test_a_failing_row_keeps_the_tokens_before_it(make_bench: Make, reference: Reference) -> None:
    bench = make_bench(num_speculative_tokens=3, is_right=right)
    bench.add("bad", 6)
    good = bench.add("good", 5, max_tokens=9)
    bench.step()
    bench.step(
        tokens=lambda step, runs: [run[:-1] if row == 0 else run for row, run in enumerate(runs)],
        failures={0: RowFailure(Status.FINISHED_INVALID, "NaN")},
    )
    record = bench.terminals["bad"]
    assert (record.finish_reason, len(record.output_token_ids)) == ("invalid", 4)
    bench.drain()
    assert bench.emitted["good"] == reference(good.prompt_token_ids.tolist(), 9)


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_a_run_of_a_request_that_lost_its_memory_meanwhile_is_nobodys(
    make_bench: Make, reference: Reference, end: str
) -> None:
    """Fault 30, the part without asynchronous steps: the result is known by the epoch of the row."""
    bench = make_bench(num_speculative_tokens=3, is_right=right)
    sequence = bench.add("a", 6, max_tokens=20)
    bench.step()

    def lose(step: Any) -> None:
        if end == "abort":
            bench.scheduler.abort("a")
        else:
            bench.scheduler._preemption.preempt(sequence)
        assert not bench.scheduler.current_rows(step).any()

    bench.step(between=lose)
    assert len(bench.emitted["a"]) == 1
    bench.drain()
    if end == "preempt":
        assert bench.emitted["a"] == reference(sequence.prompt_token_ids.tolist(), 20)
    else:
        assert bench.terminals["a"].finish_reason == "abort"


def test_forks_of_drafting_parents_share_what_is_committed_only(make_bench: Make, reference: Reference) -> None:
    bench = make_bench(num_speculative_tokens=4)
    parent = bench.add("parent", 9, max_tokens=30)
    expected = reference(parent.prompt_token_ids.tolist(), 40)
    for nth in range(4):
        bench.step()
        made = parent.num_output_tokens
        child = bench.scheduler.fork("parent", f"child{nth}", parent.stop_rules.__class__(6))
        assert child.num_tokens == parent.num_tokens == parent.length - 1
        bench.step()
        bench.step()
        assert bench.emitted[f"child{nth}"] == expected[made : made + len(bench.emitted[f"child{nth}"])]
    bench.drain()
    assert bench.emitted["parent"] == expected[:30]


def test_records_name_every_token_of_a_run(make_bench: Make) -> None:
    bench = make_bench(num_speculative_tokens=3, is_right=right)
    bench.add("a", 6, max_tokens=4)
    bench.step()
    step = bench.scheduler.schedule()
    result = bench.commit(step, [[5, 6, 7, 8]], {})
    assert list(result.records().tuples()) == [("a", 5, False), ("a", 6, False), ("a", 7, True)]
    assert np.array_equal(result.token_R, [7])
