"""Records to float32 by shifting their codes into the bits of a half float, many times faster than a cast a code.

An e4m3 code and a half float order their bits alike: sign, exponent, mantissa. Shifted so that the mantissas meet, the
code reads as its value times 2^-8, because the biases are 7 and 15; likewise an e2m1 code as its value times 2^-14.
The scale gets the missing power of two, so that the result is rounded where the definition rounds: in one product of
code and scale. What this cannot express (NaN codes, scales next to the largest) goes to the definition itself.

Four-bit codes lie two in a byte. Their values are returned in halves, all even channels and then all odd ones: a dot
product does not mind, and the sums over keys are put in order at the end, when they are few.

Legend: n records, b record bytes, C width, g scales of a record.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.numerics import LongRangeRecord, RecordFormat, WindowRecord, decode_e4m3, decode_e8m0

_HALF_SIGN_AND_E4M3 = -0x4080  # 0xBF80
_HALF_SIGN_AND_E2M1 = -0x7200  # 0x8E00
_LARGEST_WINDOW_SCALE = 246


def window_scales() -> Tensor:
    """Return float32 [256]: 2^8 times the scale of each code of window records."""
    return decode_e8m0(torch.arange(256, dtype=torch.uint8)) * 256.0


def long_range_scales() -> Tensor:
    """Return float32 [256]: 2^14 times the scale of each code of long-range records."""
    return decode_e4m3(torch.arange(256, dtype=torch.uint8)) * 16384.0


def halves(x: Tensor) -> Tensor:
    """Return a copy with the even channels first, then the odd ones."""
    return torch.unflatten(x, -1, (-1, 2)).transpose(-1, -2).flatten(-2)


def interleaved(x: Tensor) -> Tensor:
    """Return a copy with the channels in order again: undoes :func:`halves`."""
    return torch.unflatten(x, -1, (2, -1)).transpose(-1, -2).flatten(-2)


class QuickDecoder:
    """Decodes records of any format; keeps the two tables of scales."""

    def __init__(self) -> None:
        self._window_scales = window_scales()
        self._long_range_scales = long_range_scales()

    def window(self, records_nb: Tensor, record_format: RecordFormat) -> Tensor:
        """Return float32 [n, C], equal to ``record_format.decode``."""
        if not isinstance(record_format, WindowRecord):
            return record_format.decode(records_nb)
        codes, scales = record_format.split(records_nb.view(torch.int8))
        scales = scales.contiguous().view(torch.uint8)
        if scales.numel() == 0 or int(scales.max()) > _LARGEST_WINDOW_SCALE or int((codes & 0x7F).max()) == 0x7F:
            return record_format.decode(records_nb)
        bits = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(_HALF_SIGN_AND_E4M3)
        values = bits.view(torch.float16).to(torch.float32)
        return self._scaled(values, scales, self._window_scales, record_format.group)

    def entries(self, records_nb: Tensor, record_format: RecordFormat) -> Tensor:
        """Return float32 [n, C] with the channels in halves, otherwise equal to ``record_format.decode``."""
        if not isinstance(record_format, LongRangeRecord):
            return halves(record_format.decode(records_nb))
        packed, scales = record_format.split(records_nb)
        pairs = packed.to(torch.int16)
        bits = pairs.new_empty((*packed.shape[:-1], 2, packed.shape[-1]))
        # Sign to bit 15 and back by three: the sign's copies are masked away, exponent and mantissa lie below bit 12.
        torch.bitwise_left_shift(pairs, 12, out=bits[..., 0, :])
        torch.bitwise_left_shift(pairs, 8, out=bits[..., 1, :])
        bits.bitwise_right_shift_(3).bitwise_and_(_HALF_SIGN_AND_E2M1)
        values = bits.view(torch.float16).to(torch.float32)
        return self._scaled(values, scales, self._long_range_scales, record_format.group // 2).flatten(-2)

    def _scaled(self, values: Tensor, scales: Tensor, table: Tensor, group: int) -> Tensor:
        factors = table.index_select(0, scales.flatten().to(torch.int32)).view(scales.shape)
        if values.dim() > scales.dim():
            factors = factors.unsqueeze(-2)
        torch.unflatten(values, -1, (-1, group)).mul_(factors.unsqueeze(-1))
        return values
