"""Which groups have a quick way, and when it may be taken.

The quick ways compute the default mode: portable numerics in float32, without batch invariance. Their results differ
from the readable ones by rounding alone. Every other mode, and whatever a quick op does not take, is computed by the
readable ops, which also say what is meant.
"""

from __future__ import annotations

import torch

from deepinfer.accelerator.ops import OpGroup
from deepinfer_cpu_ref.computation import Computation
from deepinfer_cpu_ref.quick_attention import QuickAttention
from deepinfer_cpu_ref.quick_codec_ops import QuickCodec
from deepinfer_cpu_ref.quick_experts import QuickExperts
from deepinfer_cpu_ref.quick_linear import QuickLinear
from deepinfer_cpu_ref.quick_mixing import QuickMixing
from deepinfer_cpu_ref.quick_norm import QuickNorm
from deepinfer_cpu_ref.quick_selection import QuickSelection


def can_be_quick(computation: Computation) -> bool:
    """Return whether the quick ways compute this arithmetic."""
    return computation.activation == torch.float32 and not computation.served and not computation.invariant


def quick_groups(computation: Computation) -> dict[str, OpGroup]:
    """Return the groups that have a quick way, by name."""
    groups: tuple[OpGroup, ...] = (
        QuickLinear(computation),
        QuickNorm(),
        QuickCodec(),
        QuickSelection(computation),
        QuickAttention(computation),
        QuickMixing(computation),
        QuickExperts(computation),
    )
    return {group.group: group for group in groups}
