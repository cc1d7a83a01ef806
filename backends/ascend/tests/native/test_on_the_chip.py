"""Each of torch-npu's operators against its documented formula, on a real NPU with CANN: ``pytest -m npu``.

These are the first tests to run on a chip. Here they are skipped, with everything that is missing.
"""

from __future__ import annotations

import pytest
import torch

from deepinfer_ascend import Driver, runtime
from deepinfer_ascend.availability import DRIVER_NODE
from deepinfer_ascend.operators import Operators, Quantised

pytestmark = pytest.mark.npu

ULP = 2.0**-7
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def npu() -> torch.device:
    """Return the device, or skip with every reason."""
    if not DRIVER_NODE.exists():
        # Said before anything else: an emulated device must not pass for a chip.
        pytest.skip(f"no Ascend device: {DRIVER_NODE} does not exist")
    found = Driver.availability()
    if not found.available:
        pytest.skip("no Ascend device: " + "; ".join(f"{one.problem} ({one.remedy})" for one in found.reasons))
    runtime.load()
    return Driver().device


def normal(draws, *shape, dtype=F32):
    return torch.randn(shape, generator=draws).to(dtype)


def placed(device, *tensors):
    return [tensor.to(device) for tensor in tensors]


def close(found, wanted, tolerance):
    torch.testing.assert_close(found.cpu(), wanted, rtol=tolerance, atol=tolerance)


def test_rms_norm_with_the_models_eps(npu, host_operators, draws):
    x, weight = normal(draws, 5, 5120), normal(draws, 5120)
    x[1] = 0
    found = Operators().rms_norm(*placed(npu, x, weight), 1e-20)
    close(found, host_operators.rms_norm(x, weight, 1e-20), 1e-5)
    assert not found[1].any()


def test_rotation_of_adjacent_pairs(npu, host_operators, draws):
    x, cos, sin = normal(draws, 1, 5, 64, 64), normal(draws, 1, 5, 1, 64), normal(draws, 1, 5, 1, 64)
    found = Operators().rotate_pairs(*placed(npu, x, cos, sin))
    close(found, host_operators.rotate_pairs(x, cos, sin), 1e-5)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_quantised_rows_have_our_scales_and_codes_bit_for_bit(npu, host_operators, draws, dtype):
    # Amax just above a power, below the floor of 1e-4, and zero: where another rule gives another scale.
    scales = torch.tensor([1.0, 448.0, 449.0, 1e-5, 0.0, 2.0**100]).unsqueeze(-1)
    x = (normal(draws, 6, 128) * scales).to(dtype)
    wanted = host_operators.quantise_rows(x)
    found = Operators().quantise_rows(x.to(npu))
    assert torch.equal(found.scales.cpu().view(torch.uint8), wanted.scales)
    assert torch.equal(found.codes.cpu().view(torch.uint8), wanted.codes.view(torch.uint8))


def mx_rows(host_operators, draws, *shape):
    return host_operators.quantise_rows(normal(draws, *shape))


def mx_weight(host_operators, draws, wide, narrow):
    made = host_operators.quantise_rows(normal(draws, narrow, wide))
    return made.codes.t().contiguous(), made.scales.transpose(0, 1).contiguous()


@pytest.mark.parametrize(("wide", "narrow"), [(64, 32), (128, 64), (5120, 1280)])
@pytest.mark.parametrize("rows", [1, 17])
def test_mx_products(npu, host_operators, draws, wide, narrow, rows):
    x = mx_rows(host_operators, draws, rows, wide)
    weight = mx_weight(host_operators, draws, wide, narrow)
    wanted = host_operators.mx_matmul(x, *weight, F32)
    found = Operators().mx_matmul(Quantised(*placed(npu, x.codes, x.scales)), *placed(npu, *weight), F32)
    close(found, wanted, 1e-4 * wide**0.5)


def test_mx_products_of_groups(npu, host_operators, draws):
    x = mx_rows(host_operators, draws, 5, 8, 4096)
    weights = [mx_weight(host_operators, draws, 4096, 1024) for _ in range(8)]
    codes, scales = (torch.stack(part) for part in zip(*weights, strict=True))
    wanted = host_operators.mx_matmul_of_groups(x, codes, scales, BF16)
    found = Operators().mx_matmul_of_groups(
        Quantised(*placed(npu, x.codes, x.scales)), *placed(npu, codes, scales), BF16
    )
    torch.testing.assert_close(found.cpu(), wanted, rtol=ULP, atol=1.0)


def test_rows_by_packed_fp4_experts(npu, host_operators, draws):
    counts = torch.tensor([3, 0, 4])
    x = mx_rows(host_operators, draws, 7, 256)
    codes = torch.randint(0, 256, (3, 128, 128), generator=draws).to(torch.uint8)
    scales = torch.randint(120, 130, (3, 128, 4, 2), generator=draws).to(torch.uint8)
    wanted = host_operators.grouped_matmul_mxfp4(x, codes, scales, counts)
    found = Operators().grouped_matmul_mxfp4(
        Quantised(*placed(npu, x.codes, x.scales)), *placed(npu, codes, scales, counts)
    )
    torch.testing.assert_close(found.cpu(), wanted, rtol=2 * ULP, atol=1.0)


def test_the_gate_chooses_and_weighs_as_documented(npu, host_operators, draws):
    logits, bias = normal(draws, 9, 384), normal(draws, 384)
    wanted = host_operators.gate(logits, bias, 6, 1.5)
    found = Operators().gate(*placed(npu, logits, bias), 6, 1.5)
    assert torch.equal(found.experts_Tk.cpu(), wanted.experts_Tk)
    close(found.weights_Tk, wanted.weights_Tk, 1e-5)


def test_routed_rows_stand_where_their_places_say(npu, draws):
    experts = torch.tensor([[2, 8], [8, 8], [0, 2], [7, 1]], dtype=torch.int32)
    x = normal(draws, 4, 64, dtype=BF16)
    found = Operators().route_rows(*placed(npu, x, experts), 8)
    assert found.counts_E.cpu().tolist() == [1, 1, 2, 0, 0, 0, 0, 1]
    place = found.place_n.cpu().view(4, 2)
    for row, slot in (experts < 8).nonzero().tolist():
        assert torch.equal(found.rows_nD[int(place[row, slot])].cpu(), x[row])


def test_finalised_rows_are_the_shared_row_and_the_weighted_slots(npu, host_operators, draws):
    rows, shared = normal(draws, 8, 64, dtype=BF16), normal(draws, 4, 64, dtype=BF16)
    weights = torch.ones(4, 2, dtype=BF16)
    weights[1, 1] = 0
    places = torch.randperm(8, generator=draws).to(torch.int32)
    wanted = host_operators.finalize_rows(rows, shared, weights, places)
    close(Operators().finalize_rows(*placed(npu, rows, shared, weights, places)), wanted, ULP)


def test_hyper_connections(npu, host_operators, draws):
    streams, fn = normal(draws, 5, 4, 512, dtype=BF16), normal(draws, 24, 2048) * 0.05
    scale, base, output = normal(draws, 3), normal(draws, 24), normal(draws, 5, 512, dtype=BF16)
    wanted = host_operators.stream_mix(streams, fn, scale, base, norm_eps=1e-20, mix_eps=1e-6)
    found = Operators().stream_mix(*placed(npu, streams, fn, scale, base), norm_eps=1e-20, mix_eps=1e-6)
    for name in ("pre_TS", "post_TS", "residual_TSS"):
        close(getattr(found, name), getattr(wanted, name), 1e-3)
    comb = host_operators.sinkhorn(wanted.residual_TSS, 20, 1e-6)
    close(Operators().sinkhorn(wanted.residual_TSS.to(npu), 20, 1e-6), comb, 1e-5)
    posted = host_operators.post_streams(streams, comb, output, wanted.post_TS)
    close(Operators().post_streams(*placed(npu, streams, comb, output, wanted.post_TS)), posted, ULP)


def test_scattered_rows_of_bytes(npu, host_operators, draws):
    pool = torch.zeros(20, 528, dtype=torch.uint8)
    rows = torch.randint(0, 256, (3, 528), generator=draws).to(torch.uint8)
    slots = torch.tensor([19, 0, 7])
    on_chip = pool.to(npu)
    Operators().scatter_rows(on_chip, *placed(npu, slots, rows))
    host_operators.scatter_rows(pool, slots, rows)
    assert torch.equal(on_chip.cpu(), pool)
