"""n > 1 and seeds: whose draws are whose, whatever runs beside them."""

from __future__ import annotations

import pytest

from deepinfer import SamplingParams
from deepinfer.errors import DuplicateRequestError
from deepinfer.sampling.streams import sibling_seed

PROMPT = [5, 6, 7, 8, 9]


def test_siblings_differ_repeat_and_the_first_is_the_answer_of_n_1(uniform) -> None:
    engine = uniform()
    for name, n in (("one", 1), ("four", 4), ("again", 4)):
        engine.add(name, PROMPT, max_tokens=6, n=n, seed=11)
    engine.drain()
    four = [engine.tokens("four", index) for index in range(4)]
    assert len({tuple(tokens) for tokens in four}) == 4
    assert four == [engine.tokens("again", index) for index in range(4)]
    assert four[0] == engine.tokens("one")
    assert [answer.index for answer in engine.records["four"][-1].outputs] == [0, 1, 2, 3]


def test_sibling_i_draws_with_the_documented_seed(uniform) -> None:
    engine = uniform()
    engine.add("n", PROMPT, max_tokens=6, n=3, seed=-5)
    for index in range(3):
        engine.add(f"solo {index}", PROMPT, max_tokens=6, seed=sibling_seed(-5, index))
    engine.drain()
    for index in range(3):
        assert engine.tokens("n", index) == engine.tokens(f"solo {index}")


def test_siblings_without_a_seed_differ_too(uniform) -> None:
    engine = uniform()
    engine.add("n", PROMPT, max_tokens=6, n=3)
    engine.drain()
    assert len({tuple(engine.tokens("n", index)) for index in range(3)}) == 3


def test_every_sibling_ends_by_itself_and_the_record_when_the_last_has_ended(uniform) -> None:
    engine = uniform()
    engine.add("n", PROMPT, max_tokens=30, n=4, seed=1, stop_token_ids=list(range(2, 15)))
    engine.drain()
    lengths = [len(engine.tokens("n", index)) for index in range(4)]
    assert len(set(lengths)) > 1
    for records in zip(*(record.outputs for record in engine.records["n"]), strict=True):
        ended = [answer.finish_reason is not None for answer in records]
        assert ended == sorted(ended)  # once it has ended it stays so
    assert len(engine.records["n"]) == max(lengths)
    # Exactly one record of the request is terminal (the audit), and it tells every sibling's end.
    assert {engine.answer("n", index).finish_reason for index in range(4)} <= {"stop", "length"}


def test_an_abort_ends_all_siblings(uniform) -> None:
    engine = uniform(max_num_seqs=2)
    engine.add("n", PROMPT, max_tokens=30, n=4, seed=1)
    engine.step(3)
    assert engine.engine.stats().num_unfinished == 4
    assert engine.engine.abort_request("n") is True
    engine.drain()
    assert [answer.finish_reason for answer in engine.records["n"][-1].outputs] == ["abort"] * 4
    assert [len(answer.token_ids) for answer in engine.records["n"][-1].outputs] == [3, 3, 0, 0]


def test_prompt_log_probabilities_of_siblings_are_one_list(uniform) -> None:
    engine = uniform(max_num_batched_tokens=2)
    engine.add("n", PROMPT, max_tokens=2, n=3, prompt_logprobs=2)
    engine.drain()
    listed = engine.records["n"][-1].prompt_logprobs
    assert listed[0] is None
    assert len(listed) == len(PROMPT)
    assert all(token in entry for token, entry in zip(PROMPT[1:], listed[1:], strict=True))


def test_ids_of_siblings_and_of_requests_cannot_meet(uniform) -> None:
    engine = uniform()
    engine.add("a", PROMPT, n=2)
    for taken in ("a", "a/0", "a/1"):
        with pytest.raises(DuplicateRequestError, match=taken):
            engine.engine.add_request(taken, PROMPT)
    engine.add("b/1", PROMPT)
    with pytest.raises(DuplicateRequestError, match="b/1"):
        engine.engine.add_request("b", PROMPT, SamplingParams(n=2))
    engine.add("b", PROMPT)
    engine.drain()


def test_the_largest_n_runs_with_sixteen_state_slots(drive) -> None:
    engine = drive(num_state_slots=17, max_num_seqs=1024, num_blocks=32)
    engine.add("n", [5, 6], max_tokens=1, n=1024, golden_token_ids=[9])
    records = []
    while engine.engine.has_unfinished_requests():
        records += engine.engine.step()
    engine.engine.check_invariants()
    assert [len(record.outputs) for record in records if record.finished] == [1024]
    assert {answer.token_ids for answer in records[-1].outputs} == {(9,)}
    assert {answer.finish_reason for answer in records[-1].outputs} == {"length"}
    assert engine.engine.stats().free_state_slots == 16


def test_one_more_than_the_largest_n_is_refused_with_one_answer(drive) -> None:
    engine = drive()
    engine.add("n", [5, 6], n=1025)
    engine.drain()
    assert [answer.finish_reason for answer in engine.records["n"][-1].outputs] == ["ignored"]
    assert "1024" in engine.answer("n").message


def test_identical_prompts_differ_without_a_seed_and_agree_with_one(uniform) -> None:
    engine = uniform()
    for number in range(4):
        engine.add(f"free {number}", PROMPT, max_tokens=6)
        engine.add(f"seeded {number}", PROMPT, max_tokens=6, seed=3)
    engine.drain()
    assert len({tuple(engine.tokens(f"free {number}")) for number in range(4)}) == 4
    assert len({tuple(engine.tokens(f"seeded {number}")) for number in range(4)}) == 1


def test_the_engine_seed_decides_the_draws_of_requests_without_one(uniform) -> None:
    def drawn(seed: int, *, between: bool = False) -> list[int]:
        engine = uniform(seed=seed)
        engine.add("first", PROMPT, max_tokens=6)
        if between:  # what is refused, seeded or computed for its logits takes no seed from the others
            engine.add("refused", [])
            engine.add("seeded", PROMPT, max_tokens=2, seed=1)
            with pytest.raises(DuplicateRequestError):
                engine.engine.add_request("first", PROMPT)
            engine.drain()
            engine.engine.compute_logits("logits", PROMPT)
        engine.add("second", PROMPT, max_tokens=6)
        engine.drain()
        return engine.tokens("second")

    assert drawn(1) == drawn(1) == drawn(1, between=True)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize("neighbours", [0, 1, 2, 6])
def test_a_seeded_request_draws_the_same_whatever_runs_beside_it(uniform, neighbours) -> None:
    def drawn(count: int, **options: int) -> list[int]:
        engine = uniform(**options)
        for number in range(count):
            engine.add(str(number), PROMPT[: 1 + number], max_tokens=4, temperature=0.5, top_k=7)
        engine.step(min(count, 2))
        engine.add("mine", PROMPT, max_tokens=8, seed=99, top_p=0.9)
        engine.drain()
        return engine.tokens("mine")

    assert drawn(neighbours) == drawn(0, max_num_batched_tokens=2) == drawn(3, num_blocks=12)
