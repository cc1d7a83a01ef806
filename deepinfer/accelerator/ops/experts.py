"""Mixture of experts: router, grouped feed-forward, shared expert, combine (model.md section 7).

Legend: T rows, D hidden size, E experts, k experts per token, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepinfer.accelerator.ops.base import OpGroup, not_implemented, op
from deepinfer.accelerator.weights import PreparedWeight, StoredExpert


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """Router parameters: gate [E, D] as stored, bias and image bias float32 [E], all on the device."""

    gate_ED: torch.Tensor
    bias_E: torch.Tensor
    image_bias_E: torch.Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """Experts of each row, best first.

    Attributes:
        experts_Tk: int64 [T, k], -1 for padding rows (no expert, never expert 0).
        weights_Tk: float32 (float64 with float64 activations) [T, k], 0 where the expert is -1.
    """

    experts_Tk: torch.Tensor
    weights_Tk: torch.Tensor


class ExpertOps(OpGroup):
    """Router and feed-forward.

    One expert: ``g = min(W1 x, limit); u = clamp(W3 x, -limit, limit); h = silu(g) * u; y = W2 h``.
    portable: the routing weight multiplies y. served: inputs quantised per 32, W1/W3 outputs and the clamp in
    bfloat16, silu in float32, times up, times the routing weight before W2 (quantised per 32 from float32), each
    slot's W2 output rounded to bfloat16. Combine order is fixed: shared first, then slots in top-k order, float32,
    rounded once.
    """

    group = "experts"
    bound_together = (("prepare", "routed", "local"), ("prepare_shared", "shared", "local"))

    @op
    def route(
        self,
        x_TD: torch.Tensor,
        router: RouterWeights,
        image_T: torch.Tensor,
        valid_T: torch.Tensor,
        top_k: int,
        scale: float,
    ) -> Routing:
        """Choose k distinct experts per row.

        ``s = sqrt(softplus(x @ gate^T))`` in float32; order by ``s + bias`` (image bias for image rows) descending,
        then expert id ascending (NaN below every number); weights are the unbiased s, divided by ``sum + 1e-20``
        and times ``scale``; with top_k = 1 there is no division. R2.
        """
        not_implemented(self, "route")

    @op
    def prepare(self, experts: Sequence[StoredExpert], limit: float) -> PreparedWeight:
        """Convert the routed experts of one layer, in id order, once at load. ``limit`` is the clamp."""
        not_implemented(self, "prepare")

    @op
    def prepare_shared(self, expert: StoredExpert, limit: float) -> PreparedWeight:
        """Convert the shared expert of one layer, once at load."""
        not_implemented(self, "prepare_shared")

    @op
    def routed(self, x_TD: torch.Tensor, routing: Routing, experts: PreparedWeight) -> torch.Tensor:
        """Return slot outputs [T, k, D], at least float32, routing weight included; slots with expert -1 are zeros."""
        not_implemented(self, "routed")

    @op
    def shared(self, x_TD: torch.Tensor, expert: PreparedWeight) -> torch.Tensor:
        """Return the shared expert's output [T, D] in float32 (at least), weight 1."""
        not_implemented(self, "shared")

    @op
    def combine(self, shared_TD: torch.Tensor, slots_TkD: torch.Tensor) -> torch.Tensor:
        """Return ``shared + slot_0 + slot_1 + ...`` in exactly this order, at least float32, rounded once."""
        not_implemented(self, "combine")

    @op
    def local(
        self, x_TD: torch.Tensor, routing: Routing, experts: PreparedWeight, shared: PreparedWeight
    ) -> torch.Tensor:
        """Return routed, shared and combine fused for one rank; bit-identical to the three ops where R2 is claimed."""
        not_implemented(self, "local")
