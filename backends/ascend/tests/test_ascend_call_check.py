"""The call check covers every call site, can fail, and says what it needs where it cannot run.

With torch-npu installed (the Ascend lane) the command really runs; without it, it must end with the reason.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import torch

from deepinfer_ascend import runtime
from deepinfer_ascend.call_check.__main__ import main
from deepinfer_ascend.call_check.checking import META, check, uncovered
from deepinfer_ascend.call_check.report import Entry, Report, read_entries
from deepinfer_ascend.call_check.sites import SITES, methods
from deepinfer_ascend.call_check.sizes import SMALL
from deepinfer_ascend.operators import Operators
from deepinfer_ascend.soc import detect

PR = "Ascend950PR_9599"


def test_every_call_site_and_every_graph_safe_op_has_a_trial():
    assert uncovered() == []
    assert sorted(methods()) == sorted(site.method for site in SITES)


def test_the_command_runs_where_torch_npu_is_and_says_what_is_missing_where_not(tmp_path, capsys):
    path = tmp_path / "folder" / "report.json"
    if runtime.installed_version() is None:
        assert main(["--report", str(path)]) == 2
        assert "torch-npu is not installed" in capsys.readouterr().err
        assert not path.exists()
        return
    # A process of its own: this one may hold an emulated device.
    command = [sys.executable, "-m", "deepinfer_ascend.call_check", "--report", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    entries = json.loads(path.read_text())["entries"]
    assert {entry["status"] for entry in entries} == {"ok"}
    assert {entry["how"] for entry in entries} == {"meta"}
    chips = Counter(entry["soc"] for entry in entries)
    assert chips["Ascend950PR_9599"] == chips["Ascend950DT_9591"] > chips["Ascend910B3"] > 10


def test_an_unknown_chip_ends_the_command_before_anything_is_tried(tmp_path, capsys):
    assert main(["--report", str(tmp_path / "report.json"), "--soc", "H200"]) == 2
    assert "unknown SoC H200" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_operators_that_fail_or_give_other_shapes_are_failures():
    """Without torch-npu every call into its namespace fails; the check must say so of each, and of nothing else."""
    if runtime.installed_version() is not None and hasattr(torch.ops.npu, "npu_rms_norm"):
        return
    entries = list(check(detect(PR), "meta", META, shapes=[SMALL]))
    assert {entry.status for entry in entries if entry.subject == "operator"} == {"failed"}
    plain = {entry.op for entry in entries if entry.subject == "op" and entry.status == "ok"}
    assert {"linear.embed", "memory.ngram_rows", "plumbing.window_slots", "mixing.collapse"} <= plain
    assert "norm.rms" not in plain


def test_a_wrong_shape_or_dtype_is_a_failure_with_both_sides(monkeypatch):
    monkeypatch.setattr(Operators, "rms_norm", lambda self, x, weight_D, eps: x.to(torch.bfloat16))
    entries = check(detect(PR), "meta", META, shapes=[SMALL])
    found = [entry for entry in entries if entry.op == "norm.rms" and entry.subject == "operator"]
    assert [entry.status for entry in found] == ["failed"]
    assert "expected torch.float32 (3, 128) on meta, got torch.bfloat16" in found[0].problem


def test_a_report_comes_back_from_its_file_and_lists_every_problem(tmp_path):
    good = Entry("norm.rms", PR, "meta", "ok", "operator", ("npu_rms_norm",), "small")
    bad = Entry("linear.dense", PR, "emulated", "failed", "op", (), "small served", "no such operator")
    report = Report((("torch", "2.13.0"),), (good, bad), ("call site 'x' has no trial",))
    report.write(tmp_path / "report.json")
    assert report.table().splitlines()[2:] == ["| `linear.dense` | **failed** |", "| `norm.rms` | meta |"]
    assert read_entries(tmp_path / "report.json") == (good, bad)
    assert report.failures == (
        "call site 'x' has no trial",
        f"linear.dense on {PR}, emulated, small served op: no such operator",
    )
