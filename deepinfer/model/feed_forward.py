"""Mixture of experts: router, routed experts, shared expert (model.md section 7).

Legend: T rows, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.accelerator.ops.experts import RouterWeights
from deepinfer.accelerator.weights import PreparedWeight
from deepinfer.model.config import ModelConfig
from deepinfer.model.forward_pass import ForwardPass
from deepinfer.model.roles import LayerRole
from deepinfer.model.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class FeedForwardWeights:
    """Parameters of one mixture of experts; ``top_k`` experts serve each row beside the shared one."""

    router: RouterWeights
    experts: PreparedWeight
    shared: PreparedWeight
    top_k: int


def load_feed_forward(reader: WeightReader, config: ModelConfig, role: LayerRole) -> FeedForwardWeights:
    """Load the experts of one layer or draft stage."""
    stem = f"{role.stem}.ffn"
    count = config.dspark_n_routed_experts if role.is_draft else config.n_routed_experts
    return FeedForwardWeights(
        router=RouterWeights(
            gate_ED=reader.as_stored(f"{stem}.gate.weight"),
            bias_E=reader.float32(f"{stem}.gate.bias"),
            image_bias_E=reader.float32(f"{stem}.gate.bias_vl"),
        ),
        experts=reader.experts(f"{stem}.experts", count, config.swiglu_limit),
        shared=reader.shared_expert(f"{stem}.shared_experts", config.swiglu_limit),
        top_k=config.dspark_num_experts_per_tok if role.is_draft else config.num_experts_per_tok,
    )


def feed_forward(x_TD: Tensor, weights: FeedForwardWeights, run: ForwardPass) -> Tensor:
    """Return the sublayer's output [T, D]."""
    experts, step = run.ops.experts, run.step
    routing = experts.route(
        x_TD, weights.router, step.image_T, step.valid_T, weights.top_k, run.config.routed_scaling_factor
    )
    return experts.local(x_TD, routing, weights.experts, weights.shared)
