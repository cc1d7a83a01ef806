"""What `bench core` measures is the engine's core; how long it takes is nobody's test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.bench.core import bench_core
from deepinfer.cli.app import main


def test_a_report_holds_every_batch_size_and_its_parts() -> None:
    ticks: list[None] = []
    report = bench_core((8, 130), steps=20, tick=lambda: ticks.append(None))
    assert [result.running for result in report.results] == [8, 130]
    assert len(ticks) == 40
    for result in report.results:
        assert set(result.parts) == {"schedule", "commit", "records"}
        assert 0 < max(result.parts.values()) <= result.median_us
        assert result.reference_loop_us > 0


def test_the_command_saves_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "core.json"
    assert main(["bench", "core", "--running", "8,16", "--steps", "5", "--save-result", str(file)]) == 0
    saved = json.loads(file.read_text())
    assert [result["running"] for result in saved["results"]] == [8, 16]
    assert set(saved["results"][0]) == {"running", "median_us", "parts", "reference_loop_us"}
    told = capsys.readouterr().out
    assert "median of 5 steps, one thread" in told
    assert "numpy loop" in told


def test_bad_arguments_are_refused_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "core", "--running", "8,x", "--steps", "0"]) == 2
    told = capsys.readouterr().err
    assert "--running '8,x'" in told
    assert "--steps 0" in told
