"""The matrix products that a model will run, for the driver's determinism self-check (engine.md section 7)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepinfer.accelerator.interface import LinearShape, OpOptions
from deepinfer.model.config import ModelConfig
from deepinfer.model.roles import LayerRole, derive_roles


def linear_shapes(config: ModelConfig, options: OpOptions, *, with_drafts: bool = False) -> list[LinearShape]:
    """List every distinct product of the text model, and of the draft model if asked, in the order of its first use.

    A product of a grouped or expert weight is listed once, by the shape of one group or expert.
    """
    activation = options.activation_dtype
    # What is promoted to float32 is computed in float64 when the activations are.
    promoted = torch.float64 if activation == torch.float64 else torch.float32
    shapes: dict[LinearShape, None] = {}
    for role in derive_roles(config):
        if with_drafts or not role.is_draft:
            shapes.update(dict.fromkeys(_layer(config, role, activation, promoted)))
    shapes[LinearShape(config.hidden_size, config.vocab_size, promoted)] = None
    if with_drafts:
        shapes.update(dict.fromkeys(_draft_heads(config, activation, promoted)))
    return list(shapes)


def _draft_heads(config: ModelConfig, activation: torch.dtype, promoted: torch.dtype) -> Iterator[LinearShape]:
    hidden, rank = config.hidden_size, config.dspark_markov_rank
    yield LinearShape(len(config.dspark_target_layer_ids) * hidden, hidden, activation)
    yield LinearShape(rank, config.vocab_size, promoted)
    yield LinearShape(hidden + rank, 1, promoted)


def _layer(
    config: ModelConfig, role: LayerRole, activation: torch.dtype, promoted: torch.dtype
) -> Iterator[LinearShape]:
    hidden, streams, width = config.hidden_size, config.hc_mult, config.head_dim
    if role.engram_index is not None:
        yield LinearShape(config.num_engram_columns * config.engram_head_dim, (streams + 1) * hidden, activation)
    yield LinearShape(streams * hidden, (2 + streams) * streams, promoted)
    yield LinearShape(hidden, config.q_lora_rank, activation)
    yield LinearShape(config.q_lora_rank, config.num_attention_heads * width, activation)
    yield LinearShape(hidden, width, activation)
    if role.owns_kv:
        yield LinearShape(hidden, width, promoted if role.ratio > 1 else activation)
        yield LinearShape(width, config.index_head_dim, activation)
    if role.has_indexer:
        yield LinearShape(config.q_lora_rank, config.index_n_heads * config.index_head_dim, activation)
        yield LinearShape(hidden, config.index_n_heads, activation)
    yield LinearShape(config.num_attention_heads // config.o_groups * width, config.o_lora_rank, activation)
    yield LinearShape(config.o_groups * config.o_lora_rank, hidden, activation)
    experts = config.dspark_n_routed_experts if role.is_draft else config.n_routed_experts
    yield LinearShape(hidden, experts, promoted)
    yield LinearShape(hidden, config.moe_intermediate_size, activation)
    yield LinearShape(config.moe_intermediate_size, hidden, activation)
