"""The transformer against golden values that an independent full-sequence implementation computed."""

from collections.abc import Callable
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


def chunks_of(size: int, length: int = 70) -> list[int]:
    return [min(size, length - start) for start in range(0, length, size)]


def assert_golden(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.to(torch.float32), expected, rtol=0, atol=TOLERANCE)


def test_logits_in_chunks_of_any_size(bench_of: BenchMaker, golden: dict[str, Tensor]) -> None:
    """Around every boundary: pairs, candidate blocks, blocks, window, ring, and the whole."""
    sizes = [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16, 17, 24, 35, 69, 70]
    bench = bench_of(options=UNQUANTISED, num_blocks=9 * len(sizes) + 1, num_slots=len(sizes) + 1)
    requests = [bench.admit(golden["ids"].tolist()) for _ in sizes]
    for logits in bench.prefill_together(requests, [chunks_of(size) for size in sizes]):
        assert_golden(logits, golden["logits"])


@pytest.mark.parametrize("options", [UNQUANTISED, OpOptions(kv_cache_dtype="float32", batch_invariant=True), FLOAT64])
def test_logits_in_one_chunk(bench_of: BenchMaker, golden: dict[str, Tensor], options: OpOptions) -> None:
    bench = bench_of(options=options)
    logits = bench.prefill(bench.admit(golden["ids"].tolist()), [70])
    assert logits.dtype == (torch.float64 if options is FLOAT64 else torch.float32)
    assert_golden(logits, golden["logits"])


def test_logits_step_by_step(alone_logits: Callable[[OpOptions, int], Tensor], golden: dict[str, Tensor]) -> None:
    assert_golden(alone_logits(UNQUANTISED, 70), golden["logits"])


def test_logits_with_released_records(bench_of: BenchMaker, golden: dict[str, Tensor]) -> None:
    bench = bench_of()
    requests = [bench.admit(golden["ids"].tolist()) for _ in range(3)]
    for logits in bench.prefill_together(requests, [(70,), (13, 57), (1, 2, 31, 5, 30, 1)]):
        # A last-bit difference can flip one 4-bit code.
        error = (logits - golden["logits_fakequant"]).abs()
        assert (error < 1e-4).float().mean() >= 0.99
        assert error.max() < 1e-2


def test_logits_with_an_image_span(bench_of: BenchMaker, golden: dict[str, Tensor]) -> None:
    """The span covers positions 20 to 26; a chunk may begin and end at its edges."""
    bench = bench_of(options=UNQUANTISED)
    chunks = [(70,), (27, 43), (20, 7, 43), (5, 15, 8, 1, 1, 40)]
    image = golden["image_mask"].tolist()
    requests = [bench.admit(golden["ids_image"].tolist(), image) for _ in chunks]
    for logits in bench.prefill_together(requests, chunks):
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
    logits = bench.prefill(bench.admit(golden["ids"].tolist()), [30, 40])
    assert logits.dtype == torch.float32
    # Rounding flips a pick or an expert in some rows, so the middle row speaks for the arithmetic.
    error_T = (logits - golden["logits"]).norm(dim=1) / golden["logits"].norm(dim=1)
    assert error_T.median() < 0.1
