"""Forks: a child continues from everything that its parent holds, and neither sees the other again."""

from __future__ import annotations

import pytest

from deepinfer import SamplingParams
from deepinfer.errors import ArgumentError, DuplicateRequestError


@pytest.mark.parametrize("length", [4, 5, 6, 7, 8])
def test_parent_and_child_go_their_own_ways_from_every_place_in_a_block(oracle, expected, prompt_of, length) -> None:
    engine = oracle()
    engine.add("parent", prompt_of(length), max_tokens=12)
    engine.step(2)
    history = [*prompt_of(length), *engine.tokens("parent")]
    engine.fork("parent", "child", max_tokens=9, golden_token_ids=[50])
    engine.fork("parent", "twin", max_tokens=4)
    engine.step()
    blocks = {row.request_id: row.block_table for row in engine.steps[-1].rows}
    shared = set(blocks["parent"]) & set(blocks["child"])
    assert len(shared) == (length + 1) // 4  # whole blocks only: the half-full one and the slot are the child's own
    engine.drain()
    assert engine.tokens("parent") == expected(prompt_of(length), 12)
    assert engine.tokens("child") == [50, *expected([*history, 50], 8)]
    assert engine.tokens("twin") == expected(history, 4)
    assert list(engine.records["child"][-1].prompt_token_ids) == history


def test_a_child_writes_no_byte_of_its_parent(oracle, prompt_of) -> None:
    engine = oracle(max_num_seqs=1, num_state_slots=4)
    engine.add("parent", prompt_of(6), max_tokens=3)
    engine.step(2)
    engine.fork("parent", "child", max_tokens=9, golden_token_ids=[50])
    row = engine.steps[-1].rows[0]
    pools = engine.engine.worker.pools
    before = pools.block_bytes_Nb[list(row.block_table)].clone()
    engine.step()
    engine.engine.abort_request("parent")
    engine.step(3)
    after = pools.block_bytes_Nb[list(row.block_table)]
    written = {row.block_table[-1]}  # by the parent's own last step
    assert all(
        block in written or old.equal(new) for block, old, new in zip(row.block_table, before, after, strict=True)
    )
    engine.drain()


def test_the_child_of_a_seeded_parent_with_the_same_seed_draws_the_same_tokens(uniform, prompt_of) -> None:
    """Draws are keyed by the index of the token in the whole history."""
    engine = uniform()
    engine.add("parent", prompt_of(5), max_tokens=12, seed=4)
    engine.step(4)
    engine.fork("parent", "child", max_tokens=8, seed=4)
    engine.fork("parent", "other", max_tokens=8, seed=5)
    engine.drain()
    assert engine.tokens("child") == engine.tokens("parent")[4:]
    assert engine.tokens("other") != engine.tokens("child")


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_prompt_that_waits_or_is_half_computed_can_be_forked(oracle, expected, prompt_of, steps) -> None:
    engine = oracle(max_num_batched_tokens=8)
    engine.add("parent", prompt_of(21), max_tokens=4)
    engine.step(steps)
    engine.fork("parent", "child", max_tokens=4)
    engine.drain()
    assert engine.tokens("parent") == engine.tokens("child") == expected(prompt_of(21), 4)


def test_a_fork_for_which_there_is_no_memory_is_computed_anew(oracle, expected, prompt_of) -> None:
    engine = oracle(num_state_slots=2, max_num_seqs=4)
    engine.add("parent", prompt_of(6), max_tokens=5)
    engine.step(2)
    engine.fork("parent", "child", max_tokens=5)
    engine.drain()
    history = [*prompt_of(6), *engine.tokens("parent")[:2]]
    assert engine.tokens("parent") == expected(prompt_of(6), 5)
    assert engine.tokens("child") == expected(history, 5)


def test_forks_of_forks_share_and_part_like_forks(oracle, expected, prompt_of) -> None:
    engine = oracle()
    engine.add("0", prompt_of(6), max_tokens=9)
    engine.step(2)
    for number in range(3):
        engine.fork(str(number), str(number + 1), max_tokens=9, golden_token_ids=[40 + number])
        engine.step()
    history = [*prompt_of(6), *engine.records["0"][1].outputs[0].token_ids]
    engine.drain()
    for number in range(1, 4):
        assert list(engine.records[str(number)][-1].prompt_token_ids) == history
        assert engine.tokens(str(number)) == [39 + number, *expected([*history, 39 + number], 8)]
        history.append(39 + number)


def test_the_text_of_a_child_is_that_of_its_own_tokens(drive) -> None:
    engine = drive(model=None, block_size=16)
    encode = engine.engine.tokenizer.encode
    engine.add("parent", encode("Once"), max_tokens=20, golden_token_ids=encode(" upon a time") + [2] * 20)
    engine.step(2)
    engine.fork("parent", "child", max_tokens=len(encode("the end")), golden_token_ids=encode("the end"))
    engine.drain()
    assert engine.answer("child").text == "the end"
    assert engine.records["child"][-1].prompt is None
    assert engine.answer("parent").text == " upon a time"


def test_a_fork_is_refused_with_every_reason_and_nothing_is_queued(drive, prompt_of) -> None:
    engine = drive()
    engine.add("siblings", prompt_of(4), n=2)
    engine.add("parent", prompt_of(4), max_tokens=3)
    engine.step()
    fork = engine.engine.fork_request
    with pytest.raises(ArgumentError, match="no living request 'nobody'") as refused:
        fork("nobody", "child", SamplingParams(n=3, top_p=2.0, stop=["x"]))
    assert len(refused.value.problems) == 3
    with pytest.raises(ArgumentError, match="n=2 siblings"):
        fork("siblings", "child")
    with pytest.raises(ArgumentError, match="tokenizer") as refused:
        fork("parent", "child", SamplingParams(prompt_logprobs=1, temperature=-1.0, stop=["x"]))
    assert len(refused.value.problems) == 3
    with pytest.raises(DuplicateRequestError, match="'siblings/1'"):
        fork("parent", "siblings/1")
    with pytest.raises(TypeError, match="params is of type dict"):
        fork("parent", "child", {"n": 1})
    engine.drain()
    with pytest.raises(ArgumentError, match="no living request 'parent'"):
        fork("parent", "child")
    engine.audit()
