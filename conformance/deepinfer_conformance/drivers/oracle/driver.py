"""The driver whose tokens prove that the engine around it keeps its memory straight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from deepinfer.accelerator.capabilities import Capabilities
from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.base import OpGroup
from deepinfer.accelerator.ops.drafting import DraftingOps
from deepinfer.accelerator.ops.moves import MoveOps
from deepinfer.accelerator.ops.plumbing import PlumbingOps
from deepinfer.accelerator.ops.sampling import SamplingOps
from deepinfer_conformance.drivers.host import DEFAULT_MEMORY_BYTES, HostDriver, claims_of
from deepinfer_conformance.drivers.oracle.drafting import OracleDrafting
from deepinfer_conformance.drivers.oracle.hashing import TokenRule
from deepinfer_conformance.drivers.oracle.history import OracleHistory
from deepinfer_conformance.drivers.oracle.model import OracleModel
from deepinfer_conformance.drivers.oracle.paged import OracleAttention, OracleCodec, OracleCompression
from deepinfer_conformance.drivers.oracle.rows import (
    OracleExperts,
    OracleLinear,
    OracleMemory,
    OracleMixing,
    OracleNorm,
)
from deepinfer_conformance.drivers.oracle.selection import OracleSelection

_CLAIMED: Mapping[str, type[OpGroup]] = {
    group.group: group
    for group in (
        OracleLinear,
        OracleNorm,
        OracleCodec,
        OracleCompression,
        OracleSelection,
        OracleAttention,
        OracleMixing,
        OracleMemory,
        OracleExperts,
        OracleDrafting,
    )
}
# The reference's own: what they decide (addresses, copies, draws) is under test together with the engine.
_FALLBACKS = tuple(
    f"{group.group}.{op}"
    for group in (SamplingOps, PlumbingOps, MoveOps, DraftingOps)
    for op in group.op_names()
    if op not in OracleDrafting.implemented() or group is not DraftingOps
)
# 24-bit integers travel in activations: bfloat16 cannot hold them.
_DTYPES = frozenset({torch.float32, torch.float64})


class OracleDriver(HostDriver):
    """Tokens from a hash of everything that a request's rows read.

    Any mistake of scheduling, block table, slot, ring, position, copy, fork or stale memory changes what is read, and
    with it every later token; `oracle_tokens` says what the tokens ought to be.
    """

    name: ClassVar[str] = "oracle"
    interface_version: ClassVar[tuple[int, int]] = (1, 1)
    version: ClassVar[str] = "1.0"

    def __init__(self, *, end_one_in: int = 0, end_token_id: int = 1, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        """Make an oracle.

        Args:
            end_one_in: one token in so many is the end token; 0: none ever is.
            end_token_id: the end token.
            memory_bytes: device memory to report.
        """
        super().__init__(memory_bytes=memory_bytes)
        self.rule = TokenRule(end_token_id=end_token_id, end_one_in=end_one_in)

    def history(self, config: OracleModel, *, token_map: Sequence[int] | None = None) -> OracleHistory:
        """Return an empty history that foretells this driver's tokens for a request of the model."""
        return OracleHistory(config, config.vocab_size, rule=self.rule, token_map=token_map)

    def capabilities(self) -> Capabilities:
        """Claim the model's ops; sampling, verification, plumbing and moves run on the reference."""
        return claims_of(_CLAIMED, _DTYPES, declared_fallbacks=_FALLBACKS)

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        """Return the model's groups."""
        groups: tuple[OpGroup, ...] = (
            OracleLinear(options, self.rule),
            OracleNorm(options),
            OracleCodec(options),
            OracleCompression(options),
            OracleSelection(options),
            OracleAttention(options),
            OracleMixing(options),
            OracleMemory(options),
            OracleExperts(options),
            OracleDrafting(options),
        )
        return {group.group: group for group in groups}
