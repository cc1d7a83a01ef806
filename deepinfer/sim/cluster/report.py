"""What a simulated run is summed up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.sim.cluster.cluster import ClusterRun


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """Figures of one run; None where there is nothing to sum up.

    Attributes:
        seconds: simulated time until the last request ended.
        finished, failed: requests that made all their tokens, and those that ended otherwise.
        output_tokens_per_s: of all ranks together, over the whole run.
        first_token_ms_p50, first_token_ms_p99: from arrival to first token.
        gap_ms_p50, gap_ms_p99, gap_ms_max: between tokens of a request.
        prompt_steps, decode_steps: steps of the group.
        placeholder_share: share of all ranks' steps that had no row.
        moe_lb: mean over steps of the busiest rank's expert load over the mean rank's; None with perfect balance.
        plans, moved_slots: what the balancer did.
        move_ms: time that the group waited for experts to move.
    """

    seconds: float
    finished: int
    failed: int
    output_tokens_per_s: float | None
    first_token_ms_p50: float | None
    first_token_ms_p99: float | None
    gap_ms_p50: float | None
    gap_ms_p99: float | None
    gap_ms_max: float | None
    prompt_steps: int
    decode_steps: int
    placeholder_share: float | None
    moe_lb: float | None
    plans: int
    moved_slots: int
    move_ms: float

    @classmethod
    def of(cls, run: ClusterRun, ranks: int) -> ClusterReport:
        """Sum up a run."""
        steps = (run.prompt_steps + run.decode_steps) * ranks
        ratios = run.busiest_over_mean
        return cls(
            seconds=round(run.now_ms / 1e3, 6),
            finished=run.finished,
            failed=run.failed,
            output_tokens_per_s=round(run.output_tokens / run.now_ms * 1e3, 3) if run.now_ms else None,
            first_token_ms_p50=_quantile(run.first_token_ms, 0.5),
            first_token_ms_p99=_quantile(run.first_token_ms, 0.99),
            gap_ms_p50=_quantile(run.gap_ms, 0.5),
            gap_ms_p99=_quantile(run.gap_ms, 0.99),
            gap_ms_max=_quantile(run.gap_ms, 1.0),
            prompt_steps=run.prompt_steps,
            decode_steps=run.decode_steps,
            placeholder_share=round(run.placeholder_steps / steps, 6) if steps else None,
            moe_lb=round(sum(ratios) / len(ratios), 6) if ratios else None,
            plans=run.plans,
            moved_slots=run.moved_slots,
            move_ms=round(run.move_ms, 3),
        )


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    if not values:
        return None
    return round(sorted(values)[max(0, math.ceil(share * len(values)) - 1)], 3)
