"""Log-probabilities of prompts: computed in pieces, gathered chunk by chunk, each position once.

Legend: T rows of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from deepinfer.accelerator.ops.sampling import SamplingOps
from deepinfer.accelerator.upload import on_device
from deepinfer.errors import InvariantError
from deepinfer.sampling.sampler import read_log_probabilities

ROWS_PER_PIECE = 64


class PromptLogProbabilities:
    """The list of one prompt, filled in any number of chunks; computing a chunk again changes nothing.

    Entry p is about the prompt's token p and comes from row p - 1; the first entry is None, and so is one whose row
    holds NaN or +inf.
    """

    def __init__(self, prompt_token_ids: Sequence[int], count: int) -> None:
        self._prompt = tuple(prompt_token_ids)
        self._count = count
        self._entries: list[dict[int, float] | None] = [None]

    def wanted(self, cached_tokens: int, new_tokens: int) -> range:
        """Return the positions of a chunk whose rows are still needed, ascending; often empty, never out of it."""
        start = max(cached_tokens, len(self._entries) - 1)
        return range(start, max(start, min(cached_tokens + new_tokens, len(self._prompt) - 1)))

    def record(
        self,
        wanted: range,
        hidden_TD: torch.Tensor,
        project: Callable[[torch.Tensor], torch.Tensor],
        ops: SamplingOps,
    ) -> None:
        """Add the entries of some positions, reading them from the device.

        Args:
            wanted: the positions, as :meth:`wanted` named them.
            hidden_TD: the final hidden states of these rows.
            project: from hidden states to float32 logits [T, V]; called with at most :data:`ROWS_PER_PIECE` rows, so
                that the logits of a prompt never exist at once.
            ops: the accelerator's sampling ops.

        Raises:
            InvariantError: if the positions do not follow those recorded before.
        """
        if len(wanted) != len(hidden_TD) or (wanted and wanted.start != len(self._entries) - 1):
            raise InvariantError(
                f"prompt log-probabilities are known up to position {len(self._entries) - 1}, "
                f"but {len(hidden_TD)} rows came for {wanted}"
            )
        for start in range(0, len(wanted), ROWS_PER_PIECE):
            positions = wanted[start : start + ROWS_PER_PIECE]
            chosen = self._prompt[positions.start + 1 : positions.stop + 1]
            logits_TV = project(hidden_TD[start : start + len(positions)])
            chosen_T = on_device(np.array(chosen, np.int64), logits_TV.device)
            values = ops.raw_log_probabilities(logits_TV, chosen_T, self._count)
            found = read_log_probabilities(values, chosen, [self._count] * len(chosen))
            # A row with NaN or +inf has no distribution: its entry is None, never a number that looks like one.
            is_broken = (logits_TV.amax(-1).isfinite().logical_not() & ~(logits_TV == -math.inf).all(-1)).tolist()
            self._entries += [None if broken else entry for entry, broken in zip(found, is_broken, strict=True)]

    @property
    def is_complete(self) -> bool:
        """Whether every position of the prompt has its entry."""
        return len(self._entries) == len(self._prompt)

    def entries(self) -> tuple[dict[int, float] | None, ...]:
        """Return the entries known so far, one per prompt position."""
        return tuple(self._entries)
