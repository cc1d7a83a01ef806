"""The command line in this process, without the caller's environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from deepinfer.cli import main


@dataclass(frozen=True)
class Ran:
    """What one command left behind."""

    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Return a function that runs `deepinfer ARGUMENTS...` in an environment without our variables."""
    for name in list(os.environ):
        if name.upper().startswith("DEEPINFER_"):
            monkeypatch.delenv(name)

    def run_command(*arguments: object) -> Ran:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Ran(status, out, err)

    return run_command
