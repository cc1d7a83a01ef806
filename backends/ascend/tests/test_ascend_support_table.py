"""The support table in the docs has the shape that the driver has today, and no word that nothing proves."""

from __future__ import annotations

import re
from pathlib import Path

from deepinfer.accelerator import all_op_names
from deepinfer_ascend import support_table
from deepinfer_ascend.call_check.op_trials import TRIALS
from deepinfer_ascend.call_check.report import Entry as Call
from deepinfer_ascend.capabilities import NATIVE
from deepinfer_ascend.lowering_check.report import Entry as Lowered
from deepinfer_ascend.soc import DEFAULT_NAMES

PAGE = Path(__file__).parents[3] / "docs" / "support-ascend.md"
PR = "Ascend950PR_9599"
WORDS = re.compile(
    r"call-checked \(meta, emulated\)|lowered \d+ of \d+|fallback|served: fallback"
    r"|host code|torch code, not call-checked"
)


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_every_op_and_every_chip_in_order():
    head, _, *body = rows()
    assert head == ["op", *DEFAULT_NAMES, "executed on x86"]
    assert [row[0].strip("`") for row in body] == list(all_op_names())


def test_every_cell_says_what_was_proved_and_nothing_failed():
    for op, *cells, executed in rows()[2:]:
        assert executed in ("", "yes"), op
        for cell in cells:
            assert all(WORDS.fullmatch(words) for words in cell.split("; ")), (op, cell)


def test_what_is_native_is_no_fallback_and_what_is_tried_is_call_checked():
    for op, first, *_ in rows()[2:]:
        name = op.strip("`")
        assert first.startswith("fallback") is (name not in NATIVE), name
        if name in TRIALS:
            assert first.startswith("call-checked"), name


def test_the_page_is_made_by_the_command_that_it_names():
    assert support_table.COMMAND.format(path="docs/support-ascend.md") in PAGE.read_text()


def test_a_failure_shows():
    calls = [Call("norm.rms", PR, "meta", "failed", "op", (), "small", "no such operator")]
    lowered = [
        Lowered("norm.rms", PR, "lowered", status, "rms_norm_kernel", configuration, 1.0, "")
        for configuration, status in (("a", "ok"), ("b", "failed"))
    ]
    lowered.append(Lowered("norm.rms", "any", "executed on x86", "failed", "rms_norm_kernel", "case", 1.0, "off"))
    made = support_table.table(calls, lowered)
    (line,) = [line for line in made.splitlines() if "`norm.rms`" in line]
    assert line.startswith("| `norm.rms` | **call check failed**; lowered 1 of 2 |")
    assert line.endswith("| **failed** |")
