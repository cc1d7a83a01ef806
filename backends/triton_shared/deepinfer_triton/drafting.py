"""Op group ``drafting``: a draft block's attention.

Legend: R requests, n drafts a request, T = R * n block rows, H heads, C head width, b record bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops.drafting import DraftBlock, DraftingOps
from deepinfer_triton.arithmetic import TritonGroup, refuse, require_dtype
from deepinfer_triton.attention_rows import AttentionRows
from deepinfer_triton.sparse_attention import attend


class TritonDraftingOps(TritonGroup, DraftingOps):
    """A block is a chunk whose rows all see the block's end: the kernels of sparse attention serve it as they are."""

    def attend(
        self,
        query_RnHC: Tensor,
        block_records_Rnb: Tensor,
        window: WindowCache,
        sinks_H: Tensor,
        window_size: int,
        block: DraftBlock,
    ) -> Tensor:
        """See :meth:`DraftingOps.attend`."""
        name = "drafting.attend"
        requests = block.context_R.shape[0]
        if query_RnHC.dim() != 4 or query_RnHC.shape[:2] != block_records_Rnb.shape[:2]:
            shapes = f"queries {tuple(query_RnHC.shape)} and block records {tuple(block_records_Rnb.shape)}"
            refuse(name, f"{shapes} do not describe the blocks of {requests} requests")
        if not 1 <= window_size <= window.ring:
            refuse(name, f"window_size is {window_size}; it must lie between 1 and the ring of {window.ring} positions")
        require_dtype(name, "context", block.context_R, torch.int64)
        drafts = query_RnHC.shape[1]
        out_THC = attend(
            name,
            self.arithmetic,
            query_RnHC.flatten(0, 1),
            block_records_Rnb.flatten(0, 1),
            window,
            None,
            sinks_H,
            window_size + drafts,
            _rows(block, drafts),
        )
        return out_THC.view(query_RnHC.shape)


def _rows(block: DraftBlock, drafts: int) -> AttentionRows:
    """Return the block's rows: they follow the context, and the newest position that each sees is the block's last."""
    requests = torch.arange(block.context_R.shape[0], device=block.context_R.device)

    def per_row(values_R: Tensor) -> Tensor:
        return values_R[:, None].expand(-1, drafts).reshape(-1)

    return AttentionRows(
        position_T=per_row(block.context_R + (drafts - 1)),
        request_T=per_row(requests),
        valid_T=per_row(block.valid_R),
        start_R=requests * drafts,
        cached_R=block.context_R,
        slot_R=block.state_slots_R,
        # The block itself is always seen.
        first_R=torch.minimum(block.window_start_R, block.context_R),
        table_RB=None,
    )
