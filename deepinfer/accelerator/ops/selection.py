"""Sparse selection: index scores, top-k by total order, candidate blocks (model.md section 6).

Legend: T rows, J index heads, I index width, K top-k, B candidate blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import IndexCache
from deepinfer.accelerator.ops.base import OpGroup, not_implemented, op


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """How many entries and candidate blocks a layer picks.

    Attributes:
        top_k: K, entries per row.
        candidate_blocks: B, blocks that a publishing layer keeps per row.
        candidate_block_size: entries per candidate block.
        publish: the layer publishes candidate blocks for later layers.
    """

    top_k: int
    candidate_blocks: int
    candidate_block_size: int
    publish: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    """What a layer picked.

    Attributes:
        entries_TK: int64 [T, K], entry numbers in ascending order, then -1.
        candidates_TB: int64 [T, B] candidate block numbers in ascending order, then -1; None unless published.
    """

    entries_TK: torch.Tensor
    candidates_TB: torch.Tensor | None


class SelectionOps(OpGroup):
    """Scores of all visible entries and the best of them."""

    group = "selection"

    @op
    def top_entries(
        self,
        query_TJI: torch.Tensor,
        head_weight_TJ: torch.Tensor,
        keys: IndexCache,
        step: StepLayout,
        rule: SelectionRule,
        candidates_TB: torch.Tensor | None = None,
    ) -> Selection:
        """Pick the K entries with the highest index score that each row may see.

        Row at position p sees entries ``j < (p + 1) // keys.ratio`` of its own request, through the block table;
        this step's entries are already stored. ``score[j] = sum_h w[h] * relu(q[h] . key[j])`` in float32 (at least),
        heads added in ascending order of h. The query is first rounded through the keys' record format (identity for
        float32 records). Total order: score descending, then entry ascending; -0 equals +0.

        With ``candidates_TB`` only entries of the row's candidate blocks compete (entry j lies in block
        ``j // candidate_block_size``). With ``rule.publish`` the layer's own pick is unrestricted and it publishes:
        block score = highest entry score in the block among visible ones, the block of the newest visible entry
        counts as +inf, the best B blocks by (score descending, block ascending); fewer blocks than B are all kept.

        Args:
            query_TJI: rotated index queries, not yet quantised.
            head_weight_TJ: per-head weights with both scale factors folded in.
            keys: the KV owner's index cache.
            step: the ragged layout.
            rule: counts.
            candidates_TB: the publishing layer's blocks for this step, or None.

        Returns:
            The selection. Rows that see nothing, and invalid rows, are all -1. NaN scores rank below every number.
            Entries and bytes beyond what the row may see must not influence anything, whatever they hold. R2.
        """
        not_implemented(self, "top_entries")
