"""The packaged items: what the script makes, chosen by task, every mistake named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import deepinfer.eval
from deepinfer.errors import ArgumentError
from deepinfer.eval import load_items, task_names
from tools.small_model.make_items import COUNT, items_text
from tools.small_model.world import DISTANCES, TASKS


def test_the_packaged_file_is_what_the_script_makes() -> None:
    file = Path(deepinfer.eval.__file__).parent / "items.json"
    assert file.read_text(encoding="utf-8") == items_text()


def test_every_row_has_its_items() -> None:
    rows = Counter((item.task, item.distance) for item in load_items())
    assert set(rows.values()) == {COUNT}
    assert {distance for task, distance in rows if task == "recall"} == set(DISTANCES)
    assert set(task_names()) == set(TASKS)


def test_items_are_chosen_by_task_and_limited_by_row() -> None:
    chosen = load_items(["recall", "sum"], 2)
    assert Counter(item.task for item in chosen) == {"recall": 2 * len(DISTANCES), "sum": 2}


def test_every_mistake_is_named() -> None:
    with pytest.raises(ArgumentError) as caught:
        load_items(["sums", "facts", "jsn"], 0)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["tasks", "tasks", "limit"]
