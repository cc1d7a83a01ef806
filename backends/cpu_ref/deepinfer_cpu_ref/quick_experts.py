"""Mixture of experts over one tensor for all experts of a layer: two products an expert, everything else at once.

Slots are sorted by expert, so that every expert's rows lie together: gate and up are one product into a common buffer,
the activation runs once over all slots, and the products with W2 go into a common buffer again.

Legend: T rows, D hidden size, E experts, k experts per token, I intermediate size, n slots (T * k, those that have an
expert), J = 2I.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.accelerator.ops.experts import RouterWeights, Routing
from deepinfer.accelerator.weights import PreparedWeight, StoredExpert
from deepinfer_cpu_ref.experts import WEIGHT_SUM_FLOOR, CpuRefExperts, Expert, PreparedExperts
from deepinfer_cpu_ref.quick_memory import empty_weight
from deepinfer_cpu_ref.weights import Matrix, dequantise

LARGEST_SORT = 65_536
"""Scores of more than this many experts times rows are ordered by the readable op, which sorts with every thread."""


@dataclass(eq=False)
class StackedExperts(PreparedExperts):
    """Experts whose matrices are views of two tensors, so that both ways of computing share one copy.

    Attributes:
        first_DJ: W1 above W3 of each expert, transposed.
        second_ID: W2 of each expert, transposed.
    """

    first_DJ: tuple[Tensor, ...]
    second_ID: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Slots:
    """The slots of a step that have an expert, sorted by expert.

    Attributes:
        row_n: row of each slot.
        place_Tk: where the outputs of each row's slots lie among the sorted ones; any place where there is none.
        runs: expert, first slot and end of each expert that has slots.
    """

    row_n: Tensor
    place_Tk: Tensor
    runs: list[tuple[int, int, int]]


class QuickExperts(CpuRefExperts):
    """The readable formulas for float32; everything else goes to the readable ops."""

    @np.errstate(all="ignore")  # a row that is not finite stays so, and stays alone
    def route(
        self, x_TD: Tensor, router: RouterWeights, image_T: Tensor, valid_T: Tensor, top_k: int, scale: float
    ) -> Routing:
        """See :meth:`ExpertOps.route`."""
        experts, hidden = router.gate_ED.shape
        suits = x_TD.dtype == torch.float32 and x_TD.shape[-1] == hidden and 1 <= top_k <= experts
        if not suits or x_TD.shape[0] * experts > LARGEST_SORT:
            return super().route(x_TD, router, image_T, valid_T, top_k, scale)
        logits_TE = F.linear(x_TD, router.gate_ED.to(torch.float32)).numpy()
        score_TE = np.sqrt(np.log1p(np.exp(-np.abs(logits_TE))) + np.maximum(logits_TE, np.float32(0.0)))
        bias = router.bias_E.to(torch.float32).numpy()
        image_rows = image_T.numpy()
        if image_rows.any():
            bias = np.where(image_rows[:, None], router.image_bias_E.to(torch.float32).numpy(), bias)
        # A stable ascending sort of the negated scores: ties by lowest id, NaN last.
        chosen_Tk = np.argsort(-(score_TE + bias), axis=1, kind="stable")[:, :top_k]
        weight_Tk = np.take_along_axis(score_TE, chosen_Tk, axis=1)
        if top_k > 1:
            weight_Tk = weight_Tk / (weight_Tk.sum(1, keepdims=True) + np.float32(WEIGHT_SUM_FLOOR))
        weight_Tk = weight_Tk * np.float32(scale)
        valid_rows = valid_T.numpy()
        if not valid_rows.all():
            chosen_Tk = np.where(valid_rows[:, None], chosen_Tk, -1)
            weight_Tk = np.where(valid_rows[:, None], weight_Tk, np.float32(0.0))
        return Routing(torch.from_numpy(np.ascontiguousarray(chosen_Tk)), torch.from_numpy(weight_Tk))

    def prepare(self, experts: Sequence[StoredExpert], limit: float) -> PreparedWeight:
        """See :meth:`ExpertOps.prepare`."""
        return _stack(experts, limit) if _stackable(experts) else super().prepare(experts, limit)

    def prepare_shared(self, expert: StoredExpert, limit: float) -> PreparedWeight:
        """See :meth:`ExpertOps.prepare_shared`."""
        return _stack([expert], limit) if _stackable([expert]) else super().prepare_shared(expert, limit)

    def local(self, x_TD: Tensor, routing: Routing, experts: PreparedWeight, shared: PreparedWeight) -> Tensor:
        """See :meth:`ExpertOps.local`."""
        if (
            x_TD.shape[0] == 1
            and x_TD.dtype == torch.float32
            and isinstance(experts, StackedExperts)
            and isinstance(shared, StackedExperts)
            and x_TD.shape[1] == experts.hidden_size == shared.hidden_size
            and experts.limit == shared.limit
            and experts.first_DJ[0].shape == shared.first_DJ[0].shape
        ):
            chosen_k = routing.experts_Tk[0].tolist()
            if min(chosen_k) >= 0 and max(chosen_k) < len(experts.experts):
                return _one_row(x_TD, chosen_k, routing.weights_Tk, experts, shared)
        return super().local(x_TD, routing, experts, shared)

    def shared(self, x_TD: Tensor, expert: PreparedWeight) -> Tensor:
        """See :meth:`ExpertOps.shared`."""
        if not isinstance(expert, StackedExperts) or x_TD.dtype != torch.float32:
            return super().shared(x_TD, expert)
        self._own("experts.shared", x_TD, expert)
        return torch.mm(_activated(torch.mm(x_TD, expert.first_DJ[0]), expert.limit), expert.second_ID[0])

    def routed(self, x_TD: Tensor, routing: Routing, experts: PreparedWeight) -> Tensor:
        """See :meth:`ExpertOps.routed`."""
        if not isinstance(experts, StackedExperts) or x_TD.dtype != torch.float32:
            return super().routed(x_TD, routing, experts)
        self._own("experts.routed", x_TD, experts)
        slots = _sort_slots(routing.experts_Tk.numpy())
        if not slots.runs:
            return x_TD.new_zeros((*routing.experts_Tk.shape, x_TD.shape[1]))
        if slots.runs[-1][0] >= len(experts.experts):
            return super().routed(x_TD, routing, experts)  # which refuses it
        outputs_TkD = _outputs(x_TD, slots, experts)[slots.place_Tk].mul_(routing.weights_Tk.unsqueeze(-1))
        if len(slots.row_n) < slots.place_Tk.numel():
            # A slot without an expert points at another row's output, and 0 times an infinity is NaN.
            outputs_TkD.masked_fill_((routing.experts_Tk < 0).unsqueeze(-1), 0.0)
        return outputs_TkD


def _one_row(
    x_1D: Tensor, chosen_k: list[int], weights_1k: Tensor, experts: StackedExperts, shared: StackedExperts
) -> Tensor:
    """Return one row's output [1, D]: what leaves an expert is weighed on its way in, and added up on its way out."""
    first_DJ = [shared.first_DJ[0], *(experts.first_DJ[expert] for expert in chosen_k)]
    second_ID = (experts.second_ID[expert] for expert in chosen_k)
    gate_up_nJ = x_1D.new_empty((len(first_DJ), first_DJ[0].shape[1]))
    for matrix_DJ, gate_up_1J in zip(first_DJ, torch.split(gate_up_nJ, 1), strict=True):
        torch.mm(x_1D, matrix_DJ, out=gate_up_1J)
    hidden_nI = _activated(gate_up_nJ, experts.limit)
    hidden_nI[1:].mul_(weights_1k.t())
    own_1I, *hidden_1I = torch.split(hidden_nI, 1)
    output_1D = torch.mm(own_1I, shared.second_ID[0])
    for part_1I, matrix_ID in zip(hidden_1I, second_ID, strict=True):
        output_1D.addmm_(part_1I, matrix_ID)
    return output_1D


def _sort_slots(experts_Tk: npt.NDArray[np.int64]) -> _Slots:
    expert_n = experts_Tk.ravel()
    order_n = np.argsort(expert_n, kind="stable")
    place_n = np.empty_like(order_n)
    place_n[order_n] = np.arange(len(order_n))
    counts = np.bincount(expert_n + 1, minlength=1)
    missing = int(counts[0])
    ends = np.cumsum(counts) - missing
    runs = [(int(e) - 1, int(ends[e] - counts[e]), int(ends[e])) for e in np.flatnonzero(counts) if e > 0]
    row_n = order_n[missing:] // experts_Tk.shape[1]
    place_n = np.maximum(place_n - missing, 0).reshape(experts_Tk.shape)
    return _Slots(torch.from_numpy(row_n), torch.from_numpy(place_n), runs)


def _outputs(x_TD: Tensor, slots: _Slots, experts: StackedExperts) -> Tensor:
    """Return y of every slot [n, D], sorted by expert, without its routing weight."""
    first_DJ, second_ID = experts.first_DJ, experts.second_ID
    count = len(slots.row_n)
    inputs_nD = x_TD.expand(count, -1) if x_TD.shape[0] == 1 else x_TD.index_select(0, slots.row_n)
    gate_up_nJ = x_TD.new_empty((count, first_DJ[0].shape[1]))
    for expert, start, end in slots.runs:
        torch.mm(inputs_nD[start:end], first_DJ[expert], out=gate_up_nJ[start:end])
    hidden_nI = _activated(gate_up_nJ, experts.limit)
    outputs_nD = x_TD.new_empty((count, x_TD.shape[1]))
    for expert, start, end in slots.runs:
        torch.mm(hidden_nI[start:end], second_ID[expert], out=outputs_nD[start:end])
    return outputs_nD


def _activated(gate_up_nJ: Tensor, limit: float) -> Tensor:
    gate_nI, up_nI = gate_up_nJ.chunk(2, dim=1)
    return F.silu(gate_nI.clamp(max=limit)).mul_(up_nI.clamp(-limit, limit))


def _stackable(experts: Sequence[StoredExpert]) -> bool:
    shapes = {(w.out_features, w.in_features) for e in experts for w in (e.w1, e.w3)}
    turned = {(e.w2.in_features, e.w2.out_features) for e in experts}
    return len(shapes) == 1 and shapes == turned


def _stack(experts: Sequence[StoredExpert], limit: float) -> StackedExperts:
    inner, hidden = experts[0].w1.out_features, experts[0].w1.in_features
    first_EJD = empty_weight(len(experts), 2 * inner, hidden)
    second_EDI = empty_weight(len(experts), hidden, inner)
    views = []
    for expert, first_JD, second_DI in zip(experts, first_EJD, second_EDI, strict=True):
        gate_ID, up_ID = first_JD.chunk(2)
        # One matrix at a time, so that nothing is held twice for longer than one conversion.
        for stored, target in ((expert.w1, gate_ID), (expert.w3, up_ID), (expert.w2, second_DI)):
            target.copy_(dequantise(stored))
        parts = (gate_ID, up_ID, second_DI)
        views.append(Expert(*(Matrix(part, part.shape[0], quantises_input=False) for part in parts)))
    return StackedExperts(
        experts[0].w1.name,
        sum(view.nbytes for view in views),
        tuple(views),
        hidden,
        limit,
        tuple(first_EJD.transpose(1, 2)),
        tuple(second_EDI.transpose(1, 2)),
    )
