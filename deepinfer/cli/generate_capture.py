"""`deepinfer generate --capture DIR`: the same run on a driver that writes its calls as cases of the suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.engine.options import EngineKeywords
    from deepinfer.llm import LLM

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What was typed of capturing.

    Attributes:
        folder: where cases go; None to capture nothing.
        cases: most cases per op; None for the suite's own number.
        limit_mib: most mebibytes of all cases together; None for the suite's own limit.
    """

    folder: Path | None
    cases: int | None
    limit_mib: int | None

    def problems(self) -> list[str]:
        """Return everything that is wrong with it."""
        given = [
            (name, value)
            for name, value in (("--capture-cases", self.cases), ("--capture-mib", self.limit_mib))
            if value is not None
        ]
        problems = [f"{name} {value}: write a number of 1 or more" for name, value in given if value < 1]
        if self.folder is None:
            return problems + [f"{name} needs --capture DIR" for name, _ in given]
        from deepinfer_conformance.capture import folder_problems

        return problems + [f"--capture: {problem}" for problem in folder_problems(self.folder)]


@contextmanager
def capturing_llm(
    request: CaptureRequest, folder: Path, model: Path | None, accelerator: str | None, keywords: EngineKeywords
) -> Iterator[LLM]:
    """Give an LLM whose driver's calls are captured; say on standard error what was, however the run ends."""
    from deepinfer.accelerator.selection import select
    from deepinfer.engine.build import build_engine_on
    from deepinfer.engine.options import EngineOptions
    from deepinfer.llm import LLM
    from deepinfer.settings import Settings
    from deepinfer_conformance.capture import CASES_PER_OP, LIMIT_BYTES, CapturingDriver

    settings = Settings.from_environment()
    chosen = select(accelerator, settings)
    driver = CapturingDriver(
        chosen.driver(),
        folder,
        per_op=CASES_PER_OP if request.cases is None else request.cases,
        limit_bytes=LIMIT_BYTES if request.limit_mib is None else request.limit_mib * _MIB,
    )
    try:
        yield LLM.from_engine(build_engine_on(driver, model, EngineOptions.from_keywords(keywords), settings))
    finally:
        print(driver.summary(), file=sys.stderr)
        if driver.written:
            first = min(path.name for path in folder.glob("*.case"))
            name = chosen.driver.name
            print(f"replay one: deepinfer conformance replay {folder / first} --driver {name}", file=sys.stderr)
