"""Calls captured from a real run replay as cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.accelerator import AcceleratorDriver, OpOptions
from deepinfer.errors import ArgumentError
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.capture import CapturingDriver
from deepinfer_conformance.catalogue import captured_case
from deepinfer_conformance.drivers import Fault, FaultKind, FaultyDriver
from deepinfer_conformance.end_to_end.engines import answers, make_engine
from deepinfer_conformance.outcomes import Outcome
from deepinfer_conformance.runner.attempt import attempt


def test_every_captured_call_of_the_engine_replays_and_a_wrong_driver_is_caught(
    reference: AcceleratorDriver, tmp_path: Path
) -> None:
    driver = CapturingDriver(reference, tmp_path, per_op=1)
    captured_tokens = answers(make_engine(driver, OpOptions()), [[5, 6, 7, 8, 9]], 2)
    assert captured_tokens == answers(make_engine(reference, OpOptions()), [[5, 6, 7, 8, 9]], 2)
    files = sorted(tmp_path.glob("*.case"))
    assert driver.written == len(files)
    names = {path.name.rpartition("-")[0] for path in files}
    assert {
        "attention.sparse",
        "selection.top_entries",
        "compression.pool_pairs",
        "experts.local",
        "linear.dense",
    } <= names
    bench = Bench(reference, reference)
    for path in files:
        result = attempt(captured_case(path), bench)
        assert result.outcome is Outcome.PASS, f"{path.name}: {result.detail}"
    faulty = FaultyDriver.wrapping(reference, [Fault(op="attention.sparse", kind=FaultKind.VALUE, element=0)])
    wrong = attempt(captured_case(tmp_path / "attention.sparse-1.case"), Bench(faulty, reference))
    assert wrong.outcome is Outcome.FAIL


def test_a_captured_file_that_is_absent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="--capture"):
        captured_case(tmp_path / "none.case")
