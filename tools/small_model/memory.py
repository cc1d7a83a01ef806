"""Engram, batched and differentiable.

Legend: B sequences, T positions, N rows, F hash columns, S streams, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.model import ModelConfig
from deepinfer.model.engram_hash import EngramLayout

from .operators import inverse_rms
from .parameters import Weights

_SMALLEST_GATE_INPUT = 1e-6


def table_rows(mapped_BT: Tensor, layout: EngramLayout, pad_id: int) -> Tensor:
    """Return the table rows of every position [B, T, F] from compressed ids."""
    length = mapped_BT.shape[1]
    rolls = torch.zeros_like(mapped_BT)
    columns: list[Tensor] = []
    for back, multiplier in enumerate(layout.multipliers):
        seen = F.pad(mapped_BT, (back, 0), value=pad_id)[:, :length]
        rolls = rolls ^ (seen * multiplier)
        if back:
            first = (back - 1) * layout.num_heads
            primes = torch.tensor(layout.primes[first : first + layout.num_heads])
            columns.append(rolls.unsqueeze(-1) % primes)
    return torch.cat(columns, -1) + torch.tensor(layout.offsets)


def remember(streams_NSD: Tensor, rows_NF: Tensor, weights: Weights, stem: str, config: ModelConfig) -> Tensor:
    """Return the streams with the gated memory added."""
    memory = F.embedding(rows_NF, weights[f"{stem}.embed.weight"]).flatten(1)
    projected = (memory @ weights[f"{stem}.wkv.weight"].T).view(-1, config.hc_mult + 1, config.hidden_size)
    key_NSD, value_ND = projected[:, :-1], projected[:, -1]
    weight_SD = weights[f"{stem}.q_weight"] * weights[f"{stem}.k_weight"]
    dot_NS = (streams_NSD * weight_SD * key_NSD).sum(-1)
    for side in (streams_NSD, key_NSD):
        dot_NS = dot_NS * inverse_rms(side, config.rms_norm_eps).squeeze(-1)
    dot_NS = dot_NS * config.hidden_size**-0.5
    root_NS = dot_NS.abs().clamp(min=_SMALLEST_GATE_INPUT).sqrt()
    gate_NS = torch.sigmoid(torch.where(dot_NS < 0, -root_NS, root_NS))
    return torch.addcmul(streams_NSD, gate_NS.unsqueeze(2), value_ND.unsqueeze(1))
