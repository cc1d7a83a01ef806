"""What the scheduler must know about the engine, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from deepinfer.errors import ConfigurationError


class EngineType(StrEnum):
    """Which kinds of step an engine runs."""

    NORMAL = "normal"
    PROMPT = "prompt"
    COMPLETION = "completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes, budgets and intervals of one rank's scheduler.

    Attributes:
        num_blocks: blocks of the long-range cache, the reserved number 0 included.
        num_state_slots: state slots, the reserved number 0 included.
        max_model_len: positions that the model can hold; the token made from the last of them may still be emitted.
        block_size: positions in a block.
        max_num_seqs: requests that may run at once.
        max_num_batched_tokens: positions of one prompt step, alignment padding included.
        max_prefill_history_tokens: whole lengths of the requests of one prompt step, or None for no limit.
        engine_type: NORMAL runs both kinds of step, PROMPT prompt steps only, COMPLETION decode steps only.
        enable_chunked_prefill: whether a prompt may be cut to fit the budget.
        stop_preempted_requests: end a preempted request instead of recomputing it.
        prefill_attempt_interval: decode steps between ALL vote points.
        prefill_any_attempt_interval: decode steps between ANY vote points.
        cache_usage_watermark: no prompt step is wanted while others hold more than this share of the blocks.
        min_chunk_tokens: a cut that leaves less than this in the rest of a step's budget waits for the next step.
        chunk_align: charge and cut prompts in multiples of this (2 x size with context parallelism, else 1).
        history_tokens: token ids before the first new row that a step carries for the n-gram memory.
        num_speculative_tokens: drafts that a decode step verifies for each request: so many rows beside its newest
            token's, where the model and the cache have positions for them.
        async_scheduling: a decode step may be planned while the one before it is in flight, whose result then counts
            as if all its drafts were accepted; memory goes back when no launched step can touch it.
    """

    num_blocks: int
    num_state_slots: int
    max_model_len: int
    block_size: int = 128
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_prefill_history_tokens: int | None = None
    engine_type: EngineType = EngineType.NORMAL
    enable_chunked_prefill: bool = True
    stop_preempted_requests: bool = False
    prefill_attempt_interval: int = 70
    prefill_any_attempt_interval: int = 100
    cache_usage_watermark: float = 0.90
    min_chunk_tokens: int = 1
    chunk_align: int = 1
    history_tokens: int = 3
    num_speculative_tokens: int = 0
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be served, naming every problem."""
        problems = [*self._size_problems(), *self._combination_problems()]
        if problems:
            raise ConfigurationError("scheduler configuration", problems)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can own."""
        return self.num_blocks - 1

    @property
    def max_table_blocks(self) -> int:
        """The longest block table that a request can have."""
        return min(self.num_usable_blocks, -(-self.max_model_len // self.block_size))

    @property
    def most_positions(self) -> int:
        """Positions that the longest request can compute."""
        return min(self.max_model_len, self.num_usable_blocks * self.block_size)

    @property
    def aligned_budget_tokens(self) -> int:
        """The longest chunk that one prompt step can hold."""
        return self.chunk_align * (self.max_num_batched_tokens // self.chunk_align)

    def _size_problems(self) -> list[str]:
        least = {
            "num_blocks": 2,
            "num_state_slots": 2,
            "max_model_len": 1,
            "block_size": 2,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "prefill_attempt_interval": 1,
            "prefill_any_attempt_interval": 1,
            "min_chunk_tokens": 1,
            "chunk_align": 1,
            "history_tokens": 0,
            "num_speculative_tokens": 0,
        }
        problems = [
            f"{name} must be at least {bound}, got {getattr(self, name)}"
            for name, bound in least.items()
            if getattr(self, name) < bound
        ]
        if self.max_prefill_history_tokens is not None and self.max_prefill_history_tokens < 1:
            problems.append(
                f"max_prefill_history_tokens must be at least 1 or None, got {self.max_prefill_history_tokens}"
            )
        if not 0.0 < self.cache_usage_watermark <= 1.0:
            problems.append(f"cache_usage_watermark must be in (0, 1], got {self.cache_usage_watermark}")
        return problems

    def _combination_problems(self) -> list[str]:
        problems = []
        if self.engine_type not in tuple(EngineType):
            known = ", ".join(repr(kind.value) for kind in EngineType)
            problems.append(f"engine_type {self.engine_type!r} is unknown: choose one of {known}")
        if self.engine_type == EngineType.PROMPT and self.async_scheduling:
            problems.append("engine_type 'prompt' has no decode step to plan ahead: set async_scheduling=False")
        if self.block_size % 2:
            problems.append(f"block_size must be even (ratio-2 entries hold two positions), got {self.block_size}")
        if self.engine_type == EngineType.COMPLETION and not self.stop_preempted_requests:
            problems.append(
                "engine_type 'completion' has no prompt step to recompute with: set stop_preempted_requests=True"
            )
        if self.chunk_align > self.max_num_batched_tokens:
            problems.append(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below chunk_align ({self.chunk_align}): "
                "no chunk would ever fit"
            )
        elif self.chunk_align > 0 and self.min_chunk_tokens > self.aligned_budget_tokens:
            problems.append(
                f"min_chunk_tokens ({self.min_chunk_tokens}) is above the largest chunk "
                f"({self.aligned_budget_tokens}) that max_num_batched_tokens allows"
            )
        return problems
