"""The oracle's picks: entries whose index keys, as read through the block table, answer the row's query.

Legend: T rows, R requests, E entries, K selected entries, B candidate blocks, J index heads, I index width,
n blocks of entries.
"""

from __future__ import annotations

import torch

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import IndexCache
from deepinfer.accelerator.ops.selection import Selection, SelectionOps, SelectionRule
from deepinfer_conformance.drivers.host import OptionedGroup
from deepinfer_conformance.drivers.oracle.hashing import CHANNELS, Role, linear_of, query_of, score_of, term
from deepinfer_conformance.drivers.oracle.paged import entry_places, request_ends
from deepinfer_conformance.drivers.oracle.records import read_keys

_LOWEST = -(1 << 63)
_HIGHEST = (1 << 63) - 1
_BEYOND = _HIGHEST


class OracleSelection(OptionedGroup, SelectionOps):
    """A row picks, of the entries with a positive score, the K best.

    About half of the visible entries score below zero and are never picked. So a wrong index key shows within a few
    rows even where fewer than K entries are visible and a real indexer would pick them all.
    """

    def top_entries(
        self,
        query_TJI: torch.Tensor,
        head_weight_TJ: torch.Tensor,
        keys: IndexCache,
        step: StepLayout,
        rule: SelectionRule,
        candidates_TB: torch.Tensor | None = None,
    ) -> Selection:
        """Score every visible entry by a hash of the row and of the key that was read."""
        del head_weight_TJ
        if step.rows == 0 or step.max_position < keys.ratio:
            return _nothing(step.position_T, rule)
        places = entry_places(step, request_ends(step), keys.ratio, keys.entries_per_block)
        records = read_keys(keys, places.blocks_RE, places.offsets_E)
        keys_RE = term(Role.KEY, places.entries_E, records.linear, records.damage)
        query_T = query_of(linear_of(query_TJI[:, 0, :CHANNELS].to(torch.int64)))
        scores_TE = score_of(query_T[:, None], keys_RE[step.request_T])
        visible_T = torch.where(step.valid_T, (step.position_T + 1) // keys.ratio, 0)
        return select(scores_TE, visible_T, rule, candidates_TB)


def select(
    scores_TE: torch.Tensor, visible_T: torch.Tensor, rule: SelectionRule, candidates_TB: torch.Tensor | None
) -> Selection:
    """Return the picks of rows from int64 scores; row t sees entries below ``visible_T[t]``."""
    entries_E = torch.arange(scores_TE.shape[1])
    seen_TE = entries_E < visible_T[:, None]
    allowed_TE = seen_TE & (scores_TE >= 0)
    if candidates_TB is not None and not rule.publish:
        allowed_TE &= _inside(candidates_TB, entries_E, rule.candidate_block_size)
    picks_TK = _best(torch.where(allowed_TE, scores_TE, _LOWEST), rule.top_k)
    if not rule.publish:
        return Selection(picks_TK, None)
    return Selection(picks_TK, _candidates(torch.where(seen_TE, scores_TE, _LOWEST), visible_T, rule))


def _candidates(scores_TE: torch.Tensor, visible_T: torch.Tensor, rule: SelectionRule) -> torch.Tensor:
    size = rule.candidate_block_size
    rest = -scores_TE.shape[1] % size
    padded_TE = torch.nn.functional.pad(scores_TE, (0, rest), value=_LOWEST)
    best_Tn = padded_TE.view(padded_TE.shape[0], -1, size).amax(2)
    newest_T = (visible_T - 1) // size
    is_newest_Tn = torch.arange(best_Tn.shape[1]) == newest_T[:, None]
    return _best(torch.where(is_newest_Tn & (visible_T > 0)[:, None], _HIGHEST, best_Tn), rule.candidate_blocks)


def _best(scores_TE: torch.Tensor, count: int) -> torch.Tensor:
    """Return int64 [T, count]: the places of the best scores above the lowest, ascending, then -1.

    Scores are 64-bit hashes; two equal ones in a row are not to be expected.
    """
    found = min(count, scores_TE.shape[1])
    best = scores_TE.topk(found, dim=1)
    places = torch.where(best.values > _LOWEST, best.indices, _BEYOND).sort(dim=1).values
    places = torch.where(places == _BEYOND, -1, places)
    return torch.nn.functional.pad(places, (0, count - found), value=-1)


def _inside(candidates_TB: torch.Tensor, entries_E: torch.Tensor, size: int) -> torch.Tensor:
    # Column 0 takes the -1 of rows with few blocks.
    blocks = int(entries_E.shape[0]) // size + 2
    open_Tn = torch.zeros((candidates_TB.shape[0], blocks), dtype=torch.bool)
    open_Tn.scatter_(1, (candidates_TB + 1).clamp(max=blocks - 1), 1)
    return open_Tn[:, 1 + entries_E // size]


def _nothing(position_T: torch.Tensor, rule: SelectionRule) -> Selection:
    rows = position_T.shape[0]
    blocks_TB = position_T.new_full((rows, rule.candidate_blocks), -1) if rule.publish else None
    return Selection(position_T.new_full((rows, rule.top_k), -1), blocks_TB)
