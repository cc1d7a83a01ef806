"""A draft round's draws: which random numbers they use, and what is kept of the distributions they come from.

Legend: R requests, n drafts a request, V vocabulary, K kept tokens of a draft's distribution.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from deepinfer.accelerator.ops.drafting import DraftDistributions, DraftingOps, Proposals
from deepinfer.accelerator.ops.sampling import SamplingRows
from deepinfer.errors import ArgumentError
from deepinfer.sampling.streams import ORIGINAL_DRAFT_SEED_OFFSET, DrawCase, Keying

Verification = Literal["standard", "coupled"]
"""How drafts are judged. "standard": rejection sampling, the target's distribution. "coupled": a draft stands if it is
the token that the target draws anyway, so that the emitted tokens do not depend on drafts at all."""

DEFAULT_CAPACITY = 1024
"""Most tokens that a draft may be drawn from in standard verification."""

DEFAULT_REACH = 0.1
"""How far a coupled draft looks around the target's random number; measured in docs/drafts.md."""

_WORD = 2**64


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """How drafts are drawn and judged, fixed for the life of an engine.

    Attributes:
        verification: see :data:`Verification`.
        keying: how random streams are numbered; the original's has no coupled verification.
        capacity: most tokens that a draft is drawn from; bounds the pool's memory, never what is emitted.
        reach: see :meth:`DraftingOps.guess`; coupled only.
    """

    verification: Verification = "standard"
    keying: Keying = Keying.INDEX
    capacity: int = DEFAULT_CAPACITY
    reach: float = DEFAULT_REACH

    def __post_init__(self) -> None:
        problems = []
        if self.verification not in ("standard", "coupled"):
            problems.append(f"verification: {self.verification!r} is unknown; choose 'standard' or 'coupled'")
        if self.keying is Keying.ORIGINAL and self.verification == "coupled":
            problems.append(
                "keying: the original's streams depend on the cut of the steps; coupling needs Keying.INDEX"
            )
        if self.capacity < 1:
            problems.append(f"capacity: {self.capacity} is below 1, the token that is drawn")
        if not 0 <= self.reach <= 1:
            problems.append(f"reach: {self.reach} is outside 0 .. 1")
        if problems:
            raise ArgumentError("draft policy", problems)

    @property
    def kept_tokens(self) -> int:
        """K: how many tokens of a draft's distribution are kept; a coupled verification looks at none."""
        return self.capacity if self.verification == "standard" else 0


class DraftDraws:
    """The draws of one round, draft by draft; an instance is the ``choose`` of ``DraftModel.round``.

    Drafts follow the temperature and the filters of their request. Bias, penalties, bans, grammar and forced tokens
    are the target's affair: ignoring them costs acceptance, never correctness.
    """

    def __init__(self, ops: DraftingOps, policy: DraftPolicy, rows: SamplingRows) -> None:
        """Begin a round.

        Args:
            ops: the plan's ops.
            policy: how drafts are drawn.
            rows: settings of the R requests; ``streams_B`` are the fresh streams of each request's *first* draft, that
                is of the token behind its newest one.
        """
        self._ops = ops
        self._policy = policy
        self._rows = rows
        self._proposals: list[Proposals] = []

    def __call__(self, draft: int, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return draft number ``draft`` of every request, int64 [R], -1 where none can be drawn."""
        rows = draft_rows(self._rows, draft, self._policy)
        logits_RV = logits_RV.to(torch.float32)
        if self._policy.verification == "coupled":
            return self._ops.guess(logits_RV, rows, self._policy.reach).token_ids_B
        proposals = self._ops.propose(logits_RV, rows, self._policy.capacity)
        self._proposals.append(proposals)
        return proposals.token_ids_B

    def distributions(self) -> DraftDistributions | None:
        """Return what the round's drafts were drawn from; None in coupled verification."""
        if not self._proposals:
            return None
        return DraftDistributions(
            ids_RnK=torch.stack([proposals.ids_BK for proposals in self._proposals], 1),
            weights_RnK=torch.stack([proposals.weights_BK for proposals in self._proposals], 1),
            sums_Rn=torch.stack([proposals.sums_B for proposals in self._proposals], 1),
        )


def draft_rows(rows: SamplingRows, draft: int, policy: DraftPolicy) -> SamplingRows:
    """Return the settings with which draft number ``draft`` is drawn.

    Args:
        rows: see :class:`DraftDraws`.
        draft: 0 for the first.
        policy: standard drafts have streams of their own; coupled ones use the target's fresh stream at their index.
    """
    streams_B = rows.streams_B + int(policy.keying) * draft
    seeds_B = rows.seeds_B
    if policy.keying is Keying.ORIGINAL:
        # int64 wraps around, which is what an addition modulo 2**64 is.
        seeds_B = seeds_B + ORIGINAL_DRAFT_SEED_OFFSET
    elif policy.verification == "standard":
        streams_B = streams_B + int(DrawCase.DRAFT)
    return replace(rows, seeds_B=seeds_B, streams_B=streams_B)


def cumulative_chances(confidence_logits_Rn: torch.Tensor, temperatures_n: torch.Tensor | None = None) -> torch.Tensor:
    """Return float32 [R, n]: the chance that a draft and all earlier ones are accepted.

    Args:
        confidence_logits_Rn: what the draft model gave.
        temperatures_n: the calibration, one divisor per draft; None for 1.
    """
    scaled_Rn = confidence_logits_Rn.to(torch.float32)
    if temperatures_n is not None:
        scaled_Rn = scaled_Rn / temperatures_n
    # 1 / (1 + exp(-x)): torch.sigmoid's last bit depends on the place in the tensor.
    return (1.0 / (1.0 + torch.exp(-scaled_Rn))).cumprod(-1)
