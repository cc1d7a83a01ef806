# ruff: noqa: ARG001 - all bounds share one signature
"""Bounds of sampling: everything is exact but ``exp``, which may differ by one unit of a weight.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deepinfer.accelerator import OpOptions
from deepinfer.accelerator.ops.sampling import NORMALISER_BITS
from deepinfer_conformance.bench import Effects
from deepinfer_conformance.data.call import OpCall

_FLOAT32_STEP = 2.0**-23


def weigh(call: OpCall, options: OpOptions, exact: Effects) -> Mapping[str, torch.Tensor]:
    """One unit a weight that is not 0, and a row's number of such weights for its sum; statuses are exact."""
    has_weight = exact["result.weights_BV"] > 0
    return {
        "result.weights_BV": has_weight.to(torch.float64),
        "result.sums_B": has_weight.sum(-1).to(torch.float64),
    }


def log_probabilities(call: OpCall, options: OpOptions, exact: Effects) -> Mapping[str, torch.Tensor]:
    """One unit of 2^-44 for each of V terms of the normaliser (at least 2^44 units), and one float32 rounding."""
    width = call.tensor("logits_BV" if "logits_BV" in call.arguments else "logits_TV").shape[1]

    def bound(part: str) -> torch.Tensor:
        values = exact[part].to(torch.float64).abs()
        return _FLOAT32_STEP * values + 2 * width * 2.0**-NORMALISER_BITS

    return {part: bound(part) for part in ("result.chosen_B", "result.top_values_BN")}
