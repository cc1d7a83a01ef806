"""Which blocks of a row can hold a token that matters, and the row without the others.

A token's weight never rises as its logit falls, but for the last bit of ``exp``. So the largest logit of a block says
whether any of its tokens can have a weight that a filter keeps, and one reading of the logits finds all that can. What
remains is a narrower instance of the same sampling problem: the same weights, the same order (blocks stay in order of
ids), and every token that is missing would have had weight 0.

Legend: B rows, R rows of a group, V vocabulary, N blocks of a row, K blocks that are kept, C tokens of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from deepinfer.accelerator.ops.sampling import WEIGHT_BITS, SamplingRows

_LOG_SLACK = 1e-9
"""Relative room below a bound on weights: far above every rounding here, and below one unit of a weight."""
_PLACE_SLACK = 2.0**-48
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


def kept_blocks(blocked: BlockedRows, rows: SamplingRows, vocabulary: int, bits_B: torch.Tensor) -> torch.Tensor:
    """Return bool [B, N]: a block that is not kept holds only tokens that end with weight 0, and moves no other's.

    The weights are those of ``weigh``, except that ``2 ** -bits`` is the least share of the largest token that counts
    (int64 [B], `WEIGHT_BITS` or more; more only in rows without filters). A greedy row keeps the block of its token.
    """
    greedy_B = rows.temperature_B == 0
    temperature_B = torch.where(greedy_B, 1.0, rows.temperature_B)
    # Logarithm of the weight, as a share of the largest, below which a token cannot matter.
    bound_B = bits_B.to(torch.float64) * -math.log(2.0)
    if rows.facts.has_min_p:
        # Top-p measures its share of everything, so that min-p may be looked at first only where there is none.
        first_B = (rows.min_weight_B > 0) & (rows.top_p_B >= 1)
        bound_B = torch.where(first_B, _log_share(rows.min_weight_B.to(torch.float64)), bound_B)
    bound_B = bound_B - _LOG_SLACK
    if rows.facts.has_top_k:
        bound_B = torch.maximum(bound_B, _bound_by_top_k(blocked, rows, vocabulary, temperature_B))
    scaled_B = temperature_B * bound_B
    least_B = blocked.largest_B + scaled_B - _PLACE_SLACK * (blocked.largest_B.abs() + scaled_B.abs())
    kept_BN = blocked.largest_BN >= torch.where(greedy_B, blocked.largest_B, least_B)[:, None]
    kept_BN &= blocked.largest_BN > -torch.inf
    if rows.facts.has_greedy:
        first_BN = kept_BN & (kept_BN.cumsum(-1) == 1)
        kept_BN = torch.where(greedy_B[:, None], first_BN, kept_BN)
    return kept_BN


def _bound_by_top_k(
    blocked: BlockedRows, rows: SamplingRows, vocabulary: int, temperature_B: torch.Tensor
) -> torch.Tensor:
    """Return bounds by top-k, -inf where there is none: k blocks hold k tokens at least as good as the worst of them."""
    count = blocked.largest_BN.shape[1]
    is_cut_B = (rows.top_k_B > 0) & (rows.top_k_B < vocabulary) & (rows.top_k_B <= count)
    places_B = torch.where(is_cut_B, rows.top_k_B - 1, 0)
    most = int(places_B.max()) + 1
    worst_B = blocked.largest_BN.topk(most, dim=-1).values.gather(1, places_B[:, None])[:, 0].to(torch.float64)
    weight_B = ((worst_B - blocked.largest_B) / temperature_B).exp() * 2.0**WEIGHT_BITS - _WEIGHT_SLACK
    return torch.where(is_cut_B & (weight_B > 0), _log_share(weight_B), -torch.inf)


def _log_share(weight_B: torch.Tensor) -> torch.Tensor:
    return (weight_B * 2.0**-WEIGHT_BITS).log()


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
    def of(cls, blocked: BlockedRows, kept_BN: torch.Tensor, rows_R: torch.Tensor) -> NarrowRows:
        """Gather the kept blocks of some rows in order of ids."""
        kept_RN = kept_BN[rows_R]
        row_M, block_M = kept_RN.nonzero(as_tuple=True)
        count_R = kept_RN.sum(-1)
        nth_M = torch.arange(len(row_M)) - (count_R.cumsum(0) - count_R)[row_M]
        shape = (len(rows_R), int(count_R.max()) + 1)
        width = blocked.logits_BNC.shape[2]
        logits_RKC = torch.full((*shape, width), -torch.inf)
        logits_RKC[row_M, nth_M] = blocked.logits_BNC[rows_R[row_M], block_M]
        blocks_RK = torch.full(shape, _FILLER)
        blocks_RK[row_M, nth_M] = block_M
        return cls(logits_RKC.view(len(rows_R), -1), blocks_RK, width)

    def ids(self, places_RT: torch.Tensor) -> torch.Tensor:
        """Return the token ids at places (int64 [R, T]) of the narrow rows; -1 stays -1."""
        inside_RT = places_RT.clamp(min=0)
        ids_RT = self.blocks_RK.gather(1, inside_RT // self.block) * self.block + inside_RT % self.block
        return torch.where(places_RT < 0, -1, ids_RT)

    def places(self, ids_R: torch.Tensor) -> torch.Tensor:
        """Return where token ids (int64 [R], each in a kept block, or -1) lie in the narrow rows; -1 stays -1."""
        nth_R = (self.blocks_RK == (ids_R // self.block)[:, None]).to(torch.int8).argmax(-1)
        return torch.where(ids_R < 0, -1, nth_R * self.block + ids_R % self.block)

    def top_k(self, rows: SamplingRows, vocabulary: int) -> torch.Tensor:
        """Return the rows' top-k for the narrow vocabulary: a cut stays a cut, at the latest within the filler."""
        is_cut_R = (rows.top_k_B > 0) & (rows.top_k_B < vocabulary)
        return torch.where(is_cut_R, rows.top_k_B.clamp(max=self.logits_RV.shape[1] - 1), 0)
