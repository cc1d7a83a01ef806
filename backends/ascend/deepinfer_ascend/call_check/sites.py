"""One trial for each method of `deepinfer_ascend.operators.Operators`: arguments as the driver makes them, results as
it reads them.

Legend: T rows, n routed rows, D hidden size, K in features, N out features, E experts, k experts per token.
"""  # noqa: D205 (the first sentence needs two lines)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deepinfer_ascend.call_check.sizes import Sizes
from deepinfer_ascend.operators import Operators, Quantised
from deepinfer_ascend.soc import Soc

BF16: Final = torch.bfloat16
F32: Final = torch.float32
F8: Final = torch.float8_e4m3fn
U8: Final = torch.uint8
I32: Final = torch.int32
I64: Final = torch.int64
Expected = tuple[tuple[int, ...], torch.dtype]
Outcome = list[tuple[Tensor, Expected]]


class Maker:
    """Makes uninitialised tensors on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        """Return a tensor of this shape."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def quantised(self, *shape: int) -> Quantised:
        """Return rows as MXFP8."""
        pairs = -(-shape[-1] // 64)
        return Quantised(self(*shape, dtype=F8), self(*shape[:-1], pairs, 2, dtype=U8))


Trial = Callable[[Operators, Maker, Sizes], Outcome]


@dataclass(frozen=True, slots=True)
class Site:
    """One call site.

    Attributes:
        method: its name in :class:`Operators`.
        operator: torch-npu's operator.
        op: the op of the contract that makes the call.
        trial: makes it and returns every result with the shape and dtype that it must have.
        needs_mx: only chips with an MX matrix unit make it.
    """

    method: str
    operator: str
    op: str
    trial: Trial
    needs_mx: bool = False

    def made_on(self, chip: Soc) -> bool:
        """Return True when the driver makes this call on ``chip``."""
        return chip.has_mx or not self.needs_mx


def _rms_norm(o: Operators, t: Maker, s: Sizes) -> Outcome:
    x = t(s.rows, s.hidden, dtype=F32)
    return [(o.rms_norm(x, t(s.hidden, dtype=F32), 1e-20), ((s.rows, s.hidden), F32))]


def _rotate_pairs(o: Operators, t: Maker, s: Sizes) -> Outcome:
    x = t(1, s.rows, s.heads, s.rotary, dtype=F32)
    cos, sin = t(1, s.rows, 1, s.rotary, dtype=F32), t(1, s.rows, 1, s.rotary, dtype=F32)
    return [(o.rotate_pairs(x, cos, sin), (tuple(x.shape), F32))]


def _quantise_rows(o: Operators, t: Maker, s: Sizes) -> Outcome:
    outcome: Outcome = []
    for dtype in (BF16, F32):
        for shape in ((s.rows, s.hidden), (s.rows, s.groups, s.group_in)):
            found = o.quantise_rows(t(*shape, dtype=dtype))
            outcome.append((found.codes, (shape, F8)))
            outcome.append((found.scales, ((*shape[:-1], shape[-1] // 64, 2), U8)))
    return outcome


def _mx_matmul(o: Operators, t: Maker, s: Sizes) -> Outcome:
    outcome: Outcome = []
    for wide, narrow in ((s.hidden, s.lora), (s.lora, s.hidden)):
        codes, scales = t(wide, narrow, dtype=F8), t(wide // 64, narrow, 2, dtype=U8)
        outcome += [
            (o.mx_matmul(t.quantised(s.rows, wide), codes, scales, dtype), ((s.rows, narrow), dtype))
            for dtype in (BF16, F32)
        ]
    return outcome


def _mx_matmul_of_groups(o: Operators, t: Maker, s: Sizes) -> Outcome:
    x = t.quantised(s.rows, s.groups, s.group_in)
    codes = t(s.groups, s.group_in, s.group_out, dtype=F8)
    scales = t(s.groups, s.group_in // 64, s.group_out, 2, dtype=U8)
    return [(o.mx_matmul_of_groups(x, codes, scales, BF16), ((s.rows, s.groups, s.group_out), BF16))]


def _grouped_matmul(o: Operators, t: Maker, s: Sizes) -> Outcome:
    rows, width = s.rows * s.top_k, 2 * s.intermediate
    counts = t(s.experts, dtype=I64)
    return [
        (
            o.grouped_matmul(t(rows, s.hidden, dtype=dtype), t(s.experts, s.hidden, width, dtype=dtype), counts),
            ((rows, width), dtype),
        )
        for dtype in (BF16, F32)
    ]


def _grouped_matmul_mxfp8(o: Operators, t: Maker, s: Sizes) -> Outcome:
    rows, width = s.rows * s.top_k, 2 * s.intermediate
    codes = t(s.experts, s.hidden, width, dtype=F8)
    scales = t(s.experts, s.hidden // 64, width, 2, dtype=U8)
    x, counts = t.quantised(rows, s.hidden), t(s.experts, dtype=I64)
    return [(o.grouped_matmul_mxfp8(x, codes, scales, counts), ((rows, width), BF16))]


def _grouped_matmul_mxfp4(o: Operators, t: Maker, s: Sizes) -> Outcome:
    rows = s.rows * s.top_k
    outcome: Outcome = []
    for wide, narrow in ((s.hidden, 2 * s.intermediate), (s.intermediate, s.hidden)):
        codes = t(s.experts, narrow, wide // 2, dtype=U8)
        scales = t(s.experts, narrow, wide // 64, 2, dtype=U8)
        x, counts = t.quantised(rows, wide), t(s.experts, dtype=I64)
        outcome.append((o.grouped_matmul_mxfp4(x, codes, scales, counts), ((rows, narrow), BF16)))
    return outcome


def _cast_mxfp4_to_nz(o: Operators, t: Maker, s: Sizes) -> Outcome:
    codes = t(s.experts, 2 * s.intermediate, s.hidden // 2, dtype=U8)
    return [(o.cast_mxfp4_to_nz(codes), (tuple(codes.shape), U8))]


def _gate(o: Operators, t: Maker, s: Sizes) -> Outcome:
    found = o.gate(t(s.rows, s.experts, dtype=F32), t(s.experts, dtype=F32), s.top_k, 1.5)
    return [(found.weights_Tk, ((s.rows, s.top_k), F32)), (found.experts_Tk, ((s.rows, s.top_k), I32))]


def _route_rows(o: Operators, t: Maker, s: Sizes) -> Outcome:
    outcome: Outcome = []
    rows = s.rows * s.top_k
    for dtype in (BF16, F32):
        x, experts = t(s.rows, s.hidden, dtype=dtype), t(s.rows, s.top_k, dtype=I32)
        found = o.route_rows(x, experts, s.experts)
        outcome += [
            (found.rows_nD, ((rows, s.hidden), dtype)),
            (found.place_n, ((rows,), I32)),
            (found.counts_E, ((s.experts,), I64)),
        ]
    return outcome


def _finalize_rows(o: Operators, t: Maker, s: Sizes) -> Outcome:
    rows, shared = t(s.rows * s.top_k, s.hidden), t(s.rows, s.hidden)
    places = t(s.rows * s.top_k, dtype=I32)
    return [(o.finalize_rows(rows, shared, t(s.rows, s.top_k), places), ((s.rows, s.hidden), BF16))]


def _stream_mix(o: Operators, t: Maker, s: Sizes) -> Outcome:
    outputs = (2 + s.streams) * s.streams
    streams = t(s.rows, s.streams, s.hidden)
    fn, scale, base = t(outputs, s.streams * s.hidden, dtype=F32), t(3, dtype=F32), t(outputs, dtype=F32)
    found = o.stream_mix(streams, fn, scale, base, norm_eps=1e-20, mix_eps=1e-6)
    return [
        (found.pre_TS, ((s.rows, s.streams), F32)),
        (found.post_TS, ((s.rows, s.streams), F32)),
        (found.residual_TSS, ((s.rows, s.streams, s.streams), F32)),
    ]


def _sinkhorn(o: Operators, t: Maker, s: Sizes) -> Outcome:
    shape = (s.rows, s.streams, s.streams)
    return [(o.sinkhorn(t(*shape, dtype=F32), 20, 1e-6), (shape, F32))]


def _post_streams(o: Operators, t: Maker, s: Sizes) -> Outcome:
    streams = t(s.rows, s.streams, s.hidden)
    comb, post = t(s.rows, s.streams, s.streams, dtype=F32), t(s.rows, s.streams, dtype=F32)
    return [(o.post_streams(streams, comb, t(s.rows, s.hidden), post), (tuple(streams.shape), BF16))]


def _scatter_rows(o: Operators, t: Maker, s: Sizes) -> Outcome:
    nbytes = s.head_width + s.head_width // 32
    pool = t(s.slots * s.ring, nbytes, dtype=U8)
    o.scatter_rows(pool, t(s.rows, dtype=I64), t(s.rows, nbytes, dtype=U8))
    return [(pool, ((s.slots * s.ring, nbytes), U8))]


SITES: Final = (
    Site("rms_norm", "npu_rms_norm", "norm.rms", _rms_norm),
    Site("rotate_pairs", "npu_rotary_mul", "norm.rotary", _rotate_pairs),
    Site("quantise_rows", "npu_dynamic_mx_quant", "linear.dense", _quantise_rows, needs_mx=True),
    Site("mx_matmul", "npu_quant_matmul", "linear.dense", _mx_matmul, needs_mx=True),
    Site(
        "mx_matmul_of_groups", "npu_transpose_quant_batchmatmul", "linear.grouped", _mx_matmul_of_groups, needs_mx=True
    ),
    Site("grouped_matmul", "npu_grouped_matmul", "experts.routed", _grouped_matmul),
    Site("grouped_matmul_mxfp8", "npu_grouped_matmul", "experts.routed", _grouped_matmul_mxfp8, needs_mx=True),
    Site("grouped_matmul_mxfp4", "npu_grouped_matmul", "experts.routed", _grouped_matmul_mxfp4, needs_mx=True),
    Site("cast_mxfp4_to_nz", "_npu_format_cast", "experts.prepare", _cast_mxfp4_to_nz, needs_mx=True),
    Site("gate", "npu_moe_gating_top_k", "experts.route", _gate, needs_mx=True),
    Site("route_rows", "npu_moe_init_routing_v2", "experts.routed", _route_rows),
    Site("finalize_rows", "npu_moe_finalize_routing", "experts.local", _finalize_rows, needs_mx=True),
    Site("stream_mix", "npu_mhc_pre", "mixing.mixes", _stream_mix, needs_mx=True),
    Site("sinkhorn", "npu_mhc_sinkhorn", "mixing.mixes", _sinkhorn, needs_mx=True),
    Site("post_streams", "npu_mhc_post", "mixing.post", _post_streams, needs_mx=True),
    Site("scatter_rows", "npu_scatter_nd_update_", "codec.store_window", _scatter_rows),
)


def methods() -> tuple[str, ...]:
    """Return the names of all call sites that the driver has."""
    return tuple(name for name in vars(Operators) if not name.startswith("_"))
