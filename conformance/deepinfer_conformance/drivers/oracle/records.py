"""Cache records of the oracle: the row's three integers at the head, a check of them at the tail.

Head: id, digest and rotation as little-endian int32 in the first 12 data bytes. Tail: the low bytes of a check of the
three in the last scale bytes (in the last data bytes for a format without scales), at most 4. A record of which only
a part was copied, or that another record overlaps, does not fit its own check: that is its damage.

Legend: T rows, C width, E entries per block, b record bytes, n records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer.errors import OpRefusedError
from deepinfer.numerics import RecordFormat
from deepinfer_conformance.drivers.oracle.hashing import CHANNELS, Hashes, Integers, linear_of

Bytes = npt.NDArray[np.uint8]

HEAD_BYTES = 4 * CHANNELS
_HEAD = np.dtype("<i4")
_CHECK_SHIFT = np.uint64(24)


@dataclass(frozen=True, slots=True)
class ReadRecords:
    """What records hold.

    Attributes:
        linear: [...], `linear_of` their three integers.
        damage: [...], 0 where the check fits.
    """

    linear: Hashes
    damage: Hashes


def check_type(record_format: RecordFormat) -> np.dtype[np.unsignedinteger]:
    """Return the type of the check; OpRefusedError if the format is too narrow for the oracle."""
    size = record_format.scale_bytes or 4
    check: np.dtype[np.unsignedinteger] = np.dtype("<u4" if size >= 4 else "<u2" if size >= 2 else "<u1")
    room = record_format.data_bytes - (0 if record_format.scale_bytes else check.itemsize)
    if room < HEAD_BYTES:
        raise OpRefusedError(
            f"the oracle keeps {HEAD_BYTES} bytes in a record's data; format {record_format.name!r} of width "
            f"{record_format.width} has room for {room}. Use a wider configuration."
        )
    return check


def packed(words_T3: Integers, record_format: RecordFormat) -> Bytes:
    """Return the records [T, b] of triples."""
    check = check_type(record_format)
    narrow_T3 = words_T3.astype(_HEAD)
    records_Tb = np.zeros((words_T3.shape[0], record_format.nbytes), dtype=np.uint8)
    records_Tb[:, :HEAD_BYTES].view(_HEAD)[...] = narrow_T3
    checks_T = linear_of(narrow_T3.astype(np.int64)) >> _CHECK_SHIFT
    records_Tb[:, -check.itemsize :].view(check)[:, 0] = checks_T.astype(check)
    return records_Tb


def read(records: Bytes, record_format: RecordFormat) -> ReadRecords:
    """Return what records [..., b] hold."""
    return read_sections(records, records, record_format)


def read_sections(data: Bytes, ends: Bytes, record_format: RecordFormat) -> ReadRecords:
    """Return what records hold whose heads begin ``data`` [..., any] and whose checks end ``ends`` [..., any]."""
    check = check_type(record_format)
    linear = linear_of(data[..., :HEAD_BYTES].view(_HEAD).astype(np.int64))
    found = ends[..., -check.itemsize :].view(check)[..., 0].astype(np.uint64)
    wanted = (linear >> _CHECK_SHIFT) & np.uint64((1 << (8 * check.itemsize)) - 1)
    return ReadRecords(linear, found ^ wanted)


def unpacked(heads_nb: Bytes, record_format: RecordFormat) -> npt.NDArray[np.float32]:
    """Return rows [n, C] with the three integers of records in their first channels."""
    rows_nC = np.zeros((heads_nb.shape[0], record_format.width), dtype=np.float32)
    rows_nC[:, :CHANNELS] = heads_nb[:, :HEAD_BYTES].view(_HEAD)
    return rows_nC


@dataclass(frozen=True, slots=True)
class KeySections:
    """The two sections of the index keys of every block, as views.

    Attributes:
        data: [blocks, E, data bytes].
        scales: [blocks, E, scale bytes]; no bytes for a format without scales.
    """

    data: Bytes
    scales: Bytes

    @classmethod
    def of(cls, blocks: Bytes, entries: int, record_format: RecordFormat) -> KeySections:
        """Return the sections of blocks [blocks, E * b]."""
        end = entries * record_format.data_bytes
        shape = (blocks.shape[0], entries)
        return cls(
            data=blocks[:, :end].reshape(*shape, record_format.data_bytes),
            scales=blocks[:, end:].reshape(*shape, record_format.scale_bytes),
        )
