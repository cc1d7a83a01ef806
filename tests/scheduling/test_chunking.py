"""How prompts are cut: the vectors, and the law that every position is computed exactly once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.scheduling.chunking import allowance, charge
from deepinfer.scheduling.config import EngineType, SchedulerConfig
from deepinfer.scheduling.scheduler import Scheduler
from deepinfer.scheduling.sequence import Sequence, StopRules


def prompt_steps(bench: Any) -> list[list[tuple[str, int, int, int]]]:
    """The rows of each prompt step until the queue is empty."""
    steps = []
    while bench.scheduler.num_waiting:
        step = bench.step()
        if step.kind == "prefill":
            steps.append(bench.rows(step))
    return steps


def test_300_tokens_in_chunks_of_128_take_three_blocks_with_the_first(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(block_size=128, num_blocks=16, max_num_batched_tokens=128, max_model_len=4096)
    sequence = bench.add("a", 300)
    for expected in [(0, 128, 128), (128, 128, 256), (256, 44, 300)]:
        step = bench.step()
        assert bench.rows(step) == [("a", *expected)]
        assert sequence.num_blocks == 3


def test_with_alignment_the_allowance_rounds_down_and_the_charge_rounds_up() -> None:
    assert allowance(259, 252, 4) == 4
    assert charge(5, 4) == 8
    assert (allowance(7, 0, 1), charge(5, 1)) == (7, 5)


def test_a_chunk_is_charged_with_its_padding(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_num_batched_tokens=16, chunk_align=4)
    bench.add("a", 5)
    bench.add("b", 5)
    bench.add("c", 5)
    assert bench.rows(bench.step()) == [("a", 0, 5, 5), ("b", 0, 5, 5)]


def test_two_prompts_of_16389_share_a_budget_of_32768(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(block_size=128, num_blocks=600, max_num_batched_tokens=32_768, max_model_len=65_536)
    for name in ("a", "b", "c"):
        bench.add(name, 16_389 if name != "c" else 50, max_tokens=1)
    bench.checks = False
    bench.worker.run = lambda step: [5] * step.num_requests
    assert bench.rows(bench.step()) == [("a", 0, 16_389, 16_389), ("b", 0, 16_379, 16_379)]
    assert bench.rows(bench.step()) == [("b", 16_379, 10, 16_389), ("c", 0, 50, 50)]


def test_a_cut_shrinks_to_the_start_of_an_image(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_num_batched_tokens=128, num_blocks=100)
    bench.add("a", 200, image_spans=[(100, 160)])
    assert [rows[0][1:3] for rows in prompt_steps(bench)] == [(0, 100), (100, 100)]


def test_a_cut_grows_to_the_end_of_an_image_only_for_the_first_request_and_within_the_budget(
    make_bench: Callable[..., Any],
) -> None:
    bench = make_bench(max_num_batched_tokens=64, num_blocks=100)
    bench.add("a", 60, image_spans=[(20, 50)], chunk_checkpoints=[30])
    bench.add("b", 60, image_spans=[(4, 40)], chunk_checkpoints=[10])
    assert prompt_steps(bench) == [
        [("a", 0, 50, 50)],  # the checkpoint at 30 splits the image: grown to its end
        [("a", 50, 10, 60), ("b", 0, 4, 4)],  # not the first of the step: shrunk to the start
        [("b", 4, 36, 40)],
        [("b", 40, 20, 60)],
    ]


def test_an_image_that_fits_no_step_is_refused_on_arrival(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_num_batched_tokens=32)
    bench.add("a", 60, image_spans=[(10, 43)])
    bench.add("b", 60, image_spans=[(10, 42)], max_tokens=1)
    bench.take_terminals()
    assert bench.terminals["a"].finish_reason == "ignored"
    assert "image of 33 positions" in bench.terminals["a"].text
    bench.drain()
    assert bench.terminals["b"].finish_reason == "length"


def test_checkpoints_end_chunks(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    bench.add("a", 50, chunk_checkpoints=[8, 8, 20, 50])
    assert [rows[0][1:3] for rows in prompt_steps(bench)] == [(0, 8), (8, 12), (20, 30)]


def test_a_cut_below_the_minimum_waits_for_the_next_step(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_num_batched_tokens=16, min_chunk_tokens=6)
    bench.add("a", 12)
    bench.add("b", 21)
    assert prompt_steps(bench) == [[("a", 0, 12, 12)], [("b", 0, 16, 16)], [("b", 16, 5, 21)]]


def test_a_remainder_below_the_minimum_is_scheduled_whole(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_num_batched_tokens=16, min_chunk_tokens=6)
    bench.add("a", 14)
    bench.add("b", 2)
    assert prompt_steps(bench) == [[("a", 0, 14, 14), ("b", 0, 2, 2)]]


def test_the_first_request_runs_even_if_an_image_leaves_less_than_the_minimum(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_num_batched_tokens=16, min_chunk_tokens=6)
    bench.add("a", 20, image_spans=[(3, 19)])
    assert [rows[0][1:3] for rows in prompt_steps(bench)] == [(0, 3), (3, 16), (19, 1)]


def test_a_normal_engine_stops_at_an_unfinished_chunk_and_a_prompt_engine_keeps_looking(
    make_bench: Callable[..., Any],
) -> None:
    expected = {
        EngineType.NORMAL: [("a", 0, 8, 8)],
        EngineType.PROMPT: [("a", 0, 8, 8), ("b", 0, 20, 20)],
    }
    for engine_type, rows in expected.items():
        bench = make_bench(engine_type=engine_type)
        bench.add("a", 20, chunk_checkpoints=[8])
        bench.add("b", 20)
        assert bench.rows(bench.step()) == rows
        assert bench.scheduler.roster.head.request_id == "a"


def test_several_unfinished_prompts_return_to_the_front_in_their_order(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(engine_type=EngineType.PROMPT)
    for name in ("a", "b", "c"):
        bench.add(name, 20, chunk_checkpoints=[8], schedulable=name != "c")
    bench.step()
    assert [sequence.request_id for sequence in bench.scheduler.roster.waiting] == ["a", "b", "c"]


def test_without_chunking_a_prompt_that_does_not_fit_the_rest_waits_and_blocks(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(enable_chunked_prefill=False)
    bench.add("a", 40)
    bench.add("b", 30)
    bench.add("c", 10)
    bench.add("d", 65)
    assert prompt_steps(bench) == [[("a", 0, 40, 40)], [("b", 0, 30, 30), ("c", 0, 10, 10)]]
    assert bench.terminals["d"].finish_reason == "ignored"
    assert "enable_chunked_prefill is off" in bench.terminals["d"].text


def test_the_history_budget_charges_whole_lengths_and_ends_the_pass_at_the_first_that_does_not_fit(
    make_bench: Callable[..., Any],
) -> None:
    bench = make_bench(max_prefill_history_tokens=50)
    for name, length in (("a", 30), ("b", 21), ("c", 5), ("d", 51)):
        bench.add(name, length)
    bench.take_terminals()
    assert "max_prefill_history_tokens" in bench.terminals["d"].text
    assert prompt_steps(bench) == [[("a", 0, 30, 30)], [("b", 0, 21, 21), ("c", 0, 5, 5)]]


def test_running_requests_and_waiting_forks_count_against_max_num_seqs(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(max_num_seqs=3)
    bench.add("a", 5, max_tokens=100)
    bench.step()
    bench.scheduler.fork("a", "a1", StopRules(3))
    for name in ("b", "c"):
        bench.add(name, 5, max_tokens=100)
    assert [row[0] for row in bench.rows(bench.step())] == ["b"]
    assert sorted(row[0] for row in bench.rows(bench.step())) == ["a", "a1", "b"]


@st.composite
def prompts(draw: st.DrawFn) -> dict[str, Any]:
    length = draw(st.integers(1, 80))
    edges = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
    spans = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=False) if stop - start <= 16]
    checkpoints = draw(st.lists(st.integers(1, length), max_size=4))
    return {"length": length, "image_spans": spans, "chunk_checkpoints": checkpoints}


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(prompts(), min_size=1, max_size=4),
    budget=st.integers(16, 40),
    align=st.sampled_from([1, 2, 4, 8, 16]),
    min_chunk=st.integers(1, 16),
    engine_type=st.sampled_from([EngineType.NORMAL, EngineType.PROMPT]),
)
def test_every_prompt_position_is_computed_exactly_once_and_no_image_is_split(
    requests: list[dict[str, Any]], budget: int, align: int, min_chunk: int, engine_type: EngineType
) -> None:
    config = SchedulerConfig(
        block_size=4,
        num_blocks=200,
        num_state_slots=9,
        max_model_len=100,
        max_num_batched_tokens=budget,
        chunk_align=align,
        min_chunk_tokens=min_chunk,
        engine_type=engine_type,
        prefill_attempt_interval=1,
    )
    scheduler = Scheduler(config)
    done = [0] * len(requests)
    for number, request in enumerate(requests):
        rest = {name: value for name, value in request.items() if name != "length"}
        scheduler.add(Sequence(str(number), range(request["length"]), StopRules(100), **rest))
    for _ in range(sum(request["length"] for request in requests)):
        if not scheduler.num_waiting:
            break
        step = scheduler.schedule()
        if step.kind == "prefill":
            charged = 0
            first = 0
            for sequence, cached, q in zip(step.sequences, step.cached_R.tolist(), step.q_R.tolist(), strict=True):
                number = int(sequence.request_id)
                assert cached == done[number]
                assert step.input_ids_T[first : first + q].tolist() == list(range(cached, cached + q))
                assert q > 0
                assert not any(start < cached + q < stop for start, stop in requests[number]["image_spans"])
                done[number] += q
                charged += charge(q, align)
                first += q
            assert charged <= budget
        scheduler.commit(step, [7] * step.num_requests)
        scheduler.check_invariants()
    assert done == [request["length"] for request in requests]
