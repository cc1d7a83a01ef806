"""Op group ``attention``: window records and selected long-range records in one softmax.

Legend: T rows, H heads, C head width, b record bytes.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops.attention import AttentionOps, LongRange
from deepinfer_triton.arithmetic import TritonGroup, refuse
from deepinfer_triton.attention_rows import AttentionRows
from deepinfer_triton.sparse_attention import attend


class TritonAttentionOps(TritonGroup, AttentionOps):
    """An online softmax in one fixed order of keys; R2 because a program belongs to one row."""

    def sparse(
        self,
        query_THC: Tensor,
        own_records_Tb: Tensor,
        window: WindowCache,
        long_range: LongRange | None,
        sinks_H: Tensor,
        window_size: int,
        step: StepLayout,
    ) -> Tensor:
        """See :meth:`AttentionOps.sparse`."""
        if window_size > window.ring:
            refuse("attention.sparse", f"window_size is {window_size}; the ring holds {window.ring} positions")
        rows = AttentionRows.of_step(step)
        return attend(
            "attention.sparse",
            self.arithmetic,
            query_THC,
            own_records_Tb,
            window,
            long_range,
            sinks_H,
            window_size,
            rows,
        )
