"""Engram: rows of a hashed n-gram table, gated into the residual streams (model.md section 8).

Legend: T rows, R requests, G n-gram length, F values of a row's memory, S streams, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.memory import NgramHash, NgramTable
from deepinfer.accelerator.weights import PreparedWeight
from deepinfer.model.config import ModelConfig
from deepinfer.model.engram_hash import EngramLayout
from deepinfer.model.roles import LayerRole
from deepinfer.model.weight_reader import WeightReader

DEAD = -1
"""The id of a place that the look-back cannot read: before the request began, or inside an image span."""


class TableSpread(Protocol):
    """The tables of all layers, where several ranks hold them together."""

    def share(self, table: NgramTable) -> NgramTable:
        """Return the rows of a table that this rank holds."""

    def fetch(
        self, shares: Sequence[NgramTable], num_rows: Sequence[int], rows_TF: Sequence[Tensor]
    ) -> Sequence[tuple[NgramTable, Tensor]]:
        """Return for each table one of the rows that are read, and their numbers in it; all ranks call it together."""


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """Parameters of one Engram layer.

    Attributes:
        hash: constants of its hash.
        table: its table, or this rank's share of it, in host memory.
        num_rows: rows of the whole table.
        wkv: table rows to one key per stream and one value.
        query_weight_SD: float32 weight of the streams in the gate.
        key_weight_SD: float32 weight of the keys in the gate.
    """

    hash: NgramHash
    table: NgramTable
    num_rows: int
    wkv: PreparedWeight
    query_weight_SD: Tensor
    key_weight_SD: Tensor


def load_engram(
    reader: WeightReader,
    role: LayerRole,
    layout: EngramLayout,
    pad_id: int,
    device: torch.device,
    spread: TableSpread | None = None,
) -> EngramWeights:
    """Load the Engram of one layer; ``pad_id`` is the mapped id of the padding token."""
    stem = f"{role.stem}.engram"
    table = reader.ngram_table(f"{stem}.embed")
    primes = torch.tensor(layout.primes, dtype=torch.int64, device=device)
    return EngramWeights(
        hash=NgramHash(
            multipliers_G=torch.tensor(layout.multipliers, dtype=torch.int64, device=device),
            primes_Gh=primes.view(-1, layout.num_heads),
            offsets_F=torch.tensor(layout.offsets, dtype=torch.int64, device=device),
            pad_id=pad_id,
        ),
        table=table if spread is None else spread.share(table),
        num_rows=table.rows_RW.shape[0],
        wkv=reader.dense(f"{stem}.wkv"),
        query_weight_SD=reader.float32(f"{stem}.q_weight"),
        key_weight_SD=reader.float32(f"{stem}.k_weight"),
    )


def ngram_tokens(ids_T: Tensor, history_RG: Tensor, step: StepLayout, token_map_V: Tensor) -> Tensor:
    """Return the mapped ids that each row's hash looks at.

    Args:
        ids_T: int64 [T] token ids of the step's rows.
        history_RG: int64 [R, G - 1] token ids of each request before the step: column s - 1 is position
            ``cached - s``, ``DEAD`` where there is no such position or it lies in an image span.
        step: the ragged layout; its image rows are dead too, and so are its padding rows.
        token_map_V: int64 [V] compressed id of every token id.

    Returns:
        int64 [T, G]: column s is the mapped id s positions back, ``DEAD`` where it cannot be read.
    """
    alive_T = step.valid_T & ~step.image_T
    mapped_T = torch.where(alive_T, _mapped(ids_T, token_map_V), DEAD)
    history_RG = _mapped(history_RG, token_map_V)
    place_T = torch.arange(step.rows, device=ids_T.device) - step.row_starts_R1[step.request_T]
    columns = [mapped_T]
    for back in range(1, history_RG.shape[1] + 1):
        inside_T = place_T >= back
        own_T = mapped_T.roll(back)
        # Rows whose look-back leaves the step read the history; the clamp serves the others, which ignore it.
        before_T = history_RG[step.request_T, (back - 1 - place_T).clamp(min=0)]
        columns.append(torch.where(inside_T, own_T, before_T))
    return torch.where(alive_T.unsqueeze(1), torch.stack(columns, dim=1), DEAD)


def engram_memory(tokens_TG: Tensor, weights: EngramWeights, ops: Ops) -> Tensor:
    """Return the table rows of every position, [T, F * W]; they depend on ids only, so they can be fetched ahead."""
    return ops.memory.gather_rows(weights.table, ops.memory.ngram_rows(tokens_TG, weights.hash))


def fetched_memories(
    tokens_TG: Tensor, engrams: Mapping[int, EngramWeights], spread: TableSpread, ops: Ops
) -> dict[int, Tensor]:
    """Return the same for all layers at once, from tables that other ranks hold too."""
    rows = [ops.memory.ngram_rows(tokens_TG, weights.hash) for weights in engrams.values()]
    shares, num_rows = zip(*((weights.table, weights.num_rows) for weights in engrams.values()), strict=True)
    fetched = spread.fetch(shares, num_rows, rows)
    return {
        layer: ops.memory.gather_rows(table, number_TF)
        for layer, (table, number_TF) in zip(engrams, fetched, strict=True)
    }


def engram(
    streams_TSD: Tensor, memory_TF: Tensor, alive_T: Tensor, weights: EngramWeights, config: ModelConfig, ops: Ops
) -> Tensor:
    """Return the streams with the gated memory added; rows that are not alive keep theirs bit for bit."""
    rows, streams, hidden = streams_TSD.shape
    projected = ops.linear.dense(memory_TF, weights.wkv).view(rows, streams + 1, hidden)
    return ops.memory.gate(
        streams_TSD,
        projected[:, :streams],
        projected[:, streams],
        weights.query_weight_SD,
        weights.key_weight_SD,
        alive_T,
        config.rms_norm_eps,
    )


def _mapped(ids: Tensor, token_map_V: Tensor) -> Tensor:
    return torch.where(ids < 0, DEAD, token_map_V[ids.clamp(min=0)])
