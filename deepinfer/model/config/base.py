"""The frozen configuration tree; every field carries the name of its key in ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from deepinfer.errors import ConfigurationError
from deepinfer.model.config.reading import (
    ARCHITECTURE,
    MODEL_TYPE,
    TOP_LEVEL_KEYS,
    flatten,
    jsonable,
    read_fields,
    read_part,
    report_missing,
    take_bookkeeping,
)
from deepinfer.model.config.rules import problems_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN parameters of the layers whose compress ratio is above zero (amplitude always 1)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    rope_type: str = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """How the released checkpoint is stored: fp8 in 32 x 32 blocks, experts in fp4."""

    quant_method: str = "fp8"
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, ...] = (32, 32)
    scale_fmt: str = "ue8m0"
    expert_dtype: str = "fp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Shape of the vision tower; its tensors are known but not used by the text model."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that fixes the model's mathematics; constructing one checks it, all problems at once.

    ``compress_ratios`` covers the text layers and then the draft stages. Keys that admit one value only
    (``hidden_act`` and the like) have that value as default; every other key must be given.
    The ``dspark_*`` and ``engram_*`` keys may be left out where the configuration has no draft stage
    or no Engram layer.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    num_nextn_predict_layers: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    engram_num_embeddings: tuple[int, ...] = ()
    engram_max_ngram_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_vocab_size: int = 0
    engram_compressed_vocab_size: int = 0
    engram_pad_token_id: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_num_experts_per_tok: int = 0
    num_key_value_heads: int = 1
    n_shared_experts: int = 1
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    quantization_config: QuantizationConfig | None = None
    vision_config: VisionConfig | None = None

    def __post_init__(self) -> None:
        problems = problems_of(self)
        if problems:
            raise ConfigurationError("model configuration", problems)

    @classmethod
    def from_hf(cls, mapping: Mapping[str, object], *, what: str = "model configuration") -> Self:
        """Read a ``config.json`` mapping, nested as released or flat.

        Args:
            mapping: the decoded JSON object; it is not changed.
            what: how an error names the source, for example its path.

        Raises:
            ConfigurationError: listing every unknown, missing, mis-typed or contradictory key.
        """
        problems: list[str] = []
        flat = flatten(mapping, problems)
        take_bookkeeping(flat, problems)
        values: dict[str, object] = {}
        for key, part in _PARTS.items():
            raw = flat.pop(key, None)
            if raw is not None:
                values[key] = read_part(part, raw, key, problems)
        values |= read_fields(cls, flat, "", problems, built=tuple(_PARTS))
        report_missing(cls, values, problems)
        # A half-built instance lets the rules speak about the keys that were readable, beside the unreadable ones.
        draft = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(draft, name, value)
        problems += problems_of(draft)
        if problems:
            raise ConfigurationError(what, problems)
        return cls(**values)  # type: ignore[arg-type]  # read_fields gave every value its field's type

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a ``config.json`` file.

        Raises:
            ConfigurationError: if the file is absent, not a JSON object, or not a configuration this build serves.
        """
        source = Path(path)
        try:
            decoded = json.loads(source.read_text(encoding="utf-8"))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigurationError(
                str(source), [f"cannot be read: {reason}. Give the path of a config.json"]
            ) from error
        except ValueError as error:
            raise ConfigurationError(str(source), [f"is not JSON text: {error}"]) from error
        if not isinstance(decoded, dict):
            raise ConfigurationError(str(source), [f"holds a JSON {type(decoded).__name__}, an object is needed"])
        return cls.from_hf(decoded, what=str(source))

    def to_hf(self, *, nested: bool = True) -> dict[str, object]:
        """Give the mapping that `from_hf` reads back to an equal configuration, in the released or the flat form."""
        top: dict[str, object] = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE}
        text: dict[str, object] = {"model_type": f"{MODEL_TYPE}_text"} if nested else top
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name in {"quantization_config", "vision_config"}:
                continue
            target = top if field.name in TOP_LEVEL_KEYS else text
            target[field.name] = jsonable(value)
        vision = top.get("vision_config")
        if isinstance(vision, dict):
            top["vision_config"] = {"model_type": f"{MODEL_TYPE}_vision", **vision}
        if nested:
            top["text_config"] = text
        return top

    @property
    def num_engram_columns(self) -> int:
        """Table rows that one position reads per Engram layer: n-gram sizes 2.. times hash heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads if self.engram_layer_ids else 0

    @property
    def qk_nope_head_dim(self) -> int:
        """Channels of a head that the rotation leaves alone; they come first."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def first_decoder_layer(self) -> int | None:
        """The first ratio-1 layer: from here on layers read one shared long-range cache (the YOCO boundary)."""
        ratios = self.compress_ratios[: self.num_hidden_layers]
        return ratios.index(1) if 1 in ratios else None


_PARTS: dict[str, type] = {
    "rope_scaling": RopeScaling,
    "quantization_config": QuantizationConfig,
    "vision_config": VisionConfig,
}
