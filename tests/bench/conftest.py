"""A clock that tells what a test wants, and the command line in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from deepinfer.cli import main


class StepClock:
    """A clock that is a fixed step further at every reading."""

    def __init__(self, step: float = 1.0) -> None:
        self.now = 0.0
        self._step = step

    def __call__(self) -> float:
        self.now += self._step
        return self.now


@dataclass(frozen=True)
class Ran:
    """What one command left behind."""

    status: int
    out: str
    err: str


@pytest.fixture
def step_clock() -> StepClock:
    return StepClock()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Return a function that runs `deepinfer bench ARGUMENTS...` in an environment without our variables."""
    for name in list(os.environ):
        if name.upper().startswith("DEEPINFER_"):
            monkeypatch.delenv(name)

    def run_command(*arguments: object) -> Ran:
        capsys.readouterr()
        status = main(["bench", *map(str, arguments)])
        out, err = capsys.readouterr()
        return Ran(status, out, err)

    return run_command
