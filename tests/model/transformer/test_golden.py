"""The transformer against golden values that an independent full-sequence implementation computed."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.model.transformer import GivenEmbeddings

UNQUANTISED = OpOptions(kv_cache_dtype="float32")
FLOAT64 = OpOptions(kv_cache_dtype="float32", activation_dtype=torch.float64)
# About 1e-5 is float32 rounding; 1e-4 would be a difference in the mathematics.
TOLERANCE = 2e-5

BenchMaker = Callable[..., Any]


def chunked(bench: Any, ids: Tensor, size: int, image: Tensor | None = None) -> Tensor:
    request = bench.admit(ids.tolist(), None if image is None else image.tolist())
    cuts = [*range(0, len(ids), size), len(ids)]
    return bench.prefill(request, [end - start for start, end in pairwise(cuts)])


def assert_golden(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.to(torch.float32), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16, 24, 35, 69, 70])
def test_logits_in_chunks_of_any_size(bench_of: BenchMaker, golden: dict[str, Tensor], size: int) -> None:
    assert_golden(chunked(bench_of(options=UNQUANTISED), golden["ids"], size), golden["logits"])


@pytest.mark.parametrize("options", [UNQUANTISED, OpOptions(kv_cache_dtype="float32", batch_invariant=True), FLOAT64])
def test_logits_in_one_chunk_and_step_by_step(
    bench_of: BenchMaker, golden: dict[str, Tensor], options: OpOptions
) -> None:
    bench = bench_of(options=options)
    assert_golden(chunked(bench, golden["ids"], 70), golden["logits"])
    assert_golden(bench.decode(bench.admit(golden["ids"].tolist()), 70), golden["logits"])


def test_logits_of_several_rows_a_decode_step(bench_of: BenchMaker, golden: dict[str, Tensor]) -> None:
    bench = bench_of(options=UNQUANTISED, backtrack=6)
    request = bench.admit(golden["ids"].tolist())
    logits = [bench.logits("decode", [(request, rows)]) for rows in (6, 5, 4, 3, 2, 1) * 3 + (6, 1)]
    assert_golden(torch.cat(logits), golden["logits"])


@pytest.mark.parametrize("sizes", [(70,), (13, 57), (1,) * 70])
def test_logits_with_released_records(
    bench_of: BenchMaker, golden: dict[str, Tensor], sizes: tuple[int, ...]
) -> None:
    bench = bench_of()
    logits = bench.prefill(bench.admit(golden["ids"].tolist()), sizes)
    # A last-bit difference can flip one 4-bit code.
    error = (logits - golden["logits_fakequant"]).abs()
    assert (error < 1e-4).float().mean() >= 0.99
    assert error.max() < 1e-2


@pytest.mark.parametrize("size", [70, 27, 20, 1])
def test_logits_with_an_image_span(bench_of: BenchMaker, golden: dict[str, Tensor], size: int) -> None:
    bench = bench_of(options=UNQUANTISED)
    logits = chunked(bench, golden["ids_image"], size, golden["image_mask"])
    assert_golden(logits, golden["logits_image"])


def test_given_embeddings_replace_exactly_the_masked_rows(bench_of: BenchMaker, golden: dict[str, Tensor]) -> None:
    bench = bench_of(options=UNQUANTISED)
    mask_T, image = golden["image_mask"], golden["image_mask"].tolist()
    rows_TD = torch.full((70, 128), float("nan"))
    rows_TD[mask_T] = golden["w.embed.weight"][510]
    given = GivenEmbeddings(rows_TD, mask_T)
    # Under the mask any id may stand: here one whose own embedding would give other logits.
    ids = torch.where(mask_T, 7, golden["ids_image"]).tolist()
    logits = bench.logits("prefill", [(bench.admit(ids, image), 70)], embeddings=given)
    assert_golden(logits, golden["logits_image"])
    other = bench.logits("prefill", [(bench.admit(ids, image), 70)])
    assert torch.equal(other[:20], logits[:20])
    assert not torch.allclose(other[20:27], logits[20:27], atol=1e-2)


@pytest.mark.parametrize("sizes", [(70,), (33, 37)])
def test_taps(bench_of: BenchMaker, golden: dict[str, Tensor], sizes: tuple[int, ...]) -> None:
    bench = bench_of(options=UNQUANTISED)
    request = bench.admit(golden["ids"].tolist())
    taps = [bench.step("prefill", [(request, rows)], with_taps=True).taps_TA for rows in sizes]
    assert_golden(torch.cat(taps), golden["taps"])
    assert bench.step("decode", [(bench.admit([1]), 1)]).taps_TA is None


def test_bfloat16_activations_follow_the_float32_model(bench_of: BenchMaker, golden: dict[str, Tensor]) -> None:
    bench = bench_of(options=OpOptions(activation_dtype=torch.bfloat16, kv_cache_dtype="float32"))
    logits = bench.prefill(bench.admit(golden["ids"][:12].tolist()), [12])
    assert logits.dtype == torch.float32
    # Up to 12 positions the selection takes every entry, so rounding cannot change what is read.
    error = (logits - golden["logits"][:12]).norm() / golden["logits"][:12].norm()
    assert error < 0.05
