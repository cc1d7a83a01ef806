"""What the engine's options mean for arithmetic, and the checks that every op shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.accelerator.interface import OpOptions
from deepinfer.errors import OpRefusedError
from deepinfer.numerics import fake_quant_fp8

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
QUANTISATION_GROUP = 32


@dataclass(frozen=True, slots=True)
class Computation:
    """The arithmetic of one engine.

    Attributes:
        activation: dtype of activations between ops.
        wide: dtype of everything that is accumulated: float64 with float64 activations, else float32.
        served: round where the served model rounds (model.md section 18).
        invariant: keep R2: a row's bits depend on nothing but the row.
    """

    activation: torch.dtype
    wide: torch.dtype
    served: bool
    invariant: bool

    @classmethod
    def of(cls, options: OpOptions) -> Computation:
        """Return the arithmetic that ``options`` ask for, or refuse an activation dtype that is not computed here."""
        if options.activation_dtype not in ACTIVATION_DTYPES:
            known = ", ".join(str(dtype) for dtype in ACTIVATION_DTYPES)
            refuse("driver 'cpu_ref'", f"has no activation dtype {options.activation_dtype}; choose one of {known}")
        return cls(
            activation=options.activation_dtype,
            wide=torch.float64 if options.activation_dtype == torch.float64 else torch.float32,
            served=options.numerics == "served",
            invariant=options.batch_invariant,
        )


class Computed:
    """Gives an op group its arithmetic."""

    def __init__(self, computation: Computation) -> None:
        self.computation = computation


def refuse(op_name: str, problem: str) -> NoReturn:
    """Raise the typed error of an op that was called with inputs outside its contract."""
    raise OpRefusedError(f"{op_name}: {problem}.")


def require_float(op_name: str, name: str, x: Tensor) -> None:
    """Refuse a tensor that is not in one of the activation dtypes."""
    if x.dtype not in ACTIVATION_DTYPES:
        known = ", ".join(str(dtype) for dtype in ACTIVATION_DTYPES)
        refuse(op_name, f"{name} has dtype {x.dtype}; give one of {known}")


def require_width(op_name: str, name: str, x: Tensor, width: int) -> None:
    """Refuse a tensor whose last dimension is not ``width``."""
    if x.dim() == 0 or x.shape[-1] != width:
        refuse(op_name, f"{name} has shape {tuple(x.shape)}; its last dimension must be {width}")


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which statistics of ``x`` are computed: at least float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def quantised_input(x: Tensor) -> Tensor:
    """Return what a served fp8 product sees of ``x [..., K]``; a ragged last group is quantised on its own."""
    width = x.shape[-1]
    ragged = -width % QUANTISATION_GROUP
    if not ragged:
        return fake_quant_fp8(x)
    return fake_quant_fp8(F.pad(x, (0, ragged)))[..., :width]
