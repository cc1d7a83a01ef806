"""How many positions of a prompt run in one step: budget, alignment, checkpoints, images and the minimum chunk."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.scheduling.config import SchedulerConfig
from deepinfer.scheduling.sequence import Sequence


def allowance(budget_tokens: int, used_tokens: int, align: int) -> int:
    """Return the positions that the next chunk may have: what is left of the budget, rounded down to ``align``."""
    return align * ((budget_tokens - used_tokens) // align)


def charge(chunk_tokens: int, align: int) -> int:
    """Return what a chunk costs of the budget: its positions, rounded up to ``align``."""
    return align * -(-chunk_tokens // align)


@dataclass(slots=True)
class PromptBudget:
    """What is left of the query and history budgets of the prompt step that is being put together."""

    config: SchedulerConfig
    used_tokens: int = 0
    history_tokens: int = 0
    is_untouched: bool = True

    def plan_chunk(self, sequence: Sequence) -> int:
        """Return the positions of ``sequence`` that run in this step; 0 ends the pass.

        The first request of a step always gets something: a whole budget holds the longest image span (longer ones
        are refused on arrival), and the minimum chunk only makes a request wait for a fresh budget.
        """
        history_limit = self.config.max_prefill_history_tokens
        whole_history = self.history_tokens + sequence.length
        if history_limit is not None and not self.is_untouched and whole_history > history_limit:
            return 0
        computed = sequence.num_tokens
        work = sequence.length - computed
        available = allowance(self.config.max_num_batched_tokens, self.used_tokens, self.config.chunk_align)
        chunk = min(work, available)
        checkpoint = sequence.checkpoint_after(computed)
        ends_at_checkpoint = checkpoint is not None and computed + chunk >= checkpoint
        if checkpoint is not None and ends_at_checkpoint:
            chunk = checkpoint - computed
        if chunk == work:
            return chunk
        span = sequence.image_span_across(computed + chunk)
        if span is not None:
            whole = span.stop - computed
            chunk = whole if self.is_untouched and whole <= available else span.start - computed
            if chunk == work:
                return chunk
        # A preempted request may have outgrown the budget since it was admitted: it is recomputed in chunks even
        # where prompts are not cut, because ending it would be visible and chunks are not.
        if not (self.config.enable_chunked_prefill or sequence.is_continuation):
            return 0
        if chunk < self.config.min_chunk_tokens and not (self.is_untouched or ends_at_checkpoint):
            return 0
        return chunk

    def take(self, sequence: Sequence, chunk: int) -> None:
        """Charge a chunk of ``sequence``: its positions to one budget, its whole length to the other."""
        self.used_tokens += charge(chunk, self.config.chunk_align)
        self.history_tokens += sequence.length
        self.is_untouched = False
