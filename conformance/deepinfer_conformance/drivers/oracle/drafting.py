"""The oracle's draft attention: the context that the ring holds and the block's own records, each really read.

Legend: R requests, n drafts a request, w window positions, H heads, C head width, b record bytes.
"""

from __future__ import annotations

import numpy as np
import torch

from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops.drafting import DraftBlock, DraftingOps
from deepinfer_conformance.drivers.host import OptionedGroup
from deepinfer_conformance.drivers.oracle.hashing import CHANNELS, Role, attended, linear_of, term
from deepinfer_conformance.drivers.oracle.records import read
from deepinfer_conformance.drivers.oracle.rows import words_of


class OracleDrafting(OptionedGroup, DraftingOps):
    """Attention alone: draws and verification run on the reference, and are under test together with the engine."""

    def attend(
        self,
        query_RnHC: torch.Tensor,
        block_records_Rnb: torch.Tensor,
        window: WindowCache,
        sinks_H: torch.Tensor,
        window_size: int,
        block: DraftBlock,
    ) -> torch.Tensor:
        """Return the queries' channels with a new digest in head 0."""
        del sinks_H
        words_Rn3 = words_of(query_RnHC)[:, :, 0]
        output_RnHC = np.zeros(query_RnHC.shape, dtype=query_RnHC.numpy().dtype)
        requests, drafts = words_Rn3.shape[:2]
        if requests and drafts:
            context_R1, slot_R1 = block.context_R.numpy()[:, None], block.state_slots_R.numpy()[:, None]
            position_Rw = context_R1 - np.arange(window_size, 0, -1)
            seen_Rw = position_Rw >= np.maximum(block.window_start_R.numpy(), 0)[:, None]
            found = read(window.bytes_ZRb.numpy()[slot_R1, position_Rw % window.ring], window.format)
            context_sum_R = (term(Role.WINDOW, position_Rw, found.linear, found.damage) * seen_Rw).sum(1)
            position_Rn = context_R1 + np.arange(drafts)
            own = read(block_records_Rnb.numpy(), window.format)
            block_sum_R = term(Role.ENTRY, position_Rn, own.linear, own.damage).sum(1)
            # Every row of a block sees the same keys.
            window_sum_Rn = (context_sum_R + block_sum_R)[:, None].repeat(drafts, axis=1)
            output_RnHC[:, :, 0, :CHANNELS] = words_Rn3
            output_RnHC[:, :, 0, 1] = attended(linear_of(words_Rn3), position_Rn, window_sum_Rn, None, None)
        return torch.from_numpy(output_RnHC)
