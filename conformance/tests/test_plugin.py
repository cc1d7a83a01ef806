"""The pytest plugin: cases as tests, nothing without a driver, torch only when it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHOICE = ("--pyargs", "deepinfer_conformance", "-k", "rms and numerics and one_row")


def _pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_plugin(), *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _plugin() -> list[str]:
    """Name the plugin where the environment does not register it yet."""
    from importlib.metadata import entry_points

    registered = any(point.value == "deepinfer_conformance.plugin" for point in entry_points(group="pytest11"))
    return [] if registered else ["-p", "deepinfer_conformance.plugin"]


def test_cases_are_tests_that_can_be_chosen(tmp_path: Path) -> None:
    done = _pytest(tmp_path, *CHOICE, "--accelerator", "cpu_ref")
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout + done.stderr


def test_a_claim_that_does_not_hold_fails_its_test(tmp_path: Path) -> None:
    done = _pytest(tmp_path, *CHOICE, "--accelerator", "null")
    assert (done.returncode, "2 failed" in done.stdout) == (1, True), done.stdout + done.stderr


def test_nothing_is_collected_without_a_driver(tmp_path: Path) -> None:
    done = _pytest(tmp_path, "--pyargs", "deepinfer_conformance")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_importing_the_plugin_does_not_import_torch() -> None:
    code = "import sys; import deepinfer_conformance.plugin; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
