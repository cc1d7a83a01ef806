"""`deepinfer simulate cluster` says that it simulates, saves what it shows, and refuses nonsense at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]


def test_a_trace_is_simulated_and_the_same_figures_are_saved(run: Run, tmp_path: Path) -> None:
    trace, result = tmp_path / "trace.jsonl", tmp_path / "result.json"
    trace.write_text('{"at_ms": 0, "prompt_tokens": 30, "output_tokens": 6}\n' * 3)
    costs = ["--decode-ms", 10, "--decode-row-ms", 1, "--prefill-ms", 100, "--prefill-token-ms", 1]
    ran = run("simulate", "cluster", "--ranks", 3, "--trace", trace, *costs, "--save-result", result)
    assert ran.status == 0, ran.err
    assert ran.out.startswith("3 ranks, 3 requests; a simulation with a cost model, not a measurement")
    saved = json.loads(result.read_text())
    assert saved["results"]["seconds"] == (100 + 30 + 5 * 11) / 1e3
    assert saved["results"]["placeholder_share"] == 0
    assert saved["results"]["moe_lb"] is None
    assert saved["settings"]["costs"]["decode_ms"] == 10
    lines = {line.split()[0]: line.split()[1] for line in ran.out.splitlines()[1:]}
    assert lines["seconds"] == "0.185"
    assert lines["moe_lb"] == "-"


def test_drawn_requests_and_a_balancer_are_simulated(run: Run, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    options = ["--requests", 12, "--prompt-tokens", 20, "--output-tokens", 8, "--drafts", 2, "--replan-interval", 8]
    ran = run("simulate", "cluster", "--ranks", 2, "--policy", "balanced", *options, "--save-result", result)
    assert ran.status == 0, ran.err
    results = json.loads(result.read_text())["results"]
    assert results["finished"] == 12
    assert results["plans"] >= 1
    assert results["moe_lb"] > 1


def test_everything_wrong_is_refused_at_once(run: Run) -> None:
    words = ["--ranks", 0, "--requests", 0, "--rate", -1, "--skew", -1, "--num-blocks", 0, "--decode-ms", -1]
    ran = run("simulate", "cluster", *words, "--save-result", "/no/such/place.json")
    assert ran.status == 2
    assert ran.out == ""
    for problem in ("--requests 0", "--rate -1", "--skew -1", "num_blocks", "/no/such", "ranks is 0", "decode_ms"):
        assert problem in ran.err
