"""Record codecs: activations to cache records and back (formats: deepinfer.numerics.records, model.md section 11).

Legend: T rows, C record width in elements, b record bytes, n gathered slots.
"""

from __future__ import annotations

import torch

from deepinfer.accelerator.caches import EntryCache, IndexCache, WindowCache
from deepinfer.accelerator.ops.base import OpGroup, not_implemented, op
from deepinfer.numerics import RecordFormat


class CodecOps(OpGroup):
    """Encode, store by slot, gather and decode.

    Bytes must equal the host definitions of ``deepinfer.numerics`` exactly, for the same float32 input. A driver may
    keep another byte layout inside the pools if its ``moves`` and ``gather`` ops convert exactly.
    Slots are int64; -1 means "do not store". Two rows of one call never name the same slot. Byte offsets must be
    computed in 64 bits: pools pass 2^31 bytes. Everything here is a pure per-row function (R2).
    """

    group = "codec"

    @op
    def encode(self, x_TC: torch.Tensor, record_format: RecordFormat) -> torch.Tensor:
        """Return uint8 [T, b]: each row encoded in ``record_format``. float64 rows are first rounded to float32."""
        not_implemented(self, "encode")

    @op
    def store_window(self, cache: WindowCache, records_Tb: torch.Tensor, slot_T: torch.Tensor) -> None:
        """Write encoded window records, in place, at flat slots ``z * ring + p % ring``."""
        not_implemented(self, "store_window")

    @op
    def store_entries(self, cache: EntryCache, x_TC: torch.Tensor, slot_T: torch.Tensor) -> None:
        """Encode rows in the cache's format and write them, in place, at flat slots ``block * E + offset``."""
        not_implemented(self, "store_entries")

    @op
    def store_index_keys(self, cache: IndexCache, x_TC: torch.Tensor, slot_T: torch.Tensor) -> None:
        """Encode index keys and write data and scale bytes into the two sections of their blocks, in place."""
        not_implemented(self, "store_index_keys")

    @op
    def gather_window(self, cache: WindowCache, slot_n: torch.Tensor) -> torch.Tensor:
        """Return decoded float32 records [n, C]; slot -1 gives a row of zeros."""
        not_implemented(self, "gather_window")

    @op
    def gather_entries(self, cache: EntryCache, slot_n: torch.Tensor) -> torch.Tensor:
        """Return decoded float32 records [n, C]; slot -1 gives a row of zeros."""
        not_implemented(self, "gather_entries")

    @op
    def gather_index_keys(self, cache: IndexCache, slot_n: torch.Tensor) -> torch.Tensor:
        """Return decoded float32 index keys [n, C]; slot -1 gives a row of zeros."""
        not_implemented(self, "gather_index_keys")
