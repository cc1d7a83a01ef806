"""Drafts by script: some right, some wrong, some missing; what is emitted must not depend on which.

Legend: R requests, n drafts a request, K kept tokens of a draft's distribution.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepinfer.accelerator import Ops
from deepinfer.accelerator.ops.drafting import PLACEHOLDER, DraftDistributions
from deepinfer.accelerator.ops.sampling import WEIGHT_BITS
from deepinfer.cache.pools import CachePools
from deepinfer.engine.speculation import Newest, Round, Speculation
from deepinfer.sampling.drafting import DraftPolicy
from deepinfer.scheduling.step import ScheduledStep

Foretell = Callable[[str, Sequence[int], int, int], list[int]]
"""Takes a sequence's id, its history, how much of it is prompt, and a number; returns the tokens that must follow."""


def scripted(request_id: str, length: int, right: Sequence[int], vocab_size: int) -> list[int]:
    """Return drafts for the tokens behind a history: of four, one is wrong, and now and then there is none.

    Args:
        request_id: the request.
        length: tokens of its history.
        right: the tokens that must follow.
        vocab_size: ids are below it.
    """
    drafts = []
    for place, token_id in enumerate(right):
        luck = zlib.crc32(f"{request_id}:{length + place}".encode()) % 16
        if luck == 0:
            drafts.append(PLACEHOLDER)
        else:
            drafts.append((token_id + (luck < 4)) % vocab_size)
    return drafts


class ScriptedSpeculation(Speculation):
    """Proposes by script what a model would have to draft; the engine around it is the real one."""

    def __init__(self, foretell: Foretell, vocab_size: int, ops: Ops, policy: DraftPolicy, **sizes: Any) -> None:
        """Begin without drafts; ``sizes`` are those of every :class:`Speculation`."""
        super().__init__(ops, policy, **sizes)
        self._foretell = foretell
        self._vocab_size = vocab_size

    def _round(self, step: ScheduledStep, newest: Newest, pools: CachePools) -> Round:  # noqa: ARG002
        made = []
        columns = (newest.token_ids_R.tolist(), newest.block.context_R.tolist(), newest.block.valid_R.tolist())
        drafts = self.token_ids(step)
        for sequence, verified, token_id, context, is_valid in zip(step.sequences, drafts, *columns, strict=True):
            if not is_valid:
                made.append([PLACEHOLDER] * self.drafts)
                continue
            known = min(context, sequence.length)
            history = [*sequence.token_ids(0, known).tolist(), *verified[: context - known], token_id]
            right = self._foretell(sequence.request_id, history, sequence.num_prompt_tokens, self.drafts)
            made.append(scripted(sequence.request_id, len(history), right, self._vocab_size))
        token_ids_Rn = torch.tensor(made, dtype=torch.int64)
        chances_Rn = (token_ids_Rn >= 0).to(torch.float32)
        return Round(token_ids_Rn, chances_Rn, self._certain(token_ids_Rn) if self.policy.kept_tokens else None)

    def _certain(self, token_ids_Rn: torch.Tensor) -> DraftDistributions:
        """Return distributions that give each draft all the probability."""
        shape = (*token_ids_Rn.shape, self.policy.kept_tokens)
        ids_RnK = torch.full(shape, -1, dtype=torch.int64)
        weights_RnK = torch.zeros(shape, dtype=torch.int64)
        is_there_Rn = token_ids_Rn >= 0
        ids_RnK[:, :, 0] = token_ids_Rn
        weights_RnK[:, :, 0] = torch.where(is_there_Rn, 1 << WEIGHT_BITS, 0)
        return DraftDistributions(ids_RnK, weights_RnK, weights_RnK.sum(-1))
