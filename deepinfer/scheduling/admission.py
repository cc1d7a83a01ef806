"""The prompt step: which waiting requests enter it, with how many positions, and which can never be served."""

from __future__ import annotations

from typing import NamedTuple

from deepinfer.cache.blocks import blocks_for
from deepinfer.scheduling.chunking import PromptBudget
from deepinfer.scheduling.config import EngineType, SchedulerConfig
from deepinfer.scheduling.memory import Memory
from deepinfer.scheduling.preemption import Preemption
from deepinfer.scheduling.roster import Roster
from deepinfer.scheduling.sequence import Sequence
from deepinfer.scheduling.states import Status
from deepinfer.scheduling.table import NO_ROW


class Chunk(NamedTuple):
    """The positions of one request that a prompt step computes; partial if more of them remain."""

    sequence: Sequence
    num_tokens: int
    is_partial: bool


def outgrown_text(sequence: Sequence, needed_blocks: int, config: SchedulerConfig) -> str:
    """Return why a request that fitted when it came cannot go on."""
    return (
        f"the request has grown to {sequence.length} tokens and needs {needed_blocks} blocks of {config.block_size}, "
        f"the cache has {config.num_usable_blocks}"
    )


class Admission:
    """Serves the head of the waiting queue, and nobody behind it."""

    def __init__(self, config: SchedulerConfig, memory: Memory, roster: Roster, preemption: Preemption) -> None:
        self._config = config
        self._memory = memory
        self._roster = roster
        self._preemption = preemption

    def refusal(self, sequence: Sequence) -> str | None:
        """Return why a new request can never be served, or None."""
        config = self._config
        length = sequence.length
        if config.engine_type is EngineType.COMPLETION:
            return "this engine runs decode steps only; hand it requests whose prompt is computed"
        history_limit = config.max_prefill_history_tokens
        if history_limit is not None and length > history_limit:
            return f"the prompt has {length} tokens, max_prefill_history_tokens is {history_limit}"
        longest_image = max((span.stop - span.start for span in sequence.image_spans), default=0)
        if longest_image > config.aligned_budget_tokens:
            return (
                f"an image of {longest_image} positions cannot be cut, and a step holds "
                f"max_num_batched_tokens={config.max_num_batched_tokens}"
            )
        if sequence.chunk_checkpoints and not config.enable_chunked_prefill:
            return "chunk checkpoints need enable_chunked_prefill=True"
        return self.size_refusal(sequence)

    def size_refusal(self, sequence: Sequence) -> str | None:
        """Return why a request is too long for the model or for the whole cache, or None."""
        config = self._config
        length = sequence.length
        needed_blocks = blocks_for(length, config.block_size)
        if length > config.max_model_len:
            return f"the prompt has {length} tokens, the model holds max_model_len={config.max_model_len}"
        if needed_blocks > config.num_usable_blocks:
            return (
                f"the prompt has {length} tokens and needs {needed_blocks} blocks of {config.block_size}, "
                f"the cache has {config.num_usable_blocks}"
            )
        return None

    def wants_prefill(self) -> bool:
        """Say whether this rank would run a prompt step: its head is ready and the others leave enough cache.

        Blocks that the head owns already do not count against it, and where nothing else can advance no watermark
        holds it back.
        """
        head = self._roster.head
        if head is None or not head.schedulable:
            return False
        usable = self._config.num_usable_blocks
        used_by_others = usable - self._memory.blocks.num_free - head.num_blocks
        return self._nothing_else_advances() or used_by_others / usable <= self._config.cache_usage_watermark

    def choose_chunks(self) -> list[Chunk]:
        """Select, reserve and dequeue the chunks of one prompt step; it may be empty."""
        config = self._config
        budget = PromptBudget(config)
        chunks: list[Chunk] = []
        num_seats = config.max_num_seqs - self._roster.num_running - self._roster.num_prompted
        while (head := self._roster.head) is not None and head.schedulable:
            if self._end_if_hopeless(head):
                continue
            num_tokens = budget.plan_chunk(head) if num_seats > 0 else 0
            if num_tokens == 0 or not self._reserve(head, is_alone=not chunks):
                break
            budget.take(head, num_tokens)
            is_partial = head.num_tokens + num_tokens < head.length
            chunks.append(Chunk(head, num_tokens, is_partial))
            self._roster.take_flight(head, is_partial=is_partial)
            if not is_partial:
                num_seats -= 1
            elif config.engine_type is not EngineType.PROMPT:
                break
        return chunks

    def return_unfinished(self, chunks: list[Sequence]) -> None:
        """Put requests whose chunk was computed and whose prompt was not back to the front, in the order given."""
        for sequence in reversed(chunks):
            self._roster.enqueue(sequence, front=True)

    def _reserve(self, head: Sequence, *, is_alone: bool) -> bool:
        if not self._memory.can_reserve(head) and not (
            is_alone and self._nothing_else_advances() and self._preemption.reclaim_for(head)
        ):
            return False
        if head.row == NO_ROW:
            self._roster.forks_ahead = 0
        self._memory.reserve(head)
        return True

    def _end_if_hopeless(self, head: Sequence) -> bool:
        config = self._config
        needed_blocks = self._memory.blocks_of_whole(head)
        if needed_blocks > config.num_usable_blocks:
            self._roster.end(head, Status.FINISHED_PREEMPTED, text=outgrown_text(head, needed_blocks, config))
            return True
        if config.enable_chunked_prefill or head.is_continuation or head.length <= config.aligned_budget_tokens:
            return False
        self._roster.end(
            head,
            Status.FINISHED_IGNORED,
            text=f"the prompt has {head.length} tokens, a step holds "
            f"max_num_batched_tokens={config.max_num_batched_tokens}, and enable_chunked_prefill is off",
        )
        return True

    def _nothing_else_advances(self) -> bool:
        return self._roster.num_running == 0 and self._roster.num_prompted == 0
