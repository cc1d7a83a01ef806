"""Mixture of experts: router, routed experts, shared expert (model.md section 7).

Legend: T rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.experts import RouterWeights, Routing
from deepinfer.accelerator.weights import PreparedWeight
from deepinfer.model.config import ModelConfig
from deepinfer.model.forward_pass import ForwardPass
from deepinfer.model.roles import LayerRole
from deepinfer.model.weight_reader import WeightReader


class ExpertSpread(Protocol):
    """The experts of all layers, where several ranks hold them together."""

    def held(self, layer: int) -> Sequence[int]:
        """Return the experts of a layer that this rank holds, in the order in which they are prepared."""

    def hold(self, layer: int, experts: PreparedWeight) -> None:
        """Take what was prepared of :meth:`held`; whoever moves experts writes into it."""

    def begin_serving(self) -> None:
        """Take note that every step from now on is one of the group's: what ran before was warm-up."""

    def end_step(self) -> None:
        """Take note that a step of the group has passed all layers, with rows of this rank or without."""

    def row_keys(self, ids_T: Tensor, position_T: Tensor) -> Tensor:
        """Return by what rows choose among the copies of an expert."""

    def routed(
        self, layer: int, x_TD: Tensor, routing: Routing, key_T: Tensor, experts: PreparedWeight, ops: Ops
    ) -> Tensor:
        """Return what ``experts.routed`` returns, computed by whoever holds the experts; all ranks call it together."""


@dataclass(frozen=True, slots=True)
class FeedForwardWeights:
    """Parameters of one mixture of experts; ``top_k`` experts serve each row beside the shared one.

    Attributes:
        router: of all experts.
        experts: those that this rank holds.
        shared: the expert of all rows.
        top_k: experts per row.
        layer: whose mixture it is.
        spread: where the other experts are; None where all are here.
    """

    router: RouterWeights
    experts: PreparedWeight
    shared: PreparedWeight
    top_k: int
    layer: int = 0
    spread: ExpertSpread | None = None


def load_feed_forward(
    reader: WeightReader, config: ModelConfig, role: LayerRole, spread: ExpertSpread | None = None
) -> FeedForwardWeights:
    """Load the experts of one layer or draft stage; of a layer those that this rank holds."""
    stem = f"{role.stem}.ffn"
    count = config.dspark_n_routed_experts if role.is_draft else config.n_routed_experts
    spread = None if role.is_draft else spread
    held = range(count) if spread is None else spread.held(role.layer)
    experts = reader.experts(f"{stem}.experts", count, config.swiglu_limit, held)
    if spread is not None:
        spread.hold(role.layer, experts)
    return FeedForwardWeights(
        router=RouterWeights(
            gate_ED=reader.as_stored(f"{stem}.gate.weight"),
            bias_E=reader.float32(f"{stem}.gate.bias"),
            image_bias_E=reader.float32(f"{stem}.gate.bias_vl"),
        ),
        experts=experts,
        shared=reader.shared_expert(f"{stem}.shared_experts", config.swiglu_limit),
        top_k=config.dspark_num_experts_per_tok if role.is_draft else config.num_experts_per_tok,
        layer=role.layer,
        spread=spread,
    )


def feed_forward(x_TD: Tensor, weights: FeedForwardWeights, run: ForwardPass) -> Tensor:
    """Return the sublayer's output [T, D] of a step's rows."""
    return mixture(x_TD, weights, run.step.image_T, run.step.valid_T, run.config, run.ops, run.row_key_T)


def mixture(
    x_TD: Tensor,
    weights: FeedForwardWeights,
    image_T: Tensor,
    valid_T: Tensor,
    config: ModelConfig,
    ops: Ops,
    row_key_T: Tensor | None = None,
) -> Tensor:
    """Return the mixture's output [T, D]; rows that are not valid choose no expert."""
    routing = ops.experts.route(x_TD, weights.router, image_T, valid_T, weights.top_k, config.routed_scaling_factor)
    if weights.spread is None or row_key_T is None:
        return ops.experts.local(x_TD, routing, weights.experts, weights.shared)
    slots_TkD = weights.spread.routed(weights.layer, x_TD, routing, row_key_T, weights.experts, ops)
    return ops.experts.combine(ops.experts.shared(x_TD, weights.shared), slots_TkD)
