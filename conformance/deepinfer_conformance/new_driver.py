"""Writes a vendor's distribution from the template: a pyproject, an entry point, one native op, declared fallbacks."""

from __future__ import annotations

import keyword
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from deepinfer.accelerator import INTERFACE_VERSION, registry
from deepinfer.errors import ArgumentError

_SUFFIX = ".in"


def write_template(name: str, folder: Path) -> tuple[Path, ...]:
    """Write a new driver's distribution and return the files.

    Args:
        name: of the driver: lower-case letters, digits and underscores, a letter first.
        folder: new or empty.

    Raises:
        ArgumentError: the name cannot be used or is taken, or the folder is not empty: all at once.
    """
    problems = []
    if not (name.isidentifier() and name.isascii() and name == name.lower() and name[0].isalpha()) or keyword.iskeyword(
        name
    ):
        problems.append(f"name {name!r}: use lower-case letters, digits and underscores, a letter first")
    elif name in registry.installed_names():
        problems.append(
            f"a driver {name!r} is installed already ({', '.join(registry.installed_names())}); choose another name"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problems.append(f"{folder} is not empty; give a new folder")
    if problems:
        raise ArgumentError("new driver", problems)
    package = f"deepinfer_{name}"
    written: list[Path] = []
    _write(
        resources.files("deepinfer_conformance").joinpath("template"),
        folder,
        {"@name@": name, "@package@": package, "@interface@": repr(INTERFACE_VERSION)},
        written,
    )
    return tuple(written)


def _write(source: Traversable, target: Path, words: dict[str, str], written: list[Path]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for entry in sorted(source.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            name = words["@package@"] if entry.name == "package" else entry.name
            _write(entry, target / name, words, written)
        elif entry.name.endswith(_SUFFIX):
            text = entry.read_text()
            for word, meaning in words.items():
                text = text.replace(word, meaning)
            path = target / entry.name.removesuffix(_SUFFIX)
            path.write_text(text)
            written.append(path)
