"""One step's sampling, in contract ops: adjust, sample, and the log-probabilities that some rows want.

Legend: B sampled rows, V vocabulary, N rows that list log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepinfer.accelerator.ops.sampling import RowStatus, SampledTokens, SamplingOps, TokenLogProbabilities
from deepinfer.sampling.rows import ListedRows, SamplingStep


class SampledRow(NamedTuple):
    """What one row came to.

    Attributes:
        token_id: the token, or -1 where the status is not OK.
        status: whether there is a token, or why not.
        log_probabilities: id to value, best first, the token always among them; None where not asked for or no token.
    """

    token_id: int
    status: RowStatus
    log_probabilities: dict[int, float] | None


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A step's results, still on the device.

    Attributes:
        tokens: token and status of every row; what an asynchronous next step reads.
        processed: log-probabilities of the rows of ``listed_processed``.
        raw: those of the rows of ``listed_raw``.
        listed_processed: which rows, and how many tokens each.
        listed_raw: likewise.
    """

    tokens: SampledTokens
    processed: TokenLogProbabilities | None
    raw: TokenLogProbabilities | None
    listed_processed: ListedRows | None
    listed_raw: ListedRows | None

    def read(self) -> list[SampledRow]:
        """Wait for the device and return every row's result."""
        token_ids: list[int] = self.tokens.token_ids_B.tolist()
        status: list[int] = self.tokens.status_B.tolist()
        entries: dict[int, dict[int, float]] = {}
        for listed, values in ((self.listed_processed, self.processed), (self.listed_raw, self.raw)):
            if listed is not None and values is not None:
                chosen = [token_ids[row] for row in listed.numbers]
                found = read_log_probabilities(values, chosen, listed.counts)
                entries.update(zip(listed.numbers, found, strict=True))
        return [
            SampledRow(token_id, RowStatus(code), entries.get(row) if token_id >= 0 else None)
            for row, (token_id, code) in enumerate(zip(token_ids, status, strict=True))
        ]


class Sampler:
    """Runs the sampling of a step through the ops of one accelerator; keeps nothing between steps."""

    def __init__(self, ops: SamplingOps) -> None:
        self._ops = ops

    def sample(self, logits_BV: torch.Tensor, step: SamplingStep) -> SampledStep:
        """Sample every row without waiting for the device.

        Args:
            logits_BV: float32 [B, V]; the adjustments are written into it.
            step: what the rows want, in the order of the logits.
        """
        raw_NV = self.before_adjustments(logits_BV, step)
        self.adjust(logits_BV, step)
        return self.listed(logits_BV, raw_NV, self._ops.sample(logits_BV, step.rows), step)

    def before_adjustments(self, logits_BV: torch.Tensor, step: SamplingStep) -> torch.Tensor | None:
        """Return a copy [N, V] of the rows that list raw log-probabilities, or None."""
        return logits_BV.index_select(0, step.raw.rows_N) if step.raw is not None else None

    def adjust(self, logits_BV: torch.Tensor, step: SamplingStep) -> None:
        """Write the step's adjustments into the logits."""
        if step.adjustments is not None:
            self._ops.adjust(logits_BV, step.adjustments)

    def listed(
        self, logits_BV: torch.Tensor, raw_NV: torch.Tensor | None, tokens: SampledTokens, step: SamplingStep
    ) -> SampledStep:
        """Return tokens that were chosen with the log-probabilities that their rows list.

        Args:
            logits_BV: the logits after :meth:`adjust`.
            raw_NV: what :meth:`before_adjustments` gave.
            tokens: of all rows; -1 lists no token beside the best ones.
            step: what the rows want.
        """
        processed = raw = None
        if step.processed is not None:
            rows_N = step.processed.rows_N
            processed = self._ops.log_probabilities(
                logits_BV.index_select(0, rows_N),
                step.rows.select(rows_N),
                tokens.token_ids_B.index_select(0, rows_N),
                step.processed.top_count,
            )
        if step.raw is not None and raw_NV is not None:
            chosen_N = tokens.token_ids_B.index_select(0, step.raw.rows_N)
            raw = self._ops.raw_log_probabilities(raw_NV, chosen_N, step.raw.top_count)
        return SampledStep(tokens, processed, raw, step.processed, step.raw)


def read_log_probabilities(
    values: TokenLogProbabilities, chosen: Sequence[int], counts: Sequence[int]
) -> list[dict[int, float]]:
    """Return each row's entries, id to value: its best tokens, best first, then the chosen one if it is not among them.

    Args:
        values: the op's result.
        chosen: the chosen token of each row; -1 adds none.
        counts: how many of the best tokens each row lists.
    """
    rows = zip(
        chosen,
        counts,
        values.chosen_B.tolist(),
        values.top_ids_BN.tolist(),
        values.top_values_BN.tolist(),
        strict=True,
    )
    found = []
    for token_id, count, chosen_value, top_ids, top_values in rows:
        best = zip(top_ids[:count], top_values[:count], strict=True)
        entries = {best_id: value for best_id, value in best if best_id >= 0}
        if token_id >= 0:
            entries.setdefault(token_id, chosen_value)
        found.append(entries)
    return found
