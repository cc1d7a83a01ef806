"""The scheduler's configuration refuses what cannot be served, all of it at once."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.errors import ConfigurationError
from deepinfer.scheduling.config import EngineType, SchedulerConfig

GOOD: dict[str, Any] = {"num_blocks": 20, "num_state_slots": 8, "max_model_len": 64}


def test_the_defaults_are_those_of_the_specification() -> None:
    config = SchedulerConfig(**GOOD)
    assert (config.block_size, config.max_num_seqs, config.max_num_batched_tokens) == (128, 64, 2048)
    assert (config.prefill_attempt_interval, config.prefill_any_attempt_interval) == (70, 100)
    assert config.cache_usage_watermark == 0.90
    assert config.engine_type is EngineType.NORMAL
    assert config.enable_chunked_prefill
    assert not config.stop_preempted_requests
    assert config.max_prefill_history_tokens is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine_type": EngineType.COMPLETION}, "stop_preempted_requests=True"),
        ({"engine_type": "both"}, "engine_type 'both' is unknown"),
        ({"block_size": 3}, "even"),
        ({"block_size": 0}, "block_size must be at least 2"),
        ({"num_blocks": 1}, "num_blocks"),
        ({"num_state_slots": 1}, "num_state_slots"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_prefill_history_tokens": 0}, "max_prefill_history_tokens"),
        ({"prefill_attempt_interval": 0}, "prefill_attempt_interval"),
        ({"prefill_any_attempt_interval": 0}, "prefill_any_attempt_interval"),
        ({"cache_usage_watermark": 0.0}, "cache_usage_watermark"),
        ({"cache_usage_watermark": 1.5}, "cache_usage_watermark"),
        ({"cache_usage_watermark": float("nan")}, "cache_usage_watermark"),
        ({"chunk_align": 8, "max_num_batched_tokens": 4}, "below chunk_align"),
        ({"chunk_align": 4, "max_num_batched_tokens": 7, "min_chunk_tokens": 5}, "largest chunk"),
        ({"min_chunk_tokens": 0}, "min_chunk_tokens"),
        ({"history_tokens": -1}, "history_tokens"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SchedulerConfig(**{**GOOD, **settings})


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        SchedulerConfig(
            num_blocks=1, num_state_slots=0, max_model_len=0, block_size=5, engine_type=EngineType.COMPLETION
        )
    assert len(caught.value.problems) == 5


def test_a_completion_engine_that_stops_preempted_requests_is_accepted() -> None:
    SchedulerConfig(**GOOD, engine_type=EngineType.COMPLETION, stop_preempted_requests=True)


@pytest.mark.parametrize(("max_model_len", "blocks"), [(64, 16), (63, 16), (61, 16), (60, 15), (4096, 19)])
def test_the_longest_table_is_bounded_by_the_model_and_by_the_pool(max_model_len: int, blocks: int) -> None:
    config = SchedulerConfig(num_blocks=20, num_state_slots=2, max_model_len=max_model_len, block_size=4)
    assert config.max_table_blocks == blocks
