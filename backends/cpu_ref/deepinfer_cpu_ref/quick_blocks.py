"""Which blocks of a row can hold a token that matters, and the row without the others.

A token's weight never rises as its logit falls, but for the last bit of ``exp``. So the largest logit of a block says
whether any of its tokens can have a weight that a filter keeps, and one reading of the logits finds all that can. What
remains is a narrower instance of the same sampling problem: the same weights, the same order (blocks stay in order of
ids), and every token that is missing would have had weight 0.

Legend: B rows, R rows of a group, V vocabulary, N blocks of a row, K blocks that are kept, C tokens of a block, M
entries of a list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.accelerator.ops.sampling import WEIGHT_BITS, SamplingRows

LOG_SLACK = 1e-9
"""Relative room below a bound on weights: far above every rounding here, and below one unit of a weight."""
PLACE_SLACK = 2.0**-48
"""Relative room below a bound on logits: 32 roundings of float64."""
_WEIGHT_SLACK = 4.0
"""Units by which a weight may be above that of a larger logit, or off by rounding, with room."""
_FILLER = -1


@dataclass(frozen=True, slots=True)
class BlockedRows:
    """Rows of logits as blocks, with the largest logit of each.

    Attributes:
        logits_BNC: float32 [B, N, C]; a last block that the vocabulary does not fill ends in -inf.
        largest_BN: float32 [B, N]; NaN where the block holds one.
        largest_B: float64 [B].
    """

    logits_BNC: torch.Tensor
    largest_BN: torch.Tensor
    largest_B: torch.Tensor

    @classmethod
    def of(cls, logits_BV: torch.Tensor, block: int) -> BlockedRows:
        """Part rows of at least one token; the logits are viewed, or copied where the last block is not full."""
        missing = -logits_BV.shape[1] % block
        if missing:
            logits_BV = torch.nn.functional.pad(logits_BV, (0, missing), value=-torch.inf)
        logits_BNC = logits_BV.view(logits_BV.shape[0], -1, block)
        largest_BN = logits_BNC.amax(-1)
        return cls(logits_BNC, largest_BN, largest_BN.amax(-1).to(torch.float64))

    def lowest_best(self, rows_R: torch.Tensor) -> torch.Tensor:
        """Return the lowest id among the largest logits of some rows (int64 [R]), which hold no NaN."""
        block_R = self.largest_BN[rows_R].argmax(-1)
        return block_R * self.logits_BNC.shape[2] + self.logits_BNC[rows_R, block_R].argmax(-1)


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Rows at a positive temperature.

    Attributes:
        rows_R: int64 [R], where their logits lie among all rows.
        settings: their settings.
        uniforms_R: float64 [R], their draws.
    """

    rows_R: torch.Tensor
    settings: SamplingRows
    uniforms_R: torch.Tensor

    def select(self, places_M: torch.Tensor) -> DrawnRows:
        """Return some of these rows."""
        return DrawnRows(self.rows_R[places_M], self.settings.select(places_M), self.uniforms_R[places_M])


def kept_blocks(largest_RN: torch.Tensor, rows: SamplingRows, vocabulary: int, bits_R: torch.Tensor) -> torch.Tensor:
    """Return bool [R, N]: a block that is not kept holds only tokens that end with weight 0, and moves no other's.

    Args:
        largest_RN: the largest logit of each block; a row whose largest is not finite keeps anything.
        rows: the settings of these rows. A greedy row keeps the block of its token.
        vocabulary: what a top-k must be below to be a filter.
        bits_R: int64 [R]; ``2 ** -bits`` is the least share of the largest token that counts: `WEIGHT_BITS`, or more
            for rows without filters.
    """
    largest_R = largest_RN.amax(-1).to(torch.float64)
    greedy_R = rows.temperature_B == 0
    temperature_R = torch.where(greedy_R, 1.0, rows.temperature_B)
    # Logarithm of the weight, as a share of the largest, below which a token cannot matter.
    bound_R = bits_R.to(torch.float64) * -math.log(2.0)
    if rows.facts.has_min_p:
        # Top-p measures its share of everything, so that min-p may be looked at first only where there is none.
        is_first_R = (rows.min_weight_B > 0) & (rows.top_p_B >= 1)
        bound_R = torch.where(is_first_R, _log_share(rows.min_weight_B.to(torch.float64)), bound_R)
    bound_R = bound_R - LOG_SLACK
    if rows.facts.has_top_k:
        bound_R = torch.maximum(bound_R, _bound_by_top_k(largest_RN, largest_R, rows, vocabulary, temperature_R))
    scaled_R = temperature_R * bound_R
    least_R = largest_R + scaled_R - PLACE_SLACK * (largest_R.abs() + scaled_R.abs())
    # At the next float32 below, so that nothing is widened to be compared; at -inf nothing would be left out.
    lowest = torch.finfo(torch.float32).min
    near_R = torch.nextafter(least_R.to(torch.float32), torch.tensor(-torch.inf)).clamp(min=lowest)
    kept_RN = largest_RN >= near_R[:, None]
    if rows.facts.has_greedy:
        places_M = greedy_R.nonzero()[:, 0]
        kept_RN[places_M] = False
        kept_RN[places_M, largest_RN[places_M].argmax(-1)] = True
    return kept_RN


def _bound_by_top_k(
    largest_RN: torch.Tensor,
    largest_R: torch.Tensor,
    rows: SamplingRows,
    vocabulary: int,
    temperature_R: torch.Tensor,
) -> torch.Tensor:
    """Return bounds by top-k, -inf where there is none: the best k blocks hold k tokens, each at least their worst."""
    count = largest_RN.shape[1]
    is_cut_R = (rows.top_k_B > 0) & (rows.top_k_B < vocabulary) & (rows.top_k_B <= count)
    places_R = count - torch.where(is_cut_R, rows.top_k_B, 1)
    # numpy's partition is several times quicker than a top-k, and serves every k at once.
    parted_RN = torch.from_numpy(np.partition(largest_RN.numpy(), np.unique(places_R.numpy()), axis=-1))
    worst_R = parted_RN.gather(1, places_R[:, None])[:, 0].to(torch.float64)
    weight_R = ((worst_R - largest_R) / temperature_R).exp() * 2.0**WEIGHT_BITS - _WEIGHT_SLACK
    return torch.where(is_cut_R & (weight_R > 0), _log_share(weight_R), -torch.inf)


def _log_share(weight_R: torch.Tensor) -> torch.Tensor:
    return (weight_R * 2.0**-WEIGHT_BITS).log()


@dataclass(frozen=True, slots=True)
class NarrowRows:
    """Some rows without the blocks that cannot matter.

    Attributes:
        logits_RV: float32 [R, K * C]; rows with fewer than K blocks end in -inf, and at least one block of every row
            is such filler.
        blocks_RK: int64 [R, K], where each block lay.
        block: C.
    """

    logits_RV: torch.Tensor
    blocks_RK: torch.Tensor
    block: int

    @classmethod
    def of(cls, logits_BNC: torch.Tensor, rows_R: torch.Tensor, kept_RN: torch.Tensor) -> NarrowRows:
        """Gather the kept blocks (bool [R, N]) of some rows in order of ids."""
        count, width = logits_BNC.shape[1:]
        flat_M = true_places(kept_RN)
        row_M, block_M = flat_M // count, flat_M % count
        nth_M, count_R = places_in_rows(row_M, len(rows_R))
        shape = (len(rows_R), int(count_R.max()) + 1)
        logits_RKC = torch.full((*shape, width), -torch.inf)
        logits_RKC[row_M, nth_M] = logits_BNC[rows_R[row_M], block_M]
        blocks_RK = torch.full(shape, _FILLER)
        blocks_RK[row_M, nth_M] = block_M
        return cls(logits_RKC.view(len(rows_R), -1), blocks_RK, width)

    def ids(self, places_RM: torch.Tensor) -> torch.Tensor:
        """Return the token ids at places (int64 [R, M]) of the narrow rows; -1 stays -1."""
        inside_RM = places_RM.clamp(min=0)
        ids_RM = self.blocks_RK.gather(1, inside_RM // self.block) * self.block + inside_RM % self.block
        return torch.where(places_RM < 0, -1, ids_RM)

    def places(self, ids_R: torch.Tensor) -> torch.Tensor:
        """Return where token ids (int64 [R], each in a kept block, or -1) lie in the narrow rows; -1 stays -1."""
        nth_R = (self.blocks_RK == (ids_R // self.block)[:, None]).to(torch.int8).argmax(-1)
        return torch.where(ids_R < 0, -1, nth_R * self.block + ids_R % self.block)

    def top_k(self, rows: SamplingRows, vocabulary: int) -> torch.Tensor:
        """Return the rows' top-k for the narrow vocabulary: a cut stays a cut, at the latest within the filler."""
        is_cut_R = (rows.top_k_B > 0) & (rows.top_k_B < vocabulary)
        return torch.where(is_cut_R, rows.top_k_B.clamp(max=self.logits_RV.shape[1] - 1), 0)


def true_places(flags: torch.Tensor) -> torch.Tensor:
    """Return the places of the True values of a contiguous bool tensor, in order, as if it were flat."""
    # Several times quicker than torch's nonzero, which also makes a column for each dimension.
    return torch.from_numpy(np.flatnonzero(flags.numpy()))


def places_in_rows(row_M: torch.Tensor, row_count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each entry's place among those of its row (int64 [M], rows ascending), and how many each row has."""
    count_R = torch.bincount(row_M, minlength=row_count)
    return torch.arange(len(row_M)) - (count_R.cumsum(0) - count_R)[row_M], count_R
