"""A few ops whose kernels are executed from their lowered form, each with torch's own answer in float64.

Legend: T rows, H heads, S streams, D width, k slots, P positions, R pairs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.mixing import Mix
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.numerics.records import WindowRecord
from deepinfer_ascend.providers import TRITON_PACKAGE

ROUNDINGS: Final = 8
"""Roundings of float32 that a sum of a few hundred terms may be off; one of the result's dtype comes on top."""


@dataclass(frozen=True, slots=True)
class ExecutionCase:
    """An op on made-up inputs.

    Attributes:
        op: of the contract.
        name: shapes and dtypes.
        compute: returns what the kernel gave, what is right, and the magnitude of the terms (None: to the bit).
    """

    op: str
    name: str
    compute: Callable[[], tuple[Tensor, Tensor, Tensor | None]]

    def problem(self) -> str:
        """Return how far the result is off; empty if it is not."""
        got, right, terms = self.compute()
        if terms is None:
            wrong = int((got != right).sum())
            return f"{wrong} of {right.numel()} values differ" if wrong else ""
        unit = torch.finfo(got.dtype).eps / 2
        bound = ROUNDINGS * torch.finfo(torch.float32).eps * terms + unit * right.abs()
        share = float(((got.double() - right).abs() / bound.clamp(min=1e-30)).nan_to_num(nan=torch.inf).max())
        return f"{share:.3g} times its bound off" if share > 1 else ""


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{TRITON_PACKAGE}.{module}"), name)


def _normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _rms_norm(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x_TD, weight_D = _normal(1, 5, 1280, dtype=dtype), _normal(2, 1280)
    exact_TD = x_TD.double()
    right_TD = weight_D.double() * exact_TD * torch.rsqrt(exact_TD.square().mean(-1, keepdim=True) + 1e-6)
    return _function("rms_norm", "rms_norm")(x_TD, weight_D, 1e-6), right_TD, right_TD.abs()


def _rotary() -> tuple[Tensor, Tensor, Tensor]:
    x_THC, angle_PR = _normal(1, 3, 8, 128, dtype=torch.bfloat16), _normal(2, 9, 32)
    table, position_T = RotaryTable(angle_PR.cos(), angle_PR.sin()), torch.tensor([8, 0, 3])
    got_THC = _function("rotary", "rotary")(x_THC, table, position_T, inverse=False)
    right_THC = x_THC.double().clone()
    cos_T1R, sin_T1R = (part[position_T].double().unsqueeze(1) for part in (table.cos_PR, table.sin_PR))
    even, odd = x_THC.double()[..., 64::2], x_THC.double()[..., 65::2]
    right_THC[..., 64::2], right_THC[..., 65::2] = even * cos_T1R - odd * sin_T1R, odd * cos_T1R + even * sin_T1R
    terms_THC = torch.cat(
        (torch.zeros_like(right_THC[..., :64]), (even.abs() + odd.abs()).repeat_interleave(2, -1)), -1
    )
    return got_THC, right_THC, terms_THC


def _collapse() -> tuple[Tensor, Tensor, Tensor]:
    streams_TSD, pre_TS = _normal(1, 3, 4, 1500, dtype=torch.bfloat16), _normal(2, 3, 4)
    terms_TSD = streams_TSD.double() * pre_TS.double().unsqueeze(-1)
    return _function("streams", "collapse")(streams_TSD, pre_TS), terms_TSD.sum(1), terms_TSD.abs().sum(1)


def _post() -> tuple[Tensor, Tensor, Tensor]:
    streams_TSD, output_TD = _normal(1, 2, 4, 1100), _normal(2, 2, 1100)
    mix = Mix(_normal(3, 2, 4), _normal(4, 2, 4), _normal(5, 2, 4, 4))
    mixed = mix.comb_TSS.double().unsqueeze(-1) * streams_TSD.double().unsqueeze(2)
    entering = mix.post_TS.double().unsqueeze(-1) * output_TD.double().unsqueeze(1)
    got_TSD = _function("streams", "post")(output_TD, streams_TSD, mix)
    return got_TSD, mixed.sum(1) + entering, mixed.abs().sum(1) + entering.abs()


def _combine() -> tuple[Tensor, Tensor, Tensor]:
    shared_TD, slots_TkD = _normal(1, 3, 1100), _normal(2, 3, 6, 1100)
    got_TD = _function("slot_sum", "combine")(shared_TD, slots_TkD, torch.float32)
    return (
        got_TD,
        shared_TD.double() + slots_TkD.double().sum(1),
        shared_TD.double().abs() + slots_TkD.double().abs().sum(1),
    )


def _window_records() -> tuple[Tensor, Tensor, None]:
    rows_nC = _normal(1, 5, 512) * torch.tensor([1.0, 1e-6, 0.0, 3e4, 7.0]).unsqueeze(1)
    record = WindowRecord(512)
    codec = _function("codec", "TritonCodecOps")(OpOptions())
    return codec.encode(rows_nC, record), record.encode(rows_nC), None


CASES: Final = (
    ExecutionCase("norm.rms", "5 x 1280, float32", lambda: _rms_norm(torch.float32)),
    ExecutionCase("norm.rms", "5 x 1280, bfloat16", lambda: _rms_norm(torch.bfloat16)),
    ExecutionCase("norm.rotary", "3 x 8 x 128, 64 rotated, bfloat16", _rotary),
    ExecutionCase("mixing.collapse", "3 x 4 x 1500, bfloat16", _collapse),
    ExecutionCase("mixing.post", "2 x 4 x 1100, float32", _post),
    ExecutionCase("experts.combine", "3 x 6 x 1100, float32", _combine),
    ExecutionCase("codec.encode", "5 window records of 512, to the bit", _window_records),
)
