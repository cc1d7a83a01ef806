"""How requests end: exactly one terminal record each, the right reason, and no token that was not emitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from deepinfer.errors import ArgumentError, InvariantError
from deepinfer.scheduling.commit import RowFailure
from deepinfer.scheduling.states import Status

Reference = Callable[[Iterable[int], int], list[int]]


def forced(*tokens: int) -> Callable[[Any, list[int]], list[int]]:
    return lambda step, sampled: list(tokens) + sampled[len(tokens) :]


def test_the_end_token_stops_and_is_emitted(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", 5, eos_token_id=1)
    bench.step()
    bench.step(tokens=forced(1))
    record = bench.terminals["a"]
    assert (record.finish_reason, record.stop_reason) == ("stop", None)
    assert bench.emitted["a"][-1] == 1
    bench.audit()


def test_a_stop_token_id_stops_and_is_the_reason(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", 5, stop_token_ids=frozenset({44, 45}), eos_token_id=1)
    bench.add("b", 5, max_tokens=3)
    bench.step()
    bench.step(tokens=forced(45, 45))
    assert (bench.terminals["a"].finish_reason, bench.terminals["a"].stop_reason) == ("stop", 45)
    assert "b" not in bench.terminals  # the id means nothing to a neighbour
    bench.drain()


def test_an_ignored_end_token_does_not_stop_unless_it_is_listed(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", 5, max_tokens=3, eos_token_id=1, ignore_eos=True)
    bench.add("b", 5, max_tokens=3, eos_token_id=1, ignore_eos=True, stop_token_ids=frozenset({1}))
    bench.step(tokens=forced(1, 1))
    assert "a" not in bench.terminals
    assert (bench.terminals["b"].finish_reason, bench.terminals["b"].stop_reason) == ("stop", 1)
    bench.drain()
    assert bench.terminals["a"].finish_reason == "length"


def test_at_the_same_position_stop_wins_over_length(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", 5, max_tokens=2, eos_token_id=1)
    bench.add("b", 5, max_tokens=2)
    bench.step()
    bench.step(tokens=forced(1, 1))
    assert {name: record.finish_reason for name, record in bench.terminals.items()} == {"a": "stop", "b": "length"}


def test_max_tokens_one_ends_with_the_prompt_step(make_bench: Callable[..., Any], reference: Reference) -> None:
    bench = make_bench(max_num_batched_tokens=8)
    for length in (5, 20, 33):
        sequence = bench.add(f"a{length}", length, max_tokens=1)
        assert bench.drain() == -(-length // 8)
        assert bench.emitted[f"a{length}"] == reference(sequence.prompt_token_ids.tolist(), 1)


def test_the_end_token_sampled_for_an_unfinished_chunk_has_no_effect(
    make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench(max_num_batched_tokens=8)
    sequence = bench.add("a", 33, max_tokens=2, eos_token_id=1)
    for _ in range(4):
        step = bench.step(tokens=forced(1))
        assert step.is_partial_R.all()
    assert "a" not in bench.emitted
    bench.drain()
    assert bench.emitted["a"] == reference(sequence.prompt_token_ids.tolist(), 2)


@pytest.mark.parametrize(
    "status", [Status.FINISHED_INVALID, Status.FINISHED_GRAMMAR_FAILED, Status.FINISHED_IMAGE_FAILED]
)
@pytest.mark.parametrize("warm_up", [0, 1, 3])
def test_a_failed_row_ends_its_request_alone_without_a_token(
    status: Status, warm_up: int, make_bench: Callable[..., Any], reference: Reference
) -> None:
    bench = make_bench()
    bench.add("bad", 6, max_tokens=9)
    good = bench.add("good", 5, max_tokens=9)
    for _ in range(warm_up):
        bench.step()
    step = bench.step(failures={0: RowFailure(status, "two logits are NaN")})
    assert step.sequences[0].request_id == "bad"
    record = bench.terminals["bad"]
    assert (record.status, record.text) == (status, "two logits are NaN")
    assert len(bench.emitted.get("bad", [])) == warm_up == len(record.output_token_ids)
    bench.drain()
    assert bench.emitted["good"] == reference(good.prompt_token_ids.tolist(), 9)


def test_a_failure_of_a_row_that_was_aborted_meanwhile_changes_nothing(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", 6)
    failure = {0: RowFailure(Status.FINISHED_INVALID, "NaN")}
    bench.step(failures=failure, between=lambda _: bench.scheduler.abort("a"))
    assert bench.terminals["a"].finish_reason == "abort"
    bench.audit()


def test_a_failed_unfinished_chunk_ends_its_request(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_num_batched_tokens=8)
    bench.add("a", 20)
    bench.step(failures={0: RowFailure(Status.FINISHED_IMAGE_FAILED, "the picture cannot be read")})
    assert bench.terminals["a"].finish_reason == "image_failed"
    bench.audit()


def test_a_stop_string_ends_a_running_request(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", 5)
    bench.step()
    bench.step()
    assert bench.scheduler.finish("a", Status.FINISHED_STOPPED, "END") is True
    bench.take_terminals()
    record = bench.terminals["a"]
    assert (record.finish_reason, record.stop_reason, len(record.output_token_ids)) == ("stop", "END", 2)
    bench.audit()


def test_a_stop_string_at_the_token_of_the_length_cap_wins_while_the_record_is_here(
    make_bench: Callable[..., Any],
) -> None:
    bench = make_bench()
    bench.add("a", 5, max_tokens=1)
    step = bench.scheduler.schedule()
    [record] = bench.scheduler.commit(step, bench.worker.run(step)).terminals
    assert record.finish_reason == "length"
    assert bench.scheduler.finish("a", Status.FINISHED_STOPPED, "END") is True
    assert bench.scheduler.finish("a", Status.FINISHED_STOPPED, "again") is False
    assert bench.scheduler.abort("a") is False
    [taken] = bench.scheduler.take_terminals()
    assert (taken.finish_reason, taken.stop_reason) == ("stop", "END")
    assert taken.output_token_ids == record.output_token_ids
    assert bench.scheduler.finish("a", Status.FINISHED_STOPPED, "END") is False


def test_a_stop_string_found_after_a_preemption_still_stops(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", 5)
    bench.step()
    bench.scheduler.cancel(bench.scheduler.schedule())
    assert bench.scheduler.finish("a", Status.FINISHED_STOPPED, "END")
    bench.take_terminals()
    bench.audit()


def test_only_an_end_can_finish_a_request(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", 5)
    with pytest.raises(ArgumentError, match="RUNNING is not an end"):
        bench.scheduler.finish("a", Status.RUNNING)
    with pytest.raises(InvariantError, match="cannot move from WAITING to FINISHED_LENGTH_CAPPED"):
        bench.scheduler.finish("a", Status.FINISHED_LENGTH_CAPPED)
    bench.scheduler.check_invariants()
    bench.drain()


def test_every_way_to_end_yields_exactly_one_record_with_its_word(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(num_blocks=12, max_num_batched_tokens=32)
    bench.add("ignored", 300)
    bench.add("outgrown", 44, max_tokens=50)
    bench.step()
    bench.step()
    bench.step()
    bench.add("stop", 4, eos_token_id=1)
    bench.add("length", 4, max_tokens=2)
    bench.add("invalid", 4)
    bench.add("grammar", 4)
    bench.add("image", 4, schedulable=False)
    bench.add("abort", 4)
    bench.scheduler.finish("image", Status.FINISHED_IMAGE_FAILED, text="no picture")
    bench.scheduler.abort("abort")
    failures = {
        2: RowFailure(Status.FINISHED_INVALID, "NaN"),
        3: RowFailure(Status.FINISHED_GRAMMAR_FAILED, "dead end"),
    }
    bench.step(tokens=forced(1), failures=failures)
    bench.drain()
    assert {name: record.finish_reason for name, record in bench.terminals.items()} == {
        "ignored": "ignored",
        "outgrown": "insufficient_system_resource",
        "stop": "stop",
        "length": "length",
        "invalid": "invalid",
        "grammar": "grammar_failed",
        "image": "image_failed",
        "abort": "abort",
    }


def test_commit_says_row_by_row_what_was_emitted_and_what_ended(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_num_batched_tokens=16)
    for name, length, max_tokens in (("a", 3, 1), ("b", 3, 5), ("c", 3, 5), ("d", 30, 5)):
        bench.add(name, length, max_tokens=max_tokens)
    step = bench.scheduler.schedule()
    bench.scheduler.abort("b")
    result = bench.scheduler.commit(step, [10, 11, 12, 13], {2: RowFailure(Status.FINISHED_INVALID, "NaN")})
    assert result.token_R.tolist() == [10, -1, -1, -1]
    assert result.is_emitted_R.tolist() == [True, False, False, False]
    assert result.is_finished_R.tolist() == [True, False, True, False]
    assert [tuple(record) for record in result.records()] == [("a", 10, True), ("c", None, True)]
    assert [record.request_id for record in result.terminals] == ["c", "a"]
    assert [record.request_id for record in bench.scheduler.take_terminals()] == ["b", "c", "a"]
