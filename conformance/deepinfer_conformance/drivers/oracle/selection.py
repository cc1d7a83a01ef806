"""The oracle's picks: entries whose index keys, as read through the block table, answer the row's query.

Legend: T rows, R requests, E entries, K selected entries, B candidate blocks, J index heads, I index width,
n blocks of entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import IndexCache
from deepinfer.accelerator.ops.selection import Selection, SelectionOps, SelectionRule
from deepinfer_conformance.drivers.host import OptionedGroup
from deepinfer_conformance.drivers.oracle.hashing import Flags, Integers, Role, linear_of, query_of, score_of, term
from deepinfer_conformance.drivers.oracle.paged import entry_places, request_ends
from deepinfer_conformance.drivers.oracle.records import KeySections, read_sections
from deepinfer_conformance.drivers.oracle.rows import words_of

_LOWEST = -(1 << 63)
_HIGHEST = (1 << 63) - 1
_BEYOND = _HIGHEST


@dataclass(frozen=True, slots=True)
class Picks:
    """What rows picked.

    Attributes:
        entries_TK: entries in ascending order, then -1.
        candidates_TB: candidate blocks in ascending order, then -1; None unless published.
    """

    entries_TK: Integers
    candidates_TB: Integers | None


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
        scores_TE = np.zeros((step.rows, 0), dtype=np.int64)
        if step.rows:
            places = entry_places(step, request_ends(step), keys.ratio, keys.entries_per_block)
            sections = KeySections.of(keys.bytes_Nb.numpy(), keys.entries_per_block, keys.format)
            data = sections.data[places.blocks_RE, places.offsets_E]
            ends = sections.scales[places.blocks_RE, places.offsets_E] if keys.format.scale_bytes else data
            records = read_sections(data, ends, keys.format)
            keys_RE = term(Role.KEY, places.entries_E, records.linear, records.damage)
            query_T = query_of(linear_of(words_of(query_TJI)[:, 0]))
            scores_TE = score_of(query_T[:, None], keys_RE[step.request_T.numpy()])
        visible_T = (step.position_T.numpy() + 1) // keys.ratio * step.valid_T.numpy()
        picks = select(scores_TE, visible_T, rule, None if candidates_TB is None else candidates_TB.numpy())
        blocks_TB = None if picks.candidates_TB is None else torch.from_numpy(picks.candidates_TB)
        return Selection(torch.from_numpy(picks.entries_TK), blocks_TB)


def select(scores_TE: Integers, visible_T: Integers, rule: SelectionRule, candidates_TB: Integers | None) -> Picks:
    """Return the picks of rows; row t sees entries below ``visible_T[t]``."""
    entries_E = np.arange(scores_TE.shape[1])
    seen_TE = entries_E < visible_T[:, None]
    allowed_TE = seen_TE & (scores_TE >= 0)
    if candidates_TB is not None and not rule.publish:
        allowed_TE &= _inside(candidates_TB, entries_E, rule.candidate_block_size)
    picks_TK = _best(scores_TE, allowed_TE, rule.top_k)
    return Picks(picks_TK, _candidates(scores_TE, seen_TE, visible_T, rule) if rule.publish else None)


def _candidates(scores_TE: Integers, seen_TE: Flags, visible_T: Integers, rule: SelectionRule) -> Integers:
    size, rows = rule.candidate_block_size, scores_TE.shape[0]
    blocks = -(-scores_TE.shape[1] // size)
    padded_TE = np.full((rows, blocks * size), _LOWEST, dtype=np.int64)
    padded_TE[:, : scores_TE.shape[1]] = np.where(seen_TE, scores_TE, _LOWEST)
    block_n = np.arange(blocks)
    newest_T = (visible_T - 1) // size
    # The block of the newest entry is always kept; -1 is no block's number.
    best_Tn = np.where(block_n == newest_T[:, None], _HIGHEST, padded_TE.reshape(rows, blocks, size).max(2))
    return _best(best_Tn, block_n <= newest_T[:, None], rule.candidate_blocks)


def _best(scores_TE: Integers, allowed_TE: Flags, count: int) -> Integers:
    """Return [T, count]: the places of the best allowed scores, ascending, then -1.

    Scores are 64-bit hashes; two equal ones in a row are not to be expected.
    """
    rows, width = scores_TE.shape
    places_TE = np.where(allowed_TE, np.arange(width), _BEYOND)
    if width > count:
        kept = np.argpartition(np.where(allowed_TE, scores_TE, _LOWEST), width - count, axis=1)[:, width - count :]
        places_TE = np.take_along_axis(places_TE, kept, axis=1)
    places_TE.sort(axis=1)
    best = np.full((rows, count), -1, dtype=np.int64)
    best[:, : places_TE.shape[1]] = np.where(places_TE == _BEYOND, -1, places_TE)
    return best


def _inside(candidates_TB: Integers, entries_E: Integers, size: int) -> Flags:
    # Column 0 takes the -1 of rows with few blocks.
    open_Tn = np.zeros((candidates_TB.shape[0], entries_E.shape[0] // size + 2), dtype=np.bool_)
    np.put_along_axis(open_Tn, np.minimum(candidates_TB + 1, open_Tn.shape[1] - 1), values=True, axis=1)
    return open_Tn[:, 1 + entries_E // size]
