"""Norms, mixing, Engram and plumbing agree with the reference."""

from __future__ import annotations

import pytest
import torch

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.ops.memory import NgramHash, NgramTable
from deepinfer.accelerator.ops.mixing import Mix, MixWeights
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.numerics import quantise_engram_table

ULP = 2.0**-7
DTYPES = [torch.bfloat16, torch.float32]


def close(found, wanted):
    tolerance = ULP if found.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 96), (0, 96)])
def test_rms_agrees_and_a_zero_row_stays_zero(pair, draws, dtype, shape):
    ours, reference = pair(dtype)
    x = torch.randn(shape, generator=draws).to(dtype)
    if x.numel():
        x[0] = 0
    weight_D = torch.rand(96, generator=draws)
    found = ours["norm"].rms(x, weight_D, 1e-20)
    close(found, reference["norm"].rms(x, weight_D, 1e-20))
    assert not found[:1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 48), (5, 3, 48), (0, 3, 48)])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotary_agrees_and_leaves_the_other_channels(pair, draws, dtype, shape, inverse):
    ours, reference = pair(dtype)
    angle_PR = torch.rand(40, 16, generator=draws) * 6
    table = RotaryTable(angle_PR.cos(), angle_PR.sin())
    x = torch.randn(shape, generator=draws).to(dtype)
    position_T = torch.randint(0, 40, shape[:1], generator=draws)
    found = ours["norm"].rotary(x, table, position_T, inverse=inverse)
    close(found, reference["norm"].rotary(x, table, position_T, inverse=inverse))
    assert torch.equal(found[..., :16], x[..., :16])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("soc", ["Ascend950DT_9591", "Ascend910B3"])
@pytest.mark.parametrize("rows", [0, 4])
def test_mixing_agrees_with_and_without_the_operators(pair, draws, dtype, soc, rows):
    ours, reference = pair(dtype, served=False, soc=soc)
    streams_TSD = torch.randn(rows, 4, 32, generator=draws).to(dtype)
    weights = MixWeights(
        torch.randn(24, 128, generator=draws) * 0.1, torch.randn(24, generator=draws), torch.rand(3, generator=draws)
    )
    found = ours["mixing"].mixes(streams_TSD, weights, 20, 1e-6, 1e-20)
    wanted = reference["mixing"].mixes(streams_TSD, weights, 20, 1e-6, 1e-20)
    for name in ("pre_TS", "post_TS", "comb_TSS"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-5, atol=1e-6)
    output_TD = torch.randn(rows, 32, generator=draws).to(dtype)
    close(ours["mixing"].post(output_TD, streams_TSD, found), reference["mixing"].post(output_TD, streams_TSD, found))
    collapsed = ours["mixing"].collapse(streams_TSD, found.pre_TS)
    close(collapsed, reference["mixing"].collapse(streams_TSD, found.pre_TS))


@pytest.mark.parametrize("soc", ["Ascend950DT_9591", "Ascend910B3"])
def test_the_first_index_of_comb_is_the_source(pair, soc):
    ours, _ = pair(served=False, soc=soc)
    comb_TSS = torch.zeros(1, 4, 4)
    comb_TSS[0, 0, 3] = 1.0  # from stream 0 into stream 3
    streams_TSD = torch.arange(1, 5, dtype=torch.bfloat16).view(1, 4, 1).expand(1, 4, 8).contiguous()
    mix = Mix(torch.zeros(1, 4), torch.zeros(1, 4), comb_TSS)
    found = ours["mixing"].post(torch.zeros(1, 8, dtype=torch.bfloat16), streams_TSD, mix)
    assert found[0, :, 0].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_the_hash_is_exact(pair, draws):
    ours, reference = pair()
    constants = NgramHash(
        torch.randint(1, 2**40, (4,), generator=draws) * 2 + 1,
        torch.tensor([[101, 103], [107, 109], [113, 127]]),
        torch.arange(6) * 200,
        pad_id=2,
    )
    tokens_TG = torch.randint(-1, 99, (40, 4), generator=draws)
    found = ours["memory"].ngram_rows(tokens_TG, constants)
    assert torch.equal(found, reference["memory"].ngram_rows(tokens_TG, constants))


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("quantised", [True, False])
def test_table_rows_decode_exactly(pair, draws, served, quantised):
    ours, reference = pair(torch.float32, served=served)
    values_RW = torch.randn(30, 64, generator=draws)
    weight, scale = quantise_engram_table(values_RW) if quantised else (values_RW, None)
    table = NgramTable("t", weight, scale)
    rows_TF = torch.randint(-1, 30, (6, 3), generator=draws)
    found = ours["memory"].gather_rows(table, rows_TF)
    assert torch.equal(found, reference["memory"].gather_rows(table, rows_TF))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_engram_gate_agrees_at_zero_and_with_nan(pair, draws, dtype):
    ours, reference = pair(dtype)
    streams_TSD = torch.randn(6, 4, 32, generator=draws).to(dtype)
    streams_TSD[0], streams_TSD[1, 0, 0] = 0, float("nan")
    arguments = (
        streams_TSD,
        torch.randn(6, 4, 32, generator=draws).to(dtype),
        torch.randn(6, 32, generator=draws).to(dtype),
        torch.randn(4, 32, generator=draws),
        torch.randn(4, 32, generator=draws),
        torch.tensor([True, True, True, False, True, True]),
        1e-20,
    )
    found, wanted = ours["memory"].gate(*arguments), reference["memory"].gate(*arguments)
    torch.testing.assert_close(found, wanted, rtol=2 * ULP, atol=ULP, equal_nan=True)
    assert torch.isnan(found[1, 0]).all()
    assert torch.equal(found[3], streams_TSD[3])


def layout(requests, rows, *, ring=6, block_size=4):
    counts = [2, 0, 9][:requests]
    request = [number for number, count in enumerate(counts) for _ in range(count)]
    cached = [3, 5, 0][:requests]
    position = [cached[number] + index for number, count in enumerate(counts) for index in range(count)]
    padding = rows - len(request)
    starts = [sum(counts[:number]) for number in range(requests)] + [rows]
    table = torch.arange(requests * 4).view(requests, 4) + 1
    return StepLayout(
        kind="prefill",
        block_size=block_size,
        ring=ring,
        row_starts_R1=torch.tensor(starts),
        cached_R=torch.tensor(cached),
        state_slots_R=torch.tensor([4, 1, 2][:requests]),
        block_table_RB=table,
        request_T=torch.tensor(request + [77] * padding),
        position_T=torch.tensor(position + [10**6] * padding),
        window_start_R=torch.zeros(requests, dtype=torch.int64),
        image_T=torch.zeros(rows, dtype=torch.bool),
        valid_T=torch.tensor([True] * len(request) + [False] * padding),
        max_position=16,
        max_rows=9,
    )


@pytest.mark.parametrize("rows", [11, 14])
@pytest.mark.parametrize("ratio", [1, 2])
def test_slots_agree_with_padding_rows_and_an_idle_request(pair, rows, ratio):
    ours, reference = pair()
    step = layout(3, rows)
    assert torch.equal(ours["plumbing"].window_slots(step), reference["plumbing"].window_slots(step))
    found = ours["plumbing"].entry_slots(step, ratio)
    assert torch.equal(found, reference["plumbing"].entry_slots(step, ratio))
