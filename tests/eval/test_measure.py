"""Measuring: what counts as right, and what a table and a file say."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.main import get_command

from deepinfer.cli.command import Command
from deepinfer.cli.eval import evaluate as command
from deepinfer.cli.session import Session
from deepinfer.errors import ArgumentError
from deepinfer.eval import EvalItem, evaluate
from deepinfer.model.checkpoint import packaged_model_path
from deepinfer.tokenizer import Tokenizer

VOCABULARY = 1376  # of the packaged model


class Scripted:
    """Stands for an LLM that says what the test wants, token probabilities even over the vocabulary."""

    def __init__(self, answers: dict[str, tuple[str, str]], *, with_tokenizer: bool = True) -> None:
        self.answers = answers
        self.tokenizer = Tokenizer.from_directory(packaged_model_path()) if with_tokenizer else None
        self.params: list[Any] = []

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    def generate(self, prompts: Sequence[str], params: Sequence[Any], *, use_tqdm: bool) -> list[SimpleNamespace]:
        self.params += params
        said = [self.answers[prompt] for prompt in prompts]
        return [SimpleNamespace(outputs=(SimpleNamespace(text=t, finish_reason=r),)) for t, r in said]

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.zeros(len(ids), VOCABULARY)


def item(prompt: str, answer: str, distance: int = 0, task: str = "sum") -> EvalItem:
    return EvalItem(task, distance, prompt, answer)


def test_an_answer_is_right_to_the_character_and_ends_by_itself() -> None:
    said = {"a": (" 12", "stop"), "b": (" 12", "length"), "c": (" 12.", "stop"), "d": ("12", "stop")}
    llm = Scripted(said)
    ticks: list[int] = []
    report = evaluate(llm, [item(prompt, " 12") for prompt in said], tick=ticks.append)  # type: ignore[arg-type]
    assert [row.exact_match for row in report.results] == [0.25]
    assert {params.temperature for params in llm.params} == {0.0}
    assert ticks == [4]


def test_rows_are_tasks_and_distances() -> None:
    llm = Scripted({"a": (" x", "stop"), "b": (" y", "stop")})
    items = [item("a", " x", 10, "recall"), item("b", " x", 30, "recall"), item("a", " more words", 0, "sentence")]
    near, far, running = evaluate(llm, items, {"accelerator": "scripted"}).results  # type: ignore[arg-type]
    assert (near.exact_match, far.exact_match, running.exact_match) == (1.0, 0.0, None)
    assert running.perplexity is not None
    assert math.isclose(running.perplexity, VOCABULARY, rel_tol=1e-5)


def test_a_model_without_a_tokenizer_cannot_be_asked() -> None:
    with pytest.raises(ArgumentError, match="tokenizer"):
        evaluate(Scripted({}, with_tokenizer=False), [item("a", "b")])  # type: ignore[arg-type]


def test_the_command_writes_a_table_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command("eval", cls=Command)(command)
    file = tmp_path / "result.json"
    words = ["--tasks", "facts,sentence", "--limit", "1", "--accelerator", "cpu_ref", "--save-result", str(file)]
    get_command(app).main(args=words, standalone_mode=False, obj=Session())
    answers, drafts, confidence, attention, experts = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in answers.splitlines()[2:]] == ["facts", "sentence"]
    assert len(drafts.splitlines()) == 2 + 3
    assert confidence.splitlines()[-1].startswith("error")
    assert [line.split()[0] for line in attention.splitlines()[2:]] == [str(layer) for layer in range(7)]
    assert len(experts.splitlines()) == 2 + 7 + 2  # and the draft stages
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert saved["settings"]["accelerator"] == "cpu_ref"
    assert [row["items"] for row in saved["results"]] == [1, 1]
    assert saved["internals"]["verified_by_place"][0] > 0
