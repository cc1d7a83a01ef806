"""Compiling forms that users wrote: bad, slow and large ones end their own request and nothing else."""

from __future__ import annotations

import dataclasses
import subprocess

import pytest

from deepinfer.sampling.grammar import GrammarCompiler, GrammarLimits, StructuredOutputs
from deepinfer.sampling.grammar.library import GrammarError
from deepinfer.tokenizer import Tokenizer

END, VOCAB_SIZE = 1, 140


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json_schema": "{bad"}, "not a usable json_schema: Failed to parse JSON"),
        ({"json_schema": {"type": "nonsense"}}, 'Unsupported type "nonsense"'),
        ({"regex": "a("}, "The parenthesis is not closed"),
        ({"ebnf": 'root ::= "a" foo'}, 'Rule "foo" is not defined'),
        # What the library would leave out or misread without a word.
        ({"regex": r"\Aab\Z"}, r"not a usable regex: escape \\A, which would mean the letter A"),
        ({"regex": "a{4294967297}"}, "repetition count 4294967297"),
        ({"json_schema": {"type": "string", "not": {"const": "no"}}}, "at #: 'not' cannot be enforced"),
        ({"json_schema": {"type": "string", "pattern": r"^\\$"}}, "a JSON string cannot hold"),
        ({"json_schema": "[" * 9999}, "nested too deeply"),
    ],
)
def test_a_bad_form_says_why_without_the_librarys_file_names(
    compiler: GrammarCompiler, form: dict[str, object], words: str
) -> None:
    with pytest.raises(GrammarError, match=words) as refused:
        compiler.submit(StructuredOutputs(**form).source).result(timeout=150)
    assert ".cc" not in str(refused.value)


def test_equal_forms_are_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.submit(StructuredOutputs(regex="xy+").source)
    assert compiler.submit(StructuredOutputs(regex="xy+", trigger_token_ids=[5]).source) is first
    assert compiler.submit(StructuredOutputs(ebnf="xy+").source) is not first


def test_after_a_form_that_takes_too_long_the_next_one_is_compiled(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [END], dataclasses.replace(GrammarLimits(), compile_s=0.5))
    try:
        slow = compiler.submit(StructuredOutputs(regex="((a{0,900}){0,900}b{0,900}){0,900}").source)
        fine = compiler.submit(StructuredOutputs(regex="ab").source)
        with pytest.raises(GrammarError, match=r"not done within|ended with status|not a usable regex"):
            slow.result(timeout=150)
        assert fine.result(timeout=150).compiled.memory_size_bytes > 0
    finally:
        compiler.close()


def test_a_process_that_cannot_start_is_told_and_no_fault_of_the_form(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [END], dataclasses.replace(GrammarLimits(), start_s=0.01))
    try:
        with pytest.raises(GrammarError, match="cannot start"):
            compiler.submit(StructuredOutputs(regex="ab").source).result(timeout=150)
        compiler._limits = GrammarLimits()
        assert compiler.submit(StructuredOutputs(regex="ab").source).result(timeout=150).compiled.memory_size_bytes > 0
        # Killed while it had nothing to do: the next form has nothing to do with it.
        compiler._running[0]._child.kill()
        compiler._running[0]._child.wait()
        assert compiler.submit(StructuredOutputs(regex="cd").source).result(timeout=150).compiled.memory_size_bytes > 0
    finally:
        compiler.close()


def test_a_machine_without_room_for_a_process_is_told(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", no_room)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [END])
    with pytest.raises(GrammarError, match=r"cannot be started: .*temporarily unavailable"):
        compiler.submit(StructuredOutputs(regex="ab").source).result(timeout=150)
    compiler.close()


def test_a_compiled_form_above_the_limit_is_refused(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [END], dataclasses.replace(GrammarLimits(), compiled_bytes=10))
    try:
        with pytest.raises(GrammarError, match="the limit is 10"):
            compiler.submit(StructuredOutputs(regex="ab").source).result(timeout=150)
    finally:
        compiler.close()


def test_the_cache_forgets_the_least_recently_used(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [END], dataclasses.replace(GrammarLimits(), cached_grammars=2))
    try:
        forms = [StructuredOutputs(regex=text).source for text in ("a", "b", "c")]
        first, second = (compiler.submit(form) for form in forms[:2])
        second.result(timeout=150)
        compiler.submit(forms[0])
        compiler.submit(forms[2]).result(timeout=150)
        assert compiler.submit(forms[0]) is first
        assert compiler.submit(forms[1]) is not second
    finally:
        compiler.close()


def test_closing_cancels_what_waits(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, [END])
    waiting = [compiler.submit(StructuredOutputs(regex=f"a{number}").source) for number in range(3)]
    compiler.close()
    assert all(each.done() for each in waiting)
