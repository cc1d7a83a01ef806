"""Mixture of experts: gate, routing, grouped products, finalize.

Legend: T rows, n routed rows, D hidden size, K in features, N out features, E experts, k experts per row.
"""

# ruff: noqa: FBT001 (booleans stand where the operator has them)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from host_cann.errors import KernelError
from host_cann.kernels.microscaling import values_of
from host_cann.kernels.products import product
from host_cann.kernels.registry import KernelTable
from host_cann.views import store

TABLE = KernelTable()

_NORMS: dict[int, Callable[[Tensor], Tensor]] = {
    0: lambda x: x.softmax(-1),
    1: torch.sigmoid,
    2: lambda x: F.softplus(x).sqrt(),
}


def _gate(
    x: Tensor, k: int, groups_kept: int, groups: int, renorm: int, norm: int, scale: float, eps: float,
    choose: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if norm not in _NORMS or groups != 1 or groups_kept != 1:
        raise KernelError(f"is emulated with one group and norms {sorted(_NORMS)}; asked {groups} groups, norm {norm}")
    scores = _NORMS[norm](x.float())
    chosen = choose(scores).long()
    picked = scores.gather(1, chosen)
    if norm in (1, 2) or renorm == 1:
        picked = picked / (picked.sum(-1, keepdim=True) + eps)
    return (picked * scale).to(x.dtype), chosen.int(), scores


@TABLE.add(
    "aclnnMoeGatingTopK(x, bias?, int k, int groups_kept, int groups, int group_mode, int renorm, int norm,"
    " bool keeps_scores, double scale, double eps, y*, experts*, scores*?)"
)
def gate(
    x: Tensor, bias: Tensor | None, k: int, groups_kept: int, groups: int, group_mode: int, renorm: int, norm: int,
    keeps_scores: bool, scale: float, eps: float, y: Tensor, experts: Tensor, scores: Tensor | None,
) -> None:  # fmt: skip
    def best(plain: Tensor) -> Tensor:
        judged = plain if bias is None else plain + bias.float()
        # Equal values: the smaller id first.
        return torch.sort(judged, dim=-1, descending=True, stable=True).indices[:, :k]

    weights, chosen, plain = _gate(x, k, groups_kept, groups, renorm, norm, scale, eps, best)
    store(y, weights)
    store(experts, chosen)
    if keeps_scores and scores is not None:
        store(scores, plain)


@TABLE.add(
    "aclnnMoeGatingTopKV2(x, bias?, ids?, table?, int k, int groups_kept, int groups, int group_mode, int renorm,"
    " int norm, bool keeps_scores, double scale, double eps, y*, experts*, scores*?)"
)
def gate_by_table(
    x: Tensor, bias: Tensor | None, ids: Tensor | None, table: Tensor | None, k: int, groups_kept: int, groups: int,
    group_mode: int, renorm: int, norm: int, keeps_scores: bool, scale: float, eps: float, y: Tensor, experts: Tensor,
    scores: Tensor | None,
) -> None:  # fmt: skip
    if ids is None or table is None:
        gate(x, bias, k, groups_kept, groups, group_mode, renorm, norm, keeps_scores, scale, eps, y, experts, scores)
        return
    found = table[ids.long()]
    weights, chosen, plain = _gate(x, k, groups_kept, groups, renorm, norm, scale, eps, lambda _: found)
    store(y, weights)
    store(experts, chosen)
    if keeps_scores and scores is not None:
        store(scores, plain)


@TABLE.add(
    "aclnnMoeInitRoutingV3(x, experts, scale?, offset?, int active, int capacity, int expert_count, int pads,"
    " int count_kind, bool counts_wanted, int quant, ints range, int row_kind, rows*, place*, counts*, row_scale*)"
)
def init_routing(
    x: Tensor, experts: Tensor, scale: Tensor | None, offset: Tensor | None, active: int, capacity: int,
    expert_count: int, pads: int, count_kind: int, counts_wanted: bool, quant: int,
    range: list[int], row_kind: int, rows: Tensor,
    place: Tensor, counts: Tensor, row_scale: Tensor,
) -> None:  # fmt: skip
    if scale is not None or offset is not None or pads or quant != -1 or count_kind not in (0, 1):
        raise KernelError(
            f"is emulated without padding and quantisation, counts or sums; asked pads {pads}, quant {quant}"
        )
    first, end = range or (0, expert_count)
    flat = experts.flatten()
    outside = (flat < first) | (flat >= end)
    order = torch.sort(torch.where(outside, expert_count + 1, flat), stable=True).indices
    kept = int((~outside).sum())
    if active not in (-1, 0) and active < kept:
        raise KernelError(f"{kept} rows are routed, active_num allows {active}")
    rows[:kept] = x[order[:kept] // experts.shape[1]]  # rows beyond stay as they were: undefined
    places = torch.full_like(flat, -1)
    if row_kind == 0:
        places[order[:kept]] = torch.arange(kept, dtype=places.dtype)
    else:
        places[:kept] = order[:kept].to(places.dtype)
    store(place, places)
    if counts_wanted:
        numbers = torch.bincount((flat[~outside] - first).long(), minlength=end - first)
        store(counts, numbers.cumsum(0) if count_kind == 0 else numbers)


@TABLE.add(
    "aclnnMoeFinalizeRoutingV4(rows, place, first?, second?, bias?, weights?, experts?, r1?, r2?, r3?, r4?, int pads,"
    " ints z1?, ints z2?, ints z3?, int k, out*)"
)
def finalize(
    rows: Tensor, place: Tensor, first: Tensor | None, second: Tensor | None, bias: Tensor | None,
    weights: Tensor | None, experts: Tensor | None, r1: Tensor | None, r2: Tensor | None,
    r3: Tensor | None, r4: Tensor | None, pads: int,
    z1: list[int] | None, z2: list[int] | None, z3: list[int] | None, k: int, out: Tensor,
) -> None:  # fmt: skip
    if any(extra is not None for extra in (bias, r1, r2, r3, r4, z1, z2, z3)) or pads not in (0, 2):
        raise KernelError(f"is emulated without bias, extra experts and padding (modes 0 and 2); asked mode {pads}")
    count = out.shape[0]
    # Mode 0 stores the k places of a row one column after the other, mode 2 side by side.
    place_Tk = place.view(-1, count).t() if pads == 0 else place.view(count, -1)
    weight_Tk = torch.ones(place_Tk.shape) if weights is None else weights.float()
    total = torch.zeros(out.shape, dtype=torch.float32)
    for extra in (first, second):
        if extra is not None:
            total = total + extra.float()
    for slot in torch.arange(place_Tk.shape[1]).tolist():
        index = place_Tk[:, slot].long()
        found = rows[index.clamp(min=0)].float() * weight_Tk[:, slot, None]
        total = total + torch.where((index >= 0)[:, None], found, 0.0)
    store(out, total)


@TABLE.add(
    "aclnnGroupedMatmulV5(list x, list weight, list bias?, list scale?, list offset?, list antiquant_scale?,"
    " list antiquant_offset?, list row_scale?, groups?, list a1?, list a2?, list a3?, int split, int kind,"
    " int group_kind, int activation, ints tuning?, list out*, list o1*?, list o2*?)"
)
def grouped_matmul(
    x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None, scale: list[Tensor] | None,
    offset: list[Tensor] | None, antiquant_scale: list[Tensor] | None, antiquant_offset: list[Tensor] | None,
    row_scale: list[Tensor] | None, groups: Tensor | None, a1: object, a2: object, a3: object, split: int, kind: int,
    group_kind: int, activation: int, tuning: object, out: list[Tensor], o1: object, o2: object,
) -> None:  # fmt: skip
    extras = (bias, offset, antiquant_offset, a1, a2, a3, o1, o2)
    if any(extra is not None for extra in extras) or activation or kind != 0 or split not in (2, 3) or groups is None:
        raise KernelError(
            f"is emulated for groups of rows, one tensor each, without bias; asked split {split}, kind {kind}"
        )
    rows, matrices, scales = x[0], weight[0], scale or antiquant_scale
    if scales is not None:
        if row_scale is None:
            raise KernelError("has MX weights, but x has no scales")
        if scale and scale[0].dtype == torch.uint8:
            raise KernelError("has weight scales as uint8; they are e8m0 by scale_dtype")
        rows = values_of(rows, row_scale[0], 1, "x", packed=False)
        packed = matrices.dtype == torch.uint8
        matrices = values_of(matrices, scales[0], 1, "weight", packed=packed)
    if rows.shape[1] != matrices.shape[1]:
        raise KernelError(f"multiplies {tuple(rows.shape)} by {tuple(matrices.shape)}")
    ends = groups.cumsum(0) if group_kind == 1 else groups
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > rows.shape[0] or end < start:
            raise KernelError(f"group {expert} is rows {start}..{end} of {rows.shape[0]}")
        out[0][start:end] = product(rows[start:end], matrices[expert]).to(out[0].dtype)
        start = end


@TABLE.add(
    "aclnnGroupedMatmulV4(list x, list weight, list bias?, list scale?, list offset?, list antiquant_scale?,"
    " list antiquant_offset?, list row_scale?, groups?, list a1?, list a2?, list a3?, int split, int kind,"
    " int group_kind, int activation, list out*, list o1*?, list o2*?)"
)
def grouped_matmul_without_tuning(**arguments: Any) -> None:
    grouped_matmul(tuning=None, **arguments)
