"""Which class serves which op, and what stays on the reference by name, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, cast

import torch

from deepinfer.accelerator.capabilities import Capabilities, OpCapability, Repeatability
from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops import AttentionOps, LinearOps, OpGroup
from deepinfer_nvidia import optional
from deepinfer_nvidia.deep_gemm import DeepGemmLinear
from deepinfer_nvidia.flash_mla import FlashMlaAttention

TRITON: Final = "triton"
INTERPRETED: Final = "interpreted triton"

NOT_RECORDED: Final = frozenset(
    {
        "linear.prepare",
        "linear.prepare_grouped",
        "experts.prepare",
        "experts.prepare_shared",
        "memory.gather_rows",
        "moves.save",
        "moves.restore",
    }
)
"""Ops that no graph may hold: run once a weight while it is loaded, or data passes between host and device."""


def group_types() -> Mapping[str, type[OpGroup]]:
    """Return the class of every group that has kernels; importing them imports Triton."""
    from deepinfer_triton.attention import TritonAttentionOps
    from deepinfer_triton.codec import TritonCodecOps
    from deepinfer_triton.compression import TritonCompressionOps
    from deepinfer_triton.drafting import TritonDraftingOps
    from deepinfer_triton.feed_forward import TritonExpertOps
    from deepinfer_triton.linear import TritonLinearOps
    from deepinfer_triton.memory import TritonMemoryOps
    from deepinfer_triton.mixing import TritonMixingOps
    from deepinfer_triton.moves import TritonMoveOps
    from deepinfer_triton.norm import TritonNormOps
    from deepinfer_triton.plumbing import TritonPlumbingOps
    from deepinfer_triton.sampling import TritonSamplingOps
    from deepinfer_triton.selection import TritonSelectionOps

    kinds: tuple[type[OpGroup], ...] = (
        TritonLinearOps,
        TritonNormOps,
        TritonCodecOps,
        TritonCompressionOps,
        TritonSelectionOps,
        TritonAttentionOps,
        TritonMixingOps,
        TritonMemoryOps,
        TritonExpertOps,
        TritonSamplingOps,
        TritonPlumbingOps,
        TritonMoveOps,
        TritonDraftingOps,
    )
    return MappingProxyType({kind.group: kind for kind in kinds})


def groups(options: OpOptions) -> dict[str, OpGroup]:
    """Return one instance of every group that has kernels."""
    return {name: kind(options) for name, kind in group_types().items()}  # type: ignore[call-arg]


def with_libraries(own: Mapping[str, OpGroup], options: OpOptions, names: Sequence[str]) -> dict[str, OpGroup]:
    """Return the groups with named libraries put over ours; DriverUnavailableError if one does not load."""
    found = dict(own)
    if optional.FLASH_MLA.name in names:
        library = optional.load(optional.FLASH_MLA)
        found["attention"] = FlashMlaAttention(library, options, cast("AttentionOps", own["attention"]))
    if optional.DEEP_GEMM.name in names:
        library = optional.load(optional.DEEP_GEMM)
        found["linear"] = DeepGemmLinear(library, options, cast("LinearOps", own["linear"]))
    return found


@dataclass(frozen=True, slots=True)
class Claims:
    """What is claimed, of which ops.

    Attributes:
        provider: who computes an op.
        graphs: the device records graphs.
        collectives: backends that join ranks.
    """

    provider: str
    graphs: bool
    collectives: tuple[str, ...]

    def capabilities(self, others: Mapping[str, str]) -> Capabilities:
        """Return the claims; ``others`` names the provider of the ops that are not served by our own kernels."""
        ops = {
            f"{kind.group}.{name}": OpCapability(
                dtypes=frozenset({torch.float32, torch.bfloat16}),
                numerics=frozenset({"portable", "served"}),
                kv_formats=frozenset({"released", "float32"}),
                graph_safe=self.graphs and f"{kind.group}.{name}" not in NOT_RECORDED,
                repeatability=Repeatability.BATCH_INVARIANT,
                provider=others.get(f"{kind.group}.{name}", self.provider),
            )
            for kind in group_types().values()
            for name in kind.implemented()
        }
        return Capabilities(
            ops=MappingProxyType(ops),
            graphs=self.graphs,
            collectives=self.collectives,
        )
