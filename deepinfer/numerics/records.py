"""Byte layouts of one cached position: element bytes first, then scale bytes.

================ ====================================== =============== =====================
record           layout for width w                     width, released bytes, released
================ ====================================== =============== =====================
WindowRecord     w E4M3, w / 32 UE8M0                   512             512 + 16 = 528
LongRangeRecord  w / 2 bytes of E2M1 pairs, w / 16 E4M3 512             256 + 32 = 288
IndexRecord      w / 2 bytes of E2M1 pairs, w / 32 UE8M0 128            64 + 4 = 68
Float32Record    w float32 in the host's byte order     any             4 * w
================ ====================================== =============== =====================

Inside a cache block, index records are stored in two sections (all data, then all scales); `RecordFormat.split` and
`RecordFormat.block_sections` serve that layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from deepinfer.errors import ArgumentError, ConfigurationError
from deepinfer.numerics._tensors import as_float32, as_uint8
from deepinfer.numerics.blocks import (
    FP4_E4M3_GROUP,
    FP8_GROUP,
    MXFP4_GROUP,
    dequantise_fp4_e4m3_blocks,
    dequantise_fp8_blocks,
    dequantise_mxfp4_blocks,
    quantise_fp4_e4m3_blocks,
    quantise_fp8_blocks,
    quantise_mxfp4_blocks,
)


class RecordParts(NamedTuple):
    """The two sections of records, as bytes.

    Attributes:
        data: uint8 ``[..., data_bytes]``.
        scales: uint8 ``[..., scale_bytes]``.
    """

    data: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class RecordFormat(ABC):
    """How one vector of ``width`` values is stored; formats of the same class and width are equal.

    Attributes:
        width: number of values per record.
        name: the format's name in plans and messages.
        element_bits: bits per value.
        group: number of values per scale; the width must be a multiple of it.
        bytes_per_scale: 1, or 0 for a format without scales.
    """

    width: int

    name: ClassVar[str]
    element_bits: ClassVar[int]
    group: ClassVar[int]
    bytes_per_scale: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.width <= 0 or self.width % self.group:
            problem = f"width {self.width} is not a positive multiple of {self.group}"
            raise ConfigurationError(f"{self.name} record", [problem])

    @property
    def data_bytes(self) -> int:
        """Element bytes of one record."""
        return self.width * self.element_bits // 8

    @property
    def scale_bytes(self) -> int:
        """Scale bytes of one record."""
        return self.width // self.group * self.bytes_per_scale

    @property
    def nbytes(self) -> int:
        """All bytes of one record."""
        return self.data_bytes + self.scale_bytes

    def encode_parts(self, x: Tensor) -> RecordParts:
        """Encodes ``x [..., width]`` (float32, bfloat16, or float64 rounded to float32) into new data and scale bytes.

        Raises:
            ArgumentError: if the last dimension is not ``width`` or the dtype is not a supported float.
        """
        self._check_last(x, self.width, "values")
        return self._quantise(x)

    def decode_parts(self, parts: RecordParts) -> Tensor:
        """Returns new float32 ``[..., width]`` from data and scale bytes.

        Raises:
            ArgumentError: if the parts do not have this format's sizes or are not uint8.
        """
        self._check_last(parts.data, self.data_bytes, "data")
        self._check_last(parts.scales, self.scale_bytes, "scales")
        what = f"{self.name} record"
        return self._dequantise(as_uint8(parts.data, what), as_uint8(parts.scales, what))

    def encode(self, x: Tensor) -> Tensor:
        """Returns new uint8 ``[..., nbytes]`` from ``x [..., width]``; otherwise as `encode_parts`."""
        return self.join(self.encode_parts(x))

    def decode(self, records: Tensor) -> Tensor:
        """Returns new float32 ``[..., width]`` from uint8 ``[..., nbytes]`` of any strides and alignment.

        Raises:
            ArgumentError: if the last dimension is not ``nbytes`` or the dtype is not uint8.
        """
        return self.decode_parts(self.split(records))

    def round_trip(self, x: Tensor) -> Tensor:
        """Returns new float32 ``[..., width]``: what a reader of the cache sees after ``x`` was stored."""
        return self.decode_parts(self.encode_parts(x))

    def split(self, records: Tensor) -> RecordParts:
        """Returns views on the data and the scales of records ``[..., nbytes]``.

        Raises:
            ArgumentError: if the last dimension is not ``nbytes``.
        """
        self._check_last(records, self.nbytes, "records")
        return RecordParts(records[..., : self.data_bytes], records[..., self.data_bytes :])

    def join(self, parts: RecordParts) -> Tensor:
        """Returns new ``[..., nbytes]`` with the data followed by the scales."""
        return torch.cat((parts.data, parts.scales), dim=-1)

    def block_sections(self, block: Tensor, records: int) -> RecordParts:
        """Returns views ``[..., records, data_bytes]`` and ``[..., records, scale_bytes]`` on a sectioned cache block.

        Args:
            block: bytes ``[..., records * nbytes]``: the data of every record, then the scales of every record.
            records: number of records in a block.

        Raises:
            ArgumentError: if the block does not have exactly ``records`` records.
        """
        self._check_last(block, records * self.nbytes, f"a block of {records} records")
        data_end = records * self.data_bytes
        return RecordParts(
            block[..., :data_end].view(*block.shape[:-1], records, self.data_bytes),
            block[..., data_end:].view(*block.shape[:-1], records, self.scale_bytes),
        )

    def _check_last(self, x: Tensor, size: int, what: str) -> None:
        if x.dim() == 0 or x.shape[-1] != size:
            problem = f"{what} for width {self.width} must end in {size}, shape is {tuple(x.shape)}"
            raise ArgumentError(f"{self.name} record", [problem])

    @abstractmethod
    def _quantise(self, x: Tensor) -> RecordParts: ...

    @abstractmethod
    def _dequantise(self, data: Tensor, scales: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class WindowRecord(RecordFormat):
    """fp8 with a UE8M0 scale per 32 values: keys and values of the window.

    A NaN or an infinity makes its own block of 32 NaN (scale 255, elements 0x7F) and touches no other.
    """

    name: ClassVar[str] = "window"
    element_bits: ClassVar[int] = 8
    group: ClassVar[int] = FP8_GROUP

    def _quantise(self, x: Tensor) -> RecordParts:
        return RecordParts(*quantise_fp8_blocks(x, self.group))

    def _dequantise(self, data: Tensor, scales: Tensor) -> Tensor:
        return dequantise_fp8_blocks(data, scales, self.group)


@dataclass(frozen=True, slots=True)
class LongRangeRecord(RecordFormat):
    """4-bit values with an E4M3 scale per 16: compressed keys and values.

    A NaN makes its own block of 16 NaN (scale 0x7F, elements 0). Magnitudes beyond 2688, infinities included, saturate.
    """

    name: ClassVar[str] = "long_range"
    element_bits: ClassVar[int] = 4
    group: ClassVar[int] = FP4_E4M3_GROUP

    def _quantise(self, x: Tensor) -> RecordParts:
        return RecordParts(*quantise_fp4_e4m3_blocks(x, self.group))

    def _dequantise(self, data: Tensor, scales: Tensor) -> Tensor:
        return dequantise_fp4_e4m3_blocks(data, scales, self.group)


@dataclass(frozen=True, slots=True)
class IndexRecord(RecordFormat):
    """4-bit values with a UE8M0 scale per 32: index keys.

    A NaN or an infinity makes its own block of 32 NaN (scale 255, elements 0) and touches no other.
    """

    name: ClassVar[str] = "index"
    element_bits: ClassVar[int] = 4
    group: ClassVar[int] = MXFP4_GROUP

    def _quantise(self, x: Tensor) -> RecordParts:
        return RecordParts(*quantise_mxfp4_blocks(x, self.group))

    def _dequantise(self, data: Tensor, scales: Tensor) -> Tensor:
        return dequantise_mxfp4_blocks(data, scales, self.group)


@dataclass(frozen=True, slots=True)
class Float32Record(RecordFormat):
    """Unquantised float32, every bit kept: any of the three caches when their quantisation is off."""

    name: ClassVar[str] = "float32"
    element_bits: ClassVar[int] = 32
    group: ClassVar[int] = 1
    bytes_per_scale: ClassVar[int] = 0

    def _quantise(self, x: Tensor) -> RecordParts:
        # A copy even when nothing converts: a record must never alias the values that it was made from.
        data = as_float32(x, "float32 record").clone(memory_format=torch.contiguous_format).view(torch.uint8)
        return RecordParts(data, data[..., self.data_bytes :])

    def _dequantise(self, data: Tensor, scales: Tensor) -> Tensor:  # noqa: ARG002
        # A copy, because bytes inside a larger record need not be aligned to four.
        return data.clone(memory_format=torch.contiguous_format).view(torch.float32)
