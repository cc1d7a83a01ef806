"""The lowering check says what it needs, counts a kernel as lowered only when the last step was reached once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deepinfer.accelerator import all_op_names
from deepinfer.errors import DriverUnavailableError
from deepinfer_ascend.lowering_check.__main__ import main
from deepinfer_ascend.lowering_check.execution_cases import CASES, ExecutionCase
from deepinfer_ascend.lowering_check.report import Entry, Report, read_report
from deepinfer_ascend.lowering_check.tools import ADAPTER, COMPILER, LoweringError, Tools

PR = "Ascend950PR_9599"


def tools_that(folder: Path, compiler: str, adapter: str = 'cp "$1" "$last"') -> Tools:
    """Return tools that are shell scripts; `$last` is their last argument."""
    for name, body in ((ADAPTER, adapter), (COMPILER, compiler)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\nfor last; do :; done\n{body}\n")
        path.chmod(0o700)
    return Tools.found_in(folder)


def test_absent_tools_are_named_with_the_script_that_unpacks_them(tmp_path, capsys):
    assert main(["--report", str(tmp_path / "report.json"), "--tools", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert ADAPTER in said
    assert COMPILER in said
    assert ".ci/ascend_tools" in said
    assert not (tmp_path / "report.json").exists()


def test_without_triton_the_command_says_so(tmp_path, capsys, monkeypatch):
    tools_that(tmp_path, "true")
    monkeypatch.setattr("deepinfer_ascend.lowering_check.__main__.find_spec", lambda name: None)
    assert main(["--report", str(tmp_path / "report.json"), "--tools", str(tmp_path)]) == 2
    assert "triton is not installed" in capsys.readouterr().err


def test_a_kernel_is_lowered_when_the_last_step_is_reached_once(tmp_path):
    tools_that(tmp_path, 'hivmc-a5 module.mlir -o "$last"').to_hivm("module {}", PR)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("true", "reached 0 times, not once"),
        ('hivmc-a5 m -o "$last"; hivmc-a5 m -o "$last"', "reached 2 times, not once"),
        ("echo 'error: ub overflow, requires 3 bits' >&2; exit 1", "ended with status 1: error: ub overflow"),
        ("exit 3", "ended with status 3: it gave no reason"),
    ],
)
def test_everything_else_is_a_failure_with_the_tools_reason(tmp_path, compiler, reason):
    with pytest.raises(LoweringError, match=reason):
        tools_that(tmp_path, compiler).to_hivm("module {}", PR)


def test_the_attribute_that_the_compiler_does_not_know_is_left_out(tmp_path):
    tools = tools_that(tmp_path, "true")
    assert tools.to_linalg('func @k() attributes {a = 1, mix_mode = "aiv"}') == "func @k() attributes {a = 1}"


def test_a_report_comes_back_and_names_each_failure_once(tmp_path):
    problem = "ub overflow"
    entries = tuple(
        Entry(op, PR, "lowered", "failed", "kernel", "a=1", 0.5, problem) for op in ("norm.rms", "moves.copy")
    )
    report = Report({"triton": "3.9.0"}, entries)
    report.write(tmp_path / "report.json")
    assert read_report(tmp_path / "report.json") == report
    assert report.failures == (f"kernel (a=1), lowered, {PR}: {problem}",)
    assert report.others == ()
    assert {"op", "soc", "how", "status"} <= json.loads((tmp_path / "report.json").read_text())["entries"][0].keys()


def test_a_kernel_that_an_operator_replaces_is_no_failure():
    entry = Entry("linear", PR, "lowered", "failed", "dense_kernel", "a=1", 0.5, "no such form", taken=False)
    report = Report({}, (entry,))
    assert report.failures == ()
    assert report.others == (f"dense_kernel (a=1), lowered, {PR}: no such form",)


def test_a_result_beyond_its_bound_or_with_another_bit_is_a_problem():
    right = torch.ones(3, dtype=torch.float64)
    off = ExecutionCase("norm.rms", "off", lambda: (torch.tensor([1.0, 1.0, 1.00001]), right, right))
    assert "times its bound off" in off.problem()
    near = ExecutionCase("norm.rms", "near", lambda: (torch.tensor([1.0, 1.0, 1.0000001]), right, right))
    assert near.problem() == ""
    broken = ExecutionCase("norm.rms", "nan", lambda: (torch.tensor([1.0, float("nan"), 1.0]), right, right))
    assert "inf times its bound off" in broken.problem()
    bits = ExecutionCase("codec.encode", "bits", lambda: (torch.tensor([1, 2]), torch.tensor([1, 3]), None))
    assert bits.problem() == "1 of 2 values differ"


def test_cases_name_ops_of_the_contract_and_differ():
    assert {case.op for case in CASES} <= set(all_op_names())
    assert len({(case.op, case.name) for case in CASES}) == len(CASES)


def test_found_tools_are_files(tmp_path):
    (tmp_path / ADAPTER).mkdir(parents=True)
    with pytest.raises(DriverUnavailableError):
        Tools.found_in(tmp_path)
