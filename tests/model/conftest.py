"""Small checkpoints that tests may copy and damage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer.model.checkpoint import make_checkpoint
from deepinfer.model.presets import preset


@pytest.fixture(scope="session")
def sound_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny8 checkpoint in float32, three shards; never to be written to."""
    return make_checkpoint(preset("tiny8"), 7, tmp_path_factory.mktemp("sound") / "tiny8", shards=3)


@pytest.fixture(scope="session")
def released_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny8 checkpoint in the released form, three shards; never to be written to."""
    return make_checkpoint(preset("tiny8"), 7, tmp_path_factory.mktemp("sound") / "tiny8", "released", shards=3)


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a checkpoint cheaply: files are linked, so replace a file, never write into it."""

    def copy(source: Path) -> Path:
        return Path(shutil.copytree(source, tmp_path / "copy", copy_function=os.link))

    return copy
