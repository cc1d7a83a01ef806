"""The driver that computes nothing, so that the engine around it can be tested anywhere and timed alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from deepinfer.accelerator.capabilities import Capabilities
from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.base import OpGroup
from deepinfer_conformance.drivers.host import HostDriver, OptionedGroup, claims_of
from deepinfer_conformance.drivers.null.drafting import NullDrafting
from deepinfer_conformance.drivers.null.layers import (
    NullExperts,
    NullLinear,
    NullMemory,
    NullMixing,
    NullNorm,
)
from deepinfer_conformance.drivers.null.paged import (
    NullAttention,
    NullCodec,
    NullCompression,
    NullMoves,
    NullPlumbing,
    NullSelection,
)
from deepinfer_conformance.drivers.null.sampling import NullSampling

_GROUPS: Mapping[str, type[OptionedGroup]] = {
    group.group: group
    for group in (
        NullLinear,
        NullNorm,
        NullCodec,
        NullCompression,
        NullSelection,
        NullAttention,
        NullMixing,
        NullMemory,
        NullExperts,
        NullSampling,
        NullPlumbing,
        NullMoves,
        NullDrafting,
    )
}
_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16})


class NullDriver(HostDriver):
    """Every op of the contract, none of the work.

    Results are zeros of the right shape and dtype, and -1 where the contract has -1 for "none"; ops that act in place
    leave memory as it is. Every row's token is 0, or the forced token where there is one, which is how a test
    dictates what a request "says".
    """

    name: ClassVar[str] = "null"
    interface_version: ClassVar[tuple[int, int]] = (1, 1)
    version: ClassVar[str] = "1.0"

    def capabilities(self) -> Capabilities:
        """Claim every op: a constant is right in every mode."""
        return claims_of(_GROUPS, _DTYPES)

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        """Return all groups."""
        return {name: group(options) for name, group in _GROUPS.items()}
