"""A request's tokens, limits and history."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deepinfer.errors import ArgumentError
from deepinfer.scheduling.sequence import NO_TOKEN, Sequence, StopRules


def test_a_request_without_memory_has_computed_nothing() -> None:
    sequence = Sequence("a", [5, 6, 7], StopRules(4))
    assert (sequence.length, sequence.num_tokens, sequence.num_blocks, sequence.state_slot) == (3, 0, 0, 0)
    assert sequence.block_table.tolist() == []


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "at least one token"),
        ([[1, 2]], {}, "at least one token"),
        ([1, 2, 3], {"image_spans": [(1, 1)]}, "image span"),
        ([1, 2, 3], {"image_spans": [(2, 4)]}, "image span"),
        ([1, 2, 3], {"image_spans": [(0, 2), (1, 3)]}, "image span"),
        ([1, 2, 3], {"chunk_checkpoints": [0]}, "checkpoint 0"),
        ([1, 2, 3], {"chunk_checkpoints": [4]}, "checkpoint 4"),
    ],
)
def test_a_bad_prompt_is_refused(prompt: Any, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Sequence("a", prompt, StopRules(1), **options)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_rules_under_which_no_token_can_be_made_are_refused(max_tokens: int) -> None:
    with pytest.raises(ArgumentError, match="max_tokens"):
        StopRules(max_tokens)


@pytest.mark.parametrize(
    ("max_tokens", "limit"), [(1, 6), (4, 9), (28, 33), (2**31 - 1, 33), (2**63, 33), (10**18, 33)]
)
def test_the_length_limit_is_the_sooner_of_max_tokens_and_the_token_made_from_the_last_position(
    max_tokens: int, limit: int
) -> None:
    assert Sequence("a", [7] * 5, StopRules(max_tokens)).token_limit(32) == limit


def test_history_is_nearest_first_and_padded_where_the_prompt_begins() -> None:
    sequence = Sequence("a", [5, 6, 7, 8], StopRules(1))
    assert sequence.history_before(0, 3).tolist() == [-1, -1, -1]
    assert sequence.history_before(2, 3).tolist() == [6, 5, -1]
    assert sequence.history_before(4, 3).tolist() == [8, 7, 6]


def test_image_positions_leave_no_history() -> None:
    sequence = Sequence("a", [5, 6, 7, 8, 9, 10], StopRules(1), image_spans=[(1, 3), (4, 5)])
    assert sequence.history_before(6, 6).tolist() == [10, NO_TOKEN, 8, NO_TOKEN, NO_TOKEN, 5]
    assert sequence.history_before(3, 2).tolist() == [NO_TOKEN, NO_TOKEN]
    assert sequence.prompt_token_ids.tolist() == [5, 6, 7, 8, 9, 10]


def test_a_boundary_splits_an_image_only_strictly_inside_it() -> None:
    sequence = Sequence("a", [5] * 10, StopRules(1), image_spans=[(2, 5), (5, 7)])
    assert [sequence.image_span_across(position) is not None for position in range(10)] == [
        position in (3, 4, 6) for position in range(10)
    ]


def test_tokens_run_through_prompt_and_outputs(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    sequence = bench.add("a", [5, 6, 7], max_tokens=200)
    for _ in range(150):
        bench.step()
    made = bench.emitted["a"]
    assert len(made) == 150
    for start, stop in [(0, 3), (0, 5), (2, 4), (3, 3), (3, 8), (140, 153), (150, 153)]:
        assert sequence.token_ids(start, stop).tolist() == [5, 6, 7, *made][start:stop]
    assert list(sequence.output_token_ids) == made


def test_the_callers_list_can_change_without_changing_the_request() -> None:
    prompt = [5, 6, 7]
    sequence = Sequence("a", prompt, StopRules(1))
    prompt[0] = 99
    assert sequence.prompt_token_ids.tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match="read-only"):
        sequence.prompt_token_ids[0] = 1
