"""Rotary tables: cosines and sines of every position, built once on the host (model.md section 4).

Legend: P positions, R rotary pairs (half of ``qk_rope_head_dim``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.errors import ArgumentError
from deepinfer.model.config import ModelConfig
from deepinfer.model.roles import RopeKind

_SMALLEST_RAMP = 1e-3
"""Keeps the ramp finite when both correction bounds fall on the same pair."""


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """The two tables of a model: "plain" for layers that see their window only, "yarn" for all others."""

    plain: RotaryTable
    yarn: RotaryTable

    def of(self, kind: RopeKind) -> RotaryTable:
        """Return the table of a layer's kind; it serves queries, keys, entries, index keys and the way back."""
        return self.yarn if kind == "yarn" else self.plain

    def to(self, device: torch.device) -> RotaryTables:
        """Return the tables on a device, bits unchanged."""
        return RotaryTables(_to(self.plain, device), _to(self.yarn, device))


def rotary_tables(config: ModelConfig, positions: int) -> RotaryTables:
    """Build both tables on the host for positions ``0 .. positions - 1``.

    Raises:
        ArgumentError: if ``positions`` is not positive, or float32 cannot name every position.
    """
    if not 0 < positions <= 2**24:
        raise ArgumentError("rotary tables", [f"positions: {positions} is outside 1 .. {2**24}"])
    return RotaryTables(
        plain=_table(plain_frequencies(config), positions), yarn=_table(yarn_frequencies(config), positions)
    )


def plain_frequencies(config: ModelConfig) -> Tensor:
    """Return float32 [R]: ``1 / rope_theta^(2i / rd)``."""
    return _frequencies(config.rope_theta, config.qk_rope_head_dim)


def yarn_frequencies(config: ModelConfig) -> Tensor:
    """Return float32 [R]: slow pairs divided by ``factor``, fast ones kept, a linear ramp between; amplitude 1."""
    width, base, scaling = config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling

    def pair_of(turns: float) -> float:
        """The pair that makes ``turns`` turns within the original context."""
        return width * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), width - 1)
    pairs_R = torch.arange(width // 2, dtype=torch.float32)
    ramp_R = ((pairs_R - low) / max(high - low, _SMALLEST_RAMP)).clamp(0, 1)
    mask_R = 1 - ramp_R
    frequencies_R = _frequencies(base, width)
    return (frequencies_R / scaling.factor) * (1 - mask_R) + frequencies_R * mask_R


def _frequencies(base: float, width: int) -> Tensor:
    # This form and no other: an equal power written differently moves a third of the frequencies by one ulp, which is
    # 0.016 in a cosine near position one million. The power is taken in float64 and rounded, so that the bits do not
    # depend on a vector library; it equals torch's float32 power for every released base.
    powers = [math.pow(base, 2 * pair / width) for pair in range(width // 2)]
    return 1.0 / torch.tensor(powers, dtype=torch.float64).to(torch.float32)


def _table(frequencies_R: Tensor, positions: int) -> RotaryTable:
    angles_PR = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies_R)
    return RotaryTable(angles_PR.cos(), angles_PR.sin())


def _to(table: RotaryTable, device: torch.device) -> RotaryTable:
    return RotaryTable(table.cos_PR.to(device), table.sin_PR.to(device))
