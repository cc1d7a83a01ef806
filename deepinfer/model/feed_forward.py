"""Mixture of experts: router, routed experts, shared expert (model.md section 7).

Legend: T rows, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.accelerator.ops import Ops
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
    """Return the sublayer's output [T, D] of a step's rows."""
    return mixture(x_TD, weights, run.step.image_T, run.step.valid_T, run.config, run.ops)


def mixture(
    x_TD: Tensor, weights: FeedForwardWeights, image_T: Tensor, valid_T: Tensor, config: ModelConfig, ops: Ops
) -> Tensor:
    """Return the mixture's output [T, D]; rows that are not valid choose no expert."""
    routing = ops.experts.route(x_TD, weights.router, image_T, valid_T, weights.top_k, config.routed_scaling_factor)
    return ops.experts.local(x_TD, routing, weights.experts, weights.shared)
