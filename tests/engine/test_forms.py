"""Structured output where xgrammar may be absent: a request that asks for it ends alone, in words."""

from __future__ import annotations

import sys

import pytest

from deepinfer import LLM, SamplingParams, StructuredOutputs
from deepinfer.sampling.limits import SamplingLimits


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setitem(sys.modules, "xgrammar", None)  # what an import of it would find
    return LLM(max_num_seqs=4, num_blocks=20)


def test_without_the_library_that_request_alone_ends_and_says_what_to_install(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    wanted = SamplingParams(max_tokens=2, structured_outputs={"regex": "a"})
    failed, fine = llm.generate(["Hello", "Hello"], [wanted, params], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "grammar_failed"
    assert "deepinfer-multibackend[structured]" in failed.outputs[0].message
    assert fine.outputs[0].finish_reason == "length"
    llm.engine.check_invariants()
    llm.close()


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({}, "has none; give exactly one of json_schema, regex, ebnf"),
        ({"regex": "a", "ebnf": "b"}, "has regex and ebnf"),
        ({"regex": "a" * 65537}, "has 65537 characters; the limit is 65536"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"regex": "a", "trigger_token_ids": [-1]}, "trigger_token_ids holds -1"),
        ({"regex": "a", "trigger_token_ids": [1] * 65}, "has 65 entries"),
        ({"regex": "a", "bound_token_id": 512}, "bound_token_id holds 512"),
    ],
)
def test_a_form_that_makes_no_sense_is_refused_before_it_is_compiled(wanted: dict[str, object], words: str) -> None:
    (problem,) = SamplingParams(structured_outputs=StructuredOutputs(**wanted)).problems(512)
    assert words in problem


def test_limits_admit_their_own_value() -> None:
    at_limit = StructuredOutputs(regex="a" * 65536, trigger_token_ids=[1] * 64, bound_token_id=511)
    assert at_limit.problems(512, SamplingLimits()) == []


def test_a_forced_continuation_contradicts_a_form() -> None:
    params = SamplingParams(golden_token_ids=[1], structured_outputs={"regex": "a"})
    assert any("contradict" in problem for problem in params.problems(512))


@pytest.mark.parametrize("wanted", [5, {"regexp": "a"}, {"regex": 5}, {"regex": "a", "trigger_token_ids": "x"}])
def test_wrong_types_are_told_at_once(wanted: object) -> None:
    with pytest.raises(TypeError, match=r"structured_outputs|StructuredOutputs"):
        SamplingParams(structured_outputs=wanted)
