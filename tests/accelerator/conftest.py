"""Distributions that exist only for one test: metadata and modules in a folder that is put on the path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from deepinfer.accelerator import registry

# A driver's source, as text, so that each test can spoil the part it is about.
DRIVER = """
from deepinfer.accelerator.capabilities import Capabilities
from deepinfer.accelerator.interface import AcceleratorDriver, Availability, MemoryInfo, Reason
import torch

class Driver(AcceleratorDriver):
    name = "acme"
    interface_version = (1, 0)
    version = "7"

    @classmethod
    def availability(cls):
        return Availability((), device_name="Acme One", runtime="acme 1")

    @property
    def device(self):
        return torch.device("cpu")

    def memory(self):
        return MemoryInfo(1, 1)

    def capabilities(self):
        return Capabilities(ops={}, graphs=True)

    def op_groups(self, options):
        return {}
"""

Install = Callable[[str, Mapping[str, str], Mapping[str, str]], Path]


@pytest.fixture
def driver_source() -> str:
    return DRIVER


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function (distribution, {name: entry point}, {module: source}) that installs, or reinstalls."""
    before = set(sys.modules)

    def put(distribution: str, drivers: Mapping[str, str], modules: Mapping[str, str]) -> Path:
        folder = tmp_path / distribution
        metadata = folder / f"{distribution}-1.0.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"[{registry.GROUP}]", *(f"{name} = {value}" for name, value in drivers.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for module, source in modules.items():
            (folder / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(folder)
        return folder

    yield put
    for module in set(sys.modules) - before:
        origin = getattr(sys.modules[module], "__file__", None) or ""
        if origin.startswith(str(tmp_path)):
            del sys.modules[module]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the drivers that this environment has installed: only the test's own distributions are left."""
    everything = registry.entry_points

    def visible(*, group: str) -> list[EntryPoint]:
        return [
            point for point in everything(group=group) if point.dist is not None and point.dist.name.endswith("-dist")
        ]

    monkeypatch.setattr(registry, "entry_points", visible)
