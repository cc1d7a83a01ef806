"""A bench of the reference against itself, and results as a driver would give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.accelerator import AcceleratorDriver, registry
from deepinfer_conformance.bench import Bench
from deepinfer_conformance.catalogue import catalogue
from deepinfer_conformance.outcomes import CaseResult, Outcome
from deepinfer_conformance.report.document import Document, RunFacts, build_report
from deepinfer_conformance.report.facts import driver_facts

MakeReport = Callable[..., Document]


@pytest.fixture(scope="session")
def reference() -> AcceleratorDriver:
    return registry.load("cpu_ref")()


@pytest.fixture
def bench(reference: AcceleratorDriver) -> Bench:
    return Bench(reference, reference)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def facts(reference: AcceleratorDriver) -> dict[str, Any]:
    return driver_facts(reference)


@pytest.fixture
def passing() -> tuple[CaseResult, ...]:
    """One good result for every case of the quick profile, without running any."""
    return tuple(
        CaseResult(
            id=case.id,
            op=case.op,
            level=case.level,
            check=case.check,
            dtype=str(case.options.activation_dtype).removeprefix("torch."),
            numerics=case.options.numerics,
            kv_cache_dtype=case.options.kv_cache_dtype,
            how="device",
            outcome=Outcome.PASS,
            metric="error / bound",
            value=0.25,
            bound=1.0,
            reference_error=0.125,
            seed=0,
            input_sha256="",
            seconds=0.01,
            detail="",
        )
        for case in catalogue(0, "quick")
    )


@pytest.fixture
def make_report(facts: dict[str, Any], passing: tuple[CaseResult, ...]) -> MakeReport:
    """Build a report of the passing results, with some changed by id."""

    def make(changes: dict[str, dict[str, Any]] | None = None, **facts_changed: Any) -> Document:
        results = [dataclasses.replace(result, **(changes or {}).get(result.id, {})) for result in passing]
        run = RunFacts("quick", 0, "", (), "2026-11-29T20:00:00+00:00", 12.5)
        return build_report(results, {**facts, **facts_changed}, run, ())

    return make


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[str, str, str], Path]:
    """Make a distribution that registers a driver, without installing it: a folder for sys.path."""

    def make(name: str, module: str, source: str) -> Path:
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[deepinfer.accelerators]\n{name} = {module}:Driver\n")
        return tmp_path

    return make
