"""Draws from rows of which nearly every token matters, a few readings of the logits each.

Two ways. Without filters a draw needs only to know on which side of its target each partial sum lies: sums of an
approximation decide that whenever the target is farther from the chosen token's ends than the approximation can be off,
which is nearly always; what they cannot decide is left to the second way. It computes the weights themselves. Kept in
float64 they stay exact integers, and so do their sums, in any order. The cut of top-p is found without sorting the row
(`deepinfer_cpu_ref.quick_cut`).

Legend: R rows, V vocabulary, N blocks of a row, C tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepinfer.accelerator.ops.sampling import WEIGHT_BITS, SamplingRows
from deepinfer_cpu_ref.quick_blocks import BlockedRows
from deepinfer_cpu_ref.quick_cut import UNDECIDED, Scratch, draw_weights

_UNIT = 2.0**-WEIGHT_BITS
_LARGEST_EXPONENT = 500.0
_PIECE_ELEMENTS = 2**19


@dataclass(frozen=True, slots=True)
class DenseRows:
    """Some rows, with their settings and draws, whose logits are read whole.

    Attributes:
        blocked: the logits of all rows.
        rows_R: int64 [R], which of them.
        settings: the settings of those.
        uniforms_R: float64 [R], the draws of those.
    """

    blocked: BlockedRows
    rows_R: torch.Tensor
    settings: SamplingRows
    uniforms_R: torch.Tensor

    def select(self, places_M: torch.Tensor) -> DenseRows:
        """Return some of these rows."""
        return DenseRows(
            self.blocked, self.rows_R[places_M], self.settings.select(places_M), self.uniforms_R[places_M]
        )

    def draw_unfiltered(self) -> torch.Tensor:
        """Return the tokens (int64 [R]) of rows without filters at positive temperatures, or `UNDECIDED`."""
        logits_BNC = self.blocked.logits_BNC
        count, width = logits_BNC.shape[1:]
        scale_R = math.log2(math.e) / self.settings.temperature_B
        sums_RN = torch.empty(len(self.rows_R), count, dtype=torch.float64)
        for start, stop, shares_RNC in self._pieces():
            shares_RNC.mul_(scale_R[start:stop, None, None])
            torch.sum(shares_RNC.exp2_(), -1, out=sums_RN[start:stop])
        through_RN = sums_RN.cumsum(-1)
        total_R = through_RN[:, -1]
        target_R1 = (self.uniforms_R * total_R)[:, None]
        block_R1 = (through_RN <= target_R1).sum(-1, keepdim=True).clamp(max=count - 1)
        shares_RC = logits_BNC[self.rows_R, block_R1[:, 0]].to(torch.float64).mul_(scale_R[:, None]).exp2_()
        before_R1 = through_RN.gather(1, block_R1) - sums_RN.gather(1, block_R1)
        through_RC = before_R1 + shares_RC.cumsum(-1)
        place_R1 = (through_RC <= target_R1).sum(-1, keepdim=True).clamp(max=width - 1)
        end_R1 = through_RC.gather(1, place_R1)
        begin_R1 = end_R1 - shares_RC.gather(1, place_R1)
        # A weight is the floor of its share: the shares are too large by less than a unit each. Their own error, and
        # that of the exponential of the definition, are a few roundings of exponents below 2**10; sums round V times.
        exponent_R = self.blocked.largest_B[self.rows_R] * scale_R
        vocabulary = count * width
        room_R = exponent_R.exp2() * _UNIT * (vocabulary + 4) + total_R * 2.0**-53 * (2 * vocabulary + 2**14)
        distance_R = torch.minimum(target_R1 - begin_R1, end_R1 - target_R1)[:, 0]
        is_certain_R = (distance_R > room_R) & (exponent_R.abs() < _LARGEST_EXPONENT)
        return torch.where(is_certain_R, (block_R1 * width + place_R1)[:, 0], UNDECIDED)

    def draw_exactly(self) -> torch.Tensor:
        """Return the tokens of rows without top-k at positive temperatures, or `UNDECIDED`."""
        tokens_R = torch.empty_like(self.rows_R)
        scratch = Scratch()
        for start, stop, weights_RNC in self._pieces():
            settings = self.settings.slice(start, stop)
            weights_RNC.sub_(self.blocked.largest_B[self.rows_R[start:stop], None, None])
            if bool((settings.temperature_B != 1).any()):
                weights_RNC.div_(settings.temperature_B[:, None, None])
            # Dividing by a power of two and dropping the fraction is the floor of the product, in one pass.
            torch.div(weights_RNC.exp_(), _UNIT, rounding_mode="trunc", out=weights_RNC)
            tokens_R[start:stop] = draw_weights(weights_RNC, settings, self.uniforms_R[start:stop], scratch)
        return tokens_R

    def _pieces(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield ranges of rows and a float64 copy of their logits, which lives until the next."""
        count, width = self.blocked.logits_BNC.shape[1:]
        step = max(1, _PIECE_ELEMENTS // (count * width))
        room_RNC = torch.empty(min(step, len(self.rows_R)), count, width, dtype=torch.float64)
        for start in range(0, len(self.rows_R), step):
            stop = min(start + step, len(self.rows_R))
            first, last = int(self.rows_R[start]), int(self.rows_R[stop - 1])
            is_run = bool((self.rows_R[start:stop] == torch.arange(first, first + stop - start)).all())
            chosen = slice(first, last + 1) if is_run else self.rows_R[start:stop]
            piece_RNC = room_RNC[: stop - start]
            piece_RNC.copy_(self.blocked.logits_BNC[chosen])
            yield start, stop, piece_RNC
