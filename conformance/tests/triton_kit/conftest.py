"""The table of repairs, and what Triton's own interpreter makes of it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TABLE = Path(__file__).with_name("repairs.py")


def load(path: Path) -> ModuleType:
    """A module by its path, as it is in no package here; the same one each time."""
    name = f"triton_kit_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def repairs() -> ModuleType:
    return load(TABLE)


@pytest.fixture(scope="session")
def stock() -> dict[str, str]:
    """Name of each repair to what the unrepaired interpreter answers, asked in a process of its own."""
    command = ["env", "TRITON_INTERPRET=1", sys.executable, "-W", "ignore", str(TABLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return answers


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "repair_name" in metafunc.fixturenames:
        metafunc.parametrize("repair_name", [repair.name for repair in load(TABLE).REPAIRS])
