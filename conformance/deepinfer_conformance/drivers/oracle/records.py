"""Cache records of the oracle: the row's three integers at the head, a check of them at the tail.

Head: id, digest and rotation as little-endian int32 in the first 12 data bytes. Tail: the low bytes of a check of the
three in the last scale bytes (in the last data bytes for a format without scales), at most 4. A record of which only
a part was copied, or that another record overlaps, does not fit its own check: that is its damage.

Legend: T rows, N blocks, E entries per block, b record bytes, n records.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from deepinfer.accelerator.caches import IndexCache
from deepinfer.errors import OpRefusedError
from deepinfer.numerics import RecordFormat, RecordParts
from deepinfer_conformance.drivers.oracle.hashing import CHANNELS, linear_of

HEAD_BYTES = 4 * CHANNELS
_MOST_TAIL_BYTES = 4
_CHECK_SHIFT = 24
_TAIL_FACTORS = torch.tensor([1 << (8 * byte) for byte in range(_MOST_TAIL_BYTES)])


@dataclass(frozen=True, slots=True)
class ReadRecords:
    """What records hold.

    Attributes:
        linear: int64 [...], `linear_of` their three integers.
        damage: int64 [...], 0 where the check fits.
    """

    linear: torch.Tensor
    damage: torch.Tensor


def tail_bytes(record_format: RecordFormat) -> int:
    """Return how many bytes the check has; OpRefusedError if the format is too narrow for the oracle."""
    scales = record_format.scale_bytes
    tail = min(_MOST_TAIL_BYTES, scales or _MOST_TAIL_BYTES)
    room = record_format.data_bytes - (0 if scales else tail)
    if room < HEAD_BYTES or sys.byteorder != "little":
        raise OpRefusedError(
            f"the oracle keeps {HEAD_BYTES} bytes in a record's data on a little-endian host; format "
            f"{record_format.name!r} of width {record_format.width} has {room} bytes on a {sys.byteorder}-endian one. "
            f"Use a wider configuration."
        )
    return tail


def packed(x_TC: torch.Tensor, record_format: RecordFormat) -> torch.Tensor:
    """Return the records uint8 [T, b] of rows."""
    tail = tail_bytes(record_format)
    words_T3 = x_TC[:, :CHANNELS].to(torch.int64).to(torch.int32)
    check_T1 = (linear_of(words_T3.to(torch.int64)) >> _CHECK_SHIFT)[:, None].contiguous()
    records_Tb = x_TC.new_zeros((x_TC.shape[0], record_format.nbytes), dtype=torch.uint8)
    records_Tb[:, :HEAD_BYTES] = words_T3.contiguous().view(torch.uint8)
    records_Tb[:, -tail:] = check_T1.view(torch.uint8)[:, :tail]
    return records_Tb


def read(heads: torch.Tensor, tails: torch.Tensor) -> ReadRecords:
    """Return what head bytes [..., 12] and tail bytes [..., t] hold."""
    tail = tails.shape[-1]
    linear = linear_of(heads.contiguous().view(torch.int32).to(torch.int64))
    check = (linear >> _CHECK_SHIFT) & ((1 << (8 * tail)) - 1)
    found = (tails.to(torch.int64) * _TAIL_FACTORS[:tail]).sum(-1)
    return ReadRecords(linear, found ^ check)


def read_whole(records: torch.Tensor, record_format: RecordFormat) -> ReadRecords:
    """Return what records uint8 [..., b] hold."""
    return read(records[..., :HEAD_BYTES], records[..., -tail_bytes(record_format) :])


def unpacked(records_nb: torch.Tensor, record_format: RecordFormat) -> torch.Tensor:
    """Return float32 [n, C] rows with the three integers of records in their first channels."""
    rows_nC = records_nb.new_zeros((records_nb.shape[0], record_format.width), dtype=torch.float32)
    rows_nC[:, :CHANNELS] = records_nb[:, :HEAD_BYTES].contiguous().view(torch.int32)
    return rows_nC


def key_sections(cache: IndexCache) -> RecordParts:
    """Return views [N, E, data] and [N, E, scales] on the index keys of every block."""
    return cache.format.block_sections(cache.bytes_Nb, cache.entries_per_block)


def read_keys(cache: IndexCache, blocks: torch.Tensor, offsets: torch.Tensor) -> ReadRecords:
    """Return what index keys hold; blocks and offsets broadcast."""
    sections, tail = key_sections(cache), tail_bytes(cache.format)
    heads = sections.data[..., :HEAD_BYTES][blocks, offsets]
    ends = sections.scales if cache.format.scale_bytes else sections.data
    return read(heads, ends[..., -tail:][blocks, offsets])
