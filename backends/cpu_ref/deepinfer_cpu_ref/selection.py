"""Sparse selection: index scores, top entries by total order, candidate blocks.

Rows of one request share its keys, so that keys are gathered and decoded once a request. Scores become integers of the
same order (`invariant.order_keys`), in which NaN, what a row may not see, and the newest block have a definite place.

Legend: T rows, t rows of one tile, J index heads, I index width, K top-k, B candidate blocks, n visible entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import IndexCache
from deepinfer.accelerator.ops.selection import Selection, SelectionOps, SelectionRule
from deepinfer.numerics import Float32Record
from deepinfer_cpu_ref.codec import read_index_keys
from deepinfer_cpu_ref.computation import Computed, refuse, require_float, require_width
from deepinfer_cpu_ref.invariant import ascending, best, excluded_key, order_keys, padded_product
from deepinfer_cpu_ref.rows import paged_slots

KEY_PIECE = 512
"""Keys of one product. With R2 the last piece is filled up, so that every product of a model has the same width."""

TILE_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class _Queries:
    """Rows of one request (or a tile of them), with what each may see."""

    query_TJI: Tensor
    head_weight_TJ: Tensor
    seen_T: Tensor
    candidates_TB: Tensor | None

    @property
    def rows(self) -> int:
        return self.query_TJI.shape[0]

    def part(self, start: int, stop: int) -> _Queries:
        candidates = None if self.candidates_TB is None else self.candidates_TB[start:stop]
        return _Queries(
            self.query_TJI[start:stop], self.head_weight_TJ[start:stop], self.seen_T[start:stop], candidates
        )


class CpuRefSelection(Computed, SelectionOps):
    """Exact scores in at least float32 and a stable total order."""

    def top_entries(
        self,
        query_TJI: Tensor,
        head_weight_TJ: Tensor,
        keys: IndexCache,
        step: StepLayout,
        rule: SelectionRule,
        candidates_TB: Tensor | None = None,
    ) -> Selection:
        """See :meth:`SelectionOps.top_entries`."""
        require_float("selection.top_entries", "query", query_TJI)
        require_width("selection.top_entries", "query", query_TJI, keys.format.width)
        if tuple(head_weight_TJ.shape) != tuple(query_TJI.shape[:2]) or query_TJI.shape[0] != step.rows:
            refuse(
                "selection.top_entries",
                f"queries {tuple(query_TJI.shape)} and head weights {tuple(head_weight_TJ.shape)} do not describe "
                f"the step's {step.rows} rows",
            )
        seen_T = torch.where(step.valid_T, (step.position_T + 1) // keys.ratio, 0)
        restriction_TB = None if rule.publish else candidates_TB
        if restriction_TB is None and _everything_wins(seen_T, rule):
            return _take_everything(seen_T, rule)
        wide = self.computation.wide
        queries = _Queries(self._rounded(query_TJI, keys), head_weight_TJ.to(wide), seen_T, restriction_TB)
        picks = [
            self._of_request(queries.part(start, stop), keys, step.block_table_RB[request], rule)
            for request, (start, stop) in enumerate(_row_ranges(step))
        ]
        return _join(picks, seen_T, rule)

    def _rounded(self, query_TJI: Tensor, keys: IndexCache) -> Tensor:
        if not isinstance(keys.format, Float32Record):
            query_TJI = keys.format.round_trip(query_TJI)
        return query_TJI.to(self.computation.wide)

    def _of_request(self, queries: _Queries, keys: IndexCache, table_B: Tensor, rule: SelectionRule) -> Selection:
        if queries.candidates_TB is None and _everything_wins(queries.seen_T, rule):
            return _take_everything(queries.seen_T, rule)
        visible = int(queries.seen_T.max()) if queries.rows else 0
        entry_n = torch.arange(visible, device=table_B.device)
        slot_n = paged_slots(table_B.unsqueeze(0), torch.zeros_like(entry_n), entry_n, keys.entries_per_block)
        keys_nI = read_index_keys(keys, slot_n).to(self.computation.wide)
        row_bytes = keys_nI.element_size() * (queries.query_TJI.shape[1] * KEY_PIECE + 8 * visible)
        tile = max(1, TILE_BYTES // row_bytes)
        picks = [
            self._of_tile(queries.part(start, start + tile), keys_nI, rule) for start in range(0, queries.rows, tile)
        ]
        return _join(picks, queries.seen_T, rule)

    def _of_tile(self, queries: _Queries, keys_nI: Tensor, rule: SelectionRule) -> Selection:
        visible_tn = torch.arange(keys_nI.shape[0], device=keys_nI.device) < queries.seen_T.unsqueeze(1)
        if queries.candidates_TB is not None:
            visible_tn &= _in_candidates(queries.candidates_TB, keys_nI.shape[0], rule.candidate_block_size)
        if not rule.publish and int(visible_tn.sum(1).max()) <= rule.top_k:
            order_tn = order_keys(torch.zeros_like(visible_tn, dtype=self.computation.wide), visible_tn)
        else:
            order_tn = order_keys(self._scores(queries, keys_nI), visible_tn)
        entries_tK = ascending(best(order_tn, rule.top_k))
        if not rule.publish:
            return Selection(entries_tK, None)
        return Selection(entries_tK, _best_blocks(order_tn, queries.seen_T, rule))

    def _scores(self, queries: _Queries, keys_nI: Tensor) -> Tensor:
        rows_tJI = queries.query_TJI.flatten(0, 1)
        return torch.cat(
            [self._piece_scores(rows_tJI, queries, piece_nI) for piece_nI in torch.split(keys_nI, KEY_PIECE)], dim=1
        )

    def _piece_scores(self, rows_tJI: Tensor, queries: _Queries, piece_nI: Tensor) -> Tensor:
        width = piece_nI.shape[0]
        if self.computation.invariant:
            dots = padded_product(rows_tJI, F.pad(piece_nI, (0, 0, 0, KEY_PIECE - width)), width)
        else:
            dots = F.linear(rows_tJI, piece_nI)
        dots_tJn = torch.unflatten(dots, 0, (queries.rows, -1))
        score_tn = dots.new_zeros((queries.rows, width))
        for head in range(dots_tJn.shape[1]):
            score_tn = score_tn + queries.head_weight_TJ[:, head, None] * torch.relu(dots_tJn[:, head])
        return score_tn


def _row_ranges(step: StepLayout) -> list[tuple[int, int]]:
    starts = step.row_starts_R1.tolist()
    return list(pairwise(starts))


def _everything_wins(seen_T: Tensor, rule: SelectionRule) -> bool:
    """Where no row has more competitors than places, scores decide nothing and need not be computed."""
    most = int(seen_T.max()) if seen_T.numel() else 0
    blocks_fit = math.ceil(most / rule.candidate_block_size) <= rule.candidate_blocks if rule.publish else True
    return most <= rule.top_k and blocks_fit


def _take_everything(seen_T: Tensor, rule: SelectionRule) -> Selection:
    entries_TK = _first(seen_T, rule.top_k)
    if not rule.publish:
        return Selection(entries_TK, None)
    seen_blocks_T = (seen_T + rule.candidate_block_size - 1) // rule.candidate_block_size
    return Selection(entries_TK, _first(seen_blocks_T, rule.candidate_blocks))


def _first(count_T: Tensor, width: int) -> Tensor:
    places = torch.arange(width, device=count_T.device).expand(count_T.shape[0], width)
    return places.masked_fill(places >= count_T.unsqueeze(1), -1)


def _in_candidates(candidates_tB: Tensor, entries: int, block_size: int) -> Tensor:
    blocks = math.ceil(entries / block_size)
    # One more place takes the missing blocks (-1) and those that lie beyond what any row sees.
    place_tB = torch.where((candidates_tB >= 0) & (candidates_tB < blocks), candidates_tB, blocks)
    kept = torch.zeros((candidates_tB.shape[0], blocks + 1), dtype=torch.bool, device=candidates_tB.device)
    kept.scatter_(1, place_tB, torch.ones_like(place_tB, dtype=torch.bool))
    return kept[:, :blocks].repeat_interleave(block_size, dim=1)[:, :entries]


def _best_blocks(order_tn: Tensor, seen_t: Tensor, rule: SelectionRule) -> Tensor:
    size = rule.candidate_block_size
    padded = F.pad(order_tn, (0, -order_tn.shape[1] % size), value=excluded_key(order_tn))
    order_tb = torch.unflatten(padded, 1, (-1, size)).amax(-1)
    infinity = order_keys(torch.full((), math.inf, dtype=_score_dtype(order_tn)))
    newest_t1 = ((seen_t - 1) // size).unsqueeze(1)
    is_newest = torch.arange(order_tb.shape[1], device=order_tb.device) == newest_t1
    return ascending(best(order_tb.masked_fill(is_newest, int(infinity)), rule.candidate_blocks))


def _score_dtype(order_tn: Tensor) -> torch.dtype:
    return torch.float64 if order_tn.dtype == torch.int64 else torch.float32


def _join(picks: list[Selection], seen_T: Tensor, rule: SelectionRule) -> Selection:
    """Put the picks of consecutive rows together; no rows give an empty selection."""
    if not picks:
        return _take_everything(torch.zeros_like(seen_T), rule)
    entries_TK = torch.cat([pick.entries_TK for pick in picks])
    candidates = [pick.candidates_TB for pick in picks if pick.candidates_TB is not None]
    return Selection(entries_TK, torch.cat(candidates) if candidates else None)
