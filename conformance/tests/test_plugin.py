"""The pytest plugin: cases as tests, nothing without a driver, torch only when it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import deepinfer_conformance

RunInside = Callable[..., tuple[int, str]]
PACKAGE = Path(deepinfer_conformance.__file__).parent


def _pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_plugin(), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _plugin() -> list[str]:
    """Name the plugin where the environment does not register it yet."""
    from importlib.metadata import entry_points

    registered = any(point.value == "deepinfer_conformance.plugin" for point in entry_points(group="pytest11"))
    return [] if registered else ["-p", "deepinfer_conformance.plugin"]


@pytest.fixture
def run_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunInside:
    """Run pytest in this process, which has torch already; the driver has a process of its own in any case."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        options = ("-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "--pyargs", "deepinfer_conformance")
        status = pytest.main([*options, *_plugin(), *arguments])
        return int(status), capsys.readouterr().out

    return run


def test_cases_are_tests_that_can_be_chosen(run_inside: RunInside) -> None:
    status, told = run_inside("--accelerator", "cpu_ref", "-k", "rms and numerics and one_row")
    assert (status, "2 passed" in told) == (0, True), told


def test_a_claim_that_does_not_hold_fails_its_test(run_inside: RunInside) -> None:
    status, told = run_inside("--accelerator", "null", "-k", "rms and numerics and one_row")
    assert (status, "2 failed" in told) == (1, True), told


def test_nothing_is_collected_without_a_driver(tmp_path: Path) -> None:
    done = _pytest(tmp_path, "--pyargs", "deepinfer_conformance")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_importing_the_plugin_does_not_import_torch() -> None:
    code = "import sys; import deepinfer_conformance.plugin; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
