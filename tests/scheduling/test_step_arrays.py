"""What a step tells the worker, array by array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def test_a_decode_step_describes_its_rows_in_int32_and_its_ids_in_int64(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", [11, 12, 13, 14, 15], max_tokens=9)
    bench.add("b", [21, 22], max_tokens=9)
    bench.step(tokens=lambda step, sampled: [50, 60])
    step = bench.scheduler.schedule()
    for array in (step.cached_R, step.q_R, step.k_R, step.state_slot_R, step.block_table_RB):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    for array in (step.input_ids_T, step.history_RG, step.table_row_R, step.epoch_R):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
    assert step.cached_R.tolist() == [5, 2]
    assert step.q_R.tolist() == [1, 1]
    assert step.k_R.tolist() == [6, 3]
    assert step.block_table_RB.tolist() == [[1, 2], [3, 0]]
    assert step.state_slot_R.tolist() == [1, 2]
    assert step.input_ids_T.tolist() == [50, 60]
    assert step.history_RG.tolist() == [[15, 14, 13], [22, 21, -1]]
    assert step.is_partial_R.tolist() == [False, False]
    assert [sequence.request_id for sequence in step.sequences] == ["a", "b"]


def test_a_prompt_step_concatenates_its_chunks_and_looks_back_across_them(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_num_batched_tokens=6)
    bench.add("a", list(range(11, 21)), max_tokens=9)
    bench.add("b", [31, 32, 33], max_tokens=9)
    bench.step()
    step = bench.scheduler.schedule()
    assert bench.rows(step) == [("a", 6, 4, 10), ("b", 0, 2, 2)]
    assert step.input_ids_T.tolist() == [17, 18, 19, 20, 31, 32]
    assert step.history_RG.tolist() == [[16, 15, 14], [-1, -1, -1]]
    assert step.is_partial_R.tolist() == [False, True]
    assert step.block_table_RB.tolist() == [[1, 2, 3], [4, 0, 0]]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_history_is_as_long_as_the_configuration_says(count: int, make_bench: Callable[..., Any]) -> None:
    bench = make_bench(history_tokens=count)
    bench.add("a", 4, max_tokens=9)
    for _ in range(9):
        assert bench.step().history_RG.shape == (1, count)


def test_decode_history_never_looks_into_an_image(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", [11, 12, 13, 14], max_tokens=9, image_spans=[(1, 3)])
    seen = [bench.step(tokens=lambda step, sampled: [60 + step.number]).history_RG[0].tolist() for _ in range(5)]
    assert seen == [[-1, -1, -1], [14, -1, -1], [61, 14, -1], [62, 61, 14], [63, 62, 61]]


def test_a_steps_arrays_do_not_change_when_the_scheduler_goes_on(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", 5, max_tokens=9)
    bench.add("b", 7, max_tokens=9)
    bench.step()
    step = bench.step()
    names = ["cached_R", "k_R", "block_table_RB", "input_ids_T", "history_RG", "epoch_R", "table_row_R"]
    before = {name: getattr(step, name).copy() for name in names}
    for _ in range(4):
        bench.step()
    for name in names:
        assert np.array_equal(getattr(step, name), before[name])


def test_rows_are_ordered_by_history_length_then_arrival(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    for name, length in (("a", 5), ("b", 9), ("c", 5), ("d", 9), ("e", 12)):
        bench.add(name, length, max_tokens=20)
    bench.step()
    orders = [[row[0] for row in bench.rows(bench.step())] for _ in range(5)]
    assert orders == [["e", "b", "d", "a", "c"]] * 5


def test_several_blocks_can_be_added_in_one_step(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(block_size=2)
    sequence = bench.add("a", 4, max_tokens=20)
    bench.add("b", 4, max_tokens=20)
    bench.step()
    bench.scheduler.memory.table.look_ahead[sequence.row] = 5  # what drafts and steps in flight will ask for
    bench.scheduler.roster.running.invalidate()
    step = bench.scheduler.schedule()
    assert sequence.num_blocks == 5  # ceil((5 + 5) / 2)
    assert step.block_table_RB[1].tolist()[:3] == [3, 4, 8]
    assert step.block_table_RB[0].tolist() == [1, 2, 5, 6, 7]
    bench.scheduler.check_invariants()
