"""What add_request raises, what it refuses with a record, and that neither touches anybody else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deepinfer import SamplingParams
from deepinfer.engine.admission import read_token_ids, spans_of
from deepinfer.errors import DuplicateRequestError

VOCAB_SIZE = 101
LIMIT = 40


def ended_as_ignored(engine: Any, name: str = "bad") -> str:
    """Drain, check that the request was refused with a record of its own, and return why."""
    engine.drain()
    answer = engine.answer(name)
    assert (answer.finish_reason, answer.token_ids, answer.text) == ("ignored", (), "")
    return str(answer.message)


@pytest.fixture
def with_neighbour(oracle, expected, prompt_of):
    """An engine in which a good request runs; afterwards its tokens are compared."""
    engine = oracle(max_model_len=LIMIT)
    engine.add("good", prompt_of(7), max_tokens=6)
    engine.step(2)
    yield engine
    engine.drain()
    assert engine.tokens("good") == expected(prompt_of(7), 6)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([-1], "-1"),
        ([VOCAB_SIZE], "101"),
        ([5, 2**31, 7, -(2**63), 10**400], "2147483648"),
        ([3] * (LIMIT + 1), "41 tokens"),
    ],
)
def test_a_bad_prompt_is_refused_by_its_own_record(with_neighbour, prompt, words) -> None:
    with_neighbour.add("bad", prompt)
    assert words in ended_as_ignored(with_neighbour)


@pytest.mark.parametrize("prompt", [[0], [VOCAB_SIZE - 1], [3] * LIMIT])
def test_prompts_at_the_borders_run(with_neighbour, prompt) -> None:
    with_neighbour.add("border", prompt, max_tokens=1)
    with_neighbour.drain()
    assert with_neighbour.answer("border").finish_reason == "length"


@pytest.mark.parametrize(
    "name", ["stop_token_ids", "blacklist_token_ids", "allowed_token_ids", "golden_token_ids", "logit_bias"]
)
def test_an_id_outside_the_vocabulary_is_refused_in_every_list(with_neighbour, name) -> None:
    for wrong in (-2, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1, 2**31, 2**63):
        with_neighbour.add("bad", [5], **{name: {wrong: 1.0} if name == "logit_bias" else [5, wrong, 5]})
        with_neighbour.step()
        answer = with_neighbour.answer("bad")
        assert (answer.finish_reason, answer.token_ids) == ("ignored", ())
        assert name in answer.message
        assert str(wrong) in answer.message


def test_ids_in_lists_are_taken_as_they_are_at_the_borders(uniform) -> None:
    engine = uniform()
    last = VOCAB_SIZE - 1
    engine.add("a", [5], max_tokens=3, allowed_token_ids=[0, last, last], logit_bias={last: 900.0}, temperature=0)
    engine.add("b", [5], max_tokens=3, temperature=0)
    engine.drain()
    assert engine.tokens("a") == [last] * 3
    assert engine.tokens("b") == [0, 0, 0]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2**31}, "2147483647"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"n": 0}, "n is 0"),
        ({"n": 10**6}, "1024"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"logprobs": 1025}, "1024"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stop_token_ids": [5] * 1025}, "1025 entries"),
        ({"min_tokens": 17}, "above max_tokens"),
    ],
)
def test_parameters_out_of_range_are_refused_with_the_limit(with_neighbour, params, words) -> None:
    with_neighbour.add("bad", [5], **params)
    assert words in ended_as_ignored(with_neighbour)


def test_the_largest_max_tokens_reserves_nothing(drive, prompt_of) -> None:
    engine = drive(max_model_len=12)
    engine.add("a", prompt_of(4), max_tokens=2**31 - 1)
    engine.step()
    assert engine.engine.stats().usable_blocks - engine.engine.stats().free_blocks == 1
    engine.drain()
    assert len(engine.tokens("a")) == 9


def test_every_reason_is_told_at_once(drive) -> None:
    engine = drive()
    engine.engine.add_request(
        "bad", [-1], SamplingParams(n=0, top_p=2.0, stop=["x"]), image_spans=[(0, 3)], embeddings=torch.zeros(1, 3)
    )
    engine.records["bad"] = []
    assert ended_as_ignored(engine).count(";") >= 6


def test_every_wrong_type_is_told_at_once_and_nothing_is_queued(drive) -> None:
    engine = drive()
    with pytest.raises(TypeError) as refused:
        engine.engine.add_request(5, "text", {"n": 1}, prompt=7, image_spans=3, embeddings=[1.0])
    for name in ("request_id", "prompt_token_ids", "params", "prompt is", "image_spans", "embeddings"):
        assert name in str(refused.value)
    engine.audit()


@pytest.mark.parametrize(
    "prompt", ["text", b"ids", None, 5, {5: 1}, {5, 6}, [5, "6"], [5.0], [True], [[5]], [None], np.zeros((2, 2), int)]
)
def test_a_prompt_of_a_wrong_type_raises(drive, prompt) -> None:
    engine = drive()
    with pytest.raises(TypeError, match="prompt_token_ids"):
        engine.engine.add_request("bad", prompt)
    engine.audit()


@pytest.mark.parametrize(
    "prompt",
    [[5, 6], (5, 6), range(5, 7), iter([5, 6]), np.array([5, 6]), np.array([5, 6], np.uint8), torch.tensor([5, 6])],
)
def test_every_kind_of_integer_list_is_read(prompt) -> None:
    ids = read_token_ids(prompt)
    assert ids == (5, 6)
    assert all(type(token) is int for token in ids)


def test_a_living_id_is_refused_and_its_owner_untouched(with_neighbour) -> None:
    for prompt in ([5], []):
        with pytest.raises(DuplicateRequestError, match="'good'"):
            with_neighbour.engine.add_request("good", prompt)
    with_neighbour.add("bad", [])
    with pytest.raises(DuplicateRequestError, match="'bad'"):
        with_neighbour.engine.add_request("bad", [5])  # its record has not been handed out


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        ([], ()),
        ([False, False], ()),
        ([True], ((0, 1),)),
        ([False, True, True, False, True], ((1, 3), (4, 5))),
        (np.array([1, 0, 1]), ((0, 1), (2, 3))),
    ],
)
def test_spans_are_the_runs_of_a_mask(mask, spans) -> None:
    assert spans_of(mask) == spans


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([(2, 2)], "empty"),
        ([(3, 2)], "empty"),
        ([(-1, 2)], "leaves"),
        ([(0, 7)], "leaves the prompt of 6"),
        ([(2, 4), (0, 3)], "overlaps"),
        ([(0, 6)], "image of 6 positions cannot be cut"),
    ],
)
def test_bad_image_spans_are_refused(drive, prompt_of, spans, words) -> None:
    engine = drive(max_num_batched_tokens=5)
    engine.engine.add_request("bad", prompt_of(6), image_spans=spans)
    engine.records["bad"] = []
    assert words in ended_as_ignored(engine)


def test_embeddings_need_their_shape_and_a_place(drive, prompt_of) -> None:
    engine = drive()
    for embeddings, spans, words in (
        (torch.zeros(5, 64), [(0, 2)], "[6, 64]"),
        (torch.zeros(6, 63), [(0, 2)], "[6, 64]"),
        (torch.zeros(6, 64), [], "image_spans is empty"),
    ):
        engine.engine.add_request("bad", prompt_of(6), image_spans=spans, embeddings=embeddings)
        engine.records["bad"] = []
        assert words in ended_as_ignored(engine)
    with pytest.raises(TypeError, match="int64"):
        engine.engine.add_request("bad", prompt_of(6), image_spans=[(0, 2)], embeddings=torch.zeros(6, 64).long())
