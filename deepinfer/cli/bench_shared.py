"""What the commands of `deepinfer bench` share: options of the same meaning, counts, refusals, the last lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from deepinfer.errors import ArgumentError

if TYPE_CHECKING:
    from tqdm import tqdm

    from deepinfer.bench.report import BenchReport

Made = TypeVar("Made")

SaveResult = Annotated[
    Path | None, typer.Option(metavar="FILE.json", dir_okay=False, help="Write settings, environment and results.")
]
Repeats = Annotated[int, typer.Option(help="Timed runs per case, after one that is not timed.")]
Seed = Annotated[int, typer.Option(help="Changes the random inputs.")]


def threads_text(count: int) -> str:
    """Say how many threads computed."""
    return "1 thread" if count == 1 else f"{count} threads"


def counts(option: str, text: str, problems: list[str]) -> tuple[int, ...]:
    """Return the counts of ``"1,8,32"``; what is no count of 1 or more becomes a problem."""
    numbers: list[int] = []
    for part in text.split(","):
        word = part.strip()
        if word.isascii() and word.isdigit() and int(word) > 0:
            numbers.append(int(word))
        else:
            problems.append(f"{option} {text!r}: {word!r} is no count; write whole numbers from 1, parted by commas")
    return tuple(numbers) or (1,)


def file_problems(file: Path | None) -> list[str]:
    """Say now, not after minutes of work, that a result could not be saved."""
    if file is not None and not file.absolute().parent.is_dir():
        return [f"--save-result {str(file)!r}: there is no directory {str(file.absolute().parent)!r}"]
    return []


def collect(problems: list[str], make: Callable[[], Made]) -> Made | None:
    """Return what ``make`` makes, or None, with its problems added to those found before."""
    try:
        return make()
    except ArgumentError as error:
        problems += error.problems
    return None


def checked(command: str, problems: list[str], make: Callable[[], Made]) -> Made:
    """Return what ``make`` makes; raise its problems together with those found before."""
    made = collect(problems, make)
    if made is None or problems:
        raise ArgumentError(command, problems)
    return made


def bar(total: int) -> tqdm[None]:
    """Return the bar of a benchmark of so many runs."""
    from tqdm import tqdm

    return tqdm(total=total, desc="benchmarking", unit="run", leave=False)


def finish(report: BenchReport[Any], table: str, file: Path | None) -> None:
    """Print the table and where it was measured; write all of it if a file was asked for."""
    print(table)
    environment = report.environment
    busy = "" if environment.load_average_1m is None else f", load {environment.load_average_1m:.1f}"
    print(f"{environment.cpu_model}, {environment.logical_cpus} processors{busy}; torch {environment.torch}")
    if file is not None:
        report.save(file)
