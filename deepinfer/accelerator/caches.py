"""Typed views of the two cache pools, as ops see them.

The engine owns two byte tensors: the block pool [N, block_bytes] (long-range entries, paged) and the state pool
[Z, slot_bytes] (window rings and pending pairs, one slot a request). Each layer sees strided views of them.

Legend: N blocks, Z state slots, R ring positions, E entries per block, P pending rows, C head width, b record bytes.
Spec: model.md section 11 (records, layouts), engine.md section 4 (pools).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.numerics import RecordFormat


@dataclass(frozen=True, slots=True)
class WindowCache:
    """Window ring of one layer: position p of the request in state slot z lives at ``bytes_ZRb[z, p % R]``.

    A flat window slot is ``z * R + p % R``.
    """

    bytes_ZRb: torch.Tensor
    format: RecordFormat

    @property
    def ring(self) -> int:
        """Positions in the ring."""
        return int(self.bytes_ZRb.shape[1])


@dataclass(frozen=True, slots=True)
class EntryCache:
    """Long-range main records of one owner layer: entry e lives in block ``table[e // E]`` at offset ``e % E``.

    A flat entry slot is ``block * E + offset``. ``ratio`` tokens make one entry.
    """

    bytes_NEb: torch.Tensor
    format: RecordFormat
    ratio: int

    @property
    def entries_per_block(self) -> int:
        """Entries in one block."""
        return int(self.bytes_NEb.shape[1])


@dataclass(frozen=True, slots=True)
class IndexCache:
    """Index keys of one owner layer, sectioned within each block: first all data bytes, then all scale bytes.

    ``bytes_Nb[n]`` holds ``E * format.data_bytes`` data bytes followed by ``E * format.scale_bytes`` scale bytes.
    """

    bytes_Nb: torch.Tensor
    format: RecordFormat
    entries_per_block: int
    ratio: int


@dataclass(frozen=True, slots=True)
class PendingCache:
    """Uncompressed rows that wait for their pair: position p lives at ``rows_ZPW[z, p % P]``, W = gate then latent."""

    rows_ZPW: torch.Tensor

    @property
    def capacity(self) -> int:
        """Positions that can be pending."""
        return int(self.rows_ZPW.shape[1])
