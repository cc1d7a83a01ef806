"""`deepinfer generate`: what reaches the library, and how its answers are written. The library itself is a stand-in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer import llm
from deepinfer.cli import generate as command
from deepinfer.engine.outputs import CompletionOutput, RequestOutput
from deepinfer.errors import ArgumentError, RankFailedError
from deepinfer.sampling.grammar import StructuredOutputs

Run = Callable[..., object]


def answer(text: str, *, index: int = 0, reason: str | None = "length", message: str | None = None) -> CompletionOutput:
    return CompletionOutput(index, text, tuple(range(len(text))), None, reason, message=message)


def record(request_id: str, *answers: CompletionOutput) -> RequestOutput:
    finished = all(each.finish_reason is not None for each in answers)
    return RequestOutput(request_id, None, (1,), None, answers, finished)


class StandIn:
    """Remembers what it was given and answers from a script."""

    script: list[RequestOutput]
    calls: list[dict[str, object]]
    closings = 0

    def __init__(self, model: object, accelerator: object, **options: object) -> None:
        self.calls.append({"model": model, "accelerator": accelerator, **options})

    rank = 0

    def close(self) -> None:
        type(self).closings += 1

    def get_tokenizer(self) -> None:
        return None

    def generate(self, prompts: object, params: object, *, use_tqdm: bool) -> list[RequestOutput]:
        self.calls.append({"prompts": prompts, "params": params, "use_tqdm": use_tqdm})
        return self.script

    def stream(self, prompts: object, params: object) -> Iterator[RequestOutput]:
        self.calls.append({"prompts": prompts, "params": params})
        yield from self.script


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    stand_in = type("LLM", (StandIn,), {"script": [record("0", answer("hi"))], "calls": []})
    monkeypatch.setattr(llm, "LLM", stand_in)
    return stand_in


def test_options_reach_the_library(run: Run, library: type[StandIn], tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "string"}')
    ran = run(
        *("generate", "one", "two", "--prompt-ids", "1,2, 3", "--prompt-ids", "4", "--model", tmp_path),
        *("--accelerator", "cpu_ref", "--temperature", "0", "--top-k", "5", "--top-p", "0.5", "--min-p", "0.1"),
        *("--seed", "7", "--max-tokens", "3", "--min-tokens", "1", "--n", "2", "--stop", "a", "--stop", "b"),
        *("--stop-token-ids", "8,9", "--ignore-eos", "--logprobs", "4", "--json", "--dtype", "bfloat16"),
        *("--numerics", "served", "--kv-cache-dtype", "float32", "--max-model-len", "99", "--max-num-seqs", "2"),
        *("--max-num-batched-tokens", "64", "--block-size", "16", "--num-blocks", "10", "--num-state-slots", "4"),
        *("--memory-utilization", "0.5", "--num-speculative-tokens", "2", "--verification", "coupled"),
        *("--variable-verification", "--cost-curves", "kept", "--no-decode-graphs", "--graph-interval", "4"),
        *("--no-async-scheduling", "--data-parallel-size", "1", "--rank-deadline-s", "5"),
        *("--redundant-experts", "0", "--expert-balancing", "off"),
        *("--truncated-prefill", "mask", "--truncated-prefill-keep-tokens", "77", "--json-schema", schema),
    )
    assert ran.status == 0, ran.err
    built, generated = library.calls
    assert library.closings == 1
    assert built == {
        "model": tmp_path,
        "accelerator": "cpu_ref",
        "dtype": "bfloat16",
        "numerics": "served",
        "kv_cache_dtype": "float32",
        "max_model_len": 99,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "num_blocks": 10,
        "num_state_slots": 4,
        "memory_utilization": 0.5,
        "num_speculative_tokens": 2,
        "verification": "coupled",
        "async_scheduling": False,
        "variable_verification": True,
        "cost_curves": "kept",
        "decode_graphs": False,
        "graph_interval": 4,
        "truncated_prefill": "mask",
        "truncated_prefill_keep_tokens": 77,
        "data_parallel_size": 1,
        "expert_parallel_size": 1,
        "redundant_experts": 0,
        "expert_balancing": "off",
        "expert_balancing_interval": None,
        "expert_balancing_window": None,
        "context_parallel_size": 1,
        "spread_ngram_tables": False,
        "rank_deadline_s": 5.0,
    }
    assert generated["prompts"] == ["one", "two", [1, 2, 3], [4]]
    assert generated["use_tqdm"] is True
    params = generated["params"]
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0, 5, 0.5, 0.1, 7)
    assert (params.max_tokens, params.min_tokens, params.n, params.stop) == (3, 1, 2, ("a", "b"))
    assert (params.stop_token_ids, params.ignore_eos, params.logprobs) == ((8, 9), True, 4)
    assert params.structured_outputs == StructuredOutputs(json_schema='{"type": "string"}')


def test_tables_are_spread_where_that_is_asked_for(run: Run, library: type[StandIn]) -> None:
    assert run("generate", "x", "--spread-ngram-tables").status == 0
    assert library.calls[0]["spread_ngram_tables"] is True


def test_a_form_may_be_text_or_a_file_and_only_one(run: Run, library: type[StandIn], tmp_path: Path) -> None:
    grammar = tmp_path / "grammar.ebnf"
    grammar.write_text('root ::= "a"')
    run("generate", "x", "--regex", "a+")
    run("generate", "x", "--ebnf", grammar)
    found = [call["params"].structured_outputs for call in library.calls if "params" in call]
    assert found == [StructuredOutputs(regex="a+"), StructuredOutputs(ebnf='root ::= "a"')]
    ran = run("generate", "x", "--ebnf", grammar, "--regex", "a", "--max-tokens", "0")
    assert ran.status == 2
    assert "regex and ebnf" in ran.err
    assert "max_tokens" in ran.err


@pytest.mark.parametrize("flag", ["--json-schema", "--ebnf"])
def test_a_file_that_is_not_utf_8_is_named(run: Run, library: type[StandIn], tmp_path: Path, flag: str) -> None:
    form = tmp_path / "form"
    form.write_bytes(b'root ::= "\xff"')
    ran = run("generate", "x", flag, form, "--max-tokens", "0")
    assert ran.status == 2
    assert f"{flag} {form}: is not UTF-8" in ran.err
    assert "max_tokens" in ran.err
    assert library.calls == []


def test_without_a_prompt_the_documented_one_is_used(run: Run, library: type[StandIn]) -> None:
    run("generate")
    assert library.calls[1]["prompts"] == [command.DEFAULT_PROMPT]
    assert repr(command.DEFAULT_PROMPT) in run("generate", "--help").out


def test_every_bad_value_is_reported_before_anything_is_loaded(run: Run, library: type[StandIn]) -> None:
    ran = run(
        *("generate", "--prompt-ids", "1,x", "--stop-token-ids", "", "--temperature", "-1", "--max-tokens", "0"),
        *("--block-size", "3", "--memory-utilization", "2", "--logprobs", "-1"),
    )
    assert ran.status == 2
    for words in (
        "--prompt-ids",
        "--stop-token-ids",
        "temperature",
        "max_tokens",
        "block_size",
        "memory_utilization",
        "logprobs",
    ):
        assert words in ran.err
    assert library.calls == []


def test_a_single_answer_is_just_its_text(run: Run, library: type[StandIn]) -> None:
    assert run("generate", "x").out == "hi\n"


def test_several_answers_are_headed(run: Run, library: type[StandIn]) -> None:
    library.script = [record("0", answer("a"), answer("b", index=1)), record("1", answer("c"), answer("d", index=1))]
    assert run("generate", "x", "y", "--n", "2").out == (
        "[request 0, answer 0]\na\n[request 0, answer 1]\nb\n[request 1, answer 0]\nc\n[request 1, answer 1]\nd\n"
    )


def test_text_cannot_drive_the_terminal(run: Run, library: type[StandIn]) -> None:
    library.script = [record("0", answer("\x1b[31mred"))]
    assert run("generate", "x").out == "\\x1b[31mred\n"


def test_a_model_without_a_tokenizer_shows_ids(run: Run, library: type[StandIn]) -> None:
    library.script = [record("0", replace(answer(""), token_ids=(5, 6)))]
    assert run("generate", "--prompt-ids", "1").out == "5 6\n"


class Speaking(StandIn):
    """A stand-in that has a tokenizer."""

    def get_tokenizer(self) -> Speaking:
        return self

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def test_a_text_that_is_held_back_is_not_replaced_by_ids(
    run: Run, library: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens may have no text: control marks, half a character, the beginning of a stop string."""
    speaking = type("LLM", (Speaking,), {"calls": [], "script": [record("0", replace(answer(""), token_ids=(1,)))]})
    monkeypatch.setattr(llm, "LLM", speaking)
    assert run("generate", "x").out == "\n"
    speaking.script = [
        record("0", replace(answer("", reason=None), token_ids=(40, 41))),
        record("0", replace(answer("once", reason="stop"), token_ids=(40, 41, 42))),
    ]
    assert run("generate", "x", "--stream").out == "once\n"


def test_json_is_one_line_per_request(run: Run, library: type[StandIn]) -> None:
    library.script = [record("0", answer("a\nb")), record("1", answer("c", reason="stop"))]
    lines = run("generate", "x", "y", "--json").out.splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "request_id": "0",
            "outputs": [{"index": 0, "text": "a\nb", "token_ids": [0, 1, 2], "finish_reason": "length"}],
        },
        {"request_id": "1", "outputs": [{"index": 0, "text": "c", "token_ids": [0], "finish_reason": "stop"}]},
    ]


@pytest.mark.parametrize("extra", [(), ("--stream",), ("--json",), ("--json", "--stream")])
def test_a_refused_request_is_said_and_ends_with_status_1(
    run: Run, library: type[StandIn], extra: tuple[str, ...]
) -> None:
    library.script = [record("0", answer("fine")), record("1", answer("", reason="ignored", message="too long"))]
    ran = run("generate", "x", "y", *extra)
    assert ran.status == 1
    assert "fine" in ran.out
    assert ran.err.endswith("error: request 1, answer 0 ended as 'ignored': too long\n")


def test_a_stream_of_one_answer_is_the_same_text(run: Run, library: type[StandIn]) -> None:
    library.script = [
        record("0", answer("", reason=None)),
        record("0", answer("on", reason=None)),
        record("0", answer("once", reason="stop")),
    ]
    assert run("generate", "x", "--stream").out == "once\n"


def test_a_stream_of_several_answers_never_mixes_their_texts(run: Run, library: type[StandIn]) -> None:
    library.script = [
        record("0", answer("a", reason=None)),
        record("1", answer("x", reason=None)),
        record("0", answer("ab", reason=None)),
        record("1", answer("xy", reason="stop")),
        record("0", answer("abc", reason="stop")),
    ]
    assert run("generate", "p", "q", "--stream").out == ("[request 0, answer 0]\nabc\n[request 1, answer 0]\nxy\n")


def test_a_json_stream_has_a_line_per_record(run: Run, library: type[StandIn]) -> None:
    library.script = [record("0", answer("a", reason=None)), record("0", answer("ab"))]
    lines = [json.loads(line) for line in run("generate", "x", "--stream", "--json").out.splitlines()]
    assert [line["outputs"][0]["text"] for line in lines] == ["a", "ab"]
    assert [line["outputs"][0]["finish_reason"] for line in lines] == [None, "length"]


def test_an_interrupt_while_generating_ends_with_status_130(
    run: Run, library: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> list[RequestOutput]:
        raise KeyboardInterrupt

    monkeypatch.setattr(library, "generate", interrupted)
    ran = run("generate", "x")
    assert (ran.status, ran.out) == (130, "")
    assert ran.err.endswith("interrupted\n")


def test_log_probabilities_are_a_table_under_each_answer(run: Run, library: type[StandIn]) -> None:
    told = CompletionOutput(0, "", (4, 5), ({4: -1.0, 9: -0.5}, {5: 0.0}), "length")
    library.script = [record("0", told), record("1", told)]
    for flags in ((), ("--stream",)):
        out = run("generate", "x", "y", "--logprobs", "1", *flags).out
        assert out.count("log-prob") == 2
        assert out.count("9 60.65 %") == 2
    assert "log-prob" not in run("generate", "x", "--logprobs", "1", "--json").out.replace('"logprobs"', "")


def closing_badly(library: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    def close(_: object) -> None:
        raise RankFailedError([1], "rank 1 died: it was ended by signal 9")

    monkeypatch.setattr(library, "close", close)


def test_answers_are_written_before_ranks_fail_to_be_closed(
    run: Run, library: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    closing_badly(library, monkeypatch)
    library.script = [record("0", answer("hi")), record("1", answer("", reason="ignored", message="too long"))]
    ran = run("generate", "one", "two")
    assert ran.status == 1
    assert "hi" in ran.out
    assert ran.err.splitlines() == [
        "error: request 1, answer 0 ended as 'ignored': too long",
        "error: the ranks were given up because of rank 1: rank 1 died: it was ended by signal 9",
    ]


def test_what_ranks_say_when_they_are_closed_does_not_take_the_place_of_an_earlier_error(
    run: Run, library: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ArgumentError("generate", ["no such thing"])

    closing_badly(library, monkeypatch)
    monkeypatch.setattr(library, "generate", refuse)
    ran = run("generate", "one")
    assert ran.status == 2
    assert ran.err.index("rank 1 died") < ran.err.index("no such thing")
    assert "Traceback" not in ran.err


def test_a_rank_that_fails_in_a_call_is_told_once_with_status_1(
    run: Run, library: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RankFailedError([1], "rank 1 died: it was ended by signal 9")

    monkeypatch.setattr(library, "generate", fail)
    ran = run("generate", "one")
    assert ran.status == 1
    assert ran.err.splitlines() == [
        "error: the ranks were given up because of rank 1: rank 1 died: it was ended by signal 9"
    ]
    assert library.closings == 1
