"""Truncated prefill through the whole engine: compact is mask, and nothing a user does moves a bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.errors import ArgumentError, ConfigurationError
from deepinfer.settings import Settings

PARAMS = SamplingParams(temperature=1, seed=3, max_tokens=8, ignore_eos=True, logprobs=1)
KEEP = 36  # the packaged model's window is 32


def prompts() -> list[list[int]]:
    return [[(7 * place + number) % 500 + 5 for place in range(length)] for number, length in enumerate((120, 66, 36))]


def build(mode: str, **options: object) -> LLM:
    keep = {"truncated_prefill_keep_tokens": KEEP} if mode != "off" else {}
    options = {"max_num_seqs": 4, "num_blocks": 80, "block_size": 8, "batch_invariant": True} | keep | options
    return LLM(truncated_prefill=mode, **options)


def answers(llm: LLM, asked: Sequence[Sequence[int]]) -> list[object]:
    records = llm.generate(asked, PARAMS, use_tqdm=False)
    llm.engine.check_invariants()
    return [(record.outputs[0].token_ids, record.outputs[0].logprobs) for record in records]


@pytest.fixture(scope="module")
def masked() -> list[object]:
    return answers(build("mask"), prompts())


@pytest.mark.parametrize("budget", [2048, 41])
def test_compact_gives_what_mask_gives_in_chunks_of_any_size(masked: list[object], budget: int) -> None:
    assert answers(build("compact", max_num_batched_tokens=budget), prompts()) == masked


def test_a_preemption_changes_nothing(masked: list[object]) -> None:
    llm = build("compact", num_blocks=30)
    assert answers(llm, prompts()) == masked
    assert llm.engine.stats().preemptions > 0


def test_a_prompt_that_is_kept_whole_is_answered_as_without_truncation(masked: list[object]) -> None:
    assert answers(build("off"), prompts()[2:]) == masked[2:]


def test_what_needs_every_row_is_refused() -> None:
    llm = build("compact")
    (record,) = llm.generate([[5, 6]], SamplingParams(prompt_logprobs=1), use_tqdm=False)
    assert record.outputs[0].finish_reason == "ignored"
    assert "truncated_prefill='off'" in record.outputs[0].message
    with pytest.raises(ArgumentError, match="truncated_prefill='off'"):
        llm.logits([5, 6])


def test_too_few_kept_rows_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ArgumentError, match="truncated_prefill_keep_tokens=32 is below 33"):
        build("compact", truncated_prefill_keep_tokens=32)


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="'off', 'mask', 'compact'"):
        build("short")


def test_the_environment_speaks_where_the_caller_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "mask")
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "50")
    options = LLM(num_blocks=20).engine.options
    assert (options.truncated_prefill, options.truncated_prefill_keep_tokens) == ("mask", 50)
    options = LLM(num_blocks=20, truncated_prefill="off", truncated_prefill_keep_tokens=60).engine.options
    assert (options.truncated_prefill, options.truncated_prefill_keep_tokens) == ("off", 60)


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_a_number_of_tokens_is_a_number(text: str) -> None:
    with pytest.raises(ConfigurationError, match="KEEP_TOKENS"):
        Settings.from_environment({"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS": text})
