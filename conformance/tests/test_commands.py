"""`deepinfer conformance`: what it prints, what it writes, and its exit status."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from deepinfer.cli import conformance
from deepinfer.errors import ArgumentError

CTX = SimpleNamespace(obj=SimpleNamespace(start=lambda: None))


def test_run_writes_the_package_and_ends_with_0_only_if_every_claim_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conformance.run(CTX, driver="cpu_ref", ops="norm.rotary", level="L1", report=tmp_path, jobs=1)  # type: ignore[arg-type]
    told = capsys.readouterr().out
    assert "level reached: none" in told  # a narrowed run proves no level
    assert {"report.json", "report.html", "junit.xml", "support.md"} == {path.name for path in tmp_path.iterdir()}
    with pytest.raises(typer.Exit) as ended:
        conformance.run(CTX, driver="null", ops="norm.rotary", level="L1", jobs=1)  # type: ignore[arg-type]
    assert ended.value.exit_code == 1
    with pytest.raises(typer.Exit):
        conformance.verify(CTX, tmp_path)  # type: ignore[arg-type]
    assert "narrowed" in capsys.readouterr().err
    conformance.compare(CTX, tmp_path, tmp_path)  # type: ignore[arg-type]
    assert "0 outcomes differ" in capsys.readouterr().out


def test_list_shows_ids_or_writes_a_page_per_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conformance.list_cases(CTX, ops="norm.rms")  # type: ignore[arg-type]
    assert "L1/norm.rms/numerics/17_rows/float32\n" in capsys.readouterr().out
    conformance.list_cases(CTX, ops="moves.zero", pages=tmp_path)  # type: ignore[arg-type]
    assert "SHA-256" in (tmp_path / "moves.zero.md").read_text()


def test_replay_shows_one_case_again(capsys: pytest.CaptureFixture[str]) -> None:
    conformance.replay(CTX, "L1/norm.rms/numerics/one_row/float32", driver="cpu_ref")  # type: ignore[arg-type]
    assert "outcome     pass" in capsys.readouterr().out
    with pytest.raises(typer.Exit):
        conformance.replay(CTX, "L1/norm.rms/numerics/one_row/float32", driver="null")  # type: ignore[arg-type]


def test_bad_input_is_one_clear_error() -> None:
    with pytest.raises(ArgumentError, match="matches no op"):
        conformance.run(CTX, driver="cpu_ref", ops="atention.*")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="no level"):
        conformance.run(CTX, driver="cpu_ref", level="L8")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="empty name"):
        conformance.run(CTX, driver="cpu_ref", ops="norm.rms,,")  # type: ignore[arg-type]


def test_new_driver_says_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conformance.new_driver(CTX, "fresh", tmp_path / "fresh")  # type: ignore[arg-type]
    assert "conformance run --driver fresh" in capsys.readouterr().out
