"""`deepinfer generate --capture`: the run is the same, its calls lie in a folder, and they replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., object]

ASKED = (
    "generate",
    "hello",
    "--accelerator",
    "cpu_ref",
    "--temperature",
    "0",
    "--max-tokens",
    "2",
    "--num-blocks",
    "9",
)


def test_captured_calls_of_a_run_replay_and_the_run_says_what_it_would_have_said(run: Run, tmp_path: Path) -> None:
    plain = run(*ASKED)
    ran = run(*ASKED, "--capture", tmp_path / "cases", "--capture-cases", 1)
    assert (ran.status, ran.out) == (0, plain.out)
    files = sorted((tmp_path / "cases").iterdir())
    assert {"attention.sparse-1.case", "norm.rms-1.case"} <= {path.name for path in files}
    assert f"captured {len(files)} cases of {len(files)} ops" in ran.err
    assert f"deepinfer conformance replay {files[0]} --driver cpu_ref" in ran.err
    again = run("conformance", "replay", tmp_path / "cases" / "attention.sparse-1.case", "--driver", "cpu_ref")
    assert (again.status, "outcome     pass" in again.out) == (0, True)


def test_what_was_captured_is_told_when_the_run_fails(run: Run, tmp_path: Path) -> None:
    ran = run(*ASKED, "--model", tmp_path, "--capture", tmp_path / "cases")
    assert ran.status != 0
    assert "captured 0 cases of 0 ops" in ran.err


def test_a_limit_that_is_reached_is_said(run: Run, tmp_path: Path) -> None:
    ran = run(*ASKED, "--num-blocks", 65, "--capture", tmp_path / "cases", "--capture-mib", 1)
    assert ran.status == 0
    assert "limit of capture reached" in ran.err
    assert "with which the files would exceed 1,048,576 bytes" in ran.err
    assert sum(path.stat().st_size for path in (tmp_path / "cases").iterdir()) < 2 * 2**20


def test_a_folder_that_holds_something_is_refused_before_anything_is_loaded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "keep.txt").write_text("mine")
    ran = run(*ASKED, "--capture", tmp_path, "--capture-mib", 0, "--top-p", 7)
    assert (ran.status, ran.out) == (2, "")
    for words in ("is not empty, it holds keep.txt", "--capture-mib 0: write a number of 1 or more", "top_p"):
        assert words in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["keep.txt"]


@pytest.mark.parametrize("option", ["--capture-cases", "--capture-mib"])
def test_an_option_of_capturing_alone_is_refused(run: Run, option: str) -> None:
    ran = run(*ASKED, option, 3)
    assert ran.status == 2
    assert f"{option} needs --capture DIR" in ran.err
