"""Pair compression: two token rows become one long-range latent (model.md section 5).

Legend: T rows, C latent width.
"""

from __future__ import annotations

import torch

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import PendingCache
from deepinfer.accelerator.ops.base import OpGroup, not_implemented, op


class CompressionOps(OpGroup):
    """Pooling of aligned pairs with state that survives chunk cuts and rejected drafts."""

    group = "compression"

    @op
    def pool_pairs(
        self, gate_TC: torch.Tensor, latent_TC: torch.Tensor, pending: PendingCache, step: StepLayout
    ) -> torch.Tensor:
        """Pool tokens (2j, 2j+1) of each request by a per-channel softmax of their gates; keep what waits.

        A row at odd position p yields ``sum_r softmax(gate)[r] * latent[r]`` over rows p-1 and p. Row p-1 comes
        from this step when the request has it, else from ``pending.rows_ZPW[z, (p-1) % P]``. Groups are aligned to
        absolute positions.

        Args:
            gate_TC: float32 (or float64) [T, C].
            latent_TC: same dtype and shape.
            pending: float32 state, updated in place: the last P positions of each request's rows are written to
                ``[z, p % P]`` as gate then latent; invalid rows write nothing.
            step: the ragged layout.

        Returns:
            [T, C] in the input dtype; rows at even positions and invalid rows are zeros. Pure per pair (R2).
        """
        not_implemented(self, "pool_pairs")
