"""Commands of one process refuse to be started as several, each of which would do all of the work and write it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
PLACE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "--limit", "0"),
        ("bench", "core", "--steps", "1"),
        ("bench", "sampler", "--rows", "1"),
        ("bench", "ranks", "--votes", "1"),
        ("bench", "balance"),
        ("bench", "throughput"),
        ("bench", "latency"),
        ("generate", "Hello", "--capture", "cases"),
        ("checkpoint", "make", "new", "--config", "tiny8", "--seed", "1"),
        ("conformance", "run", "--driver", "cpu_ref"),
        ("conformance", "replay", ".", "--driver", "cpu_ref"),
        ("conformance", "new-driver", "mine", "folder"),
        ("simulate", "cluster"),
    ],
)
def test_a_launcher_is_refused_by_the_name_of_its_variable(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    ran = run(*command)
    assert ran.status == 2
    assert "WORLD_SIZE=2: a launcher has started 2 processes, and this runs in one" in ran.err
    assert ran.out == ""
    assert not list(tmp_path.iterdir())


def test_a_launcher_of_one_process_is_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**PLACE, "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    ran = run("bench", "core", "--running", "1", "--steps", "1")
    assert ran.status == 0, ran.err
