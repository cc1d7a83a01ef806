"""`deepinfer bench` prints a table, saves the same as JSON, and refuses nonsense before it works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TINY: dict[str, list[object]] = {
    "core": ["--running", "8,16", "--steps", 5],
    "sampler": ["--rows", 2, "--vocabulary", 300, "--threads", 1, "--repeats", 1],
    "balance": [
        *["--loads", "zipf-1.0,lognormal", "--drifts", "0,0.2", "--continuations", 2],
        *["--layers", 2, "--experts", 12, "--ranks", 4, "--slots", 4],
    ],
    "ranks": ["--ranks", "2", "--votes", 3, "--rows", 2],
    "throughput": ["--batch-sizes", "1,2", "--prompt-tokens", 4, "--output-tokens", 2, "--repeats", 1],
    "latency": ["--batch-sizes", "1,2", "--prompt-tokens", 4, "--output-tokens", 2, "--repeats", 1],
}
RESULT_KEYS = {
    "core": {"running", "median_us", "parts", "reference_loop_us"},
    "sampler": {
        "setting",
        "temperature",
        "top_k",
        "top_p",
        "provider",
        "median_ms",
        "best_ms",
        "cpu_ms",
        "tokens_digest",
    },
    "balance": {
        "load",
        "drift",
        "policy",
        "planning_ratio",
        "next_ratio",
        "moved_slots",
        "bytes",
        "seconds",
        "over_greedy",
        "over_greedy_error",
    },
    "ranks": {
        "ranks",
        "vote_us_p50",
        "vote_us_p99",
        "expert_bytes",
        "least_expert_bytes",
        "expert_ratio",
        "table_bytes",
        "least_table_bytes",
        "table_ratio",
    },
    "throughput": {
        "batch_size",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
        "output_tokens_per_s",
        "requests_per_s",
        "decode_step_ms",
        "run_s",
    },
    "latency": {
        "batch_size",
        "first_token_ms_p50",
        "first_token_ms_p99",
        "token_ms_p50",
        "token_ms_p90",
        "token_ms_p99",
        "request_ms_p50",
        "request_ms_p99",
        "step_host_ms",
        "step_device_ms",
        "step_bubble_ms",
    },
}


@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_prints_a_table_and_saves_its_results(name: str, run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    ran = run(name, *TINY[name], "--save-result", file)
    assert ran.status == 0, ran.err
    saved = json.loads(file.read_text())
    assert set(saved) == {"benchmark", "settings", "environment", "results"}
    assert saved["benchmark"] == name
    assert all(set(result) == RESULT_KEYS[name] for result in saved["results"])
    lines = ran.out.splitlines()
    ruled = next(number for number, line in enumerate(lines) if line.startswith("---"))
    assert len(lines) == ruled + 1 + len(saved["results"]) + 1
    assert saved["environment"]["cpu_model"] in lines[-1]


def test_the_sampler_says_how_many_threads_it_used(run: Callable[..., Any]) -> None:
    assert ", 1 thread," in run("sampler", *TINY["sampler"]).out


@pytest.mark.parametrize("is_on", [True, False])
def test_latency_shows_what_host_and_device_do_in_a_step_planned_ahead_or_not(
    run: Callable[..., Any],
    tmp_path: Path,
    is_on: bool,  # noqa: FBT001
) -> None:
    file = tmp_path / "result.json"
    arguments = ["--batch-sizes", 2, "--prompt-tokens", 3, "--output-tokens", 4, "--repeats", 1]
    ran = run("latency", *arguments, "--async-scheduling" if is_on else "--no-async-scheduling", "--save-result", file)
    assert ran.status == 0, ran.err
    assert f"asynchronous scheduling {'on' if is_on else 'off'}" in ran.out
    saved = json.loads(file.read_text())
    assert saved["settings"]["model"]["async_scheduling"] is is_on
    (result,) = saved["results"]
    assert 0 < result["step_host_ms"] < result["step_device_ms"] + result["step_bubble_ms"]
    assert result["step_device_ms"] > 0


def test_a_named_model_and_both_types_are_named_in_the_output(run: Callable[..., Any]) -> None:
    arguments = ["--batch-sizes", 1, "--prompt-tokens", 2, "--output-tokens", 2, "--repeats", 1]
    out = run("throughput", "--model", "tiny8", "--format", "bfloat16", *arguments).out
    assert out.startswith("tiny8: weights bfloat16, activations float32, caches released, on cpu_ref; loaded in ")


def test_given_prompts_replace_random_ones(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("[3, 4, 5]\n")
    ran = run("latency", "--prompts", file, "--batch-sizes", 1, "--output-tokens", 2, "--repeats", 1)
    assert "prompts of at most 3 tokens" in ran.out


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (["core", "--running", "8,x,0", "--steps", 0], ["'x'", "'0'", "steps holds 0"]),
        (["sampler", "--rows", 0, "--threads", 0], ["rows holds 0", "threads holds 0"]),
        (
            ["throughput", "--model", "no-such", "--batch-sizes", "", "--block-size", 3, "--threads", 0],
            ["no-such", "--batch-sizes", "block_size=3", "--threads 0"],
        ),
        (
            ["balance", "--loads", "zipf-x,flat", "--drifts", "2,a", "--ranks", 2, "--continuations", 0],
            ["zipf-x", "flat", "drift 2.0", "'a'", "cannot hold 384", "continuations holds 0"],
        ),
        (
            ["ranks", "--ranks", "1,x", "--votes", 0, "--rows", 0],
            ["'x'", "ranks holds 1", "votes holds 0", "rows holds 0"],
        ),
        (["latency", "--save-result", "/no/such/place.json", "--repeats", 0], ["/no/such", "repeats holds 0"]),
    ],
)
def test_everything_wrong_is_refused_at_once(
    run: Callable[..., Any], arguments: list[object], problems: list[str]
) -> None:
    ran = run(*arguments)
    assert ran.status == 2
    assert ran.out == ""
    for problem in problems:
        assert problem in ran.err
    assert ran.err.count("\n  - ") == len(problems)
