"""The packaged checkpoint is the one that the recorded training run has made."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer.model.checkpoint import packaged_model_path
from tools.small_model.trainer import PHASES
from tools.small_model.world import DISTANCES

MADE = Path(__file__).resolve().parents[2] / "tools" / "small_model" / "made.json"


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(MADE.read_text(encoding="utf-8"))
    return record


def test_the_packaged_files_are_those_that_the_run_made(made: dict[str, Any]) -> None:
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in packaged_model_path().iterdir()}
    assert files == made["sha256"]


def test_the_record_is_enough_to_make_it_again(made: dict[str, Any]) -> None:
    assert set(made["plans"]) == set(PHASES)
    assert {"seed", "rate", "draft_rate"} <= set(made["settings"])
    assert made["processes"] >= 1
    assert made["threads"] >= 1


def test_every_skill_was_clearly_learned_and_recall_needs_the_long_range_path(made: dict[str, Any]) -> None:
    skills, control = made["skills"], made["skills without long range"]
    for task in ("sum", "json", "brackets", "facts", "phrase"):
        assert skills[task] >= 0.75, task
    far = [f"recall {distance}" for distance in DISTANCES if 100 <= distance <= 1000]
    for row in far:
        assert skills[row] >= max(0.75, 3 * control[row]), row
