"""Truncated prefill: what compact leaves out changes nothing that mask keeps, and nothing that later steps read."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.model import ModelConfig
from deepinfer.model.truncation import first_truncated_layer, truncation_problems

INVARIANT = OpOptions(batch_invariant=True)
BenchMaker = Callable[..., Any]
# Window 8 and backtrack 4: 12 positions must be kept at least.
PROMPT, KEEP = 40, 13
LAST_OWNER = 4


@pytest.fixture(scope="module")
def ids(golden: dict[str, Tensor]) -> list[int]:
    return golden["ids"].tolist()


def prefill(
    bench: Any, requests: Sequence[Any], chunks: Sequence[int], keeps: Sequence[int], mode: str | None
) -> list[Tensor]:
    """Prefill all requests together, chunk by chunk; return the hidden rows that each step left."""
    left = []
    for rows in chunks:
        work = [(request, rows) for request in requests]
        options = {} if mode is None else {"keep_starts": keeps, "truncated_by": mode}
        left.append(bench.step("prefill", work, **options).hidden_TD)
    return left


def last_rows(hidden_TD: Tensor, count: int, kept: int) -> Tensor:
    """The last ``kept`` rows of each of ``count`` requests with equally many rows."""
    return hidden_TD.view(count, -1, hidden_TD.shape[1])[:, -kept:]


@pytest.mark.parametrize("chunks", [(40,), (20, 20), (30, 10), (28, 12), (27, 13), (26, 14), (8, 8, 8, 8, 8)])
def test_compact_has_the_bits_of_mask_and_so_has_every_later_step(
    bench_of: BenchMaker, ids: list[int], chunks: tuple[int, ...]
) -> None:
    found = []
    for mode in ("mask", "compact"):
        bench = bench_of(options=INVARIANT)
        requests = [bench.admit(ids[start : start + 50]) for start in (0, 3)]
        keeps = [PROMPT - KEEP] * 2
        left = prefill(bench, requests, chunks, keeps, mode)
        kept = min(KEEP, chunks[-1])
        rows = [last_rows(left[-1], 2, kept).flatten(0, 1)]
        rows += [bench.step("decode", [(request, 1) for request in requests]).hidden_TD for _ in range(6)]
        found.append(torch.cat(rows))
    assert torch.equal(found[0], found[1])
    assert torch.isfinite(found[0]).all()


def test_compact_runs_only_the_kept_rows(bench_of: BenchMaker, ids: list[int]) -> None:
    bench = bench_of(options=INVARIANT)
    requests = [bench.admit(ids[:PROMPT]) for _ in range(2)]
    left = prefill(bench, requests, (20, 20), [PROMPT - KEEP, 10], "compact")
    # The first chunk lies before the kept rows of the first request, which keeps a placeholder.
    assert [len(rows) for rows in left] == [1 + 10, 13 + 20]


def test_requests_of_unlike_lengths_are_cut_each_at_its_own_row(bench_of: BenchMaker, ids: list[int]) -> None:
    alone = []
    for length in (40, 23, 12):
        bench = bench_of(options=INVARIANT)
        request = bench.admit(ids[:length])
        keep = max(0, length - KEEP)
        alone.append(bench.step("prefill", [(request, length)], keep_starts=[keep]).hidden_TD)
    bench = bench_of(options=INVARIANT)
    work = [(bench.admit(ids[:length]), length) for length in (40, 23, 12)]
    together = bench.step("prefill", work, keep_starts=[27, 10, 0]).hidden_TD
    assert torch.equal(torch.cat(alone), together)


def test_a_prompt_that_is_kept_whole_has_the_bits_of_off(bench_of: BenchMaker, ids: list[int]) -> None:
    rows = []
    for mode in (None, "mask", "compact"):
        bench = bench_of(options=INVARIANT)
        rows.append(torch.cat(prefill(bench, [bench.admit(ids[:24])], (10, 14), [0], mode)))
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_windows_begin_no_earlier_than_the_first_kept_row(bench_of: BenchMaker, ids: list[int]) -> None:
    """Garbage in every ring behind the last owner, at positions before the kept rows, reaches nothing."""
    rows = []
    for poisoned in (False, True):
        bench = bench_of(options=INVARIANT, fill="zeros")
        request = bench.admit(ids[:PROMPT])
        bench.step("prefill", [(request, 27)], keep_starts=[27])
        if poisoned:
            for layer in range(LAST_OWNER, bench.model.config.num_hidden_layers):
                bench.pools.window(layer).bytes_ZRb[request.state_slot] = 255
        rows.append(bench.step("prefill", [(request, 13)], keep_starts=[27]).hidden_TD)
    assert torch.equal(rows[0], rows[1])


def test_the_owners_hold_the_entries_of_every_row(bench_of: BenchMaker, ids: list[int]) -> None:
    held = []
    for mode in (None, "compact"):
        bench = bench_of(options=INVARIANT)
        request = bench.admit(ids[:PROMPT])
        prefill(bench, [request], (20, 20), [PROMPT - KEEP], mode)
        held.append(
            [bench.pools.entries(owner).bytes_NEb[request.blocks] for owner in bench.model.config.kv_source_layer_ids]
        )
    for whole, truncated in zip(*held, strict=True):
        assert torch.equal(whole, truncated)


def test_truncation_is_an_approximation_of_off(bench_of: BenchMaker, ids: list[int]) -> None:
    rows = []
    for mode in (None, "compact"):
        bench = bench_of(options=INVARIANT)
        rows.append(prefill(bench, [bench.admit(ids[:PROMPT])], (40,), [PROMPT - KEEP], mode)[0][-1])
    assert not torch.equal(rows[0], rows[1])
    assert torch.nn.functional.cosine_similarity(rows[0], rows[1], dim=0) > 0.9


def test_taps_are_those_of_the_kept_rows(bench_of: BenchMaker, ids: list[int]) -> None:
    taps = []
    for mode in ("mask", "compact"):
        bench = bench_of(options=INVARIANT)
        step = bench.step(
            "prefill", [(bench.admit(ids[:PROMPT]), 40)], keep_starts=[27], truncated_by=mode, with_taps=True
        )
        taps.append(step.taps_TA[-KEEP:])
        assert len(step.taps_TA) == (40 if mode == "mask" else KEEP)
    assert torch.equal(taps[0], taps[1])


def test_the_last_owner_is_found(tiny8: ModelConfig) -> None:
    assert first_truncated_layer(tiny8) == LAST_OWNER


@pytest.mark.parametrize(("keep", "words"), [(11, "is below 12"), (0, "is below 12")])
def test_too_few_kept_rows_are_refused(tiny8: ModelConfig, keep: int, words: str) -> None:
    (problem,) = truncation_problems(tiny8, "compact", keep, 4)
    assert words in problem


def test_what_can_be_truncated_is_not_refused(tiny8: ModelConfig) -> None:
    assert truncation_problems(tiny8, "compact", 12, 4) == []
    assert truncation_problems(tiny8, "off", 0, 4) == []


def test_an_engram_layer_behind_the_last_owner_is_refused(tiny8: ModelConfig) -> None:
    late = replace(tiny8, engram_layer_ids=(1, 6))
    (problem,) = truncation_problems(late, "mask", 12, 4)
    assert "Engram layers [6]" in problem
