"""A crash, a hang, a bad start: each is a result or one clear error, and the run goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer.errors import DriverLoadError
from deepinfer_conformance.catalogue import catalogue, chosen
from deepinfer_conformance.outcomes import Outcome
from deepinfer_conformance.runner.pool import run_in_children
from deepinfer_conformance.runner.process import Order

SOURCE = """
import os, time
from deepinfer_conformance.mutants.hosts import Borrowed
from deepinfer_conformance.mutants.rewiring import RewiredDriver

def crashing(original):
    def call(*args, **keywords):
        print("the vendor's last words", flush=True)
        os.abort()
    return call

def hanging(original):
    def call(*args, **keywords):
        time.sleep(3600)
    return call

class Driver(RewiredDriver):
    name = "unstable"
    def __init__(self):
        super().__init__(Borrowed(), {"norm.rms": crashing, "norm.rotary": hanging})
"""
UNREADABLE = """
from deepinfer_conformance.mutants.hosts import Borrowed

class Driver(Borrowed):
    name = "stillborn"
    def capabilities(self):
        raise ValueError("no claims without firmware")
"""
FolderOf = Callable[[str, str, str], Path]


def _on_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


def test_a_crash_and_a_hang_are_outcomes_and_the_run_goes_on(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on_path(monkeypatch, folder_of("unstable", "unstable_driver", SOURCE))
    ids = [
        "L1/norm.rms/numerics/one_row/float32",
        "L1/norm.rotary/numerics/flat/float32",
        "L1/linear.embed/numerics/1_rows_of_float32/float32",
    ]
    cases = [replace(case, timeout_s=20.0) for case in chosen(catalogue(0), ids=ids)]
    seen = []
    order = Order("unstable", 0, "quick", patience=0.1)
    run = run_in_children(cases, order, watcher=lambda case, result: seen.append(case.id))
    outcomes = {result.id: result for result in run.results}
    assert outcomes[ids[0]].outcome is Outcome.CRASH
    assert "SIGABRT" in outcomes[ids[0]].detail
    assert "the vendor's last words" in outcomes[ids[0]].detail
    assert outcomes[ids[1]].outcome is Outcome.TIMEOUT
    assert "no answer within 2 s" in outcomes[ids[1]].detail
    assert outcomes[ids[2]].outcome is Outcome.PASS
    assert [result.id for result in run.results] == [case.id for case in cases] == seen
    assert run.facts["driver"]["name"] == "unstable"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise RuntimeError('no runtime 9.1')", "no runtime 9.1"),
        ("import os; os.abort()", "took its process down"),
        (UNREADABLE, "failed to start: ValueError: no claims without firmware"),
    ],
)
def test_a_driver_that_cannot_start_is_one_clear_error(
    folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    _on_path(monkeypatch, folder_of("stillborn", "stillborn_driver", source))
    with pytest.raises(DriverLoadError, match=words):
        run_in_children(catalogue(0)[:1], Order("stillborn", 0, "quick"))


def test_an_unknown_driver_is_named_with_what_is_installed() -> None:
    with pytest.raises(DriverLoadError, match=r"nobody.*cpu_ref"):
        run_in_children(catalogue(0)[:1], Order("nobody", 0, "quick"))
