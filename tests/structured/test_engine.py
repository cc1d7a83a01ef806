"""Structured output through the whole engine: every answer has its form, and nobody else notices."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from deepinfer import LLM, RequestOutput, SamplingParams, StructuredOutputs
from deepinfer.errors import ArgumentError
from deepinfer.eval import load_items

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    running = LLM(max_num_seqs=4, num_blocks=24, block_size=16)
    yield running
    running.close()


def ask(llm: LLM, prompts: list[str], *params: SamplingParams) -> list[RequestOutput]:
    records = llm.generate(prompts, list(params), use_tqdm=False)
    llm.engine.check_invariants()
    assert llm.engine.stats().free_blocks == llm.engine.stats().usable_blocks
    return records


def form(seed: int = 0, max_tokens: int = 60, **wanted: object) -> SamplingParams:
    structured = StructuredOutputs(**wanted)
    return SamplingParams(temperature=1, seed=seed, max_tokens=max_tokens, structured_outputs=structured)


def test_answers_are_in_their_language_whatever_the_random_model_says(llm: LLM) -> None:
    kinds = ({"json_schema": SCHEMA}, {"regex": r"(ab|cd){2,4}!"}, {"ebnf": 'root ::= "x" root | "y"'})
    wanted = [form(seed, **kind) for seed in range(3) for kind in kinds]
    for params, record in zip(wanted, ask(llm, ["Hello"] * len(wanted), *wanted), strict=True):
        (answer,) = record.outputs
        structured = params.structured_outputs
        if answer.finish_reason == "length":  # a random model may not find the end
            continue
        assert answer.finish_reason == "stop", answer
        if structured.json_schema is not None:
            assert set(json.loads(answer.text)) == {"name", "ok"}
        elif structured.regex is not None:
            assert re.fullmatch(structured.regex, answer.text)
        else:
            assert re.fullmatch("x*y", answer.text)
    assert any(params.structured_outputs.regex for params in wanted)


def test_records_of_the_models_world_are_valid_and_right_under_their_schema(llm: LLM) -> None:
    kinds = {"number": "integer", "text": "string", "flag": "boolean"}
    items, params = load_items(["json"], limit=4), []
    for item in items:
        fields = item.prompt.removeprefix("Record with ").partition(": ")[0].split(", ")
        properties = {name: {"type": kinds[kind]} for name, kind in (field.split() for field in fields)}
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        params.append(SamplingParams(temperature=0, max_tokens=60, structured_outputs={"json_schema": schema}))
    records = ask(llm, [item.prompt for item in items], *params)
    assert [json.loads(each.outputs[0].text) for each in records] == [json.loads(item.answer) for item in items]


def test_a_form_that_cannot_go_on_ends_with_the_end_token(llm: LLM) -> None:
    (record,) = ask(llm, ["Hello"], form(regex="ab"))
    assert (record.outputs[0].text, record.outputs[0].finish_reason) == ("ab", "stop")


def test_neighbours_without_a_form_answer_as_if_alone(llm: LLM) -> None:
    alone = ask(llm, ["Hello"], GREEDY)[0].outputs[0].token_ids
    records = ask(llm, ["Hello", "Hi", "Hello", "x"], GREEDY, form(regex="a+"), GREEDY, form(regex="a("))
    assert [records[0].outputs[0].token_ids, records[2].outputs[0].token_ids] == [alone, alone]
    assert records[3].outputs[0].finish_reason == "grammar_failed"
    assert "parenthesis is not closed" in records[3].outputs[0].message
    assert records[3].outputs[0].token_ids == ()


def test_an_end_that_is_banned_where_nothing_else_may_follow_is_a_stop(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=5, structured_outputs={"regex": "a"})
    (record,) = ask(llm, ["Hello"], params)
    assert (record.outputs[0].text, record.outputs[0].finish_reason) == ("a", "stop")


def test_settings_that_leave_the_form_no_token_end_that_request_with_words(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    banned = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token)[:1] == b"a"]
    params = SamplingParams(max_tokens=9, blacklist_token_ids=banned, structured_outputs={"regex": "a"})
    first, second = ask(llm, ["Hello", "Hello"], params, GREEDY)
    assert first.outputs[0].finish_reason == "grammar_failed"
    assert "no token" in first.outputs[0].message
    assert second.outputs[0].finish_reason == "length"


def test_preemption_does_not_change_a_structured_answer() -> None:
    wanted = [form(seed, max_tokens=20, regex="[a-z]{200}") for seed in range(4)]
    answers, preemptions = [], []
    for num_blocks in (60, 8):
        llm = LLM(max_num_seqs=4, num_blocks=num_blocks, block_size=8, batch_invariant=True)
        answers.append([record.outputs[0].text for record in ask(llm, ["Hello"] * 4, *wanted)])
        preemptions.append(llm.engine.stats().preemptions)
        llm.close()
    assert preemptions[0] == 0 < preemptions[1]
    assert answers[0] == answers[1]


def test_siblings_have_progress_of_their_own(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=30, structured_outputs={"regex": "(ab|c)*!"})
    (record,) = ask(llm, ["Hello"], params)
    for answer in record.outputs:
        assert re.fullmatch(r"(ab|c)*!?a?", answer.text), answer.text


def test_a_request_can_be_aborted_while_its_form_is_compiled(llm: LLM) -> None:
    engine = llm.engine
    engine.add_request("slow", [5, 6], form(regex="x{1,50}y{1,50}z{3}"))
    assert engine.stats().num_waiting == 1
    engine.check_invariants()
    with pytest.raises(ArgumentError, match="waits until its form is compiled"):
        engine.fork_request("slow", "child")
    assert engine.abort_request("slow")
    assert not engine.abort_request("slow")
    (record,) = engine.step()
    assert record.outputs[0].finish_reason == "abort"
    assert not engine.has_unfinished_requests()
    engine.check_invariants()


def test_leaving_a_generation_forgets_what_is_compiled(llm: LLM) -> None:
    stream = llm.stream(["Hello", "Hi"], [form(regex="q{1,9}"), GREEDY])
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished_requests()
    llm.engine.check_invariants()


def test_a_trigger_that_never_comes_leaves_the_text_free(llm: LLM) -> None:
    plain = ask(llm, ["Hello"], GREEDY)[0].outputs[0].token_ids
    last = llm.get_tokenizer().vocab_size - 1
    free = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, structured_outputs={"regex": "a", "trigger_token_ids": [last] * 9}
    )
    assert ask(llm, ["Hello"], free)[0].outputs[0].token_ids == plain
