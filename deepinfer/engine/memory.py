"""How large the pools become: from explicit numbers or from a memory budget, with the arithmetic shown.

Rules: engine.md section 4. Block 0 and state slot 0 are counted and never handed out.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.accelerator import MemoryInfo
from deepinfer.cache.layout import CacheLayout
from deepinfer.engine.options import EngineOptions
from deepinfer.errors import ConfigurationError
from deepinfer.sampling.draft_pool import pool_bytes


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The chosen pool sizes.

    Attributes:
        num_blocks: blocks, the reserved one included.
        num_state_slots: state slots, the reserved one included.
        max_model_len: positions a request may hold.
        longest_request: positions of the longest request that the pool can ever finish; below ``max_model_len`` only
            if the caller gave both numbers.
        draft_pool_bytes: what the drafts of all state slots take beside.
        arithmetic: one sentence with the byte arithmetic, for the log.
    """

    num_blocks: int
    num_state_slots: int
    max_model_len: int
    longest_request: int
    draft_pool_bytes: int
    arithmetic: str


def draft_pool_bytes(options: EngineOptions, capacity: int) -> int:
    """Return the bytes of the draft pool; ``capacity`` bounds what standard verification keeps of a distribution."""
    kept_tokens = capacity if options.verification == "standard" else 0
    return pool_bytes(num_slots=options.state_slots, drafts=options.num_speculative_tokens, kept_tokens=kept_tokens)


def plan_pools(
    options: EngineOptions, layout: CacheLayout, memory: MemoryInfo, model_limit: int, draft_bytes: int = 0
) -> PoolPlan:
    """Choose the pool sizes, or raise ConfigurationError with every reason.

    Args:
        options: the engine's options.
        layout: bytes per block and slot.
        memory: the device's memory after the weights were loaded.
        model_limit: positions that the model's configuration allows.
        draft_bytes: what the draft pool takes.
    """
    asked_len = options.max_model_len
    wanted_len = min(model_limit, asked_len) if asked_len is not None else model_limit
    available_bytes = max(0, memory.free_bytes - memory.reserved_bytes)
    slots = options.state_slots
    slot_bytes = slots * layout.slot_bytes
    if options.num_blocks is not None:
        blocks = options.num_blocks
    else:
        # More blocks than every running request at full length needs would only cost memory.
        useful = layout.blocks_of(wanted_len) * options.max_num_seqs + 1
        budget_bytes = int(available_bytes * options.memory_utilization)
        blocks = min(useful, max(0, budget_bytes - slot_bytes - draft_bytes) // layout.block_bytes)
    # The last token of a request is emitted but never computed, so it needs no place in the pool.
    held_len = max(0, blocks - 1) * layout.block_size

    problems: list[str] = []
    if asked_len is not None and asked_len > model_limit:
        problems.append(
            f"max_model_len={asked_len} is above the model's limit of {model_limit} positions (max_position_embeddings)"
        )
    sizes = f"{blocks} blocks of {layout.block_bytes:,} bytes and {slots} state slots of {layout.slot_bytes:,} bytes"
    if draft_bytes:
        sizes += f" and {draft_bytes:,} bytes of drafts"
    if options.num_blocks is not None:
        needed_bytes = blocks * layout.block_bytes + slot_bytes + draft_bytes
        if needed_bytes > available_bytes:
            problems.append(
                f"{sizes} need {needed_bytes:,} bytes, the device has {available_bytes:,} free; lower num_blocks, or "
                f"num_state_slots or max_num_seqs"
            )
    elif blocks < 2:
        problems.append(
            f"the budget of {budget_bytes:,} bytes ({options.memory_utilization:.0%} of {available_bytes:,} free) "
            f"holds {sizes}, and 2 blocks are the least; lower max_num_seqs, or give num_state_slots"
        )
    elif asked_len is not None and held_len < wanted_len:
        problems.append(
            f"max_model_len={asked_len} needs {layout.blocks_of(wanted_len)} blocks beside the reserved one, the "
            f"memory budget holds {blocks - 1}; lower max_model_len to at most {held_len}, or give num_blocks as well"
        )
    if problems:
        raise ConfigurationError("cache pools", problems)

    limit = wanted_len if asked_len is not None else min(model_limit, held_len)
    longest = min(limit, held_len)
    drafts = f", drafts {draft_bytes:,} B" if draft_bytes else ""
    arithmetic = (
        f"cache pools: {blocks} blocks x {layout.block_bytes:,} B = {blocks * layout.block_bytes:,} B "
        f"({layout.block_size} positions a block, block 0 reserved), {slots} state slots x {layout.slot_bytes:,} B = "
        f"{slot_bytes:,} B (slot 0 reserved){drafts}; max_model_len {limit}, longest request "
        f"that can finish {longest} positions"
    )
    return PoolPlan(blocks, slots, limit, longest, draft_bytes, arithmetic)
