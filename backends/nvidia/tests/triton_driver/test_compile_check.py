"""The compile check: what it lists, which limits it holds, and that it says all that is broken."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path

import pytest

from deepinfer.errors import ConfigurationError
from deepinfer_nvidia.architecture import SM90, SM100
from deepinfer_nvidia.compile_check import __main__ as command
from deepinfer_nvidia.compile_check.allowlist import Allowed, allowed_spills
from deepinfer_nvidia.compile_check.entries import Entry, entry_of, markdown, unused
from deepinfer_nvidia.compile_check.expectations import TCGEN05, TCGEN05_CODES, WGMMA, expectation_of, problems
from deepinfer_triton.registry import configurations

COMPILED = types.SimpleNamespace(
    registers=64,
    spill_bytes=0,
    shared_bytes=1024,
    tensor_memory_columns=64,
    matrix_instructions={"UTCQMMA": 4},
    ptx_instructions={"tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32": 4},
)


def hot(name, **constants):
    return next(
        each
        for each in configurations()
        if each.name == name and all(each.constants.get(key) == value for key, value in constants.items())
    )


def changed(**values):
    return types.SimpleNamespace(**{**vars(COMPILED), **values})


def broken(compiled, *, chip=SM100, allowed=(), gates_spills=True, configuration=None):
    configuration = configuration or hot("gate_up_kernel", PRODUCT=0)
    return entry_of(configuration, chip, compiled, allowed, gates_spills=gates_spills).broken


def test_every_hot_kernel_is_in_the_registry_with_its_instruction():
    assert expectation_of(hot("gate_up_kernel", PRODUCT=0), 100) is TCGEN05_CODES
    assert expectation_of(hot("down_kernel", PRODUCT=0), 100) is TCGEN05_CODES
    assert expectation_of(hot("dense_kernel", PRODUCT=0), 100) is TCGEN05_CODES
    assert expectation_of(hot("dense_kernel", PRODUCT=1), 100) is TCGEN05
    assert expectation_of(hot("served_attention_kernel", WIDTH=512), 100) is TCGEN05
    assert expectation_of(hot("index_scores_kernel", WIDTH=128, RESTRICTED=False), 90) in (WGMMA, None)
    assert expectation_of(hot("dense_kernel", PRODUCT=0), 90) is WGMMA
    assert expectation_of(hot("dense_kernel", PRODUCT=2), 100) is None
    assert expectation_of(hot("rms_norm_kernel"), 100) is None


def test_a_form_within_its_limits_breaks_nothing():
    assert broken(COMPILED) == ()


@pytest.mark.parametrize(
    ("compiled", "said"),
    [
        (changed(shared_bytes=232_449), "232449 bytes of shared memory"),
        (changed(tensor_memory_columns=513), "513 columns"),
        (changed(spill_bytes=8), "spills 8 bytes"),
        (changed(matrix_instructions={"HMMA": 2}), "no UTCQMMA or UTCOMMA; it has HMMA x2"),
        (changed(ptx_instructions={"tcgen05.mma.kind::f8f6f4": 1}), "no matrix instruction with 'block_scale'"),
        (types.SimpleNamespace(message="ptxas died\nmore"), "does not compile: ptxas died"),
    ],
)
def test_each_broken_limit_is_said(compiled, said):
    (found,) = broken(compiled)
    assert said in found


def test_all_broken_limits_of_a_form_come_at_once():
    worst = changed(shared_bytes=10**6, tensor_memory_columns=600, spill_bytes=8, matrix_instructions={})
    assert len(broken(worst)) == 4


def test_spills_are_gated_on_one_release_and_excepted_by_name():
    spilling = changed(spill_bytes=8, matrix_instructions={"HGMMA": 1})
    assert broken(spilling, chip=SM90, gates_spills=False) == ()
    exception = Allowed("gate_up_kernel", "", "sm_90a", 8, "why")
    assert broken(spilling, chip=SM90, allowed=[exception]) == ()
    assert broken(spilling, chip=SM90, allowed=[dataclasses.replace(exception, spill_bytes=4)])
    assert broken(changed(spill_bytes=8), allowed=[exception]), "sm_100a has no exceptions"


def test_an_exception_that_nothing_needs_is_said():
    entry = Entry("kernel", "a=1", "sm_90a", 1, 16, 0, 0, {})
    needed, idle = Allowed("kernel", "a=1", "sm_90a", 16, "why"), Allowed("gone", "", "sm_90a", 16, "why")
    (found,) = unused([needed, idle], [entry])
    assert "gone" in found


def test_the_list_of_exceptions_is_read_with_all_its_mistakes(tmp_path):
    path = tmp_path / "spills.toml"
    path.write_text('[[allow]]\nkernel = "k"\narch = "sm_100a"\nbytes = "8"\nlimit = 2\n')
    with pytest.raises(ConfigurationError) as caught:
        allowed_spills(path)
    text = str(caught.value)
    assert all(part in text for part in ("unknown key 'limit'", "'reason'", "'bytes'", "only sm_90a"))
    path.write_text('[[allow]]\nkernel = "k"\narch = "sm_90a"\nbytes = 8\nreason = "why"\n')
    assert allowed_spills(path) == (Allowed("k", "", "sm_90a", 8, "why"),)
    assert all(each.arch == SM90.name for each in allowed_spills())


def test_an_absent_opcode_is_no_instruction():
    assert problems(WGMMA, {"HGMMA": 0}, {})
    assert problems(WGMMA, {"QGMMA": 1}, {}) == []


def test_the_command_writes_every_entry_and_fails_on_a_broken_limit(tmp_path, monkeypatch, capsys):
    report, page = tmp_path / "report.json", tmp_path / "page.md"
    arguments = ["--arch", "sm_100a", "--kernel", "all_competitors_kernel", "--workers", "1"]
    arguments += ["--report", str(report), "--markdown", str(page)]
    assert command.main(arguments) == 0
    (entry,) = json.loads(report.read_text())["entries"]
    assert list(entry) == [
        "kernel", "config", "arch", "registers", "spill_bytes", "shared_bytes", "tensor_memory_columns", "instructions",
    ]  # fmt: skip
    assert entry["registers"] > 0
    assert "| `all_competitors_kernel` | sm_100a | 1 |" in page.read_text()
    failing = Entry("k", "c", "sm_100a", 0, 0, 0, 0, {}, ("one", "two"))
    monkeypatch.setattr(command, "check", lambda *args, **named: [failing])
    assert command.main(arguments) == 1
    said = capsys.readouterr().err
    assert "sm_100a k [c]: one" in said
    assert "sm_100a k [c]: two" in said


def test_the_page_names_the_release():
    assert "triton 3.9.0" in markdown([Entry("k", "c", "sm_90a", 1, 0, 0, 0, {"HGMMA": 2})], "3.9.0")


def test_the_page_in_the_documentation_holds_every_form_that_there_is_and_no_spills_on_sm100():
    """No compiler is needed to see that a form has changed and the page was not written again."""
    page = (Path(command.__file__).parents[2] / "COMPILED.md").read_text()
    forms = page[page.index("## Forms") :].splitlines()[4:]
    cells = [line.strip("| ").split(" | ") for line in forms]
    assert [(kernel.strip("`"), label, arch) for kernel, label, arch, *_ in cells] == [
        (each.name, each.label, chip.name) for chip in (SM100, SM90) for each in configurations()
    ]
    assert {int(spills) for _, _, arch, _, spills, *_ in cells if arch == SM100.name} == {0}
