"""What the engine's options mean for this driver's ops, and the checks that every op shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NoReturn

import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.errors import OpRefusedError
from deepinfer_ascend.soc import Soc

ACTIVATION_DTYPES: Final = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The arithmetic of one engine on one chip. Everything is accumulated in float32.

    Attributes:
        activation: dtype of activations between ops.
        served: round where the served model rounds (model.md section 18).
        soc: the chip.
        device: where tensors live.
    """

    activation: torch.dtype
    served: bool
    soc: Soc
    device: torch.device

    @classmethod
    def of(cls, options: OpOptions, soc: Soc, device: torch.device) -> Arithmetic:
        """Return the arithmetic that ``options`` ask for, or refuse an activation dtype that is not computed here."""
        if options.activation_dtype not in ACTIVATION_DTYPES:
            known = ", ".join(str(dtype) for dtype in ACTIVATION_DTYPES)
            refuse("driver 'ascend'", f"has no activation dtype {options.activation_dtype}; choose one of {known}")
        return cls(options.activation_dtype, options.numerics == "served", soc, device)

    @property
    def uses_mx(self) -> bool:
        """True where quantised weights meet quantised activations in the matrix unit."""
        return self.served and self.soc.has_mx


def refuse(op_name: str, problem: str) -> NoReturn:
    """Raise the typed error of an op that was called with inputs outside its contract."""
    raise OpRefusedError(f"{op_name}: {problem}.")


def require_width(op_name: str, name: str, x: Tensor, width: int) -> None:
    """Refuse a tensor whose last dimension is not ``width``."""
    if x.dim() == 0 or x.shape[-1] != width:
        refuse(op_name, f"{name} has shape {tuple(x.shape)}; its last dimension must be {width}")


def silu(x: Tensor) -> Tensor:
    """Return ``x / (1 + exp(-x))``, written out: the fused form computes body and tail of a tensor differently."""
    return x / (1 + torch.exp(-x))


def sigmoid(x: Tensor) -> Tensor:
    """Return ``1 / (1 + exp(-x))``, written out for the same reason."""
    return 1 / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """Return ``log(1 + exp(x))`` without overflow."""
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)
