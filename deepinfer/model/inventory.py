"""Every tensor of a checkpoint, with name, shape and type, derived from the configuration alone.

Two steps: `parameters` lists what the model is made of, `inventory` says how a form of checkpoint stores it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal, NamedTuple

from deepinfer.model.config import ModelConfig
from deepinfer.model.roles import LayerRole, derive_roles

Group = Literal["text", "draft", "vision"]
CheckpointForm = Literal["released", "float32", "bfloat16"]
Storage = Literal["fp8_block32", "mxfp4", "engram_fp8", "bfloat16", "float32"]

GROUPS: tuple[Group, ...] = ("text", "draft", "vision")
FORMS: tuple[CheckpointForm, ...] = ("released", "float32", "bfloat16")
SCALE_GROUP = 32
"""Elements per scale along the input dimension (and along the output dimension of fp8 blocks)."""

DTYPE_BYTES: dict[str, int] = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
"""Bytes per element of every type that a checkpoint may hold, by its name in a safetensors header."""


class TensorEntry(NamedTuple):
    """One tensor as a checkpoint stores it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: Group

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the model, independent of how it is stored.

    Attributes:
        name: checkpoint name of the values.
        shape: logical shape, before packing.
        storage: the format in the released form.
        group: the part of the model it belongs to.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    group: Group

    @property
    def scale_name(self) -> str:
        """Checkpoint name of the scales; meaningful where the form stores this parameter with scales."""
        return self.name.removesuffix("weight") + "scale"

    def entries(self, form: CheckpointForm) -> tuple[TensorEntry, ...]:
        """Give the stored tensors of this parameter in one form of checkpoint: one, or values and scales."""
        if form == "float32":
            return (TensorEntry(self.name, self.shape, "F32", self.group),)
        if self.storage == "float32":
            return (TensorEntry(self.name, self.shape, "F32", self.group),)
        if form == "bfloat16" or self.storage == "bfloat16":
            return (TensorEntry(self.name, self.shape, "BF16", self.group),)
        rows, columns = self.shape
        scale_columns = -(-columns // SCALE_GROUP)
        if self.storage == "mxfp4":
            weight = TensorEntry(self.name, (rows, columns // 2), "I8", self.group)
        else:
            weight = TensorEntry(self.name, self.shape, "F8_E4M3", self.group)
        scale_rows = -(-rows // SCALE_GROUP) if self.storage == "fp8_block32" else rows
        return weight, TensorEntry(self.scale_name, (scale_rows, scale_columns), "F8_E8M0", self.group)


def parameters(config: ModelConfig, groups: tuple[Group, ...] = GROUPS) -> tuple[Parameter, ...]:
    """List the parameters of the asked groups, in the order of the forward pass."""
    found: list[Parameter] = []
    roles = derive_roles(config)
    if "text" in groups:
        found += _outer(config)
        for role in roles:
            if not role.is_draft:
                found += _layer(config, role)
    if "draft" in groups:
        for role in roles:
            if role.is_draft:
                found += _layer(config, role)
        found += _draft_extras(config)
    if "vision" in groups:
        found += _vision(config)
    return tuple(found)


def inventory(
    config: ModelConfig, form: CheckpointForm = "released", groups: tuple[Group, ...] = GROUPS
) -> tuple[TensorEntry, ...]:
    """List every tensor that a checkpoint of this configuration holds in the given form."""
    return tuple(entry for parameter in parameters(config, groups) for entry in parameter.entries(form))


def _outer(config: ModelConfig) -> Iterator[Parameter]:
    table = (config.vocab_size, config.hidden_size)
    yield Parameter("embed.weight", table, "bfloat16", "text")
    yield Parameter("head.weight", table, "bfloat16", "text")
    yield Parameter("norm.weight", (config.hidden_size,), "bfloat16", "text")


def _layer(config: ModelConfig, role: LayerRole) -> Iterator[Parameter]:
    group: Group = "draft" if role.is_draft else "text"
    hidden = config.hidden_size
    if role.engram_index is not None:
        yield from _engram(config, f"{role.stem}.engram", role.engram_index)
    yield from _hyper_connection(config, f"{role.stem}.hc_attn", group)
    yield Parameter(f"{role.stem}.attn_norm.weight", (hidden,), "bfloat16", group)
    yield from _attention(config, f"{role.stem}.attn", group)
    if role.owns_kv:
        yield from _compressor(config, f"{role.stem}.attn.compressor", role.ratio)
    if role.has_indexer:
        yield from _indexer(config, f"{role.stem}.attn.indexer", owns_keys=role.owns_index_keys)
    yield from _hyper_connection(config, f"{role.stem}.hc_ffn", group)
    yield Parameter(f"{role.stem}.ffn_norm.weight", (hidden,), "bfloat16", group)
    experts = config.dspark_n_routed_experts if role.is_draft else config.n_routed_experts
    yield from _experts(config, f"{role.stem}.ffn", experts, group)


def _hyper_connection(config: ModelConfig, stem: str, group: Group) -> Iterator[Parameter]:
    streams = config.hc_mult
    mixes = (2 + streams) * streams
    yield Parameter(f"{stem}_fn", (mixes, streams * config.hidden_size), "float32", group)
    yield Parameter(f"{stem}_base", (mixes,), "float32", group)
    yield Parameter(f"{stem}_scale", (3,), "float32", group)


def _attention(config: ModelConfig, stem: str, group: Group) -> Iterator[Parameter]:
    hidden, heads, channels = config.hidden_size, config.num_attention_heads, config.head_dim
    lora, groups, out_lora = config.q_lora_rank, config.o_groups, config.o_lora_rank
    yield Parameter(f"{stem}.wq_a.weight", (lora, hidden), "fp8_block32", group)
    yield Parameter(f"{stem}.q_norm.weight", (lora,), "bfloat16", group)
    yield Parameter(f"{stem}.wq_b.weight", (heads * channels, lora), "fp8_block32", group)
    yield Parameter(f"{stem}.wkv.weight", (channels, hidden), "fp8_block32", group)
    yield Parameter(f"{stem}.kv_norm.weight", (channels,), "bfloat16", group)
    yield Parameter(f"{stem}.attn_sink", (heads,), "float32", group)
    yield Parameter(f"{stem}.wo_a.weight", (groups * out_lora, heads // groups * channels), "fp8_block32", group)
    yield Parameter(f"{stem}.wo_b.weight", (hidden, groups * out_lora), "fp8_block32", group)


def _compressor(config: ModelConfig, stem: str, ratio: int) -> Iterator[Parameter]:
    projection = (config.head_dim, config.hidden_size)
    yield Parameter(f"{stem}.wkv.weight", projection, "bfloat16", "text")
    if ratio > 1:  # with one token per entry there is nothing to weigh
        yield Parameter(f"{stem}.wgate.weight", projection, "bfloat16", "text")
    yield Parameter(f"{stem}.norm.weight", (config.head_dim,), "bfloat16", "text")


def _indexer(config: ModelConfig, stem: str, *, owns_keys: bool) -> Iterator[Parameter]:
    heads, channels = config.index_n_heads, config.index_head_dim
    yield Parameter(f"{stem}.wq_b.weight", (heads * channels, config.q_lora_rank), "fp8_block32", "text")
    yield Parameter(f"{stem}.weights_proj.weight", (heads, config.hidden_size), "bfloat16", "text")
    if owns_keys:
        yield Parameter(f"{stem}.wk.weight", (channels, config.head_dim), "bfloat16", "text")
        yield Parameter(f"{stem}.k_norm.weight", (channels,), "bfloat16", "text")


def _experts(config: ModelConfig, stem: str, experts: int, group: Group) -> Iterator[Parameter]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    yield Parameter(f"{stem}.gate.weight", (experts, hidden), "bfloat16", group)
    yield Parameter(f"{stem}.gate.bias", (experts,), "float32", group)
    yield Parameter(f"{stem}.gate.bias_vl", (experts,), "float32", group)
    shapes = (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden)))
    for name, shape in shapes:
        yield Parameter(f"{stem}.shared_experts.{name}.weight", shape, "fp8_block32", group)
    for expert in range(experts):
        for name, shape in shapes:
            yield Parameter(f"{stem}.experts.{expert}.{name}.weight", shape, "mxfp4", group)


def _engram(config: ModelConfig, stem: str, index: int) -> Iterator[Parameter]:
    hidden, streams = config.hidden_size, config.hc_mult
    rows, width = config.engram_num_embeddings[index], config.engram_head_dim
    yield Parameter(f"{stem}.embed.weight", (rows, width), "engram_fp8", "text")
    projection = ((streams + 1) * hidden, config.num_engram_columns * width)
    yield Parameter(f"{stem}.wkv.weight", projection, "fp8_block32", "text")
    yield Parameter(f"{stem}.q_weight", (streams, hidden), "bfloat16", "text")
    yield Parameter(f"{stem}.k_weight", (streams, hidden), "bfloat16", "text")


def _draft_extras(config: ModelConfig) -> Iterator[Parameter]:
    stages, hidden, rank = config.num_nextn_predict_layers, config.hidden_size, config.dspark_markov_rank
    if not stages:
        return
    taps = len(config.dspark_target_layer_ids)
    yield Parameter("mtp.0.main_proj.weight", (hidden, taps * hidden), "fp8_block32", "draft")
    yield Parameter("mtp.0.main_norm.weight", (hidden,), "bfloat16", "draft")
    last = f"mtp.{stages - 1}"
    yield Parameter(f"{last}.norm.weight", (hidden,), "bfloat16", "draft")
    yield Parameter(f"{last}.markov_head.embed.weight", (config.vocab_size, rank), "bfloat16", "draft")
    yield Parameter(f"{last}.markov_head.head.weight", (config.vocab_size, rank), "bfloat16", "draft")
    yield Parameter(f"{last}.confidence_head.proj.weight", (1, hidden + rank), "bfloat16", "draft")


def _vision(config: ModelConfig) -> Iterator[Parameter]:
    vision = config.vision_config
    if vision is None:
        return
    tensor = partial(Parameter, storage="bfloat16", group="vision")
    width, hidden = vision.hidden_size, config.hidden_size
    yield tensor("vision.patch_embed.proj.weight", (width, 3 * vision.patch_size**2))
    yield tensor("vision.patch_embed.proj.bias", (width,))
    for block in range(vision.num_hidden_layers):
        stem = f"vision.blocks.{block}"
        yield tensor(f"{stem}.norm1.weight", (width,))
        yield tensor(f"{stem}.attn.wqkv.weight", (3 * width, width))
        yield tensor(f"{stem}.attn.wqkv.bias", (3 * width,))
        yield tensor(f"{stem}.attn.wo.weight", (width, width))
        yield tensor(f"{stem}.attn.wo.bias", (width,))
        yield tensor(f"{stem}.norm2.weight", (width,))
        yield tensor(f"{stem}.mlp.w1.weight", (2 * vision.intermediate_size, width))
        yield tensor(f"{stem}.mlp.w2.weight", (width, vision.intermediate_size))
    yield tensor("vision.norm.weight", (width,))
    yield tensor("aligner.w1.weight", (hidden, width * vision.downsample_ratio**2))
    yield tensor("aligner.w1.bias", (hidden,))
    yield tensor("aligner.w2.weight", (hidden, hidden))
    yield tensor("aligner.w2.bias", (hidden,))
    for name in ("image_start", "image_end", "image_newline"):
        yield tensor(name, (hidden,))
