"""The codec ops for the few records of a decode step: window records in numpy, and nothing where nothing is stored.

Legend: T rows, C record width, b record bytes, g scales of a record.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer.accelerator.caches import EntryCache, IndexCache, WindowCache
from deepinfer.numerics import RecordFormat, WindowRecord
from deepinfer_cpu_ref.codec import CpuRefCodec

LARGEST_NUMPY = 16_384
"""More values are encoded by torch, whose kernels use every thread."""

FEW_ROWS = 4
"""So many records are stored one by one."""

_LEAST_LARGEST = np.float32(1e-4)
_LARGEST_CODE_VALUE = np.float32(448.0)
_MANTISSA_BITS = 23
_FULL_MANTISSA = (1 << _MANTISSA_BITS) - 1
_TWICE_BIAS = 254


class QuickCodec(CpuRefCodec):
    """The readable bytes; what is not finite, not float32 or large goes to the readable ops."""

    @np.errstate(all="ignore")  # what is not finite is found below
    def encode(self, x_TC: Tensor, record_format: RecordFormat) -> Tensor:
        """See :meth:`CodecOps.encode`."""
        width = record_format.width
        suits = isinstance(record_format, WindowRecord) and x_TC.dtype == torch.float32 and x_TC.dim() == 2
        if not suits or x_TC.shape[1] != width or not 0 < x_TC.numel() <= LARGEST_NUMPY:
            return super().encode(x_TC, record_format)
        x_TgC = x_TC.contiguous().numpy().reshape(len(x_TC), width // record_format.group, record_format.group)
        largest_Tg = np.abs(x_TgC).max(2)
        if not np.isfinite(largest_Tg).all():
            return super().encode(x_TC, record_format)
        # The power of two that is not below the quotient: a carry out of the mantissa raises the exponent. The floor
        # keeps every scale a normal float32, and its reciprocal too.
        quotient_Tg = np.maximum(largest_Tg, _LEAST_LARGEST) / _LARGEST_CODE_VALUE
        scale_Tg = (quotient_Tg.view(np.int32) + np.int32(_FULL_MANTISSA)) >> _MANTISSA_BITS
        reciprocal_Tg = ((_TWICE_BIAS - scale_Tg) << _MANTISSA_BITS).astype(np.int32).view(np.float32)
        codes_TC = torch.from_numpy((x_TgC * reciprocal_Tg[:, :, None]).reshape(len(x_TC), width))
        records_Tb = np.empty((len(x_TC), record_format.nbytes), dtype=np.uint8)
        records_Tb[:, :width] = codes_TC.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        records_Tb[:, width:] = scale_Tg
        return torch.from_numpy(records_Tb)

    def store_window(self, cache: WindowCache, records_Tb: Tensor, slot_T: Tensor) -> None:
        """See :meth:`CodecOps.store_window`."""
        if len(slot_T) > FEW_ROWS or records_Tb.shape != (len(slot_T), cache.format.nbytes):
            super().store_window(cache, records_Tb, slot_T)
            return
        for slot, record_b in zip(slot_T.tolist(), records_Tb, strict=True):
            if slot >= 0:
                cache.bytes_ZRb[slot // cache.ring, slot % cache.ring] = record_b

    def store_entries(self, cache: EntryCache, x_TC: Tensor, slot_T: Tensor) -> None:
        """See :meth:`CodecOps.store_entries`."""
        if x_TC.shape[-1] != cache.format.width or _anything_stored(slot_T):
            super().store_entries(cache, x_TC, slot_T)

    def store_index_keys(self, cache: IndexCache, x_TC: Tensor, slot_T: Tensor) -> None:
        """See :meth:`CodecOps.store_index_keys`."""
        if x_TC.shape[-1] != cache.format.width or _anything_stored(slot_T):
            super().store_index_keys(cache, x_TC, slot_T)


def _anything_stored(slot_T: Tensor) -> bool:
    return bool((slot_T.numpy() >= 0).any())
