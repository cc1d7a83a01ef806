"""Drafting and verification: a draft round's attention, its draws, and the judgement of drafts (engine.md 5.3 and 6).

All ops of this group belong to the feature "drafts" and came with interface 1.1: a driver without them serves every
model without drafts.

A *placeholder* stands where a request has no draft (right after its prompt, or after a draft that could not be drawn).
It is the id -1. It ends a request's drafts at its place, whatever follows; it is never emitted and never an index.

Legend: R requests, n drafts a request, m = n + 1 most tokens of a run, B sampled rows, V vocabulary, K kept tokens of a
draft's distribution, H heads, C head width, b record bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops.base import Feature, OpGroup, not_implemented, op
from deepinfer.accelerator.ops.sampling import SampledTokens, SamplingRows

PLACEHOLDER = -1
"""Stands in draft ids where there is no draft."""

RESIDUAL_SHARE = 0.9999500012499792
"""``exp(-0.00005)``: what a rejected draft's distribution is multiplied by before it is taken from the target's."""


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The rows of one draft round: n a request, at positions ``context .. context + n - 1``; none of them is stored.

    Attributes:
        context_R: int64 [R], how many positions of the request have context records that count: its verified ones.
            Records of later positions (rejected rows) may lie in the ring and are not read.
        state_slots_R: int64 [R], state slot of each request.
        window_start_R: int64 [R], first position that may be read (0 unless the prompt was truncated).
        valid_R: bool [R], False for padding requests: their results are unspecified but finite.
    """

    context_R: torch.Tensor
    state_slots_R: torch.Tensor
    window_start_R: torch.Tensor
    valid_R: torch.Tensor


@dataclass(frozen=True, slots=True)
class Proposals:
    """One draft a row, and the distribution that it was drawn from, kept set only.

    Attributes:
        token_ids_B: int64 [B], the drafts; ``PLACEHOLDER`` where the status is not OK.
        status_B: int32 [B], values of :class:`RowStatus`.
        ids_BK: int64 [B, K], the tokens that could have been drawn, in ascending order, then -1.
        weights_BK: int64 [B, K], their integer probabilities, then 0.
        sums_B: int64 [B], the rows' sums; 0 where the status is not OK.
    """

    token_ids_B: torch.Tensor
    status_B: torch.Tensor
    ids_BK: torch.Tensor
    weights_BK: torch.Tensor
    sums_B: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftRuns:
    """Which rows of a step verify which drafts. The rows of a request follow each other, its newest token's first.

    Attributes:
        first_row_R: int64 [R], in [0, B): the row of the logits that follow the request's newest token.
        counts_R: int64 [R], in [0, n]: how many drafts are verified; row ``first + j`` follows draft j - 1.
        token_ids_Rn: int64 [R, n], the drafts, or ``PLACEHOLDER``; those from ``counts`` on are not looked at.
    """

    first_row_R: torch.Tensor
    counts_R: torch.Tensor
    token_ids_Rn: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """What the drafts of R requests were drawn from: :class:`Proposals` of n rounds, side by side.

    Attributes:
        ids_RnK: int64 [R, n, K].
        weights_RnK: int64 [R, n, K].
        sums_Rn: int64 [R, n].
    """

    ids_RnK: torch.Tensor
    weights_RnK: torch.Tensor
    sums_Rn: torch.Tensor


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What R requests emit in one step.

    Attributes:
        token_ids_Rm: int64 [R, m]: the accepted drafts, then one token of the target's own, then -1.
        accepted_R: int64 [R], how many drafts were accepted.
        status_R: int32 [R], status of the row behind the last accepted draft, values of :class:`RowStatus`; where it
            is not OK that row has no token, and only the accepted drafts stand. Later rows have no say.
    """

    token_ids_Rm: torch.Tensor
    accepted_R: torch.Tensor
    status_R: torch.Tensor


class DraftingOps(OpGroup):
    """A draft block's attention; drafts and their verification, exactly repeatable on every device."""

    group: ClassVar[str] = "drafting"
    feature: ClassVar[Feature | None] = "drafts"

    @op
    def attend(
        self,
        query_RnHC: torch.Tensor,
        block_records_Rnb: torch.Tensor,
        window: WindowCache,
        sinks_H: torch.Tensor,
        window_size: int,
        block: DraftBlock,
    ) -> torch.Tensor:
        """Attend to the context's window and to the whole block; key and value are the same vector.

        Keys are the same for all n rows of a request: context positions
        ``max(window_start, context - window_size) .. context - 1`` from the ring, then all n block rows, the row's
        own and later ones included. ``s = (q . k) * C^-0.5``;
        ``o = sum_j exp(s_j - m) k_j / (sum_j exp(s_j - m) + exp(sink - m))`` in at least float32.
        served: probabilities are rounded to bfloat16 before they multiply the values, the denominator is not.

        Args:
            query_RnHC: rotated queries, activation dtype.
            block_records_Rnb: uint8 [R, n, b], the block's encoded records.
            window: the stage's ring of context records; not changed.
            sinks_H: float32 [H].
            window_size: positions of context that a row sees, at most the ring.
            block: the requests.

        Returns:
            o [R, n, H, C] in the activation dtype, not yet rotated back. A request without context (position 0) has
            its block alone. Unowned memory, positions from ``context`` on and other requests must not influence a
            row, NaN included. R = 0 gives an empty tensor. R2: a request's bits do not depend on R; they may depend
            on n. Source: model.md section 9.
        """
        not_implemented(self, "attend")

    @op
    def propose(self, logits_BV: torch.Tensor, rows: SamplingRows, capacity: int) -> Proposals:
        """Draw one draft a row, and keep the distribution that it was drawn from.

        The distribution is ``sampling.weigh`` of the row's own settings with one more limit: a row without a top-k in
        force, or with one above ``capacity``, has the top-k ``capacity``. The draft is ``sampling.draw`` from it with
        ``sampling.uniforms`` of the row's seed and stream. What a draft is drawn from decides how often it is accepted
        and never what is emitted, so the limit costs no exactness.

        Args:
            logits_BV: float32 [B, V], the draft model's; not changed.
            rows: the settings; forced ids are not used.
            capacity: K, at least 1; columns beyond the vocabulary are padding.

        Returns:
            New tensors. B = 0 gives empty ones. Class R2; exact for the same weights.
        """
        not_implemented(self, "propose")

    @op
    def guess(self, logits_BV: torch.Tensor, rows: SamplingRows, reach: float) -> SampledTokens:
        """Guess the token that the target will draw with the same random number, from the draft's distribution.

        With the integer weights w of ``sampling.weigh``, C their cumulative sums in id order, S the sum and u the
        uniform of the row's seed and stream: ``t = min(floor(u * S), S - 1)``,
        ``d = floor(reach * sqrt(u * (1 - u)) * S)`` (in float64, each operation rounded once, from left to right). The
        guess is the token whose interval ``[C_i - w_i, C_i)`` shares most with ``[t - d, t + d + 1)``, the lowest id
        among equals. ``reach`` 0 gives exactly ``sampling.draw``. A larger one allows for the target's cumulative sums
        being shifted against the draft's, the more the farther u is from both ends.

        Args:
            logits_BV: float32 [B, V], the draft model's; not changed.
            rows: the settings; streams are those of the target's own draws; forced ids are not used.
            reach: in [0, 1].

        Returns:
            Tokens and statuses; ``PLACEHOLDER`` where the status is not OK. B = 0 gives empty tensors. Class R2; exact
            for the same weights.
        """
        not_implemented(self, "guess")

    @op
    def verify(
        self,
        logits_BV: torch.Tensor,
        rows: SamplingRows,
        runs: DraftRuns,
        distributions: DraftDistributions,
        resample_streams_B: torch.Tensor,
        accept_streams_B: torch.Tensor,
    ) -> Verdicts:
        """Accept or reject drafts so that what is emitted has the target's own distribution.

        Per row: weights w and sum S of ``sampling.weigh``; for draft j with id y: ``p = w_y / S`` of row
        ``first + j``, ``q = v_y / sum(v)`` of the draft's distribution v (each one float64 division), u the uniform of
        the row's seed and accept stream. Draft j is accepted if and only if all earlier ones are, j < counts, no
        placeholder stands at or before it, the row's status is OK, and ``u * q < p``. Where a token is forced, it is
        accepted if and only if it is that token.

        The row behind the last accepted draft (row a = ``first + accepted``) gives one more token:

        * its draft was rejected: ``r_i = floor(max(w_i / S - RESIDUAL_SHARE * (v_i / sum(v)), 0) * 2**31)`` as int64
          (float64 operations in this order), and ``sampling.draw`` from r with the row's resample stream. If all r
          are 0, the lowest id with the largest logit.
        * it had no draft (the run's end, or a placeholder): ``sampling.draw`` from w with the row's own stream: the
          draw of a step without drafts.
        * a forced token takes the place of either.

        Args:
            logits_BV: float32 [B, V], after ``sampling.adjust``; not changed.
            rows: the settings of all rows; ``streams_B`` are those of fresh draws.
            runs: requests, rows and drafts.
            distributions: what the drafts were drawn from.
            resample_streams_B: int64 [B], streams of the draws after a rejection.
            accept_streams_B: int64 [B], streams of the acceptance coins.

        Returns:
            New tensors. R = 0 gives empty ones. Exact for the same weights: integers, and float64 divisions and
            products of single rounding. R2. Source: engine.md sections 5.3 and 6.
        """
        not_implemented(self, "verify")

    @op
    def match(self, tokens: SampledTokens, runs: DraftRuns) -> Verdicts:
        """Accept drafts that equal the target's own draws: what is emitted does not depend on the drafts at all.

        ``tokens`` are the plain draws (``sampling.sample``) of all rows. Draft j is accepted if and only if all
        earlier ones are, j < counts, it is no placeholder, and it is the token of row ``first + j`` (a row that is not
        OK has none). The row behind the last accepted draft gives its own token.

        Returns:
            New tensors. R = 0 gives empty ones. Integers only: the same bits on every driver.
        """
        not_implemented(self, "match")
