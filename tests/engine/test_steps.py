"""What runs in which step, seen from outside: chunks, blocks, limits, aborts in every state."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.engine.outputs import StepRecord

END = 1


def test_the_last_step_names_kind_and_rows(drive, prompt_of) -> None:
    engine = drive()
    assert engine.engine.last_step == StepRecord("empty", ())
    engine.add("a", prompt_of(6), max_tokens=2)
    engine.add("b", prompt_of(3), max_tokens=3)
    engine.step()
    first = engine.engine.last_step
    assert first.kind == "prefill"
    assert [(row.request_id, row.cached, row.q, row.k, len(row.block_table)) for row in first.rows] == [
        ("a", 0, 6, 6, 2),
        ("b", 0, 3, 3, 1),
    ]
    assert len({row.state_slot for row in first.rows} - {0}) == 2
    assert 0 not in {block for row in first.rows for block in row.block_table}
    engine.step()
    second = engine.engine.last_step
    assert (second.kind, [(row.request_id, row.cached, row.q) for row in second.rows]) == (
        "decode",
        [("a", 6, 1), ("b", 3, 1)],
    )
    assert second.rows[1].block_table == first.rows[1].block_table
    engine.drain()
    engine.step()
    assert engine.engine.last_step == StepRecord("empty", ())


def test_what_was_read_of_a_step_does_not_change_later(drive, prompt_of) -> None:
    engine = drive()
    engine.add("a", prompt_of(7), max_tokens=9)
    engine.step()
    kept = engine.engine._loop.last_step
    at_once = StepRecord.of(kept)
    engine.drain()
    assert StepRecord.of(kept) == at_once


def test_300_tokens_with_a_budget_of_128_run_in_three_chunks(drive, prompt_of) -> None:
    engine = drive(block_size=128, num_blocks=8, max_num_batched_tokens=128)
    engine.add("a", prompt_of(300), max_tokens=1)
    engine.drain()
    assert engine.chunks("a") == [(0, 128, 128), (128, 128, 256), (256, 44, 300)]
    assert [len(step.rows[0].block_table) for step in engine.steps] == [3, 3, 3]
    assert len(engine.records["a"]) == 1  # nothing comes from an unfinished chunk


def test_two_prompts_of_16389_share_a_budget_of_32768(drive, prompt_of) -> None:
    engine = drive(block_size=128, num_blocks=300, max_num_batched_tokens=32768)
    prompt = prompt_of(16_389)
    engine.add("a", prompt, max_tokens=125)
    engine.add("b", prompt, max_tokens=1)
    engine.step(2)
    assert [[(row.request_id, row.q) for row in step.rows] for step in engine.steps] == [
        [("a", 16_389), ("b", 16_379)],
        [("b", 10)],
    ]
    assert len(engine.steps[0].rows[0].block_table) == 129
    engine.drain()
    decoded = [step.rows[0] for step in engine.steps if step.kind == "decode"]
    # The 130th block comes when position 16,512 is computed.
    assert {len(row.block_table) for row in decoded if row.k <= 16_512} == {129}
    assert {len(row.block_table) for row in decoded if row.k > 16_512} == {130}
    assert decoded[-1].k == 16_389 + 124


def test_an_abort_between_chunks_gives_everything_back(drive, prompt_of) -> None:
    engine = drive(block_size=128, num_blocks=400, max_num_batched_tokens=32768)
    start = engine.engine.stats()
    engine.add("a", prompt_of(50_000), max_tokens=1)
    engine.step()
    held = engine.engine.stats()
    assert (start.free_blocks - held.free_blocks, start.free_state_slots - held.free_state_slots) == (391, 1)
    assert engine.engine.abort_request("a")
    after = engine.engine.stats()
    assert (after.free_blocks, after.free_state_slots) == (start.free_blocks, start.free_state_slots)
    engine.drain()
    assert (engine.answer("a").finish_reason, engine.answer("a").token_ids) == ("abort", ())


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_aborts_of_prompts_leave_no_trace_however_often(oracle, expected, prompt_of, chunks) -> None:
    engine = oracle(max_num_batched_tokens=16)
    for number in range(15):
        engine.add("gone", prompt_of(40, number), max_tokens=4)
        engine.step(chunks)
        assert engine.engine.abort_request("gone") is True
        assert engine.engine.abort_request("gone") is False
        engine.drain()
        assert (engine.answer("gone").finish_reason, engine.tokens("gone")) == ("abort", [])
    engine.add("normal", prompt_of(40), max_tokens=4)
    engine.drain()
    assert engine.tokens("normal") == expected(prompt_of(40), 4)


class AbortInFlight:
    """A worker that ends a request while the step that holds it computes."""

    def __init__(self, engine: Any, request_id: str, step: int) -> None:
        self._worker = engine._loop.worker
        self._engine = engine
        self._request_id = request_id
        self._left = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def run(self, *args: Any) -> Any:
        self._left -= 1
        if not self._left:
            assert self._engine.abort_request(self._request_id)
        return self._worker.run(*args)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_an_abort_in_flight_adds_no_token_and_leaks_nothing(oracle, expected, prompt_of, step) -> None:
    engine = oracle(max_num_batched_tokens=16)
    engine.engine._loop.worker = AbortInFlight(engine.engine, "gone", step)
    engine.add("gone", prompt_of(40), max_tokens=9)
    engine.add("stays", prompt_of(3, 1), max_tokens=9)
    engine.drain()
    assert engine.answer("gone").finish_reason == "abort"
    assert engine.tokens("gone") == expected(prompt_of(40), 9)[: max(0, step - 3)]
    assert engine.tokens("stays") == expected(prompt_of(3, 1), 9)


def test_an_abort_finds_a_request_in_every_queue_and_tells_when_there_is_none(drive, prompt_of) -> None:
    engine = drive(max_num_seqs=1, num_state_slots=4)
    assert engine.engine.abort_request("unknown") is False
    engine.add("running", prompt_of(4), max_tokens=9)
    engine.add("waiting", prompt_of(4), max_tokens=9)
    engine.add("refused", [])
    assert engine.engine.abort_request("refused") is False
    engine.step(2)
    engine.fork("running", "fork", max_tokens=9)
    for name in ("running", "waiting", "fork"):
        assert engine.engine.abort_request(name) is True
        assert engine.engine.abort_request(name) is False
    engine.drain()
    assert {name: engine.answer(name).finish_reason for name in ("running", "waiting", "fork")} == dict.fromkeys(
        ("running", "waiting", "fork"), "abort"
    )
    assert len(engine.tokens("running")) == 2
    assert engine.engine.abort_request("running") is False


def test_a_cut_never_splits_an_image(drive, prompt_of) -> None:
    engine = drive(max_num_batched_tokens=128)
    engine.engine.add_request("a", prompt_of(200), image_spans=[(100, 160)])
    engine.records["a"] = []
    engine.drain()
    assert engine.chunks("a") == [(0, 100, 100), (100, 100, 200)]


@pytest.mark.parametrize("length", [28, 29, 30, 31, 32])
def test_the_context_limit_ends_a_request_and_no_position_beyond_it_is_written(
    oracle, expected, prompt_of, length
) -> None:
    engine = oracle(max_model_len=32, num_blocks=40)
    engine.add("limited", prompt_of(length), max_tokens=100)
    engine.add("healthy", prompt_of(6, 1), max_tokens=12)
    engine.drain()
    limited = engine.answer("limited")
    assert (limited.finish_reason, list(limited.token_ids)) == ("length", expected(prompt_of(length), 33 - length))
    assert max(row.k for step in engine.steps for row in step.rows) <= 32
    assert engine.tokens("healthy") == expected(prompt_of(6, 1), 12)
    assert len([step for step in engine.steps if step.kind == "decode"]) <= 12


def test_half_computed_prompts_and_growing_answers_do_not_lock_each_other(oracle, expected, prompt_of) -> None:
    engine = oracle(num_blocks=20, max_num_batched_tokens=24)
    engine.add("a", prompt_of(30), max_tokens=20)
    engine.step()
    engine.add("b", prompt_of(40, 1), max_tokens=4)
    engine.drain(limit=600)
    assert engine.tokens("a") == expected(prompt_of(30), 20)
    assert engine.tokens("b") == expected(prompt_of(40, 1), 4)


@pytest.mark.parametrize("blocks", [4, 5, 6])
def test_a_request_that_can_never_fit_is_refused_and_keeps_nobody_waiting(oracle, expected, prompt_of, blocks) -> None:
    engine = oracle(num_blocks=1 + 5, num_state_slots=2, max_num_seqs=1)
    engine.add("big", prompt_of(4 * blocks), max_tokens=50)
    engine.add("small", prompt_of(4, 1), max_tokens=3)
    engine.drain()
    assert engine.tokens("small") == expected(prompt_of(4, 1), 3)
    big = engine.answer("big")
    if blocks > 5:
        assert (big.finish_reason, big.token_ids) == ("ignored", ())
        assert "24 tokens" in big.message
    else:
        # max_model_len is what the pool holds: 20 positions, and the token made from the last of them.
        assert (big.finish_reason, list(big.token_ids)) == ("length", expected(prompt_of(4 * blocks), 21 - 4 * blocks))


def test_a_request_that_outgrows_the_pool_ends_alone_with_the_reason(oracle, expected, prompt_of) -> None:
    engine = oracle(num_blocks=1 + 5, max_model_len=64)
    engine.add("big", prompt_of(10), max_tokens=50)
    engine.add("small", prompt_of(4, 1), max_tokens=30)
    engine.drain()
    big = engine.answer("big")
    assert big.finish_reason == "insufficient_system_resource"
    assert "6 blocks" in big.message
    assert list(big.token_ids) == expected(prompt_of(10), 11)
    assert engine.answer("small").finish_reason == "insufficient_system_resource"
    assert engine.tokens("small") == expected(prompt_of(4, 1), 17)


@pytest.mark.parametrize("length", [5, 20, 33])
def test_nothing_comes_from_an_unfinished_chunk(drive, prompt_of, length) -> None:
    """Every chunk's row draws the forced end token; only the last one's counts."""
    engine = drive(max_num_batched_tokens=8)
    engine.add("a", prompt_of(length), max_tokens=1, golden_token_ids=[END])
    engine.drain()
    assert len(engine.chunks("a")) == -(-length // 8)
    assert (engine.tokens("a"), engine.answer("a").finish_reason) == ([END], "stop")
    assert len(engine.records["a"]) == 1


def test_a_preempted_request_may_be_ended_instead_of_recomputed(oracle, expected, prompt_of) -> None:
    engine = oracle(num_blocks=1 + 9, stop_preempted_requests=True)
    for number in range(3):
        engine.add(str(number), prompt_of(9, number), max_tokens=20)
    engine.drain()
    reasons = {str(number): engine.answer(str(number)).finish_reason for number in range(3)}
    assert set(reasons.values()) == {"length", "insufficient_system_resource"}
    for number, reason in reasons.items():
        tokens = expected(prompt_of(9, int(number)), 20)
        assert engine.tokens(number) == (tokens if reason == "length" else tokens[: len(engine.tokens(number))])
