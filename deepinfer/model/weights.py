"""All weights of the text model, prepared for one device, and their loading.

Legend: V vocabulary, D hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.mixing import MixWeights
from deepinfer.accelerator.weights import PreparedWeight
from deepinfer.errors import ArgumentError
from deepinfer.model.attention import AttentionWeights, load_attention
from deepinfer.model.checkpoint import Checkpoint, ProgressCallback
from deepinfer.model.config import ModelConfig
from deepinfer.model.engram import EngramWeights, TableSpread, load_engram
from deepinfer.model.engram_hash import EngramLayout, engram_layouts
from deepinfer.model.engram_hash import token_map as identity_token_map
from deepinfer.model.feed_forward import ExpertSpread, FeedForwardWeights, load_feed_forward
from deepinfer.model.hyper_connections import load_mix
from deepinfer.model.roles import LayerRole, derive_roles
from deepinfer.model.weight_reader import WeightReader

MAX_THREADS = 8
"""Parts that are prepared at a time, unless the caller says otherwise."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """The attention half of a layer: mixing, norm, attention."""

    mix: MixWeights
    norm_D: Tensor
    attention: AttentionWeights


@dataclass(frozen=True, slots=True)
class FeedForwardBlock:
    """The feed-forward half of a layer: mixing, norm, experts."""

    mix: MixWeights
    norm_D: Tensor
    feed_forward: FeedForwardWeights


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; ``engram`` is None where no table is read before it."""

    role: LayerRole
    engram: EngramWeights | None
    attention_block: AttentionBlock
    feed_forward_block: FeedForwardBlock


@dataclass(frozen=True, slots=True)
class OuterWeights:
    """What lies outside the layers.

    Attributes:
        embed_VD: embedding table as stored.
        norm_D: last norm, float32.
        head: vocabulary projection, computed in float32.
    """

    embed_VD: Tensor
    norm_D: Tensor
    head: PreparedWeight


@dataclass(frozen=True, slots=True)
class TransformerWeights:
    """Everything that the text model computes with; nothing is optional that the configuration asks for.

    Attributes:
        outer: embedding, last norm, head.
        layers: the layers in order.
        token_map_V: int64 [V] compressed id of every token id, for Engram.
        device_bytes: bytes that the weights hold on the device.
        spread: where the experts are that this rank does not hold; None where it holds all.
        tables: where the rows of n-gram tables are that this rank does not hold; None where it holds all.
    """

    outer: OuterWeights
    layers: tuple[LayerWeights, ...]
    token_map_V: Tensor
    device_bytes: int
    spread: ExpertSpread | None = None
    tables: TableSpread | None = None

    @property
    def engrams(self) -> dict[int, EngramWeights]:
        """The n-gram memories, by layer, in the order of the layers."""
        return {layer.role.layer: layer.engram for layer in self.layers if layer.engram is not None}

    @property
    def table_bytes(self) -> int:
        """Bytes of the n-gram tables that this rank's host memory holds."""
        held = [part for engram in self.engrams.values() for part in (engram.table.rows_RW, engram.table.scales)]
        return sum(part.numel() * part.element_size() for part in held if part is not None)


def load_model(
    config: ModelConfig,
    checkpoint: Checkpoint,
    ops: Ops,
    device: torch.device,
    *,
    token_map: npt.NDArray[np.int64] | None = None,
    progress: ProgressCallback | None = None,
    threads: int | None = None,
    spread: ExpertSpread | None = None,
    tables: TableSpread | None = None,
) -> TransformerWeights:
    """Read, convert and prepare every parameter of the text model, several at a time.

    Args:
        config: the model; ``checkpoint`` was opened for the group "text" of the same configuration.
        checkpoint: its tensors, mapped from files; each is let go once it is prepared, except the Engram tables.
        ops: the plan's ops.
        device: the driver's device.
        token_map: what ``engram_hash.token_map`` gave; None asks for the identity, which the configuration must admit.
        progress: called from this thread as parts become ready.
        threads: parts that are prepared at a time.
        spread: which experts this rank holds; None for all.
        tables: which rows of n-gram tables this rank holds; None for all.

    Raises:
        ConfigurationError: if a token map is needed and absent.
        ArgumentError: if the token map does not fit the vocabulary.
        InvariantError: if a parameter of the checkpoint found no place in the model.
    """
    mapping = _checked_token_map(config, token_map)
    pad_id = int(mapping[config.engram_pad_token_id])
    reader = WeightReader(checkpoint, ops, device)
    layouts = {layout.layer: layout for layout in engram_layouts(config)} if config.engram_layer_ids else {}
    roles = [role for role in derive_roles(config) if not role.is_draft]

    def load_layer_engram(role: LayerRole, layout: EngramLayout) -> EngramWeights:
        return load_engram(reader, role, layout, pad_id, device, tables)

    executor = ThreadPoolExecutor(threads or min(MAX_THREADS, os.cpu_count() or 1))
    try:
        outer = executor.submit(_load_outer, reader)
        engrams = {
            role.layer: executor.submit(load_layer_engram, role, layouts[role.layer])
            for role in roles
            if role.engram_index is not None
        }
        halves = [
            (
                executor.submit(load_attention_block, reader, config, role),
                executor.submit(load_feed_forward_block, reader, config, role, spread),
            )
            for role in roles
        ]
        wait_for([outer, *engrams.values(), *(half for pair in halves for half in pair)], reader, progress)
    finally:
        # After an error or Ctrl-C the queued parts are pointless; running ones end by themselves.
        executor.shutdown(wait=True, cancel_futures=True)
    reader.check_complete()
    layers = tuple(
        LayerWeights(
            role=role,
            engram=engrams[role.layer].result() if role.layer in engrams else None,
            attention_block=attention.result(),
            feed_forward_block=feed_forward.result(),
        )
        for role, (attention, feed_forward) in zip(roles, halves, strict=True)
    )
    token_map_V = torch.from_numpy(mapping).to(device)
    return TransformerWeights(outer.result(), layers, token_map_V, reader.device_bytes, spread, tables)


def _load_outer(reader: WeightReader) -> OuterWeights:
    return OuterWeights(
        embed_VD=reader.as_stored("embed.weight"),
        norm_D=reader.float32("norm.weight"),
        head=reader.dense("head", "float32"),
    )


def load_attention_block(reader: WeightReader, config: ModelConfig, role: LayerRole) -> AttentionBlock:
    """Load the first half of a layer or draft stage."""
    return AttentionBlock(
        mix=load_mix(reader, f"{role.stem}.hc_attn"),
        norm_D=reader.float32(f"{role.stem}.attn_norm.weight"),
        attention=load_attention(reader, config, role),
    )


def load_feed_forward_block(
    reader: WeightReader, config: ModelConfig, role: LayerRole, spread: ExpertSpread | None = None
) -> FeedForwardBlock:
    """Load the second half of a layer or draft stage."""
    return FeedForwardBlock(
        mix=load_mix(reader, f"{role.stem}.hc_ffn"),
        norm_D=reader.float32(f"{role.stem}.ffn_norm.weight"),
        feed_forward=load_feed_forward(reader, config, role, spread),
    )


def wait_for(futures: Sequence[Future[Any]], reader: WeightReader, progress: ProgressCallback | None) -> None:
    """Wait for parts that are being loaded, report each, and raise the first error."""
    for future in as_completed(futures):
        future.result()
        if progress is not None:
            progress(reader.progress())


def _checked_token_map(config: ModelConfig, given: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
    mapping = identity_token_map(None, config) if given is None else np.ascontiguousarray(given, dtype=np.int64)
    if mapping.shape != (config.vocab_size,):
        problem = f"shape {list(mapping.shape)} given, one compressed id per token id [{config.vocab_size}] is needed"
        raise ArgumentError("Engram token map", [problem])
    return mapping
