"""Options: a frozen list, checked all at once before anything is loaded, each with an effect."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import pytest
import torch

from deepinfer import LLM
from deepinfer.engine.options import EngineKeywords, EngineOptions
from deepinfer.errors import ArgumentError
from deepinfer.settings import Settings

# Adding, renaming or removing an option means changing these lines, on purpose.
FROZEN = {
    "dtype": None,
    "numerics": "portable",
    "kv_cache_dtype": "released",
    "batch_invariant": None,
    "max_model_len": None,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "max_prefill_history_tokens": None,
    "block_size": 128,
    "num_blocks": None,
    "num_state_slots": None,
    "memory_utilization": 0.9,
    "engine_type": "normal",
    "enable_chunked_prefill": True,
    "stop_preempted_requests": False,
    "prefill_attempt_interval": 70,
    "prefill_any_attempt_interval": 100,
    "num_speculative_tokens": 0,
    "verification": "standard",
    "async_scheduling": None,
    "variable_verification": None,
    "cost_curves": None,
    "decode_graphs": None,
    "graph_interval": None,
    "truncated_prefill": None,
    "truncated_prefill_keep_tokens": None,
    "seed": 0,
    "allow_fallback": (),
    "data_parallel_size": None,
    "expert_parallel_size": 1,
    "redundant_experts": None,
    "expert_balancing": None,
    "expert_balancing_interval": None,
    "expert_balancing_window": None,
    "context_parallel_size": 1,
    "spread_ngram_tables": False,
    "rank_deadline_s": 60.0,
}


def test_names_and_defaults_are_the_frozen_list() -> None:
    assert {field.name: field.default for field in fields(EngineOptions)} == FROZEN
    assert list(get_type_hints(EngineKeywords)) == list(FROZEN)


def test_every_problem_is_told_at_once_before_anything_is_loaded() -> None:
    with pytest.raises(ArgumentError) as refused:
        LLM(model="no such directory", block_size=3, max_num_seq=4, dtype="int8", seed="x", nonsense=1)
    problems = refused.value.problems
    assert len(problems) == 5
    text = "\n".join(problems)
    for words in ("block_size=3", "did you mean 'max_num_seqs'", "'int8'", "seed='x'", "unknown option 'nonsense'"):
        assert words in text


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"dtype": "float16"}, "'float16'"),
        ({"numerics": "fast"}, "'portable', 'served'"),
        ({"numerics": "served", "dtype": "float32"}, "bfloat16 by definition"),
        ({"kv_cache_dtype": "fp8"}, "'released', 'float32'"),
        ({"batch_invariant": 1}, "batch_invariant=1"),
        ({"batch_invariant": "yes"}, "batch_invariant='yes'"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_model_len": 2**31}, "2^31"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"max_num_batched_tokens": 1.5}, "1.5"),
        ({"max_prefill_history_tokens": 0}, "max_prefill_history_tokens=0"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 7}, "odd"),
        ({"num_blocks": 1}, "num_blocks=1"),
        ({"num_state_slots": 1}, "num_state_slots=1"),
        ({"memory_utilization": 0}, "memory_utilization=0"),
        ({"memory_utilization": 1.01}, "(0, 1]"),
        ({"memory_utilization": float("nan")}, "not a number"),
        ({"memory_utilization": "0.9"}, "not a number"),
        ({"engine_type": "decode"}, "'completion'"),
        ({"engine_type": "completion"}, "stop_preempted_requests=True"),
        ({"enable_chunked_prefill": 1}, "enable_chunked_prefill=1"),
        ({"stop_preempted_requests": None}, "stop_preempted_requests=None"),
        ({"prefill_attempt_interval": 0}, "prefill_attempt_interval=0"),
        ({"prefill_any_attempt_interval": -1}, "prefill_any_attempt_interval=-1"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1"),
        ({"num_speculative_tokens": 33}, "0 .. 32"),
        ({"verification": "greedy"}, "'standard', 'coupled'"),
        ({"seed": -1}, "seed=-1"),
        ({"expert_parallel_size": 2, "redundant_experts": -1}, "redundant_experts=-1"),
        ({"redundant_experts": 2}, "set expert_parallel_size"),
        ({"expert_balancing": "greedy"}, "set expert_parallel_size"),
        ({"expert_parallel_size": 2, "expert_balancing": "keep"}, "'off', 'greedy', 'balanced'"),
        ({"expert_parallel_size": 2, "expert_balancing_interval": 0}, "expert_balancing_interval=0"),
        ({"expert_parallel_size": 2, "expert_balancing_window": 1025}, "more than 1024 steps"),
        ({"expert_parallel_size": 2, "expert_balancing": "off", "expert_balancing_window": 5}, "nothing is balanced"),
        ({"expert_balancing_interval": 5}, "nothing is balanced"),
        ({"allow_fallback": "norm.rms"}, "not a list of op names"),
    ],
)
def test_a_bad_value_is_refused_by_name_however_options_are_made(bad: dict[str, Any], words: str) -> None:
    for make in (EngineOptions.from_keywords, lambda given: EngineOptions(**given)):
        with pytest.raises(ArgumentError) as refused:
            make(bad)
        assert len(refused.value.problems) == 1
        assert words in refused.value.problems[0]


@pytest.mark.parametrize(
    "good",
    [
        {"max_model_len": 1},
        {"max_num_seqs": 1},
        {"block_size": 2},
        {"num_blocks": 2},
        {"num_state_slots": 2},
        {"memory_utilization": 1},
        {"seed": 2**31 - 1},
        {"engine_type": "completion", "stop_preempted_requests": True},
        {"allow_fallback": ["norm.rms"]},
        {"batch_invariant": False},
    ],
)
def test_the_least_and_the_largest_values_are_accepted(good: dict[str, Any]) -> None:
    options = EngineOptions.from_keywords(good)
    assert all(
        getattr(options, name) == (tuple(value) if isinstance(value, list) else value) for name, value in good.items()
    )


def test_the_dtype_that_is_not_given_follows_the_numerics() -> None:
    assert EngineOptions().activation_dtype == torch.float32
    assert EngineOptions(numerics="served").activation_dtype == torch.bfloat16
    assert EngineOptions(dtype="float64").activation_dtype == torch.float64


@pytest.mark.parametrize(("max_num_seqs", "slots"), [(1, 2), (4, 5), (5, 7), (64, 77)])
def test_state_slots_follow_the_number_of_requests(max_num_seqs, slots) -> None:
    assert EngineOptions(max_num_seqs=max_num_seqs).state_slots == slots


# --- effects ---------------------------------------------------------------------------------------------------------


def test_max_num_seqs_bounds_the_rows_of_a_decode_step(drive, prompt_of) -> None:
    engine = drive(max_num_seqs=2, num_state_slots=9)
    for number in range(5):
        engine.add(str(number), prompt_of(2, number), max_tokens=3)
    engine.drain()
    assert max(len(step.rows) for step in engine.steps if step.kind == "decode") == 2


def test_without_chunked_prefill_a_prompt_above_the_budget_is_refused(drive, prompt_of) -> None:
    engine = drive(enable_chunked_prefill=False, max_num_batched_tokens=8)
    engine.add("fits", prompt_of(8), max_tokens=1)
    engine.add("does not", prompt_of(9), max_tokens=1)
    engine.drain()
    assert engine.answer("fits").finish_reason == "length"
    assert engine.answer("does not").finish_reason == "ignored"
    assert "enable_chunked_prefill" in engine.answer("does not").message


def test_the_history_budget_bounds_the_prompts_of_a_step(drive, prompt_of) -> None:
    engine = drive(max_prefill_history_tokens=10)
    for number in range(3):
        engine.add(str(number), prompt_of(5, number), max_tokens=1)
    engine.add("long", prompt_of(11), max_tokens=1)
    engine.drain()
    assert [len(step.rows) for step in engine.steps if step.kind == "prefill"] == [2, 1]
    assert "max_prefill_history_tokens is 10" in engine.answer("long").message


@pytest.mark.parametrize(("name", "value", "other"), [("all", 3, 100), ("any", 100, 3)])
def test_the_prefill_intervals_decide_when_a_late_prompt_enters(drive, prompt_of, name, value, other) -> None:
    engine = drive(prefill_attempt_interval=value, prefill_any_attempt_interval=other)
    engine.add("first", prompt_of(3), max_tokens=20)
    engine.step(2)
    engine.add("late", prompt_of(3), max_tokens=1)
    engine.drain()
    assert [step.kind for step in engine.steps][:5] == ["prefill", "decode", "decode", "decode", "prefill"], name


def test_a_prompt_engine_makes_one_token_and_refuses_more(drive, prompt_of) -> None:
    engine = drive(engine_type="prompt")
    engine.add("one", prompt_of(9), max_tokens=1)
    engine.add("two", prompt_of(9), max_tokens=2)
    engine.drain(limit=20)
    assert engine.answer("one").finish_reason == "length"
    assert engine.answer("two").finish_reason == "ignored"
    assert "max_tokens=1" in engine.answer("two").message


def test_a_completion_engine_refuses_prompts_until_requests_can_be_handed_over(drive, prompt_of) -> None:
    engine = drive(engine_type="completion", stop_preempted_requests=True)
    engine.add("a", prompt_of(9), max_tokens=1)
    engine.drain(limit=20)
    assert engine.answer("a").finish_reason == "ignored"
    assert "decode steps only" in engine.answer("a").message


def test_whoever_pays_for_redundant_experts_gets_them_balanced_and_nobody_else() -> None:
    def under(settings: Settings, **options: Any) -> tuple[Any, ...]:
        found = EngineOptions(**options).under(settings)
        assert found.under(settings) == found
        return (
            found.redundant_experts,
            found.expert_balancing,
            found.expert_balancing_interval,
            found.expert_balancing_window,
        )

    nothing, some = Settings(), Settings(redundant_experts=4, expert_balancing="greedy")
    assert under(nothing) == under(some) == (0, "off", None, None)
    assert under(nothing, expert_parallel_size=2) == (0, "off", None, None)
    assert under(nothing, expert_parallel_size=2, redundant_experts=3) == (3, "balanced", 10_000, 1_000)
    assert under(nothing, expert_parallel_size=2, redundant_experts=3, engine_type="prompt")[2:] == (1_000, 100)
    assert under(some, expert_parallel_size=2, expert_balancing_interval=30) == (4, "greedy", 30, 3)
    assert under(some, expert_parallel_size=2, redundant_experts=0, expert_balancing="off")[:2] == (0, "off")
    assert under(Settings(expert_balancing="off"), expert_parallel_size=2, redundant_experts=3)[1] == "off"


def test_the_environment_varies_lengths_only_where_there_are_drafts() -> None:
    settings = Settings(enable_mtp_varlen=True, cost_curves="/kept")
    assert EngineOptions(num_speculative_tokens=2).under(settings).variable_verification is True
    assert EngineOptions().under(settings).variable_verification is False
    asked = EngineOptions(num_speculative_tokens=2, variable_verification=False, cost_curves="/mine").under(settings)
    assert (asked.variable_verification, asked.cost_curves) == (False, "/mine")
    with pytest.raises(ArgumentError, match="set num_speculative_tokens as well"):
        EngineOptions(variable_verification=True)


def test_steps_counted_for_a_plan_that_nobody_makes_are_refused() -> None:
    asked = EngineOptions(expert_parallel_size=2, expert_balancing_interval=4)
    with pytest.raises(ArgumentError, match="expert_balancing_interval=4: nothing is balanced"):
        asked.under(Settings())
    assert asked.under(Settings(redundant_experts=2)).expert_balancing == "balanced"
