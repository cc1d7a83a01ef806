"""Chips by name: memories of a core, numbers of cores, and what their units can compute.

Figures of a core (unified buffer, L1, L0) are what the compiler's target data says; memory rates are as reported by
the vendor at announcement, used for floors on paper only.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

Family = Literal["950PR", "950DT", "910B", "910_93"]
KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Soc:
    """One chip.

    Attributes:
        name: as the runtime names it, for example ``"Ascend950PR_9599"``.
        family: the generation and memory variant.
        cube_cores: matrix cores, 0 where this variant's number is not known here (ask the device's properties).
        vector_cores: vector cores, likewise.
        unified_buffer_bytes: on-chip memory of one vector core.
        l1_bytes: on-chip memory of one matrix core.
        l0a_bytes: left operand buffer.
        l0b_bytes: right operand buffer.
        l0c_bytes: accumulator buffer.
        block_align_bytes: alignment of a block in the unified buffer.
        memory_rate_bytes_per_s: reported memory rate, for floors on paper.
        has_mx: matrix units take MXFP8 and MXFP4 with e8m0 scales per 32.
        has_hyper_connections: npu_mhc_pre, npu_mhc_post and npu_mhc_sinkhorn exist.
        has_sqrt_softplus_gate: npu_moe_gating_top_k knows norm_type 2.
    """

    name: str
    family: Family
    cube_cores: int
    vector_cores: int
    unified_buffer_bytes: int
    l1_bytes: int
    l0a_bytes: int
    l0b_bytes: int
    l0c_bytes: int
    block_align_bytes: int
    memory_rate_bytes_per_s: int
    has_mx: bool
    has_hyper_connections: bool
    has_sqrt_softplus_gate: bool


CORES: Final = MappingProxyType(
    {
        "Ascend950PR_9599": (36, 72),
        "Ascend950PR_957b": (28, 56),
        "Ascend950PR_950z": (4, 8),
        "Ascend950DT_9591": (36, 72),
        "Ascend950DT_9571": (28, 56),
        "Ascend950DT_950x": (8, 16),
        "Ascend910B3": (20, 40),
    }
)
"""Matrix and vector cores of the variants that are known by name."""

_PREFIXES: Final[tuple[tuple[str, Family], ...]] = (
    ("Ascend950PR", "950PR"),
    ("Ascend950DT", "950DT"),
    ("Ascend910B", "910B"),
    ("Ascend910_93", "910_93"),
)
_GB_PER_S: Final = MappingProxyType({"950PR": 1600, "950DT": 4000, "910B": 1600, "910_93": 1600})
DEFAULT_NAMES: Final = ("Ascend950PR_9599", "Ascend950DT_9591", "Ascend910B3", "Ascend910_9392")
"""One name of each family, for checks without a device."""


def supported_families() -> tuple[Family, ...]:
    """Return the families that this driver knows, the first choice first."""
    return tuple(family for _, family in _PREFIXES)


def detect(name: str) -> Soc | None:
    """Return the chip with this name, or None when it is of no family that the driver knows.

    A variant whose number of cores is not in the table has 0 cores; nothing is planned from that number.
    """
    for prefix, family in _PREFIXES:
        if name.startswith(prefix):
            return _soc(name, family)
    return None


def _soc(name: str, family: Family) -> Soc:
    cube_cores, vector_cores = CORES.get(name, (0, 0))
    is_950 = family in ("950PR", "950DT")
    return Soc(
        name=name,
        family=family,
        cube_cores=cube_cores,
        vector_cores=vector_cores,
        unified_buffer_bytes=(248 if is_950 else 192) * KIB,
        l1_bytes=512 * KIB,
        l0a_bytes=64 * KIB,
        l0b_bytes=64 * KIB,
        l0c_bytes=(256 if is_950 else 128) * KIB,
        block_align_bytes=32,
        memory_rate_bytes_per_s=_GB_PER_S[family] * 10**9,
        has_mx=is_950,
        has_hyper_connections=is_950,
        has_sqrt_softplus_gate=is_950,
    )
