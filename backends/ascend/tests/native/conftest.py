"""The driver's ops on the host: torch-npu's operators by their documented formulas, everything else as it is.

What these tests prove is the driver's wiring (layouts, padding, routing, slots) against the reference driver. They
prove nothing about the vendor's kernels.

Legend: T rows, n routed rows, D hidden size, K in features, N out features, G groups, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops import OpGroup
from deepinfer.numerics import decode_e2m1, decode_e4m3, decode_e8m0, quantise_fp8_blocks, unpack_nibbles
from deepinfer_ascend.arithmetic import Arithmetic
from deepinfer_ascend.driver import native_groups
from deepinfer_ascend.operators import Gates, Operators, Quantised, RoutedRows, StreamMix
from deepinfer_ascend.soc import detect
from deepinfer_cpu_ref import Driver as Reference

HOST = torch.device("cpu")
NAN = float("nan")


class HostOperators(Operators):
    """Documented formulas in float32; what an operator leaves undefined is NaN here, and places there are absurd."""

    def rms_norm(self, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        assert x.dtype == weight_D.dtype
        assert x.is_contiguous()
        return weight_D * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def rotate_pairs(self, x_1THC: Tensor, cos_1T1C: Tensor, sin_1T1C: Tensor) -> Tensor:
        even, odd = x_1THC[..., 0::2], x_1THC[..., 1::2]
        turned = torch.stack((-odd, even), dim=-1).flatten(-2)
        return x_1THC * cos_1T1C + turned * sin_1T1C

    def quantise_rows(self, x: Tensor) -> Quantised:
        assert x.shape[-1] % 64 == 0
        assert x.is_contiguous()
        found = quantise_fp8_blocks(x.float())
        return Quantised(found.codes.view(torch.float8_e4m3fn), found.scales.unflatten(-1, (-1, 2)))

    def mx_matmul(self, x: Quantised, codes_KN: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        assert codes_KN.is_contiguous()
        assert scales.stride() == (2 * codes_KN.shape[1], 2, 1)
        return (values(x) @ weight_values(codes_KN, scales)).to(dtype)

    def mx_matmul_of_groups(self, x: Quantised, codes_GKN: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        x_TGK = values(x)
        found = [x_TGK[:, g] @ weight_values(codes_GKN[g], scales[g]) for g in range(codes_GKN.shape[0])]
        return torch.stack(found, dim=1).to(dtype)

    def grouped_matmul(self, x_nK: Tensor, weight_EKN: Tensor, counts_E: Tensor) -> Tensor:
        assert x_nK.dtype == weight_EKN.dtype
        return by_expert(x_nK.float(), [weight.float() for weight in weight_EKN], counts_E).to(x_nK.dtype)

    def grouped_matmul_mxfp8(self, x: Quantised, codes_EKN: Tensor, scales: Tensor, counts_E: Tensor) -> Tensor:
        weights = [weight_values(codes, scale) for codes, scale in zip(codes_EKN, scales, strict=True)]
        return by_expert(values(x), weights, counts_E).to(torch.bfloat16)

    def grouped_matmul_mxfp4(self, x: Quantised, codes_ENK: Tensor, scales: Tensor, counts_E: Tensor) -> Tensor:
        weights = []
        for codes_NK, scale in zip(codes_ENK, scales, strict=True):
            scale_NK = decode_e8m0(scale.flatten(-2)).repeat_interleave(32, dim=-1)
            weights.append((decode_e2m1(unpack_nibbles(codes_NK)) * scale_NK).t())
        return by_expert(values(x), weights, counts_E).to(torch.bfloat16)

    def gate(self, logits_TE: Tensor, bias_E: Tensor, top_k: int, scale: float) -> Gates:
        score_TE = torch.nn.functional.softplus(logits_TE).sqrt()
        chosen_Tk = (score_TE + bias_E).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        weight_Tk = score_TE.gather(1, chosen_Tk)
        return Gates(weight_Tk / (weight_Tk.sum(-1, keepdim=True) + 1e-20) * scale, chosen_Tk.to(torch.int32))

    def route_rows(self, x_TD: Tensor, experts_Tk: Tensor, experts: int) -> RoutedRows:
        assert experts_Tk.dtype == torch.int32
        assert int(experts_Tk.min()) >= 0
        flat_n = experts_Tk.flatten()
        order_n = flat_n.argsort(stable=True)
        counts_E = torch.bincount(flat_n, minlength=experts + 1)[:experts]
        rows_nD = x_TD[order_n // experts_Tk.shape[1]].clone()
        rows_nD[int(counts_E.sum()) :] = NAN
        place_n = torch.full_like(flat_n, -7)
        place_n[order_n] = torch.arange(flat_n.shape[0], dtype=torch.int32)
        return RoutedRows(rows_nD, torch.where(flat_n < experts, place_n, -7), counts_E)

    def finalize_rows(self, rows_nD: Tensor, shared_TD: Tensor, weights_Tk: Tensor, place_n: Tensor) -> Tensor:
        chosen_TkD = rows_nD.float()[place_n].view(*weights_Tk.shape, -1)
        return (shared_TD.float() + (weights_Tk.float().unsqueeze(-1) * chosen_TkD).sum(1)).to(rows_nD.dtype)

    def stream_mix(
        self, streams_TSD: Tensor, fn_MK: Tensor, scale_3: Tensor, base_M: Tensor, *, norm_eps: float, mix_eps: float
    ) -> StreamMix:
        assert streams_TSD.dtype == torch.bfloat16
        count = streams_TSD.shape[1]
        x_TK = streams_TSD.flatten(1).float()
        mixed_TM = x_TK @ fn_MK.t() * torch.rsqrt(x_TK.square().mean(-1, keepdim=True) + norm_eps)
        pre, post, residual = mixed_TM.split([count, count, count * count], dim=-1)
        residual = residual * scale_3[2] + base_M[2 * count :]
        return StreamMix(
            torch.sigmoid(pre * scale_3[0] + base_M[:count]) + mix_eps,
            2 * torch.sigmoid(post * scale_3[1] + base_M[count : 2 * count]),
            residual.unflatten(-1, (count, count)),
        )

    def sinkhorn(self, logits_TSS: Tensor, iterations: int, eps: float) -> Tensor:
        comb = logits_TSS.softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return comb

    def post_streams(self, streams_TSD: Tensor, comb_TSS: Tensor, output_TD: Tensor, post_TS: Tensor) -> Tensor:
        mixed = (comb_TSS.unsqueeze(-1) * streams_TSD.float().unsqueeze(-2)).sum(-3)
        return (post_TS.unsqueeze(-1) * output_TD.float().unsqueeze(-2) + mixed).to(streams_TSD.dtype)

    def scatter_rows(self, pool_Nb: Tensor, slot_T: Tensor, rows_Tb: Tensor) -> None:
        assert pool_Nb.is_contiguous()
        assert int(slot_T.min()) >= 0
        pool_Nb[slot_T] = rows_Tb


def values(x: Quantised) -> Tensor:
    """Return the float32 values of MXFP8 rows."""
    return decode_e4m3(x.codes) * decode_e8m0(x.scales.flatten(-2)).repeat_interleave(32, dim=-1)


def weight_values(codes_KN: Tensor, scales: Tensor) -> Tensor:
    """Return float32 [K, N] of an MXFP8 weight with scales [K/64, N, 2]."""
    scale_GN = decode_e8m0(scales).transpose(1, 2).flatten(0, 1)
    return decode_e4m3(codes_KN) * scale_GN.repeat_interleave(32, dim=0)


def by_expert(x_nK: Tensor, weights: list[Tensor], counts_E: Tensor) -> Tensor:
    """Return [n, N]; rows that no expert has stay NaN."""
    found = x_nK.new_full((x_nK.shape[0], weights[0].shape[1]), NAN)
    start = 0
    for weight_KN, count in zip(weights, counts_E.tolist(), strict=True):
        found[start : start + count] = x_nK[start : start + count] @ weight_KN
        start += count
    return found


Groups = Mapping[str, OpGroup]
Pair = tuple[Groups, Groups]
MakePair = Callable[..., Pair]


@pytest.fixture
def pair() -> MakePair:
    """Return the driver's groups on the host operators, and the reference's, for the same options."""

    def make(dtype: torch.dtype = torch.bfloat16, *, served: bool = True, soc: str = "Ascend950PR_9599") -> Pair:
        options = OpOptions(activation_dtype=dtype, numerics="served" if served else "portable")
        chip = detect(soc)
        assert chip is not None
        return native_groups(Arithmetic.of(options, chip, HOST), HostOperators()), Reference().op_groups(options)

    return make


@pytest.fixture
def draws() -> torch.Generator:
    """Return one stream of random numbers a test."""
    return torch.Generator().manual_seed(7)


@pytest.fixture
def host_operators() -> Operators:
    """Return the operators by their documented formulas."""
    return HostOperators()
