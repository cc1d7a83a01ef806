"""What the served formats do to values, with a gradient that passes straight through.

``Codecs()`` leaves everything as it is; ``Codecs(records=True, weights=True)`` is the released model in the portable
numerics: cache records and index queries quantised, weights as the checkpoint will hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.model import ModelConfig
from deepinfer.model.inventory import Parameter, parameters
from deepinfer.numerics import (
    IndexRecord,
    LongRangeRecord,
    WindowRecord,
    dequantise_engram_rows,
    dequantise_fp8_weight,
    dequantise_mxfp4_weight,
    quantise_engram_table,
    quantise_fp8_weight,
    quantise_mxfp4_weight,
)

from .parameters import Weights, stacked_name


def straight_through(x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the rounded values with the gradient of the exact ones."""
    with torch.no_grad():
        change = rounded(x) - x
    return x + change


@dataclass(frozen=True, slots=True)
class Codecs:
    """Which formats are simulated.

    Attributes:
        records: window records, long-range records, index keys and index queries.
        weights: every parameter in the released form.
    """

    records: bool = False
    weights: bool = False

    def window(self, x: Tensor) -> Tensor:
        """Keys of the window."""
        return straight_through(x, WindowRecord(x.shape[-1]).round_trip) if self.records else x

    def entry(self, x: Tensor) -> Tensor:
        """Long-range entries."""
        return straight_through(x, LongRangeRecord(x.shape[-1]).round_trip) if self.records else x

    def index(self, x: Tensor) -> Tensor:
        """Index keys and index queries."""
        return straight_through(x, IndexRecord(x.shape[-1]).round_trip) if self.records else x

    def served(self, config: ModelConfig, weights: Weights) -> Weights:
        """Return the weights as the checkpoint will hold them."""
        if not self.weights:
            return weights
        storages = {stacked_name(parameter)[0]: parameter for parameter in parameters(config, ("text", "draft"))}
        return {
            name: straight_through(weight, _rounding(storages[name])) if name in storages else weight
            for name, weight in weights.items()
        }


def _rounding(parameter: Parameter) -> Callable[[Tensor], Tensor]:
    return _ROUNDINGS[parameter.storage]


_ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8_block32": lambda weight: dequantise_fp8_weight(*quantise_fp8_weight(weight)),
    "mxfp4": lambda weight: dequantise_mxfp4_weight(*quantise_mxfp4_weight(weight)),
    "engram_fp8": lambda weight: dequantise_engram_rows(*quantise_engram_table(weight)),
    "bfloat16": lambda weight: weight.to(torch.bfloat16).to(torch.float32),
    "float32": lambda weight: weight,
}
