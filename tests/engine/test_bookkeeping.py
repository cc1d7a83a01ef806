"""Whatever the scheduler does, a request reads its own memory and nothing else: tokens equal those of its history."""

from __future__ import annotations

import pytest

from deepinfer import SamplingParams
from deepinfer_conformance.drivers import OracleHistory


@pytest.mark.parametrize("budget", [1, 3, 4, 7, 16, 64])
def test_tokens_do_not_depend_on_how_prompts_are_cut(oracle, expected, prompt_of, budget) -> None:
    engine = oracle(max_num_batched_tokens=budget, prefill_attempt_interval=1)
    prompts = {str(length): prompt_of(length, length) for length in (1, 2, 5, 8, 13, 21)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, max_tokens=6)
    engine.drain()
    assert {name: engine.tokens(name) for name in prompts} == {name: expected(p, 6) for name, p in prompts.items()}


@pytest.mark.parametrize("fill", ["nan", "large", "zeros"])
def test_memory_that_nobody_owns_is_never_read(oracle, expected, prompt_of, fill) -> None:
    engine = oracle(max_num_batched_tokens=8, prefill_attempt_interval=2, num_blocks=24)
    engine.poison(fill)
    waves = [(f"{wave}-{length}", prompt_of(length, 10 * wave + length)) for wave in range(3) for length in (3, 9, 14)]
    for request_id, prompt in waves:
        engine.add(request_id, prompt, max_tokens=5)
    while engine.engine.has_unfinished_requests():
        engine.poison(fill)
        engine.step()
    engine.audit()
    assert {name: engine.tokens(name) for name, _ in waves} == {name: expected(prompt, 5) for name, prompt in waves}


def test_a_request_after_another_in_the_same_memory_equals_one_in_a_fresh_engine(oracle, expected, prompt_of) -> None:
    """A pool of exactly one request: every block and the only slot change hands each time."""
    engine = oracle(num_blocks=1 + 5, num_state_slots=2, max_num_seqs=1)
    for number, length in enumerate([14, 3, 14, 9, 1, 12]):
        prompt = prompt_of(length, number)
        engine.add("again", prompt, max_tokens=20 - length)
        engine.drain()
        assert engine.tokens("again") == expected(prompt, 20 - length)


def test_freeing_one_request_changes_no_byte_of_another(oracle, prompt_of) -> None:
    engine = oracle()
    pools = engine.engine.worker.pools
    for number in range(3):
        engine.add(str(number), prompt_of(6 + number, number), max_tokens=30)
    engine.step()
    rows = {row.request_id: row for row in engine.steps[-1].rows}
    blocks, slot = list(rows["1"].block_table), rows["1"].state_slot
    before = pools.block_bytes_Nb[blocks].clone(), pools.slot_bytes_Zb[slot].clone()
    engine.engine.abort_request("0")
    engine.engine.abort_request("2")
    engine.poison("nan")
    assert pools.block_bytes_Nb[blocks].equal(before[0])
    assert pools.slot_bytes_Zb[slot].equal(before[1])


def test_preemption_and_recomputation_change_no_token(oracle, expected, prompt_of) -> None:
    engine = oracle(num_blocks=1 + 9, prefill_attempt_interval=3, max_num_batched_tokens=8)
    prompts = {str(number): prompt_of(5 + number, number) for number in range(4)}
    for request_id, prompt in prompts.items():
        engine.add(request_id, prompt, max_tokens=16)
    engine.drain()
    assert engine.engine.stats().preemptions > 0
    assert {name: engine.tokens(name) for name in prompts} == {name: expected(p, 16) for name, p in prompts.items()}


@pytest.mark.parametrize("budget", [6, 7, 9, 40])
def test_image_spans_are_barriers_wherever_the_chunks_end(oracle, tiny_config, prompt_of, budget) -> None:
    spans = [(0, 2), (5, 11), (11, 13), (20, 22)]
    mask = [any(start <= position < stop for start, stop in spans) for position in range(25)]
    history = OracleHistory(tiny_config, tiny_config.vocab_size)
    history.extend(prompt_of(25), mask)
    tokens = []
    for _ in range(4):
        tokens.append(history.next_token())
        history.extend(tokens[-1:])
    engine = oracle(max_num_batched_tokens=budget)
    engine.engine.add_request("a", prompt_of(25), SamplingParams(max_tokens=4), image_spans=spans)
    engine.records["a"] = []
    engine.step(2)
    engine.fork("a", "child", max_tokens=1)
    engine.drain()
    assert engine.tokens("a") == tokens
    starts = [row.cached for step in engine.steps for row in step.rows]
    assert not [cut for cut in starts for start, stop in spans if start < cut < stop]
    made = len(engine.records["child"][-1].prompt_token_ids) - 25
    assert engine.tokens("child") == [tokens[made]]
