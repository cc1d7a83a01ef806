"""The test items that come with the package: prompts with their one right answer.

They were made by ``tools/small_model/make_items.py`` and hold nothing that the packaged model has been trained on,
except facts and phrases, which are to be known by heart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from deepinfer.errors import ArgumentError

PERPLEXITY_TASK = "sentence"
"""The task whose answers are not judged right or wrong but by their probability."""

_FILE = Path(__file__).resolve().parent / "items.json"


@dataclass(frozen=True, slots=True)
class EvalItem:
    """One prompt and its answer.

    Attributes:
        task: what is asked.
        distance: about how many tokens back the answer stands in the prompt; 0 where it does not.
        prompt: the text that the model continues.
        answer: what it should write before its stop token.
    """

    task: str
    distance: int
    prompt: str
    answer: str


def task_names() -> tuple[str, ...]:
    """Names of all tasks, in the order of the items."""
    return tuple(dict.fromkeys(item.task for item in _all_items()))


def load_items(tasks: Sequence[str] | None = None, limit: int | None = None) -> tuple[EvalItem, ...]:
    """Give the packaged items, row by row.

    Args:
        tasks: only these; None means all.
        limit: at most so many of every task and distance; None means all.

    Raises:
        ArgumentError: naming every unknown task, and a limit below one.
    """
    known = task_names()
    problems = [f"tasks: {task!r} is not one of {', '.join(known)}" for task in tasks or () if task not in known]
    if limit is not None and limit < 1:
        problems.append(f"limit: {limit} items are no measurement; at least 1")
    if problems:
        raise ArgumentError("evaluation items", problems)
    counts: dict[tuple[str, int], int] = {}
    chosen: list[EvalItem] = []
    for item in _all_items():
        row = (item.task, item.distance)
        if (tasks is None or item.task in tasks) and counts.setdefault(row, 0) < (limit or len(_all_items())):
            counts[row] += 1
            chosen.append(item)
    return tuple(chosen)


@cache
def _all_items() -> tuple[EvalItem, ...]:
    return tuple(EvalItem(**each) for each in json.loads(_FILE.read_text(encoding="utf-8")))
