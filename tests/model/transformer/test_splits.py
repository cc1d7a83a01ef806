"""Prefill in any chunks equals step-by-step decode of the same tokens (bit for bit where R2 is asked for)."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions

INVARIANT = OpOptions(batch_invariant=True)
LONGEST, DECODED = 40, 20
BenchMaker = Callable[..., Any]


@pytest.fixture(scope="module")
def ids(golden: dict[str, Tensor]) -> list[int]:
    return golden["ids"].tolist()


@pytest.fixture(scope="module")
def reference_of(bench_of: BenchMaker, ids: list[int]) -> Callable[[OpOptions], Tensor]:
    """Logits of every position, one decode step each, alone in the batch."""
    found: dict[OpOptions, Tensor] = {}

    def reference(options: OpOptions) -> Tensor:
        if options not in found:
            bench = bench_of(options=options)
            found[options] = bench.decode(bench.admit(ids[: LONGEST + DECODED]), LONGEST + DECODED)
        return found[options]

    return reference


def two_way(length: int) -> list[tuple[int, ...]]:
    return [(first, length - first) for first in range(1, length)] or [(length,)]


def run_splits(bench: Any, ids: Sequence[int], splits: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Run many splits as neighbours in the same steps; return each request's logits."""
    requests = [bench.admit(ids[: sum(split)]) for split in splits]
    logits: list[list[Tensor]] = [[] for _ in splits]
    for turn in range(max(map(len, splits))):
        work = [(number, split[turn]) for number, split in enumerate(splits) if turn < len(split)]
        rows = bench.logits("prefill", [(requests[number], count) for number, count in work])
        for (number, _), part in zip(work, rows.split([count for _, count in work]), strict=True):
            logits[number].append(part)
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("kv_cache_dtype", ["released", "float32"])
def test_every_two_way_split_has_the_bits_of_decode(
    bench_of: BenchMaker, ids: list[int], reference_of: Callable[[OpOptions], Tensor], kv_cache_dtype: str
) -> None:
    options = OpOptions(batch_invariant=True, kv_cache_dtype=kv_cache_dtype)
    reference = reference_of(options)
    for length in range(1, LONGEST + 1):
        bench = bench_of(options=options, num_blocks=260, num_slots=50)
        splits = two_way(length)
        for split, logits in zip(splits, run_splits(bench, ids, splits), strict=True):
            assert torch.equal(logits, reference[:length]), split


def test_a_sample_of_three_way_splits_has_the_bits_of_decode(
    bench_of: BenchMaker, ids: list[int], reference_of: Callable[[OpOptions], Tensor]
) -> None:
    reference = reference_of(INVARIANT)
    draw = random.Random(5)
    for _ in range(8):
        splits = []
        for _ in range(40):
            length = draw.randint(3, LONGEST)
            first, second = sorted(draw.sample(range(1, length), 2))
            splits.append((first, second - first, length - second))
        bench = bench_of(options=INVARIANT, num_blocks=260, num_slots=50)
        for split, logits in zip(splits, run_splits(bench, ids, splits), strict=True):
            assert torch.equal(logits, reference[: sum(split)]), split


def test_a_split_alone_has_the_bits_of_decode_at_every_boundary_residue(
    bench_of: BenchMaker, ids: list[int], reference_of: Callable[[OpOptions], Tensor]
) -> None:
    """Alone in its step: ring 12, blocks of 8, pairs of 2 and candidate blocks of 4 meet at 24."""
    reference = reference_of(INVARIANT)
    bench = bench_of(options=INVARIANT)
    for first in range(1, 25):
        request = bench.admit(ids[:LONGEST])
        assert torch.equal(bench.prefill(request, (first, LONGEST - first)), reference[:LONGEST]), first
        bench.release(request)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_twenty_tokens_decoded_after_a_prompt_of_any_length(
    bench_of: BenchMaker, ids: list[int], reference_of: Callable[[OpOptions], Tensor], batch_invariant: bool
) -> None:
    options = OpOptions(batch_invariant=batch_invariant, kv_cache_dtype="float32")
    bench = bench_of(options=options, num_blocks=400, num_slots=50)
    requests = []
    for length in range(1, LONGEST + 1):
        request = bench.admit(ids[: length + DECODED])
        bench.prefill(request, [part for part in (length // 3, length - length // 3) if part])
        requests.append(request)
    reference = reference_of(options)
    for step in range(DECODED):
        logits = bench.logits("decode", [(request, 1) for request in requests])
        expected = reference[1 + step : 1 + step + LONGEST]
        if batch_invariant:
            assert torch.equal(logits, expected), step
        else:
            torch.testing.assert_close(logits, expected, rtol=0, atol=5e-6)


def test_prefill_equals_decode_to_5e6_in_the_default_mode(
    bench_of: BenchMaker, ids: list[int], reference_of: Callable[[OpOptions], Tensor]
) -> None:
    options = OpOptions(kv_cache_dtype="float32")
    for length in (1, 2, 7, 8, 9, 12, 13, 16, 17, 23, 40):
        bench = bench_of(options=options, num_blocks=260, num_slots=50)
        for split, logits in zip(two_way(length), run_splits(bench, ids, two_way(length)), strict=True):
            torch.testing.assert_close(logits, reference_of(options)[:length], rtol=0, atol=5e-6, msg=str(split))


def test_decode_steps_of_several_rows_have_the_bits_of_single_rows(
    bench_of: BenchMaker, ids: list[int], reference_of: Callable[[OpOptions], Tensor]
) -> None:
    reference = reference_of(INVARIANT)
    for backtrack in (2, 3, 6):
        bench = bench_of(options=INVARIANT, backtrack=backtrack)
        request = bench.admit(ids[:LONGEST])
        while request.cached < LONGEST:
            rows = min(1 + request.cached % backtrack, LONGEST - request.cached)
            start = request.cached
            logits = bench.logits("decode", [(request, rows)])
            assert torch.equal(logits, reference[start : start + rows]), (backtrack, start)


def test_neighbours_and_padding_rows_change_no_bit(
    bench_of: BenchMaker, ids: list[int], reference_of: Callable[[OpOptions], Tensor]
) -> None:
    reference = reference_of(INVARIANT)
    bench = bench_of(options=INVARIANT, num_slots=12, num_blocks=100)
    request = bench.admit(ids[:LONGEST])
    logits = []
    for turn, rows in enumerate((5, 1, 13, 2, 8)):
        others = [(bench.admit(ids[turn : turn + 30]), 3 * turn + 1)]
        logits.append(bench.logits("prefill", [*others, (request, rows)], padding_rows=turn)[-rows:])
    while request.cached < LONGEST:
        turn = request.cached
        others = [(other, 1) for other, _ in others if other.cached < 30]
        logits.append(bench.logits("decode", [*others, (request, 1)], padding_rows=turn % 3)[-1:])
    assert torch.equal(torch.cat(logits), reference[:LONGEST])
