"""Ops of the null driver around paged memory: it is neither read nor written.

Legend: T rows, H heads, C head or record width, K selected entries, B candidate blocks, N items of a pool,
b bytes of a record or an item, n gathered or moved items.
"""

from __future__ import annotations

import torch

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import EntryCache, IndexCache, PendingCache, WindowCache
from deepinfer.accelerator.ops.attention import AttentionOps, LongRange
from deepinfer.accelerator.ops.codec import CodecOps
from deepinfer.accelerator.ops.compression import CompressionOps
from deepinfer.accelerator.ops.moves import MoveOps
from deepinfer.accelerator.ops.plumbing import PlumbingOps
from deepinfer.accelerator.ops.selection import Selection, SelectionOps, SelectionRule
from deepinfer.numerics import RecordFormat
from deepinfer_conformance.drivers.host import OptionedGroup


class NullCodec(OptionedGroup, CodecOps):
    """Records are zero bytes; nothing is stored."""

    def encode(self, x_TC: torch.Tensor, record_format: RecordFormat) -> torch.Tensor:
        """Return zero bytes [T, b]."""
        return x_TC.new_zeros((x_TC.shape[0], record_format.nbytes), dtype=torch.uint8)

    def store_window(self, cache: WindowCache, records_Tb: torch.Tensor, slot_T: torch.Tensor) -> None:
        """Store nothing."""

    def store_entries(self, cache: EntryCache, x_TC: torch.Tensor, slot_T: torch.Tensor) -> None:
        """Store nothing."""

    def store_index_keys(self, cache: IndexCache, x_TC: torch.Tensor, slot_T: torch.Tensor) -> None:
        """Store nothing."""

    def gather_window(self, cache: WindowCache, slot_n: torch.Tensor) -> torch.Tensor:
        """Return zeros [n, C]."""
        return slot_n.new_zeros((slot_n.shape[0], cache.format.width), dtype=torch.float32)

    def gather_entries(self, cache: EntryCache, slot_n: torch.Tensor) -> torch.Tensor:
        """Return zeros [n, C]."""
        return slot_n.new_zeros((slot_n.shape[0], cache.format.width), dtype=torch.float32)

    def gather_index_keys(self, cache: IndexCache, slot_n: torch.Tensor) -> torch.Tensor:
        """Return zeros [n, C]."""
        return slot_n.new_zeros((slot_n.shape[0], cache.format.width), dtype=torch.float32)


class NullCompression(OptionedGroup, CompressionOps):
    """Nothing waits for its pair."""

    def pool_pairs(
        self, gate_TC: torch.Tensor, latent_TC: torch.Tensor, pending: PendingCache, step: StepLayout
    ) -> torch.Tensor:
        """Return zeros [T, C]."""
        del gate_TC, pending, step
        return torch.zeros_like(latent_TC, memory_format=torch.contiguous_format)


class NullSelection(OptionedGroup, SelectionOps):
    """No entry is picked."""

    def top_entries(
        self,
        query_TJI: torch.Tensor,
        head_weight_TJ: torch.Tensor,
        keys: IndexCache,
        step: StepLayout,
        rule: SelectionRule,
        candidates_TB: torch.Tensor | None = None,
    ) -> Selection:
        """Return -1 everywhere."""
        del head_weight_TJ, keys, step, candidates_TB
        rows = query_TJI.shape[0]
        blocks_TB = query_TJI.new_full((rows, rule.candidate_blocks), -1, dtype=torch.int64) if rule.publish else None
        return Selection(query_TJI.new_full((rows, rule.top_k), -1, dtype=torch.int64), blocks_TB)


class NullAttention(OptionedGroup, AttentionOps):
    """Nothing is attended to."""

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
        """Return zeros [T, H, C]."""
        del own_records_Tb, window, long_range, sinks_H, window_size, step
        return torch.zeros_like(query_THC, memory_format=torch.contiguous_format)


class NullPlumbing(OptionedGroup, PlumbingOps):
    """No row has a place."""

    def window_slots(self, step: StepLayout) -> torch.Tensor:
        """Return -1, "do not store", for every row."""
        return torch.full_like(step.position_T, -1)

    def entry_slots(self, step: StepLayout, ratio: int) -> torch.Tensor:
        """Return -1, "do not store", for every row."""
        del ratio
        return torch.full_like(step.position_T, -1)


class NullMoves(OptionedGroup, MoveOps):
    """Nothing moves."""

    def copy(self, pool_Nb: torch.Tensor, source_n: torch.Tensor, target_n: torch.Tensor) -> None:
        """Copy nothing."""

    def zero(self, pool_Nb: torch.Tensor, target_n: torch.Tensor) -> None:
        """Fill nothing."""

    def save(self, pool_Nb: torch.Tensor, source_n: torch.Tensor) -> torch.Tensor:
        """Return zero bytes [n, b] on the host."""
        return torch.zeros((source_n.shape[0], pool_Nb.shape[1]), dtype=torch.uint8)

    def restore(self, pool_Nb: torch.Tensor, target_n: torch.Tensor, data_nb: torch.Tensor) -> None:
        """Write nothing."""
