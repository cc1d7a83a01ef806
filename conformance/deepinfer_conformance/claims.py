"""Whether a case lies inside what the driver claims, and how its op is executed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from deepinfer.accelerator import Capabilities
from deepinfer_conformance.case import Case
from deepinfer_conformance.outcomes import Level

HOW_WORDS = ("interpreted", "emulated")
"""A provider that begins with one of these says that its results are no run on the device."""


class Standing(Enum):
    """What a case may ask of a driver."""

    CLAIMED = "claimed"
    OUTSIDE = "outside"
    """The op is claimed, but not for this dtype, numerics, format or size: it must refuse."""
    NOT_CLAIMED = "not claimed"


@dataclass(frozen=True, slots=True)
class Answer:
    """Where a case stands, and why it is not inside the claims."""

    standing: Standing
    why: str = ""


def standing(case: Case, capabilities: Capabilities) -> Answer:
    """Return where a case stands."""
    if case.level is Level.L3 and not capabilities.collectives:
        return Answer(Standing.NOT_CLAIMED, "no collective backend is claimed: one rank")
    if case.level is Level.L4 and case.check == "graph" and not capabilities.graphs:
        return Answer(Standing.NOT_CLAIMED, "graphs: none")
    if not case.op:
        return Answer(Standing.CLAIMED)
    claim = capabilities.ops.get(case.op)
    if claim is None:
        if case.op in capabilities.declared_fallbacks:
            return Answer(Standing.NOT_CLAIMED, "declared fallback: runs on cpu_ref")
        return Answer(Standing.NOT_CLAIMED, "the driver does not offer this op")
    outside = []
    options = case.options
    if options.activation_dtype not in claim.dtypes:
        outside.append(f"dtype {str(options.activation_dtype).removeprefix('torch.')}")
    if options.numerics not in claim.numerics:
        outside.append(f"numerics {options.numerics!r}")
    if options.kv_cache_dtype not in claim.kv_formats:
        outside.append(f"cache format {options.kv_cache_dtype!r}")
    outside += [
        f"{name} {size} above {claim.largest[name]}"
        for name, size in case.extents.items()
        if name in claim.largest and size > claim.largest[name]
    ]
    if outside:
        return Answer(Standing.OUTSIDE, f"not claimed: {', '.join(outside)}")
    if claim.repeatability < case.needs:
        return Answer(Standing.NOT_CLAIMED, f"claims R{int(claim.repeatability)}, this needs R{int(case.needs)}")
    if case.level is Level.L4 and case.check == "graph" and not claim.graph_safe:
        return Answer(Standing.NOT_CLAIMED, "the op is not graph-safe")
    return Answer(Standing.CLAIMED)


def how(case: Case, capabilities: Capabilities) -> str:
    """Return "device", "interpreted" or "emulated": what computed the case."""
    providers = [capabilities.ops[case.op].provider] if case.op in capabilities.ops else []
    if not case.op:
        providers = [claim.provider for claim in capabilities.ops.values()]
    for word in HOW_WORDS:
        if any(provider.startswith(word) for provider in providers):
            return word
    return "device"
