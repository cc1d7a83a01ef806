"""Selection that computes no score where everything visible wins, candidates or not.

Legend: T rows, K top-k, B candidate blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import IndexCache
from deepinfer.accelerator.ops.selection import Selection, SelectionRule
from deepinfer_cpu_ref.selection import CpuRefSelection


class QuickSelection(CpuRefSelection):
    """The readable op, told when candidate blocks exclude nothing: it then takes its own short way."""

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
        if candidates_TB is not None and _exclude_nothing(candidates_TB, keys, step, rule):
            candidates_TB = None
        return super().top_entries(query_TJI, head_weight_TJ, keys, step, rule, candidates_TB)


def _exclude_nothing(candidates_TB: Tensor, keys: IndexCache, step: StepLayout, rule: SelectionRule) -> bool:
    """Say whether each row's candidates are exactly all the blocks that it sees."""
    most = -(-(step.max_position // keys.ratio) // rule.candidate_block_size)
    if most > candidates_TB.shape[1]:
        return False
    blocks = torch.arange(most, device=candidates_TB.device)
    seen_T = torch.where(step.valid_T, (step.position_T + 1) // keys.ratio, 0)
    needed_T1 = (-(-seen_T // rule.candidate_block_size)).unsqueeze(1)
    return bool(((candidates_TB[:, :most] == blocks) | (blocks >= needed_T1)).all())
