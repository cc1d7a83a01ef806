"""What `bench core` measures is the engine's core in a steady state; how long that takes is nobody's test."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from deepinfer.bench.core import END_TOKEN_ID, CoreSettings, SteadyCore, run_core
from deepinfer.bench.core_reference import ReferenceLoop
from deepinfer.errors import ArgumentError

PARTS = {"schedule", "commit", "records", "replace"}


def test_a_report_holds_every_case_and_its_parts() -> None:
    ticks: list[None] = []
    report = run_core(CoreSettings((8, 30), steps=20, warm_up_steps=2), tick=lambda: ticks.append(None))
    assert report.benchmark == "core"
    assert [result.running for result in report.results] == [8, 30]
    assert len(ticks) == 2
    for result in report.results:
        assert set(result.parts) == PARTS
        assert 0 < max(result.parts.values()) <= result.median_us
        assert result.reference_loop_us > 0


def test_parts_add_up_to_the_step_and_nothing_else_is_counted(step_clock: Callable[[], float]) -> None:
    (result,) = run_core(CoreSettings((4,), steps=7, warm_up_steps=0), clock=step_clock).results
    assert dict(result.parts) == dict.fromkeys(PARTS, 1e6)
    assert result.median_us == 4e6
    assert result.reference_loop_us == 1e6


def test_a_sixteenth_takes_a_block_and_one_in_a_hundred_ends_in_each_step() -> None:
    running, steps = 320, 100
    core = SteadyCore(running, CoreSettings((running,)), clock=lambda: 0.0)
    free = [core.scheduler.free_blocks]
    tokens_R = np.full(running, END_TOKEN_ID + 1, dtype=np.int64)
    for _ in range(steps):
        core.step(tokens_R)
        free.append(core.scheduler.free_blocks)
    core.scheduler.check_invariants()
    assert core.num_admitted - running == pytest.approx(running * steps / 100, rel=0.05)
    assert core.scheduler.num_running + core.scheduler.num_waiting == running
    # Endings give back whole tables; a step without one shows what growth takes.
    taken = [before - after for before, after in pairwise(free) if before > after]
    assert np.median(taken) <= running / 16


def test_an_end_token_ends_its_request_and_another_takes_its_place() -> None:
    core = SteadyCore(4, CoreSettings((4,)), clock=lambda: 0.0)
    core.step(np.array([5, END_TOKEN_ID, 5, 5]))
    # The first one's life is a single token.
    assert core.num_admitted == 4 + 2


def test_the_reference_loop_gives_every_block_to_one_row_and_every_row_a_record() -> None:
    loop = ReferenceLoop(40, block_size=16, prompt_tokens=20, life_tokens=10, end_token_id=1)
    tokens_R = np.arange(2, 42)
    seen: list[int] = []
    for _ in range(60):
        records = loop.step(tokens_R)
        assert [record[1] for record in records] == tokens_R.tolist()
        owned = loop.block_table_RN[loop.block_table_RN > 0]
        assert len(set(owned.tolist())) == len(owned)
        assert (loop.lengths_R == loop.positions_R + 1).all()
        seen.append(sum(record[2] for record in records))
    assert sum(seen[10:]) == 4 * 50


@pytest.mark.parametrize("wrong", [{"running": ()}, {"running": (4, 0)}, {"steps": 0}, {"block_size": 3}])
def test_settings_that_measure_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        CoreSettings(**wrong)  # type: ignore[arg-type]
