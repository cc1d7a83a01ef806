"""The closed list of ops: one group class a file, one docstring a specification."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from deepinfer.accelerator.ops.attention import AttentionOps
from deepinfer.accelerator.ops.base import Feature, OpGroup, op
from deepinfer.accelerator.ops.codec import CodecOps
from deepinfer.accelerator.ops.compression import CompressionOps
from deepinfer.accelerator.ops.drafting import DraftingOps
from deepinfer.accelerator.ops.experts import ExpertOps
from deepinfer.accelerator.ops.linear import LinearOps
from deepinfer.accelerator.ops.memory import MemoryOps
from deepinfer.accelerator.ops.mixing import MixingOps
from deepinfer.accelerator.ops.moves import MoveOps
from deepinfer.accelerator.ops.norm import NormOps
from deepinfer.accelerator.ops.plumbing import PlumbingOps
from deepinfer.accelerator.ops.sampling import SamplingOps
from deepinfer.accelerator.ops.selection import SelectionOps

OP_GROUPS: tuple[type[OpGroup], ...] = (
    LinearOps,
    NormOps,
    CodecOps,
    CompressionOps,
    SelectionOps,
    AttentionOps,
    MixingOps,
    MemoryOps,
    ExpertOps,
    SamplingOps,
    PlumbingOps,
    MoveOps,
    DraftingOps,
)


@dataclass(frozen=True, slots=True)
class Ops:
    """Every op of the contract, bound to the implementation that the plan chose."""

    linear: LinearOps
    norm: NormOps
    codec: CodecOps
    compression: CompressionOps
    selection: SelectionOps
    attention: AttentionOps
    mixing: MixingOps
    memory: MemoryOps
    experts: ExpertOps
    sampling: SamplingOps
    plumbing: PlumbingOps
    moves: MoveOps
    drafting: DraftingOps


def all_op_names() -> tuple[str, ...]:
    """Return the identifiers of all ops ("group.op"), in declared order."""
    return tuple(f"{group.group}.{name}" for group in OP_GROUPS for name in group.op_names())


def needed_op_names(features: Collection[Feature] = ()) -> tuple[str, ...]:
    """Return the identifiers of the ops that the text model and the given features need, in declared order."""
    return tuple(
        f"{group.group}.{name}"
        for group in OP_GROUPS
        if group.feature is None or group.feature in features
        for name in group.op_names()
    )


__all__ = [
    "OP_GROUPS",
    "AttentionOps",
    "CodecOps",
    "CompressionOps",
    "DraftingOps",
    "ExpertOps",
    "Feature",
    "LinearOps",
    "MemoryOps",
    "MixingOps",
    "MoveOps",
    "NormOps",
    "OpGroup",
    "Ops",
    "PlumbingOps",
    "SamplingOps",
    "SelectionOps",
    "all_op_names",
    "needed_op_names",
    "op",
]
