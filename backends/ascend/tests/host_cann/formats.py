"""Numbers of the ACL headers: data types, layouts, chips."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch

DTYPES = MappingProxyType(
    {
        0: torch.float32, 1: torch.float16, 2: torch.int8, 3: torch.int32, 4: torch.uint8, 6: torch.int16,
        7: torch.uint16, 8: torch.uint32, 9: torch.int64, 10: torch.uint64, 11: torch.float64, 12: torch.bool,
        16: torch.complex64, 17: torch.complex128, 27: torch.bfloat16, 35: torch.float8_e5m2, 36: torch.float8_e4m3fn,
        37: torch.float8_e8m0fnu,
    }
)  # fmt: skip
"""aclDataType to the torch dtype with the same bytes."""

PACKED_NAMES = MappingProxyType({29: "int4", 40: "float4_e2m1", 41: "float4_e1m2"})
"""Types of two elements a byte, which torch keeps as uint8."""

OTHER_NAMES = MappingProxyType({30: "uint1", 33: "complex32", 34: "hifloat8", 38: "float6_e3m2", 39: "float6_e2m3"})

FORMATS = MappingProxyType(
    {-1: "UNDEFINED", 0: "NCHW", 1: "NHWC", 2: "ND", 3: "NC1HWC0", 4: "FRACTAL_Z", 16: "HWCN", 27: "NDHWC",
     29: "FRACTAL_NZ", 30: "NCDHW", 35: "NC", 47: "NCL", 50: "FRACTAL_NZ_C0_16", 51: "FRACTAL_NZ_C0_32",
     54: "FRACTAL_NZ_C0_8"}
)  # fmt: skip

PLAIN_FORMATS = frozenset({"UNDEFINED", "NCHW", "NHWC", "ND", "HWCN", "NDHWC", "NCDHW", "NC", "NCL"})
"""Layouts in which strides say everything."""


def dtype_name(code: int) -> str:
    """Return the name of an aclDataType: torch's where torch has the type."""
    if code in DTYPES:
        return str(DTYPES[code]).removeprefix("torch.")
    return PACKED_NAMES.get(code) or OTHER_NAMES.get(code) or f"aclDataType {code}"


@dataclass(frozen=True, slots=True)
class Chip:
    """What the emulated runtime reports of a chip."""

    soc: str
    cube_cores: int
    vector_cores: int
    memory_bytes: int


_GIB = 1 << 30
CHIPS = MappingProxyType(
    {
        "Ascend950PR_9599": Chip("Ascend950PR_9599", 36, 72, 128 * _GIB),
        "Ascend950DT_9591": Chip("Ascend950DT_9591", 36, 72, 144 * _GIB),
        "Ascend910B": Chip("Ascend910B3", 20, 40, 64 * _GIB),
        "Ascend910_93": Chip("Ascend910_9391", 24, 48, 64 * _GIB),
    }
)
"""Names that load() takes; the runtime reports a full product name."""
