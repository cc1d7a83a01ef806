"""The report: one set of facts in four forms, checked when it is read, verified before it is published."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from deepinfer.accelerator import all_op_names
from deepinfer.errors import ArgumentError
from deepinfer_conformance.catalogue import catalogue
from deepinfer_conformance.data.digest import input_sha256
from deepinfer_conformance.outcomes import Level, Outcome
from deepinfer_conformance.report.compare import compare_reports, first_difference
from deepinfer_conformance.report.document import Document, read_report, results_of, write_report
from deepinfer_conformance.report.facts import suite_facts, tree_state
from deepinfer_conformance.report.junit import junit_xml
from deepinfer_conformance.report.page import html_page, support_markdown
from deepinfer_conformance.report.verify import verify_report
from deepinfer_conformance.waivers import Waiver, packaged_waivers, parse_waivers, refuse_expired

RMS = "L1/norm.rms/numerics/17_rows/float32"
TODAY = datetime.date(2026, 11, 29)
MakeReport = Callable[..., Document]


def test_a_report_is_read_back_as_it_was_written(make_report: MakeReport, tmp_path: Path) -> None:
    document = make_report({RMS: {"value": float("inf"), "outcome": Outcome.FAIL, "detail": "off\x00"}})
    assert read_report(write_report(document, tmp_path)) == document
    result = next(result for result in results_of(read_report(tmp_path)) if result.id == RMS)
    assert (result.value, result.outcome) == (float("inf"), Outcome.FAIL)


def test_the_fields_that_the_schema_promises_are_there(make_report: MakeReport) -> None:
    document = make_report()
    assert document["schema"] == 1
    assert document["level_reached"] == "L7"
    wanted = {"id", "op", "level", "outcome", "metric", "value", "bound", "seed", "input_sha256", "seconds"}
    assert all(wanted <= set(case) for case in document["cases"])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda document: document.update(schema=2), "schema is 2"),
        (lambda document: document.pop("levels"), "'levels' is missing"),
        (lambda document: document.update(extra=1), "'extra' is unknown"),
        (lambda document: document["cases"][0].update(outcome="fine"), "outcome 'fine'"),
        (lambda document: document["cases"][0].pop("op"), "lacks 'op'"),
        (lambda document: document["cases"][0].update(value="much"), "value 'much'"),
        (lambda document: document.update(cases=[3]), "case 0 is no object"),
    ],
)
def test_a_damaged_report_is_one_clear_error(
    make_report: MakeReport, tmp_path: Path, spoil: Callable[[Any], object], words: str
) -> None:
    document = make_report()
    spoil(document)
    (tmp_path / "report.json").write_text(json.dumps(document))
    with pytest.raises(ArgumentError, match=words):
        read_report(tmp_path)


def test_an_absent_or_broken_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="run --report"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(ArgumentError, match="not JSON"):
        read_report(tmp_path)


def test_junit_counts_what_the_report_counts(make_report: MakeReport) -> None:
    document = make_report(
        {RMS: {"outcome": Outcome.FAIL, "detail": "off by \x1b one"}, "L0/-/memory": {"outcome": Outcome.CRASH}}
    )
    root = ElementTree.fromstring(junit_xml(results_of(document), "acme 1"))  # noqa: S314 - our own document
    assert sum(int(suite.get("tests", "0")) for suite in root) == len(document["cases"])
    assert sum(int(suite.get("failures", "0")) for suite in root) == 1
    assert sum(int(suite.get("errors", "0")) for suite in root) == 1


class _Page(HTMLParser):
    """Collects tags, links and the rows of the support table; raises where tags do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "rect", "line", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_well_formed_loads_nothing_and_shows_every_op(make_report: MakeReport) -> None:
    page = html_page(make_report({RMS: {"outcome": Outcome.FAIL, "detail": "<script>alert(1)</script>"}}))
    parser = _Page()
    parser.feed(page)
    assert parser.open == []
    assert parser.links == []
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
    table = page[page.index('id="support"') :]
    for op in all_op_names():
        assert f">{op}<" in table


def test_the_support_table_shows_failures_fallbacks_and_levels(make_report: MakeReport, facts: dict[str, Any]) -> None:
    claims = {
        **facts["claims"],
        "ops": {op: each for op, each in facts["claims"]["ops"].items() if op != "norm.rotary"},
        "declared_fallbacks": ["norm.rotary"],
    }
    document = make_report({RMS: {"outcome": Outcome.FAIL}}, claims=claims)
    assert document["support"]["norm.rms"]["float32"] == "fail"
    assert document["support"]["norm.rms"]["bfloat16"] == "pass"
    assert document["support"]["norm.rotary"]["float32"] == "fallback"
    assert "| `norm.rms` | fail | pass |" in support_markdown(document)


WANTED = [case for case in catalogue(0, "quick") if case.op == "norm.rms" or case.level is Level.L0]
DIGESTS = {case.id: "" if case.build is None else input_sha256(case.build()) for case in WANTED}


def _publishable(document: Document) -> Document:
    """Make a small package of the norm's cases; it would be complete if they were the whole profile."""
    document["cases"] = [line for line in document["cases"] if line["id"] in DIGESTS]
    for line in document["cases"]:
        line["input_sha256"] = DIGESTS[line["id"]]
    document["suite"]["tree"]["clean"] = True
    document["level_reached"] = "L0"
    return document


def test_verify_names_everything_that_stands_against_a_package(make_report: MakeReport) -> None:
    good = _publishable(make_report())
    assert verify_report(good, today=TODAY, wanted=WANTED) == []
    bad = _publishable(make_report({RMS: {"outcome": Outcome.FAIL}}))
    bad["suite"]["tree"]["clean"] = False
    bad["selection"]["ops"] = ["norm.*"]
    bad["level_reached"] = "L7"
    bad["how"] = "interpreted"
    bad["cases"].append(dict(bad["cases"][0]))
    bad["cases"][1]["id"] = "L1/unheard/of"
    bad["cases"][9]["input_sha256"] = "0" * 64
    waiver = Waiver("cpu_ref", "*", "*", RMS, "old", "https://example.test", datetime.date(2026, 1, 1))
    bad["waivers"] = [waiver.as_json()]
    told = "\n".join(verify_report(bad, today=TODAY, wanted=WANTED))
    for words in (
        "changed tree", "narrowed", "are missing", "unknown to this suite", "more than once", "other inputs",
        "did not hold", "expired", "level_reached", "interpreted",
    ):  # fmt: skip
        assert words in told


def test_verify_refuses_another_suite(make_report: MakeReport) -> None:
    document = make_report()
    document["suite"]["version"] = "0.0.1"
    assert any("run it again" in problem for problem in verify_report(document, today=TODAY))


def test_compare_shows_outcomes_errors_and_the_first_divergent_token(make_report: MakeReport) -> None:
    tokens = "L5/-/tokens/small_model/float32"
    left = make_report({tokens: {"data": {"tokens": [4, 5, 6]}}})
    right = make_report({RMS: {"outcome": Outcome.FAIL, "value": 3.0}, tokens: {"data": {"tokens": [4, 9, 6]}}})
    found = compare_reports(left, right)
    assert found.differing == ((RMS, "pass", "fail"),)
    assert found.divergences[tokens] == 1
    row = next(row for row in found.errors if (row.op, row.column) == ("norm.rms", "float32"))
    assert (row.left, row.right) == (0.25, 3.0)
    right["seed"] = 5
    with pytest.raises(ArgumentError, match="seeds differ"):
        compare_reports(left, right)


def test_the_first_difference_of_token_lists() -> None:
    assert first_difference([1, 2], [1, 2]) == -1
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_waivers_are_checked_as_data() -> None:
    assert packaged_waivers() == ()
    text = '[[waiver]]\ndriver = "a"\nversion = "*"\ndevice = "*"\ncase = "L1/*"\nreason = "r"\nlink = "l"\n'
    (waiver,) = parse_waivers(text + "expires = 2026-01-01\n", "w")
    assert waiver.expired(TODAY)
    refuse_expired([waiver], "other", TODAY)
    with pytest.raises(ArgumentError, match="expired on 2026-01-01"):
        refuse_expired([waiver], "a", TODAY)
    with pytest.raises(ArgumentError, match="'expires' is missing"):
        parse_waivers(text, "w")
    with pytest.raises(ArgumentError, match="write a date"):
        parse_waivers(text + 'expires = "soon"\n', "w")
    with pytest.raises(ArgumentError, match="unknown field 'why'"):
        parse_waivers(text + 'expires = 2026-01-01\nwhy = "x"\n', "w")
    with pytest.raises(ArgumentError, match="not TOML"):
        parse_waivers("[[", "w")


def test_the_tree_state_says_where_the_suite_comes_from(tmp_path: Path) -> None:
    assert {"source", "commit", "clean", "digest"} == set(suite_facts()["tree"])  # type: ignore[call-overload]
    stray = tmp_path / "somewhere"
    stray.mkdir()
    assert tree_state(stray)["clean"] is False
