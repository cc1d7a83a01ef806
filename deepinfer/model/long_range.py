"""Long-range entries: compression into the owner's cache, and the indexer's picks (model.md sections 5 and 6).

Legend: T rows, D hidden size, L query rank, C head width, J index heads, I index width, K selected entries.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.accelerator.ops.selection import Selection, SelectionRule
from deepinfer.accelerator.weights import PreparedWeight
from deepinfer.errors import InvariantError
from deepinfer.model.forward_pass import ForwardPass
from deepinfer.model.roles import LayerRole
from deepinfer.model.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """What an owner layer makes long-range entries with.

    Attributes:
        wkv: latent projection; in float32 where rows are pooled, else in the activation dtype.
        wgate: gate projection in float32, None for ratio 1: with one token per entry there is nothing to weigh.
        norm_C: norm of the latent.
        wk: projection of the latent to the index key.
        k_norm_I: norm of the index key.
    """

    wkv: PreparedWeight
    wgate: PreparedWeight | None
    norm_C: Tensor
    wk: PreparedWeight
    k_norm_I: Tensor


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """What an indexer layer scores entries with: the query projection and the weight of each index head."""

    wq_b: PreparedWeight
    weights_proj: PreparedWeight


def load_compressor(reader: WeightReader, stem: str, role: LayerRole) -> CompressorWeights:
    """Load the compressor of an owner layer; ``stem`` is the attention's."""
    pooled = role.ratio > 1
    return CompressorWeights(
        wkv=reader.dense(f"{stem}.compressor.wkv", "float32" if pooled else "activation"),
        wgate=reader.dense(f"{stem}.compressor.wgate", "float32") if pooled else None,
        norm_C=reader.float32(f"{stem}.compressor.norm.weight"),
        wk=reader.dense(f"{stem}.indexer.wk"),
        k_norm_I=reader.float32(f"{stem}.indexer.k_norm.weight"),
    )


def load_indexer(reader: WeightReader, stem: str) -> IndexerWeights:
    """Load the indexer of a layer that picks entries; ``stem`` is the attention's."""
    return IndexerWeights(reader.dense(f"{stem}.indexer.wq_b"), reader.dense(f"{stem}.indexer.weights_proj"))


def store_entries(x_TD: Tensor, weights: CompressorWeights, role: LayerRole, run: ForwardPass) -> None:
    """Compress the rows and store the entries and index keys that they complete (section 5).

    An entry is rotated by the position of its group's first token. The index key comes from the latent before its
    rotation. Rows that complete no entry carry zeros to slot -1.
    """
    ops, table, places = run.ops, run.table(role), run.entry_places[role.ratio]
    latent_TC = run.rms(_latent(x_TD, weights, role, run), weights.norm_C)
    entry_TC = ops.norm.rotary(latent_TC, table, places.position_T)
    ops.codec.store_entries(run.caches.entries(role.layer), entry_TC, places.slot_T)
    key_TI = run.rms(ops.linear.dense(latent_TC, weights.wk), weights.k_norm_I)
    key_TI = ops.norm.rotary(key_TI, table, places.position_T)
    ops.codec.store_index_keys(run.caches.index_keys(role.layer), key_TI, places.slot_T)


def pick_entries(x_TD: Tensor, qr_TL: Tensor, weights: IndexerWeights, role: LayerRole, run: ForwardPass) -> Selection:
    """Score the visible entries of the owner's cache and pick the best (section 6)."""
    config, ops = run.config, run.ops
    heads, width = config.index_n_heads, config.index_head_dim
    query_TJI = ops.linear.dense(qr_TL, weights.wq_b).view(-1, heads, width)
    query_TJI = ops.norm.rotary(query_TJI, run.table(role), run.step.position_T)
    head_weight_TJ = ops.linear.dense(x_TD, weights.weights_proj) * (width * heads) ** -0.5
    rule = SelectionRule(
        top_k=config.index_topk,
        candidate_blocks=config.candidate_topk_blocks,
        candidate_block_size=config.candidate_block_size,
        publish=role.publishes_candidates,
    )
    keys = run.caches.index_keys(_owner(role))
    return ops.selection.top_entries(query_TJI, head_weight_TJ, keys, run.step, rule, _candidates(role, run))


def _latent(x_TD: Tensor, weights: CompressorWeights, role: LayerRole, run: ForwardPass) -> Tensor:
    latent_TC = run.ops.linear.dense(x_TD, weights.wkv)
    if weights.wgate is None:
        return latent_TC
    gate_TC = run.ops.linear.dense(x_TD, weights.wgate)
    pooled_TC = run.ops.compression.pool_pairs(gate_TC, latent_TC, run.caches.pending(role.layer), run.step)
    # Pooled in float32, rounded to activations before the norm (decision D4).
    return pooled_TC.to(x_TD.dtype)


def _candidates(role: LayerRole, run: ForwardPass) -> Tensor | None:
    if not role.uses_candidates:
        return None
    source = run.config.candidate_source_layer_id
    published = None if source is None else run.picks.get(source)
    if published is None or published.candidates_TB is None:
        raise InvariantError(f"layer {role.layer} picks among candidate blocks that no layer has published")
    return published.candidates_TB


def _owner(role: LayerRole) -> int:
    if role.kv_owner is None:
        raise InvariantError(f"layer {role.layer} has ratio {role.ratio} and no owner of long-range entries")
    return role.kv_owner
