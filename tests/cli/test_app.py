"""The command line as a whole: help without torch, mistakes all at once, statuses, interrupts, tracebacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

import deepinfer
from deepinfer.accelerator import survey
from deepinfer.cli import main
from deepinfer.errors import DriverUnavailableError

Run = Callable[..., object]


def test_help_and_mistakes_never_import_torch() -> None:
    code = (
        "import sys; from deepinfer.cli import main; "
        "main(['--help']); main(['generate', '--help']); main(['generate', '--no-such']); main(['env']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "deepinfer", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, deepinfer.__version__)


@pytest.mark.parametrize("arguments", [(), ("--help",), ("checkpoint",), ("generate", "-h")])
def test_help_goes_to_standard_output_with_status_0(run: Run, arguments: tuple[str, ...]) -> None:
    ran = run(*arguments)
    assert ran.status == 0
    assert ran.out.startswith("Usage: deepinfer")
    assert ran.err == ""


def test_an_unknown_command_is_refused_with_the_nearest(run: Run) -> None:
    ran = run("devcies")
    assert ran.status == 2
    assert "Did you mean 'devices'?" in ran.err


def test_every_bad_argument_is_reported_at_once(run: Run) -> None:
    ran = run(
        "generate", "--temprature", "0.5", "--top-k", "many", "--zzz", "--json=1", "--model", "/no/such", "--seed"
    )
    assert ran.status == 2
    assert ran.out == ""
    assert "deepinfer generate: 6 problems" in ran.err
    assert "unknown option '--temprature'; did you mean --temperature?" in ran.err
    assert "unknown option '--zzz'" in ran.err
    assert "option --json takes no value" in ran.err
    assert "option --seed needs a value" in ran.err
    assert "'--top-k'" in ran.err
    assert "'--model'" in ran.err


def test_superfluous_and_missing_arguments_are_reported_together(run: Run) -> None:
    assert "unexpected argument 'more'" in run("devices", "more").err
    ran = run("checkpoint", "make")
    assert ran.status == 2
    for words in ("'OUT'", "'--config'", "'--seed'"):
        assert words in ran.err


def test_a_value_may_begin_with_a_dash(run: Run) -> None:
    ran = run("checkpoint", "make", "--seed", "-x", "--config", "-c", "--", "--out")
    assert "deepinfer checkpoint make: 1 problem\n" in ran.err
    assert "'--seed'" in ran.err


def test_a_bad_environment_stops_a_command_with_status_2(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ACCELARATOR", "nvidia")
    monkeypatch.setenv("DEEPINFER_LOG_LEVEL", "loud")
    ran = run("devices")
    assert ran.status == 2
    assert ran.out == ""
    assert "environment variables: 2 problems" in ran.err


def fail_with(error: BaseException) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


def test_a_failure_is_one_message_without_a_traceback_and_status_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "survey", fail_with(DriverUnavailableError("no chip here")))
    ran = run("devices")
    assert (ran.status, ran.out, ran.err) == (1, "", "error: no chip here\n")


@pytest.mark.parametrize("way", ["flag", "variable"])
def test_debug_shows_the_traceback(run: Run, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(survey, "survey", fail_with(DriverUnavailableError("no chip here")))
    if way == "variable":
        monkeypatch.setenv("DEEPINFER_LOG_LEVEL", "debug")
    ran = run(*(["--debug"] if way == "flag" else []), "devices")
    assert ran.status == 1
    assert "Traceback (most recent call last)" in ran.err
    assert ran.err.endswith("error: no chip here\n")


def test_an_operating_system_error_is_said_in_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "survey", fail_with(PermissionError(13, "Permission denied", "/dev/npu")))
    ran = run("devices")
    assert ran.status == 1
    assert ran.err == "error: [Errno 13] Permission denied: '/dev/npu'\n"


def test_our_own_fault_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "survey", fail_with(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        run("devices")


def test_an_interrupt_ends_with_status_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "survey", fail_with(KeyboardInterrupt()))
    ran = run("devices")
    assert (ran.status, ran.err) == (130, "interrupted\n")


def test_a_reader_that_stops_reading_causes_no_complaint() -> None:
    command = f"{sys.executable} -m deepinfer env --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "[\n"
    assert done.stderr == ""


def test_a_driver_that_nobody_installed_is_wrong_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--accelerator", "nonsense"]) == 2
    assert "no driver 'nonsense' is installed" in capsys.readouterr().err
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "nonsense")
    assert main(["plan"]) == 2
    assert "asked for by DEEPINFER_ACCELERATOR" in capsys.readouterr().err
