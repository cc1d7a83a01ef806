"""Weights of the draft stages and their heads, and their loading (model.md section 9).

Legend: V vocabulary, D hidden size, M Markov rank.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.weights import PreparedWeight
from deepinfer.errors import ConfigurationError
from deepinfer.model.checkpoint import Checkpoint, ProgressCallback
from deepinfer.model.config import ModelConfig
from deepinfer.model.roles import derive_roles
from deepinfer.model.weight_reader import WeightReader
from deepinfer.model.weights import (
    MAX_THREADS,
    LayerWeights,
    OuterWeights,
    load_attention_block,
    load_feed_forward_block,
    wait_for,
)


@dataclass(frozen=True, slots=True)
class DraftHeads:
    """What lies outside the draft stages.

    Attributes:
        main_proj: taps to the stages' context.
        main_norm_D: its norm, float32.
        norm_D: norm before the vocabulary projection, float32.
        markov_embed_VM: embedding of the token before, as stored.
        markov_head: what the token before adds to the logits, computed in float32.
        confidence: the confidence's one row, computed in float32.
    """

    main_proj: PreparedWeight
    main_norm_D: Tensor
    norm_D: Tensor
    markov_embed_VM: Tensor
    markov_head: PreparedWeight
    confidence: PreparedWeight


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """Everything that a draft round computes with.

    Attributes:
        outer: the target's own embedding and vocabulary projection; its norm is not used.
        stages: the stages in order.
        heads: projections and heads.
        device_bytes: bytes that the draft's own weights hold on the device.
    """

    outer: OuterWeights
    stages: tuple[LayerWeights, ...]
    heads: DraftHeads
    device_bytes: int


def load_draft(
    config: ModelConfig,
    checkpoint: Checkpoint,
    ops: Ops,
    device: torch.device,
    outer: OuterWeights,
    *,
    progress: ProgressCallback | None = None,
    threads: int | None = None,
) -> DraftWeights:
    """Read, convert and prepare every parameter of the draft model, several at a time.

    Args:
        config: the model; ``checkpoint`` was opened for the group "draft" alone of the same configuration.
        checkpoint: its tensors, mapped from files; each is let go once it is prepared.
        ops: the plan's ops.
        device: the driver's device.
        outer: what the target has loaded; embedding and vocabulary projection are shared.
        progress: called from this thread as parts become ready.
        threads: parts that are prepared at a time.

    Raises:
        ConfigurationError: if the model has no draft stages.
        InvariantError: if a parameter of the checkpoint found no place in the model.
    """
    roles = [role for role in derive_roles(config) if role.is_draft]
    if not roles:
        problem = "num_nextn_predict_layers: the model has no draft stage; run it with num_speculative_tokens=0"
        raise ConfigurationError("draft model", [problem])
    reader = WeightReader(checkpoint, ops, device)
    executor = ThreadPoolExecutor(threads or min(MAX_THREADS, os.cpu_count() or 1))
    try:
        heads = executor.submit(_load_heads, reader, f"mtp.{len(roles) - 1}")
        halves = [
            (
                executor.submit(load_attention_block, reader, config, role),
                executor.submit(load_feed_forward_block, reader, config, role),
            )
            for role in roles
        ]
        wait_for([heads, *(half for pair in halves for half in pair)], reader, progress)
    finally:
        # After an error or Ctrl-C the queued parts are pointless; running ones end by themselves.
        executor.shutdown(wait=True, cancel_futures=True)
    reader.check_complete()
    stages = tuple(
        LayerWeights(role=role, engram=None, attention_block=attention.result(), feed_forward_block=experts.result())
        for role, (attention, experts) in zip(roles, halves, strict=True)
    )
    return DraftWeights(outer, stages, heads.result(), reader.device_bytes)


def _load_heads(reader: WeightReader, last: str) -> DraftHeads:
    return DraftHeads(
        main_proj=reader.dense("mtp.0.main_proj"),
        main_norm_D=reader.float32("mtp.0.main_norm.weight"),
        norm_D=reader.float32(f"{last}.norm.weight"),
        markov_embed_VM=reader.as_stored(f"{last}.markov_head.embed.weight"),
        markov_head=reader.dense(f"{last}.markov_head.head", "float32"),
        confidence=reader.dense(f"{last}.confidence_head.proj", "float32"),
    )
