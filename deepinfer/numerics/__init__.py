"""Exact host-side definitions of every number format and random number that drivers must reproduce byte for byte."""

from deepinfer.numerics.activation import fake_quant_fp8, fake_quant_mxfp4
from deepinfer.numerics.blocks import (
    QuantisedBlocks,
    dequantise_fp4_e4m3_blocks,
    dequantise_fp8_blocks,
    dequantise_mxfp4_blocks,
    quantise_fp4_e4m3_blocks,
    quantise_fp8_blocks,
    quantise_mxfp4_blocks,
)
from deepinfer.numerics.e2m1 import decode_e2m1, encode_e2m1, pack_nibbles, unpack_nibbles
from deepinfer.numerics.e4m3 import decode_e4m3, encode_e4m3
from deepinfer.numerics.e8m0 import ceil_power_code, decode_e8m0, encode_e8m0
from deepinfer.numerics.linear import (
    QuantisedWeight,
    dequantise_engram_rows,
    dequantise_fp8_weight,
    dequantise_mxfp4_weight,
    quantise_engram_table,
    quantise_fp8_weight,
    quantise_mxfp4_weight,
)
from deepinfer.numerics.philox import philox4x32_10, uniform_53
from deepinfer.numerics.records import (
    Float32Record,
    IndexRecord,
    LongRangeRecord,
    RecordFormat,
    RecordParts,
    WindowRecord,
)

__all__ = [
    "Float32Record",
    "IndexRecord",
    "LongRangeRecord",
    "QuantisedBlocks",
    "QuantisedWeight",
    "RecordFormat",
    "RecordParts",
    "WindowRecord",
    "ceil_power_code",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "dequantise_engram_rows",
    "dequantise_fp4_e4m3_blocks",
    "dequantise_fp8_blocks",
    "dequantise_fp8_weight",
    "dequantise_mxfp4_blocks",
    "dequantise_mxfp4_weight",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
    "fake_quant_fp8",
    "fake_quant_mxfp4",
    "pack_nibbles",
    "philox4x32_10",
    "quantise_engram_table",
    "quantise_fp4_e4m3_blocks",
    "quantise_fp8_blocks",
    "quantise_fp8_weight",
    "quantise_mxfp4_blocks",
    "quantise_mxfp4_weight",
    "uniform_53",
    "unpack_nibbles",
]
