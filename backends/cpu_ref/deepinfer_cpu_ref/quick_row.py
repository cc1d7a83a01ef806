"""Attention of a single row: only the keys that it sees are read, decoded in numpy, and multiplied once.

A step of one row a request has so little to compute that a second thread costs more than it brings, and a call into
numpy costs less than one into torch. The keys of the window and of the entries lie in one buffer, so that there are
two products in all.

Legend: H heads, C head width, R ring, n keys, b record bytes, g scales of a record.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.numerics import LongRangeRecord, RecordFormat, WindowRecord, decode_e2m1, decode_e4m3, unpack_nibbles
from deepinfer_cpu_ref.quick_scratch import Scratch

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_CODE_TO_FLOAT_SHIFT = 20
_SIGN_EXPONENT_MANTISSA = np.int32(-0x7810_0000)  # 0x87F00000: where a code's bits lie in a float32 then
_SCALE_BIAS = 120
"""A code read so is its value times 2^-120, because the biases are 7 and 127."""
_LARGEST_SCALE = 134
_NAN_CODE = 0x7F
_MANTISSA_BITS = 23
_BYTE_VALUES = 256


class _Records(NamedTuple):
    records_nb: Bytes
    record_format: RecordFormat


class RowAttention:
    """Attends row by row; keeps two small tables and the memory for the keys."""

    def __init__(self) -> None:
        codes = torch.arange(_BYTE_VALUES, dtype=torch.uint8)
        # The two values of a byte are moved as one complex number.
        self._pairs = decode_e2m1(unpack_nibbles(codes)).numpy().view(np.complex64)
        self._scales = decode_e4m3(codes).numpy()
        self._scratch = Scratch()

    def attend(
        self,
        query_HC: Tensor,
        window: WindowCache,
        long_range: LongRange | None,
        sinks_H: Tensor,
        window_size: int,
        step: StepLayout,
        row: int,
    ) -> Tensor | None:
        """Return the output [H, C] of one row of a decode step, or None where it sees no key of the window.

        Row ``row`` is the only one of request ``row``.
        """
        position = int(step.position_T[row])
        oldest = max(int(step.window_start_R[row]), position - min(window_size, window.ring) + 1, 0)
        if oldest > position:
            return None
        ring_Rb: Bytes = window.bytes_ZRb[int(step.state_slots_R[row])].numpy()
        read = [_Records(ring_Rb[np.arange(oldest, position + 1) % window.ring], window.format)]
        if long_range is not None:
            entry_n = long_range.entries_TK[row].numpy()
            entry_n = entry_n[entry_n >= 0]
            cache = long_range.cache
            block_n = step.block_table_RB[row].numpy()[entry_n // cache.entries_per_block]
            read.append(_Records(cache.bytes_NEb.numpy()[block_n, entry_n % cache.entries_per_block], cache.format))
        count, width = sum(len(part.records_nb) for part in read), query_HC.shape[1]
        keys_nC = self._scratch.take("keys", (count, width), torch.float32)
        start = 0
        for part in read:
            stop = start + len(part.records_nb)
            self.decode(part.records_nb, part.record_format, keys_nC[start:stop].numpy())
            start = stop
        scores_Hn = query_HC.new_empty((len(query_HC), count + 1))
        torch.mm(query_HC * width**-0.5, keys_nC.t(), out=scores_Hn[:, :count])
        scores_Hn[:, count] = sinks_H
        _softmax(scores_Hn.numpy())
        return torch.mm(scores_Hn[:, :count], keys_nC)

    def decode(self, records_nb: Bytes, record_format: RecordFormat, keys_nC: Floats) -> None:
        """Write what records decode to, bit for bit what ``record_format.decode`` returns."""
        if isinstance(record_format, LongRangeRecord):
            self._decode_long_range(records_nb, record_format, keys_nC)
        elif not (isinstance(record_format, WindowRecord) and _decode_window(records_nb, record_format, keys_nC)):
            keys_nC[:] = record_format.decode(torch.from_numpy(records_nb)).numpy()

    @np.errstate(all="ignore")
    def _decode_long_range(self, records_nb: Bytes, record_format: LongRangeRecord, keys_nC: Floats) -> None:
        data = record_format.data_bytes
        place_n = self._scratch.take("places", (len(records_nb), data), torch.int64).numpy()
        np.copyto(place_n, records_nb[:, :data])
        # Every byte has a place; "clip" spares a copy.
        self._pairs.take(place_n, out=keys_nC.view(np.complex64), mode="clip")
        blocks = keys_nC.reshape(len(records_nb), record_format.width // record_format.group, record_format.group)
        blocks *= self._scales[records_nb[:, data:]][:, :, None]


@np.errstate(all="ignore")  # a score that is not finite spoils its own head
def _softmax(scores_Hn: Floats) -> None:
    """In place. Numpy's own: so few numbers do not pay for waking a second thread."""
    np.subtract(scores_Hn, scores_Hn.max(1, keepdims=True), out=scores_Hn)
    np.exp(scores_Hn, out=scores_Hn)
    np.divide(scores_Hn, scores_Hn.sum(1, keepdims=True), out=scores_Hn)


@np.errstate(all="ignore")
def _decode_window(records_nb: Bytes, record_format: WindowRecord, keys_nC: Floats) -> bool:
    """Decode what has neither NaN nor a huge scale, and say whether that was all."""
    codes_nC, scales_ng = records_nb[:, : record_format.data_bytes], records_nb[:, record_format.data_bytes :]
    if scales_ng.max(initial=0) > _LARGEST_SCALE or (codes_nC & _NAN_CODE).max(initial=0) == _NAN_CODE:
        return False
    bits_nC = keys_nC.view(np.int32)
    np.copyto(bits_nC, codes_nC.view(np.int8))
    np.left_shift(bits_nC, _CODE_TO_FLOAT_SHIFT, out=bits_nC)
    # The sign's copies between sign and exponent go.
    np.bitwise_and(bits_nC, _SIGN_EXPONENT_MANTISSA, out=bits_nC)
    factor_ng = ((scales_ng.astype(np.int32) + _SCALE_BIAS) << _MANTISSA_BITS).view(np.float32)
    blocks = keys_nC.reshape(len(records_nb), record_format.width // record_format.group, record_format.group)
    blocks *= factor_ng[:, :, None]
    return True
