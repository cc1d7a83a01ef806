"""Released widths with few rows: against the readable reference, in bytes where the contract says bytes.

Legend: T rows, C record width, D hidden size, S streams, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from deepinfer.accelerator import OpOptions
from deepinfer.accelerator.ops.experts import RouterWeights
from deepinfer.accelerator.ops.memory import NgramHash, NgramTable
from deepinfer.accelerator.ops.mixing import MixWeights
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.numerics import IndexRecord, LongRangeRecord, RecordFormat, WindowRecord, quantise_engram_table
from deepinfer_cpu_ref import Driver as CpuRef
from deepinfer_triton.codec import TritonCodecOps
from deepinfer_triton.experts import TritonRoutingOps
from deepinfer_triton.memory import TritonMemoryOps
from deepinfer_triton.mixing import TritonMixingOps
from deepinfer_triton.norm import TritonNormOps

if TYPE_CHECKING:
    from deepinfer_conformance.triton_cpu import Session

OPTIONS = OpOptions()
BF16 = OpOptions(activation_dtype=torch.bfloat16)
WIDE = OpOptions(activation_dtype=torch.float64)
RECORDS = (WindowRecord(512), LongRangeRecord(512), IndexRecord(128))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def every_magnitude(width: int) -> torch.Tensor:
    """Return rows whose blocks reach from denormals to the largest numbers, with ties and -0 among them."""
    exponents = torch.arange(-149, 128, 3, dtype=torch.float64)
    rows = exponents.numel() * 16 // width + 1
    scale = (2.0 ** exponents.repeat_interleave(16)).repeat(2)[: rows * width]
    values = normal(rows * width).to(torch.float64)
    ties = torch.tensor([0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0, 1.875, 17.0, 19.0])
    values = torch.where(
        normal(rows * width, seed=1) < 0, ties.to(torch.float64).repeat(rows * width)[: rows * width], values
    )
    found = torch.nn.functional.pad(scale, (0, rows * width - scale.numel()), value=1.0) * values
    return found.to(torch.float32).view(rows, width)


@pytest.mark.parametrize("record_format", RECORDS, ids=lambda each: each.name)
def test_records_of_every_magnitude_have_the_bytes_of_the_definition(
    record_format: RecordFormat, session: Session
) -> None:
    x_TC = every_magnitude(record_format.width)
    codec = TritonCodecOps(OPTIONS)
    records = codec.encode(x_TC, record_format)
    assert torch.equal(records, record_format.encode(x_TC))


@pytest.mark.parametrize("record_format", RECORDS, ids=lambda each: each.name)
def test_all_codes_under_all_scales_decode_as_the_definition_says(
    record_format: RecordFormat, session: Session
) -> None:
    from deepinfer_triton.record_layout import row_places
    from deepinfer_triton.record_reading import read_records

    groups = record_format.width // record_format.group
    rows = 256 // groups
    data = torch.arange(256, dtype=torch.uint8).repeat(rows * record_format.data_bytes // 256 + 1)
    records = torch.cat(
        [
            data[: rows * record_format.data_bytes].view(rows, -1),
            torch.arange(256, dtype=torch.uint8).view(rows, groups),
        ],
        dim=1,
    )
    got = read_records("test", record_format, row_places("test", records, record_format), torch.arange(rows))
    wanted = record_format.decode(records)
    same = (got.view(torch.int32) == wanted.view(torch.int32)) | (got.isnan() & wanted.isnan())
    assert bool(same.all())


def test_rows_of_5120_are_normalised_alike_alone_and_pitched(session: Session) -> None:
    x_TD = normal(3, 5120).to(torch.bfloat16)
    weight_D = 1 + 0.1 * normal(5120, seed=1)
    norm = TritonNormOps(BF16)
    whole = norm.rms(x_TD, weight_D, 1e-20)
    wide = torch.full((3, 5127), float("nan"), dtype=torch.bfloat16)
    wide[:, 3:5123] = x_TD
    assert torch.equal(norm.rms(wide[:, 3:5123], weight_D, 1e-20), whole)
    assert torch.equal(norm.rms(x_TD[1:2], weight_D, 1e-20), whole[1:2])
    exact = CpuRef().op_groups(WIDE)["norm"].rms(x_TD.to(torch.float64), weight_D, 1e-20)  # type: ignore[attr-defined]
    assert torch.equal(whole, exact.to(torch.bfloat16))


@pytest.mark.parametrize("direction", ["forward", "inverse"])
def test_64_heads_turn_within_one_step_of_bfloat16(direction: str, session: Session) -> None:
    inverse = direction == "inverse"
    x_THC = normal(2, 64, 512).to(torch.bfloat16)
    angle_PR = normal(9, 32, seed=2)
    table = RotaryTable(angle_PR.cos(), angle_PR.sin())
    position_T = torch.tensor([8, 3])
    got = TritonNormOps(BF16).rotary(x_THC, table, position_T, inverse=inverse)
    reference = CpuRef().op_groups(WIDE)["norm"]
    wanted = reference.rotary(x_THC.to(torch.float64), table, position_T, inverse=inverse)  # type: ignore[attr-defined]
    assert torch.equal(got[..., :448], x_THC[..., :448])
    error = (got.to(torch.float64) - wanted).abs()
    assert bool((error <= wanted.abs() * 2.0**-8 + 1e-6).all())


def test_mixes_of_20480_values_agree_with_float64(session: Session) -> None:
    streams_TSD = normal(2, 4, 5120)
    weights = MixWeights(normal(24, 20480, seed=1) * 20480**-0.5, normal(24, seed=2), 1 + 0.1 * normal(3, seed=3))
    got = TritonMixingOps(OPTIONS).mixes(streams_TSD, weights, 20, 1e-6, 1e-20)
    reference = CpuRef().op_groups(WIDE)["mixing"]
    wanted = reference.mixes(streams_TSD.to(torch.float64), weights, 20, 1e-6, 1e-20)  # type: ignore[attr-defined]
    torch.testing.assert_close(got.pre_TS.to(torch.float64), wanted.pre_TS, rtol=2e-6, atol=0)
    torch.testing.assert_close(got.post_TS.to(torch.float64), wanted.post_TS, rtol=2e-6, atol=0)
    torch.testing.assert_close(got.comb_TSS.to(torch.float64), wanted.comb_TSS, rtol=1e-5, atol=0)


def test_router_of_384_experts_finds_small_scores_to_the_last_bits(session: Session) -> None:
    # Logits down to -40: log(1 + exp(x)) must not lose what 1 + exp(x) cannot hold.
    x_TD = normal(3, 5120) * torch.tensor([[1.0], [8.0], [0.1]])
    gate_ED = (normal(384, 5120, seed=1) * 5120**-0.5).to(torch.bfloat16)
    router = RouterWeights(gate_ED, 0.1 * normal(384, seed=2), normal(384, seed=3))
    valid_T, image_T = torch.tensor([True, True, True]), torch.tensor([False, True, False])
    got = TritonRoutingOps(OPTIONS).route(x_TD, router, image_T, valid_T, 6, 1.5)
    reference = CpuRef().op_groups(WIDE)["experts"]
    wanted = reference.route(x_TD.to(torch.float64), router, image_T, valid_T, 6, 1.5)  # type: ignore[attr-defined]
    assert torch.equal(got.experts_Tk, wanted.experts_Tk)
    torch.testing.assert_close(got.weights_Tk.to(torch.float64), wanted.weights_Tk, rtol=3e-6, atol=0)


def test_released_hash_constants_wrap_nothing_and_agree(session: Session) -> None:
    multipliers_G = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
    primes_Gh = 16_000_057 + 2 * torch.arange(24).view(3, 8)
    offsets_F = torch.cat([torch.zeros(1, dtype=torch.int64), primes_Gh.flatten().cumsum(0)[:-1]])
    constants = NgramHash(multipliers_G, primes_Gh, offsets_F, pad_id=2)
    tokens_TG = torch.randint(0, 99_092, (40, 4), generator=torch.Generator().manual_seed(0))
    tokens_TG[3, 1], tokens_TG[4, 0], tokens_TG[5, 3] = -1, -1, -1
    reference = CpuRef().op_groups(OPTIONS)["memory"]
    got = TritonMemoryOps(OPTIONS).ngram_rows(tokens_TG, constants)
    assert torch.equal(got, reference.ngram_rows(tokens_TG, constants))  # type: ignore[attr-defined]


def test_table_rows_of_256_decode_exactly(session: Session) -> None:
    quantised = quantise_engram_table(normal(50, 256))
    table = NgramTable("engram", quantised.weight, quantised.scale)
    rows_TF = torch.tensor([[0, 49, -1], [7, 7, 8]])
    reference = CpuRef().op_groups(BF16)["memory"]
    got = TritonMemoryOps(BF16).gather_rows(table, rows_TF)
    assert torch.equal(got, reference.gather_rows(table, rows_TF))  # type: ignore[attr-defined]
