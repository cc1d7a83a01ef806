"""`deepinfer conformance`: what it prints, what it writes, and its exit status."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from deepinfer.cli import conformance, main

CTX = SimpleNamespace(
    obj=SimpleNamespace(start=lambda: None, start_alone=lambda command: None), command_path="conformance"
)


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
    capsys.readouterr()
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


def test_replay_shows_one_case_again_and_ends_with_1_where_the_claim_did_not_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That it ends with 0 elsewhere is shown with a captured case in `tests/cli/test_generate_capture.py`."""
    with pytest.raises(typer.Exit) as ended:
        conformance.replay(CTX, "L1/norm.rms/numerics/one_row/float32", driver="null")  # type: ignore[arg-type]
    assert ended.value.exit_code == 1
    assert "outcome     fail" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("run --driver nobody", "no driver 'nobody' is installed; installed drivers: "),
        ("replay L1/norm.rms/numerics/one_row/float32 --driver cpu-ref", "Did you mean 'cpu_ref'?"),
        ("run --driver cpu_ref --ops atention.*", "matches no op of the contract; did you mean attention.sparse?"),
        ("run --driver cpu_ref --ops norm.rms,,", "empty name"),
        ("run --driver cpu_ref --ops norm.rms --level L0", "no case of ops norm.rms up to level L0"),
        ("run --driver cpu_ref --level l2", "'l2' is no level; choose one of L0, L1"),
        ("run --driver cpu_ref --profile huge", "is not one of 'quick', 'full'"),
        ("run --driver cpu_ref --ops norm.rms --jobs -1", "one child process is the least"),
        ("run --driver cpu_ref --ops norm.rms --patience 0", "give a factor above 0"),
        ("replay L1/norm.rms/numerics/one_row/float32 --driver cpu_ref --patience nan", "give a factor above 0"),
        (
            "replay L1/norm.rms/numerics/one_roww/float32 --driver cpu_ref",
            "close: L1/norm.rms/numerics/one_row/float32",
        ),
        ("replay nowhere.case --driver cpu_ref", "`deepinfer generate --capture DIR` writes them"),
        ("verify nowhere", "there is no report; `deepinfer conformance run --report DIR` writes"),
        ("compare nowhere nowhere", "there is no report"),
    ],
)
def test_bad_input_is_one_clear_error_and_status_2(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"schema": 2}', "schema is 2, this suite reads 1: run the suite again"),
        ("{}", "schema is None, this suite reads 1"),
        ("[]", "a report is a JSON object"),
        ('{"schema": 1, "cases"', "not JSON"),
        ("\udcff", "not JSON"),
    ],
)
def test_a_report_that_cannot_be_read_is_one_clear_error_and_status_2(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_bytes(text.encode(errors="surrogateescape"))
    assert main(["conformance", "verify", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("error:") == 1


def test_new_driver_says_what_comes_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conformance.new_driver(CTX, "fresh", tmp_path / "fresh")  # type: ignore[arg-type]
    assert "conformance run --driver fresh" in capsys.readouterr().out
