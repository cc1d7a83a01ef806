"""`deepinfer env`: what is set, what it does, and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from deepinfer import settings

Run = Callable[..., object]


def test_the_table_has_a_line_per_variable_with_its_value(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_LOG_LEVEL", "error")
    ran = run("env")
    assert ran.status == 0
    lines = {line.split()[0]: line for line in ran.out.splitlines()[2:]}
    assert list(lines) == [setting.name for setting in settings.SETTINGS]
    assert "'error'" in lines["DEEPINFER_LOG_LEVEL"]
    assert "(unset)" in lines["DEEPINFER_ACCELERATOR"]


def test_json_holds_the_whole_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "acme")
    rows = json.loads(run("env", "--json").out)
    assert [row["name"] for row in rows] == [setting.name for setting in settings.SETTINGS]
    assert {row["name"]: row["value"] for row in rows}["DEEPINFER_ACCELERATOR"] == "acme"
    assert all(set(row) == {"name", "value", "type", "choices", "default", "effect"} for row in rows)


def test_markdown_is_the_documentation_page(run: Run) -> None:
    assert run("env", "--markdown").out == settings.markdown()


def test_the_two_formats_exclude_each_other(run: Run) -> None:
    assert run("env", "--json", "--markdown").status == 2


def test_a_bad_environment_is_shown_and_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "perhaps")
    ran = run("env")
    assert ran.status == 2
    assert "'perhaps'" in ran.out
    assert "'perhaps' is not a truth value" in ran.err
