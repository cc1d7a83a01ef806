"""What a driver can do, as frozen data with conservative defaults, read before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Literal

import torch

Numerics = Literal["portable", "served"]
KvCacheDtype = Literal["released", "float32"]


class Repeatability(IntEnum):
    """Repeatability levels of engine.md section 7; each level includes the lower ones."""

    NONE = 0
    RUN_TO_RUN = 1
    BATCH_INVARIANT = 2
    PLACEMENT_INVARIANT = 3
    SPECULATION_INVARIANT = 4


@dataclass(frozen=True, slots=True)
class OpCapability:
    """What a driver claims for one op.

    Attributes:
        dtypes: activation dtypes that the op accepts.
        numerics: numerics modes in which the op may be used.
        kv_formats: cache formats that the op reads and writes; irrelevant for ops without a cache.
        largest: largest supported value per named dimension, for example ``{"top_k": 512}``; absent = unlimited.
        graph_safe: the op may be recorded into a graph.
        repeatability: the strongest level that the op keeps when it is demanded (``OpOptions.batch_invariant``);
            without the demand only R1 is promised.
        provider: who computes it, for the plan ("native" or a library's name).
    """

    dtypes: frozenset[torch.dtype] = frozenset({torch.float32})
    numerics: frozenset[Numerics] = frozenset({"portable"})
    kv_formats: frozenset[KvCacheDtype] = frozenset({"released"})
    largest: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    graph_safe: bool = False
    repeatability: Repeatability = Repeatability.RUN_TO_RUN
    provider: str = "native"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """All claims of one driver on this machine.

    Attributes:
        ops: claim per op identifier ("group.op"); an op that is absent here is not offered.
        graphs: recorded graphs are supported.
        collectives: names of the collective backends that the driver can start, for example ``("gloo",)``.
        declared_fallbacks: op identifiers that the driver itself names to run on cpu_ref while it is brought up.
    """

    ops: Mapping[str, OpCapability]
    graphs: bool = False
    collectives: tuple[str, ...] = ()
    declared_fallbacks: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Return the claims with plain values, ops sorted by name."""
        return {
            "graphs": self.graphs,
            "collectives": list(self.collectives),
            "declared_fallbacks": list(self.declared_fallbacks),
            "ops": {
                op: {
                    "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in claim.dtypes),
                    "numerics": sorted(claim.numerics),
                    "kv_formats": sorted(claim.kv_formats),
                    "largest": dict(sorted(claim.largest.items())),
                    "graph_safe": claim.graph_safe,
                    "repeatability": f"R{int(claim.repeatability)}",
                    "provider": claim.provider,
                }
                for op, claim in sorted(self.ops.items())
            },
        }
