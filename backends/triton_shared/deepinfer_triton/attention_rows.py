"""What a row of sparse attention needs to know, on the host: its place in the step, and where records lie.

Legend: T rows, R requests, B blocks of a table, H heads, C head width, K selected entries, b record bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer_triton.arithmetic import refuse, require_dtype, require_float, require_width
from deepinfer_triton.record_layout import FLOAT32, LONG_RANGE, RecordPlaces, entry_places, kind_of, window_places
from deepinfer_triton.record_tiles import group_of
from deepinfer_triton.rows import consecutive


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Rows, request by request; a row sees positions up to its own, the step's from ``cached_R`` on.

    Attributes:
        position_T: int64, the newest position that a row sees.
        request_T: int64, request of each row.
        valid_T: False for rows that see nothing.
        start_R: int64, first row of each request's own records.
        cached_R: int64, the position of that row.
        slot_R: int64, state slot of each request.
        first_R: int64, first position that a window may read.
        table_RB: block numbers; None where there are no entries.
    """

    position_T: Tensor
    request_T: Tensor
    valid_T: Tensor
    start_R: Tensor
    cached_R: Tensor
    slot_R: Tensor
    first_R: Tensor
    table_RB: Tensor | None

    @classmethod
    def of_step(cls, step: StepLayout) -> AttentionRows:
        """Return the rows of a step."""
        return cls(
            step.position_T,
            step.request_T,
            step.valid_T,
            step.row_starts_R1[:-1],
            step.cached_R,
            step.state_slots_R,
            step.window_start_R,
            step.block_table_RB,
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors in the order in which kernels take them, the table first."""
        table = self.table_RB if self.table_RB is not None else self.position_T
        parts = (table, self.position_T, self.request_T, self.valid_T, self.start_R, self.cached_R)
        return tuple(consecutive(part) for part in (*parts, self.slot_R, self.first_R))


@dataclass(frozen=True, slots=True)
class EntryRecords:
    """Long-range records of a call, or what stands for none.

    Attributes:
        kind: of the records.
        group: channels of one group.
        places: where they lie.
        entries_TK: the selected entries.
        top_k: K; 0 where there are none.
    """

    kind: int
    group: int
    places: RecordPlaces
    entries_TK: Tensor
    top_k: int


def entry_records(op_name: str, long_range: LongRange | None, window: WindowCache, rows: AttentionRows) -> EntryRecords:
    """Return where a call's long-range records lie; a call without them has the same kernel and no entries."""
    if long_range is None:
        kind = FLOAT32 if kind_of(op_name, window.format) == FLOAT32 else LONG_RANGE
        group = 16 if kind == LONG_RANGE else group_of(kind, window.format)
        return EntryRecords(kind, group, window_places(op_name, window), rows.position_T, 0)
    cache = long_range.cache
    if cache.format.width != window.format.width:
        refuse(
            op_name,
            f"long-range records hold {cache.format.width} values, window records {window.format.width}",
        )
    require_dtype(op_name, "entries", long_range.entries_TK, torch.int64)
    kind = kind_of(op_name, cache.format)
    top_k = long_range.entries_TK.shape[1]
    return EntryRecords(
        kind, group_of(kind, cache.format), entry_places(op_name, cache), long_range.entries_TK.contiguous(), top_k
    )


def check_call(
    op_name: str,
    query_THC: Tensor,
    own_records_Tb: Tensor,
    window: WindowCache,
    sinks_H: Tensor,
    window_size: int,
    rows: int,
) -> None:
    """Refuse arguments that contradict each other."""
    require_float(op_name, "query", query_THC)
    require_width(op_name, "query", query_THC, window.format.width)
    require_width(op_name, "own records", own_records_Tb, window.format.nbytes)
    require_dtype(op_name, "own records", own_records_Tb, torch.uint8)
    if query_THC.dim() != 3 or query_THC.shape[0] != rows or own_records_Tb.shape[0] != rows:
        refuse(
            op_name,
            f"queries {tuple(query_THC.shape)} and own records {tuple(own_records_Tb.shape)} do not describe "
            f"the step's {rows} rows",
        )
    if sinks_H.shape != query_THC.shape[1:2]:
        refuse(op_name, f"sinks have shape {tuple(sinks_H.shape)}; give one for each of {query_THC.shape[1]} heads")
    if window_size < 1:
        refuse(op_name, f"window_size is {window_size}; a row sees at least its own position")
