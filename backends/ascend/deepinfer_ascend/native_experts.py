"""Mixture of experts: gate, rows in expert order, grouped products, slots back in place, combine in fixed order.

served on a 950: MXFP8 rows by MXFP4 weights (W4A8) in npu_grouped_matmul. portable, and elsewhere: grouped products of
exactly dequantised weights. The clamp, silu and the routing weight are torch's own operators: the fused ones leave open
where they round.

Legend: T rows, D hidden size, E experts, k experts per token, I intermediate size, n = T * k routed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.ops.experts import ExpertOps, RouterWeights, Routing
from deepinfer.accelerator.weights import ExpertSlot, PreparedWeight, StoredExpert
from deepinfer_ascend.arithmetic import Arithmetic, refuse, require_width, silu, softplus
from deepinfer_ascend.expert_weights import GroupedMatrices, PlainExperts, make_grouped
from deepinfer_ascend.matrices import Matrices, make_matrices
from deepinfer_ascend.operators import Operators, RoutedRows

WEIGHT_SUM_FLOOR = 1e-20


@dataclass(eq=False)
class RoutedExperts(PreparedWeight):
    """The routed experts of one layer: gate and up [E, 2I, D] in one product, down [E, D, I]."""

    name: str
    nbytes: int
    gate_up: GroupedMatrices
    down: GroupedMatrices
    experts: int
    hidden_size: int
    limit: float
    is_private: bool = False

    def expert_slots(self) -> tuple[ExpertSlot, ...]:
        """See :meth:`PreparedWeight.expert_slots`; the NZ format is private to CANN, which moves it as a whole only."""
        if self.is_private:
            return super().expert_slots()
        form = f"{self.gate_up.form} and {self.down.form}"
        tensors = (*self.gate_up.tensors, *self.down.tensors)
        return tuple(ExpertSlot(form, tuple(tensor[number] for tensor in tensors)) for number in range(self.experts))


@dataclass(eq=False)
class SharedExpert(PreparedWeight):
    """The shared expert of one layer."""

    name: str
    nbytes: int
    gate: Matrices
    up: Matrices
    down: Matrices
    hidden_size: int
    limit: float


class NativeExperts(ExpertOps):
    """npu_moe_gating_top_k, npu_moe_init_routing_v2, npu_grouped_matmul, npu_moe_finalize_routing."""

    def __init__(self, arithmetic: Arithmetic, operators: Operators, *, weights_in_nz: bool = False) -> None:
        self._arithmetic = arithmetic
        self._operators = operators
        self._weights_in_nz = weights_in_nz

    def route(
        self, x_TD: Tensor, router: RouterWeights, image_T: Tensor, valid_T: Tensor, top_k: int, scale: float
    ) -> Routing:
        """See :meth:`ExpertOps.route`."""
        require_width("experts.route", "x", x_TD, router.gate_ED.shape[1])
        experts = router.gate_ED.shape[0]
        if not 1 <= top_k <= experts:
            refuse("experts.route", f"top_k is {top_k}; there are {experts} experts")
        logits_TE = torch.nn.functional.linear(x_TD.float(), router.gate_ED.float())
        # With one expert a token the weight is not normalised, which the operator always does.
        if self._arithmetic.uses_mx and self._arithmetic.soc.has_sqrt_softplus_gate and top_k > 1 and x_TD.shape[0]:
            chosen_Tk, weight_Tk = self._gated(logits_TE, router, image_T, top_k, scale)
        else:
            chosen_Tk, weight_Tk = _ordered(logits_TE, router, image_T, top_k, scale)
        padding_T1 = ~valid_T.unsqueeze(-1)
        return Routing(chosen_Tk.masked_fill(padding_T1, -1), weight_Tk.masked_fill(padding_T1, 0.0))

    def prepare(self, experts: Sequence[StoredExpert], limit: float) -> PreparedWeight:
        """See :meth:`ExpertOps.prepare`."""
        if not experts:
            refuse("experts.prepare", "no experts were given; a layer has at least one")
        down_dtype = torch.bfloat16 if self._arithmetic.served else torch.float32
        gate_up = make_grouped(
            [(expert.w1, expert.w3) for expert in experts],
            self._arithmetic,
            self._operators,
            out_dtype=torch.bfloat16 if self._arithmetic.served else self._arithmetic.activation,
            in_nz=self._weights_in_nz,
        )
        down = make_grouped(
            [(expert.w2,) for expert in experts],
            self._arithmetic,
            self._operators,
            out_dtype=down_dtype,
            in_nz=self._weights_in_nz,
        )
        first = experts[0].w1
        nbytes = gate_up.nbytes + down.nbytes
        is_private = self._weights_in_nz and not isinstance(gate_up, PlainExperts)
        return RoutedExperts(
            first.name, nbytes, gate_up, down, len(experts), first.in_features, limit, is_private=is_private
        )

    def prepare_shared(self, expert: StoredExpert, limit: float) -> PreparedWeight:
        """See :meth:`ExpertOps.prepare_shared`."""
        wide = torch.bfloat16 if self._arithmetic.served else self._arithmetic.activation
        gate = make_matrices(expert.w1, self._arithmetic, self._operators, out_dtype=wide)
        up = make_matrices(expert.w3, self._arithmetic, self._operators, out_dtype=wide)
        down_dtype = torch.bfloat16 if self._arithmetic.served else torch.float32
        down = make_matrices(expert.w2, self._arithmetic, self._operators, out_dtype=down_dtype)
        nbytes = gate.nbytes + up.nbytes + down.nbytes
        return SharedExpert(expert.w1.name, nbytes, gate, up, down, expert.w1.in_features, limit)

    def routed(self, x_TD: Tensor, routing: Routing, experts: PreparedWeight) -> Tensor:
        """See :meth:`ExpertOps.routed`."""
        own = self._own("experts.routed", x_TD, experts)
        rows, top_k = routing.experts_Tk.shape
        if rows == 0:
            return x_TD.new_zeros((0, top_k, own.hidden_size), dtype=torch.float32)
        output_nD, routed = self._rows(x_TD, routing, own)
        active_n1 = (routing.experts_Tk >= 0).reshape(-1, 1)
        found_nD = output_nD.index_select(0, routed.place_n.clamp(min=0)).float()
        if not self._arithmetic.served:
            found_nD = found_nD * routing.weights_Tk.reshape(-1, 1)
        # What the operator leaves undefined behind the last routed row is chosen away, not multiplied away.
        return torch.where(active_n1, found_nD, 0.0).view(rows, top_k, own.hidden_size)

    def shared(self, x_TD: Tensor, expert: PreparedWeight) -> Tensor:
        """See :meth:`ExpertOps.shared`."""
        if not isinstance(expert, SharedExpert):
            refuse("experts.shared", f"the expert is a {type(expert).__qualname__} that others prepared")
        require_width("experts.shared", "x", x_TD, expert.hidden_size)
        gate_TI, up_TI = _product(expert.gate, x_TD), _product(expert.up, x_TD)
        hidden_TI = _activated(gate_TI, up_TI, expert.limit)
        if not self._arithmetic.served:
            hidden_TI = hidden_TI.to(self._arithmetic.activation)
        return _product(expert.down, hidden_TI).float()

    def combine(self, shared_TD: Tensor, slots_TkD: Tensor) -> Tensor:
        """See :meth:`ExpertOps.combine`."""
        total_TD = shared_TD.float()
        for slot in range(slots_TkD.shape[1]):
            total_TD = total_TD + slots_TkD[:, slot]
        return total_TD.to(self._arithmetic.activation)

    def local(self, x_TD: Tensor, routing: Routing, experts: PreparedWeight, shared: PreparedWeight) -> Tensor:
        """See :meth:`ExpertOps.local`."""
        shared_TD = self.shared(x_TD, shared)
        fused = self._arithmetic.uses_mx and self._arithmetic.activation == torch.bfloat16 and x_TD.shape[0] > 0
        if not fused:
            return self.combine(shared_TD, self.routed(x_TD, routing, experts))
        own = self._own("experts.local", x_TD, experts)
        output_nD, routed = self._rows(x_TD, routing, own)
        active_Tk = routing.experts_Tk >= 0
        # An absent slot weighs nothing, and names the first routed row, which is defined if any row has an expert.
        place_n = torch.where(active_Tk.flatten(), routed.place_n, 0)
        # Served slot outputs, the shared one too, are bfloat16 values, so that nothing is rounded on the way in.
        rounded_TD = shared_TD.to(torch.bfloat16)
        summed_TD = self._operators.finalize_rows(output_nD, rounded_TD, active_Tk.to(torch.bfloat16), place_n)
        return torch.where(active_Tk.any(dim=1, keepdim=True), summed_TD, rounded_TD)

    def _gated(
        self, logits_TE: Tensor, router: RouterWeights, image_T: Tensor, top_k: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Choose with both biases and keep what each row wants: the operator's bias is the same for all rows."""
        text = self._operators.gate(logits_TE, router.bias_E, top_k, scale)
        image = self._operators.gate(logits_TE, router.image_bias_E, top_k, scale)
        image_T1 = image_T.unsqueeze(-1)
        chosen_Tk = torch.where(image_T1, image.experts_Tk, text.experts_Tk).to(torch.int64)
        return chosen_Tk, torch.where(image_T1, image.weights_Tk, text.weights_Tk)

    def _rows(self, x_TD: Tensor, routing: Routing, own: RoutedExperts) -> tuple[Tensor, RoutedRows]:
        """Return every routed row's output, in expert order, and where each slot's row stands."""
        absent_Tk = routing.experts_Tk < 0
        experts_Tk = routing.experts_Tk.masked_fill(absent_Tk, own.experts).to(torch.int32)
        routed = self._operators.route_rows(x_TD.contiguous(), experts_Tk, own.experts)
        gate_up_nI = own.gate_up.products(routed.rows_nD, routed.counts_E)
        gate_nI, up_nI = gate_up_nI.chunk(2, dim=-1)
        hidden_nI = _activated(gate_nI, up_nI, own.limit)
        if self._arithmetic.served:
            hidden_nI = hidden_nI * _in_expert_order(routing.weights_Tk, routed.place_n, ~absent_Tk).unsqueeze(-1)
        else:
            hidden_nI = hidden_nI.to(self._arithmetic.activation)
        return own.down.products(hidden_nI, routed.counts_E), routed

    def _own(self, op_name: str, x_TD: Tensor, weight: PreparedWeight) -> RoutedExperts:
        if not isinstance(weight, RoutedExperts):
            refuse(op_name, f"the experts are a {type(weight).__qualname__} that another implementation prepared")
        require_width(op_name, "x", x_TD, weight.hidden_size)
        return weight


def _ordered(
    logits_TE: Tensor, router: RouterWeights, image_T: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose by a stable sort, which keeps the lower expert first on ties; NaN goes last."""
    score_TE = torch.sqrt(softplus(logits_TE))
    key_TE = score_TE + torch.where(image_T.unsqueeze(-1), router.image_bias_E, router.bias_E)
    key_TE = torch.where(torch.isnan(key_TE), -torch.inf, key_TE)
    chosen_Tk = key_TE.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weight_Tk = score_TE.gather(1, chosen_Tk)
    if top_k > 1:
        weight_Tk = weight_Tk / (weight_Tk.sum(-1, keepdim=True) + WEIGHT_SUM_FLOOR)
    return chosen_Tk, weight_Tk * scale


def _in_expert_order(weights_Tk: Tensor, place_n: Tensor, active_Tk: Tensor) -> Tensor:
    """Return each routed row's weight [n]; rows that no slot names get 0."""
    spare = place_n.shape[0]
    place_n = torch.where(active_Tk.flatten(), place_n.to(torch.int64), spare)
    ordered = torch.zeros(spare + 1, dtype=torch.float32, device=weights_Tk.device)
    return ordered.scatter(0, place_n, weights_Tk.flatten())[:spare]


def _product(matrices: Matrices, x_TK: Tensor) -> Tensor:
    return matrices.products(x_TK.unsqueeze(1)).squeeze(1)


def _activated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return ``silu(min(gate, limit)) * clamp(up, +-limit)`` in float32; comparisons with NaN choose the NaN."""
    gate = torch.where(gate > limit, limit, gate).float()
    up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up)).float()
    return silu(gate) * up
