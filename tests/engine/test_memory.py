"""Pool sizes: from explicit numbers or from the budget, exact at every border, with the arithmetic told."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from deepinfer.accelerator import MemoryInfo
from deepinfer.cache.layout import CacheLayout
from deepinfer.engine.memory import draft_pool_bytes, plan_pools
from deepinfer.engine.options import EngineOptions
from deepinfer.errors import ConfigurationError
from deepinfer.model.roles import derive_roles
from deepinfer.sampling.draft_pool import DraftPool
from deepinfer_conformance.drivers import NullDriver

LIMIT = 512


@pytest.fixture
def layout(tiny_config) -> CacheLayout:
    return CacheLayout.from_config(tiny_config, derive_roles(tiny_config), block_size=4, backtrack=1)


@pytest.fixture
def plan(layout):
    def run(*, blocks_fit: int, spare_bytes: int = 0, reserved: int = 0, limit: int = LIMIT, **options):
        """Plan with a device that has room for the slots and so many blocks, plus some bytes."""
        given = EngineOptions(**{"block_size": 4, "max_num_seqs": 4, "memory_utilization": 1.0, **options})
        free = given.state_slots * layout.slot_bytes + blocks_fit * layout.block_bytes + spare_bytes
        return plan_pools(given, layout, MemoryInfo(2 * free, free + reserved, reserved), limit)

    return run


def test_the_pool_takes_what_the_budget_holds_and_not_a_byte_more(plan, layout) -> None:
    assert plan(blocks_fit=9).num_blocks == 9
    assert plan(blocks_fit=9, spare_bytes=layout.block_bytes - 1).num_blocks == 9
    assert plan(blocks_fit=9, spare_bytes=-1).num_blocks == 8


def test_what_the_driver_reserves_is_not_spent(plan, layout) -> None:
    assert plan(blocks_fit=9, reserved=10**9).num_blocks == 9


def test_the_budget_is_a_share_of_the_free_memory(layout) -> None:
    options = EngineOptions(block_size=4, max_num_seqs=1, memory_utilization=0.5)
    free = 2 * (2 * layout.slot_bytes + 7 * layout.block_bytes)
    assert plan_pools(options, layout, MemoryInfo(free, free), LIMIT).num_blocks == 7
    assert plan_pools(options, layout, MemoryInfo(free, free - 2), LIMIT).num_blocks == 6


def test_no_more_blocks_are_taken_than_all_requests_at_full_length_need(plan) -> None:
    assert plan(blocks_fit=10_000).num_blocks == 1 + 4 * LIMIT // 4
    assert plan(blocks_fit=10_000, max_model_len=30).num_blocks == 1 + 4 * 8


def test_max_model_len_defaults_to_the_smaller_of_model_and_pool(plan) -> None:
    assert plan(blocks_fit=10_000).max_model_len == LIMIT
    assert plan(blocks_fit=1 + 5).max_model_len == 20
    assert plan(blocks_fit=10_000, num_blocks=1 + 5).max_model_len == 20


def test_an_explicit_length_is_refused_if_the_budget_cannot_hold_it(plan) -> None:
    assert plan(blocks_fit=1 + 5, max_model_len=20).max_model_len == 20
    with pytest.raises(ConfigurationError, match=r"needs 6 blocks.*holds 5.*at most 20"):
        plan(blocks_fit=1 + 5, max_model_len=21)


def test_an_explicit_length_above_an_explicit_pool_starts_and_tells_the_longest_request(plan) -> None:
    planned = plan(blocks_fit=100, max_model_len=200, num_blocks=1 + 5)
    assert (planned.max_model_len, planned.longest_request) == (200, 20)
    assert "longest request that can finish 20 positions" in planned.arithmetic


def test_an_explicit_length_above_the_model_is_refused_even_with_blocks(plan) -> None:
    assert plan(blocks_fit=1000, max_model_len=LIMIT).max_model_len == LIMIT
    with pytest.raises(ConfigurationError, match="max_position_embeddings"):
        plan(blocks_fit=1000, max_model_len=LIMIT + 1, num_blocks=400)


def test_two_blocks_are_the_least(plan) -> None:
    assert plan(blocks_fit=2).num_blocks == 2
    with pytest.raises(ConfigurationError, match="2 blocks are the least"):
        plan(blocks_fit=2, spare_bytes=-1)


def test_explicit_numbers_that_the_device_cannot_hold_are_refused_with_the_bytes(plan, layout) -> None:
    assert plan(blocks_fit=50, num_blocks=50).num_blocks == 50
    with pytest.raises(ConfigurationError, match="lower num_blocks"):
        plan(blocks_fit=50, spare_bytes=-1, num_blocks=50)
    with pytest.raises(ConfigurationError, match=f"{2**31 - 1} blocks"):
        plan(blocks_fit=50, num_blocks=2**31 - 1)


def test_every_problem_is_told_at_once(plan) -> None:
    with pytest.raises(ConfigurationError) as refused:
        plan(blocks_fit=1, max_model_len=LIMIT + 1)
    assert len(refused.value.problems) == 2


def test_the_arithmetic_adds_up(plan, layout) -> None:
    planned = plan(blocks_fit=9)
    text = planned.arithmetic.replace(",", "")
    assert f"9 blocks x {layout.block_bytes} B = {9 * layout.block_bytes} B" in text
    assert f"5 state slots x {layout.slot_bytes} B = {5 * layout.slot_bytes} B" in text


def test_the_start_tells_the_arithmetic_and_warns_when_a_request_may_outgrow_the_pool(drive, caplog) -> None:
    with caplog.at_level(logging.INFO, "deepinfer.engine.build"):
        drive(num_blocks=6)
        (told,) = [record for record in caplog.records if "cache pools" in record.message]
        assert told.levelno == logging.INFO
        caplog.clear()
        engine = drive(num_blocks=6, max_model_len=64)
        (told,) = [record for record in caplog.records if "cache pools" in record.message]
        assert told.levelno == logging.WARNING
    assert (engine.engine.stats().max_model_len, engine.engine.stats().longest_request) == (64, 20)


def test_the_engine_owns_what_was_planned(drive) -> None:
    engine = drive(NullDriver(memory_bytes=1 << 20), num_blocks=None, max_num_seqs=2)
    stats, pools = engine.engine.stats(), engine.engine.worker.pools
    assert (stats.usable_blocks, stats.usable_state_slots) == (pools.num_blocks - 1, pools.num_slots - 1)
    assert (stats.free_blocks, stats.free_state_slots) == (stats.usable_blocks, stats.usable_state_slots)
    assert pools.block_bytes_Nb.nbytes + pools.slot_bytes_Zb.nbytes <= 0.9 * (1 << 20)
    assert pools.block_bytes_Nb.nbytes + pools.slot_bytes_Zb.nbytes > 0.9 * (1 << 20) - pools.layout.block_bytes


def test_drafts_take_their_part_of_the_budget_and_are_told(layout) -> None:
    options = EngineOptions(num_state_slots=4, max_num_seqs=3, num_speculative_tokens=2, block_size=4)
    drafts = draft_pool_bytes(options, 8)
    assert drafts == DraftPool(num_slots=4, drafts=2, kept_tokens=8, device=torch.device("cpu")).nbytes
    assert draft_pool_bytes(replace(options, verification="coupled"), 8) == 4 * 2 * 20
    free = 4 * layout.slot_bytes + 7 * layout.block_bytes
    options = replace(options, memory_utilization=1.0)
    planned = [plan_pools(options, layout, MemoryInfo(free, free), LIMIT, taken) for taken in (0, drafts)]
    assert planned[0].num_blocks - planned[1].num_blocks == -(-drafts // layout.block_bytes)
    assert f", drafts {drafts:,} B;" in planned[1].arithmetic
    assert "drafts" not in planned[0].arithmetic
    short = MemoryInfo(free, free)
    with pytest.raises(ConfigurationError, match=f"and {drafts:,} bytes of drafts need"):
        plan_pools(replace(options, num_blocks=7), layout, short, LIMIT, drafts)
