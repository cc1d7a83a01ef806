"""What every benchmark returns, and how it becomes a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from deepinfer.bench.environment import Environment

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Result = TypeVar("Result", bound="DataclassInstance")
Clock = Callable[[], float]
"""Seconds from some fixed moment."""
Tick = Callable[[], object]
"""Called when one more unit of work is done."""


def no_tick() -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class BenchReport(Generic[Result]):
    """One run of one benchmark.

    Attributes:
        benchmark: its name on the command line.
        settings: what was asked for, a dataclass.
        environment: where it ran.
        results: one entry per case.
    """

    benchmark: str
    settings: DataclassInstance
    environment: Environment
    results: tuple[Result, ...]

    def as_json(self) -> dict[str, object]:
        """Return what is written to a file."""
        return {
            "benchmark": self.benchmark,
            "settings": asdict(self.settings),
            "environment": asdict(self.environment),
            "results": [asdict(result) for result in self.results],
        }

    def save(self, file: Path) -> None:
        """Write the report as JSON."""
        file.write_text(json.dumps(self.as_json(), indent=2) + "\n")


def counts_below(least: int, **named_counts: int | Sequence[int]) -> list[str]:
    """Return a problem for every count, or list of counts, that is empty or holds one below ``least``."""
    problems = []
    for name, value in named_counts.items():
        values = [value] if isinstance(value, int) else list(value)
        if not values:
            problems.append(f"{name} is empty; give at least one number")
        problems += [f"{name} holds {each}, and {least} is the least" for each in values if each < least]
    return problems


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed; ``values`` is not empty."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
