"""Torch-npu's own operators through its C++ checks, against formulas written down here a second time.

Legend: T rows, K in features, N out features, E experts, D width, S streams, H heads.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from host_cann import Emulator
from torch import Tensor

from deepinfer.numerics import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    quantise_fp8_blocks,
    quantise_mxfp4_blocks,
    unpack_nibbles,
)
from deepinfer_ascend import layouts
from deepinfer_ascend.operators import Operators

E8M0, FP4 = 293, 296
PAIRED_K = 128


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mx_codes(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return e4m3 codes [..., K], e8m0 codes [..., K/64, 2] and the values of both."""
    codes = normal(*shape, seed=seed).to(torch.float8_e4m3fn)
    scales = torch.randint(120, 132, (*shape[:-1], shape[-1] // 32), generator=torch.Generator().manual_seed(seed)).to(
        torch.uint8
    )
    values = decode_e4m3(codes.view(torch.uint8)) * decode_e8m0(scales).repeat_interleave(32, -1)
    return codes, scales.unflatten(-1, (-1, 2)), values


def test_rms_norm(host_cann_machine: Emulator) -> None:
    x, gamma = normal(4, 64), normal(64, seed=1)
    y, inverse = torch.ops.npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-2)
    expected = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2)
    torch.testing.assert_close(y.cpu(), x * expected * gamma)
    torch.testing.assert_close(inverse.cpu(), expected)


def test_add_rms_norm_normalises_the_rounded_sum(host_cann_machine: Emulator) -> None:
    a, b, gamma = (normal(4, 64, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    y, _, total = torch.ops.npu.npu_add_rms_norm(a.npu(), b.npu(), gamma[0].npu(), 1e-6)
    assert torch.equal(total.cpu(), a + b)
    wide = (a + b).float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * gamma[0].float()
    torch.testing.assert_close(y.cpu(), expected.bfloat16())


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotation_turns_each_pair_by_its_angle(host_cann_machine: Emulator, mode: str) -> None:
    x, angle = normal(1, 5, 3, 8), normal(1, 5, 1, 4, seed=1)
    channels = angle.repeat_interleave(2, -1) if mode == "interleave" else angle.repeat(1, 1, 1, 2)
    rotated = torch.ops.npu.npu_rotary_mul(x.npu(), channels.cos().npu(), channels.sin().npu(), rotary_mode=mode).cpu()
    pairs = x.unflatten(-1, (4, 2)) if mode == "interleave" else x.unflatten(-1, (2, 4)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.view_as_real(turned)
    expected = expected.flatten(-2) if mode == "interleave" else expected.transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(rotated, expected)


def test_rotation_in_place_turns_query_and_key(host_cann_machine: Emulator) -> None:
    query, key, angle = normal(1, 5, 3, 8), normal(1, 5, 1, 8, seed=2), normal(1, 5, 1, 8, seed=1)
    cos, sin = angle.cos().npu(), angle.sin().npu()
    turned = torch.ops.npu.npu_apply_rotary_pos_emb(query.npu(), key.npu(), cos, sin)
    for got, x in zip(turned, (query, key), strict=True):
        assert torch.equal(got.cpu(), torch.ops.npu.npu_rotary_mul(x.npu(), cos, sin).cpu())


def test_mx_quantisation_to_e4m3_is_that_of_the_checkpoint(host_cann_machine: Emulator) -> None:
    x = normal(6, PAIRED_K) * torch.tensor([0.0, 1e-6, 1.0, 448.0, 3e4, 7.0]).unsqueeze(1)
    y, scale = torch.ops.npu.npu_dynamic_mx_quant(
        x.bfloat16().npu(), axis=-1, dst_type=torch.float8_e4m3fn, scale_alg=1, max_low_bound=1e-4
    )
    expected = quantise_fp8_blocks(x.bfloat16().float())
    assert torch.equal(scale.cpu().flatten(-2).view(torch.uint8), expected.scales.view(torch.uint8))
    assert torch.equal(y.cpu().view(torch.uint8), expected.codes.view(torch.uint8))


def test_mx_quantisation_to_e2m1_follows_the_ocp_rule(host_cann_machine: Emulator) -> None:
    x = normal(4, PAIRED_K, dtype=torch.bfloat16)
    y, scale = torch.ops.npu.npu_dynamic_mx_quant(x.npu(), axis=-1, dst_type=FP4)
    power = torch.floor(torch.log2(x.float().unflatten(-1, (-1, 32)).abs().amax(-1))) - 2
    assert torch.equal(decode_e8m0(scale.cpu().flatten(-2).view(torch.uint8)), torch.exp2(power))
    values = decode_e2m1(unpack_nibbles(y.cpu().view(torch.uint8)))
    scaled = x.float() / torch.exp2(power).repeat_interleave(32, -1)
    candidates = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert torch.equal((values - scaled).abs(), (scaled.unsqueeze(-1) - candidates).abs().amin(-1))


def test_an_odd_number_of_blocks_is_padded_to_a_pair(host_cann_machine: Emulator) -> None:
    _, scale = torch.ops.npu.npu_dynamic_mx_quant(torch.ones(2, 96).bfloat16().npu(), dst_type=torch.float8_e4m3fn)
    assert scale.shape == (2, 2, 2)


def test_mxfp8_matmul(host_cann_machine: Emulator) -> None:
    codes, scales, values = mx_codes(5, PAIRED_K)
    weight, weight_scales, weight_values = mx_codes(16, PAIRED_K, seed=1)
    product = torch.ops.npu.npu_quant_matmul(
        codes.npu(), weight.npu().t(), weight_scales.npu().transpose(0, 1), pertoken_scale=scales.npu(),
        output_dtype=torch.bfloat16, scale_dtype=E8M0, pertoken_scale_dtype=E8M0, group_sizes=[1, 1, 32],
    )  # fmt: skip
    torch.testing.assert_close(product.cpu().float(), values @ weight_values.t(), rtol=1e-2, atol=1e-2)


def test_mxfp4_matmul(host_cann_machine: Emulator) -> None:
    left, right = quantise_mxfp4_blocks(normal(5, PAIRED_K)), quantise_mxfp4_blocks(normal(16, PAIRED_K, seed=1))
    values = [
        decode_e2m1(unpack_nibbles(q.codes.view(torch.uint8)))
        * decode_e8m0(q.scales.view(torch.uint8)).repeat_interleave(32, -1)
        for q in (left, right)
    ]
    paired = [q.scales.view(torch.uint8).unflatten(-1, (-1, 2)).npu() for q in (left, right)]
    product = torch.ops.npu.npu_quant_matmul(
        left.codes.view(torch.uint8).npu(), right.codes.view(torch.uint8).npu().t(), paired[1].transpose(0, 1),
        pertoken_scale=paired[0], output_dtype=torch.bfloat16, x1_dtype=FP4, x2_dtype=FP4, scale_dtype=E8M0,
        pertoken_scale_dtype=E8M0, group_sizes=[1, 1, 32],
    )  # fmt: skip
    torch.testing.assert_close(product.cpu().float(), values[0] @ values[1].t(), rtol=1e-2, atol=1e-2)


def test_matmul_of_groups(host_cann_machine: Emulator) -> None:
    codes, scales, values = mx_codes(5, 2, PAIRED_K)
    weight, weight_scales, weight_values = mx_codes(2, 16, PAIRED_K, seed=1)
    product = torch.ops.npu.npu_transpose_quant_batchmatmul(
        codes.npu(), weight.transpose(1, 2).contiguous().npu(), torch.bfloat16,
        x1_scale=scales.contiguous().view(torch.float8_e8m0fnu).npu(),
        x2_scale=weight_scales.transpose(1, 2).contiguous().view(torch.float8_e8m0fnu).npu(),
        group_sizes=[0, 0, 32], perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2],
    )  # fmt: skip
    expected = torch.einsum("tgk,gnk->tgn", values, weight_values)
    torch.testing.assert_close(product.cpu().float(), expected, rtol=1e-2, atol=1e-2)


def test_scales_that_arrive_as_plain_bytes_are_refused(host_cann_machine: Emulator) -> None:
    # npu_transpose_quant_batchmatmul has no argument for the type of its scales: uint8 reaches the operator as uint8.
    codes, scales, _ = mx_codes(5, 2, PAIRED_K)
    weight, weight_scales, _ = mx_codes(2, 16, PAIRED_K, seed=1)
    with pytest.raises(RuntimeError, match=r"with e8m0 scales; got groups of 32, scales torch\.uint8"):
        torch.ops.npu.npu_transpose_quant_batchmatmul(
            codes.npu(), weight.transpose(1, 2).contiguous().npu(), torch.bfloat16, x1_scale=scales.npu(),
            x2_scale=weight_scales.transpose(1, 2).contiguous().npu(), group_sizes=[0, 0, 32], perm_x1=[1, 0, 2],
            perm_x2=[0, 1, 2], perm_y=[1, 0, 2],
        )  # fmt: skip


def grouped(x: Tensor, weight: Tensor, counts: Tensor, **scales: object) -> Tensor:
    (product,) = torch.ops.npu.npu_grouped_matmul(
        [x.npu()], [weight], group_list=counts.npu(), split_item=3, group_type=0, group_list_type=1, **scales
    )
    return product.cpu()


def expected_groups(values_TK: Tensor, weights_ENK: Tensor, counts: Tensor) -> Tensor:
    rows = values_TK.split(counts.tolist())
    return torch.cat([part @ weight.t() for part, weight in zip(rows, weights_ENK, strict=True)])


COUNTS = torch.tensor([2, 0, 4])


def test_grouped_matmul_of_plain_weights(host_cann_machine: Emulator) -> None:
    x, weight = normal(6, 32, dtype=torch.bfloat16), normal(3, 16, 32, seed=1, dtype=torch.bfloat16)
    product = grouped(x, weight.npu().transpose(1, 2), COUNTS)
    torch.testing.assert_close(product, expected_groups(x.float(), weight.float(), COUNTS).bfloat16())


def test_grouped_matmul_of_mxfp8_weights(host_cann_machine: Emulator) -> None:
    codes, scales, values = mx_codes(6, PAIRED_K)
    weight, weight_scales, weights = mx_codes(3, 16, PAIRED_K, seed=1)
    product = grouped(
        codes, weight.npu().transpose(1, 2), COUNTS, scale=[weight_scales.npu().transpose(1, 2)],
        per_token_scale=[scales.npu()], output_dtype=torch.bfloat16, scale_dtype=E8M0, per_token_scale_dtype=E8M0,
    )  # fmt: skip
    torch.testing.assert_close(product.float(), expected_groups(values, weights, COUNTS), rtol=1e-2, atol=1e-2)


def test_grouped_matmul_of_mxfp4_weights(host_cann_machine: Emulator) -> None:
    codes, scales, values = mx_codes(6, PAIRED_K)
    packed = quantise_mxfp4_blocks(normal(3, 16, PAIRED_K, seed=1))
    fp4, powers = packed.codes.view(torch.uint8), packed.scales.view(torch.uint8)
    weights = decode_e2m1(unpack_nibbles(fp4)) * decode_e8m0(powers).repeat_interleave(32, -1)
    product = grouped(
        codes, fp4.npu().transpose(1, 2), COUNTS, antiquant_scale=[powers.unflatten(-1, (-1, 2)).npu().transpose(1, 2)],
        per_token_scale=[scales.npu()], output_dtype=torch.bfloat16, weight_dtype=FP4, per_token_scale_dtype=E8M0,
    )  # fmt: skip
    torch.testing.assert_close(product.float(), expected_groups(values, weights, COUNTS), rtol=1e-2, atol=1e-2)


def test_groups_that_end_past_the_rows_are_an_error(host_cann_machine: Emulator) -> None:
    x, weight = normal(6, 32, dtype=torch.bfloat16), normal(3, 32, 16, seed=1, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"group 2 is rows 2\.\.9 of 6"):
        grouped(x, weight.npu(), torch.tensor([2, 0, 7]))


def test_the_gate_chooses_with_the_bias_and_weighs_without(host_cann_machine: Emulator) -> None:
    logits, bias = normal(5, 8), normal(8, seed=1)
    weights, experts, _ = torch.ops.npu.npu_moe_gating_top_k(
        logits.npu(), 3, bias=bias.npu(), norm_type=2, routed_scaling_factor=1.5, eps=1e-20
    )
    scores = torch.nn.functional.softplus(logits).sqrt()
    chosen = (scores + bias).topk(3).indices
    assert torch.equal(experts.cpu().long(), chosen)
    picked = scores.gather(1, chosen)
    torch.testing.assert_close(weights.cpu(), 1.5 * picked / picked.sum(-1, keepdim=True))


def test_the_gate_by_table_takes_the_experts_of_the_token(host_cann_machine: Emulator) -> None:
    logits, table, ids = normal(5, 8), torch.randint(0, 8, (20, 2), dtype=torch.int32), torch.tensor([3, 0, 19, 3, 7])
    _, experts, _ = torch.ops.npu.npu_moe_gating_top_k(
        logits.npu(), 2, input_ids=ids.npu(), tid2eid=table.npu(), norm_type=2, routed_scaling_factor=1.0
    )
    assert torch.equal(experts.cpu(), table[ids])


def test_routed_rows_come_back_to_where_they_were(host_cann_machine: Emulator) -> None:
    x, experts = normal(6, 16), torch.tensor([[1, 2], [2, 0], [0, 3], [3, 1], [2, 3], [1, 0]], dtype=torch.int32)
    rows, place, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x.npu(), experts.npu(), active_num=12, expert_num=4, expert_tokens_num_type=1, expert_tokens_num_flag=True,
        active_expert_range=[0, 3], quant_mode=-1, row_idx_type=0,
    )  # fmt: skip
    assert counts.cpu().tolist() == [3, 3, 3]
    assert place.cpu().view(6, 2)[experts == 3].tolist() == [-1] * 3
    weights = normal(6, 2, seed=1)
    summed = torch.ops.npu.npu_moe_finalize_routing(
        rows, x.npu(), None, None, weights.npu(), place, None, drop_pad_mode=2
    )  # fmt: skip
    kept = weights * (experts != 3)
    torch.testing.assert_close(summed.cpu(), x + x * kept.sum(-1, keepdim=True))


def test_finalize_in_mode_0_reads_the_places_by_column(host_cann_machine: Emulator) -> None:
    rows, place = normal(8, 16), torch.arange(8, dtype=torch.int32)
    summed = torch.ops.npu.npu_moe_finalize_routing(
        rows.npu(), None, None, None, None, place.npu(), None, drop_pad_mode=0, k=2
    )
    torch.testing.assert_close(summed.cpu(), rows[:4] + rows[4:])


def test_hyper_connections_before_a_sublayer(host_cann_machine: Emulator) -> None:
    streams, fn, scale, base = (
        normal(5, 4, 64, dtype=torch.bfloat16),
        normal(24, 256, seed=1),
        normal(3, seed=2),
        normal(24, seed=3),
    )
    inner, post, residual, inverse, _, pre = torch.ops.npu.npu_mhc_pre(
        streams.npu(), fn.npu(), scale.npu(), base.npu(), norm_eps=1e-3, hc_eps=1e-2, out_flag=1
    )
    flat = streams.float().flatten(1)
    rstd = torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-3)
    mixed = (flat @ fn.t()) * rstd
    expected_pre = torch.sigmoid(mixed[:, :4] * scale[0] + base[:4]) + 1e-2
    torch.testing.assert_close(inverse.cpu(), rstd.flatten())
    torch.testing.assert_close(pre.cpu(), expected_pre)
    torch.testing.assert_close(post.cpu(), 2 * torch.sigmoid(mixed[:, 4:8] * scale[1] + base[4:8]))
    torch.testing.assert_close(residual.cpu().flatten(1), mixed[:, 8:] * scale[2] + base[8:])
    torch.testing.assert_close(inner.cpu(), torch.einsum("ts,tsd->td", expected_pre, streams.float()).bfloat16())


def test_sinkhorn_ends_with_columns_that_sum_to_one(host_cann_machine: Emulator) -> None:
    comb, _, _ = torch.ops.npu.npu_mhc_sinkhorn(normal(5, 4, 4).npu(), eps=1e-6, num_iters=20)
    torch.testing.assert_close(comb.cpu().sum(-2), torch.ones(5, 4), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(comb.cpu().sum(-1), torch.ones(5, 4), rtol=1e-3, atol=1e-3)


def test_hyper_connections_after_a_sublayer_sum_over_the_first_index(host_cann_machine: Emulator) -> None:
    streams, comb, inner, post = (
        normal(5, 4, 64, dtype=torch.bfloat16),
        normal(5, 4, 4, seed=1),
        normal(5, 64, dtype=torch.bfloat16),
        normal(5, 4),
    )
    out = torch.ops.npu.npu_mhc_post(streams.npu(), comb.npu(), inner.npu(), post.npu())
    expected = torch.einsum("tij,tid->tjd", comb, streams.float()) + post[:, :, None] * inner.float()[:, None]
    torch.testing.assert_close(out.cpu(), expected.bfloat16())


def test_rows_are_scattered_in_place(host_cann_machine: Emulator) -> None:
    pool, rows, slots = torch.zeros(8, 4).npu(), normal(3, 4), torch.tensor([[5], [0], [2]])
    torch.ops.npu.npu_scatter_nd_update_(pool, slots.npu(), rows.npu())
    expected = torch.zeros(8, 4)
    expected[slots.flatten()] = rows
    assert torch.equal(pool.cpu(), expected)
    with pytest.raises(RuntimeError, match=r"index 8\.\.8 leaves dimension 0 of 8"):
        torch.ops.npu.npu_scatter_nd_update_(pool, torch.tensor([[8]]).npu(), rows[:1].npu())


def test_a_paged_cache_gives_back_what_was_scattered(host_cann_machine: Emulator) -> None:
    key, value = normal(5, 2, 16, dtype=torch.bfloat16), normal(5, 2, 16, seed=1, dtype=torch.bfloat16)
    caches = [torch.zeros(6, 4, 2, 16, dtype=torch.bfloat16).npu() for _ in range(2)]
    # Request 0: three positions in block 4; request 1: two positions in block 1.
    slots = torch.tensor([16, 17, 18, 4, 5], dtype=torch.int32)
    torch.ops.npu.npu_scatter_pa_kv_cache(key.npu(), value.npu(), *caches, slots.npu(), cache_mode="Norm")
    read = [torch.zeros_like(key).npu(), torch.zeros_like(value).npu()]
    tables, lengths = torch.tensor([[4, 0], [1, 0]], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)
    torch.ops.npu.npu_gather_pa_kv_cache(*caches, tables.npu(), lengths.npu(), *read)
    assert torch.equal(read[0].cpu(), key)
    assert torch.equal(read[1].cpu(), value)


def test_swiglu_gates_with_the_first_half(host_cann_machine: Emulator) -> None:
    x = normal(4, 64)
    torch.testing.assert_close(torch.ops.npu.npu_swiglu(x.npu()).cpu(), torch.nn.functional.silu(x[:, :32]) * x[:, 32:])


def test_top_k_top_p_keeps_the_likeliest(host_cann_machine: Emulator) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, 10.0, 1.0, 2.0]])
    kept = torch.ops.npu.npu_top_k_top_p(
        logits.npu(), torch.tensor([1.0, 0.5]).npu(), torch.tensor([2, 4], dtype=torch.int32).npu()
    )
    assert kept.cpu().isfinite().tolist() == [[False, True, False, True], [False, True, False, False]]


def test_packed_weights_reach_the_nz_format_in_tiles_of_16_rows_and_32_codes(host_cann_machine: Emulator) -> None:
    """What the operator's storage holds afterwards is the driver's own layout, byte for byte."""
    codes = torch.arange(2 * 32 * 64).view(2, 32, 64).to(torch.uint8)
    with host_cann_machine.record() as recording:
        turned = Operators().cast_mxfp4_to_nz(codes.npu())
    call = recording.only("aclnnNpuFormatCast")
    assert call.tensor("x").shape == (2, 32, 128)
    assert call.tensor("tiles").storage_shape == (2, 4, 2, 16, 32)
    assert call.tensor("tiles").format == "FRACTAL_NZ_C0_32"
    assert turned.shape == codes.shape
    # A copy to the host would ask for the plain order first; emulated memory can be read where it lies.
    stored = ctypes.string_at(call.tensor("tiles").address, codes.numel())
    assert stored == layouts.to_nz(codes, tile_bytes=layouts.NZ_FP4_BYTES).numpy().tobytes()
