"""What the engine's options mean for these kernels, and the refusals that the op groups share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.errors import OpRefusedError

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The arithmetic of one engine; everything is accumulated in float32, and every op keeps R2 in any case.

    Attributes:
        activation: dtype of activations between ops.
        served: round where the served model rounds (model.md section 18).
    """

    activation: torch.dtype
    served: bool

    @classmethod
    def of(cls, options: OpOptions) -> Arithmetic:
        """Return the arithmetic that ``options`` ask for, or refuse an activation dtype that has no kernels."""
        if options.activation_dtype not in ACTIVATION_DTYPES:
            known = ", ".join(str(dtype) for dtype in ACTIVATION_DTYPES)
            refuse("triton kernels", f"there is no activation dtype {options.activation_dtype}; choose one of {known}")
        return cls(options.activation_dtype, options.numerics == "served")


class TritonGroup:
    """Gives an op group its arithmetic."""

    def __init__(self, options: OpOptions) -> None:
        self.arithmetic = Arithmetic.of(options)


def refuse(op_name: str, problem: str) -> NoReturn:
    """Raise the typed error of an op that was called with inputs outside its contract."""
    raise OpRefusedError(f"{op_name}: {problem}.")


def require_float(op_name: str, name: str, x: Tensor) -> None:
    """Refuse a tensor that is not in one of the activation dtypes."""
    if x.dtype not in ACTIVATION_DTYPES:
        known = ", ".join(str(dtype) for dtype in ACTIVATION_DTYPES)
        refuse(op_name, f"{name} has dtype {x.dtype}; give one of {known}")


def require_dtype(op_name: str, name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Refuse a tensor of another dtype."""
    if x.dtype != dtype:
        refuse(op_name, f"{name} has dtype {x.dtype}; give {dtype}")


def require_width(op_name: str, name: str, x: Tensor, width: int) -> None:
    """Refuse a tensor whose last dimension is not ``width``."""
    if x.dim() == 0 or x.shape[-1] != width:
        refuse(op_name, f"{name} has shape {tuple(x.shape)}; its last dimension must be {width}")


def require_shape(op_name: str, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape."""
    if tuple(x.shape) != shape:
        refuse(op_name, f"{name} has shape {tuple(x.shape)}; give {shape}")
