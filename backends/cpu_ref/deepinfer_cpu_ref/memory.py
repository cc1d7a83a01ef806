"""Engram: n-gram hash, look-up in a host-resident table, gate into the streams.

Legend: T rows, G n-gram length, F hash columns, W row width, S streams, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.ops.memory import MemoryOps, NgramHash, NgramTable
from deepinfer.numerics import dequantise_engram_rows
from deepinfer_cpu_ref.computation import Computed, refuse, require_float, wide_dtype
from deepinfer_cpu_ref.invariant import mean_square, row_sum, sigmoid

SMALLEST_GATE_INPUT = 1e-6


class CpuRefMemory(Computed, MemoryOps):
    """Tables stay where and as they are; only looked-up rows are decoded."""

    def ngram_rows(self, tokens_TG: Tensor, constants: NgramHash) -> Tensor:
        """See :meth:`MemoryOps.ngram_rows`."""
        length = constants.multipliers_G.shape[0]
        if tokens_TG.dtype != torch.int64 or tokens_TG.dim() != 2 or tokens_TG.shape[1] != length:
            refuse(
                "memory.ngram_rows",
                f"tokens are {tokens_TG.dtype} {tuple(tokens_TG.shape)}; give int64 [T, {length}]",
            )
        dead_TG = tokens_TG < 0
        blocked_TG = dead_TG.to(torch.int64).cumsum(dim=1) > 0
        token_TG = torch.where(blocked_TG, constants.pad_id, tokens_TG)
        rolls = token_TG[:, 0] * constants.multipliers_G[0]
        columns = []
        for back in range(1, length):
            rolls = rolls ^ (token_TG[:, back] * constants.multipliers_G[back])
            columns.append(rolls.unsqueeze(1) % constants.primes_Gh[back - 1])
        rows_TF = torch.cat(columns, dim=1) + constants.offsets_F
        return rows_TF.masked_fill(dead_TG[:, :1], -1)

    def gather_rows(self, table: NgramTable, rows_TF: Tensor) -> Tensor:
        """See :meth:`MemoryOps.gather_rows`."""
        row_n = rows_TF.flatten().to(table.rows_RW.device)
        present_n = row_n >= 0
        wanted = row_n[present_n]
        if table.scales is None:
            require_float("memory.gather_rows", f"table {table.name!r}", table.rows_RW)
            found = table.rows_RW[wanted]
        else:
            found = dequantise_engram_rows(
                table.rows_RW.view(torch.uint8)[wanted], table.scales.view(torch.uint8)[wanted]
            )
        if self.computation.served:
            found = found.to(torch.bfloat16)
        values_nW = found.new_zeros((row_n.shape[0], table.rows_RW.shape[1]), dtype=self.computation.activation)
        values_nW[present_n] = found.to(self.computation.activation)
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
        require_float("memory.gate", "streams", streams_TSD)
        wide = wide_dtype(streams_TSD)
        x, key, value_TD = streams_TSD.to(wide), key_TSD.to(wide), value_TD.to(wide)
        weight_SD = query_weight_SD.to(wide) * key_weight_SD.to(wide)
        dot_TS1 = row_sum(x * weight_SD * key)
        dot_TS1 = dot_TS1 * torch.rsqrt(mean_square(x) + norm_eps) * torch.rsqrt(mean_square(key) + norm_eps)
        dot_TS1 = dot_TS1 * x.shape[-1] ** -0.5
        # clamp keeps NaN, so that a NaN row stays visible.
        gate_TS1 = sigmoid(torch.copysign(dot_TS1.abs().clamp(min=SMALLEST_GATE_INPUT).sqrt(), dot_TS1))
        gated_TSD = (x + gate_TS1 * value_TD.unsqueeze(1)).to(streams_TSD.dtype)
        return torch.where(alive_T[:, None, None], gated_TSD, streams_TSD)
