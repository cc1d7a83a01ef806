"""Prefill in any chunks equals step-by-step decode of the same tokens: bit for bit where R2 is asked for."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions

INVARIANT = OpOptions(batch_invariant=True)
INVARIANT_FLOAT32 = OpOptions(batch_invariant=True, kv_cache_dtype="float32")
# Ring 12, window 8, blocks of 8, candidate blocks of 4 and pairs of 2 all meet at 24.
PERIOD, LONGEST, DECODED = 24, 40, 20
BenchMaker = Callable[..., Any]
Alone = Callable[[OpOptions, int], Tensor]


@pytest.fixture(scope="module")
def ids(golden: dict[str, Tensor]) -> list[int]:
    return golden["ids"].tolist()


def run_splits(bench: Any, ids: Sequence[int], splits: Sequence[tuple[int, ...]], decoded: int) -> list[Tensor]:
    """Run all splits as neighbours, then decode some steps together; return each request's logits."""
    requests = [bench.admit(ids[: sum(split) + decoded]) for split in splits]
    logits = bench.prefill_together(requests, splits)
    for _ in range(decoded):
        rows = bench.logits("decode", [(request, 1) for request in requests])
        logits = [torch.cat([before, row]) for before, row in zip(logits, rows.split(1), strict=True)]
    return logits


def draw_splits(count: int, parts: int, longest: int, seed: int) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    splits = []
    for _ in range(count):
        length = draw.randint(parts, longest)
        cuts = [0, *sorted(draw.sample(range(1, length), parts - 1)), length]
        splits.append(tuple(end - start for start, end in pairwise(cuts)))
    return splits


def test_every_two_way_split_within_a_period_has_the_bits_of_decode(
    bench_of: BenchMaker, ids: list[int], alone_logits: Alone
) -> None:
    splits: list[tuple[int, ...]] = [(1,)]
    splits += [(first, length - first) for length in range(2, PERIOD + 1) for first in range(1, length)]
    bench = bench_of(options=INVARIANT, num_blocks=4 * len(splits) + 1, num_slots=len(splits) + 1)
    reference = alone_logits(INVARIANT, PERIOD + 1)
    for split, logits in zip(splits, run_splits(bench, ids, splits, decoded=1), strict=True):
        assert torch.equal(logits, reference[: sum(split) + 1]), split


def test_a_sample_of_longer_splits_has_the_bits_of_decode(
    bench_of: BenchMaker, ids: list[int], alone_logits: Alone
) -> None:
    splits = (
        draw_splits(20, 2, LONGEST, seed=1) + draw_splits(30, 3, LONGEST, seed=2) + draw_splits(5, 5, LONGEST, seed=3)
    )
    bench = bench_of(options=INVARIANT_FLOAT32, num_blocks=6 * len(splits) + 1, num_slots=len(splits) + 1)
    reference = alone_logits(INVARIANT_FLOAT32, LONGEST + 1)
    for split, logits in zip(splits, run_splits(bench, ids, splits, decoded=1), strict=True):
        assert torch.equal(logits, reference[: sum(split) + 1]), split


@pytest.mark.parametrize("first", [1, 7, 8, 11, 12, 13, 23])
def test_a_split_without_neighbours_has_the_bits_of_decode(
    bench_of: BenchMaker, ids: list[int], alone_logits: Alone, first: int
) -> None:
    bench = bench_of(options=INVARIANT)
    logits = bench.prefill(bench.admit(ids[:PERIOD]), (first, PERIOD - first))
    assert torch.equal(logits, alone_logits(INVARIANT, PERIOD))


def test_twenty_tokens_decoded_after_a_prompt_of_any_length_have_the_bits_of_decode(
    bench_of: BenchMaker, ids: list[int], alone_logits: Alone
) -> None:
    splits = [(length,) if length < 3 else (length // 3, length - length // 3) for length in range(1, LONGEST + 1)]
    bench = bench_of(options=INVARIANT_FLOAT32, num_blocks=8 * len(splits) + 1, num_slots=len(splits) + 1)
    reference = alone_logits(INVARIANT_FLOAT32, LONGEST + DECODED)
    for split, logits in zip(splits, run_splits(bench, ids, splits, decoded=DECODED), strict=True):
        assert torch.equal(logits, reference[: sum(split) + DECODED]), split


def test_splits_and_decode_agree_to_rounding_in_the_default_mode(
    bench_of: BenchMaker, ids: list[int], alone_logits: Alone
) -> None:
    options = OpOptions(kv_cache_dtype="float32")
    splits = [(length,) for length in (1, 2, 9, 25, 40)] + draw_splits(20, 2, LONGEST, seed=4)
    bench = bench_of(options=options, num_blocks=6 * len(splits) + 1, num_slots=len(splits) + 1)
    reference = alone_logits(options, LONGEST + 3)
    # One row takes another matrix kernel than many: 5e-6 of a logit as large as the largest.
    scale = float(reference.abs().max())
    for split, logits in zip(splits, run_splits(bench, ids, splits, decoded=3), strict=True):
        error = (logits - reference[: sum(split) + 3]).abs().max()
        assert error <= 5e-6 * scale, split


def test_decode_steps_of_several_rows_have_the_bits_of_single_rows(
    bench_of: BenchMaker, ids: list[int], alone_logits: Alone
) -> None:
    reference = alone_logits(INVARIANT, LONGEST)
    bench = bench_of(options=INVARIANT, backtrack=6)
    patterns = [(2,), (3,), (6,), (1, 2, 3, 4, 5, 6)]
    requests = [bench.admit(ids[:LONGEST]) for _ in patterns]
    turn = 0
    while unfinished := [number for number, request in enumerate(requests) if request.cached < LONGEST]:
        work = []
        for number in unfinished:
            request, pattern = requests[number], patterns[number]
            work.append((request, min(pattern[turn % len(pattern)], LONGEST - request.cached)))
        starts = [request.cached for request, _ in work]
        logits = bench.logits("decode", work).split([rows for _, rows in work])
        for number, start, part in zip(unfinished, starts, logits, strict=True):
            assert torch.equal(part, reference[start : start + len(part)]), (patterns[number], start)
        turn += 1


def test_neighbours_and_padding_rows_change_no_bit(bench_of: BenchMaker, ids: list[int], alone_logits: Alone) -> None:
    bench = bench_of(options=INVARIANT, num_slots=12, num_blocks=100)
    request, length = bench.admit(ids[:LONGEST]), 34
    logits, other = [], bench.admit(ids[40:70])
    for turn, rows in enumerate((5, 1, 13, 2, 8)):
        logits.append(bench.logits("prefill", [(other, 3 * turn + 1), (request, rows)], padding_rows=turn)[-rows:])
        other = bench.admit(ids[turn : turn + 30])
    while request.cached < length:
        logits.append(bench.logits("decode", [(other, 1), (request, 1)], padding_rows=request.cached % 3)[-1:])
    assert torch.equal(torch.cat(logits), alone_logits(INVARIANT, length))
