"""Stored weights as kernels read them: codes stay codes, float matrices become bfloat16 where that loses nothing.

Legend: E matrices of one shape, N out features, K in features, G groups of 32 along K, b bytes of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.weights import StoredFormat, StoredWeight
from deepinfer_triton.arithmetic import refuse

GROUP = 32
FLOAT, FP8, MXFP4 = 0, 1, 2
"""How values are read: as they are, e4m3 codes, pairs of e2m1 codes."""

_FORMATS: dict[StoredFormat, int] = {"float32": FLOAT, "bfloat16": FLOAT, "fp8_block32": FP8, "mxfp4": MXFP4}

_EXACT_SCALES = {FP8: (10, 246), MXFP4: (2, 252)}
"""Scale codes under which every product of a code and a scale is a normal, finite bfloat16."""

_NAN_SCALE = 255


@dataclass(eq=False)
class Matrices:
    """Matrices of one shape and format, one behind the other.

    Attributes:
        format: FLOAT, FP8 or MXFP4.
        values: float32 or bfloat16 [E, N, K], or uint8 [E, N, b].
        scales: uint8 [E, N, G], or [E, ceil(N / 32), G] for FP8; empty for FLOAT.
        out_features: N.
        in_features: K.
        fits_bfloat16: every value is a bfloat16, so that products with bfloat16 rows may use its matrix unit.
    """

    format: int
    values: Tensor
    scales: Tensor
    out_features: int
    in_features: int
    fits_bfloat16: bool

    @property
    def count(self) -> int:
        """How many matrices there are."""
        return self.values.shape[0]

    @property
    def form(self) -> str:
        """How the tensors are read, in words: kernels are chosen by it."""
        name = ("floats", "fp8", "mxfp4")[self.format]
        return f"{name} in bfloat16" if self.fits_bfloat16 else name

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What holds the matrices, E first: values, and scales where there are any."""
        return (self.values, self.scales) if self.is_quantised else (self.values,)

    @property
    def is_quantised(self) -> bool:
        """Whether the values are codes with scales."""
        return self.format != FLOAT

    @property
    def scale_rows(self) -> int:
        """Rows of a matrix that share a row of scales."""
        return GROUP if self.format == FP8 else 1

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.numel() * self.values.element_size() + self.scales.numel()

    def move(self, device: torch.device) -> None:
        """Move to the device of the first input; afterwards this does nothing."""
        if self.values.device != device:
            self.values, self.scales = self.values.to(device), self.scales.to(device)


def matrices_of(op_name: str, stored: Sequence[StoredWeight], groups: int = 1) -> Matrices:
    """Return weights of one shape and format, each cut into ``groups`` along N, as one stack.

    Raises:
        OpRefusedError: a weight does not hold what its format says, or differs from the first one.
    """
    first = stored[0]
    for weight in stored:
        if (weight.format, weight.out_features, weight.in_features) != (
            first.format,
            first.out_features,
            first.in_features,
        ):
            refuse(op_name, f"{weight.name!r} and {first.name!r} differ in format or shape; they are stacked")
        _require_data(op_name, weight)
    kind = _FORMATS[first.format]
    out_features = first.out_features // groups
    rows_of_scales = -(-out_features // GROUP) if kind == FP8 else out_features
    if kind == FP8 and groups > 1 and out_features % GROUP:
        refuse(op_name, f"groups of {out_features} rows do not end with blocks of {GROUP} in {first.name!r}")
    if kind == FLOAT:
        values = torch.stack([weight.weight for weight in stored])
        narrow = values.to(torch.bfloat16)
        fits = torch.equal(narrow.to(values.dtype), values)
        values = (narrow if fits else values.to(torch.float32)).contiguous()
        scales = torch.empty(0, dtype=torch.uint8)
    else:
        values = torch.stack([weight.weight.view(torch.uint8) for weight in stored])
        scales = torch.stack([weight.scale.view(torch.uint8) for weight in stored if weight.scale is not None])
        low, high = _EXACT_SCALES[kind]
        fits = bool((((scales >= low) & (scales <= high)) | (scales == _NAN_SCALE)).all())
        scales = scales.reshape(len(stored) * groups, rows_of_scales, -1)
    values = values.reshape(len(stored) * groups, out_features, -1)
    return Matrices(kind, values, scales, out_features, first.in_features, fits)


def _require_data(op_name: str, weight: StoredWeight) -> None:
    """Refuse a weight whose tensors are not what its format, out and in features say."""
    if weight.format not in _FORMATS:
        refuse(op_name, f"{weight.name!r} is stored as {weight.format}; only 'memory.gather_rows' reads that")
    rows, columns = weight.out_features, weight.in_features
    kind = _FORMATS[weight.format]
    width = columns // 2 if kind == MXFP4 else columns
    if tuple(weight.weight.shape) != (rows, width) or (kind == MXFP4 and columns % GROUP):
        refuse(
            op_name,
            f"{weight.name!r} has shape {tuple(weight.weight.shape)} for {rows} x {columns} as {weight.format}",
        )
    if kind == FLOAT:
        if weight.weight.dtype not in (torch.float32, torch.bfloat16):
            refuse(op_name, f"{weight.name!r} is {weight.weight.dtype}, stored as {weight.format}")
        return
    if weight.scale is None:
        refuse(op_name, f"{weight.name!r} is stored as {weight.format} but has no scale")
    needed = (-(-rows // GROUP) if kind == FP8 else rows, -(-columns // GROUP))
    if tuple(weight.scale.shape) != needed:
        refuse(op_name, f"{weight.name!r} has scales {tuple(weight.scale.shape)}; give {needed}")
