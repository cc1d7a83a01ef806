"""Mixture of experts: router, feed-forward of the experts that have rows, combine.

Legend: T rows, D hidden size, E experts, k experts per token, I intermediate size, n rows of one expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.ops.experts import ExpertOps, RouterWeights, Routing
from deepinfer.accelerator.weights import ExpertSlot, PreparedWeight, StoredExpert, StoredWeight
from deepinfer_cpu_ref.computation import Computed, refuse, require_width
from deepinfer_cpu_ref.invariant import (
    best,
    order_keys,
    pad_width,
    padded_product,
    row_sum,
    silu,
    softplus,
    sum_in_order,
)
from deepinfer_cpu_ref.weights import QUANTISED_FORMATS, Matrix, dequantise, make_matrix

WEIGHT_SUM_FLOOR = 1e-20


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert: gate and up [I, D], down [D, I]."""

    gate: Matrix
    up: Matrix
    down: Matrix

    @property
    def nbytes(self) -> int:
        """Bytes of the three matrices."""
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes


@dataclass(eq=False)
class PreparedExperts(PreparedWeight):
    """Experts in id order, and the clamp of their gates."""

    name: str
    nbytes: int
    experts: tuple[Expert, ...]
    hidden_size: int
    limit: float

    def expert_slots(self) -> tuple[ExpertSlot, ...]:
        """See :meth:`PreparedWeight.expert_slots`."""
        matrices = [(expert.gate, expert.up, expert.down) for expert in self.experts]
        return tuple(
            ExpertSlot(
                " ".join("of rows in fp8" if matrix.quantises_input else "of rows as they are" for matrix in parts),
                tuple(matrix.weight_NK for matrix in parts),
            )
            for parts in matrices
        )


class CpuRefExperts(Computed, ExpertOps):
    """A loop over the experts that have rows; slot outputs keep their place, so that the combine order is fixed."""

    def route(
        self, x_TD: Tensor, router: RouterWeights, image_T: Tensor, valid_T: Tensor, top_k: int, scale: float
    ) -> Routing:
        """See :meth:`ExpertOps.route`."""
        require_width("experts.route", "x", x_TD, router.gate_ED.shape[1])
        experts = router.gate_ED.shape[0]
        if not 1 <= top_k <= experts:
            refuse("experts.route", f"top_k is {top_k}; there are {experts} experts")
        wide = self.computation.wide
        x, gate = x_TD.to(wide), router.gate_ED.to(wide)
        if self.computation.invariant:
            logits_TE = padded_product(x, pad_width(gate), experts)
        else:
            logits_TE = torch.nn.functional.linear(x, gate)
        score_TE = torch.sqrt(softplus(logits_TE))
        bias_TE = torch.where(image_T.unsqueeze(-1), router.image_bias_E.to(wide), router.bias_E.to(wide))
        chosen_Tk = best(order_keys(score_TE + bias_TE), top_k)
        weight_Tk = score_TE.gather(1, chosen_Tk)
        if top_k > 1:
            weight_Tk = weight_Tk / (row_sum(weight_Tk) + WEIGHT_SUM_FLOOR)
        padding_T1 = ~valid_T.unsqueeze(-1)
        return Routing(chosen_Tk.masked_fill(padding_T1, -1), (weight_Tk * scale).masked_fill(padding_T1, 0.0))

    def prepare(self, experts: Sequence[StoredExpert], limit: float) -> PreparedWeight:
        """See :meth:`ExpertOps.prepare`."""
        if not experts:
            refuse("experts.prepare", "no experts were given; a layer has at least one")
        prepared = tuple(self._prepare(expert) for expert in experts)
        first = experts[0].w1
        nbytes = sum(expert.nbytes for expert in prepared)
        return PreparedExperts(first.name, nbytes, prepared, first.in_features, limit)

    def prepare_shared(self, expert: StoredExpert, limit: float) -> PreparedWeight:
        """See :meth:`ExpertOps.prepare_shared`."""
        return self.prepare((expert,), limit)

    def routed(self, x_TD: Tensor, routing: Routing, experts: PreparedWeight) -> Tensor:
        """See :meth:`ExpertOps.routed`."""
        own = self._own("experts.routed", x_TD, experts)
        top_k = routing.experts_Tk.shape[1]
        slots_TkD = x_TD.new_zeros((x_TD.shape[0], top_k, own.hidden_size), dtype=self.computation.wide)
        expert_n = routing.experts_Tk.flatten()
        counts = torch.bincount(expert_n + 1, minlength=len(own.experts) + 1).tolist()
        if len(counts) > len(own.experts) + 1:
            refuse("experts.routed", f"expert {len(counts) - 2} was chosen; the layer has {len(own.experts)}")
        x_TD = own.experts[0].gate.quantised(x_TD)
        outputs_nD, weight_n = slots_TkD.flatten(0, 1), routing.weights_Tk.flatten()
        places = torch.split(expert_n.argsort(stable=True), counts)
        for expert, place_n in zip(own.experts, places[1:], strict=True):
            if place_n.numel():
                x_nD = x_TD[place_n // top_k]
                outputs_nD[place_n] = self._feed_forward(x_nD, expert, own.limit, weight_n[place_n].unsqueeze(-1))
        return slots_TkD

    def shared(self, x_TD: Tensor, expert: PreparedWeight) -> Tensor:
        """See :meth:`ExpertOps.shared`."""
        own = self._own("experts.shared", x_TD, expert)
        x_TD = own.experts[0].gate.quantised(x_TD)
        return self._feed_forward(x_TD, own.experts[0], own.limit, None)

    def combine(self, shared_TD: Tensor, slots_TkD: Tensor) -> Tensor:
        """See :meth:`ExpertOps.combine`."""
        wide = self.computation.wide
        terms = (shared_TD.to(wide), *slots_TkD.to(wide).unbind(1))
        return sum_in_order(terms).to(self.computation.activation)

    def local(self, x_TD: Tensor, routing: Routing, experts: PreparedWeight, shared: PreparedWeight) -> Tensor:
        """See :meth:`ExpertOps.local`."""
        return self.combine(self.shared(x_TD, shared), self.routed(x_TD, routing, experts))

    def _feed_forward(self, x_nD: Tensor, expert: Expert, limit: float, weight_n1: Tensor | None) -> Tensor:
        invariant, wide, served = self.computation.invariant, self.computation.wide, self.computation.served
        gate_nI = expert.gate.product(x_nD, invariant=invariant)
        up_nI = expert.up.product(x_nD, invariant=invariant)
        if served:
            gate_nI, up_nI = gate_nI.to(torch.bfloat16), up_nI.to(torch.bfloat16)
        # Clamps that keep NaN: a minimum that returned the other operand would hide it.
        gate_nI, up_nI = gate_nI.clamp(max=limit).to(wide), up_nI.clamp(-limit, limit).to(wide)
        hidden_nI = silu(gate_nI) * up_nI
        if served:
            if weight_n1 is not None:
                hidden_nI = hidden_nI * weight_n1.to(wide)
            return (
                expert.down.product(expert.down.quantised(hidden_nI), invariant=invariant).to(torch.bfloat16).to(wide)
            )
        output_nD = expert.down.product(hidden_nI.to(self.computation.activation), invariant=invariant).to(wide)
        return output_nD if weight_n1 is None else output_nD * weight_n1.to(wide)

    def _prepare(self, expert: StoredExpert) -> Expert:
        return Expert(self._matrix(expert.w1), self._matrix(expert.w3), self._matrix(expert.w2))

    def _matrix(self, stored: StoredWeight) -> Matrix:
        return make_matrix(
            dequantise(stored),
            quantised=stored.format in QUANTISED_FORMATS,
            dtype=self.computation.activation,
            computation=self.computation,
        )

    def _own(self, op_name: str, x_TD: Tensor, weight: PreparedWeight) -> PreparedExperts:
        if not isinstance(weight, PreparedExperts):
            refuse(op_name, f"the experts are a {type(weight).__qualname__} that another implementation prepared")
        require_width(op_name, "x", x_TD, weight.hidden_size)
        if x_TD.dtype != self.computation.activation:
            refuse(op_name, f"x is {x_TD.dtype}; activations are {self.computation.activation}")
        return weight
