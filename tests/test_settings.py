"""The table of environment variables, its parser, and the page that is written from it."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from deepinfer import settings
from deepinfer.errors import ConfigurationError
from deepinfer.settings import SETTINGS, Settings

ROOT = Path(__file__).resolve().parent.parent

# A new variable is an interface that users will depend on: adding one means adding a line here, on purpose.
FROZEN_NAMES = [
    "DEEPINFER_ACCELERATOR",
    "DEEPINFER_ALLOW_FALLBACK",
    "DEEPINFER_BATCH_INVARIANT",
    "DEEPINFER_LOG_LEVEL",
    "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
    "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
    "DEEPINFER_ZERO_OVERHEAD_SCHEDULING",
    "DEEPINFER_DECODE_GRAPHS",
    "DEEPINFER_GRAPH_INTERVAL",
    "DEEPINFER_ENABLE_MTP_VARLEN",
    "DEEPINFER_COST_CURVES",
    "DEEPINFER_REDUNDANT_EXPERTS",
    "DEEPINFER_EXPERT_BALANCING",
    "DEEPINFER_NVIDIA_INTERPRET",
    "DEEPINFER_NVIDIA_PROVIDERS",
]


def test_the_variables_are_exactly_the_frozen_list() -> None:
    assert [setting.name for setting in SETTINGS] == FROZEN_NAMES


def test_every_variable_has_a_field_of_its_name() -> None:
    assert [field.name for field in fields(Settings)] == [
        setting.name.removeprefix(settings.PREFIX).lower() for setting in SETTINGS
    ]


def test_every_variable_says_its_type_default_and_effect() -> None:
    for setting in SETTINGS:
        assert setting.type
        assert setting.default
        assert setting.effect.endswith(".")


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.from_environment({}) == Settings()


def test_an_empty_value_counts_as_unset() -> None:
    assert Settings.from_environment(dict.fromkeys(FROZEN_NAMES, " ")) == Settings()


def test_every_variable_is_parsed() -> None:
    read = Settings.from_environment(
        {
            "DEEPINFER_ACCELERATOR": "nvidia",
            "DEEPINFER_ALLOW_FALLBACK": "linear.dense, norm.rms ,linear.dense",
            "DEEPINFER_BATCH_INVARIANT": "1",
            "DEEPINFER_LOG_LEVEL": "Debug",
            "HOME": "/nowhere",
        }
    )
    assert read == Settings("nvidia", ("linear.dense", "norm.rms"), batch_invariant=True, log_level="debug")


@pytest.mark.parametrize("text", ["1", "true", "yes", "on", "ON", " True "])
def test_every_spelling_of_true_is_true(text: str) -> None:
    assert Settings.from_environment({"DEEPINFER_BATCH_INVARIANT": text}).batch_invariant


@pytest.mark.parametrize("text", ["0", "false", "no", "off", "OFF", "False"])
def test_every_spelling_of_false_is_false(text: str) -> None:
    assert not Settings.from_environment({"DEEPINFER_BATCH_INVARIANT": text}).batch_invariant


def test_redundant_experts_may_be_none_and_the_policy_one_of_three() -> None:
    read = Settings.from_environment({"DEEPINFER_REDUNDANT_EXPERTS": "0", "DEEPINFER_EXPERT_BALANCING": "Greedy"})
    assert (read.redundant_experts, read.expert_balancing) == (0, "greedy")
    with pytest.raises(ConfigurationError) as caught:
        Settings.from_environment({"DEEPINFER_REDUNDANT_EXPERTS": "-1", "DEEPINFER_EXPERT_BALANCING": "keep"})
    assert [name in str(caught.value) for name in ("a whole number of 0 or more", "off, greedy, balanced")] == [
        True
    ] * 2


def test_all_problems_are_reported_at_once() -> None:
    environ = {
        "DEEPINFER_BATCH_INVARIANT": "maybe",
        "DEEPINFER_LOG_LEVEL": "loud",
        "DEEPINFER_ALLOW_FALLBACK": "a,,b",
        "DEEPINFER_ACCELARATOR": "nvidia",
        "deepinfer_log_level": "info",
        "DEEPINFER_ZZZ": "1",
    }
    with pytest.raises(ConfigurationError) as caught:
        Settings.from_environment(environ)
    problems = caught.value.problems
    assert len(problems) == len(environ)
    text = str(caught.value)
    assert "'maybe'" in text
    assert "'loud'" in text
    assert "empty entry" in text
    assert "did you mean DEEPINFER_ACCELERATOR?" in text
    assert "deepinfer_log_level is not a variable of this version; did you mean DEEPINFER_LOG_LEVEL" in text
    assert "DEEPINFER_ZZZ is not a variable of this version; known: DEEPINFER_ACCELERATOR," in text


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FROZEN_NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DEEPINFER_ACCELERATOR", "acme")
    assert Settings.from_environment().accelerator == "acme"


def test_current_values_are_raw_and_unchecked() -> None:
    values = {item.setting.name: item.value for item in settings.current({"DEEPINFER_LOG_LEVEL": "loud"})}
    assert values == {**dict.fromkeys(FROZEN_NAMES), "DEEPINFER_LOG_LEVEL": "loud"}


def test_the_documentation_page_is_current() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    assert page == settings.markdown(), "run: deepinfer env --markdown > docs/environment.md"


def test_only_settings_reads_the_environment() -> None:
    readers = []
    for path in sorted((ROOT / "deepinfer").rglob("*.py")):
        names = {
            node.attr if isinstance(node, ast.Attribute) else node.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute | ast.Name)
        }
        if names & {"environ", "environb", "getenv"}:
            readers.append(path.relative_to(ROOT).as_posix())
    assert readers == ["deepinfer/settings.py"]
