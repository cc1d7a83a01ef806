"""`deepinfer checkpoint`: make one, look into it, and be told what is wrong with a bad one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., object]


def test_what_make_writes_inspect_can_describe(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    made = run("checkpoint", "make", "--config", "small", "--seed", 1, "--format", "released", "--shards", 2, out)
    assert (made.status, made.out.strip()) == (0, str(out))
    assert "making" in made.err
    seen = run("checkpoint", "inspect", out)
    assert seen.status == 0
    assert "can be loaded" in seen.out
    assert "model-00002-of-00002.safetensors" in seen.out
    report = json.loads(run("checkpoint", "inspect", out, "--json").out)
    assert report["form"] == "released"
    assert report["problems"] == []


def test_a_truncated_checkpoint_is_described_with_its_problems_and_status_1(run: Run, tmp_path: Path) -> None:
    run("checkpoint", "make", "--config", "small", "--seed", 1, "--format", "released", tmp_path / "tiny")
    file = tmp_path / "tiny" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    ran = run("checkpoint", "inspect", tmp_path / "tiny")
    assert ran.status == 1
    assert "problem: " in ran.out
    assert "can be loaded" not in ran.out
    assert ran.err.startswith("error: ")


def test_a_directory_that_is_not_there_is_said(run: Run, tmp_path: Path) -> None:
    ran = run("checkpoint", "inspect", tmp_path / "nowhere")
    assert ran.status == 1
    assert "is not a directory" in ran.out


def test_make_refuses_an_unknown_preset_with_the_known_ones(run: Run, tmp_path: Path) -> None:
    ran = run("checkpoint", "make", "--config", "tiny9", "--seed", 1, tmp_path / "out")
    assert ran.status == 2
    assert "tiny8" in ran.err
    assert not (tmp_path / "out").exists()


def test_make_overwrites_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    ran = run("checkpoint", "make", "--config", "small", "--seed", 1, "--shards", 0, tmp_path)
    assert ran.status == 2
    assert "is not empty" in ran.err
    assert "shards 0" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
