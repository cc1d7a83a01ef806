"""The specimens of every op of the contract, one module per group (the paged groups share one)."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_conformance.case import Specimen
from deepinfer_conformance.cases import codec, drafting, experts, linear, memory, mixing, moves, norm, paged, sampling

_MODULES = (linear, norm, codec, paged, mixing, memory, experts, sampling, moves, drafting)


def all_specimens(seed: int) -> Iterator[Specimen]:
    """Yield every specimen; nothing is computed before one is built."""
    for module in _MODULES:
        yield from module.specimens(seed)
