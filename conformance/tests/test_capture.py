"""Calls captured from a real run replay as cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.accelerator import AcceleratorDriver, OpOptions
from deepinfer.errors import ArgumentError
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.capture import CapturingDriver, folder_problems
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


def test_what_exceeds_the_limit_is_left_out_and_said(
    reference: AcceleratorDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = CapturingDriver(reference, tmp_path, limit_bytes=3000)
    norm = driver.op_groups(OpOptions())["norm"]
    for rows in (1, 100, 200, 2):  # of 256 bytes each, beside a weight of as much
        norm.rms(torch.zeros(rows, 64), torch.ones(64), 1e-6)  # type: ignore[attr-defined]
    files = sorted(tmp_path.iterdir())
    assert [captured_case(path).inputs().tensor("x_TD").shape[0] for path in files] == [1, 2]
    assert driver.written == 2
    assert "captured 2 cases of 1 ops, 1,280 bytes" in driver.summary()
    assert "2 calls were left out, with which the files would exceed 3,000 bytes (norm.rms)" in driver.summary()
    assert [record.message.split(":")[0] for record in caplog.records] == ["limit of capture reached"]


def test_no_more_than_the_wanted_calls_of_an_op_are_kept_and_none_twice(
    reference: AcceleratorDriver, tmp_path: Path
) -> None:
    driver = CapturingDriver(reference, tmp_path, per_op=2)
    norm = driver.op_groups(OpOptions())["norm"]
    for rows in (1, 1, 2, 3):
        norm.rms(torch.zeros(rows, 64), torch.ones(64), 1e-6)  # type: ignore[attr-defined]
    assert driver.written == len(list(tmp_path.iterdir())) == 2
    assert "left out" not in driver.summary()


def test_a_folder_that_is_not_empty_is_refused_and_left_as_it_is(reference: AcceleratorDriver, tmp_path: Path) -> None:
    for name in "dcba":
        (tmp_path / name).touch()
    with pytest.raises(ArgumentError, match="holds a, b, c and 1 more; give a new or an empty folder"):
        CapturingDriver(reference, tmp_path)
    with pytest.raises(ArgumentError, match="is a file"):
        CapturingDriver(reference, tmp_path / "a")
    assert folder_problems(tmp_path / "new") == []


def test_a_captured_file_that_is_absent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="--capture"):
        captured_case(tmp_path / "none.case")
