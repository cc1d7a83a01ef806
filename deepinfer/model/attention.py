"""Attention over the layer's own window and the owner's selected entries in one softmax (model.md section 4).

Legend: T rows, D hidden size, L query rank, H heads, C head width, G output groups, K and N a group's widths,
b record bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.accelerator.weights import PreparedWeight
from deepinfer.model.config import ModelConfig
from deepinfer.model.forward_pass import ForwardPass
from deepinfer.model.long_range import (
    CompressorWeights,
    IndexerWeights,
    load_compressor,
    load_indexer,
    pick_entries,
    store_entries,
)
from deepinfer.model.roles import LayerRole
from deepinfer.model.weight_reader import WeightReader
from deepinfer.numerics import RecordFormat


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Parameters of one attention sublayer.

    Attributes:
        wq_a: hidden to query rank.
        q_norm_L: norm of the query rank.
        wq_b: query rank to heads.
        wkv: hidden to the window's one vector per row, key and value at once.
        kv_norm_C: its norm.
        sinks_H: a learned addend of each head's denominator, float32.
        wo_a: first half of the output projection, one matrix per group.
        wo_b: second half.
        compressor: of an owner layer, else None.
        indexer: of a layer that picks entries, else None.
    """

    wq_a: PreparedWeight
    q_norm_L: Tensor
    wq_b: PreparedWeight
    wkv: PreparedWeight
    kv_norm_C: Tensor
    sinks_H: Tensor
    wo_a: PreparedWeight
    wo_b: PreparedWeight
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


def load_attention(reader: WeightReader, config: ModelConfig, role: LayerRole) -> AttentionWeights:
    """Load the attention of one layer or draft stage."""
    stem = f"{role.stem}.attn"
    return AttentionWeights(
        wq_a=reader.dense(f"{stem}.wq_a"),
        q_norm_L=reader.float32(f"{stem}.q_norm.weight"),
        wq_b=reader.dense(f"{stem}.wq_b"),
        wkv=reader.dense(f"{stem}.wkv"),
        kv_norm_C=reader.float32(f"{stem}.kv_norm.weight"),
        sinks_H=reader.float32(f"{stem}.attn_sink"),
        wo_a=reader.grouped(f"{stem}.wo_a", config.o_groups),
        wo_b=reader.dense(f"{stem}.wo_b"),
        compressor=load_compressor(reader, stem, role) if role.owns_kv else None,
        indexer=load_indexer(reader, stem) if role.has_indexer else None,
    )


def attention(x_TD: Tensor, weights: AttentionWeights, role: LayerRole, run: ForwardPass) -> Tensor:
    """Return the sublayer's output [T, D]; entries, index keys, pending rows and window records are stored.

    Entries and index keys are stored before they are scored and read, in every step: a row may pick the entry that
    it completes itself. Window records are stored before attention in a decode step, so that its rows see each other
    through the ring. In a prefill step the chunk may be longer than the ring: its rows see each other through their
    own records, the ring still holds the positions before the chunk, and is written only afterwards. Where ranks share
    the rows of a prompt step, each attends with its own and stores what all have computed.
    """
    config, ops, step, table = run.config, run.ops, run.step, run.table(role)
    qr_TL = run.rms(ops.linear.dense(x_TD, weights.wq_a), weights.q_norm_L)
    query_THC = query_of(qr_TL, weights, table, step.position_T, config, ops)

    if weights.compressor is not None and role.layer != run.stored_owner:
        if run.shared is None:
            store_entries(x_TD, weights.compressor, role, run)
        else:
            store_entries(run.shared.share.whole(x_TD), weights.compressor, role, run.shared.whole)
    if weights.indexer is not None:
        run.picks[role.layer] = pick_entries(x_TD, qr_TL, weights.indexer, role, run)

    window = run.caches.window(role.layer)
    records_Tb = window_records(x_TD, weights, table, step.position_T, window.format, config, ops)

    if step.kind == "decode":
        ops.codec.store_window(window, records_Tb, run.window_slot_T)
    before, stored_Tb, slot_T = window, records_Tb, run.window_slot_T
    if run.shared is not None:
        stored_Tb, slot_T = run.shared.share.whole(records_Tb), run.shared.whole.window_slot_T
        before = run.shared.share.window_before(window, stored_Tb, ops)
    output_THC = ops.attention.sparse(
        query_THC, records_Tb, before, _long_range(role, run), weights.sinks_H, config.sliding_window, step
    )
    if step.kind == "prefill":
        ops.codec.store_window(window, stored_Tb, slot_T)

    return project(output_THC, weights, table, step.position_T, config, ops)


def query_of(
    qr_TL: Tensor, weights: AttentionWeights, table: RotaryTable, position_T: Tensor, config: ModelConfig, ops: Ops
) -> Tensor:
    """Return the rotated queries [T, H, C] of normed query ranks."""
    query_TN = ops.linear.dense(qr_TL, weights.wq_b)
    query_THC = query_TN.view(qr_TL.shape[0], config.num_attention_heads, config.head_dim)
    return ops.norm.rotary(query_THC, table, position_T)


def window_records(
    x_TD: Tensor,
    weights: AttentionWeights,
    table: RotaryTable,
    position_T: Tensor,
    record_format: RecordFormat,
    config: ModelConfig,
    ops: Ops,
) -> Tensor:
    """Return the encoded window records [T, b] of rows: one vector each, key and value at once."""
    key_TC = ops.norm.rms(ops.linear.dense(x_TD, weights.wkv), weights.kv_norm_C, config.rms_norm_eps)
    return ops.codec.encode(ops.norm.rotary(key_TC, table, position_T), record_format)


def project(
    output_THC: Tensor, weights: AttentionWeights, table: RotaryTable, position_T: Tensor, config: ModelConfig, ops: Ops
) -> Tensor:
    """Rotate what was attended to back by the query's position and return the sublayer's output [T, D]."""
    output_THC = ops.norm.rotary(output_THC, table, position_T, inverse=True)
    rows, heads, width = output_THC.shape
    grouped_TGK = output_THC.reshape(rows, config.o_groups, heads // config.o_groups * width)
    grouped_TGN = ops.linear.grouped(grouped_TGK, weights.wo_a)
    return ops.linear.dense(grouped_TGN.flatten(1), weights.wo_b)


def _long_range(role: LayerRole, run: ForwardPass) -> LongRange | None:
    if role.kv_owner is None or role.topk_owner is None:
        return None
    # Layers between two indexers reuse the last published picks unchanged.
    return LongRange(run.caches.entries(role.kv_owner), run.picks[role.topk_owner].entries_TK)
