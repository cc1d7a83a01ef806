"""Elementwise bounds of results, per op: magnitudes of the terms in float64, times the factors of `tolerance`.

A part of a result that no function here names must be bit-exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from deepinfer.accelerator import OpOptions
from deepinfer_conformance.bench import Effects
from deepinfer_conformance.bounds import attention, drafting, experts, rows, sampling
from deepinfer_conformance.data.call import OpCall

Bounds = Mapping[str, torch.Tensor]
BoundFunction = Callable[[OpCall, OpOptions, Effects], Bounds]

BOUNDS: Final[Mapping[str, BoundFunction]] = {
    "linear.dense": rows.dense,
    "linear.grouped": rows.grouped,
    "norm.rms": rows.rms,
    "norm.rotary": rows.rotary,
    "compression.pool_pairs": rows.pool_pairs,
    "attention.sparse": attention.sparse,
    "mixing.mixes": rows.mixes,
    "mixing.collapse": rows.collapse,
    "mixing.post": rows.post,
    "memory.gate": rows.gate,
    "experts.routed": experts.routed,
    "experts.shared": experts.shared,
    "experts.combine": experts.combine,
    "experts.local": experts.local,
    "sampling.weigh": sampling.weigh,
    "sampling.log_probabilities": sampling.log_probabilities,
    "sampling.raw_log_probabilities": sampling.log_probabilities,
    "drafting.attend": drafting.attend,
    "drafting.propose": drafting.propose,
}


def bounds_of(call: OpCall, options: OpOptions, exact: Effects) -> Bounds:
    """Return the bound of every part that may differ from the yardstick, by name; the others are exact."""
    function = BOUNDS.get(call.op)
    return {} if function is None else function(call, options, exact)
