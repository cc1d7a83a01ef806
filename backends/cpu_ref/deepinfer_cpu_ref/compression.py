"""Pair compression with state that survives chunk cuts and rejected drafts.

Legend: T rows, C latent width, Z state slots, P pending positions, W = 2C.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import PendingCache
from deepinfer.accelerator.ops.compression import CompressionOps
from deepinfer_cpu_ref.computation import Computed, refuse
from deepinfer_cpu_ref.rows import last_positions, per_row


class CpuRefCompression(Computed, CompressionOps):
    """The softmax over two rows written out, elementwise: R2 by construction."""

    def pool_pairs(self, gate_TC: Tensor, latent_TC: Tensor, pending: PendingCache, step: StepLayout) -> Tensor:
        """See :meth:`CompressionOps.pool_pairs`."""
        width = gate_TC.shape[-1]
        if gate_TC.dtype not in (torch.float32, torch.float64) or latent_TC.dtype != gate_TC.dtype:
            refuse(
                "compression.pool_pairs",
                f"gate is {gate_TC.dtype} and latent {latent_TC.dtype}; give both in float32, or both in float64",
            )
        if latent_TC.shape != gate_TC.shape or pending.rows_ZPW.shape[-1] != 2 * width:
            refuse(
                "compression.pool_pairs",
                f"gate {tuple(gate_TC.shape)}, latent {tuple(latent_TC.shape)} and pending rows of "
                f"{pending.rows_ZPW.shape[-1]} values do not fit; pending rows must hold gate and latent",
            )
        if step.requests == 0:
            return torch.zeros_like(gate_TC, memory_format=torch.contiguous_format)
        now_TW = torch.cat((gate_TC, latent_TC), dim=-1)
        before_TW = self._previous_rows(now_TW, pending, step)
        pooled_TC = _pool(before_TW, now_TW, width)
        _keep_last_rows(now_TW, pending, step)
        completes_T = step.valid_T & (step.position_T % 2 == 1)
        return torch.where(completes_T.unsqueeze(-1), pooled_TC, 0.0)

    def _previous_rows(self, now_TW: Tensor, pending: PendingCache, step: StepLayout) -> Tensor:
        from_step_T = step.position_T - 1 >= per_row(step.cached_R, step)
        shifted_TW = now_TW.roll(1, dims=0)
        if self.computation.invariant:
            # A float64 row that waited has been through the float32 state; one that did not must look the same.
            shifted_TW = shifted_TW.to(pending.rows_ZPW.dtype).to(now_TW.dtype)
        slot_T = per_row(step.state_slots_R, step)
        waiting_TW = pending.rows_ZPW[slot_T, (step.position_T - 1) % pending.capacity]
        return torch.where(from_step_T.unsqueeze(-1), shifted_TW, waiting_TW.to(now_TW.dtype))


def _pool(before_TW: Tensor, now_TW: Tensor, width: int) -> Tensor:
    gate_before, latent_before = before_TW[:, :width], before_TW[:, width:]
    gate_now, latent_now = now_TW[:, :width], now_TW[:, width:]
    largest = torch.maximum(gate_before, gate_now)
    weight_before, weight_now = torch.exp(gate_before - largest), torch.exp(gate_now - largest)
    total = weight_before + weight_now
    return (weight_before / total) * latent_before + (weight_now / total) * latent_now


def _keep_last_rows(now_TW: Tensor, pending: PendingCache, step: StepLayout) -> None:
    kept_T = step.valid_T & (step.position_T > per_row(last_positions(step), step) - pending.capacity)
    slot_T = per_row(step.state_slots_R, step)
    place = (slot_T[kept_T], step.position_T[kept_T] % pending.capacity)
    pending.rows_ZPW[place] = now_TW[kept_T].to(pending.rows_ZPW.dtype)
