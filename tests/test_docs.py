"""What the documents promise is what the tree has: commands, links, flags, drivers, packaged files."""

from __future__ import annotations

import fnmatch
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from deepinfer.accelerator import registry
from deepinfer.cli.app import build

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
PACKAGES = {
    path.parent.name: path.parent
    for root in PROJECT["tool"]["setuptools"]["packages"]["find"]["where"]
    for path in sorted((ROOT / root).glob("deepinfer*/__init__.py"))
}
DOCUMENTS = sorted(
    path for path in ROOT.rglob("*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
BASH = re.compile(r"```bash\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


@pytest.mark.parametrize(
    "command",
    [
        'pip install -c constraints.txt . && deepinfer generate "Why is the sky blue?"',
        "pip install -c constraints.txt -e '.[dev]' && pytest -n auto --dist loadfile",
    ],
)
def test_continuous_integration_runs_the_commands_of_the_readme(command: str) -> None:
    blocks = [block.strip() for block in BASH.findall(README)]
    assert command in blocks
    assert f"  {command}\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_inside_the_tree_leads_somewhere(document: Path) -> None:
    lost = [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert lost == []


def shown_commands() -> list[str]:
    lines = [line for block in BASH.findall(README) for line in block.splitlines()]
    return [part.strip() for line in lines for part in line.split("&&") if part.strip().startswith("deepinfer ")]


@pytest.mark.parametrize("line", shown_commands())
def test_every_command_line_of_the_readme_uses_known_commands_and_flags(line: str) -> None:
    command = get_command(build())
    words = shlex.split(line, comments=True)[1:]
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    flags = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= flags


def test_the_readme_shows_every_command() -> None:
    lines = shown_commands()
    assert len(lines) >= 8
    for name in get_command(build()).commands:
        assert any(line.startswith(f"deepinfer {name}") for line in lines), name


def test_the_readme_lists_exactly_the_drivers_of_this_distribution() -> None:
    registered = set(PROJECT["project"]["entry-points"][registry.GROUP])
    table = README.partition("## Backends and their status")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == registered


def test_the_version_is_one() -> None:
    import deepinfer

    assert deepinfer.__version__ == PROJECT["project"]["version"]
    assert f"## {deepinfer.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_every_package_is_typed() -> None:
    assert len(PACKAGES) == 6
    assert [name for name, folder in PACKAGES.items() if not (folder / "py.typed").is_file()] == []


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for folder in PACKAGES.values() for path in folder.rglob("*.py")}
    assert sorted(str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()) == []


def test_every_data_file_is_packaged() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    covered = [
        PACKAGES[root].joinpath(*inner.split(".")) / pattern
        for root, _, inner, listed in ((*package.partition("."), listed) for package, listed in patterns.items())
        if root != "*"
        for pattern in listed
    ]
    left_out = [
        path
        for folder in PACKAGES.values()
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix not in {".py", ".pyc"}
        and path.name not in patterns["*"]
        and not any(fnmatch.fnmatch(str(path), str(pattern)) for pattern in covered)
    ]
    assert left_out == []


def test_every_pin_of_the_constraints_meets_the_declared_range() -> None:
    from packaging.requirements import Requirement

    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
    )
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [Requirement(text) for text in (*PROJECT["project"]["dependencies"], *extras["test"], *extras["dev"])]
    for requirement in wanted:
        if requirement.name != PROJECT["project"]["name"]:
            assert requirement.specifier.contains(pins[requirement.name]), requirement
    assert "triton" not in pins, "every CUDA build of torch pins a triton of its own"
