"""Rows of a step: what each request asks, at each of its outputs, whatever its neighbours ask."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from deepinfer.accelerator.ops.sampling import LogitAdjustments, TokenEntries
from deepinfer.sampling import Keying, RowRequest, build_sampling_step

CPU = torch.device("cpu")
MakeRow = Callable[..., RowRequest]


def entries(places: TokenEntries | None, row: int) -> list[int]:
    if places is None:
        return []
    return sorted(places.ids_N[places.rows_N == row].tolist())


def adjustments(rows: Sequence[RowRequest]) -> LogitAdjustments:
    found = build_sampling_step(rows, CPU).adjustments
    assert found is not None
    return found


def test_plain_rows_ask_for_nothing_more(make_row: MakeRow) -> None:
    step = build_sampling_step([make_row(), make_row(temperature=0.5, top_k=7, top_p=0.5, min_p=0.25)], CPU)
    assert step.adjustments is None
    assert step.processed is None
    assert step.raw is None
    assert step.rows.temperature_B.tolist() == [1.0, 0.5]
    assert step.rows.top_k_B.tolist() == [0, 7]
    assert step.rows.top_p_B.tolist() == [1.0, 0.5]
    assert step.rows.min_weight_B.tolist() == [0, 2**29]
    assert step.rows.forced_ids_B.tolist() == [-1, -1]
    assert step.rows.temperature_B.dtype == torch.float64
    assert step.rows.top_p_B.dtype == torch.float64


@pytest.mark.parametrize(("asked", "stored"), [(-1, 0), (0, 0), (1, 1), (100, 100), (101, 0), (102, 0), (2**70, 0)])
def test_a_top_k_of_the_vocabulary_or_of_nothing_is_no_filter(make_row: MakeRow, asked: int, stored: int) -> None:
    step = build_sampling_step([make_row(top_k=asked)], CPU)
    assert step.rows.top_k_B.tolist() == [stored]
    assert step.rows.facts.has_top_k == (stored > 0)
    assert step.rows.facts.largest_top_k == stored


def test_the_facts_are_the_union_of_the_rows(make_row: MakeRow) -> None:
    facts = build_sampling_step([make_row(), make_row()], CPU).rows.facts
    flags = (facts.has_greedy, facts.has_top_k, facts.has_top_p, facts.has_min_p, facts.has_forced)
    assert not any(flags)
    assert facts.bounded_by_top_k
    facts = build_sampling_step([make_row(temperature=0), make_row(top_k=9, top_p=0.5), make_row()], CPU).rows.facts
    assert facts.has_greedy
    assert facts.has_drawn
    assert not build_sampling_step([make_row(temperature=0)], CPU).rows.facts.has_drawn
    assert facts.has_top_p
    assert facts.bounded_by_top_k
    assert facts.largest_top_k == 9
    assert not build_sampling_step([make_row(top_k=9, top_p=0.5), make_row(top_p=0.5)], CPU).rows.facts.bounded_by_top_k


def test_streams_are_keyed_by_the_index_of_the_token_being_made(make_row: MakeRow) -> None:
    rows = [
        make_row(prompt=[1] * 9),
        make_row(prompt=[1] * 9, outputs=[5, 6]),
        make_row(prompt=[1] * 5, outputs=[2] * 6),
    ]
    assert build_sampling_step(rows, CPU).rows.streams_B.tolist() == [36, 44, 44]
    assert build_sampling_step(rows, CPU, keying=Keying.ORIGINAL).rows.streams_B.tolist() == [27, 33, 33]


def test_seeds_are_the_requests_own(make_row: MakeRow) -> None:
    rows = [make_row(seed=-(2**63)), make_row(seed=2**63 - 1), make_row(seed=0)]
    assert build_sampling_step(rows, CPU).rows.seeds_B.tolist() == [-(2**63), 2**63 - 1, 0]


@pytest.mark.parametrize("first", [0, 1, 2, 5])
def test_the_end_token_is_banned_for_the_first_n_outputs_for_any_n(make_row: MakeRow, first: int) -> None:
    for emitted in range(8):
        row = make_row(outputs=[1] * emitted, first_n_token_no_eos=first, blacklist_token_ids=[7], ignore_eos=True)
        assert entries(adjustments([row]).bans, 0) == ([7, 100] if emitted < first else [7])


def test_min_tokens_bans_everything_that_would_end_the_request(make_row: MakeRow) -> None:
    for emitted in range(5):
        row = make_row(outputs=[1] * emitted, min_tokens=3, stop_token_ids=[40, 41])
        assert entries(adjustments([row]).bans, 0) == ([40, 41, 100] if emitted < 3 else [])


def test_min_tokens_leaves_an_end_token_alone_that_ends_nothing(make_row: MakeRow) -> None:
    row = make_row(min_tokens=3, stop_token_ids=[40], ignore_eos=True)
    assert entries(adjustments([row]).bans, 0) == [40]


def test_the_longer_of_two_early_bans_counts(make_row: MakeRow) -> None:
    for emitted, expected in ((0, [40, 100]), (1, [40, 100]), (2, [100]), (3, [100]), (4, [])):
        row = make_row(outputs=[1] * emitted, min_tokens=2, first_n_token_no_eos=4, stop_token_ids=[40])
        assert entries(adjustments([row]).bans, 0) == expected


def test_a_models_end_tokens_are_all_banned(make_row: MakeRow) -> None:
    assert entries(adjustments([make_row(first_n_token_no_eos=1, end=(98, 99))]).bans, 0) == [98, 99]


def test_forced_tokens_follow_the_output_position(make_row: MakeRow) -> None:
    forced = [build_sampling_step([make_row(outputs=[1] * n, golden_token_ids=[5, -1, 9])], CPU).rows for n in range(5)]
    assert [rows.forced_ids_B.tolist() for rows in forced] == [[5], [-1], [9], [-1], [-1]]


def test_penalties_count_outputs_and_repetition_sees_the_prompt(make_row: MakeRow) -> None:
    row = make_row(
        prompt=[1, 2, 2],
        outputs=[2, 3, 3, 3],
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
    )
    found = adjustments([make_row(), row]).penalties
    assert found is not None
    assert found.rows_N.tolist() == [1, 1, 1]
    by_id = dict(zip(found.ids_N.tolist(), found.subtract_N.tolist(), strict=True))
    assert by_id == {1: 0.0, 2: 0.75, 3: 1.25}
    assert found.factors_N.tolist() == [1.5] * 3


def test_without_repetition_the_prompt_is_not_penalised(make_row: MakeRow) -> None:
    found = adjustments([make_row(prompt=[1, 2], outputs=[3], presence_penalty=1)]).penalties
    assert found is not None
    assert found.ids_N.tolist() == [3]
    assert found.factors_N.tolist() == [1.0]


def test_penalties_follow_an_output_that_grows_and_one_that_is_shorter_again(make_row: MakeRow) -> None:
    row = make_row(prompt=[1], presence_penalty=1, frequency_penalty=0.5)
    outputs: list[int] = []
    for token_id in (4, 5, 4, 4):
        outputs.append(token_id)
        grown = row._replace(output_token_ids=outputs)
        fresh = make_row(prompt=[1], outputs=tuple(outputs), presence_penalty=1, frequency_penalty=0.5)
        both = [adjustments([each]).penalties for each in (grown, fresh)]
        assert both[0] is not None
        assert both[1] is not None
        assert both[0].ids_N.tolist() == both[1].ids_N.tolist()
        assert both[0].subtract_N.tolist() == both[1].subtract_N.tolist()
    shorter = adjustments([row._replace(output_token_ids=[4])]).penalties
    assert shorter is not None
    assert (shorter.ids_N.tolist(), shorter.subtract_N.tolist()) == ([4], [1.5])


def test_log_probability_rows_are_listed_with_their_own_counts(make_row: MakeRow) -> None:
    rows = [make_row(), make_row(logprobs=3), make_row(logprobs=0, raw_logprobs=True), make_row(logprobs=5)]
    step = build_sampling_step(rows, CPU)
    assert step.processed is not None
    assert step.raw is not None
    assert (step.processed.numbers, step.processed.counts, step.processed.top_count) == ((1, 3), (3, 5), 5)
    assert (step.raw.numbers, step.raw.counts, step.raw.rows_N.tolist()) == ((2,), (0,), [2])


def test_a_row_is_described_the_same_in_every_batch(make_row: MakeRow) -> None:
    rows = [
        make_row(temperature=0.5, seed=3),
        make_row(logit_bias={5: 1.0, 4: -2.0}, outputs=[1]),
        make_row(blacklist_token_ids=[9, 3, 3], min_tokens=2),
        make_row(allowed_token_ids=[8, 8, 7]),
        make_row(repetition_penalty=1.1, outputs=[4, 4]),
        make_row(golden_token_ids=[6]),
    ]
    together = build_sampling_step(rows, CPU)
    assert together.adjustments is not None
    for number, row in enumerate(rows):
        alone = build_sampling_step([row], CPU)
        for name in ("temperature_B", "top_k_B", "top_p_B", "min_weight_B", "seeds_B", "streams_B", "forced_ids_B"):
            assert getattr(alone.rows, name)[0] == getattr(together.rows, name)[number]
        parts = alone.adjustments if alone.adjustments is not None else LogitAdjustments()
        assert entries(parts.bans, 0) == entries(together.adjustments.bans, number)
        for name in ("bias", "penalties"):
            part = getattr(parts, name)
            whole = getattr(together.adjustments, name)
            assert (part.ids_N.tolist() if part is not None else []) == whole.ids_N[whole.rows_N == number].tolist()
        restricted = together.adjustments.allowed
        assert restricted is not None
        assert restricted.restricted_rows_M.tolist() == [3]
        if parts.allowed is not None:
            assert entries(parts.allowed.entries, 0) == entries(restricted.entries, number) == [7, 8]


def test_a_bitmask_alone_is_an_adjustment(make_row: MakeRow) -> None:
    mask_W = np.array([5, 0, -1, 7], np.int32)
    rows = [make_row(), make_row()._replace(allowed_W=mask_W)]
    found = build_sampling_step(rows, CPU).adjustments
    assert found is not None
    assert found.bitmask_BW.tolist() == [[-1, -1, -1, -1], mask_W.tolist()]
    assert found.bans is None
    assert build_sampling_step(rows[:1], CPU).adjustments is None


def test_no_rows_make_an_empty_step() -> None:
    step = build_sampling_step([], CPU)
    assert step.rows.seeds_B.shape == (0,)
    assert step.adjustments is None


def test_a_tiny_min_p_is_no_filter_and_one_is_the_largest_weight(make_row: MakeRow) -> None:
    step = build_sampling_step([make_row(min_p=5e-324), make_row(min_p=1), make_row(min_p=math.ulp(1))], CPU)
    assert step.rows.min_weight_B.tolist() == [0, 2**31, 0]
