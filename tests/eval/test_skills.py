"""What README and docs/small-model.md promise of the packaged model, on the reference."""

from __future__ import annotations

import pytest

from deepinfer.engine.build import build_engine_on
from deepinfer.engine.options import EngineOptions
from deepinfer.eval import load_items, right_answers, task_names
from deepinfer.eval.items import PERPLEXITY_TASK
from deepinfer.eval.watching import WatchingDriver
from deepinfer.llm import LLM
from deepinfer.settings import Settings
from deepinfer_cpu_ref import Driver as ReferenceDriver

FARTHEST = 1500


def asked(*, long_range: bool = True) -> LLM:
    driver = WatchingDriver(ReferenceDriver(), long_range=long_range)
    return LLM.from_engine(build_engine_on(driver, None, EngineOptions(decode_graphs=False), Settings()))


@pytest.mark.parametrize("task", [name for name in task_names() if name != PERPLEXITY_TASK])
def test_every_task_is_known(task: str) -> None:
    items = [item for item in load_items([task], limit=2) if item.distance <= 300]
    assert items
    assert right_answers(asked(), items) == [True] * len(items)


def test_what_was_said_long_ago_is_found_by_the_long_range_path_alone() -> None:
    items = [item for item in load_items(["recall"], limit=2) if item.distance == FARTHEST]
    assert right_answers(asked(), items) == [True, True]
    assert right_answers(asked(long_range=False), items) == [False, False]
