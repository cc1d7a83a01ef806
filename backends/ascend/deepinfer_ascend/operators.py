"""Every call into torch-npu's own operators, one method each, with exact namespace and arguments.

Nothing else in the driver names ``torch.ops.npu``. The call check runs each method on meta tensors and on an emulated
device; tests put a host implementation of the documented formulas in the place of this class.

Codes of dtypes that torch-npu numbers itself: 293 float8_e8m0fnu, 296 float4_e2m1fn_x2.

Legend: T rows, n routed rows, D hidden size, S streams, M mixing outputs, H heads, K in features, N out features,
G groups, E experts, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor

E8M0_CODE: Final = 293
FP4_CODE: Final = 296
NZ_FORMAT: Final = 29
ND_FORMAT: Final = 2
E4M3: Final = torch.float8_e4m3fn
MX_BLOCK: Final = 32
AMAX_FLOOR: Final = 1e-4
"""Least amax of an activation group (model.md section 11)."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """Rows as e4m3 codes [..., K] with e8m0 scales in pairs [..., K/64, 2]."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class Gates:
    """What the gate chose: weights [T, k], scaled, and expert ids int32 [T, k]."""

    weights_Tk: Tensor
    experts_Tk: Tensor


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Rows in the order of their experts.

    Attributes:
        rows_nD: [T*k, D]; rows behind the last one that an expert got are not defined.
        place_n: int32 [T*k], for each (row, slot) where its copy stands.
        counts_E: int64 [E], rows of each expert.
    """

    rows_nD: Tensor
    place_n: Tensor
    counts_E: Tensor


@dataclass(frozen=True, slots=True)
class StreamMix:
    """Coefficients before Sinkhorn: pre and post [T, S], residual logits [T, S, S]."""

    pre_TS: Tensor
    post_TS: Tensor
    residual_TSS: Tensor


class Operators:
    """The operators of torch-npu 2.13. Tensors are on one device; nothing here waits for it."""

    def rms_norm(self, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Return ``weight * x * rsqrt(mean(x^2) + eps)``; x and weight of one dtype."""
        normed, _ = torch.ops.npu.npu_rms_norm(x, weight_D, eps)
        return cast("Tensor", normed)

    def rotate_pairs(self, x_1THC: Tensor, cos_1T1C: Tensor, sin_1T1C: Tensor) -> Tensor:
        """Rotate adjacent channel pairs; cos and sin hold each pair's value twice."""
        return cast("Tensor", torch.ops.npu.npu_rotary_mul(x_1THC, cos_1T1C, sin_1T1C, rotary_mode="interleave"))

    def quantise_rows(self, x: Tensor) -> Quantised:
        """Quantise per 32 along K: scale ``2^ceil(log2(max(amax, 1e-4) / 448))`` (scale_alg 1), codes by RNE."""
        codes, scales = torch.ops.npu.npu_dynamic_mx_quant(
            x,
            axis=-1,
            round_mode="rint",
            dst_type=E4M3,
            block_size=MX_BLOCK,
            scale_alg=1,
            max_low_bound=AMAX_FLOOR,
        )
        return Quantised(codes, scales)

    def mx_matmul(self, x: Quantised, codes_KN: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the product [T, N] of MXFP8 rows and an MXFP8 weight with scales [K/64, N, 2]."""
        product = torch.ops.npu.npu_quant_matmul(
            x.codes,
            codes_KN,
            scales,
            pertoken_scale=x.scales,
            output_dtype=dtype,
            scale_dtype=E8M0_CODE,
            pertoken_scale_dtype=E8M0_CODE,
            group_sizes=[1, 1, MX_BLOCK],
        )
        return cast("Tensor", product)

    def mx_matmul_of_groups(self, x: Quantised, codes_GKN: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [T, G, N]: rows [T, G, K] by one MXFP8 weight a group, scales [G, K/64, N, 2]."""
        # It has no arguments for the dtypes of its scales: they must say themselves that they are powers of two.
        product = torch.ops.npu.npu_transpose_quant_batchmatmul(
            x.codes,
            codes_GKN,
            dtype,
            x1_scale=x.scales.view(torch.float8_e8m0fnu),
            x2_scale=scales.view(torch.float8_e8m0fnu),
            group_sizes=[0, 0, MX_BLOCK],
            perm_x1=[1, 0, 2],
            perm_x2=[0, 1, 2],
            perm_y=[1, 0, 2],
        )
        return cast("Tensor", product)

    def grouped_matmul(self, x_nK: Tensor, weight_EKN: Tensor, counts_E: Tensor) -> Tensor:
        """Return [n, N]: consecutive rows by their expert's weight, in the dtype of both."""
        (product,) = torch.ops.npu.npu_grouped_matmul(
            [x_nK], [weight_EKN], group_list=counts_E, split_item=3, group_type=0, group_list_type=1
        )
        return cast("Tensor", product)

    def grouped_matmul_mxfp8(self, x: Quantised, codes_EKN: Tensor, scales: Tensor, counts_E: Tensor) -> Tensor:
        """Return bfloat16 [n, N]: MXFP8 rows by MXFP8 weights, scales [E, K/64, N, 2]."""
        (product,) = torch.ops.npu.npu_grouped_matmul(
            [x.codes],
            [codes_EKN],
            scale=[scales],
            per_token_scale=[x.scales],
            group_list=counts_E,
            split_item=3,
            group_type=0,
            group_list_type=1,
            output_dtype=torch.bfloat16,
            scale_dtype=E8M0_CODE,
            per_token_scale_dtype=E8M0_CODE,
        )
        return cast("Tensor", product)

    def grouped_matmul_mxfp4(self, x: Quantised, codes_ENK: Tensor, scales: Tensor, counts_E: Tensor) -> Tensor:
        """Return bfloat16 [n, N]: MXFP8 rows by packed MXFP4 weights [E, N, K/2] with scales [E, N, K/64, 2]."""
        # Two codes share a byte along K, so that the weight can only be handed over as a transposed view.
        (product,) = torch.ops.npu.npu_grouped_matmul(
            [x.codes],
            [codes_ENK.transpose(1, 2)],
            antiquant_scale=[scales.transpose(1, 2)],
            per_token_scale=[x.scales],
            group_list=counts_E,
            split_item=3,
            group_type=0,
            group_list_type=1,
            output_dtype=torch.bfloat16,
            weight_dtype=FP4_CODE,
            per_token_scale_dtype=E8M0_CODE,
        )
        return cast("Tensor", product)

    def cast_mxfp4_to_nz(self, codes_ENK: Tensor) -> Tensor:
        """Return packed MXFP4 weights in the NZ format; the shape stays, the bytes move (`layouts.to_nz`, 16 a row)."""
        # npu_format_cast is this operator without a Meta kernel.
        turned = torch.ops.npu._npu_format_cast(codes_ENK, NZ_FORMAT, E4M3, FP4_CODE)
        return cast("Tensor", turned)

    def gate(self, logits_TE: Tensor, bias_E: Tensor, top_k: int, scale: float) -> Gates:
        """Return the k best of ``sqrt(softplus(x)) + bias``; weights are the unbiased ones, normalised and scaled."""
        weights_Tk, experts_Tk, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits_TE, top_k, bias=bias_E, renorm=0, norm_type=2, routed_scaling_factor=scale, eps=1e-20
        )
        return Gates(weights_Tk, experts_Tk)

    def route_rows(self, x_TD: Tensor, experts_Tk: Tensor, experts: int) -> RoutedRows:
        """Copy rows in the order of their experts; an id equal to ``experts`` stands for none and comes last."""
        rows_nD, place_n, counts_E, _ = torch.ops.npu.npu_moe_init_routing_v2(
            x_TD,
            experts_Tk,
            active_num=experts_Tk.numel(),
            expert_num=experts + 1,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[0, experts],
            quant_mode=-1,
            row_idx_type=0,
        )
        return RoutedRows(rows_nD, place_n, counts_E)

    def finalize_rows(self, rows_nD: Tensor, shared_TD: Tensor, weights_Tk: Tensor, place_n: Tensor) -> Tensor:
        """Return ``shared + sum_k weights * rows[place]`` in the dtype of the rows."""
        summed = torch.ops.npu.npu_moe_finalize_routing(
            rows_nD, shared_TD, None, None, weights_Tk, place_n, None, drop_pad_mode=2
        )
        return cast("Tensor", summed)

    def stream_mix(
        self, streams_TSD: Tensor, fn_MK: Tensor, scale_3: Tensor, base_M: Tensor, *, norm_eps: float, mix_eps: float
    ) -> StreamMix:
        """Return the coefficients of hyper-connections; streams are bfloat16, parameters float32.

        The operator also collapses the streams with these same coefficients. V4.1 uses them one sublayer later, so
        that its first result is left.
        """
        _, post_TS, residual_TSS, _, _, pre_TS = torch.ops.npu.npu_mhc_pre(
            streams_TSD, fn_MK, scale_3, base_M, norm_eps=norm_eps, hc_eps=mix_eps, out_flag=1, inner_precise=0
        )
        return StreamMix(pre_TS, post_TS, residual_TSS)

    def sinkhorn(self, logits_TSS: Tensor, iterations: int, eps: float) -> Tensor:
        """Return doubly stochastic matrices: softmax over the last index, then columns and rows in turn."""
        comb_TSS, _, _ = torch.ops.npu.npu_mhc_sinkhorn(logits_TSS, eps=eps, num_iters=iterations)
        return cast("Tensor", comb_TSS)

    def post_streams(self, streams_TSD: Tensor, comb_TSS: Tensor, output_TD: Tensor, post_TS: Tensor) -> Tensor:
        """Return ``out[j] = post[j] * output + sum_i comb[i, j] * streams[i]``."""
        return cast("Tensor", torch.ops.npu.npu_mhc_post(streams_TSD, comb_TSS, output_TD, post_TS))

    def scatter_rows(self, pool_Nb: Tensor, slot_T: Tensor, rows_Tb: Tensor) -> None:
        """Write rows of bytes into a contiguous pool, in place; equal slots must carry equal rows."""
        torch.ops.npu.npu_scatter_nd_update_(pool_Nb, slot_T.unsqueeze(-1), rows_Tb)
