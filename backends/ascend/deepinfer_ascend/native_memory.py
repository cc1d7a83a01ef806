"""Engram: hash on the device, look-up where the table lies, gate on the device.

Tables lie in host memory: rows are looked up and decoded there, exactly, and only the values travel.

Legend: T rows, G n-gram length, F hash columns, W row width, S streams, D hidden size.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.accelerator.ops.memory import MemoryOps, NgramHash, NgramTable
from deepinfer.numerics import dequantise_engram_rows
from deepinfer_ascend.arithmetic import Arithmetic, refuse, sigmoid

SMALLEST_GATE_INPUT: Final = 1e-6


class NativeMemory(MemoryOps):
    """torch's own operators; no fused one exists in torch-npu."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self._arithmetic = arithmetic

    def ngram_rows(self, tokens_TG: Tensor, constants: NgramHash) -> Tensor:
        """See :meth:`MemoryOps.ngram_rows`."""
        length = constants.multipliers_G.shape[0]
        if tokens_TG.dtype != torch.int64 or tokens_TG.dim() != 2 or tokens_TG.shape[1] != length:
            refuse(
                "memory.ngram_rows",
                f"tokens are {tokens_TG.dtype} {tuple(tokens_TG.shape)}; give int64 [T, {length}]",
            )
        dead_TG = tokens_TG < 0
        blocked_T = dead_TG[:, 0]
        rolls_T = torch.where(blocked_T, constants.pad_id, tokens_TG[:, 0]) * constants.multipliers_G[0]
        columns = []
        for back in range(1, length):
            blocked_T = blocked_T | dead_TG[:, back]
            token_T = torch.where(blocked_T, constants.pad_id, tokens_TG[:, back])
            rolls_T = rolls_T ^ (token_T * constants.multipliers_G[back])
            columns.append(rolls_T.unsqueeze(1) % constants.primes_Gh[back - 1])
        rows_TF = torch.cat(columns, dim=1) + constants.offsets_F
        return rows_TF.masked_fill(dead_TG[:, :1], -1)

    def gather_rows(self, table: NgramTable, rows_TF: Tensor) -> Tensor:
        """See :meth:`MemoryOps.gather_rows`."""
        row_n = rows_TF.flatten().to(table.rows_RW.device)
        present_n = row_n >= 0
        known_n = row_n.clamp(min=0)
        if table.scales is None:
            found_nW = table.rows_RW.index_select(0, known_n)
        else:
            codes_nW = table.rows_RW.view(torch.uint8).index_select(0, known_n)
            found_nW = dequantise_engram_rows(codes_nW, table.scales.view(torch.uint8).index_select(0, known_n))
        if self._arithmetic.served:
            found_nW = found_nW.to(torch.bfloat16)
        values_nW = torch.where(present_n.unsqueeze(-1), found_nW, 0.0).to(self._arithmetic.activation)
        return values_nW.view(rows_TF.shape[0], rows_TF.shape[1] * values_nW.shape[1]).to(rows_TF.device)

    def gate(
        self,
        streams_TSD: Tensor,
        key_TSD: Tensor,
        value_TD: Tensor,
        query_weight_SD: Tensor,
        key_weight_SD: Tensor,
        alive_T: Tensor,
        norm_eps: float,
    ) -> Tensor:
        """See :meth:`MemoryOps.gate`."""
        x_TSD, key_TSD, value_TD = streams_TSD.float(), key_TSD.float(), value_TD.float()
        weight_SD = query_weight_SD.float() * key_weight_SD.float()
        dot_TS1 = (x_TSD * weight_SD * key_TSD).sum(-1, keepdim=True)
        dot_TS1 = dot_TS1 * _inverse_rms(x_TSD, norm_eps) * _inverse_rms(key_TSD, norm_eps) * x_TSD.shape[-1] ** -0.5
        root_TS1 = torch.sqrt(_raised(dot_TS1.abs(), SMALLEST_GATE_INPUT))
        gate_TS1 = sigmoid(torch.where(torch.signbit(dot_TS1), -root_TS1, root_TS1))
        gated_TSD = (x_TSD + gate_TS1 * value_TD.unsqueeze(1)).to(streams_TSD.dtype)
        return torch.where(alive_T[:, None, None], gated_TSD, streams_TSD)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def _raised(x: Tensor, least: float) -> Tensor:
    """Return ``max(x, least)`` that keeps NaN, whatever the device's clamp does with it."""
    return torch.where(x < least, least, x)
