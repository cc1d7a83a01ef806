"""What one seed stands for: an engine's sizes, its traffic, and how often things go wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TypeVar

from deepinfer.engine.options import EngineOptions
from deepinfer.sampling.drafting import Verification

Value = TypeVar("Value")

_SHORT_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Scenario:
    """The world of one simulated life, drawn from its seed.

    Attributes:
        seed: the seed.
        options: the engine's options; small pools, so that memory is short most of the time.
        arrivals_per_second: mean rate of new requests on the virtual clock.
        longest_prompt_tokens: prompts are at most this long, some longer than can ever fit.
        longest_answer_tokens: most tokens that a request asks for.
        abort_chance: chance, per step, that some request is aborted.
        fork_chance: chance, per step, that some request is forked.
        fault_chance: chance, per step, that the driver fails in it.
        slow_chance: chance, per step, that the step takes a hundred times as long.
        end_one_in: one token in so many is the end token; 0 for none.
        varies: drafts are verified in lengths that are drawn by lot for each request and step.
        has_forms: requests have forms, bans, stops and allowed ids.
    """

    seed: int
    options: EngineOptions
    arrivals_per_second: float
    longest_prompt_tokens: int
    longest_answer_tokens: int
    abort_chance: float
    fork_chance: float
    fault_chance: float
    slow_chance: float
    end_one_in: int
    varies: bool = False
    has_forms: bool = False

    @classmethod
    def from_seed(
        cls,
        seed: int,
        drafts: int | None = None,
        *,
        async_scheduling: bool | None = None,
        verification: Verification | None = None,
        has_forms: bool | None = None,
    ) -> Scenario:
        """Draw a scenario; every argument that is not None replaces what was drawn."""
        draw = random.Random(f"scenario {seed}")
        block_size = draw.choice((2, 4, 8, 16))
        max_model_len = draw.choice((24, 48, 96))
        blocks_of_one = -(-max_model_len // block_size)
        # From "exactly one fits" up; now and then less, so that requests outgrow the pool.
        usable_blocks = max(1, int(blocks_of_one * draw.choice((0.5, 1, 1.25, 1.5, 2, 3))))
        max_num_seqs = draw.choice((1, 4, 8))
        options = EngineOptions(
            kv_cache_dtype=draw.choice(("released", "float32")),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=draw.choice((1, 8, 20, 64)),
            max_prefill_history_tokens=draw.choice((None, None, 100)),
            block_size=block_size,
            num_blocks=usable_blocks + 1,
            num_state_slots=draw.choice((None, max_num_seqs + 1, 2)),
            enable_chunked_prefill=draw.random() < 0.8,
            stop_preempted_requests=draw.random() < 0.2,
            prefill_attempt_interval=draw.choice((1, 3, 7, 70)),
            prefill_any_attempt_interval=draw.choice((1, 5, 100)),
            seed=seed,
        )
        # From generators of their own, so that a seed's life is the same with drafts and without, planned ahead or not.
        speculative = random.Random(f"drafts {seed}")
        options = replace(
            options,
            num_speculative_tokens=given(drafts, speculative.choice((0, 0, 1, 2, 3, 4, 5))),
            verification=given(verification, speculative.choice(("standard", "coupled"))),
            async_scheduling=given(async_scheduling, random.Random(f"async {seed}").random() < 0.5),
        )
        return cls(
            seed=seed,
            options=options,
            arrivals_per_second=draw.choice((20.0, 100.0, 400.0)),
            longest_prompt_tokens=draw.choice((3, 6, 12, 20, max_model_len + 4)),
            longest_answer_tokens=draw.choice((1, 8, 40, 90)),
            abort_chance=draw.choice((0.0, 0.02, 0.1)),
            fork_chance=draw.choice((0.0, 0.02, 0.1)),
            fault_chance=draw.choice((0.0, 0.0, 0.01)),
            slow_chance=draw.choice((0.0, 0.02)),
            end_one_in=draw.choice((0, 12)),
            varies=speculative.random() < 0.5,
            has_forms=given(has_forms, random.Random(f"forms {seed}").random() < 0.5),
        )

    def shortened(self) -> Scenario:
        """Return the same world with short prompts and answers."""
        return replace(
            self,
            longest_prompt_tokens=min(self.longest_prompt_tokens, _SHORT_TOKENS),
            longest_answer_tokens=min(self.longest_answer_tokens, _SHORT_TOKENS),
        )

    @property
    def verifies_by_lot(self) -> bool:
        """Whether lengths vary."""
        return self.varies and self.options.num_speculative_tokens > 0


def given(value: Value | None, drawn: Value) -> Value:
    """Return what was given, else what was drawn."""
    return drawn if value is None else value
