"""Weights as they cross the contract: stored as in the checkpoint, then prepared by the driver that uses them.

Legend: N out features, K in features, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from deepinfer.errors import OpRefusedError

StoredFormat = Literal["float32", "bfloat16", "fp8_block32", "mxfp4", "engram_fp8"]
Precision = Literal["activation", "float32"]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One matrix in the format of the checkpoint (spec: model.md sections 11 and 13).

    Attributes:
        name: checkpoint name of the weight, for messages.
        format: how ``weight`` and ``scale`` are to be read.
        weight: [N, K] for float formats and fp8 (float8_e4m3fn); [N, K/2] int8 for mxfp4, even index in the low nibble.
        scale: None, or float8_e8m0fnu: [ceil(N/32), ceil(K/32)] for fp8_block32, [N, K/32] for mxfp4 and engram_fp8.
        out_features: N.
        in_features: K.
    """

    name: str
    format: StoredFormat
    weight: torch.Tensor
    scale: torch.Tensor | None
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        """Bytes of the stored codes and scales together."""
        scale_bytes = 0 if self.scale is None else self.scale.numel() * self.scale.element_size()
        return self.weight.numel() * self.weight.element_size() + scale_bytes


@dataclass(frozen=True, slots=True)
class StoredExpert:
    """One expert as in the checkpoint: gate ``w1`` and up ``w3`` [I, D], down ``w2`` [D, I]."""

    w1: StoredWeight
    w2: StoredWeight
    w3: StoredWeight


@dataclass(frozen=True, slots=True)
class ExpertSlot:
    """Where one prepared expert lies; interface 1.1.

    Two slots whose forms, and whose tensors' shapes and dtypes, are equal may hold each other's experts, on one rank or
    on two: whoever copies all tensors of one over those of the other has moved the expert. So a form says everything
    about an expert that its tensors do not, and a driver keeps nothing derived from them elsewhere.

    Attributes:
        form: how the tensors are read; words of the driver's own.
        tensors: packed weights and scales, contiguous, of the storage that the ops read; written in place.
    """

    form: str
    tensors: tuple[torch.Tensor, ...]


class PreparedWeight:
    """What a driver's ``prepare`` op returns: its own layout, opaque to everybody else.

    Attributes:
        name: checkpoint name of what was prepared.
        nbytes: bytes that the prepared form holds on the device.
    """

    name: str
    nbytes: int

    def expert_slots(self) -> tuple[ExpertSlot, ...]:
        """Return the slots of what ``experts.prepare`` was given, in its order; interface 1.1.

        They are asked for anew before each move: a driver may place its weights elsewhere at their first use.

        Raises:
            OpRefusedError: this weight's experts cannot be moved one by one; so does a driver that knows of no moves.
        """
        raise OpRefusedError(
            f"{self.name!r}, a {type(self).__qualname__}, has no experts that can be moved one by one. Leave them "
            f"where they are (expert_balancing='off'), or use a driver that can."
        )
