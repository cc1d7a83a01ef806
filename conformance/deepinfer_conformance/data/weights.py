"""Stored weights of every format from seeded values, and their exact float64 values for the bounds.

Legend: N out features, K in features, D hidden size, I intermediate size.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from deepinfer.accelerator import StoredExpert, StoredWeight
from deepinfer.accelerator.weights import StoredFormat
from deepinfer.numerics import (
    dequantise_fp8_weight,
    dequantise_mxfp4_weight,
    fake_quant_fp8,
    quantise_fp8_weight,
    quantise_mxfp4_weight,
)
from deepinfer_conformance.data.draws import Draws

QUANTISED = ("fp8_block32", "mxfp4")
_GROUP = 32


def stored_weight(
    draws: Draws, name: str, stored_format: StoredFormat, out_features: int, in_features: int
) -> StoredWeight:
    """Return a random weight whose products keep the scale of their inputs."""
    values_NK = draws.normal(name, out_features, in_features, scale=in_features**-0.5)
    return store(name, stored_format, values_NK)


def store(name: str, stored_format: StoredFormat, values_NK: torch.Tensor) -> StoredWeight:
    """Return given float32 values in a stored format."""
    out_features, in_features = values_NK.shape
    scale: torch.Tensor | None = None
    match stored_format:
        case "fp8_block32":
            weight, scale = quantise_fp8_weight(values_NK)
        case "mxfp4":
            weight, scale = quantise_mxfp4_weight(values_NK)
        case "bfloat16":
            weight = values_NK.to(torch.bfloat16)
        case _:
            weight = values_NK.to(torch.float32)
    return StoredWeight(name, stored_format, weight, scale, out_features, in_features)


def exact_values(stored: StoredWeight) -> torch.Tensor:
    """Return the float64 values [N, K] of a stored weight."""
    if stored.scale is None:
        return stored.weight.to(torch.float64)
    decode = dequantise_fp8_weight if stored.format == "fp8_block32" else dequantise_mxfp4_weight
    return decode(stored.weight, stored.scale).to(torch.float64)


def seen_input(x: torch.Tensor, stored: StoredWeight, *, served: bool) -> torch.Tensor:
    """Return in float64 what a product with this weight sees of its input."""
    if served and stored.format in QUANTISED:
        width = x.shape[-1]
        x = fake_quant_fp8(F.pad(x.to(torch.float32), (0, -width % _GROUP)))[..., :width]
    return x.to(torch.float64)


def stored_expert(draws: Draws, name: str, stored_format: StoredFormat, hidden: int, intermediate: int) -> StoredExpert:
    """Return one expert."""
    return StoredExpert(
        w1=stored_weight(draws, f"{name}.w1", stored_format, intermediate, hidden),
        w2=stored_weight(draws, f"{name}.w2", stored_format, hidden, intermediate),
        w3=stored_weight(draws, f"{name}.w3", stored_format, intermediate, hidden),
    )
