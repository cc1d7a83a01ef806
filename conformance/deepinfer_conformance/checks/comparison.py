"""Comparisons that more than one check makes."""

from __future__ import annotations

import math

import torch

from deepinfer_conformance.data.layouts import bits
from deepinfer_conformance.outcomes import Finding

SHAPE = "shape and dtype"
SHARE = "error / bound"
DIFFERING = "differing elements"


def shape_finding(part: str, got: torch.Tensor, wanted: torch.Tensor) -> Finding | None:
    """Return a finding that does not hold if shape or dtype are wrong, else None."""
    if got.shape == wanted.shape and got.dtype == wanted.dtype:
        return None
    detail = f"{part} is {got.dtype} {tuple(got.shape)}; the contract has {wanted.dtype} {tuple(wanted.shape)}"
    return Finding(SHAPE, 1.0, 0.0, detail, part=part)


def bit_finding(part: str, got: torch.Tensor, wanted: torch.Tensor, what: str = "") -> Finding:
    """Count elements whose bits differ; NaN equals NaN of the same bits."""
    wrong = shape_finding(part, got, wanted)
    if wrong is not None:
        return wrong
    differs = bits(got) != bits(wanted)
    # Any NaN will do where a NaN is wanted: payloads are nobody's promise.
    if got.dtype.is_floating_point:
        differs &= ~(got.isnan() & wanted.isnan())
    count = int(differs.sum())
    if count == 0:
        return Finding(DIFFERING, 0.0, 0.0, part=part)
    first = int(differs.flatten().nonzero()[0])
    place = _place(first, got.shape)
    detail = f"{what}{part}{place} is {got.flatten()[first].item()}, not {wanted.flatten()[first].item()}"
    return Finding(DIFFERING, float(count), 0.0, f"{detail}; {count} of {got.numel()} differ", part=part, element=first)


def bound_finding(
    part: str, got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, peer: torch.Tensor
) -> Finding:
    """Compare with a bound a element: the worst share of it, beside the reference's own share."""
    wrong = shape_finding(part, got, peer)
    if wrong is not None:
        return wrong
    share = _shares(got, exact, bound)
    if share.numel() == 0:
        return Finding(SHARE, 0.0, 1.0, reference_error=0.0, part=part)
    worst = int(share.argmax())
    value = float(share.flatten()[worst])
    own = float(_shares(peer, exact, bound).max())
    detail = (
        f"{part}{_place(worst, got.shape)} is {got.flatten()[worst].item():.9g}, exactly "
        f"{exact.flatten()[worst].item():.9g}, allowed {bound.flatten()[worst].item():.3g} off"
    )
    return Finding(SHARE, value, 1.0, detail, reference_error=own, part=part, element=worst)


def _shares(got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    wide, exact = got.to(torch.float64), exact.to(torch.float64)
    error = (wide - exact).abs()
    share = torch.where(error == 0, 0.0, error / bound)
    same_infinity = wide == exact
    share = torch.where(same_infinity, 0.0, share)
    both_nan = wide.isnan() & exact.isnan()
    free = bound.isinf() & wide.isfinite()  # unspecified but finite
    share = torch.where(both_nan | free, 0.0, share)
    return share.nan_to_num(nan=math.inf, posinf=math.inf)


def _place(flat: int, shape: torch.Size) -> str:
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return str(index[::-1]) if index else ""
