"""Which part each layer plays: what it owns, what it reads from others, and how it rotates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deepinfer.model.config import ModelConfig
from deepinfer.model.config.rules import owner_of

RopeKind = Literal["plain", "yarn"]


@dataclass(frozen=True, slots=True)
class LayerRole:
    """The part of one layer; draft stages follow the text layers under the next layer numbers.

    Attributes:
        layer: position in the table; a draft stage s has ``num_hidden_layers + s``.
        draft_stage: s for a draft stage, None for a text layer.
        ratio: tokens per long-range entry; 0 for a layer that sees its window only.
        kv_owner: the layer whose long-range entries this layer reads (perhaps itself), None for ratio 0.
        topk_owner: the layer whose picks this layer uses (perhaps itself), None for ratio 0.
        owns_kv: this layer compresses and stores long-range entries.
        owns_index_keys: this layer stores the index keys of those entries.
        has_indexer: this layer scores entries and makes picks of its own.
        publishes_candidates: this layer's scores limit the picks of later indexers.
        uses_candidates: this layer's picks stay inside the published candidate blocks.
        engram_index: 0.. where an Engram table is read before this layer, else None.
        is_tap: the residual entering this layer is handed to the draft stages.
        rope: "yarn" for ratio above 0, else "plain".
    """

    layer: int
    draft_stage: int | None
    ratio: int
    kv_owner: int | None
    topk_owner: int | None
    owns_kv: bool
    owns_index_keys: bool
    has_indexer: bool
    publishes_candidates: bool
    uses_candidates: bool
    engram_index: int | None
    is_tap: bool
    rope: RopeKind

    @property
    def is_draft(self) -> bool:
        """True for a draft stage."""
        return self.draft_stage is not None

    @property
    def stem(self) -> str:
        """How the layer's checkpoint names begin: ``layers.5`` or ``mtp.0``."""
        return f"layers.{self.layer}" if self.draft_stage is None else f"mtp.{self.draft_stage}"


def derive_roles(config: ModelConfig) -> tuple[LayerRole, ...]:
    """Give the role of every text layer and then of every draft stage, in order."""
    roles = [_text_role(config, layer) for layer in range(config.num_hidden_layers)]
    roles += [
        LayerRole(
            layer=config.num_hidden_layers + stage,
            draft_stage=stage,
            ratio=0,
            kv_owner=None,
            topk_owner=None,
            owns_kv=False,
            owns_index_keys=False,
            has_indexer=False,
            publishes_candidates=False,
            uses_candidates=False,
            engram_index=None,
            is_tap=False,
            rope="plain",
        )
        for stage in range(config.num_nextn_predict_layers)
    ]
    return tuple(roles)


def _text_role(config: ModelConfig, layer: int) -> LayerRole:
    ratio = config.compress_ratios[layer]
    kv_owner = owner_of(config.kv_source_layer_ids, layer) if ratio else None
    topk_owner = owner_of(config.index_source_layer_ids, layer) if ratio else None
    owns_kv = kv_owner == layer
    has_indexer = topk_owner == layer
    candidates_from = config.candidate_source_layer_id
    engrams = config.engram_layer_ids
    return LayerRole(
        layer=layer,
        draft_stage=None,
        ratio=ratio,
        kv_owner=kv_owner,
        topk_owner=topk_owner,
        owns_kv=owns_kv,
        owns_index_keys=owns_kv,
        has_indexer=has_indexer,
        publishes_candidates=candidates_from == layer,
        uses_candidates=has_indexer and candidates_from is not None and kv_owner == candidates_from < layer,
        engram_index=engrams.index(layer) if layer in engrams else None,
        is_tap=layer in config.dspark_target_layer_ids,
        rope="yarn" if ratio else "plain",
    )
