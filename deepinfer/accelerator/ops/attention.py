"""Sparse attention over window records and selected long-range records in one softmax (model.md section 4).

Legend: T rows, H heads, C head width, K selected entries, b record bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import EntryCache, WindowCache
from deepinfer.accelerator.ops.base import OpGroup, not_implemented, op


@dataclass(frozen=True, slots=True)
class LongRange:
    """The long-range half of a layer's keys.

    Attributes:
        cache: the owner layer's main records.
        entries_TK: int64 [T, K] selected entries of each row, -1 where there is none, in any order.
    """

    cache: EntryCache
    entries_TK: torch.Tensor


class AttentionOps(OpGroup):
    """One op serves prefill and decode, k rows a request."""

    group = "attention"

    @op
    def sparse(
        self,
        query_THC: torch.Tensor,
        own_records_Tb: torch.Tensor,
        window: WindowCache,
        long_range: LongRange | None,
        sinks_H: torch.Tensor,
        window_size: int,
        step: StepLayout,
    ) -> torch.Tensor:
        """Attend to the row's window and its selected entries; key and value are the same vector.

        Keys of the row at position p: positions ``max(window_start, p - window_size + 1) .. p`` of this layer, then
        the selected entries. A window position that lies in this step is read from ``own_records_Tb``, an earlier one
        from the ring; in a decode step the ring already holds both, with equal bytes. There is no deduplication
        between window and entries. ``s = (q . k) * C^-0.5``;
        ``o = sum_j exp(s_j - m) k_j / (sum_j exp(s_j - m) + exp(sink - m))`` in at least float32.
        served: probabilities are rounded to bfloat16 before they multiply the values, the denominator is not.

        Args:
            query_THC: rotated queries, activation dtype.
            own_records_Tb: uint8 [T, b], this step's encoded window records.
            window: this layer's ring.
            long_range: None for layers with ratio 0.
            sinks_H: float32 [H].
            window_size: positions in the window, the row's own included.
            step: the ragged layout.

        Returns:
            o [T, H, C] in the activation dtype, not yet rotated back. A row without a valid key gives exact zeros.
            Unowned memory, padding entries (-1) and other requests must not influence a row, NaN included. R2.
        """
        not_implemented(self, "sparse")
