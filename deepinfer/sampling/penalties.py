"""Counts of the tokens that a request has seen, kept up to date by its own growing output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer.sampling.params import SamplingParams


class PenaltyColumns(NamedTuple):
    """Penalties of one request, one entry per distinct token."""

    ids: NDArray[np.int64]
    factors: NDArray[np.float32]
    subtract: NDArray[np.float32]


class SeenTokens:
    """Distinct tokens of a request with their output counts; a cache over data that the request owns.

    Only the repetition penalty looks at the prompt; without it the prompt's tokens are left out.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._prompt = tuple(dict.fromkeys(prompt_token_ids)) if self._repetition != 1.0 else ()
        self._counts: dict[int, int] = {}
        self._counted_tokens = 0
        self._forget()

    def columns(self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int] = ()) -> PenaltyColumns:
        """Return the penalties after the given output, in work proportional to what is new and to what is distinct.

        Drafts count as if they had been emitted behind the output, for this call only: another call may bring others.
        """
        if len(output_token_ids) < self._counted_tokens:
            self._forget()
        for token_id in output_token_ids[self._counted_tokens :]:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
        self._counted_tokens = len(output_token_ids)
        totals = self._counts
        if draft_token_ids:
            totals = dict(totals)
            for token_id in draft_token_ids:
                totals[token_id] = totals.get(token_id, 0) + 1
        ids = np.fromiter(totals.keys(), np.int64, len(totals))
        counts = np.fromiter(totals.values(), np.float64, len(totals))
        subtract = self._frequency * counts + self._presence * (counts > 0)
        factors = np.full(len(ids), self._repetition, np.float32)
        return PenaltyColumns(ids, factors, subtract.astype(np.float32))

    def _forget(self) -> None:
        self._counts = dict.fromkeys(self._prompt, 0)
        self._counted_tokens = 0
