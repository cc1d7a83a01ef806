"""Exceptions to "no spills": sm_90a only, each with a number of bytes and a reason."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deepinfer.errors import ConfigurationError
from deepinfer_nvidia.architecture import SM90

PATH: Final = Path(__file__).with_name("spill_allowlist.toml")
_FIELDS: Final = {"kernel", "config", "arch", "bytes", "reason"}


@dataclass(frozen=True, slots=True)
class Allowed:
    """One exception.

    Attributes:
        kernel: name of the kernel function.
        config: beginning of the label of the configurations that it holds for; empty for all of them.
        arch: "sm_90a".
        spill_bytes: most bytes a thread.
        reason: why it is worth having.
    """

    kernel: str
    config: str
    arch: str
    spill_bytes: int
    reason: str

    def covers(self, kernel: str, config: str, arch: str) -> bool:
        """Return True if this is an exception for that compiled form."""
        return (self.kernel, self.arch) == (kernel, arch) and config.startswith(self.config)


def allowed_spills(path: Path = PATH) -> tuple[Allowed, ...]:
    """Return the exceptions of a file; ConfigurationError with everything that is wrong in it."""
    found = tomllib.loads(path.read_text())
    problems = [f"unknown table {name!r}" for name in found if name != "allow"]
    allowed = []
    for number, entry in enumerate(found.get("allow", [])):
        where = f"exception {number}"
        wrong = _problems(entry)
        problems += [f"{where}: {problem}" for problem in wrong]
        if not wrong:
            allowed.append(
                Allowed(entry["kernel"], entry.get("config", ""), entry["arch"], entry["bytes"], entry["reason"])
            )
    if problems:
        raise ConfigurationError(str(path.name), problems)
    return tuple(allowed)


def _problems(entry: Mapping[str, object]) -> list[str]:
    problems = [f"unknown key {name!r}" for name in entry if name not in _FIELDS]
    problems += [
        f"{name!r} is missing or no text"
        for name in ("kernel", "arch", "reason")
        if not isinstance(entry.get(name), str)
    ]
    if not isinstance(entry.get("bytes"), int):
        problems.append("'bytes' is missing or no whole number")
    if not isinstance(entry.get("config", ""), str):
        problems.append("'config' is no text")
    if entry.get("arch") != SM90.name:
        problems.append(f"arch is {entry.get('arch')!r}; only {SM90.name} may have exceptions")
    return problems
