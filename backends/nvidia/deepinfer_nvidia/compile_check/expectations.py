"""Hot kernels, and the matrix instructions without which they are not what they were written to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from deepinfer_nvidia.architecture import SM100
from deepinfer_triton.configuration import Configuration

BLOCK_SCALED: Final = "block_scale"
"""Part of the name of every tcgen05 instruction that applies a scale per block of 32 itself."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What one compiled form of a hot kernel must contain.

    Attributes:
        any_of: opcodes of the binary, of which one must occur.
        ptx: text that the name of a PTX matrix instruction must contain; empty for none.
    """

    any_of: tuple[str, ...]
    ptx: str = ""


TCGEN05: Final = Expectation(("UTCHMMA", "UTCQMMA", "UTCOMMA"))
TCGEN05_CODES: Final = Expectation(("UTCQMMA", "UTCOMMA"), BLOCK_SCALED)
WGMMA: Final = Expectation(("HGMMA", "QGMMA"))


LEAST_WIDE_CHANNELS: Final = 256
LEAST_WIDE_HEADS: Final = 64
"""Rows of the matrix units: attention of a smaller model is not hot and takes what fits."""

_TILED: Final = ("dense_kernel", "gate_up_kernel", "down_kernel")
_CODES, _BFLOAT16 = 0, 1


def expectation_of(configuration: Configuration, target: int) -> Expectation | None:
    """Return what a form must contain on a target, or None for a form that is not hot.

    Hot are the forms of served numerics: experts, dense and grouped products, attention, index scores.
    """
    found: Expectation | None = None
    constants = configuration.constants
    if configuration.name in _TILED:
        found = {_CODES: TCGEN05_CODES, _BFLOAT16: TCGEN05}.get(int(constants["PRODUCT"]))
    elif configuration.name == "served_attention_kernel":
        is_wide = constants["WIDTH"] >= LEAST_WIDE_CHANNELS and constants["HEADS"] >= LEAST_WIDE_HEADS
        found = TCGEN05 if is_wide else None
    elif configuration.name == "index_scores_kernel":
        found = TCGEN05 if configuration.signature["memory_ptr"] == "*u8" else None
    return WGMMA if found is not None and target < SM100.target else found


def problems(expected: Expectation, opcodes: Mapping[str, int], ptx: Mapping[str, int]) -> list[str]:
    """Return what is missing, one sentence each."""
    found = []
    if not any(opcodes.get(name) for name in expected.any_of):
        there = ", ".join(f"{name} x{count}" for name, count in sorted(opcodes.items())) or "no matrix instruction"
        found.append(f"no {' or '.join(expected.any_of)}; it has {there}")
    if expected.ptx and not any(expected.ptx in name for name in ptx):
        found.append(f"no matrix instruction with {expected.ptx!r}; its PTX has {', '.join(ptx) or 'none'}")
    return found
