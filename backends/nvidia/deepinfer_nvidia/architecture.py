"""GPUs by compute capability: what their matrix units can do, and what a program may use of them.

Memory rates are the vendor's figures, used for floors on paper only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Family = Literal["SM100", "SM90"]

SHARED_BYTES: Final = 232_448
"""Shared memory of one block, static and dynamic, on both families."""
TENSOR_MEMORY_COLUMNS: Final = 512
SPECIAL_TARGET: Final = "a"
"""Suffix of targets whose matrix instructions exist on that generation alone."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One generation.

    Attributes:
        family: the generation.
        target: what the compiler is asked for, 100 or 90.
        device: a product, for floors on paper.
        memory_rate_bytes_per_s: of that product.
        tensor_memory_columns: accumulator columns beside the registers; 0 where there are none.
        has_block_scaled: its matrix unit multiplies codes with a power-of-two scale per 32.
    """

    family: Family
    target: int
    device: str
    memory_rate_bytes_per_s: int
    tensor_memory_columns: int
    has_block_scaled: bool

    @property
    def name(self) -> str:
        """Name of the compiler's target, for example ``"sm_100a"``."""
        return f"sm_{self.target}{SPECIAL_TARGET}"


SM100: Final = Architecture("SM100", 100, "B200", 8 * 10**12, TENSOR_MEMORY_COLUMNS, has_block_scaled=True)
SM90: Final = Architecture("SM90", 90, "H200", 4_800 * 10**9, 0, has_block_scaled=False)
ARCHITECTURES: Final = (SM100, SM90)
"""The first choice first."""

OLDEST: Final = (9, 0)
_FAMILIES: Final = {9: SM90, 10: SM100}


def detect(capability: tuple[int, int]) -> Architecture | None:
    """Return the generation of a compute capability, or None for one that the driver does not know.

    10.0 and 10.3 are SM100. 12.x, though younger, has neither tensor memory nor tcgen05, so that none of the compiled
    forms that were checked would run on it.
    """
    return _FAMILIES.get(capability[0])


def by_name(name: str) -> Architecture | None:
    """Return the generation of a compiler's target such as ``"sm_90a"``, or None."""
    return next((each for each in ARCHITECTURES if each.name == name), None)
