"""The closed list of ops: one group class a file, one docstring a specification."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.accelerator.ops.attention import AttentionOps
from deepinfer.accelerator.ops.base import OpGroup, op
from deepinfer.accelerator.ops.codec import CodecOps
from deepinfer.accelerator.ops.compression import CompressionOps
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


def all_op_names() -> tuple[str, ...]:
    """Return the identifiers of all ops ("group.op"), in declared order."""
    return tuple(f"{group.group}.{name}" for group in OP_GROUPS for name in group.op_names())


__all__ = [
    "OP_GROUPS",
    "AttentionOps",
    "CodecOps",
    "CompressionOps",
    "ExpertOps",
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
    "op",
]
