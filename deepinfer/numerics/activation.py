"""Round trips of activations: the values that a quantised matrix product would see, in the dtype of the input.

Both results have at most four mantissa bits, so they are exact in bfloat16, float32 and float64 wherever they are
normal numbers. What is not finite becomes NaN for its own block, see `deepinfer.numerics.blocks`.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer.numerics.blocks import (
    FP8_GROUP,
    MXFP4_GROUP,
    dequantise_fp8_blocks,
    dequantise_mxfp4_blocks,
    quantise_fp8_blocks,
    quantise_mxfp4_blocks,
)


def fake_quant_fp8(x: Tensor, group: int = FP8_GROUP) -> Tensor:
    """Returns ``x [..., width]`` after the fp8 activation codec and back: the input of every served-mode linear.

    Raises:
        ArgumentError: if the width is not a multiple of ``group`` or the dtype is not a supported float.
    """
    quantised = quantise_fp8_blocks(x, group)
    return dequantise_fp8_blocks(quantised.codes, quantised.scales, group).to(x.dtype)


def fake_quant_mxfp4(x: Tensor, group: int = MXFP4_GROUP) -> Tensor:
    """Returns ``x [..., width]`` after the mxfp4 codec and back: what an index query is scored with.

    Raises:
        ArgumentError: if the width is not a multiple of ``group``, is odd, or the dtype is not a supported float.
    """
    quantised = quantise_mxfp4_blocks(x, group)
    return dequantise_mxfp4_blocks(quantised.codes, quantised.scales, group).to(x.dtype)
